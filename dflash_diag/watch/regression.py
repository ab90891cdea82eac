"""Whether a checkpoint is worse than another: paired by prompt, by interval, on walked tau."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from dflash_diag.compare import MARGIN, Side, pair
from dflash_diag.errors import BadInput
from dflash_diag.history import Row, reference_side
from dflash_diag.results import Verdict
from dflash_diag.stats import DRAWS, Estimate, prompts_needed

AGAINST = ("previous", "best", "reference")
"""What a checkpoint is compared with: the one before it, the best one before it by its tau, or the
reference drafter."""


@dataclass(frozen=True)
class Rule:
    """How regressions are told."""

    against: str = "previous"
    margin: float = MARGIN
    """Tokens a round: what is lost has to be certainly more than this."""
    seed: int = 0
    draws: int = DRAWS

    def __post_init__(self) -> None:
        if self.against not in AGAINST:
            raise BadInput(f"--regression {self.against}", f"one of {', '.join(AGAINST)}")
        if not self.margin >= 0:
            raise BadInput(f"--margin {self.margin:g}", "tokens a round, at least 0")


@dataclass(frozen=True)
class Regression:
    """A checkpoint beside the one that it is compared with."""

    against: str
    """Its name."""
    delta: Estimate
    """The checkpoint's walked tau less the other's [tokens a round]."""
    margin: float

    @property
    def verdict(self) -> Verdict:
        """FAIL: the whole interval is below -margin; WARN: below 0; PASS: above -margin."""
        lo, hi = self.delta.lo, self.delta.hi
        if lo is None or hi is None:
            return Verdict.INCONCLUSIVE
        if hi < -self.margin:
            return Verdict.FAIL
        if hi < 0:
            return Verdict.WARN
        return Verdict.PASS if lo >= -self.margin else Verdict.INCONCLUSIVE

    @property
    def sentence(self) -> str:
        """What is known, in a few words."""
        words = {
            Verdict.FAIL: "worse than",
            Verdict.WARN: "a little worse than",
            Verdict.PASS: "not worse than",
            Verdict.INCONCLUSIVE: "perhaps worse than",
        }[self.verdict]
        number = f"{self.delta.value:+.2f}" if self.delta.value is not None else "unknown"
        if self.delta.lo is not None and self.delta.hi is not None:
            number += f" [{self.delta.lo:+.2f}, {self.delta.hi:+.2f}]"
        more = f", needs {self.n_more} more prompts" if self.n_more else ""
        return f"{words} {self.against} ({number}{more})"

    @property
    def n_more(self) -> int | None:
        """Prompts that would probably settle what is open."""
        if self.verdict is not Verdict.INCONCLUSIVE:
            return None
        needed = prompts_needed(self.delta, -self.margin)
        return None if needed is None else max(1, needed - self.delta.n)

    def to_json(self) -> dict[str, Any]:
        return {
            "against": self.against,
            "delta_tau": self.delta.to_json(),
            "n_prompts": self.delta.n,
            "margin": self.margin,
            "verdict": self.verdict.name,
            "n_more": self.n_more,
        }


def regression(row: Row, rows: Sequence[Row], rule: Rule, folder: Path) -> Regression | None:
    """A checkpoint against what the rule says; None where there is nothing to compare it with.

    Parameters
    ----------
    rows
        The history.
    folder
        Where the history lies.
    """
    other = _other(row, rows, rule, folder)
    if other is None or not set(other.ids) & set(row.ids):
        return None
    found = pair(row.side, other, seed=rule.seed, draws=rule.draws)
    return Regression(other.name, found.delta_tau, rule.margin)


def in_order(rows: Sequence[Row]) -> list[Row]:
    """By training step where every row has one, else by the time at which they were written."""
    known = all(row.step is not None for row in rows)

    def key(row: Row) -> tuple[int, datetime, datetime]:
        return (row.step or 0 if known else 0, row.written, row.finished)

    return sorted(rows, key=key)


def earlier(row: Row, rows: Sequence[Row]) -> list[Row]:
    """The checkpoints before one that were measured on the same text, in order."""
    known: Mapping[str, Row] = {one.run_id: one for one in [*rows, row]}
    comparable = in_order([one for one in known.values() if one.capture == row.capture])
    return comparable[: [one.run_id for one in comparable].index(row.run_id)]


def best_of(rows: Sequence[Row]) -> Row:
    """The one with the highest tau."""
    return max(rows, key=lambda one: one.tau_walked)


def _other(row: Row, rows: Sequence[Row], rule: Rule, folder: Path) -> Side | None:
    if rule.against == "reference":
        return reference_side(row, folder)
    before = earlier(row, rows)
    if not before:
        return None
    return (best_of(before) if rule.against == "best" else before[-1]).side
