"""Whatever was counted, the bounds allow the reading under which it was printed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from score_table import Scores

from dflash_diag import definitions
from dflash_diag.bounds import Bounds, Number, Reading
from dflash_diag.claims import Line, definitions_of, judge, read_claims, shown
from dflash_diag.metric_names import anything

V = 24
SLOW = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@st.composite
def tables(draw, d: int | None = None) -> Scores:
    """Good and bad drafters, slots that depend on each other or do not, masks or none."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d = d or draw(st.integers(1, 9))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    a = sum(sizes)
    skill = rng.random((a, 1)) ** draw(st.sampled_from([0.2, 1, 4]))
    fade = draw(st.sampled_from([1.0, 0.8, 0.4])) ** np.arange(d)
    far = rng.geometric(draw(st.sampled_from([0.05, 0.3, 0.8])), (a, d)).clip(1, V - 1)
    rank = np.where(rng.random((a, d)) < skill * fade, 0, far)
    logits = np.sort(rng.normal(0, draw(st.sampled_from([0.01, 1, 6])), (a, d, V)))[..., ::-1]
    valid = None
    if draw(st.booleans()):
        valid = rng.random((a, d)) < 0.8
        valid[:, 0] = True  # an anchor without a label trains nothing
    return Scores(
        prompt_ids=[f"p{i}" for i in range(len(sizes))],
        prompt=np.repeat(np.arange(len(sizes)), sizes),
        anchor=np.concatenate([5 + np.arange(n) for n in sizes]),
        labels=rank,
        proposed=np.zeros_like(rank),
        rank=rank,
        topk_logprobs=logits - np.log(np.exp(logits).sum(-1, keepdims=True)),
        block_size=d + 1,
        valid=valid,
    )


def numbers(scores: Scores, population: str = "uniform", average: str = "") -> dict[Reading, float]:
    """Every definition of one population and average, by reading."""
    table = definitions.Table(scores)
    return {
        Reading(one.kind, one.number, one.bonus): float(one.count(table).value()[0])
        for one in definitions.definitions(scores.labels.shape[1]).values()
        if one.population == population and one.average == (average or "micro")
    }


def finite(printed: dict[Reading, float]) -> dict[Reading, float]:
    return {reading: value for reading, value in printed.items() if np.isfinite(value)}


@SLOW
@given(tables(), st.data())
def test_all_numbers_of_a_table_can_be_true_together(scores, data):
    """Any of them, all at once: every inequality among any number of them is in this program."""
    d = scores.labels.shape[1]
    population = data.draw(st.sampled_from(["uniform", "walked"]))
    average = data.draw(st.sampled_from(["micro", "macro"]))
    printed = finite(numbers(scores, population, average))
    if population == "walked":  # these walk by their own length
        own = ("topk_oracle", "ddtree_tau", "chain_tau")
        printed = {r: v for r, v in printed.items() if r.kind not in own}
    for bounds in (Bounds(d), Bounds()):
        assert bounds.allow([(r, Number(v, 1e-6)) for r, v in printed.items()])
    one = data.draw(st.sampled_from(sorted(printed, key=str)))
    rest = [(r, Number(v, 1e-6)) for r, v in printed.items() if r != one]
    low, high = Bounds(d).span(one, rest)
    assert low - 1e-5 <= printed[one] <= high + 1e-5
    low, high = Bounds(d).extent(one)
    assert low - 1e-9 <= printed[one] <= high + 1e-9


FAMILIES = {
    "dds4": [Reading("topk_oracle", 4), Reading("topk_oracle", 4, True), Reading("ddtree_tau", 4)],
    "slots": [Reading("marginal"), Reading("survival"), Reading("conditional")],
    "accept_len": [
        Reading(kind, None, bonus)
        for kind, bonus in (
            ("streak", False),
            ("tau", False),
            ("streak_passing", False),
            ("tau_passing", False),
            ("eal_product", False),
            ("eal_product", True),
        )
    ],
}


@SLOW
@given(tables(), st.data())
def test_what_was_counted_is_among_what_fits(scores, data):
    """A dashboard's line, its names loose, its numbers rounded, under every choice of readings."""
    d = scores.labels.shape[1]
    values = numbers(scores)
    digits = data.draw(st.integers(1, 4))
    tree, slot, length = (data.draw(st.sampled_from(FAMILIES[name])) for name in FAMILIES)
    printed = {
        "streak": Reading("streak"),
        "accuracy": Reading("accuracy"),
        "dds4": tree,
        "dds8": tree._replace(number=8),
        "accept_len": length,
    }
    printed |= {f"position_{k}_acc": slot._replace(number=k) for k in range(2, d + 1)}
    printed = {name: r for name, r in printed.items() if np.isfinite(values[r])}
    lines = read_claims([f"{name}={values[r]:.{digits}f}" for name, r in printed.items()])
    for fit in judge(lines, n_proposed=data.draw(st.sampled_from([d, None]))):
        truth = definitions_of(fit.claim, fit.line, printed[fit.claim.name])
        assert set(truth) <= set(fit.fits), (fit.claim, fit.excluded)
        assert not fit.contradicts


@SLOW
@given(tables())
def test_names_that_say_their_anchors_are_bounded_apart(scores):
    """What is walked and what is not, pooled or averaged, come from different counts."""
    names = ["tau walked", "tau walked macro", "streak uniform", "topk_oracle@4 walked"]
    names += ["accuracy uniform macro", "ddtree_tau@8 walked", "ddtree_tau@8 uniform"]
    known = definitions.definitions(scores.labels.shape[1])
    values = {name: float(known[name].measure(scores).value()[0]) for name in names}
    for fit in judge(read_claims([f"{name}={value:.4f}" for name, value in values.items()])):
        assert fit.fits == (fit.claim.name,), fit.excluded


@SLOW
@given(st.data())
def test_every_step_of_a_log_allows_what_was_counted(data):
    d = data.draw(st.integers(2, 6))
    tree = data.draw(st.sampled_from(FAMILIES["dds4"]))
    named = {"streak": Reading("streak"), "dds4": tree, "dds8": tree._replace(number=8)}
    steps = []
    for _ in range(3):
        values = numbers(data.draw(tables(d)))
        steps.append({name: shown(round(values[r], 4)) for name, r in named.items()})
    last = read_claims([f"{name}={number.value:.4f}" for name, number in steps[-1].items()])[0]
    line = Line("train", "log", last.claims, 30, ((10, steps[0]), (20, steps[1])))
    for fit in judge([line], n_proposed=d):
        assert definitions_of(fit.claim, line, named[fit.claim.name])[0] in fit.fits


@SLOW
@given(tables(), st.data())
def test_an_unknown_name_keeps_its_definition(scores, data):
    values = finite(numbers(scores))
    reading = data.draw(st.sampled_from([r for r in anything() if r in values]))
    lines = read_claims(
        [f"mystery={values[reading]:.4f}", f"streak={values[Reading('streak')]:.4f}"]
    )
    (fit, _) = judge(lines, n_proposed=scores.labels.shape[1])
    assert definitions_of(fit.claim, fit.line, reading)[0] in fit.fits


@pytest.mark.parametrize("d", [1, 3, 7])
def test_a_perfect_and_a_hopeless_drafter_are_allowed(d):
    bounds = Bounds(d)
    for share in (0.0, 1.0):
        line = [(Reading("accuracy"), share), (Reading("streak"), share * d)]
        line += [(Reading("tau"), 1 + share * d), (Reading("full_block"), share)]
        line += [(Reading("ddtree_tau", 4), 1 + share * min(4, d))]
        assert bounds.allow([(reading, Number(value, 0)) for reading, value in line])
