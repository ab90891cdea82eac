"""What claimed numbers mean, and why they differ from what decoding gets: explanations, no faults.

Everything here rests on what the other pages measured: which definitions can have printed a number,
how much of the gap each factor has, and whether the kind of text matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash_diag.causes import HARMLESS, Status, entry
from dflash_diag.data_causes import TEMPLATE
from dflash_diag.definitions import DEFINITIONS, Definition, definition
from dflash_diag.diagnostics.base import DRAFTER, Skip
from dflash_diag.errors import DiagError
from dflash_diag.gap import WALK
from dflash_diag.gap_words import sentence

if TYPE_CHECKING:
    from dflash_diag.claims import Fit
    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run
    from dflash_diag.strata import Blocks

    Read = Sequence[tuple[Fit, Sequence[Definition]]]

NO_CLAIM = "No number was claimed (--claim, --training-log)."
NAMES = ("metric.population", "metric.bonus", "metric.aggregation", "metric.tree_definition")
SHARES = ("accuracy", "marginal", "conditional", "survival")
"""Kinds whose unit is no token, so that no bonus token can be in them."""
TREES = ("topk_oracle", "ddtree_tau")
SERVED = DEFINITIONS["tau walked"]


def explained(run: Run) -> list[Entry]:
    """One entry for each cause that explains numbers."""
    return [*_metric(run), *_data(run)]


def contradictions(run: Run) -> list[str]:
    """Claims that cannot be true together, or that nothing can have printed, in words."""
    found = []
    for fit in _fits(run):
        if fit.contradicts:
            found.append(f"{fit.claim} contradicts {', '.join(fit.contradicts)}.")
        elif not fit.fits:
            found.append(f"{fit.claim} fits no definition.")
    return found


def claims(run: Run) -> list[dict[str, Any]]:
    """Every claim with the definitions that fit it."""
    return [one.to_json() for one in _fits(run)]


def _fits(run: Run) -> list[Fit]:
    from dflash_diag.gap_runs import fits_of

    return fits_of(run) if DRAFTER in run.roles else []


# --- metric.* ---------------------------------------------------------------------------------


def _metric(run: Run) -> list[Entry]:
    fits = [one for one in _fits(run) if one.fits]
    if not fits:
        return [entry(name, "not_tested", NO_CLAIM) for name in NAMES]
    read = [(fit, [definition(name) for name in fit.fits]) for fit in fits]
    return [
        _population(run, read),
        _counted("metric.bonus", read, lambda one: not _has_bonus(one), "without the bonus token"),
        _counted("metric.aggregation", read, lambda one: one.average == "macro", "a mean by text"),
        _counted("metric.tree_definition", read, _is_tree, "of a tree or of the top k"),
    ]


def _counted(cause: str, read: Read, differs: Callable[[Definition], bool], words: str) -> Entry:
    """Whether the definitions that fit the claims differ from serving's in one respect."""
    fits = [fit for fit, _ in read]
    answers = [{differs(one) for one in readings} for _, readings in read]
    certain, possible, none = (
        [fit for fit, one in zip(fits, answers, strict=True) if one == wanted]
        for wanted in ({True}, {True, False}, {False})
    )
    said = [f"{words[0].upper()}{words[1:]}, certainly: {_listed(certain)}" if certain else ""]
    said += [f"possibly {words}: {_listed(possible)}" if possible else ""]
    text = "; ".join(filter(None, said)) or f"Not {words}: {_listed(none)}"
    text = f"{text[0].upper()}{text[1:]}"
    status: Status = "found" if certain else "not_identifiable" if possible else "excluded"
    return entry(cause, status, f"{text}.")


def _listed(fits: Sequence[Fit], most: int = 4) -> str:
    names = list(dict.fromkeys(str(one.claim) for one in fits))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _has_bonus(one: Definition) -> bool:
    return one.bonus or one.kind in SHARES or "tau" in one.kind


def _is_tree(one: Definition) -> bool:
    return one.kind in TREES


def _population(run: Run, read: Read) -> Entry:
    """By the part of the gap that the choice of anchors has, where it was measured."""
    cause = "metric.population"
    by_fit = _counted(
        cause, read, lambda one: one.population != SERVED.population, "over all anchors"
    )
    try:
        gap = run.gap()
    except (Skip, DiagError) as why:
        return {**by_fit, "evidence": f"{by_fit['evidence']} The gap is not measured: {why}"}
    for bar in gap["bars"]:
        if WALK in bar["factors"] and by_fit["status"] != "excluded":
            numbers = {key: bar[key] for key in ("value", "lo", "hi")}
            certain = bar["lo"] is not None and not bar["lo"] <= 0 <= bar["hi"]
            status: Status = "found" if certain else "not_identifiable"
            text = f"{by_fit['evidence']} {sentence(bar, gap)}"
            return entry(cause, status, text, delta=_turned(numbers))
    return by_fit


def _turned(bar: Mapping[str, Any]) -> dict[str, Any]:
    """What a part takes away, as a positive number."""
    value, lo, hi = (None if bar[k] is None else -bar[k] for k in ("value", "lo", "hi"))
    return {"value": value, "lo": hi, "hi": lo}


# --- data.* -----------------------------------------------------------------------------------


def _data(run: Run) -> Iterable[Entry]:
    from dflash_diag.data_causes import findings
    from dflash_diag.strata import Blocks

    try:
        blocks = Blocks.of(run.scores(DRAFTER), run.texts())
    except (Skip, DiagError) as why:
        return [
            entry(cause, "not_tested", f"Nothing was scored: {why}")
            for cause in ("data.domain", "data.template")
        ]
    found = findings(blocks, beside=trained_on(run), seed=run.seed, draws=run.draws)
    return [_template(run) or one if one["cause"] == TEMPLATE else one for one in found]


def _template(run: Run) -> Entry | None:
    """The template's entry where other renderings were tried; it says more than form alone."""
    try:
        rows = run.renderings()["rows"]
    except Skip:
        return None
    best = max(rows, key=lambda row: row["delta"]["lo"] or -1.0)
    each = "; ".join(f"{row['name']}: {_priced(row)}" for row in rows)
    text = f"The same questions, rendered otherwise and answered anew, {each}."
    if (best["delta"]["lo"] or 0.0) > 0:
        return entry(
            TEMPLATE, "found", f"{text} This explains numbers, and is no fault of the drafter.",
            tau_own_reading=best["tau"], delta=best["delta"],
        )  # fmt: skip
    if all(row["delta"]["hi"] is not None and row["delta"]["hi"] < HARMLESS for row in rows):
        return entry(TEMPLATE, "excluded", f"{text} None of them is accepted more.")
    return entry(TEMPLATE, "not_identifiable", text)


def _priced(row: Mapping[str, Any]) -> str:
    tau, delta = row["tau"], row["delta"]
    ends = "" if delta["lo"] is None else f" [{delta['lo']:+.2f}, {delta['hi']:+.2f}]"
    return f"tau {tau['value']:.2f} ({delta['value']:+.2f}{ends})"


def trained_on(run: Run) -> tuple[str, Blocks] | None:
    """Text like that of training, as the drafter is accepted on it; None if there is none."""
    if not (run.config.training_sequences and run.config.target):
        return None
    try:
        return run.training.beside
    except (Skip, DiagError):
        return None
