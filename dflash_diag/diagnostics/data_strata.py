"""On which text the drafter is good, and on which it is not."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic, interval, signed
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import FEW_PROMPTS, Estimate, estimates
from dflash_diag.strata import NUMBERS, Blocks, Stratum, kinds_of, stratify


def judge(result: Result) -> Judgement:
    """Strata describe the text; what differs between them is no fault of the drafter."""
    n = result.params["n_prompts"]
    if n < 2:
        return Judgement(Verdict.INCONCLUSIVE, "a single prompt gives no interval")
    clear = result.params["n_clear"]
    said = f"{clear} of {result.params['n_strata']} strata differ for certain from the others"
    return Judgement(Verdict.PASS, f"{said}, which describes the text and is no fault")


@diagnostic(
    id="data.strata",
    question="On which text is the drafter accepted more, and on which less?",
    page="06_train_vs_eval",
    judge=judge,
)
def strata(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Walked tau, uniform tau and slot accuracy in every stratum of the text.

    Returns
    -------
    tuple
        Frame columns: role, drafter, dimension, stratum; tau_walked, tau_uniform [tokens],
        accuracy [share], each with _lo and _hi; versus_rest, versus_rest_lo, versus_rest_hi [tokens
        of walked tau]; differs, few, n_anchors, n_rounds, n_prompts.
    """
    import pandas as pd

    if not inputs.roles:
        raise Skip("No drafter was given, so nothing was drafted (--drafter).")
    texts = inputs.texts()
    rows, judged = [], inputs.roles[0]
    for role in inputs.roles:
        blocks = Blocks.of(inputs.scores(role), texts)
        made = stratify(blocks, seed=inputs.seed, draws=inputs.draws)
        rows += [{"role": role, "drafter": inputs.name(role), **_row(s)} for s in made.found]
        if role == judged:
            first, mine = made, blocks
    if not first.found:
        raise Skip("There are too few blocks to divide.")
    tau = estimates({"tau_walked": mine.sums()["tau_walked"]}, seed=inputs.seed, draws=inputs.draws)
    clear = sorted(
        (one for one in first.found if one.differs),
        key=lambda one: -abs(one.versus_rest.value or 0.0),
    )
    name, kinds = inputs.name(judged), kinds_of(mine.texts)
    few = sorted((one for one in first.found if one.few), key=lambda one: one.n_prompts)
    notes = [f"No strata by {which}: {why}." for which, why in first.not_tested.items()]
    if not isinstance(kinds, str):
        notes.append(f"The kind of a prompt is {kinds[1]}.")
    if few:
        named = ", ".join(f"{one.name} ({one.n_prompts})" for one in few)
        notes.append(f"Below {FEW_PROMPTS} prompts intervals run short: {named}.")
    if not clear:
        said = f"{name}: none of {len(first.found)} strata differs for certain from the others."
    else:
        said = f"{name} gets {interval(tau['tau_walked'])} tokens a round; {_most(clear)}."
    found = {**tau}
    if clear:
        found["versus_rest"] = clear[0].versus_rest
    return (
        said,
        pd.DataFrame(rows),
        {
            "estimates": found,
            "params": {
                "n_prompts": len(mine.texts),
                "n_strata": len(first.found),
                "n_clear": len(clear),
                "not_tested": first.not_tested,
                "finding": _finding(name, clear),
            },
            "notes": notes,
        },
    )


def _most(clear: list[Stratum]) -> str:
    """The stratum that differs most, in words."""
    one = clear[0]
    return (
        f"by {one.dimension} it differs most: {_two(one.numbers['tau_walked'])} in "
        f"\u201c{one.name}\u201d, {signed(one.versus_rest)} against the rest"
    )


def _finding(name: str, clear: list[Stratum]) -> str:
    if not clear:
        return f"{name}: no stratum differs for certain"
    dimensions = list(dict.fromkeys(one.dimension for one in clear))
    return f"{name}: acceptance goes with {', '.join(dimensions[:3])}"


def _row(one: Stratum) -> dict[str, Any]:
    row: dict[str, Any] = {"dimension": one.dimension, "stratum": one.name}
    numbers = {number: one.numbers[number] for number in NUMBERS}
    for name, found in {**numbers, "versus_rest": one.versus_rest}.items():
        row |= {name: found.value, f"{name}_lo": found.lo, f"{name}_hi": found.hi}
    return row | {
        "differs": one.differs,
        "few": one.few,
        "n_anchors": one.n_anchors,
        "n_rounds": one.n_rounds,
        "n_prompts": one.n_prompts,
    }


def _two(one: Estimate) -> str:
    return "unknown" if one.value is None else f"{one.value:.2f}"
