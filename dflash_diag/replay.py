"""Measure again what a trainer measured: its texts, anchors, mask, noise and labels.

A training step places many blocks in a text at once, each at a drawn anchor, and compares them with
the text itself. The same is done here on captures: the target has been run once over each text, and
any reading of the drafter is scored on what it said. Text that the target generated has all its
anchors scored instead, so that decoding can be followed through it.

Symbols: N texts, T tokens, A anchors, D proposed tokens, K tapped layers, H hidden size, a anchor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_diag.blocks import context_rows, draft_blocks
from dflash_diag.bundle import Capture, CapturedPrompt
from dflash_diag.drafter import Drafter
from dflash_diag.metrics import leading, walked
from dflash_diag.proposals import Proposed
from dflash_diag.scoring import Borrowed, Scores, tapped_states
from dflash_diag.sweeps import dealt

Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]
Labels = Literal["tokens", "target"]
Context = Literal["own", "zero"]
COLUMNS = (
    *("prompt", "anchor", "labels", "proposed", "rank", "label_logprob"),
    *("topk_ids", "topk_logprobs", "valid"),
)
"""Fields of `Scores` with a row an anchor."""


@dataclass(frozen=True, eq=False)
class Passage:
    """One text of a capture, and where in it blocks are placed."""

    capture: Capture
    index: int
    """Its place in the capture."""
    learned: Mask
    """[T] tokens that may be labels."""
    written: Mask
    """[T] tokens that the model was to write: decoding visits no others."""
    anchors: Positions | None = None
    """[A] as a trainer drew them; None: every one whose labels are all there."""

    @classmethod
    def generated(
        cls, capture: Capture, index: int, *, length: int | None = None, prompt_too: bool = False
    ) -> Passage:
        """A prompt with its greedy continuation.

        Parameters
        ----------
        length
            T, if not all of it.
        prompt_too
            Whether blocks are placed in the prompt as well, from its second token on.
        """
        prompt = capture.prompts[index]
        at = np.arange(length or prompt.n_prompt_tokens + prompt.n_generated)
        written = at >= prompt.n_prompt_tokens
        return cls(capture, index, at >= 1 if prompt_too else written, written)

    @property
    def prompt(self) -> CapturedPrompt:
        """What the capture knows of it."""
        return self.capture.prompts[self.index]

    def placed(self, ahead: int) -> Positions:
        """Anchors [A]: as drawn, else all that are learned and followed by ``ahead`` tokens."""
        if self.anchors is not None:
            return self.anchors
        if len(self.learned) <= ahead:
            return np.zeros(0, np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(self.learned, ahead + 1)
        return np.flatnonzero(windows.all(axis=1))


@dataclass(frozen=True, eq=False)
class Replayed:
    """The blocks of one drafter under one reading, on some texts."""

    scores: Scores
    """Slots whose label the loss mask leaves out are not ``valid``."""
    in_prompt: Mask
    """[A] anchors in what was given to the model."""

    def rows(self, *, walk: bool, prompt_too: bool) -> Scores:
        """The blocks that a measurement counts.

        Parameters
        ----------
        walk
            Those that decoding visits alone; the anchors must be consecutive.
        prompt_too
            Whether anchors in the prompt count.
        """
        scores = self.scores if prompt_too else take(self.scores, ~self.in_prompt)
        return take(scores, visited(scores)) if walk else scores


def take(scores: Scores, rows: Mask) -> Scores:
    """Some anchors [A] of a table."""
    kept = {name: getattr(scores, name) for name in COLUMNS}
    return dataclasses.replace(
        scores, **{name: column[rows] for name, column in kept.items() if column is not None}
    )


def visited(scores: Scores) -> Mask:
    """Anchors [A] that decoding visits when each round commits its accepted tokens and one more."""
    return walked(scores.prompt, scores.anchor, leading(scores.proposed == scores.labels) + 1)


@torch.inference_mode()
def replay(
    drafter: Drafter,
    passages: Sequence[Passage],
    *,
    labels: Labels = "tokens",
    noise: float = 0.0,
    context: Context = "own",
    together: int | None = None,
    seed: int = 0,
) -> Replayed:
    """Score a drafter on texts as its trainer does, under its convention.

    Parameters
    ----------
    passages
        Texts of one target's captures.
    labels
        ``tokens``: the text. ``target``: what the target would say after the text so far.
    noise
        Standard deviation of Gaussian noise on the tapped states, as a share of each row's root
        mean square.
    context
        ``zero`` puts zeros in place of the states.
    together
        Blocks in one pass where they see one another and the anchors were not drawn; drawn ones
        are all in one pass.
    seed
        Of the noise.

    Raises
    ------
    CaptureError
        A capture lacks a tapped layer, the embedding or the head.
    """
    how = drafter.convention
    borrowed = Borrowed.of(passages[0].capture, drafter)
    steps = torch.arange(1, how.n_proposed + 1) + how.label_offset
    blocks = []
    placed = [one.placed(int(steps[-1])) for one in passages]
    passages = [one for one, at in zip(passages, placed, strict=True) if len(at)]
    for number, (passage, anchors) in enumerate(zip(passages, filter(len, placed), strict=True)):
        wanted = torch.from_numpy(anchors)[:, None] + steps
        text, learned = _labels(passage, labels), torch.from_numpy(passage.learned)
        inside = wanted < len(learned)
        wanted = wanted.clamp(max=len(learned) - 1)
        states = _states(passage, drafter, noise, seed * 65_537 + number)
        if context == "zero":
            states = torch.zeros_like(states)
        made = _propose(
            drafter,
            borrowed,
            passage.capture.tokens(passage.index),
            drafter.features(states),
            torch.from_numpy(anchors),
            text[wanted],
            together if passage.anchors is None else None,
        )
        blocks.append(_Blocks(anchors, text[wanted], inside & learned[wanted], made))
    pairs = zip(blocks, passages, strict=True)
    in_prompt = np.concatenate([~passage.written[one.anchors] for one, passage in pairs])
    return Replayed(_table(blocks, passages, drafter), in_prompt)


@dataclass(frozen=True, eq=False)
class _Blocks:
    """Scored anchors of one text."""

    anchors: Positions
    labels: Tensor
    valid: Tensor
    proposed: Proposed


def _labels(passage: Passage, whose: str) -> Tensor:
    """Label of every position: [T]."""
    tokens = passage.capture.tokens(passage.index)
    if whose == "tokens":
        return tokens
    said = passage.capture.top_choices(passage.index)[0][:, 0]
    return torch.cat([tokens[:1], torch.from_numpy(said[:-1].astype(np.int64))])


def _states(passage: Passage, drafter: Drafter, noise: float, seed: int) -> Tensor:
    """Tapped states [T, K, H], with the trainer's noise on them."""
    weight = drafter.fc.weight
    states = tapped_states(passage.capture, passage.index, drafter.convention)
    states = states[: len(passage.learned)].to(weight.device, weight.dtype)
    if not noise:
        return states
    spread = states.float().square().mean(-1, keepdim=True).sqrt()
    drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(seed))
    return states + (noise * spread * drawn.to(weight.device)).to(weight.dtype)


def _propose(
    drafter: Drafter,
    borrowed: Borrowed,
    tokens: Tensor,
    features: Tensor,
    anchors: Tensor,
    labels: Tensor,
    together: int | None,
) -> Proposed:
    """Proposals at anchors [A] of one text, rated against ``labels`` [A, D]."""
    device = features.device
    tokens, at = tokens.to(device), anchors.to(device)
    hidden = features.new_empty(len(at), labels.shape[1], features.shape[-1])
    for part in [at] if together is None else dealt(at, together):
        if len(part):
            rows = context_rows(drafter.convention.context_bound, int(part.max()))
            made = draft_blocks(drafter, borrowed.embedding, tokens, part, features[:rows])
            hidden[torch.isin(at, part)] = made.to(hidden.dtype)
    return borrowed.proposal.score(hidden, tokens[at], labels.to(device))


def _table(blocks: Sequence[_Blocks], passages: Sequence[Passage], drafter: Drafter) -> Scores:
    def stacked(values: Sequence[Tensor]) -> NDArray[Any]:
        return torch.cat(list(values)).cpu().numpy()

    sizes = [len(one.anchors) for one in blocks]
    valid = stacked([one.valid for one in blocks])
    return Scores(
        prompt_ids=[one.prompt.id for one in passages],
        n_prompt_tokens=np.array([one.prompt.n_prompt_tokens for one in passages]),
        n_generated=np.array([one.prompt.n_generated for one in passages]),
        unscored=[],
        prompt=np.repeat(np.arange(len(blocks), dtype=np.int32), sizes),
        anchor=np.concatenate([one.anchors for one in blocks]).astype(np.int32),
        labels=stacked([one.labels for one in blocks]),
        proposed=stacked([one.proposed.ids for one in blocks]),
        rank=stacked([one.proposed.rank for one in blocks]),
        label_logprob=stacked([one.proposed.label_logprob for one in blocks]),
        topk_ids=stacked([one.proposed.topk_ids for one in blocks]),
        topk_logprobs=stacked([one.proposed.topk_logprobs for one in blocks]),
        block_size=drafter.convention.block_size,
        convention=drafter.convention.to_json(),
        provenance={},
        valid=None if valid.all() else valid,
    )
