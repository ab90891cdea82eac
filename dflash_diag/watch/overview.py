"""The page over all checkpoints, ``OUT/index.html``: is the newest better, the trend, the table.

It is made from the history and from what the watch remembers of each path. A change is the
difference to the checkpoint before, paired by prompt; each is a question of its own, so that its
answer stays what it was when further checkpoints follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from dflash_diag import pages, provenance, storage
from dflash_diag.compare import Pair, pair
from dflash_diag.compare_words import answer, numbers
from dflash_diag.errors import BadInput
from dflash_diag.history import Row, reference_side
from dflash_diag.results import Result, Verdict
from dflash_diag.stats import FEW_PROMPTS, Estimate
from dflash_diag.trend import Point, line_of, trend
from dflash_diag.watch.regression import Rule, best_of, earlier, in_order, regression
from dflash_diag.watch.state import ENDED, Seen, log_file

FILE = "index.html"
VERSION = "overview/1"
NAMED = 5
"""Waiting checkpoints that are named; more are counted."""
HEAD = 2000
"""Bytes of the page within which its key stands."""
UNMEASURED = {"unreadable": "could not be read", "failed": "its report failed twice"}
"""Stages in which a checkpoint has no row though nothing more will be tried, in words."""
REGRESSION = {
    Verdict.FAIL: "yes",
    Verdict.WARN: "a small one",
    Verdict.PASS: "none",
    Verdict.INCONCLUSIVE: "open",
}
"""What the rule says of the newest, in words."""


CAPTION = (
    "Tau of each checkpoint with its 95 % interval over prompts, and the reference's level with "
    "its own. Intervals that overlap say little about a difference: the table has it, paired."
)


class Level(NamedTuple):
    """What the reference drafter gets."""

    name: str
    tau: Estimate


class Line(NamedTuple):
    """A checkpoint in the table."""

    row: Row
    step: str
    """In words, unless the name tells it."""
    verdict: Verdict
    tau: pages.Number
    change: pages.Number | None
    """To the checkpoint before, if there is one."""
    answer: str
    """Whether that is better; else why it was not compared."""
    link: str
    """Address of its report, from the page; empty where the report is gone."""


@dataclass(frozen=True)
class Overview:
    """What the page is made from."""

    where: str
    """The folder or pattern that is watched."""
    out: Path
    """Folder of the history, and of the page."""
    rows: Sequence[Row]
    seen: Sequence[Seen]
    rule: Rule
    facts: Mapping[str, Any]
    """What all checkpoints are measured with, for the foot of the page."""

    def write(self) -> None:
        """Replace the page, unless it shows all this already; a reader meets the old or the new.

        Raises
        ------
        OutputError
            It cannot be written; the old one is as it was.
        """
        path, key = self.out / FILE, self.key
        if path.is_file():
            with path.open("rb") as file:
                if key.encode() in file.read(HEAD):
                    return
        storage.atomic_write(path, self.html())

    @property
    def key(self) -> str:
        """Hash of all that the page shows."""
        return storage.content_key(
            VERSION,
            provenance.versions()["dflash-diag"],
            [self.where, self.rule.against, self.rule.margin, self.rule.seed, self.rule.draws],
            [[row.run_id, row.finished.isoformat(), self._link(row)] for row in self.rows],
            [[one.name, one.stage, one.error] for one in self._unmeasured()],
            self._waiting(),
            storage.plain(self.facts),
        )

    def html(self) -> str:
        """The page."""
        from markupsafe import Markup

        from dflash_diag import views

        rows = in_order(self.rows)[::-1]
        newest = rows[0] if rows else None
        level = None if newest is None else self._reference(newest)
        figure, about = ("", []) if newest is None else self._trend(newest, level)
        made = pages.render(
            "watch.html.j2",
            provenance=self.facts,
            key=self.key,
            pages=[],
            title=f"Checkpoints of {self.where}",
            subject=f"{len(rows)} checkpoint{'' if len(rows) == 1 else 's'} of {self.where}",
            finished=provenance.utc_now().isoformat(timespec="seconds"),
            newest=newest,
            verdict=None if newest is None else Verdict[newest.verdict],
            headline=self._headline(newest),
            leads=self._leads(newest),
            numbers=self._numbers(newest, level),
            figure=Markup(figure),  # noqa: S704 - escaped where it was made
            about=about,
            lines=[self._line(row) for row in rows],
            unmeasured=[
                (one.name, UNMEASURED[one.stage], one.error, self._log(one))
                for one in self._unmeasured()
            ],
        )
        views.check_offline(made, FILE)
        return made

    # --- the newest -------------------------------------------------------------------------------

    def _headline(self, newest: Row | None) -> str:
        if newest is None:
            return "No checkpoint has been measured yet"
        before = self._before(newest)
        if before is None:
            tau = pages.number("", newest.tau)
            return f"{newest.name} gets {tau.value} tokens a round ({tau.detail})"
        return said(self._change(newest, before))

    def _leads(self, newest: Row | None) -> list[str]:
        """What stands below the headline: how sure it is, the best so far, what is still to do."""
        leads, waiting, failed = [], self._waiting(), len(self._unmeasured())
        before = None if newest is None else self._before(newest)
        if newest is not None and before is not None:
            change = self._change(newest, before)
            few = f" Below {FEW_PROMPTS} prompts, intervals run short."
            leads.append(f"{_by(change)}.{few * (change.n_prompts < FEW_PROMPTS)}")
            best = best_of(earlier(newest, self.rows))
            if best is not before and set(best.ids) & set(newest.ids):
                change = self._change(newest, best)
                leads.append(f"{best.name} was the best before it. {said(change)}: {_by(change)}.")
        if waiting:
            more = f" and {len(waiting) - NAMED} more" if len(waiting) > NAMED else ""
            leads.append(f"Still to be measured: {', '.join(waiting[:NAMED])}{more}.")
        elif newest is None and not failed:
            leads.append("None has appeared so far.")
        if failed:
            leads.append(f"{failed} could not be measured: the reasons are at the end.")
        return leads

    def _numbers(self, newest: Row | None, level: Level | None) -> list[pages.Number]:
        if newest is None:
            return []
        made = [pages.number(f"{newest.name} while decoding", newest.tau)]
        best = best_of([*earlier(newest, self.rows), newest])
        if best is not newest:
            made.append(pages.number(f"the highest so far, {best.name}", best.tau))
        if level is not None:
            made.append(pages.number(f"the reference, {level.name}", level.tau))
        return [*made, *self._regression(newest)]

    def _regression(self, newest: Row) -> list[pages.Number]:
        """What the rule says, which decides the exit code."""
        try:
            judged = regression(newest, self.rows, self.rule, self.out)
        except BadInput:  # the run that has the reference's numbers is gone
            return []
        if judged is None:
            return []
        value = f"{judged.verdict.glyph} {REGRESSION[judged.verdict]}"
        detail = f"against {judged.against}, margin {judged.margin:g}"
        return [pages.Number("regression", value, detail)]

    def _reference(self, row: Row) -> Level | None:
        """The reference drafter of a run, if it had one and is still there."""
        try:
            side = reference_side(row, self.out)
        except BadInput:
            return None
        if side is None:
            return None
        return Level(side.name, side.tau(seed=self.rule.seed, draws=self.rule.draws))

    def _trend(self, newest: Row, level: Level | None) -> tuple[str, list[str]]:
        """The figure and what to know about it; without a figure, why there is none."""
        from dflash_diag import plotting
        from dflash_diag.diagnostics.compare_trend import frame_of

        *points, own = (
            Point(row.side, row.tau, line_of(row.checkpoint))
            for row in in_order(self.rows)
            if set(row.ids) & set(newest.ids)
        )
        line = trend(points, own, seed=self.rule.seed, draws=self.rule.draws)
        if isinstance(line, str):
            return "", [f"{line} A trend takes two steps of one training."]
        shown = [one for one in line["points"] if one["line"] == own.line]
        ends = [(one["step"], one["tau"]["value"]) for one in (shown[0], shown[-1])]
        finding = ", ".join(f"step {step}: tau {tau:.2f}" for step, tau in ends)
        levels = [] if level is None else [{"name": level.name, "tau": level.tau.to_json()}]
        beside = "" if level is None else f"; the reference, {level.name}: {level.tau.value:.2f}"
        result = Result(
            id="compare.trend",
            question="Does more training still gain accepted tokens?",
            headline=f"{len(shown)} checkpoints, {finding}{beside}.",
            verdict=Verdict[newest.verdict],
            frame=frame_of(line, levels),
            params={
                "n_prompts": newest.n_prompts,
                "own": own.line,
                "log_unit": "tokens",
                "finding": finding,
            },
        )
        return plotting.figure_html(result, caption=CAPTION), line["left_out"]

    # --- the table --------------------------------------------------------------------------------

    def _line(self, row: Row) -> Line:
        before = self._before(row)
        if before is None:
            change, better = None, self._alone(row)
        else:
            found = self._change(row, before)
            change, better = pages.number("", found.delta_tau, "+"), answer(found.to_json())
        return Line(
            row=row,
            step="" if row.step is None or str(row.step) in row.name else f"step {row.step}",
            verdict=Verdict[row.verdict],
            tau=pages.number("", row.tau),
            change=change,
            answer=better,
            link=self._link(row),
        )

    def _before(self, row: Row) -> Row | None:
        """The checkpoint that one is compared with."""
        before = earlier(row, self.rows)
        return before[-1] if before and set(before[-1].ids) & set(row.ids) else None

    def _alone(self, row: Row) -> str:
        """Why a checkpoint is compared with none."""
        if earlier(row, self.rows):
            return "No prompt in common with the one before"
        first = in_order(self.rows)[0] is row
        return "The first" if first else "The first that was measured on this text"

    def _change(self, row: Row, other: Row) -> Pair:
        return _paired(row, other, self.rule.seed, self.rule.draws)

    def _link(self, row: Row) -> str:
        there = (self.out / row.out / FILE).is_file()
        return link(row) if there else ""

    # --- what has no row --------------------------------------------------------------------------

    def _waiting(self) -> list[str]:
        return [one.name for one in self.seen if one.stage not in ENDED]

    def _unmeasured(self) -> list[Seen]:
        return [one for one in self.seen if one.stage in UNMEASURED]

    def _log(self, one: Seen) -> str:
        """Address of what the processes wrote about a checkpoint, from the page."""
        path = log_file(self.out, one.name)
        return quote(path.relative_to(self.out).as_posix()) if path.is_file() else ""


def link(row: Row) -> str:
    """Address of a checkpoint's report, relative to the history's folder."""
    return f"{quote(Path(row.out).as_posix())}/{FILE}"


def said(change: Pair) -> str:
    """Better, worse, neither, or how many prompts would tell."""
    if change.better == change.b:
        return f"{change.a} is worse than {change.b}"
    if change.verdict.answer == "yes":
        return f"{change.a} is better than {change.b}"
    if change.delta_tau.lo == change.delta_tau.hi == 0:
        return f"{change.a} does the same as {change.b}"
    if change.verdict.answer == "no":
        return f"{change.a} is no real gain over {change.b}"
    return f"Whether {change.a} is better than {change.b} is open: it {change.verdict}"


def _by(change: Pair) -> str:
    return numbers(change.to_json())


@cache
def _paired(row: Row, other: Row, seed: int, draws: int) -> Pair:
    """A checkpoint less another; each pair is resampled once."""
    name = other.name
    if name == row.name:  # replaced in place
        name += f" of {other.written:%Y-%m-%d %H:%M}"
    return pair(row.side, replace(other.side, name=name), seed=seed, draws=draws)
