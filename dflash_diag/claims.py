"""Numbers that somebody claims, and which definitions can have printed them.

Claims of one line (one program, one set of blocks) are judged together: a reading is excluded where
no blocks could have printed all the line's numbers under it (`dflash_diag.bounds`). That needs no
measurement. Names with one stem, such as dds4 and dds8, are read alike; every line of a log was
printed under the same definitions, so that what an early line excludes is excluded.

Where the drafter was scored on the text of the claim, its measured values decide among the readings
that are left. Scores on other text are only a hint.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from itertools import combinations, product
from typing import Any

from dflash_diag.bounds import Bounds, Number, Reading
from dflash_diag.errors import BadInput
from dflash_diag.metric_names import MACRO, UNIFORM_ONLY, Name, phase_of, read_names, split_group
from dflash_diag.stats import Estimate
from dflash_diag.training_logs import TrainingLog

TYPED, LOGGED = "claim", "log"
MAX_JOINT = 64
"""Combinations of readings tried at once; beyond them ambiguous names are judged one by one."""
EARLIER_LINES = 5
"""Lines of a log looked at beside its last."""
_NAMED = "NAME=VALUE with a number, such as dds8=3.58"
Way = dict["Claim", Reading]
"""One reading for each of some claims."""
_WALKS_ITSELF = ("topk_oracle", "ddtree_tau", "chain_tau")


@dataclass(frozen=True)
class Claim:
    """One number that somebody gave."""

    name: str
    """As it was given."""
    number: Number
    means: Name
    recent: float | None = None
    """Mean over the last logged steps, in a log."""

    @property
    def value(self) -> float:
        """The number itself."""
        return self.number.value

    def __str__(self) -> str:
        return f"{self.name} = {self.value:g}"


@dataclass(frozen=True)
class Line:
    """Numbers that one program printed of one set of blocks."""

    group: str
    """What stands before the names, such as ``train`` or ``eval``; empty without a prefix."""
    source: str
    """``claim`` or ``log``."""
    claims: tuple[Claim, ...]
    step: int | None = None
    """Of the training, in a log."""
    earlier: tuple[tuple[int, Mapping[str, Number]], ...] = ()
    """Other steps of a log, with what they printed under the same names."""
    notes: tuple[str, ...] = ()
    """What was left out of a log."""

    @property
    def training(self) -> bool:
        """Whether it is a training dashboard's, which counts all anchors and pools them."""
        named = phase_of(self.group) == "train"
        return named or any(claim.means.training for claim in self.claims)

    @property
    def split(self) -> str | None:
        """``train`` or ``validation`` where it is the trainer's own measurement, else None."""
        if phase_of(self.group) == "validation":
            return "validation" if self.source == LOGGED else None
        return "train" if self.training else None

    def __str__(self) -> str:
        if self.source == LOGGED:
            return f"the log's {self.group} line at step {self.step}"
        return f"the claims of {self.group}" if self.group else "the claims"


@dataclass(frozen=True)
class Measured:
    """What a definition gives on a text at hand."""

    name: str
    estimate: Estimate
    within: bool
    """Whether the claim lies within the interval."""


@dataclass(frozen=True)
class Fit:
    """Which definitions can have printed a claim."""

    line: Line
    claim: Claim
    fits: tuple[str, ...]
    by: str
    """``bounds`` or ``measured``."""
    excluded: tuple[tuple[str, str], ...] = ()
    """Readings of the name that cannot, each with the reason."""
    contradicts: tuple[str, ...] = ()
    """Claims of the line that cannot be true beside this one, however both are read."""
    hints: tuple[Measured, ...] = ()
    """Values on text that is not the claim's."""

    def nearest(self) -> Measured | None:
        """The measured definition whose value is nearest to the claim, the fitting ones first."""
        known = [one for one in self.hints if one.estimate.value is not None]
        return min(
            known,
            key=lambda one: (
                one.name not in self.fits,
                abs((one.estimate.value or 0.0) - self.claim.value),
            ),
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.claim.name,
            "value": self.claim.value,
            "fits": list(self.fits),
            "by": self.by,
            "group": self.line.group,
            "source": self.line.source,
            "step": self.line.step,
            "recent": self.claim.recent,
            "excluded": [{"definition": name, "why": why} for name, why in self.excluded],
            "contradicts": list(self.contradicts),
            "measured": [
                {"definition": one.name, **one.estimate.to_json(), "within": one.within}
                for one in self.hints
            ],
        }


# --- reading -------------------------------------------------------------------------------------


def read_claims(texts: Sequence[str]) -> list[Line]:
    """Lines from ``NAME=VALUE``; what stands before a name's last slash is its line.

    Raises
    ------
    BadInput
        No name, or a value that is no finite number.
    """
    groups: dict[str, list[tuple[str, Number]]] = {}
    for text in texts:
        name, _, written = (part.strip() for part in text.rpartition("="))
        number = _number(written)
        group, metric = split_group(name)
        if not metric or number is None:
            raise BadInput(f"--claim {text}", _NAMED)
        groups.setdefault(group, []).append((name, number))
    return [Line(group, TYPED, _claims(named)) for group, named in groups.items()]


def read_log(log: TrainingLog) -> list[Line]:
    """The last line of each group of a log, with some lines before it."""
    lines = []
    means = log.summary().set_index(["group", "metric"])["mean"]
    for group in log.groups():
        table = log.table(group)
        rows = [*_spread(range(len(table) - 1), EARLIER_LINES), len(table) - 1]
        *before, (step, last) = [
            (int(step), {str(name): shown(value) for name, value in row.dropna().items()})
            for step, row in table.iloc[rows].iterrows()
        ]
        earlier = tuple(before)
        claims = tuple(
            replace(claim, recent=float(means[group, claim.name]))
            for claim in _claims(list(last.items()))
        )
        lines.append(Line(group, LOGGED, claims, step, earlier, log.notes))
    return lines


def _claims(named: Sequence[tuple[str, Number]]) -> tuple[Claim, ...]:
    means = read_names([split_group(name)[1] for name, _ in named])
    return tuple(Claim(name, number, one) for (name, number), one in zip(named, means, strict=True))


def shown(value: float) -> Number:
    """A logged number, known to half a unit of its last decimal, and to single precision."""
    return _rounded(Decimal(repr(float(value))))


def _number(written: str) -> Number | None:
    try:
        exact = Decimal(written)
    except InvalidOperation:
        return None
    return _rounded(exact) if exact.is_finite() and math.isfinite(float(exact)) else None


def _rounded(exact: Decimal) -> Number:
    """A number with half a unit of its last decimal as slack; a whole one counts as N.0."""
    value, exponent = float(exact), exact.as_tuple().exponent
    places = min(exponent, -1) if isinstance(exponent, int) else -1
    return Number(value, max(0.5 * 10.0**places, 1e-5 * max(1.0, abs(value))))


def _spread(items: Sequence[Any], n: int) -> list[Any]:
    """At most n of some items, the first among them."""
    return [items[round(i * (len(items) - 1) / max(1, n - 1))] for i in range(min(n, len(items)))]


# --- judging -------------------------------------------------------------------------------------


def judge(
    lines: Iterable[Line],
    *,
    n_proposed: int | None = None,
    training: Mapping[str, Mapping[str, Estimate]] | None = None,
    prompts: Mapping[str, Estimate] | None = None,
) -> list[Fit]:
    """Which definitions fit each claim.

    Parameters
    ----------
    n_proposed
        D of the drafter, where it is known.
    training
        Definitions measured on the trainer's own texts, by `Line.split`: they decide where a claim
        lies within the interval of one that the bounds allow.
    prompts
        The same on other text: hints.
    """
    found = []
    for line in lines:
        for fit in _Judge(line, Bounds(n_proposed)).fits():
            own = (training or {}).get(line.split or "")
            decided = fit if own is None else _decide(fit, own)
            found.append(_hint(decided, prompts or {} if own is None else own))
    return found


def definitions_of(claim: Claim, line: Line, reading: Reading) -> list[str]:
    """Names of the definitions that a reading stands for: over which anchors, and how averaged."""
    kind, number, bonus = reading
    populations, averages = ["uniform"], ["micro"]
    # A tau that was typed in beside a dashboard's numbers may be what a server said.
    alone = line.source == TYPED and not line.group and not claim.means.population
    typed = alone and kind == "tau"
    training = claim.means.training if typed else line.training
    if not training and kind not in (*UNIFORM_ONLY, *_WALKS_ITSELF):
        populations.append("walked")
    if not training and kind in MACRO:
        averages.append("macro")
    if claim.means.population:
        populations = [claim.means.population]
        if claim.means.population != "uniform" and kind in UNIFORM_ONLY:
            return []
    if claim.means.average == "macro" and kind not in MACRO:
        return []
    if claim.means.average:
        averages = [claim.means.average]
    what = f"{kind if number is None else f'{kind}@{number}'}{' + 1' if bonus else ''}"
    return [
        f"{what} {population}{' macro' if average == 'macro' else ''}"
        for population in populations
        for average in averages
    ]


class _Judge:
    """One line under every combination of readings of its names."""

    def __init__(self, line: Line, bounds: Bounds) -> None:
        self.line, self.bounds = line, bounds
        self.alone = {
            claim: [r for r in claim.means.readings if self._in_range(claim, r)]
            for claim in line.claims
        }
        known = [c for c in line.claims if c.means.known and self.alone[c]]
        self.stems = {
            c.means.stem: [d for d in known if d.means.stem == c.means.stem] for c in known
        }
        self.ways = {stem: _ways(members, self.alone) for stem, members in self.stems.items()}
        """Ways to read the claims of each stem alike."""

    def _in_range(self, claim: Claim, reading: Reading) -> bool:
        if not self.bounds.can(reading):
            return False
        low, high = self.bounds.extent(reading)
        return claim.number.lo <= high and low <= claim.number.hi

    def fits(self) -> list[Fit]:
        """What fits each claim of the line."""
        allowed, early = self._allowed()
        clashes: dict[Claim, tuple[str, ...]] = {}
        if self.stems and not allowed:
            clashes = self._clashes()
            self.stems = {
                stem: kept
                for stem, members in self.stems.items()
                if (kept := [c for c in members if c not in clashes])
            }
            self.ways = {stem: _ways(kept, self.alone) for stem, kept in self.stems.items()}
            allowed, early = self._allowed()
        return [
            self._fit(claim, allowed.get(claim, []), early, clashes.get(claim, ()))
            for claim in self.line.claims
        ]

    def _fit(
        self,
        claim: Claim,
        allowed: list[Reading],
        early: Mapping[tuple[Claim, Reading], str],
        clash: tuple[str, ...],
    ) -> Fit:
        names = [name for r in allowed for name in definitions_of(claim, self.line, r)]
        excluded = [
            (name, early.get((claim, r)) or self._why(claim, r, clash))
            for r in claim.means.readings
            if r not in allowed and (claim.means.known or r in self.alone[claim])
            for name in definitions_of(claim, self.line, r)
        ]
        return Fit(self.line, claim, tuple(names), "bounds", tuple(excluded), clash)

    # --- which ---

    def _allow(self, way: Way, printed: Mapping[str, Number] | None = None) -> bool:
        """Whether claims can be read in a way together, as the line or another step has them."""
        of: dict[Hashable, list[tuple[Reading, Number]]] = {}
        for claim, reading in way.items():
            number = claim.number if printed is None else printed.get(claim.name)
            if number is not None and _tied(claim, reading):
                of.setdefault(self._counted(claim), []).append((reading, number))
        return all(self.bounds.allow(together) for together in of.values())

    def _counted(self, claim: Claim) -> Hashable:
        """Which anchors a name says, and which average: others are bounded apart."""
        usual = ("uniform", "micro") if self.line.training else (None, None)
        return claim.means.population or usual[0], claim.means.average or usual[1]

    def _allowed(self) -> tuple[dict[Claim, list[Reading]], dict[tuple[Claim, Reading], str]]:
        """Readings that the line allows (none where it contradicts itself), and earlier steps."""
        stems = list(self.stems)
        if math.prod(len(self.ways[stem]) for stem in stems) <= MAX_JOINT:
            return self._joint(stems)
        # Each ambiguous name beside those that can be read in one way only.
        sure = [stem for stem in stems if len(self.ways[stem]) == 1]
        allowed: dict[Claim, list[Reading]] = {}
        early: dict[tuple[Claim, Reading], str] = {}
        for stem in stems:
            found, why = self._joint([*sure, *([] if stem in sure else [stem])])
            if not found:
                return {}, {}
            for claim, readings in found.items():
                allowed.setdefault(claim, readings)
            early |= why
        return allowed, early

    def _joint(
        self, stems: Sequence[str]
    ) -> tuple[dict[Claim, list[Reading]], dict[tuple[Claim, Reading], str]]:
        """Combinations of one way to read each stem that the bounds allow."""
        ways: list[Way] = [
            {claim: reading for part in parts for claim, reading in part.items()}
            for parts in product(*(self.ways[stem] for stem in stems))
        ]
        ways = [way for way in ways if self._allow(way)]
        if not ways:
            return {}, {}
        ways, early = self._earlier(ways)
        allowed = {
            claim: list(dict.fromkeys(way[claim] for way in ways))
            for stem in stems
            for claim in self.stems[stem]
        }
        for claim in self.line.claims:
            if not claim.means.known:
                allowed[claim] = [
                    reading
                    for reading in self.alone[claim]
                    if any(self._allow({**way, claim: reading}) for way in ways)
                ]
        return allowed, early

    def _earlier(self, ways: list[Way]) -> tuple[list[Way], dict[tuple[Claim, Reading], str]]:
        """Drop what other steps of the log exclude, unless one of them excludes everything."""
        why: dict[tuple[Claim, Reading], str] = {}
        for step, printed in self.line.earlier:
            left = [way for way in ways if self._allow(way, printed)]
            if not left:
                continue
            kept = {key for way in left for key in way.items()}
            for claim, reading in {key for way in ways for key in way.items()} - kept:
                value = printed.get(claim.name)
                at = "" if value is None else f" ({claim.name} = {value.value:g})"
                why[claim, reading] = f"the log's line at step {step} excludes it{at}"
            ways = left
        return ways, why

    def _clashes(self) -> dict[Claim, tuple[str, ...]]:
        """Claims that no reading makes true together: pairs, or all where no pair is at fault."""
        clashes: dict[Claim, list[str]] = {}
        known = [claim for members in self.stems.values() for claim in members]
        for a, b in combinations(known, 2):
            if not any(self._both(a, r, b, s) for r in self.alone[a] for s in self.alone[b]):
                clashes.setdefault(a, []).append(b.name)
                clashes.setdefault(b, []).append(a.name)
        if not clashes:
            clashes = {a: [b.name for b in known if b is not a] for a in known}
        return {claim: tuple(names) for claim, names in clashes.items()}

    def _both(self, a: Claim, r: Reading, b: Claim, s: Reading) -> bool:
        alike = a.means.stem != b.means.stem or _family(r) == _family(s)
        return alike and self._allow({a: r, b: s})

    # --- why not ---

    def _why(self, claim: Claim, reading: Reading, clash: tuple[str, ...]) -> str:
        """Why a reading cannot have printed a claim."""
        if not self.bounds.can(reading):
            return f"a block has {self.bounds.d} slots"
        if reading not in self.alone[claim]:
            return _beyond(claim, self.bounds.extent(reading), "")
        if clash:
            return f"it contradicts {_listed([c for c in self.line.claims if c.name in clash])}"
        family, alike = _family(reading), [claim]
        if claim.means.known:
            alike = [c for c in self.line.claims if c.means.stem == claim.means.stem]
        for twin in alike:
            if not any(_family(r) == family for r in self.alone[twin]):
                return f"{twin} would be read alike, and cannot"
        own = {c: r for c in alike for r in self.alone[c] if _family(r) == family}
        own[claim] = reading
        if not self._allow(own):
            return f"{_listed(alike)} exclude each other when they are read so"
        for stem, members in self.stems.items():
            ways = self.ways[stem]
            if stem != claim.means.stem and not any(self._allow({**own, **way}) for way in ways):
                near = [c for c in members if self._counted(c) == self._counted(claim)]
                return self._against(own, claim, (near or members)[0])
        return "the line's other numbers exclude it together"

    def _against(self, own: Way, claim: Claim, other: Claim) -> str:
        """What a stem read in one way makes of another claim, or that claim of the reading."""
        readings = self.alone[other]
        for one in (claim, *(c for c in own if c is not claim)):
            spans = [self.bounds.span(own[one], [(r, other.number)]) for r in readings]
            ends = _hull(spans)
            if ends and not ends[0] <= one.number.hi <= ends[1] + 2 * one.number.slack:
                named = "it" if one is claim else f"{one} would be read alike, and"
                return _beyond(one, ends, f" where {other}", named)
        given = [(reading, one.number) for one, reading in own.items()]
        ends = _hull([self.bounds.span(r, given) for r in readings])
        return _beyond(other, ends, " then", other.name)


def _family(reading: Reading) -> tuple[str, bool]:
    return reading.kind, reading.bonus


def _tied(claim: Claim, reading: Reading) -> bool:
    """Whether a number belongs to the line's own blocks, not to a walk of its own."""
    return claim.means.population != "walked" or reading.kind not in _WALKS_ITSELF


def _ways(members: Sequence[Claim], alone: Mapping[Claim, Sequence[Reading]]) -> list[Way]:
    """Ways to read the claims of one stem alike."""
    known = dict.fromkeys(_family(r) for claim in members for r in claim.means.readings)
    ways = []
    for family in known:
        way = {c: r for c in members for r in alone[c] if _family(r) == family}
        if len(way) == len(members):
            ways.append(way)
    return ways


def _listed(claims: Sequence[Claim]) -> str:
    return " and ".join(map(str, claims)) if len(claims) < 4 else "the numbers of this name"


def _hull(spans: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    known = [span for span in spans if span is not None]
    return (min(a for a, _ in known), max(b for _, b in known)) if known else None


def _beyond(claim: Claim, span: tuple[float, float] | None, where: str, named: str = "it") -> str:
    if span is None:
        return f"{named} has no value{where}"
    low, high = span
    if claim.number.hi < low:
        return f"{named} is at least {low:.3g}{where}"
    if claim.number.lo > high:
        return f"{named} is at most {high:.3g}{where}"
    return f"{named} does not take that value{where}"


def _within(claim: Claim, one: Estimate) -> bool:
    if one.lo is None or one.hi is None:
        return False
    return one.lo - claim.number.slack <= claim.value <= one.hi + claim.number.slack


def _decide(fit: Fit, measured: Mapping[str, Estimate]) -> Fit:
    """Keep the readings in whose measured interval the claim lies, if there are any."""
    kept = [n for n in fit.fits if n in measured and _within(fit.claim, measured[n])]
    if not kept:
        return fit
    out = [
        (name, f"measured on the training text it is {measured[name]}")
        for name in fit.fits
        if name in measured and name not in kept
    ]
    return replace(fit, fits=tuple(kept), by="measured", excluded=(*fit.excluded, *out))


def _hint(fit: Fit, measured: Mapping[str, Estimate]) -> Fit:
    """Add what the readings of the name measure, over every population and average."""
    anyhow = replace(fit.line, group="", claims=())  # a line that says nothing of its anchors
    names = [
        name
        for reading in fit.claim.means.readings
        for name in definitions_of(fit.claim, anyhow, reading)
    ]
    hints = [
        Measured(name, measured[name], _within(fit.claim, measured[name]))
        for name in names
        if name in measured
    ]
    return replace(fit, hints=tuple(hints))
