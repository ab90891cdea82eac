"""One entry a cause out of everything that was said about it, worst first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dflash_diag.causes import CAUSES, entry

Entry = dict[str, Any]

FIRST = ("target.not_lossless", "hidden.rows", "target.padding")
"""Causes that can fake all others, in the order in which they can."""
EXPLAINS = ("metric.", "data.")
"""Causes that explain a number and are no fault."""
STATUSES = ("found", "not_identifiable", "excluded", "not_tested")
"""What outweighs what where two sources speak about one cause, but for what is measured."""
SHOWN = ("found", "not_identifiable", "not_tested", "excluded")
"""Order of the ranking."""
NOT_LOOKED_FOR = "nothing at hand speaks about it"


def merged(*sources: Iterable[Entry]) -> list[Entry]:
    """Every cause of the catalogue once, ranked.

    Parameters
    ----------
    sources
        The strongest first: where one has decided, by finding or excluding a cause, what later ones
        say is added to its evidence and changes nothing.
    """
    by_cause: dict[str, Entry] = {}
    for source in sources:
        for one in source:
            known = by_cause.get(one["cause"])
            by_cause[one["cause"]] = dict(one) if known is None else _joined(known, one)
    rows = [by_cause.get(cause) or entry(cause, "not_tested", NOT_LOOKED_FOR) for cause in CAUSES]
    return sorted(rows, key=_rank)


def _joined(known: Entry, other: Entry) -> Entry:
    decided = known["status"] in ("found", "excluded")
    stronger = STATUSES.index(other["status"]) < STATUSES.index(known["status"])
    first, second = (known, other) if decided or not stronger else (other, known)
    said = [first["evidence"]]
    if second["status"] != "not_tested" and second["evidence"] not in said:
        said.append(second["evidence"])
    return {**first, "evidence": " ".join(said)}


def _rank(one: Entry) -> tuple[int, int, float]:
    """Damage that fakes the rest, then by what it costs, then static facts, then explanations."""
    status = SHOWN.index(one["status"])
    if one["status"] != "found":
        return status, list(CAUSES).index(one["cause"]), 0.0
    delta = value_of(one["delta"])
    if one["cause"] in FIRST:
        place = FIRST.index(one["cause"])
    elif one["cause"].startswith(EXPLAINS):
        place = len(FIRST) + 2
    else:
        place = len(FIRST) + (delta is None)
    return status, place, -(delta or 0.0)


def value_of(numbers: Mapping[str, Any] | None) -> float | None:
    """The point of ``{"value", "lo", "hi"}``, None where it is unknown."""
    return None if numbers is None else numbers["value"]


def is_fault(one: Entry) -> bool:
    """Whether an entry names something that is wrong, not just what a number means."""
    return one["status"] == "found" and not one["cause"].startswith(EXPLAINS)
