"""From what the head reads to proposed tokens: the step in which drafters differ most.

A plain DFlash drafter proposes each slot's most probable token. DSpark's conditions each slot on
the token proposed before it, DFlash2's walks through candidates with a learned selector. All of
them stand behind `Proposal`, so that scoring, decoding and probes never assume a per-slot argmax.

Shapes: M blocks, D proposed tokens, H hidden size, V vocabulary of the target, V_d of the drafter,
W stored candidates, k candidates of a selector.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dflash_diag.additions import CandidateSelector, MarkovHead
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.errors import BadInput
from dflash_diag.rating import ordered_top, rank_of, rate

STORED = 64
"""Candidates a slot that are kept: enough for every tree of up to 64 nodes."""
SLICE_BYTES = 64 * 2**20
"""Logits held at one time on a CPU; rows in a slice shrink as the vocabulary grows."""
LARGE_SLICE_BYTES = 2**30
"""The same on a GPU, where a product of few rows would wait for the head's weights."""


def room_for_logits(device: torch.device) -> int:
    """Bytes of logits to hold at one time: on a GPU at most a quarter of what is free."""
    if device.type != "cuda":
        return SLICE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(SLICE_BYTES, min(LARGE_SLICE_BYTES, free // 4))


@dataclass(frozen=True, eq=False)
class Proposed:
    """What a drafter proposes for M blocks, and how it rates the target's own tokens.

    Ids are the target's. A slot's ratings are those that led to its proposal. Where a drafter
    conditions them on the tokens before, these are the tokens that it proposed itself, as when it
    is served: rank 0 is always the proposal, and the leading labels of rank 0 are those accepted.
    Behind the first wrong proposal, though, a slot is rated after a token that the target would not
    have said; and a tree made of these ratings takes them as they are on every branch, while a
    server's would ask the drafter again after each.

    A token that cannot be proposed at a slot, because the drafter's vocabulary lacks it or because
    it is not among the selector's candidates, has rank V and log-probability -inf.
    """

    ids: Tensor
    """[M, D] int64."""
    rank: Tensor
    """[M, D] int32: tokens rated above the label, 0 if it is the top choice; counted in full over
    the drafter's vocabulary."""
    label_logprob: Tensor
    """[M, D] float32, in nats."""
    topk_ids: Tensor
    """[M, D, W] int32, best first, W being 64 or all that can be proposed; equal ones by ascending
    id in the drafter's vocabulary."""
    topk_logprobs: Tensor
    """[M, D, W] float32."""

    def shaped(self, labels: Tensor) -> Proposed:
        """With the shape of ``labels`` in place of the first dimension."""
        return Proposed(*(one.unflatten(0, labels.shape) for one in _parts(self)))


class Proposal(Protocol):
    """The step from hidden states to proposed ids."""

    head: Head

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Proposed ids [M, D] for ``hidden`` [M, D, H] and the anchors' tokens [M]."""

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        """The same with candidates, and the rating of ``labels`` [M, D]."""


class Head:
    """A slot's logits over the drafter's vocabulary, and the target's names for its tokens.

    Parameters
    ----------
    weight
        [V_d, H].
    convention
        Its ``logit_scale`` and ``softcap`` shape the distribution.
    n_target
        V; V_d by default.
    target_ids
        [V_d] the target's id of each of the drafter's tokens; its own id by default.
    slice_bytes
        Size of the logits held at one time, in bytes; by default what `room_for_logits` says.
    """

    def __init__(
        self,
        weight: Tensor,
        convention: Convention,
        *,
        n_target: int | None = None,
        target_ids: Tensor | None = None,
        slice_bytes: int | None = None,
    ) -> None:
        self.weight, self.target_ids = weight, target_ids
        self.slice_bytes = slice_bytes or room_for_logits(weight.device)
        self.n_target = len(weight) if n_target is None else n_target
        self.scale, self.softcap = convention.logit_scale, convention.softcap
        self.width = min(STORED, len(weight))
        """Candidates that are kept."""
        self._draft_ids: Tensor | None = None
        if target_ids is not None or len(weight) != self.n_target:
            own = torch.arange(len(weight), device=weight.device)
            self._draft_ids = own.new_full((self.n_target,), -1)
            self._draft_ids[own if target_ids is None else target_ids] = own
        size = weight.element_size() if weight.is_cuda and self.is_plain else 4
        self.rows = max(1, self.slice_bytes // (size * len(weight)))
        """Rows of logits held at one time."""
        self._held = threading.local()

    def logits(self, hidden: Tensor, *, once: bool = False) -> Tensor:
        """[..., V_d] float32.

        Parameters
        ----------
        once
            They are only needed until this thread asks for the next: memory that stays where it is
            costs a CPU less than memory that is given back and fetched.
        """
        held = self._held_for(hidden) if once else None
        logits = torch.matmul(hidden, self.weight.T, out=held).float()
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def _held_for(self, hidden: Tensor) -> Tensor | None:
        """Memory for the logits of [n, H]; None where it would not pay."""
        if hidden.is_cuda or hidden.requires_grad or self.weight.requires_grad:
            return None
        held: Tensor | None = getattr(self._held, "logits", None)
        if held is None or len(held) < len(hidden) or held.dtype != hidden.dtype:
            held = self._held.logits = hidden.new_empty(len(hidden), len(self.weight))
        return held[: len(hidden)]

    def in_target(self, ids: Tensor) -> Tensor:
        """The target's ids of the drafter's tokens ``ids``."""
        return ids if self.target_ids is None else self.target_ids[ids]

    def rated(self, logits: Tensor, labels: Tensor) -> Proposed:
        """The rows' candidates and the rating of their labels.

        Parameters
        ----------
        logits
            [n, V_d]; overwritten.
        labels
            [n] in the target's vocabulary.

        Returns
        -------
        Proposed
            With n in place of M, D.
        """
        known = None if self._draft_ids is None else self._draft_ids[labels]
        label = (labels if known is None else known.clamp(min=0))[:, None]
        own = logits.gather(-1, label)
        values, found = ordered_top(logits, self.width)
        rank = rank_of(logits, own, label, found)
        # The last use of the logits, so in place.
        top = values[:, :1]
        norm = logits.sub_(top).exp_().sum(-1, keepdim=True).log_() + top
        logprob = (own - norm)[:, 0]
        if known is not None:
            rank[known < 0], logprob[known < 0] = self.n_target, -math.inf
        ids = self.in_target(found)
        return Proposed(ids[:, 0], rank, logprob, ids.int(), values - norm)

    @property
    def is_plain(self) -> bool:
        """Whether logits are a matrix product and nothing else, over the target's vocabulary."""
        return self.scale == 1.0 and not self.softcap and self._draft_ids is None

    def rated_from(self, hidden: Tensor, labels: Tensor) -> Proposed:
        """The same for what the head reads [n, H]; on a GPU without logits in float32."""
        if not (hidden.is_cuda and self.is_plain):
            return self.rated(self.logits(hidden, once=True), labels)
        found = rate(hidden @ self.weight.T, labels, self.width)
        return Proposed(found.ids[:, 0].long(), *found)


class Argmax:
    """Every slot proposes its most probable token, whatever the others do."""

    def __init__(self, head: Head) -> None:
        self.head = head

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        del anchors
        rows = hidden.flatten(0, -2).split(self.head.rows)
        ids = torch.cat([self.head.logits(part).argmax(-1) for part in rows])
        return self.head.in_target(ids).view(hidden.shape[:-1])

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        del anchors
        made = _room((labels.numel(),), self.head.width, hidden.device)
        flat, wanted = hidden.flatten(0, -2), labels.flatten()
        for part in _equal_parts(len(flat), self.head.rows):
            _put(made, part, self.head.rated_from(flat[part], wanted[part]))
        return made.shaped(labels)


class Markov:
    """A slot's logits are biased by the token proposed for the slot before, the anchor at first.

    ``logit_scale`` and ``softcap`` shape the logits before the bias is added.
    """

    def __init__(self, head: Head, bias: MarkovHead) -> None:
        self.head, self.bias = head, bias

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        ids = torch.empty(hidden.shape[:2], dtype=torch.long, device=hidden.device)

        def propose(at: tuple[slice, int], logits: Tensor) -> Tensor:
            ids[at] = self.head.in_target(logits.argmax(-1))
            return ids[at]

        self._walk(hidden, anchors, propose)
        return ids

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        made = _room(tuple(labels.shape), self.head.width, hidden.device)

        def propose(at: tuple[slice, int], logits: Tensor) -> Tensor:
            _put(made, at, self.head.rated(logits, labels[at]))
            return made.ids[at]

        self._walk(hidden, anchors, propose)
        return made

    def _walk(
        self,
        hidden: Tensor,
        anchors: Tensor,
        propose: Callable[[tuple[slice, int], Tensor], Tensor],
    ) -> None:
        """Slot by slot over some blocks at a time; ``propose`` takes logits [n, V_d] to ids [n]."""
        m, d, _ = hidden.shape
        for start in range(0, m, self.head.rows):
            part = slice(start, start + self.head.rows)
            previous = anchors[part]
            state = self.bias.start(len(previous))
            for slot in range(d):
                read = hidden[part, slot]
                state, latent = self.bias.step(state, previous, read)
                logits = self.head.logits(read).add_(latent @ self.bias.markov_w2.T)
                previous = propose((part, slot), logits)


class Selector:
    """From left to right, the best of a slot's candidates after the token chosen before.

    Candidates are the tokens with the k highest logits. Each is rated by its logit and by how the
    selector likes it after the token before; the distribution is over the candidates alone.
    """

    def __init__(self, head: Head, selector: CandidateSelector) -> None:
        self.head, self.selector = head, selector
        self.n_candidates = selector.shape.n_candidates

    def ids(self, hidden: Tensor, anchors: Tensor) -> Tensor:
        return self._walk(hidden, anchors)[0][..., 0]

    def score(self, hidden: Tensor, anchors: Tensor, labels: Tensor) -> Proposed:
        ids, logprobs = self._walk(hidden, anchors)
        at = ids == labels[..., None]
        there = at.any(-1)
        own = at.int().argmax(-1)
        logprob = logprobs.gather(-1, own[..., None])[..., 0]
        return Proposed(
            ids=ids[..., 0],
            rank=torch.where(there, own, self.head.n_target).int(),
            label_logprob=logprob.masked_fill(~there, -math.inf),
            topk_ids=ids[..., :STORED].int(),
            topk_logprobs=logprobs[..., :STORED],
        )

    def _walk(self, hidden: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Each slot's candidates [M, D, k], best first, and their log-probabilities."""
        m, d, _ = hidden.shape
        shape = (m, d, self.n_candidates)
        unary, ids = hidden.new_empty(shape, dtype=torch.float32), anchors.new_empty(shape)
        flat = hidden.flatten(0, 1)
        for start in range(0, m * d, self.head.rows):
            part = slice(start, start + self.head.rows)
            found = ordered_top(self.head.logits(flat[part]), self.n_candidates)
            unary.view(m * d, -1)[part], ids.view(m * d, -1)[part] = found
        # By ascending id, so that equal scores are ordered like everywhere.
        ids, order = ids.sort(-1)
        unary = unary.gather(-1, order)
        size = 4 * self.n_candidates * self.selector.shape.rank
        blocks = max(1, self.head.slice_bytes // size)
        for start in range(0, m, blocks):
            part = slice(start, start + blocks)
            projected = self.selector.hidden_projection(hidden[part])
            previous = anchors[part]
            for slot in range(d):
                at = (part, slot)
                liked = self.selector.transitions(previous, projected[:, slot], ids[at])
                scores, order = (unary[at] + liked).sort(dim=-1, descending=True, stable=True)
                ids[at], unary[at] = ids[at].gather(-1, order), scores
                previous = ids[at][:, 0]
        return ids, unary.log_softmax(-1)


def _equal_parts(n: int, most: int) -> Iterator[slice]:
    """``n`` rows in as few parts as can be, none larger than ``most``, all but one of one size."""
    size = -(-n // -(-n // most)) if n else 1
    return (slice(start, start + size) for start in range(0, n, size))


def _room(shape: tuple[int, ...], width: int, device: torch.device) -> Proposed:
    """Memory for the ratings of ``shape`` slots."""
    return Proposed(
        ids=torch.empty(shape, dtype=torch.long, device=device),
        rank=torch.empty(shape, dtype=torch.int32, device=device),
        label_logprob=torch.empty(shape, device=device),
        topk_ids=torch.empty(*shape, width, dtype=torch.int32, device=device),
        topk_logprobs=torch.empty(*shape, width, device=device),
    )


def _parts(made: Proposed) -> Iterable[Tensor]:
    return (getattr(made, field.name) for field in dataclasses.fields(Proposed))


def _put(made: Proposed, at: slice | tuple[slice, int], rated: Proposed) -> None:
    for whole, part in zip(_parts(made), _parts(rated), strict=True):
        whole[at] = part


PROPOSALS = ("argmax", "markov", "selector")


def make_proposal(
    convention: Convention,
    head: Tensor,
    drafter: Drafter | None = None,
    *,
    slice_bytes: int | None = None,
) -> Proposal:
    """The proposal step that a convention names.

    Parameters
    ----------
    head
        [V, H] the target's. With ``head=target`` it is used as a whole, even where the drafter has
        a map of a reduced vocabulary, as the stacks do that ignore such maps.
    drafter
        Has what the convention says is its own: head, map, Markov head or selector.
    slice_bytes
        Size of the logits held at one time, in bytes; by default what `room_for_logits` says.

    Raises
    ------
    BadInput
        An unknown name, a part that the drafter does not have, or one that does not fit the rest.
    """
    if convention.proposal not in PROPOSALS:
        raise BadInput(f"proposal={convention.proposal}", f"one of {', '.join(PROPOSALS)}")
    rows = _head(convention, head, drafter, slice_bytes)
    if convention.proposal == "markov":
        return _markov(rows, None if drafter is None else drafter.markov_head)
    if convention.proposal == "selector":
        return _selector(rows, None if drafter is None else drafter.candidate_selector)
    return Argmax(rows)


def _markov(head: Head, bias: MarkovHead | None) -> Markov:
    if bias is None:
        raise BadInput("proposal=markov", "a drafter with a Markov head")
    if bias.shape.n_biased != len(head.weight):
        raise BadInput(
            f"markov_head.markov_w2 has {bias.shape.n_biased} rows",
            f"{len(head.weight)}, those of the head",
        )
    _check_tokens("markov_head.markov_w1", bias.shape.n_before, head)
    return Markov(head, bias)


def _selector(head: Head, selector: CandidateSelector | None) -> Selector:
    if selector is None:
        raise BadInput("proposal=selector", "a drafter with a candidate selector")
    if head.target_ids is not None:
        raise BadInput("a candidate selector over a reduced vocabulary", "the full vocabulary")
    if selector.shape.n_candidates > len(head.weight):
        raise BadInput(
            f"selector_top_k is {selector.shape.n_candidates}",
            f"at most {len(head.weight)}, the rows of the head",
        )
    _check_tokens("the selector's codebooks", selector.shape.n_tokens, head)
    return Selector(head, selector)


def _check_tokens(name: str, rows: int, head: Head) -> None:
    """A table must have a row for every token that may stand before a slot or be proposed."""
    if rows < head.n_target:
        raise BadInput(f"{name}: {rows} rows", f"at least {head.n_target}, one a token")


def _head(
    convention: Convention, head: Tensor, drafter: Drafter | None, slice_bytes: int | None
) -> Head:
    if convention.head == "target":
        return Head(head, convention, slice_bytes=slice_bytes)
    if drafter is None or drafter.lm_head is None:
        raise BadInput("head=own", "a drafter with a head of its own (lm_head.weight)")
    rows = drafter.lm_head.out_features
    if rows > len(head):
        raise BadInput(f"lm_head.weight has {rows} rows", f"at most {len(head)}, as the target's")
    return Head(
        drafter.lm_head.weight,
        convention,
        n_target=len(head),
        target_ids=_target_ids(convention, drafter.d2t, len(head)),
        slice_bytes=slice_bytes,
    )


def _target_ids(convention: Convention, d2t: Tensor | None, n_target: int) -> Tensor | None:
    """What ``d2t`` says under the convention: one id of the target for each draft token."""
    kind = convention.vocabulary_map
    if kind == "none":
        return None
    if d2t is None:
        raise BadInput(f"vocabulary_map={kind}", "a drafter with a map (d2t)")
    ids = d2t + torch.arange(len(d2t), device=d2t.device) if kind == "offset" else d2t
    other = "absolute" if kind == "offset" else "offset"
    do = f"if it is a map of the other kind: --set vocabulary_map={other}"
    outside = (ids < 0) | (ids >= n_target)
    if bool(outside.any()):
        token = int(ids[outside][0])
        found = f"d2t read as {kind} ids leads to token {token}"
        raise BadInput(found, f"tokens below {n_target}, the target's vocabulary", do)
    if len(ids.unique()) != len(ids):
        found = f"d2t read as {kind} ids leads to only {len(ids.unique())} tokens"
        raise BadInput(found, f"{len(ids)}, one for each row of the drafter's head", do)
    return ids
