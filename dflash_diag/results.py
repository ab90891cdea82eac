"""What a diagnostic returns: one frozen `Result`, judged by its interval, readable without us.

Measuring fills a `Result`; `judge` turns an interval into a verdict; drawing looks a plot up by the
result's id. Each can be called alone on a saved result. Nothing here draws, and nothing computes.
"""

from __future__ import annotations

import io
import math
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dflash_diag import storage
from dflash_diag.errors import BadInput
from dflash_diag.stats import Estimate, prompts_needed

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

T = TypeVar("T")

SCHEMA_VERSION = "dflash_diag.result/1"
MIME_TYPE = "application/vnd.dflash-diag.result+json"
FRAME = "frame.parquet"
"""File of a saved result's table."""
ROWS_SHOWN = 200
"""Rows of a frame that its HTML table shows; the file always holds all of them."""


class Verdict(Enum):
    """What a diagnostic concludes; each has a word and a glyph, so colour is never needed.

    Definition order is severity, mildest first. FAIL outranks ERROR: what was found to be wrong
    matters more than what could not be looked at.
    """

    PASS = "✓"  # noqa: S105
    SKIPPED = "–"  # noqa: RUF001
    INCONCLUSIVE = "?"
    WARN = "!"
    ERROR = "⚠"
    FAIL = "✗"

    @property
    def glyph(self) -> str:
        """A single character that stands for the verdict."""
        return str(self.value)

    @property
    def severity(self) -> int:
        """0 for PASS up to 5 for FAIL."""
        return list(Verdict).index(self)

    def __str__(self) -> str:
        return self.name


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Most severe of some verdicts; SKIPPED where there are none."""
    return max(verdicts, key=lambda v: v.severity, default=Verdict.SKIPPED)


class Judgement(NamedTuple):
    """A verdict with the sentence that justifies it."""

    verdict: Verdict
    reason: str


def judge(
    estimate: Estimate,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    margin: float = 0.0,
    what: str = "the value",
    comparisons: int = 1,
) -> Judgement:
    """Judge an estimate by its whole interval, never by the point.

    Parameters
    ----------
    at_least, at_most
        Ends of the good range; with both, the value has to stay between them.
    margin
        How far beyond the good range is still only a warning.
    what
        Name of the quantity in the sentence.
    comparisons
        Comparisons made at once; raises the number of prompts that an INCONCLUSIVE asks for.

    Returns
    -------
    Judgement
        PASS with the whole interval in the good range, WARN with all of it in the margin, FAIL
        with all of it beyond, and INCONCLUSIVE (with the number of prompts that would settle it)
        where it straddles an edge or where there is none.
    """
    if at_least is None and at_most is None:
        msg = "judge needs at_least, at_most or both"
        raise ValueError(msg)
    low = float("-inf") if at_least is None else at_least
    high = float("inf") if at_most is None else at_most
    wanted = " and ".join(
        f"{words} {bound:g}"
        for words, bound in (("at least", at_least), ("at most", at_most))
        if bound is not None
    )
    found = f"{what} is {estimate}"
    if estimate.value is None:
        return Judgement(Verdict.INCONCLUSIVE, f"{what} is unknown; {wanted} is wanted")
    if estimate.lo is None or estimate.hi is None:
        why = "a single prompt gives no interval, 24 or more would settle it"
        return Judgement(Verdict.INCONCLUSIVE, f"{found}; {wanted} is wanted, but {why}")
    if low <= estimate.lo and estimate.hi <= high:
        return Judgement(Verdict.PASS, f"{found}: {wanted}, as wanted")
    if estimate.hi < low - margin or estimate.lo > high + margin:
        return Judgement(Verdict.FAIL, f"{found}; {wanted} is wanted")
    inside_margin = low - margin <= estimate.lo and estimate.hi <= high + margin
    if inside_margin and (estimate.hi < low or estimate.lo > high):
        why = f"it misses that by less than the margin of {margin:g}"
        return Judgement(Verdict.WARN, f"{found}; {wanted} is wanted, {why}")
    edges = {low, high, low - margin, high + margin}
    straddled = [edge for edge in edges if estimate.lo <= edge <= estimate.hi]
    needed = [prompts_needed(estimate, edge, comparisons=comparisons) for edge in straddled]
    return Judgement(
        Verdict.INCONCLUSIVE,
        f"{found} over {estimate.n} prompts, which does not decide whether it is {wanted}; "
        + _settling(needed),
    )


def _settling(needed: list[int | None]) -> str:
    if not needed or None in needed:
        return "the estimate lies on the edge itself, so no number of prompts can be named"
    return f"about {max(n for n in needed if n is not None)} prompts would settle it"


class _Copied:
    """A frame that is copied in and out, so that nobody can edit a result through it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.slot = f"_{name}"

    def __get__(self, result: object | None, owner: type) -> pd.DataFrame:
        if result is None:  # no default: the field has to be given
            raise AttributeError(self.slot)
        frame: pd.DataFrame = result.__dict__[self.slot]
        return frame.copy()

    def __set__(self, result: object, frame: pd.DataFrame) -> None:
        result.__dict__[self.slot] = frame.copy()


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Result:
    """One question, answered: numbers with intervals, a verdict, a tidy table."""

    id: str
    """Stable name of the diagnostic; its plot is looked up by it."""
    question: str
    """What was asked, as a person would ask it."""
    headline: str
    """What was found, in one sentence that a person can act on."""
    verdict: Verdict
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    frame: _Copied = _Copied()
    """Tidy pandas table of everything that the plot shows."""
    params: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    schema_version: str = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.id or not self.headline:
            msg = "a Result needs an id and a headline"
            raise ValueError(msg)
        for name in ("estimates", "params", "provenance"):
            object.__setattr__(self, name, dict(getattr(self, name)))
        object.__setattr__(self, "notes", tuple(self.notes))

    def to_json(self) -> dict[str, Any]:
        """Everything but the frame's rows, in JSON's own types; unknown numbers are None."""
        frame = self.frame
        record: dict[str, Any] = storage.plain(
            {
                "schema_version": self.schema_version,
                "id": self.id,
                "question": self.question,
                "verdict": self.verdict.name,
                "headline": self.headline,
                "estimates": {
                    name: {**one.to_json(), "n": one.n, "unit": one.unit}
                    for name, one in self.estimates.items()
                },
                "params": self.params,
                "notes": self.notes,
                "provenance": self.provenance,
                "frame": {"columns": [str(c) for c in frame.columns], "rows": len(frame)},
            }
        )
        return record

    def save(self, folder: storage.StrPath) -> Path:
        """Write ``result.json`` and ``frame.parquet`` into a folder that becomes this result's.

        Raises
        ------
        OutputError
            The folder cannot be written; what was there before is unchanged.
        """
        buffer = io.BytesIO()
        self.frame.to_parquet(buffer)
        with storage.staged_dir(folder) as stage:
            frame_path = storage.atomic_write(stage / FRAME, buffer.getvalue())
            record = self.to_json()
            record["frame"] |= {"file": frame_path.name, "sha256": storage.sha256_file(frame_path)}
            storage.write_json(stage / "result.json", record)
        return Path(folder)

    @classmethod
    def load(cls, folder: storage.StrPath) -> Result:
        """Read what `save` wrote.

        Raises
        ------
        BadInput
            No result there, one of another schema, or a table that is not the one saved with it.
        """
        folder = Path(folder)
        path = folder / "result.json"
        record = storage.read_json(path)
        version = record.get("schema_version") if isinstance(record, dict) else None
        if version != SCHEMA_VERSION:
            raise BadInput(
                f"{path} has schema_version {version}", SCHEMA_VERSION, "run the diagnostic again"
            )
        try:
            return cls._of(record, folder / FRAME)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BadInput(
                f"{path} is damaged ({error})",
                "what a diagnostic has saved",
                "run the diagnostic again",
            ) from error

    @classmethod
    def _of(cls, record: Mapping[str, Any], frame_path: Path) -> Result:
        """The result that a record tells of; what is not of its type is a TypeError."""
        if storage.sha256_file(frame_path) != record["frame"]["sha256"]:
            raise BadInput(
                f"{frame_path} is not the table that result.json names",
                f"sha256 {record['frame']['sha256']}",
                "run the diagnostic again",
            )
        estimates = _typed(record["estimates"], dict)
        return cls(
            id=_typed(record["id"], str),
            question=_typed(record["question"], str),
            headline=_typed(record["headline"], str),
            verdict=Verdict[record["verdict"]],
            estimates={name: Estimate(**one) for name, one in estimates.items()},
            frame=storage.read_parquet(frame_path),
            params=_typed(record["params"], dict),
            notes=tuple(_typed(one, str) for one in _typed(record["notes"], list)),
            provenance=_typed(record["provenance"], dict),
        )

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw this result on ``ax``, or on axes of its own, by the plot registered for its id.

        Raises
        ------
        BadInput
            No plot is registered for it.
        """
        from dflash_diag import plotting  # the one upward edge between layers

        if self.id not in plotting.PLOTS:
            raise BadInput(f"{self.id} has no plot", do="its table is in .frame")
        axes: Axes = plotting.plot(self, ax)
        return axes

    def html(self) -> str:
        """Static HTML that answers the question alone: verdict, figure, numbers, table, notes."""
        verdict = f"{self.verdict.glyph} <strong>{self.verdict.name}</strong>"
        sections = [
            f"<p>{verdict} {escape(self.headline)}</p>",
            self._figure(),
            _estimates_table(self.estimates),
            _frame_table(self.frame, caption=self.question),
            _notes(self.notes),
        ]
        body = "\n".join(section for section in sections if section)
        return (
            f'<section class="dflash-diag result verdict-{self.verdict.name.lower()}" '
            f'aria-label="{escape(self.question)}">\n{body}\n</section>'
        )

    def _figure(self) -> str:
        if self.verdict in (Verdict.SKIPPED, Verdict.ERROR):
            return ""
        from dflash_diag import plotting

        return plotting.figure_html(self) if self.id in plotting.PLOTS else ""

    def __repr__(self) -> str:
        return f"Result(id={self.id!r}, verdict={self.verdict.name}, headline={self.headline!r})"

    def __str__(self) -> str:
        lines = [f"{self.verdict.glyph} {self.verdict.name}  {self.headline}"]
        lines += [f"    {name}: {one}" for name, one in self.estimates.items()]
        lines += [f"    note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {"text/html": self.html(), "text/plain": str(self), MIME_TYPE: self.to_json()}


def _typed(value: Any, kind: type[T]) -> T:
    """A part of a record that somebody may have changed."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r:.60} is not a {kind.__name__}")
    return value


def skipped(
    id: str,  # noqa: A002
    question: str,
    reason: str,
    *,
    params: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Result:
    """Return the result of a diagnostic that could not apply, with the reason as its headline."""
    return _without_numbers(Verdict.SKIPPED, id, question, reason, (), params, provenance)


def failed(
    id: str,  # noqa: A002
    question: str,
    error: Exception,
    *,
    params: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> Result:
    """Return the ERROR result of a diagnostic that raised, so that the others still run."""
    name = type(error).__name__
    headline = str(error) if isinstance(error, BadInput) else f"{name}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    notes = [f"raised in {Path(f.filename).name}, line {f.lineno}, {f.name}" for f in frames[-1:]]
    return _without_numbers(Verdict.ERROR, id, question, headline, notes, params, provenance)


def _without_numbers(
    verdict: Verdict,
    id: str,  # noqa: A002
    question: str,
    headline: str,
    notes: Iterable[str],
    params: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None,
) -> Result:
    import pandas as pd

    return Result(
        id=id,
        question=question,
        headline=headline,
        verdict=verdict,
        frame=pd.DataFrame(),
        params=params or {},
        notes=tuple(notes),
        provenance=provenance or {},
    )


def _estimates_table(estimates: Mapping[str, Estimate]) -> str:
    rows = [
        (name, one.value, one.lo, one.hi, one.unit, one.n or None)
        for name, one in estimates.items()
    ]
    head = ("quantity", "value", "95 % from", "to", "unit", "prompts")
    return _table(head, rows, caption="Estimates with 95 % intervals over prompts")


def _frame_table(frame: pd.DataFrame, caption: str) -> str:
    shown = frame.head(ROWS_SHOWN)
    if len(shown) < len(frame):
        caption += f" (the first {len(shown)} of {len(frame)} rows; frame.parquet holds all)"
    return _table(frame.columns, shown.itertuples(index=False, name=None), caption=caption)


def _table(head: Iterable[Any], rows: Iterable[Iterable[Any]], *, caption: str) -> str:
    """HTML table with a caption and scoped headers; empty where there are no rows."""
    body = "\n".join(
        "<tr>" + "".join(f"<td>{escape(_cell(value))}</td>" for value in row) + "</tr>"
        for row in rows
    )
    if not body:
        return ""
    heads = "".join(f'<th scope="col">{escape(str(name))}</th>' for name in head)
    return (
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody>\n</table>"
    )


def _cell(value: Any) -> str:
    """Text of one cell: four significant digits, a dash for what is unknown."""
    value = value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
    if isinstance(value, float):
        return "—" if math.isnan(value) else f"{value:.4g}"
    return "—" if value is None or type(value).__name__ in ("NAType", "NaTType") else str(value)


def _notes(notes: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""
