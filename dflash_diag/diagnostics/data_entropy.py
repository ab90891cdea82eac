"""Whether prompts that are accepted less are harder, or only drafted worse."""

from __future__ import annotations

from typing import Any

from dflash_diag.composition import PARTS, Split, split
from dflash_diag.data_causes import sets_by
from dflash_diag.diagnostics.base import Inputs, Skip, diagnostic
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import few_prompts_note
from dflash_diag.strata import NUMBERS, Blocks, kinds_of


def judge(result: Result) -> Judgement:
    """A difference that was split is explained as far as it can be; else say why it was not."""
    why = result.params["why_not"]
    if why:
        return Judgement(Verdict.INCONCLUSIVE, f"the difference cannot be split: {why}")
    if result.params["n_prompts"] < 2:
        return Judgement(Verdict.INCONCLUSIVE, "a single prompt gives no interval")
    return Judgement(Verdict.PASS, "the difference is split, which explains numbers")


@diagnostic(
    id="data.entropy",
    question="Is the text that is accepted less harder for the target itself?",
    page="06_train_vs_eval",
    judge=judge,
)
def entropy(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The difference between kinds of prompts, split by the target's entropy.

    Returns
    -------
    tuple
        Frame columns: a, b (the sets), number (tau_walked, tau_uniform [tokens] or accuracy
        [share]), part, value, lo, hi; rows whose part is ``share`` or ``rate`` belong to one bin
        of entropy of one set: set, low, high [nats].
    """
    import pandas as pd

    if not inputs.roles:
        raise Skip("No drafter was given, so nothing was drafted (--drafter).")
    role = inputs.roles[0]
    blocks = Blocks.of(inputs.scores(role), inputs.texts())
    if blocks.entropy is None:
        raise Skip("The capture holds no choices of the target, so its entropy is unknown.")
    kinds = kinds_of(blocks.texts)
    if isinstance(kinds, str):
        raise Skip(f"There are no sets of prompts to compare: {kinds}.")
    pairs = sets_by(blocks, kinds[0])
    splits = [
        split(*pair, number, seed=inputs.seed, draws=inputs.draws)
        for pair in pairs
        for number in NUMBERS
    ]
    frame = pd.DataFrame([row for one in splits for row in _rows(one)])
    headline = max(
        (one for one in splits if one.number == NUMBERS[0]),
        key=lambda one: (not one.why_not, abs(_value(one))),
    )
    name, n = inputs.name(role), headline.n_a + headline.n_b
    notes = [f"By all anchors: {one.sentence()}" for one in splits if _beside(one, headline)]
    if headline.orders and headline.differs:
        low, high = sorted(headline.orders)
        notes.append(
            f"The part of the mix is {low:+.2f} or {high:+.2f}, by the set whose acceptance is "
            "taken first; the mean of both is given."
        )
    notes.append(f"The kind of a prompt is {kinds[1]}.")
    few = few_prompts_note(min(headline.n_a, headline.n_b))
    return (
        f"{name}: {headline.sentence()}",
        frame,
        {
            "estimates": headline.estimates,
            "params": {
                "n_prompts": n,
                "a": headline.a,
                "b": headline.b,
                "why_not": headline.why_not,
                "finding": _finding(headline),
            },
            "notes": [*notes, *([few] if few else [])],
        },
    )


def _beside(one: Split, headline: Split) -> bool:
    return (one.a, one.number) == (headline.a, "accuracy")


def _value(one: Split) -> float:
    return (one.estimates["difference"].value or 0.0) if one.estimates else 0.0


def _finding(one: Split) -> str:
    if one.why_not:
        return f"{one.a} and {one.b} cannot be split"
    if not one.differs:
        return f"{one.a} and {one.b}: no certain difference"
    part, total = one.estimates["composition"].value or 0.0, _value(one)
    return f"{one.a} less {one.b}: {total:+.2f} tokens a round, {part:+.2f} of it by how sure"


def _rows(one: Split) -> list[dict[str, Any]]:
    about = {"a": one.a, "b": one.b, "number": one.number}
    rows: list[dict[str, Any]] = [
        {**about, "part": part, "set": "", "low": None, "high": None}
        | {"value": found.value, "lo": found.lo, "hi": found.hi}
        for part in PARTS
        if (found := one.estimates.get(part)) is not None
    ]
    for bin_ in one.bins:
        where = {"low": bin_.low, "high": bin_.high, "lo": None, "hi": None}
        for name, share, rate in (
            (one.a, bin_.share_a, bin_.rate_a),
            (one.b, bin_.share_b, bin_.rate_b),
        ):
            rows.append({**about, "part": "share", "set": name, **where, "value": share})
            rows.append({**about, "part": "rate", "set": name, **where, "value": rate})
    return rows
