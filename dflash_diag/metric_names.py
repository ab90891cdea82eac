"""What the name of a metric can mean: names are many, loose, and seldom say what is counted.

A name gives the readings to try, not the answer: "dds8" and "ddtree8" may be an oracle or a tree,
an "acceptance length" may have the bonus token or not. A name that is not known may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from dflash_diag.bounds import Reading
from dflash_diag.definitions import WIDTHS

LENGTHS = (
    Reading("streak"),
    Reading("tau"),
    Reading("streak_passing"),
    Reading("tau_passing"),
    Reading("eal_product"),
    Reading("eal_product", bonus=True),
)
RATES = (Reading("draft_acceptance_rate"), Reading("verify_rate"))
SLOTS = ("marginal", "survival", "conditional")
_PHASE = "train|training|val|valid|validation|eval|test"
MACRO = ("streak", "tau", "accuracy")
"""Kinds that stacks also print as a mean of means."""
UNIFORM_ONLY = ("streak_passing", "tau_passing", "eal_product")
"""Kinds that no walk is made for."""


@dataclass(frozen=True)
class Name:
    """What a metric's name says."""

    stem: str
    """The name without its number: names with one stem are read alike."""
    number: int | None
    readings: tuple[Reading, ...]
    """What may be counted; all of `anything` where the name says nothing."""
    known: bool
    training: bool
    """Whether only training dashboards show such a number, over all anchors."""
    population: str | None = None
    average: str | None = None


def split_group(name: str) -> tuple[str, str]:
    """The group that a name begins with, and the rest: ``eval/gsm8k``, ``tau``.

    A group ends at the last slash, or is a word such as ``train`` or ``val`` before the rest; such
    a word may also come last, after a slash.
    """
    group, slash, metric = (part.strip() for part in name.rpartition("/"))
    if slash and group and re.fullmatch(_PHASE, metric):
        return metric, group
    if slash:
        return group, metric
    found = re.match(rf"({_PHASE})[_.](?=\w)", name)
    return (found[1], name[found.end() :]) if found else ("", name)


def phase_of(group: str) -> str | None:
    """``train`` or ``validation``, where a part of a group's name says so."""
    parts = group.lower().split("/")
    if any(part.startswith(("val", "eval", "test")) for part in parts):
        return "validation"
    return "train" if {"train", "training"} & set(parts) else None


def read_names(texts: Sequence[str]) -> list[Name]:
    """Read the names of one line together, without the prefix of their group.

    Slots that are counted from 0 are told by there being one of that number; and where only slot 1
    is named, all that can be counted of it is the same.
    """
    names = [read_name(text) for text in texts]
    numbers: dict[str, set[int]] = {}
    for name in names:
        numbers.setdefault(name.stem, set()).add(-1 if name.number is None else name.number)
    return [_placed(name, numbers[name.stem]) for name in names]


def _placed(name: Name, numbers: set[int]) -> Name:
    slots = all(r.kind in SLOTS for r in name.readings)
    if not (slots and name.readings):
        return name
    first = 0 in numbers
    readings = tuple(r._replace(number=(r.number or 0) + first) for r in name.readings)
    if numbers == {1 - first}:
        readings = tuple(r for r in readings if r.kind == "marginal") or readings
    return replace(name, readings=readings)


def read_name(text: str) -> Name:
    """Read one metric's name."""
    words = [word for word in re.split(r"[^a-z0-9]+", _split_number(text.lower())) if word]
    said = {word: _SAYS[word] for word in words if word in _SAYS}
    population = next((p for p, _ in said.values() if p), None)
    average = next((a for _, a in said.values() if a), None)
    words = [word for word in words if word not in said]
    number = next((int(word) for word in words if word.isdigit()), None)
    stem = " ".join(word for word in words if not word.isdigit())
    bonus = bool(re.search(r"\+ ?1\b", text))
    for pattern, readings, training in _RULES:
        found = re.search(pattern, stem) and list(readings(number))
        if found:
            named = tuple(r._replace(bonus=True) for r in found) if bonus else tuple(found)
            named = tuple(dict.fromkeys(r for r in named if _is_defined(r)))
            return Name(stem, number, named, True, training, population, average)
    return Name(stem or text, number, tuple(anything(number)), False, False, population, average)


def anything(number: int | None = None) -> Iterable[Reading]:
    """Every reading, those with candidates or nodes at ``number`` or at the usual ones."""
    yield from LENGTHS
    yield from (Reading("accuracy"), Reading("full_block"), *RATES)
    for kind in SLOTS:
        if number is not None or kind == "marginal":
            yield Reading(kind, 1 if number is None else number)
    for n in WIDTHS if number is None else (number,):
        yield from (*_widened(n), Reading("chain_tau", n))


def _split_number(text: str) -> str:
    """``dds8`` as ``dds_8``; the 1 of ``+ 1`` is no number of the name."""
    text = re.sub(r"\+ ?1\b", " ", text)
    return re.sub(r"(?<=[a-z])(?=\d)|(?<=\d)(?=[a-z])", "_", text)


def _is_defined(reading: Reading) -> bool:
    return not reading.bonus or reading.kind in ("topk_oracle", "eal_product")


def _widened(n: int | None) -> Iterable[Reading]:
    """An oracle with and without the bonus token, and a tree, which has it."""
    if n is not None and n > 0:
        yield Reading("topk_oracle", n)
        yield Reading("topk_oracle", n, bonus=True)
        yield Reading("ddtree_tau", n)


def _oracle(n: int | None) -> Iterable[Reading]:
    return (one for one in _widened(n) if one.kind == "topk_oracle")


def _one(*kinds: str) -> Callable[[int | None], Iterable[Reading]]:
    return lambda n: [] if n is None else [Reading(kind, n) for kind in kinds]


def _always(*readings: Reading) -> Callable[[int | None], Iterable[Reading]]:
    return lambda _: readings


_SAYS: dict[str, tuple[str | None, str | None]] = {
    "walked": ("walked", None),
    "walk": ("walked", None),
    "uniform": ("uniform", None),
    "micro": (None, "micro"),
    "pooled": (None, "micro"),
    "macro": (None, "macro"),
}
"""Words that name the anchors or the average."""

_RULES: tuple[tuple[str, Callable[[int | None], Iterable[Reading]], bool], ...] = (
    (r"^ddtree tau$", _one("ddtree_tau"), True),
    (r"^topk oracle$", _one("topk_oracle"), True),
    (r"^chain tau$", _one("chain_tau"), False),
    (r"^(dds|ddt)\b|tree", _widened, True),
    (r"oracle|^top.*(len|streak)", _oracle, True),
    (r"\bmarginal\b", _one("marginal"), False),
    (r"\bsurvival\b", _one("survival"), False),
    (r"\bconditional\b", _one("conditional"), False),
    (r"\bfull block\b", _always(Reading("full_block")), False),
    (r"\bfull acc", _always(Reading("accuracy")), True),
    (r"eal product", _always(*LENGTHS[4:]), True),
    (r"streak passing", _always(Reading("streak_passing")), True),
    (r"tau passing", _always(Reading("tau_passing")), True),
    (r"\bstreak\b", _always(Reading("streak")), False),
    (r"\btau\b", _always(Reading("tau")), False),
    (r"\bacc\w* len|\b(eal|al|mal|aal)\b|accepted tokens", _always(*LENGTHS), False),
    (r"\bverify rate\b", _always(RATES[1]), False),
    (r"\b(slot|pos|position)\b|\baccept\w* rate", _one(*SLOTS), False),
    (r"^(?!top).*\bacc(uracy)?\b", _one(*SLOTS), True),
    (r"\baccept\w* rate", _always(*RATES), False),
    (r"^(?!top).*\bacc(uracy)?\b", _always(Reading("accuracy")), True),
)
"""What a stem can count, first match first; a rule that finds nothing is passed over. The project's
own names mean what they say."""
