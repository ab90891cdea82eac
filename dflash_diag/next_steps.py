"""What to do next, from what the results themselves ask for: nothing is advised that none says.

The doctor's remedies come first, worst cause first; then prompts, where intervals are too wide to
decide; then the options that would turn on what was skipped, most checks first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from dflash_diag.causes import CAUSES
from dflash_diag.doctor.merging import EXPLAINS
from dflash_diag.results import Result, Verdict

MOST = 3
"""So many are shown: who does them runs the report again."""
SETTLING = re.compile(r"\b[Aa]bout (\d+) prompts would settle it")
OPTION = re.compile(r"--[a-z][a-z-]*")
DOCTOR = "doctor.causes"


class Step(NamedTuple):
    """One thing to do, why, and the check that says so."""

    do: str
    why: str
    check: str


def next_steps(results: Sequence[Result]) -> list[Step]:
    """At most `MOST` steps, the most urgent first; none where nothing is found and nothing open."""
    return list(islice(_all(results), MOST))


def _all(results: Sequence[Result]) -> Iterator[Step]:
    for one in results:
        if one.id == DOCTOR:
            yield from _remedies(one)
    yield from _more_prompts(results)
    yield from _options(results)


def _remedies(doctor: Result) -> Iterator[Step]:
    """A step for each fault; what only explains numbers is one step together."""
    found = [row for row in doctor.frame.to_dict("records") if row["status"] == "found"]
    faults = [row for row in found if not row["cause"].startswith(EXPLAINS)]
    explained = [row for row in found if row["cause"].startswith(EXPLAINS)]
    for rows in [*([row] for row in faults), explained]:
        if rows:
            why = "; ".join(CAUSES[row["cause"]].means for row in rows)
            remedies = dict.fromkeys(row["remedy"] for row in rows)
            yield Step(" ".join(remedies), f"{why[0].upper()}{why[1:]}.", DOCTOR)


def _more_prompts(results: Sequence[Result]) -> Iterator[Step]:
    """One step for every question that more prompts would answer, with the largest number."""
    open_ = {
        one: int(needed[1])
        for one in results
        if one.verdict is Verdict.INCONCLUSIVE
        and (needed := SETTLING.search(str(one.params.get("judged"))))
    }
    if open_:
        first = max(open_, key=lambda one: open_[one])
        counts = {one: f" (about {n})" if len(open_) > 1 else "" for one, n in open_.items()}
        asked = " ".join(f"{one.question}{count}" for one, count in counts.items())
        yield Step(f"Bring about {open_[first]} prompts.", f"They settle: {asked}", first.id)


def _options(results: Sequence[Result]) -> Iterator[Step]:
    """A step for each option that a skipped check names, that of most checks first."""
    skipped: dict[str, list[Result]] = {}
    for one in results:
        named = OPTION.search(one.headline) if one.verdict is Verdict.SKIPPED else None
        if named:
            skipped.setdefault(named[0], []).append(one)
    for option, checks in sorted(skipped.items(), key=lambda item: -len(item[1])):
        asked = " ".join(one.question for one in checks)
        yield Step(f"Give {option}.", f"Then these are asked: {asked}", checks[0].id)
