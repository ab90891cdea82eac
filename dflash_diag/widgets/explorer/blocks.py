"""The blocks of one drafter, as its scores have them: one of them, and those that pass a filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dflash_diag.outcomes import Mask, Outcomes
from dflash_diag.scoring import Scores
from dflash_diag.token_kinds import KINDS, kind_of

ANY, NO_MISS = -1, 0


@dataclass(frozen=True)
class Filter:
    """Which blocks are of interest."""

    decoded: bool = True
    """Those alone at which a round of decoding starts."""
    miss: int = ANY
    """Those whose first miss is proposal 1..D; `NO_MISS`: those without one."""
    kind: str = ""
    """Those whose missed token, the target's at the first miss, is of this kind."""
    prompt: str = ""
    """Those of this prompt."""

    def __str__(self) -> str:
        """In words."""
        said = ["rounds of decoding" if self.decoded else "anchors"]
        if self.prompt:
            said.append(f"of {self.prompt}")
        if self.miss == NO_MISS:
            said.append("without a miss")
        elif self.miss != ANY:
            said.append(f"with a first miss at k = {self.miss}")
        if self.kind:
            said.append(f"where the missed token is of the kind “{self.kind}”")
        return " ".join(said)


@dataclass(frozen=True, eq=False)
class Block:
    """What one drafter proposes behind one anchor, beside what the target says."""

    name: str
    """The drafter's."""
    prompt: str
    anchor: int
    offset: int
    """Proposal k is of position anchor + k + offset."""
    labels: NDArray[np.int64]
    """[D] the target's tokens."""
    proposed: NDArray[np.int64]
    rank: NDArray[np.int32]
    """[D] tokens that the drafter likes better than the target's."""
    label_logprob: NDArray[np.float32]
    """[D] in nats; -inf where the drafter cannot propose the target's token at all."""
    topk_ids: NDArray[np.int32]
    """[D, W] the drafter's best tokens of each slot."""
    topk_logprobs: NDArray[np.float32]
    """[D, W] in nats."""
    accepted: int
    expected: float
    surprise: float

    @property
    def where(self) -> str:
        """Prompt and anchor, in words."""
        return f"{self.prompt} at {self.anchor}"

    def position(self, k: int) -> int:
        """The position that proposal k = 1..D is of."""
        return self.anchor + k + self.offset

    def outcome(self, k: int) -> str:
        """What becomes of proposal k = 1..D."""
        ahead = k - 1 - self.accepted
        return "accepted" if ahead < 0 else "first miss" if ahead == 0 else "after the miss"

    def right(self, k: int) -> bool:
        """Whether proposal k = 1..D is the target's token."""
        return bool(self.proposed[k - 1] == self.labels[k - 1])


class Blocks:
    """All blocks of one drafter.

    Parameters
    ----------
    text
        A token's text, None where nobody knows it.
    """

    def __init__(self, name: str, scores: Scores, text: Callable[[int], str | None]) -> None:
        self.name, self.scores = name, scores
        self.outcomes = Outcomes(scores)
        self._text = text
        stated = scores.convention.get("label_offset", {"value": 0})
        self._offset = int(stated["value"])
        self._start = {
            id_: int(rows[0])
            for i, id_ in enumerate(scores.prompt_ids)
            if len(rows := np.flatnonzero(scores.prompt == i))
        }

    @property
    def n_proposed(self) -> int:
        """D."""
        return self.scores.labels.shape[1]

    @property
    def prompts(self) -> list[str]:
        """Prompts that have blocks."""
        return list(self._start)

    @cached_property
    def missed_kinds(self) -> NDArray[np.int8]:
        """[A] kind of each missed token, as its index in `KINDS`; -1 where nothing is missed."""
        tokens, where = np.unique(self.outcomes.missed, return_inverse=True)
        kinds = [
            -1 if token < 0 else KINDS.index(kind_of(self._text(token)))
            for token in tokens.tolist()
        ]
        return np.array(kinds, np.int8)[where]

    @property
    def kinds(self) -> list[str]:
        """Kinds of the tokens that are missed anywhere."""
        return [KINDS[i] for i in np.unique(self.missed_kinds) if i >= 0]

    def kept(self, wanted: Filter) -> Mask:
        """[A] the blocks that pass a filter."""
        scores, accepted = self.scores, self.outcomes.accepted
        kept = self.outcomes.visited.copy() if wanted.decoded else np.ones(len(accepted), bool)
        if wanted.prompt:
            kept &= scores.prompt == scores.prompt_ids.index(wanted.prompt)
        if wanted.miss != ANY:
            kept &= accepted == (self.n_proposed if wanted.miss == NO_MISS else wanted.miss - 1)
        if wanted.kind:
            kept &= self.missed_kinds == KINDS.index(wanted.kind)
        return kept

    def place(self, row: int) -> tuple[str, int]:
        """Prompt and anchor of a block."""
        scores = self.scores
        return scores.prompt_ids[scores.prompt[row]], int(scores.anchor[row])

    def row(self, prompt: str, anchor: int) -> int | None:
        """Which block is behind an anchor; None where none is."""
        start = self._start.get(prompt)
        if start is None:
            return None
        row = start + anchor - int(self.scores.anchor[start])
        inside = start <= row < len(self.scores.anchor)
        return row if inside and self.place(row) == (prompt, anchor) else None

    def first(self, prompt: str) -> int:
        """The first block of a prompt; 0 where it has none."""
        return self._start.get(prompt, 0)

    def block(self, row: int) -> Block:
        """One of them."""
        scores, found = self.scores, self.outcomes
        return Block(
            name=self.name,
            prompt=scores.prompt_ids[scores.prompt[row]],
            anchor=int(scores.anchor[row]),
            offset=self._offset,
            labels=scores.labels[row],
            proposed=scores.proposed[row],
            rank=scores.rank[row],
            label_logprob=scores.label_logprob[row],
            topk_ids=scores.topk_ids[row],
            topk_logprobs=scores.topk_logprobs[row],
            accepted=int(found.accepted[row]),
            expected=float(found.expected[row]),
            surprise=float(found.surprise[row]),
        )
