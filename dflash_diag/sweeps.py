"""Score one drafter under many readings, sharing what the readings have in common.

Only proposals are compared with labels here: no candidates, ranks or log-probabilities. Projected
states and the context's keys and values are kept from one reading to the next, as most readings
change neither. Each slot is scored against the label that the reading itself assigns to it, whether
or not a server could follow that reading.

Symbols: N prompts, P prompt tokens, A anchors, D proposed tokens, T tokens, K tapped layers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_diag.blocks import Context, context_rows, draft_blocks
from dflash_diag.bundle import Capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.errors import BadInput
from dflash_diag.judging import Judge
from dflash_diag.metrics import leading, walked
from dflash_diag.scoring import Borrowed, Lent, tapped_states
from dflash_diag.stats import Ratio, ratio

States = Literal["own", "zero", "other"]
"""What the drafter's context is made of: the prompt's states, zeros, or another prompt's states."""


@dataclass(frozen=True, eq=False)
class Hits:
    """Right and wrong proposals of every prompt under one reading."""

    prompts: tuple[str, ...]
    """Ids of the N prompts."""
    right: tuple[NDArray[np.bool_], ...]
    """[A, D] for each prompt; its anchors are ascending."""
    complete: bool
    """Whether every anchor was scored, so that decoding can be walked."""

    def accuracy(self, n_slots: int, n_anchors: Sequence[int]) -> NDArray[np.float64]:
        """Share of right proposals of each prompt [N], over its first slots and anchors."""
        pairs = zip(self.right, n_anchors, strict=True)
        return np.array([right[:n, :n_slots].mean() for right, n in pairs])

    @cached_property
    def tau(self) -> Ratio:
        """Accepted + 1, summed over rounds, and rounds, of each prompt.

        Walked where every anchor was scored, else over the anchors that were.
        """
        rounds, tokens = [], []
        for right in self.right:
            jumps = leading(right) + 1
            at = np.arange(len(jumps))
            visited = walked(at * 0, at, jumps) if self.complete else at >= 0
            rounds.append(visited.sum())
            tokens.append(jumps[visited].sum())
        return ratio(tokens, rounds, "tokens")

    @property
    def value(self) -> float:
        """Pooled tau."""
        return float(self.tau.numerators.sum() / self.tau.denominators.sum())


class Sweep:
    """A drafter on a capture, to be scored under one reading after another.

    Parameters
    ----------
    drafter
        Its weights are shared by all readings; its own convention is the declared one.
    prompts
        Ids of the prompts to score; all by default.
    tick
        Called after each reading.

    Raises
    ------
    BadInput
        No prompt has a continuation of more than D + 3 tokens, so that readings of wider blocks or
        later labels find an anchor too.
    """

    def __init__(
        self,
        capture: Capture,
        drafter: Drafter,
        *,
        prompts: Collection[str] | None = None,
        tick: Callable[[], Any] = lambda: None,
    ) -> None:
        self.capture, self.drafter, self.tick = capture, drafter, tick
        # One more for a wider block, one for labels a token later, and one to be left with.
        self._needed = drafter.convention.n_proposed + 3
        self.rows = [
            i
            for i, p in enumerate(capture.prompts)
            if p.n_generated > self._needed and (prompts is None or p.id in prompts)
        ]
        if not self.rows:
            raise BadInput(
                f"none of {len(capture.prompts)} prompts has more than {self._needed} generated "
                "tokens",
                "a continuation longer than a block",
                "capture with a larger --max-new-tokens",
            )
        self._kept: OrderedDict[Any, Any] = OrderedDict()
        self._lent = Lent(capture, drafter.fc.weight)

    @torch.inference_mode()
    def hits(
        self,
        how: Convention,
        *,
        anchors: int | None = None,
        states: States = "own",
        together: int | None = None,
    ) -> Hits:
        """Proposals under ``how`` beside the labels that it assigns.

        Parameters
        ----------
        anchors
            Anchors a prompt, spread evenly; all of them if None.
        states
            ``zero`` and ``other`` show whether the context matters at all.
        together
            Anchors in one pass, where blocks see one another; all if None.
        """
        drafter = self.drafter.under(how)
        borrowed = Borrowed.of(self.capture, drafter, lent=self._lent)
        judge = Judge(borrowed.proposal, self._likely)
        made = [
            self._prompt(drafter, borrowed.embedding, judge, i, anchors, states, together)
            for i in self.rows
        ]
        judge.finish()
        self.tick()
        ids = tuple(self.capture.prompts[i].id for i in self.rows)
        right = tuple(_in_order(parts).cpu().numpy() for parts in made)
        return Hits(ids, right, complete=anchors is None)

    def _prompt(
        self,
        drafter: Drafter,
        embedding: Tensor,
        judge: Judge,
        index: int,
        count: int | None,
        states: States,
        together: int | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Anchors of one prompt, pass by pass, and what is right there once the judge is done."""
        how, prompt = drafter.convention, self.capture.prompts[index]
        device = drafter.fc.weight.device
        tokens = self.capture.tokens(index).to(device)
        ahead = how.n_proposed + max(0, how.label_offset)
        first, end = prompt.n_prompt_tokens, prompt.n_prompt_tokens + prompt.n_generated - ahead
        at = torch.arange(first, max(end, first), device=device)
        if count is not None and len(at) > count:
            at = at[torch.linspace(0, len(at) - 1, count, device=device).long()]
        features = self._features(drafter, index, states)
        features = features[: context_rows(how.context_bound, int(at[-1]))]
        parts = [at] if together is None else list(dealt(at, together))
        made = []
        for part in parts:
            context = None
            if how.other_blocks == "hidden":
                rows = len(features)
                whole = self._context(drafter, index, states)
                context = [(k[:rows], v[:rows]) for k, v in whole]
            hidden = draft_blocks(drafter, embedding, tokens, part, features, context)
            steps = torch.arange(1, how.n_proposed + 1, device=device) + how.label_offset
            made.append((part, judge.right(hidden, tokens[part], tokens[part[:, None] + steps])))
        return made

    @cached_property
    def _likely(self) -> Tensor:
        """The tokens of the texts."""
        tokens = torch.cat([self.capture.tokens(i) for i in self.rows])
        return tokens.unique().to(self.drafter.fc.weight.device)

    def _features(self, drafter: Drafter, index: int, states: States) -> Tensor:
        """[T, H] of one prompt."""
        how = drafter.convention
        key = (how.taps, how.last_layer_normed, how.feature_norm, how.norm_style, states)

        def make() -> Tensor:
            weight = drafter.fc.weight
            length = len(self.capture.tokens(index))
            source = index
            if states == "other":  # another prompt's states, repeated where it is shorter
                source = self.rows[(self.rows.index(index) + 1) % len(self.rows)]
            found = tapped_states(self.capture, source, how)
            if states == "other":
                found = found[torch.arange(length) % len(found)]
            if states == "zero":
                found = torch.zeros_like(found)
            return drafter.features(found.to(weight.device, weight.dtype))

        return self._keep("features", key, index, make)

    def _context(self, drafter: Drafter, index: int, states: States) -> Context:
        how = drafter.convention
        features_of = (how.taps, how.last_layer_normed, how.feature_norm, how.norm_style, states)
        rope = (how.rope_theta, how.rotary_width, how.rope_interleaved, how.rope_scaling)
        key = features_of + rope

        def make() -> Context:
            features = self._features(drafter, index, states)
            return drafter.context(features, torch.arange(len(features), device=features.device))

        return self._keep("context", key, index, make)

    def _keep(self, what: str, key: Any, index: int, make: Callable[[], Any]) -> Any:
        """The same as last time, for the two readings that were asked for last."""
        place = self._kept.setdefault((what, key), {})
        self._kept.move_to_end((what, key))
        while len(self._kept) > 4:
            self._kept.popitem(last=False)
        if index not in place:
            place[index] = make()
        return place[index]


def _in_order(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """[A, D] by ascending anchor."""
    anchors, right = (torch.cat(column) for column in zip(*parts, strict=True))
    return right[anchors.argsort()]


def dealt(anchors: Tensor, together: int) -> list[Tensor]:
    """Anchors dealt into passes, so that those of one pass are spread over the text."""
    passes = -(-len(anchors) // together)
    return [anchors[start::passes] for start in range(passes)]


def accuracies(one: Hits, other: Hits) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Slot accuracy [N] of two readings over the slots and anchors that both have."""
    slots = min(one.right[0].shape[1], other.right[0].shape[1])
    counts = [min(len(a), len(b)) for a, b in zip(one.right, other.right, strict=True)]
    return one.accuracy(slots, counts), other.accuracy(slots, counts)
