"""Intervals and tests over prompts, against hand-worked truths, SciPy and brute force."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats as scipy_stats

from dflash_diag.stats import (
    Estimate,
    bca,
    bca_apart,
    differences,
    estimates,
    few_prompts_note,
    holm,
    prompts_needed,
    ratio,
    sign_flip,
    smallest_p,
)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def one(r, seed=0, **kwargs):
    return estimates({"x": r}, seed=seed, **kwargs)["x"]


# --- values -------------------------------------------------------------------------------------


def test_micro_pools_rounds_and_macro_averages_prompts():
    tokens, rounds = [10, 2], [4, 2]
    pooled = ratio(tokens, rounds, "tokens")
    found = estimates({"micro": pooled, "macro": pooled.macro()}, seed=0)
    assert found["micro"].value == 12 / 6
    assert found["macro"].value == (10 / 4 + 2 / 2) / 2
    assert found["micro"].unit == "tokens"
    assert found["micro"].n == 2


def test_a_prompt_without_rounds_counts_nowhere():
    with_empty = ratio([10, 0, 2], [4, 0, 2])
    assert one(with_empty).value == 2.0
    assert one(with_empty.macro()).value == 1.75
    assert one(with_empty.macro()).n == 2
    assert np.isnan(with_empty.per_prompt()[1])


# --- intervals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [10, 24, 60])
def test_intervals_are_scipys_bca(n, rng):
    rounds = rng.integers(5, 40, n).astype(float)
    tokens = rng.poisson(rng.gamma(4, 0.5, n) * rounds).astype(float)
    pooled = ratio(tokens, rounds)
    ours = estimates({"micro": pooled, "macro": pooled.macro()}, seed=3)

    def pooled_mean(t, r, axis):
        return t.sum(axis) / r.sum(axis)

    theirs = {
        "micro": scipy_stats.bootstrap(
            (tokens, rounds), pooled_mean, paired=True, n_resamples=20_000, rng=11
        ),
        "macro": scipy_stats.bootstrap((tokens / rounds,), np.mean, n_resamples=20_000, rng=11),
    }
    for name, found in ours.items():
        lo, hi = theirs[name].confidence_interval
        assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=0.03 * (hi - lo))
        assert found.lo < found.value < found.hi


def test_a_paired_difference_is_scipys_bca_of_per_prompt_differences(rng):
    a, b = rng.normal(2.5, 0.8, 30), rng.normal(2.2, 0.1, 30)
    b += a - 2.5
    found = differences({"d": (ratio(a, 1), ratio(b, 1))}, seed=1)["d"]
    lo, hi = scipy_stats.bootstrap((a - b,), np.mean, n_resamples=20_000, rng=2).confidence_interval
    assert found.value == pytest.approx((a - b).mean())
    assert (found.lo, found.hi) == pytest.approx((lo, hi), abs=0.03 * (hi - lo))


def test_pairing_cancels_what_makes_a_prompt_hard(rng):
    hard = rng.normal(3, 1, 30)
    a, b = ratio(hard + 0.2 + rng.normal(0, 0.02, 30), 1), ratio(hard, 1)
    paired = differences({"d": (a, b)}, seed=0)["d"]
    alone = one(a)
    assert paired.lo > 0.15
    assert paired.hi - paired.lo < 0.1 * (alone.hi - alone.lo)


def test_a_pair_leaves_out_prompts_that_one_side_lacks():
    a, b = ratio([4.0, 6.0, 50.0], [2, 2, 5]), ratio([3.0, 5.0, 0.0], [2, 2, 0])
    found = differences({"d": (a, b)}, seed=0)["d"]
    assert found.value == 10 / 4 - 8 / 4
    assert found.n == 2


def test_a_drafter_differs_from_itself_by_nothing(rng):
    a = ratio(rng.integers(0, 20, 12), rng.integers(1, 9, 12))
    found = differences({"d": (a, a)}, seed=0)["d"]
    assert (found.value, found.lo, found.hi) == (0.0, 0.0, 0.0)


def test_intervals_cover_by_prompt_where_blocks_as_units_would_not(rng):
    """Acceptance varies by prompt, as on real text: 24 prompts of 30 rounds, 400 repeats."""
    repeats, prompts, rounds, truth = 400, 24, 30, 0.7
    level = np.clip(rng.normal(truth, 0.12, (repeats, prompts)), 0, 1)
    hits = rng.binomial(rounds, level)
    by_prompt = estimates({i: ratio(h, rounds) for i, h in enumerate(hits)}, seed=0, draws=4000)
    covered = np.mean([e.lo <= truth <= e.hi for e in by_prompt.values()])
    share = hits.sum(1) / (prompts * rounds)
    half = 1.96 * np.sqrt(share * (1 - share) / (prompts * rounds))
    assert 0.90 <= covered <= 0.97
    assert np.mean(np.abs(share - truth) <= half) < 0.9


# --- one set of resamples -----------------------------------------------------------------------


def test_company_does_not_change_an_estimate(rng):
    a, b = ratio(rng.integers(0, 9, 24), 4), ratio(rng.integers(0, 9, 24), 3)
    assert estimates({"a": a, "b": b}, seed=5)["a"] == one(a, seed=5)


def test_seeds_reproduce_and_differ(rng):
    a = ratio(rng.normal(2, 1, 24), 1)
    assert one(a, seed=1) == one(a, seed=1)
    assert one(a, seed=1) != one(a, seed=2)


def test_no_ratios_no_estimates():
    assert estimates({}, seed=0) == {}
    assert differences({}, seed=0) == {}


# --- degenerate cases ---------------------------------------------------------------------------


def test_one_prompt_has_a_value_but_no_interval():
    assert one(ratio([5], [2])).to_json() == {"value": 2.5, "lo": None, "hi": None}


def test_one_contributing_prompt_has_no_interval_either():
    assert one(ratio([5, 0, 0], [2, 0, 0])).to_json() == {"value": 2.5, "lo": None, "hi": None}


def test_agreeing_prompts_have_an_interval_without_width():
    for r in (ratio([3, 6, 9], [1, 2, 3]), ratio([0, 0], [4, 9]), ratio([0.1] * 7, [0.3] * 7)):
        found = one(r)
        assert found.lo == found.value == found.hi


def test_nothing_to_divide_by_is_unknown_not_zero():
    found = one(ratio([0, 0], [0, 0]))
    assert found.to_json() == {"value": None, "lo": None, "hi": None}
    assert found.n == 0


def test_draws_that_miss_every_contributing_prompt_do_no_harm():
    found = one(ratio([1, 3] + [0] * 22, [2, 4] + [0] * 22))
    assert 0.5 <= found.lo <= found.value == 4 / 6 <= found.hi <= 0.75
    assert found.n == 2


def test_a_single_hit_among_many_prompts_keeps_a_sane_interval():
    found = one(ratio([1] + [0] * 23, 50))
    assert 0 <= found.lo <= found.value < found.hi < 0.01


def test_an_estimate_is_never_nan():
    with pytest.raises(ValueError, match="unknown number is None"):
        Estimate(float("nan"))
    assert type(Estimate(np.float32(1.5)).value) is float


def test_estimates_read_like_a_sentence():
    assert str(Estimate(2.684, 2.3, 3.149, 12, "tokens")) == "2.68 [2.3, 3.15] tokens"
    assert str(Estimate(2.0, unit="tokens")) == "2 tokens"
    assert str(Estimate(None)) == "unknown"


@pytest.mark.parametrize(
    ("top", "bottom"), [([], []), ([1.0, math.nan], 1), ([1, 2], [-1, 1]), ([[1, 2]], 1)]
)
def test_sums_that_make_no_sense_are_refused(top, bottom):
    with pytest.raises(ValueError, match="per-prompt sums|one number a prompt"):
        ratio(top, bottom)


def test_ratios_over_different_prompts_do_not_mix():
    with pytest.raises(ValueError, match="different numbers of prompts"):
        estimates({"a": ratio([1, 2], 1), "b": ratio([1, 2, 3], 1)}, seed=0)


# --- tests of a difference ----------------------------------------------------------------------


def test_sign_flip_by_hand():
    assert sign_flip([1, 1, 1]) == 2 / 8
    assert sign_flip([1, 1, 1], alternative="greater") == 1 / 8
    assert sign_flip([3, 1]) == 2 / 4
    assert sign_flip([3, -1]) == 4 / 4
    assert sign_flip([0.0, 0.0]) == 1.0


def test_sign_flip_is_exact_for_few_prompts(rng):
    d = rng.normal(0.3, 1, 9)
    sums = [abs(np.dot(signs, d)) for signs in product((-1, 1), repeat=9)]
    assert sign_flip(d) == np.mean([s >= abs(d.sum()) - 1e-12 for s in sums])


def test_sign_flip_by_monte_carlo_agrees_with_counting(rng):
    d = rng.integers(-3, 6, 40)
    ways = {0: 1}  # number of sign patterns that reach each sum
    for x in d.tolist():
        nxt: dict[int, int] = {}
        for total, count in ways.items():
            for signed in (total + x, total - x):
                nxt[signed] = nxt.get(signed, 0) + count
        ways = nxt
    exact = sum(c for total, c in ways.items() if abs(total) >= abs(d.sum())) / 2**40
    assert sign_flip(d, seed=3) == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000) + 1e-4)


def test_a_monte_carlo_p_value_is_never_zero():
    assert sign_flip(np.ones(60), seed=0) == smallest_p(60) == 1 / 20_001


def test_ten_prompts_cannot_reach_what_36_readings_ask_for():
    assert smallest_p(10) == sign_flip(np.ones(10)) == 2 / 2**10
    assert smallest_p(10) > 0.05 / 36


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


# --- how many prompts ---------------------------------------------------------------------------


def test_prompts_needed_by_hand():
    spread, n, distance = 0.3, 24, 0.1
    half = 1.959964 * spread / math.sqrt(n)
    estimate = Estimate(1 + distance, 1 + distance - half, 1 + distance + half, n)
    assert prompts_needed(estimate, 1.0) == math.ceil(((1.959964 + 0.841621) * 3) ** 2)
    assert prompts_needed(estimate, 1.0, comparisons=36) > 2 * prompts_needed(estimate, 1.0)


def test_that_many_prompts_do_settle_it_four_times_in_five(rng):
    needed = prompts_needed(Estimate(0.1, -0.02, 0.22, 24), 0.0)
    spread = 0.12 * math.sqrt(24) / 1.96
    repeats = {i: ratio(rng.normal(0.1, spread, needed), 1) for i in range(300)}
    settled = [e.lo > 0 for e in estimates(repeats, seed=0, draws=2000).values()]
    assert 0.7 < np.mean(settled) < 0.9


def test_prompts_needed_is_unknown_without_spread_or_distance():
    assert prompts_needed(Estimate(2.0, None, None, 1), 1.0) is None
    assert prompts_needed(Estimate(2.0, 2.0, 2.0, 5), 1.0) is None
    assert prompts_needed(Estimate(1.0, 0.5, 1.5, 5), 1.0) is None


def test_few_prompts_are_said_to_run_short():
    assert few_prompts_note(24) is None
    assert "12 prompts" in few_prompts_note(12)
    assert "run short" in few_prompts_note(12)
    assert "no interval" in few_prompts_note(1)


def test_several_populations_are_resampled_each_on_its_own():
    """The difference of two means has the standard error of two independent samples."""
    rng = np.random.default_rng(3)
    a, b = rng.normal(2.0, 1.0, 60), rng.normal(1.0, 2.0, 90)

    def statistic(weights):
        means = [w @ x / w.sum(axis=1) for w, x in zip(weights, (a, b), strict=True)]
        return np.stack([means[0] - means[1], means[0]], axis=1)

    (value, lo, hi), alone = bca_apart(statistic, [60, 90], seed=0, draws=4_000)
    error = (a.var(ddof=1) / 60 + b.var(ddof=1) / 90) ** 0.5
    assert value == pytest.approx(a.mean() - b.mean())
    assert (hi - lo) / (2 * 1.96) == pytest.approx(error, rel=0.06)
    # A statistic of one of them alone has that one's interval.
    assert (alone[2] - alone[1]) / (2 * 1.96) == pytest.approx(a.std(ddof=1) / 60**0.5, rel=0.06)


def test_one_population_alone_is_the_plain_bootstrap():
    x = np.random.default_rng(4).gamma(1.0, 1.0, 40)

    def statistic(weights):
        return (weights @ x / weights.sum(axis=1))[:, None]

    apart = bca_apart(lambda w: statistic(w[0]), [40], seed=9, draws=2_000)
    assert apart == bca(statistic, 40, np.array([40]), seed=9, draws=2_000)


def test_a_population_of_one_gives_no_interval():
    found = bca_apart(lambda w: w[0] @ np.ones((1, 1)), [1], seed=0, draws=200)
    assert found == [(1.0, None, None)]
