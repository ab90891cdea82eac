"""Paired comparison: against brute force, by its symmetries, and what it refuses."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_diag import metrics
from dflash_diag.compare import (
    MARGIN,
    Decision,
    Pair,
    Side,
    pair,
    pairs,
    shared,
    text_digest,
)
from dflash_diag.errors import BadInput
from dflash_diag.stats import Estimate

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fakes import simulated_scores

DRAWS = 2_000


def side(name, tokens, rounds, *, ids=None, capture="text", step=None) -> Side:
    ids = ids or tuple(f"p{i:02d}" for i in range(len(tokens)))
    return Side(name, step, capture, tuple(ids), np.array(tokens, float), np.array(rounds, float))


def drawn(name, seed, *, n=30, gain=0.0, spread=0.3) -> Side:
    """Prompts of 60 tokens; a prompt's hardness is the same for every seed."""
    rng = np.random.default_rng(seed)
    hardness = np.random.default_rng(99).normal(2.5, 0.5, n)
    tau = np.clip(hardness + gain + rng.normal(0, spread, n), 1.05, 8)
    rounds = np.maximum(1, np.round(60 / tau))
    return side(name, np.full(n, 60.0), rounds)


# --- numbers against brute force ----------------------------------------------------------------


def test_the_difference_is_that_of_pooled_taus():
    """6 tokens in 2 rounds and 9 in 6, against 4 in 2 and 8 in 4: 15/8 - 12/6 = -0.125."""
    found = pair(side("a", [6, 9], [2, 6]), side("b", [4, 8], [2, 4]), seed=0, draws=DRAWS)
    assert found.delta_tau.value == pytest.approx(-0.125)
    assert found.delta_tau_macro.value == pytest.approx((3 + 1.5) / 2 - 2)
    assert found.delta == pytest.approx({"p00": 1.0, "p01": -0.5})


def test_the_interval_is_that_of_a_bootstrap_over_prompts():
    """A percentile bootstrap by hand; BCa moves its ends by no more than that with 30 prompts."""
    a, b = drawn("a", 1, gain=0.4), drawn("b", 2)
    found = pair(a, b, seed=0).delta_tau
    rng = np.random.default_rng(5)
    values = []
    for _ in range(20_000):
        at = rng.integers(0, 30, 30)
        values.append(
            a.tokens[at].sum() / a.rounds[at].sum() - b.tokens[at].sum() / b.rounds[at].sum()
        )
    lo, hi = np.percentile(values, [2.5, 97.5])
    assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=0.15 * (hi - lo))
    assert found.lo < found.value < found.hi


def test_pairing_makes_the_interval_narrower():
    a, b = drawn("a", 1, gain=0.3, spread=0.05), drawn("b", 2, spread=0.05)
    found = pair(a, b, seed=0, draws=DRAWS)
    alone = [one.tau(seed=0, draws=DRAWS) for one in (a, b)]
    width = found.delta_tau.hi - found.delta_tau.lo
    assert width < 0.5 * min(one.hi - one.lo for one in alone)


def test_the_p_value_is_that_of_all_sign_patterns():
    a, b = drawn("a", 1, n=9, gain=0.2), drawn("b", 2, n=9)
    apart = a.tokens / a.rounds - b.tokens / b.rounds
    sums = [abs(sum(s * d for s, d in zip(signs, apart, strict=True)))
            for signs in itertools.product((1, -1), repeat=9)]  # fmt: skip
    by_hand = np.mean([one >= abs(apart.sum()) - 1e-12 for one in sums])
    assert pair(a, b, seed=0, draws=DRAWS).p == pytest.approx(by_hand)


def test_a_side_of_scores_has_the_walked_tau_of_the_metrics():
    scores = simulated_scores(skill=0.6, n_prompts=8)
    jumps = {row["id"]: row["rounds"] for row in metrics.per_prompt(scores)}
    found = Side.of(jumps, name="a", capture="text")
    assert found.ids == tuple(scores.prompt_ids)
    assert found.rounds.sum() == metrics.score_json(scores, seed=0, draws=200)["n_rounds"]
    tau = metrics.measure(scores, seed=3, draws=400)["tau_walked_micro"]
    assert found.tau(seed=3, draws=400) == tau


# --- symmetries -----------------------------------------------------------------------------------

counts = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=2, max_size=12)


def of_counts(name, rows) -> Side:
    rounds = np.array([r for _, r in rows], float)
    return side(name, rounds + [t for t, _ in rows], rounds)


@given(counts, counts)
def test_exchanging_the_two_changes_the_sign_and_nothing_else(left, right):
    n = min(len(left), len(right))
    a, b = of_counts("a", left[:n]), of_counts("b", right[:n])
    one, other = pair(a, b, seed=0, draws=400), pair(b, a, seed=0, draws=400)
    assert one.delta_tau.value == pytest.approx(-other.delta_tau.value)
    assert one.delta_tau.lo == pytest.approx(-other.delta_tau.hi, abs=1e-9)
    assert one.delta_tau.hi == pytest.approx(-other.delta_tau.lo, abs=1e-9)
    assert one.p == other.p
    assert one.better == other.better
    assert "yes" not in (one.verdict.answer, other.verdict.answer) or one.verdict != other.verdict


@given(counts, st.randoms(use_true_random=False))
def test_the_order_of_the_prompts_does_not_count(rows, rng):
    a, b = of_counts("a", rows), of_counts("b", rows[::-1])
    order = list(range(len(rows)))
    rng.shuffle(order)
    shuffled = side("a", a.tokens[order], a.rounds[order], ids=[a.ids[i] for i in order])
    assert pair(shuffled, b, seed=0, draws=400) == pair(a, b, seed=0, draws=400)


@given(counts)
def test_a_drafter_is_not_better_than_itself(rows):
    found = pair(of_counts("a", rows), of_counts("a", rows), seed=0, draws=400)
    assert (found.delta_tau.value, found.delta_tau.lo, found.delta_tau.hi) == (0, 0, 0)
    assert found.p == 1
    assert found.verdict == Decision("no")
    assert found.better is None


def test_only_prompts_that_both_have_are_compared():
    a = side("a", [6, 6, 9], [2, 3, 3], ids=("x", "y", "z"))
    b = side("b", [5, 8, 6], [2, 2, 3], ids=("w", "z", "y"))
    found = pair(a, b, seed=0, draws=DRAWS)
    assert found.n_prompts == 2
    assert found.delta == {"y": 0.0, "z": -1.0}


# --- verdicts -------------------------------------------------------------------------------------


def judged(value, lo, hi, *, n=24, p=0.001, comparisons=1) -> Pair:
    delta = Estimate(value, lo, hi, n, "tokens")
    return Pair(
        a="a", b="b", delta_tau=delta, delta_tau_macro=delta, p=p, p_adjusted=p, n_prompts=n,
        comparisons=comparisons,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "answer", "better"),
    [
        (judged(0.5, 0.2, 0.8), "yes", "a"),
        (judged(-0.5, -0.8, -0.2), "no", "b"),
        (judged(0.0, -0.04, 0.04, p=0.9), "no", None),  # a gain that matters is excluded
        (judged(0.02, 0.01, 0.03), "no", "a"),  # better, and by nothing that matters
        (judged(0.2, -0.1, 0.5, p=0.2), "open", None),
        (judged(0.2, 0.01, 0.5, p=0.2), "open", None),  # the test does not agree
        (judged(-0.1, -0.3, 0.1, p=0.4), "open", None),
    ],
)
def test_the_interval_and_the_test_decide(found, answer, better):
    assert found.verdict.answer == answer
    assert found.better == better
    assert found.to_json()["verdict"] == str(found.verdict)


def test_more_prompts_are_asked_for_that_would_decide():
    """s = 0.6 * sqrt(24) / 3.92 = 0.75; (1.96 + 0.84)^2 * (s / 0.2)^2 = 110.3 prompts."""
    decision = judged(0.2, -0.1, 0.5, p=0.2).verdict
    assert decision == Decision("open", 111 - 24)
    assert str(decision) == "needs 87 more prompts"
    # The same spread, and a loss: a gain of 0.05 is 0.25 away.
    assert judged(-0.2, -0.5, 0.1, p=0.2).verdict.n_more < decision.n_more


def test_so_many_prompts_do_decide():
    """At the difference and spread that were seen, four of five worlds of that size decide."""
    small = pair(drawn("a", 2, n=12, gain=0.2), drawn("b", 102, n=12), seed=0, draws=DRAWS)
    assert small.verdict.answer == "open"
    n, gain = 12 + small.verdict.n_more, small.delta_tau.value
    answers = [
        pair(drawn("a", s, n=n, gain=gain), drawn("b", s + 500, n=n), seed=0, draws=DRAWS)
        for s in range(20)
    ]
    assert 13 <= sum(one.verdict.answer == "yes" for one in answers) <= 20


def test_a_single_prompt_and_a_few_never_say_yes():
    one = pair(side("a", [9], [1]), side("b", [9], [9]), seed=0, draws=DRAWS)
    assert str(one.verdict) == "needs 23 more prompts"
    four = pair(side("a", [9] * 4, [1] * 4), side("b", [9] * 4, [9] * 4), seed=0, draws=DRAWS)
    assert four.p == 0.125
    assert str(four.verdict) == "needs 2 more prompts"
    assert str(Decision("open", 1)) == "needs 1 more prompt"


def test_all_pairs_are_corrected_together():
    sides = [drawn(name, i, gain=g) for i, (name, g) in enumerate(zip("abc", (0.6, 0.3, 0.0)))]  # noqa: B905
    found = pairs(sides, seed=0, draws=DRAWS)
    assert [(one.a, one.b) for one in found] == [("a", "b"), ("a", "c"), ("b", "c")]
    alone = [pair(x, y, seed=0, draws=DRAWS) for x, y in itertools.combinations(sides, 2)]
    assert [one.delta_tau for one in found] == [one.delta_tau for one in alone]
    assert all(one.p_adjusted >= one.p for one in found)
    assert max(one.p_adjusted / one.p for one in found) == pytest.approx(3)
    assert all(one.comparisons == 3 for one in found)


def test_chance_alone_rarely_says_yes():
    """Equal drafters, three a time, 60 times: a yes among the six answers is an error of 5 %."""
    wrong = 0
    for seed in range(60):
        sides = [drawn(name, 10 * seed + i) for i, name in enumerate("abc")]
        wrong += any(one.better is not None for one in pairs(sides, seed=0, draws=400))
    assert wrong <= 8


# --- what is refused ------------------------------------------------------------------------------


def test_other_text_is_refused():
    with pytest.raises(BadInput, match="a and b were scored on different text; expected the same"):
        pair(side("a", [4], [2]), side("b", [4], [2], capture="other"), seed=0)


def test_nothing_in_common_is_refused():
    with pytest.raises(BadInput, match="no prompt was scored for both a and b"):
        pair(side("a", [4], [2], ids=("x",)), side("b", [4], [2], ids=("y",)), seed=0)


def test_one_drafter_is_no_comparison():
    with pytest.raises(BadInput, match="at least two"):
        pairs([side("a", [4], [2])], seed=0)


@pytest.mark.parametrize(
    "broken",
    [
        {"tokens": [], "rounds": []},
        {"tokens": [4, 4], "rounds": [2, 0]},
        {"tokens": [4], "rounds": [2, 2], "ids": ("x", "y")},
        {"tokens": [4, 4], "rounds": [2, 2], "ids": ("x", "x")},
    ],
)
def test_a_side_is_complete(broken):
    with pytest.raises(ValueError, match="a side needs"):
        side("a", **broken)


def test_the_digest_of_a_text_sees_every_token_and_no_order():
    texts = [("a", 1, [5, 6, 7]), ("b", 2, [5, 6, 7])]
    assert text_digest(texts) == text_digest(texts[::-1])
    changed = [("a", 1, [5, 6, 8]), ("a", 2, [5, 6, 7]), ("c", 1, [5, 6, 7])]
    assert len({text_digest([one, texts[1]]) for one in [texts[0], *changed]}) == 4


def test_the_margin_is_the_doctors():
    from dflash_diag.causes import HARMLESS

    assert MARGIN == HARMLESS == 0.05


def test_prompts_keep_an_order_that_all_share():
    def side(name, ids):
        return Side.of({one: [1, 2] for one in ids}, name=name, capture="c")

    assert shared([side("a", "cab"), side("b", "xcayb")]) == list("cab")
    assert shared([side("a", "cab"), side("b", "abc")]) == list("abc")
