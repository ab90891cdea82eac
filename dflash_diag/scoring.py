"""Score a drafter on a capture: every anchor, in one batched pass a sequence.

A target's greedy continuation does not depend on the drafter, so what a drafter would propose after
every generated token can be computed without decoding. Each sequence's context keys and values are
computed once; the blocks of all its anchors share them, each seeing the rows that the serving rule
shows it. Float32 gives the accepted lengths of scoring one block at a time.

Symbols: N prompts, P prompt tokens, G generated tokens, T tokens, A anchors, B block size,
D proposed tokens, K tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from dflash_diag.blocks import context_rows, draft_blocks
from dflash_diag.bundle import Capture, CapturedPrompt
from dflash_diag.conventions import Convention
from dflash_diag.decoding import DrafterProposer
from dflash_diag.drafter import Drafter
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.progress import progress
from dflash_diag.proposals import Proposal, Proposed, make_proposal
from dflash_diag.storage import StrPath, atomic_write, read_json, read_parquet, write_json

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

SCHEMA = "dflash_diag.scores/1"
_COLUMNS = ("prompt", "anchor", "label", "proposed", "rank", "label_logprob")
"""Of the table that `Scores.save` writes, what `Scores.load` reads."""
SMALL = 2**22
"""Numbers in the first projection of a drafter whose products are over before threads that share
them have met."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Scores:
    """What a drafter proposes at every anchor, beside what the target says.

    Rows are ordered by prompt and position; the anchors of a prompt are P .. P+G-1-D.
    """

    prompt_ids: list[str]
    """The N prompts that have anchors."""
    n_prompt_tokens: NDArray[np.integer]
    """[N] P."""
    n_generated: NDArray[np.integer]
    """[N] G."""
    unscored: list[dict[str, Any]]
    """Prompts without a complete block: ``id`` and ``reason``."""
    prompt: NDArray[np.int32]
    """[A] index into ``prompt_ids``."""
    anchor: NDArray[np.int32]
    """[A] absolute position."""
    labels: NDArray[np.int64]
    """[A, D] the target's greedy tokens."""
    proposed: NDArray[np.int64]
    """[A, D] the drafter's."""
    rank: NDArray[np.int32]
    """[A, D] rank of the label in the drafter's distribution, 0 being its top choice; V where the
    drafter cannot propose the label at all (see `dflash_diag.proposals.Proposed`)."""
    label_logprob: NDArray[np.float32]
    """[A, D] in nats; -inf where the rank is V."""
    topk_ids: NDArray[np.int32]
    """[A, D, W] best first; equal ones by ascending id. W is 64, or fewer where a slot has fewer
    tokens to choose from."""
    topk_logprobs: NDArray[np.float32]
    """[A, D, W] in nats."""
    block_size: int
    convention: dict[str, Any]
    provenance: dict[str, Any]
    valid: NDArray[np.bool_] | None = None
    """[A, D] slots whose label a loss mask keeps; None where every slot is."""

    @cached_property
    def accepted(self) -> NDArray[np.int64]:
        """[A] leading proposals equal to the target's tokens; the bonus token is not counted."""
        right = np.logical_and.accumulate(self.proposed == self.labels, axis=1)
        return right.sum(axis=1, dtype=np.int64)

    def frame(self) -> pd.DataFrame:
        """One row an anchor and proposal, without the stored candidates; ``valid`` where known."""
        import pandas as pd

        a, d = self.labels.shape
        k = np.tile(np.arange(1, d + 1, dtype=np.int16), a)
        table = pd.DataFrame(
            {
                "prompt": np.repeat(self.prompt, d),
                "prompt_id": np.repeat(np.asarray(self.prompt_ids, object)[self.prompt], d),
                "anchor": np.repeat(self.anchor, d),
                "k": k,
                "label": self.labels.ravel(),
                "proposed": self.proposed.ravel(),
                "rank": self.rank.ravel(),
                "label_logprob": self.label_logprob.ravel(),
            }
        )
        return table if self.valid is None else table.assign(valid=self.valid.ravel())

    def save(self, folder: StrPath) -> None:
        """Write ``scores.parquet``, ``topk.safetensors`` and, last, ``scores.json``.

        Raises
        ------
        OutputError
            The folder cannot be written.
        """
        import io

        from safetensors.numpy import save

        folder = Path(folder)
        table = io.BytesIO()
        self.frame().to_parquet(table, index=False)
        atomic_write(folder / "scores.parquet", table.getvalue())
        candidates = {"ids": self.topk_ids, "logprobs": self.topk_logprobs}
        atomic_write(folder / "topk.safetensors", save(candidates))
        write_json(
            folder / "scores.json",
            {
                "schema": SCHEMA,
                "prompts": [
                    {"id": name, "n_prompt_tokens": int(p), "n_generated": int(g)}
                    for name, p, g in zip(
                        self.prompt_ids, self.n_prompt_tokens, self.n_generated, strict=True
                    )
                ],
                "unscored": self.unscored,
                "block_size": self.block_size,
                "n_proposed": self.labels.shape[1],
                "convention": self.convention,
                "provenance": self.provenance,
            },
        )

    @classmethod
    def load(cls, folder: StrPath) -> Scores:
        """Read what `save` wrote.

        Raises
        ------
        BadInput
            Not there, or of another schema.
        """
        folder = Path(folder)
        facts = read_json(folder / "scores.json")
        schema = facts.get("schema") if isinstance(facts, dict) else None
        if schema != SCHEMA:
            raise BadInput(f"{folder} has schema {schema!r}", repr(SCHEMA))
        table = read_parquet(folder / "scores.parquet", _COLUMNS)
        try:
            candidates = load_file(folder / "topk.safetensors")
            return cls._of(facts, table, candidates)
        except (
            *(KeyError, TypeError, ValueError, IndexError, OverflowError),
            *(OSError, SafetensorError),
        ) as error:
            raise BadInput(
                f"{folder} is damaged ({error})", "scores that were saved", "remove it"
            ) from error

    @classmethod
    def _of(
        cls, facts: Mapping[str, Any], table: pd.DataFrame, candidates: Mapping[str, Any]
    ) -> Scores:
        d = int(facts["n_proposed"])

        def column(name: str, kind: type) -> Any:
            return table[name].to_numpy(kind).reshape(-1, d)

        def counts(name: str) -> Any:
            return np.array([one[name] for one in facts["prompts"]], np.int64)

        found = cls(
            prompt_ids=[str(one["id"]) for one in facts["prompts"]],
            n_prompt_tokens=counts("n_prompt_tokens"),
            n_generated=counts("n_generated"),
            unscored=facts["unscored"],
            prompt=column("prompt", np.int32)[:, 0],
            anchor=column("anchor", np.int32)[:, 0],
            labels=column("label", np.int64),
            proposed=column("proposed", np.int64),
            rank=column("rank", np.int32),
            label_logprob=column("label_logprob", np.float32),
            topk_ids=candidates["ids"],
            topk_logprobs=candidates["logprobs"],
            block_size=int(facts["block_size"]),
            convention=dict(facts["convention"]),
            provenance=dict(facts["provenance"]),
            valid=column("valid", np.bool_) if "valid" in table else None,
        )
        found._check()
        return found

    def _check(self) -> None:
        """Raise ValueError where the parts do not fit together."""
        rows, d = self.labels.shape
        counts = (self.n_generated - d).tolist()
        starts = self.n_prompt_tokens.tolist()
        if min(counts, default=0) < 0 or sum(counts) != rows:
            raise ValueError(f"{rows} anchors where {sum(counts)} belong")
        spans = [range(p, p + n) for p, n in zip(starts, counts, strict=True)]
        prompts = np.repeat(np.arange(len(spans)), counts)
        anchors = np.fromiter((at for span in spans for at in span), np.int64, rows)
        if not (np.array_equal(self.prompt, prompts) and np.array_equal(self.anchor, anchors)):
            raise ValueError("its anchors are not P .. P+G-1-D of each prompt")
        top = self.topk_logprobs
        if self.topk_ids.shape != top.shape or top.ndim != 3 or top.shape[:2] != (rows, d):
            raise ValueError(f"candidates of shape {list(self.topk_ids.shape)}")
        # Written so that NaN fails too.
        if self.rank.min(initial=0) < 0 or not (top[..., :-1] >= top[..., 1:]).all():
            raise ValueError("ranks below 0, or candidates that are not in order")


@torch.inference_mode()
def score(
    capture: Capture,
    drafter: Drafter,
    *,
    only: range | None = None,
    slice_bytes: int | None = None,
    compiled: bool = False,
    provenance: dict[str, Any] | None = None,
    silent: bool = False,
) -> Scores:
    """Propose a block at every anchor of every prompt, under the drafter's convention.

    Parameters
    ----------
    only
        Prompts of the capture, by index; see `shards`.
    slice_bytes
        Size of the logits held at one time, in bytes: memory does not grow with V. By default
        what suits the device (`dflash_diag.proposals.room_for_logits`).
    compiled
        On a GPU, compile the layers: half a minute at first, then a tenth faster.

    Raises
    ------
    BadInput
        No prompt has a complete block, or the convention names a step that is not known here.
    CaptureError
        The capture lacks a tapped layer, positions, the embedding or the head.
    """
    if capture.thinned:
        raise CaptureError(
            f"{capture.path} holds the states of some positions only (keep_rows)",
            "the states of every position",
            "capture again without keep_rows",
        )
    borrowed = Borrowed.of(capture, drafter, slice_bytes)
    d, needed = drafter.convention.n_proposed, _needed(drafter.convention)
    indices = range(len(capture.prompts)) if only is None else only
    scored: list[tuple[CapturedPrompt, Tensor, Tensor, Proposed]] = []
    unscored: list[dict[str, Any]] = []
    long_enough = [i for i in indices if capture.prompts[i].n_generated > needed]
    with progress(len(indices), "score", unit="prompt", silent=silent) as stage:
        made = _of_each(
            lambda i: _score_prompt(capture, i, drafter, borrowed, compiled=compiled),
            long_enough,
            drafter,
        )
        for index in indices:
            prompt = capture.prompts[index]
            if prompt.n_generated > needed:
                scored.append((prompt, *next(made)))
            else:
                reason = f"{prompt.n_generated} generated tokens hold no block of {d} proposals"
                unscored.append({"id": prompt.id, "reason": reason})
            stage.update()
    if not scored:
        raise BadInput(
            f"none of {len(indices)} prompts has more than {needed} generated tokens",
            f"a continuation longer than the {needed} tokens that a block predicts",
            "capture with a larger --max-new-tokens",
        )
    return _assemble(scored, unscored, drafter.convention, provenance or {})


def _of_each(make: Callable[[int], T], indices: Sequence[int], drafter: Drafter) -> Iterator[T]:
    """``make`` of every prompt, in order; with a small drafter on a CPU one prompt a thread."""
    threads, weight = torch.get_num_threads(), drafter.fc.weight
    if weight.is_cuda or threads < 2 or len(indices) < threads or weight.numel() > SMALL:
        yield from map(make, indices)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield from pool.map(torch.inference_mode()(make), indices)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # threads that begin later ask what was set last


def shards(capture: Capture, convention: Convention, n: int) -> list[range]:
    """At most ``n`` runs of prompts with about as many anchors each, to be scored apart.

    Every one holds a prompt that can be scored, unless none can.
    """
    anchors = [max(0, prompt.n_generated - _needed(convention)) for prompt in capture.prompts]
    total, done, cuts = sum(anchors), 0, [0]
    for index, count in enumerate(anchors):
        # A new run starts before a prompt that can be scored, once the last has its share.
        if count and done * n >= total * len(cuts) and index:
            cuts.append(index)
        done += count
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], len(anchors)], strict=True)]


def merged(parts: Sequence[Scores]) -> Scores:
    """Scores of consecutive runs of prompts as one: what scoring them together gives.

    Raises
    ------
    ValueError
        No parts, or parts of different readings.
    """
    if not parts or any(one.convention != parts[0].convention for one in parts):
        raise ValueError("parts of one reading are needed")
    offsets = np.cumsum([0, *(len(one.prompt_ids) for one in parts[:-1])]).astype(np.int32)

    def joined(name: str) -> Any:
        return np.concatenate([getattr(one, name) for one in parts])

    return replace(
        parts[0],
        prompt_ids=[name for one in parts for name in one.prompt_ids],
        unscored=[entry for one in parts for entry in one.unscored],
        prompt=np.concatenate([one.prompt + at for one, at in zip(parts, offsets, strict=True)]),
        **{name: joined(name) for name in BY_ROW},
    )


BY_ROW = (
    "n_prompt_tokens",
    "n_generated",
    "anchor",
    "labels",
    "proposed",
    "rank",
    "label_logprob",
    "topk_ids",
    "topk_logprobs",
)
"""Arrays of `Scores` with a row a prompt or an anchor that says nothing of other rows."""


def _needed(convention: Convention) -> int:
    """Generated tokens below which there is no complete block."""
    return convention.n_proposed + max(0, convention.label_offset)


def proposer(capture: Capture, drafter: Drafter) -> DrafterProposer:
    """The drafter as the decoding loop wants it, with the target's parts from the capture."""
    borrowed = Borrowed.of(capture, drafter)
    return DrafterProposer(
        drafter,
        embedding=borrowed.embedding,
        proposal=borrowed.proposal,
        final_norm=(borrowed.last_layer, capture.final_norm),
    )


@dataclass(frozen=True, eq=False)
class Borrowed:
    """What a drafter takes from its target, or has of its own in its place."""

    embedding: Tensor
    proposal: Proposal
    last_layer: int

    @classmethod
    def of(
        cls,
        capture: Capture,
        drafter: Drafter,
        slice_bytes: int | None = None,
        lent: Lent | None = None,
    ) -> Borrowed:
        """What a drafter's convention says; ``lent``, if the target's are at hand already."""
        how = drafter.convention
        lent = lent or Lent(capture, drafter.fc.weight)
        head = lent.head if how.head == "target" else capture.head
        own = how.embedding == "own"
        embedding = _own_embedding(drafter, len(head)) if own else lent.embedding
        proposal = make_proposal(how, head, drafter, slice_bytes=slice_bytes)
        return cls(embedding, proposal, int(capture.target_facts.get("n_layers") or 0) - 1)


class Lent:
    """The target's embedding and head where the drafter is, in its type; moved when first asked.

    Of a large vocabulary they are gigabytes, so who drafts under many readings keeps them.
    """

    def __init__(self, capture: Capture, weight: Tensor) -> None:
        self.capture, self.weight = capture, weight

    @cached_property
    def embedding(self) -> Tensor:
        return self.capture.embedding.to(self.weight.device, self.weight.dtype)

    @cached_property
    def head(self) -> Tensor:
        if self.capture.head is self.capture.embedding:
            return self.embedding
        return self.capture.head.to(self.weight.device, self.weight.dtype)


def _own_embedding(drafter: Drafter, n_target: int) -> Tensor:
    if drafter.embed_tokens is None:
        raise BadInput("embedding=own", "a drafter with an embedding (embed_tokens.weight)")
    rows, mask = drafter.embed_tokens.num_embeddings, drafter.convention.mask_token_id
    if rows < n_target or mask >= rows:
        raise BadInput(
            f"the drafter's own embedding has {rows} rows",
            f"at least {max(n_target, mask + 1)}: the target's tokens and the mask token {mask}",
        )
    return drafter.embed_tokens.weight


def _score_prompt(
    capture: Capture, index: int, drafter: Drafter, borrowed: Borrowed, *, compiled: bool
) -> tuple[Tensor, Tensor, Proposed]:
    """Anchors [A], labels [A, D] and proposals of one prompt."""
    how, prompt = drafter.convention, capture.prompts[index]
    device, dtype = drafter.fc.weight.device, drafter.fc.weight.dtype
    tokens = capture.tokens(index).to(device)
    ahead = torch.arange(1, how.n_proposed + 1, device=device) + how.label_offset
    first = prompt.n_prompt_tokens
    count = prompt.n_generated - how.n_proposed - max(0, how.label_offset)
    anchors = torch.arange(first, first + count, device=device)
    # Rows that no anchor may see are not even projected.
    n_context = context_rows(how.context_bound, int(anchors[-1]))
    states = tapped_states(capture, index, how)[:n_context]
    features = drafter.features(states.to(device, dtype))
    labels = tokens[anchors[:, None] + ahead]
    hidden = draft_blocks(drafter, borrowed.embedding, tokens, anchors, features, compiled=compiled)
    return anchors, labels, borrowed.proposal.score(hidden, tokens[anchors], labels)


def tapped_states(capture: Capture, index: int, how: Convention) -> Tensor:
    """States [T, K, H] of one prompt as a convention reads them.

    Raises
    ------
    CaptureError
        A tapped layer is lacking, or a state is not finite.
    """
    states = capture.states(index, how.taps)
    # One pass, since what is not finite makes no finite sum; that of large values may overflow.
    if not states.sum().isfinite() and not states.isfinite().all():
        name = capture.prompts[index].id
        raise CaptureError(
            f"{capture.path}: states of prompt {name!r} are not finite", "finite states"
        )
    last = int(capture.target_facts.get("n_layers") or 0) - 1
    if how.last_layer_normed and last in how.taps:
        at = how.taps.index(last)
        states[:, at] = capture.final_norm(states[:, at])
    return states


def _assemble(
    scored: list[tuple[CapturedPrompt, Tensor, Tensor, Proposed]],
    unscored: list[dict[str, Any]],
    convention: Convention,
    provenance: dict[str, Any],
) -> Scores:
    def stacked(values: list[Tensor]) -> Any:
        return torch.cat(values).cpu().numpy()

    proposals = [one[3] for one in scored]
    sizes = [len(one[1]) for one in scored]
    return Scores(
        prompt_ids=[prompt.id for prompt, *_ in scored],
        n_prompt_tokens=np.array([prompt.n_prompt_tokens for prompt, *_ in scored]),
        n_generated=np.array([prompt.n_generated for prompt, *_ in scored]),
        unscored=unscored,
        prompt=np.repeat(np.arange(len(scored), dtype=np.int32), sizes),
        anchor=stacked([one[1] for one in scored]).astype(np.int32),
        labels=stacked([one[2] for one in scored]),
        proposed=stacked([p.ids for p in proposals]),
        rank=stacked([p.rank for p in proposals]),
        label_logprob=stacked([p.label_logprob for p in proposals]),
        topk_ids=stacked([p.topk_ids for p in proposals]),
        topk_logprobs=stacked([p.topk_logprobs for p in proposals]),
        block_size=convention.block_size,
        convention=convention.to_json(),
        provenance=provenance,
    )
