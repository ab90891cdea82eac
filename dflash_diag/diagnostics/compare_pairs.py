"""Whether the drafter is really better than each of those beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dflash_diag.compare import MARGIN
from dflash_diag.compare_words import Json, answer, elided, ends, first_pairs, sentences, unlike
from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, estimate
from dflash_diag.results import Judgement, Result, Verdict, worst

GAIN = Threshold(
    estimate="delta_tau",
    at_least=0.0,
    margin=MARGIN,
    what="the difference of tau while decoding",
    source=(
        f"a gain that is certainly below {MARGIN:g} tokens a round is none worth having, the bound "
        "below which the doctor takes an effect for none"
    ),
)
NUMBERS = ("delta", "lo", "hi", "delta_macro", "macro_lo", "macro_hi")
MORE = ("n_prompts", "p", "p_adjusted", "verdict", "better")


def judge(result: Result) -> Judgement:
    """FAIL where another is better by more than the margin, WARN where it is by less."""
    asked = result.params["asked"]
    said = "; ".join(f"against {one['b']}: {_lower(answer(one))}" for one in asked)
    return Judgement(verdict_of(asked), said)


def verdict_of(asked: Sequence[Json]) -> Verdict:
    """The worst verdict on the pairs of the drafter that is asked about."""
    return worst(map(_verdict, asked))


def _verdict(pair: Json) -> Verdict:
    if pair["better"] == pair["b"]:
        return Verdict.FAIL if pair["delta_tau"]["hi"] < -MARGIN else Verdict.WARN
    return Verdict.PASS if pair["verdict"] in ("yes", "no") else Verdict.INCONCLUSIVE


@diagnostic(
    id="compare.pairs",
    question="Is the drafter really better than what it is compared with?",
    page="08_compare",
    judge=judge,
    thresholds=[GAIN],
)
def compare_pairs(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Paired differences of walked tau, all pairs, with sign-flip tests after Holm.

    Returns
    -------
    tuple
        Frame columns: a, b, delta (a less b, pooled) with lo and hi, delta_macro (of means over
        prompts) with macro_lo and macro_hi [tokens a round], n_prompts, p, p_adjusted, verdict
        (yes, no, or how many prompts are needed), better (whose lead is sure).
    """
    import pandas as pd

    found = inputs.compared()
    asked, differs = first_pairs(found), unlike(found["differs"])
    rows = [
        (
            *(one["a"], one["b"], *ends(one["delta_tau"]), *ends(one["delta_tau_macro"])),
            *(one[key] for key in MORE),
        )
        for one in found["pairs"]
    ]
    frame = pd.DataFrame(rows, columns=["a", "b", *NUMBERS, *MORE])
    frame[list(NUMBERS)] = frame[list(NUMBERS)].astype(float)
    estimates = {
        f"tau of {one['name']}": estimate(one["tau"], one["n_prompts"], "tokens")
        for one in found["drafters"]
    }
    estimates |= {
        "delta_tau" if one == asked[0] else f"{one['a']} less {one['b']}": estimate(
            one["delta_tau"], one["n_prompts"], "tokens"
        )
        for one in found["pairs"]
    }
    params = {
        "n_prompts": min(one["n_prompts"] for one in found["pairs"]),
        "asked": asked,
        "drafters": found["drafters"],
        "margin": found["margin"],
        "finding": _finding(asked),
    }
    # What was not alike is said before any number.
    said = [*differs, sentences(asked)]
    fields = {"estimates": estimates, "params": params, "notes": found["notes"]}
    return " ".join(said), frame, fields


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]


def _finding(asked: Sequence[Json]) -> str:
    said = [
        f"{elided(one['a'])} better than {elided(one['b'])}? {one['verdict'].capitalize()}"
        for one in asked
    ]
    return "; ".join(said[:2]) + (f"; and {len(said) - 2} more" if len(said) > 2 else "")
