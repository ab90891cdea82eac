"""What a diagnostic is: a question, how to measure it, and thresholds to judge the answer by.

A measurement reads saved inputs and returns a `Result` whose verdict is still open. Judging looks
at the result's intervals alone, so a stored result can be judged again under other thresholds. The
plot is looked up by id in `dflash_diag.plotting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from dflash_diag import results
from dflash_diag.errors import BadInput
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import Estimate

if TYPE_CHECKING:
    from dflash_diag.checkpoints import Checkpoint, TensorProblem
    from dflash_diag.claims import Line
    from dflash_diag.conventions import Convention
    from dflash_diag.influence import Influence
    from dflash_diag.scoring import Scores
    from dflash_diag.strata import Text
    from dflash_diag.training_audit import Audit

JUDGED = "Judged: "
"""How the note that justifies a verdict begins."""
DRAFTER, REFERENCE = "drafter", "reference"
NOTHING = (
    "Nothing was given to compare the states with (--against: a capture of the same tokens, or a "
    "backend and dtype such as torch/bfloat16)."
)


class Skip(Exception):
    """Raised by a measurement that does not apply; its text is the reason."""


@dataclass(frozen=True)
class Continuation:
    """What the target generated for one prompt."""

    id: str
    start: int
    """P: position of the first generated token."""
    ids: Sequence[int]
    """[G] token ids."""
    text: str | None = None
    """The same as text, where a tokenizer is at hand."""
    pieces: Sequence[str] | None = None
    """[G] text of each token, where it is known."""


class Inputs(Protocol):
    """What a diagnostic may read. A ``role`` is ``"drafter"`` or ``"reference"``."""

    seed: int
    draws: int

    @property
    def roles(self) -> Sequence[str]:
        """The drafters at hand, the judged one first."""

    def name(self, role: str) -> str:
        """What a drafter is called."""

    def checkpoint(self, role: str) -> Checkpoint:
        """Its files."""

    def problems(self, role: str) -> Sequence[TensorProblem]:
        """What the audit of its tensors found."""

    def convention(self, role: str) -> Convention:
        """The reading under which it was scored."""

    def static(self, role: str) -> Sequence[Mapping[str, Any]]:
        """What its files say without being scored: one `Checked` a check, as JSON."""

    def scores(self, role: str) -> Scores:
        """One row an anchor."""

    def metrics(self, role: str) -> Mapping[str, Any]:
        """What ``score --json`` writes."""

    def continuations(self) -> Sequence[Continuation]:
        """What the target generated for each prompt."""

    def texts(self) -> Sequence[Text]:
        """Every prompt with its continuation, and what the target would say along it."""

    def lossless(self) -> Mapping[str, Any]:
        """Outcome of the lossless check: ``rows``, ``notes``; raises `Skip` without a target."""

    def served(self) -> Mapping[str, Any] | None:
        """The same comparison for a server's output; None where none was given."""

    def sides(self) -> Sequence[str]:
        """What the captured states are compared with; empty where nothing was given."""

    def divergence(self, side: str) -> Mapping[str, Any]:
        """Comparison with a side: rows ``layers``, ``prompts``, ``modules``, ``flips``; notes."""

    def side_scores(self, side: str) -> tuple[Scores, Scores]:
        """The drafter's scores on the capture and on a side; raises `Skip` where there are none."""

    def state_checks(self) -> Mapping[str, Any]:
        """Rows of the hidden-state audit by diagnostic id; a text where a check was skipped."""

    def alignment(self) -> Mapping[str, Any]:
        """Readings tried, causes found, positions, density; raises `Skip` without a drafter."""

    def doctor(self) -> Mapping[str, Any]:
        """What ``doctor --json`` writes; raises `Skip` without a drafter."""

    def reference(self) -> Mapping[str, Any] | None:
        """What became of a server's continuations; None where they are the target's own."""

    def renderings(self) -> Mapping[str, Any]:
        """The chat template and the price of other renderings; `Skip` where none was tried."""

    def replay(self) -> Mapping[str, Any]:
        """The training measurement again, by split, and what was claimed; `Skip` without texts."""

    def gap(self) -> Mapping[str, Any]:
        """The way from a training number to the serving tau, part by part."""

    def claimed(self) -> Sequence[Line]:
        """Numbers that somebody claims, typed in or logged; empty where there are none."""

    def compared(self) -> Mapping[str, Any]:
        """Drafters side by side: ``pairs``, ``slots``, ``prompts``, ``trend``; `Skip` if alone."""

    def influence(self, role: str) -> Influence:
        """What its proposals depend on as it runs; raises `Skip` where that cannot be tried."""

    def audit(self) -> Audit:
        """What the training step does; raises `Skip` where none was given."""

    def provenance(self) -> Mapping[str, Any]:
        """Where the inputs come from."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A bound on one estimate, with where the bound comes from."""

    estimate: str
    at_least: float | None = None
    at_most: float | None = None
    margin: float = 0.0
    what: str = ""
    source: str

    def to_json(self) -> dict[str, Any]:
        return {
            "estimate": self.estimate,
            "at_least": self.at_least,
            "at_most": self.at_most,
            "margin": self.margin,
            "source": self.source,
        }

    def judge(self, result: Result) -> Judgement:
        """Judge a result by this bound alone."""
        return results.judge(
            result.estimates[self.estimate],
            at_least=self.at_least,
            at_most=self.at_most,
            margin=self.margin,
            what=self.what or self.estimate,
        )


Measure = Callable[[Inputs], Result]
Judge = Callable[[Result], Judgement]


@dataclass(frozen=True, kw_only=True)
class Diagnostic:
    """One entry of the registry."""

    id: str
    question: str
    page: str
    """The notebook that shows it."""
    measure: Measure
    judge: Judge
    thresholds: tuple[Threshold, ...] = ()
    version: int = 1
    """Raised when the measurement changes, so that stored results are not taken for new ones."""

    def __call__(self, inputs: Inputs) -> Result:
        """Measure and judge. A measurement that fails becomes an ERROR result, never an exception.

        Bad input is the exception to that: it was given by a person, who has to hear of it.
        """
        try:
            measured = self.measure(inputs)
        except Skip as reason:
            return results.skipped(self.id, self.question, str(reason))
        except BadInput:
            raise
        except Exception as error:
            # One crash must not hide the other answers, but a library that is broken off may
            # take the interruption for an error of its own.
            if _is_interruption(error):
                raise KeyboardInterrupt from error
            return results.failed(self.id, self.question, error)
        return self.rejudge(measured)

    def rejudge(self, measured: Result) -> Result:
        """The same result under this diagnostic's thresholds; touches no input."""
        if measured.verdict in (Verdict.SKIPPED, Verdict.ERROR):
            return measured
        verdict, reason = self.judge(measured)
        params = {**measured.params, "judged": reason}
        params["thresholds"] = [one.to_json() for one in self.thresholds]
        why = "".join(f" Why: {one.source}." for one in self.thresholds)
        notes = [note for note in measured.notes if not note.startswith(JUDGED)]
        notes.append(f"{JUDGED}{reason}.{why}")
        return replace(
            measured, verdict=verdict, params=params, notes=tuple(notes), frame=measured.frame
        )

    def result(self, headline: str, frame: Any, **fields: Any) -> Result:
        """A result of this diagnostic whose verdict is still open."""
        return Result(
            id=self.id,
            question=self.question,
            headline=headline,
            verdict=Verdict.INCONCLUSIVE,
            frame=frame,
            **fields,
        )


REGISTRY: dict[str, Diagnostic] = {}


def diagnostic(
    *,
    id: str,  # noqa: A002 - it is the id
    question: str,
    page: str,
    judge: Judge | None = None,
    thresholds: Sequence[Threshold] = (),
    version: int = 1,
) -> Callable[[Callable[[Inputs], tuple[str, Any, dict[str, Any]]]], Diagnostic]:
    """Register a measurement.

    The decorated function returns ``(headline, frame, fields)``, the last being further fields of
    the `Result`. Without ``judge`` the first threshold decides.
    """

    def register(function: Callable[[Inputs], tuple[str, Any, dict[str, Any]]]) -> Diagnostic:
        def measure(inputs: Inputs) -> Result:
            headline, frame, fields = function(inputs)
            provenance = {**inputs.provenance(), "diagnostic_version": version}
            return made.result(headline, frame, provenance=provenance, **fields)

        made = Diagnostic(
            id=id,
            question=question,
            page=page,
            measure=measure,
            judge=judge or (lambda result: made.thresholds[0].judge(result)),
            thresholds=tuple(thresholds),
            version=version,
        )
        if id in REGISTRY:
            raise ValueError(f"two diagnostics are called {id}")
        REGISTRY[id] = made
        return made

    return register


def estimate(numbers: Mapping[str, Any], n: int, unit: str) -> Estimate:
    """``{"value", "lo", "hi"}`` of the metrics as an `Estimate` over ``n`` prompts."""
    return Estimate(numbers["value"], numbers["lo"], numbers["hi"], n, unit)


def interval(one: Estimate | Mapping[str, Any], digits: int = 2) -> str:
    """An estimate in words: ``1.31 (95 % interval 1.22 to 1.41)``."""
    value, lo, hi = (
        (one.value, one.lo, one.hi)
        if isinstance(one, Estimate)
        else (one["value"], one["lo"], one["hi"])
    )
    if value is None:
        return "unknown"
    if lo is None or hi is None:
        return f"{value:.{digits}f} (no interval)"
    return f"{value:.{digits}f} (95\u00a0% interval {lo:.{digits}f} to {hi:.{digits}f})"


def signed(one: Estimate, digits: int = 2) -> str:
    """A difference in words: ``-1.44 (95 % interval -1.90 to -1.05)``."""
    if one.value is None:
        return "unknown"
    if one.lo is None or one.hi is None:
        return f"{one.value:+.{digits}f} (no interval)"
    return (
        f"{one.value:+.{digits}f} (95\u00a0% interval {one.lo:+.{digits}f} to {one.hi:+.{digits}f})"
    )


def relative(value: float | None) -> str:
    """A relative error in words: ``0.49 %``."""
    if value is None:
        return "not a number"
    shown = 100 * value
    return f"{shown:.0f}\u00a0%" if shown >= 99.5 else f"{shown:.2g}\u00a0%"


def _is_interruption(error: BaseException | None) -> bool:
    """Whether an error was raised on account of Ctrl-C, or of a signal that is treated like it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def layer_names(layers: Iterable[int]) -> str:
    """Layers in words, three or more in a row as a range: ``layers -1 to 3, 7``."""
    spans: list[list[int]] = []
    for layer in sorted(set(layers)):
        if spans and layer == spans[-1][-1] + 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    parts = [
        f"{one[0]} to {one[-1]}" if len(one) > 2 else ", ".join(map(str, one)) for one in spans
    ]
    alone = len(spans) == 1 and len(spans[0]) == 1
    return f"layer{'' if alone else 's'} {', '.join(parts)}"


def percent(value: float | None) -> str:
    """A share in words: ``44 %``."""
    return "an unknown share" if value is None else f"{100 * value:.0f}\u00a0%"
