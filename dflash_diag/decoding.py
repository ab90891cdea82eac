"""Greedy decoding, plain and with drafts, and the check that both give the same tokens.

Verification feeds drafts to the target. On a target with linear attention the rejected ones stay in
its recurrent and convolution states unless these are put back, which cropping keys and values does
not do; the output then departs from plain greedy decoding, and every acceptance number measured on
the way is wrong. Here the cache is copied before anything uncertain enters it.

Symbols: P prompt tokens, G generated tokens, D proposed tokens, V vocabulary, K tapped layers,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_diag.bundle import Capture
from dflash_diag.drafter import Drafter
from dflash_diag.hidden_states import Sink, ToHost, recorded, stacked, tapped
from dflash_diag.masks import rules_of
from dflash_diag.proposals import Proposal
from dflash_diag.targets import Target

TOP = 8
"""Choices that are kept of every distribution."""

LOGIT_BYTES = 128 * 2**20
"""Logits made at one time, counted in float32."""

_REFRESH_AFTER = 16
"""Committed tokens that may lie between the cache's copy and the anchor."""


@dataclass(frozen=True, eq=False)
class Continuation:
    """What greedy decoding made of one prompt: the target's own, or one that was given."""

    ids: list[int]
    ended: bool
    """Whether it ended with an end-of-sequence token."""
    top_ids: Tensor | None = field(repr=False, default=None)
    """[G, 8] the highest logits of each step, for measuring noise; None where it was given."""
    top_logits: Tensor | None = field(repr=False, default=None)
    origin: str = "target"
    """``target``, or what a server gave: see `Served.how`."""
    finish_reason: str | None = None
    """In the server's words."""


@torch.inference_mode()
def greedy(
    target: Target,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    tick: Callable[[], None] = lambda: None,
) -> list[Continuation]:
    """Plain greedy decoding, one token a step, of several prompts side by side.

    Prompts of unequal length are padded on the left and masked. Whether a target handles that
    cleanly is not taken on trust: `decode_gap` measures it without padding.

    Parameters
    ----------
    tick
        Called after every step.
    """
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=target.device)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt, device=target.device)
        mask[row, longest - len(prompt) :] = 1
    ragged = not bool(mask.all())
    cache = target.caches.new()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    done = torch.zeros(len(prompts), dtype=torch.bool, device=target.device)
    eos = torch.tensor(sorted(target.eos_ids), dtype=torch.long, device=target.device)
    for _ in range(max_new_tokens):
        padding = {"attention_mask": mask, "position_ids": positions} if ragged else {}
        logits = target.logits(ids, cache=cache, last_only=True, **padding)[:, -1].float()
        chosen = logits.argmax(-1)
        top = logits.topk(min(TOP, logits.shape[-1]))
        made.append((chosen, top.indices, top.values))
        tick()
        done |= torch.isin(chosen, eos)
        if bool(done.all()):
            break
        ids = chosen[:, None]
        positions = positions[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
    chosen, top_ids, top_logits = (
        torch.stack(part, dim=1).cpu() for part in zip(*made, strict=True)
    )
    return [
        _continuation(chosen[i], top_ids[i], top_logits[i], target) for i in range(len(prompts))
    ]


def _continuation(chosen: Tensor, ids: Tensor, logits: Tensor, target: Target) -> Continuation:
    tokens = chosen.tolist()
    end = next((i for i, token in enumerate(tokens) if token in target.eos_ids), None)
    length = len(tokens) if end is None else end + 1
    return Continuation(tokens[:length], end is not None, ids[:length], logits[:length])


@dataclass(frozen=True, eq=False)
class Forced:
    """One teacher-forced forward over a whole sequence of T tokens.

    Logits are made when they are asked for, some rows at a time: those of 2,048 positions over
    248,320 words are 1 GiB.
    """

    states: dict[int, Tensor]
    """Layer id to raw states [T, H] (or the rows asked for) in host memory."""
    n_tokens: int
    _source: Tensor = field(repr=False)
    """[T, H] what the head reads; or logits [T, V] where the head alone does not make them."""
    _head: Callable[[Tensor], Tensor] = field(repr=False)
    _rows_at_once: int = field(repr=False)

    def logits(self, positions: Tensor | None = None) -> Iterator[Tensor]:
        """Logits of some positions, or of all, in slices [n, V] that are dropped one by one.

        The row of position t is the distribution of token t+1.
        """
        hidden = self._source
        if positions is not None:
            hidden = hidden[positions.to(hidden.device)]
        for rows in hidden.split(self._rows_at_once):
            yield self._made(rows)

    @torch.inference_mode()
    def _made(self, rows: Tensor) -> Tensor:
        return self._head(rows)

    def row(self, position: int) -> Tensor:
        """Logits [V] of one position."""
        (logits,) = self.logits(torch.tensor([position]))
        return logits[0]


@torch.inference_mode()
def teacher_forced(
    target: Target,
    tokens: Sequence[int],
    layer_ids: Sequence[int] = (),
    *,
    rows: Tensor | None = None,
    sink: Sink | None = None,
) -> Forced:
    """Run the target once over ``tokens``, without a cache.

    The model computes the logits of the last position only. Its other rows come from the states
    behind the final norm, which are kept; that these and the head make the model's logits is proved
    on the last row, bit for bit. Where they do not, the model runs again for all of them.

    Parameters
    ----------
    rows
        Positions [R] whose states are wanted; all if None.
    sink
        Takes each layer's states [R, H] in host memory while the forward goes on, in place of
        ``Forced.states``.
    """
    ids = torch.tensor([list(tokens)])
    states: dict[int, Tensor] = {}
    copies = ToHost(sink or states.__setitem__, rows)
    normed: list[Tensor] = []
    handle = target.parts.final_norm.register_forward_hook(
        lambda _module, _args, output: normed.append(output)
    )
    try:
        with tapped(target.parts, layer_ids, copies):
            last = target.logits(ids, last_only=True)
    finally:
        handle.remove()
    copies.finish()
    n = len(tokens)
    at_once = max(1, LOGIT_BYTES // (4 * last.shape[-1]))
    if target.can_skip_logits and len(normed) == 1 and normed[0].shape[:2] == (1, n):
        own = target.head_logits(normed[0][:, -1:])
        if torch.equal(own.to(last), last):
            return Forced(states, n, normed[0][0], target.head_logits, at_once)
    return Forced(states, n, target.logits(ids)[0], _unchanged, at_once)


def _unchanged(logits: Tensor) -> Tensor:
    return logits


def decode_gap(forced: Forced, n_prompt: int, ids: Sequence[int]) -> Tensor:
    """How far each generated token lies below the teacher-forced choice: [G] in logits, 0 = equal.

    Rounding gives gaps of the size of `logit_noise`. Anything larger means that decoding with this
    target's cache does not compute what its plain forward computes.
    """
    highest, own = [], []
    for rows, chosen in _beside(forced, n_prompt, torch.tensor(list(ids))[:, None]):
        highest.append(rows.amax(-1).float())
        own.append(rows.gather(-1, chosen)[:, 0].float())
    return (torch.cat(highest) - torch.cat(own)).cpu()


def logit_noise(forced: Forced, n_prompt: int, made: Continuation) -> float:
    """Largest difference between the two ways of computing one logit.

    Step by step with a cache, and teacher-forced in one forward, over the eight highest logits of
    every generated position.

    Raises
    ------
    ValueError
        The continuation was not decoded but given.
    """
    if made.top_ids is None or made.top_logits is None:
        raise ValueError("a continuation that was not decoded has no logits to compare")
    again = [rows.gather(-1, ids) for rows, ids in _beside(forced, n_prompt, made.top_ids)]
    return float((torch.cat(again).float().cpu() - made.top_logits).abs().max())


def _beside(forced: Forced, n_prompt: int, ids: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Slices of the logits of the generated positions, each with its rows of ``ids`` [G, …]."""
    at = 0
    for rows in forced.logits(torch.arange(n_prompt - 1, n_prompt - 1 + len(ids))):
        yield rows, ids[at : at + len(rows)].to(rows.device)
        at += len(rows)


class Proposer(Protocol):
    """Anything that drafts tokens from the states of committed tokens."""

    taps: tuple[int, ...]
    """Layers whose states it wants."""

    def begin(self) -> None:
        """A new sequence starts."""

    def observe(self, states: Tensor) -> None:
        """Raw states [n, K, H] of the next n committed tokens."""

    def propose(self, token: int, position: int) -> list[int]:
        """Draft the tokens after the anchor ``token`` at ``position``.

        Every position below the anchor has been observed, and none from it on.
        """


class DrafterProposer:
    """A DFlash drafter as a server runs it: one block, context strictly below the anchor.

    Parameters
    ----------
    embedding
        [V, H] that the drafter's tokens are embedded with.
    proposal
        From what the head reads to proposed tokens.
    final_norm
        The target's final norm and the id of its last layer, for conventions with
        ``last_layer_normed``.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        embedding: Tensor,
        proposal: Proposal,
        final_norm: tuple[int, Callable[[Tensor], Tensor]] | None = None,
    ) -> None:
        self.drafter, self.embedding, self.proposal = drafter, embedding, proposal
        self.taps = drafter.convention.taps
        self._norm = final_norm if drafter.convention.last_layer_normed else None
        self._features: list[Tensor] = []

    def begin(self) -> None:
        self._features = []

    def observe(self, states: Tensor) -> None:
        if self._norm is not None:
            last, norm = self._norm
            taps = [
                norm(s) if t == last else s
                for t, s in zip(self.taps, states.unbind(1), strict=True)
            ]
            states = torch.stack(taps, dim=1)
        weight = self.drafter.fc.weight
        self._features.append(self.drafter.features(states.to(weight.device, weight.dtype)))

    def propose(self, token: int, position: int) -> list[int]:
        how = self.drafter.convention
        features = torch.cat(self._features)[None, :position]
        device = features.device
        tokens = torch.full((how.block_size,), how.mask_token_id)
        tokens[0] = token
        noise = self.embedding[tokens.to(self.embedding.device)] * how.embedding_scale
        slots = torch.arange(how.block_size, device=device)
        masks = [rule.serving(position, device)[None] for rule in rules_of(how)]
        hidden = self.drafter(
            noise.to(features)[None],
            (position + how.position_offset + slots)[None],
            features,
            torch.arange(position, device=device)[None],
            masks,
        )
        read = hidden[:, how.first_slot : how.first_slot + how.n_proposed]
        return self.proposal.ids(read, tokens[:1].to(device))[0].tolist()


@dataclass(frozen=True)
class Round:
    """One verification: ``accepted`` of ``proposed`` drafts, after the token at ``anchor``."""

    anchor: int
    proposed: int
    accepted: int


@dataclass(frozen=True)
class Decoded:
    """Output of `draft_and_verify`."""

    ids: list[int]
    rounds: list[Round]

    def complete_rounds(self, n_prompt: int) -> list[int]:
        """Accepted + 1 of the rounds whose whole block lies inside the output.

        These are the rounds that a walk over scored anchors visits.
        """
        last = n_prompt + len(self.ids) - 1
        return [r.accepted + 1 for r in self.rounds if r.anchor + r.proposed <= last]


@torch.inference_mode()
def draft_and_verify(
    target: Target,
    proposer: Proposer,
    prompt: Sequence[int],
    max_new_tokens: int,
) -> Decoded:
    """Greedy speculative decoding that is exact on every kind of target.

    The cache is copied once the prompt is in it. A round puts the copy back, runs the tokens
    committed since then together with the drafts, and keeps what agrees. When 16 tokens have
    gathered they are run alone and the copy is renewed, so that no draft ever enters it.
    """
    tokens = list(prompt)
    cache = target.caches.new()
    rounds: list[Round] = []
    with recorded(target.parts, proposer.taps) as kept:
        logits = target.logits(torch.tensor([tokens]), cache=cache, last_only=True)
        proposer.begin()
        proposer.observe(stacked(kept, proposer.taps))
        copy, inside = target.caches.snapshot(cache), len(tokens)
        tokens.append(int(logits[0, -1].argmax()))
        end = len(prompt) + max_new_tokens
        while len(tokens) < end and tokens[-1] not in target.eos_ids:
            anchor = len(tokens) - 1
            drafts = proposer.propose(tokens[-1], anchor)
            target.caches.restore(cache, copy)
            logits = target.logits(torch.tensor([tokens[inside:] + drafts]), cache=cache)
            chosen = logits[0, anchor - inside :].argmax(-1).tolist()
            accepted = _agreeing(drafts, chosen)
            rounds.append(Round(anchor, len(drafts), accepted))
            states = stacked(kept, proposer.taps)
            proposer.observe(states[anchor - inside : anchor - inside + accepted + 1])
            tokens += _until_end(chosen[: accepted + 1], target.eos_ids)[: end - len(tokens)]
            if len(tokens) - 1 - inside > _REFRESH_AFTER:
                target.caches.restore(cache, copy)
                target.logits(torch.tensor([tokens[inside:-1]]), cache=cache, last_only=True)
                copy, inside = target.caches.snapshot(cache), len(tokens) - 1
    return Decoded(tokens[len(prompt) :], rounds)


def _agreeing(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Leading drafts that equal the target's choices."""
    return next((k for k, draft in enumerate(drafts) if draft != chosen[k]), len(drafts))


def _until_end(ids: list[int], eos: Iterable[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in frozenset(eos)), len(ids) - 1)
    return ids[: end + 1]


@dataclass(frozen=True)
class Mismatch:
    """The first token at which an output departs from plain greedy decoding."""

    prompt: str
    position: int
    """Absolute position of the token."""
    expected: int
    got: int | str | None
    margin: float
    """The target's first logit minus its second, there."""
    kind: str
    """``rounding`` if the margin is within the noise floor, else ``state_fault``."""

    def to_json(self) -> dict[str, Any]:
        """Its fields; the prompt's under the key ``id``."""
        return {
            "id": self.prompt,
            "position": self.position,
            "expected": self.expected,
            "got": self.got,
            "margin": self.margin,
            "kind": self.kind,
        }


@dataclass(frozen=True)
class Lossless:
    """Speculative output against plain greedy output, token for token, over prompts."""

    checked: int
    ok: int
    """Prompts without a state fault."""
    exact: int
    """Prompts without any mismatch."""
    noise_floor: float
    """Margin, in logits, below which two correct computations may choose differently."""
    how: str
    """How the floor was measured."""
    mismatches: list[Mismatch]
    rounds: dict[str, list[int]] = field(default_factory=dict)
    """Per prompt: accepted + 1 of each complete round."""

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``score --json``; the rounds are left out."""
        return {
            "checked": self.checked,
            "ok": self.ok,
            "exact": self.exact,
            "noise_floor": self.noise_floor,
            "how": self.how,
            "mismatches": [m.to_json() for m in self.mismatches],
        }


NOISE = (
    "twice the largest difference, over the eight highest logits of every generated position, "
    "between decoding with a cache token by token and one teacher-forced forward"
)


@dataclass(frozen=True)
class Expected:
    """Plain greedy output that another way of decoding must reproduce."""

    id: str
    prompt: list[int]
    ids: list[int]
    noise: float
    """`logit_noise` of this prompt."""


def expect(
    target: Target,
    prompts: Iterable[tuple[str, Sequence[int]]],
    max_new_tokens: int,
    *,
    tick: Callable[[], None] = lambda: None,
) -> list[Expected]:
    """Decode prompts ``(id, ids)`` plainly, one by one, and measure the noise.

    Parameters
    ----------
    tick
        Called after each prompt.
    """
    found = []
    for name, prompt in prompts:
        made = greedy(target, [prompt], max_new_tokens)[0]
        forced = teacher_forced(target, [*prompt, *made.ids])
        noise = logit_noise(forced, len(prompt), made) or 0.0
        found.append(Expected(name, list(prompt), made.ids, noise))
        tick()
    return found


def expect_as_captured(target: Target, capture: Capture) -> list[Expected]:
    """Plain greedy output of this target, taken from its capture where that is the same arithmetic.

    Another backend, dtype or device rounds differently, and tokens that a server or another capture
    gave need not be this target's; its own are then decoded anew.

    Raises
    ------
    CaptureError
        The capture is of another target.
    """
    if target.folder is not None:
        capture.check_target(target.folder)
    theirs, ours = capture.target_facts, target.facts()
    same = (
        "like" not in capture.facts
        and all(theirs.get(k) == ours[k] for k in ("dtype", "device"))
        and all(
            theirs.get("backend", {}).get(k) == ours["backend"][k]
            for k in ("linear", "form", "convolution")
        )
    )
    prompts = [
        (p.id, capture.tokens(i)[: p.n_prompt_tokens].tolist())
        for i, p in enumerate(capture.prompts)
    ]
    if not same or capture.reference is not None:
        return expect(target, prompts, capture.max_new_tokens)
    return [
        Expected(name, ids, capture.continuation(i).tolist(), capture.prompts[i].logit_noise or 0.0)
        for i, (name, ids) in enumerate(prompts)
    ]


def check_lossless(
    target: Target,
    proposer: Proposer,
    expected: Sequence[Expected],
    max_new_tokens: int,
    *,
    decode: Callable[..., Decoded] = draft_and_verify,
    tick: Callable[[], None] = lambda: None,
) -> Lossless:
    """Decode every prompt with drafts and compare with plain greedy decoding.

    Where an output departs within the noise floor the rest is still checked: each later token must
    be the target's choice after *this* output, up to the floor.

    Parameters
    ----------
    decode
        The loop to check, called like `draft_and_verify`.
    tick
        Called after each prompt.
    """
    floor = 2 * max((e.noise for e in expected), default=0.0)
    mismatches: list[Mismatch] = []
    rounds = {}
    for one in expected:
        decoded = decode(target, proposer, one.prompt, max_new_tokens)
        mismatches += departures(target, one, decoded.ids, floor)
        rounds[one.id] = decoded.complete_rounds(len(one.prompt))
        tick()
    faulty = {m.prompt for m in mismatches if m.kind == "state_fault"}
    return Lossless(
        checked=len(expected),
        ok=len(expected) - len(faulty),
        exact=len(expected) - len({m.prompt for m in mismatches}),
        noise_floor=floor,
        how=NOISE,
        mismatches=mismatches,
        rounds=rounds,
    )


def departures(
    target: Target, expected: Expected, got: Sequence[int], floor: float
) -> list[Mismatch]:
    """Where ``got`` departs from plain greedy output: the first place, and a fault after it."""
    at = first_difference(expected.ids, got)
    if at is None:
        return []
    tokens = [*expected.prompt, *got]
    forced = teacher_forced(target, tokens)
    n_prompt = len(expected.prompt)
    margin = top_margin(forced.row(n_prompt - 1 + at))
    kind = "rounding" if margin <= floor else "state_fault"
    token = got[at] if at < len(got) else None
    wanted = expected.ids[at] if at < len(expected.ids) else -1
    found = [Mismatch(expected.id, n_prompt + at, wanted, token, margin, kind)]
    if kind == "rounding":
        gaps = decode_gap(forced, n_prompt, got)
        later = next((i for i in range(at, len(got)) if float(gaps[i]) > floor), None)
        if later is not None:
            row = forced.row(n_prompt - 1 + later)
            choice = int(row.argmax())
            found.append(
                Mismatch(
                    expected.id,
                    n_prompt + later,
                    choice,
                    got[later],
                    top_margin(row),
                    "state_fault",
                )
            )
    return found


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs, the shorter one's end included; None if equal."""
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def top_margin(logits: Tensor) -> float:
    """First logit minus second, of one distribution [V]."""
    first, second = logits.float().topk(2).values.tolist()
    return float(first - second)
