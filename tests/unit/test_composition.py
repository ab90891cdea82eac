"""A difference of two sets in two parts: against pandas, and in worlds whose split is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dflash_diag.composition import BINS, PARTS, split
from dflash_diag.data_causes import contrast, findings, sets_by
from dflash_diag.strata import NUMBERS, Blocks
from tests.text_world import D, G, P, world

QUICK = {"seed": 0, "draws": 400}


def drafted(
    n: int,
    seed: int,
    *,
    hard: float = 1.0,
    skill: float = 0.95,
    spread: float = 0.6,
    name: str = "x",
    **text,
) -> Blocks:
    """Blocks on prompts of some entropy: a proposal is right with skill * exp(-entropy / 2)."""
    rng = np.random.default_rng(seed)
    scores, texts = world(n=n, seed=seed)
    made = []
    for i, one in enumerate(texts):
        scale = 0.5 * hard * np.exp(rng.normal(0, spread))
        entropy = rng.gamma(2.0, scale, P + G)
        made.append(replace(one, id=f"{name}-{i:02d}", entropy=entropy, **text))
    scores.prompt_ids = [one.id for one in made]
    at = scores.anchor[:, None] + np.arange(D)
    entropy = np.stack([one.entropy for one in made])[scores.prompt[:, None], at]
    right = rng.random(entropy.shape) < skill * np.exp(-entropy / 2)
    scores.proposed = np.where(right, scores.labels, -1)
    return Blocks.of(scores, made)


def joined(*parts: Blocks) -> Blocks:
    """Several sets as one run has them."""
    sizes = np.cumsum([0, *(len(one.texts) for one in parts)])
    return Blocks(
        texts=[text for one in parts for text in one.texts],
        prompt=np.concatenate([one.prompt + n for one, n in zip(parts, sizes, strict=False)]),
        anchor=np.concatenate([one.anchor for one in parts]),
        right=np.concatenate([one.right for one in parts]),
        judged=np.concatenate([one.judged for one in parts]),
        visited=np.concatenate([one.visited for one in parts]),
    )


def rows_of(blocks: Blocks, number: str) -> pd.DataFrame:
    if number == "accuracy":
        return pd.DataFrame({"y": blocks.right.ravel() * 1.0, "x": blocks.entropy.ravel()})
    keep = blocks.visited if number == "tau_walked" else slice(None)
    return pd.DataFrame({"y": blocks.jumps[keep] * 1.0, "x": blocks.entropy[keep].mean(axis=1)})


@pytest.mark.parametrize("number", NUMBERS)
def test_a_split_is_that_of_a_plain_group_by(number):
    a, b = drafted(30, 1), drafted(33, 2, hard=1.2, skill=0.8)
    found = split(("a", a), ("b", b), number, **QUICK)
    sides = [rows_of(one, number) for one in (a, b)]
    edges = [one.high for one in found.bins[:-1]]
    for one in found.bins:  # they hold equal shares of the two sets together
        assert (one.share_a + one.share_b) / 2 == pytest.approx(1 / BINS, abs=0.005)
    shares, rates = [], []
    for side in sides:
        bins = pd.cut(side["x"], [-np.inf, *edges, np.inf], labels=False)
        shares.append(side.groupby(bins).size() / len(side))
        rates.append(side["y"].groupby(bins).mean())
    composition = ((shares[0] - shares[1]) * (rates[0] + rates[1]) / 2).sum()
    rate = ((rates[0] - rates[1]) * (shares[0] + shares[1]) / 2).sum()
    value = {name: one.value for name, one in found.estimates.items()}
    assert set(value) == set(PARTS)
    assert value["a"] == pytest.approx(sides[0]["y"].mean())
    assert value["b"] == pytest.approx(sides[1]["y"].mean())
    assert value["composition"] == pytest.approx(composition)
    assert value["rate"] == pytest.approx(rate)
    assert value["a_with_mix_of_b"] == pytest.approx((shares[1] * rates[0]).sum())
    assert value["b_with_mix_of_a"] == pytest.approx((shares[0] * rates[1]).sum())
    assert [one.share_a for one in found.bins] == pytest.approx(shares[0].tolist())
    assert [one.rate_b for one in found.bins] == pytest.approx(rates[1].tolist())


@pytest.mark.parametrize("number", NUMBERS)
def test_the_parts_sum_to_the_difference_and_their_mean_is_that_of_both_orders(number):
    found = split(("a", drafted(8, 3)), ("b", drafted(9, 4, hard=1.5)), number, **QUICK)
    value = {name: one.value for name, one in found.estimates.items()}
    assert value["composition"] + value["rate"] == pytest.approx(value["difference"], abs=1e-12)
    assert np.mean(found.orders) == pytest.approx(value["composition"], abs=1e-12)


def test_text_that_is_only_harder_is_composition_and_a_worse_drafter_is_rate():
    a = drafted(80, 5, spread=0.3)
    b, c = drafted(80, 6, hard=1.8, spread=0.3), drafted(80, 7, skill=0.7, spread=0.3)
    harder = split(("a", a), ("b", b), "accuracy", seed=0, draws=2000)
    worse = split(("a", a), ("c", c), "accuracy", seed=0, draws=2000)
    for found, explained in ((harder, "composition"), (worse, "rate")):
        other = "rate" if explained == "composition" else "composition"
        total, left = found.estimates["difference"], found.estimates[other]
        assert found.differs
        assert found.estimates[explained].lo > 0
        assert abs(left.value) < 0.15 * total.value
    assert "because the target is surer" in harder.sentence()


def test_known_split_in_a_world_that_mixes_both():
    # 0.95 exp(-x / 2) of x from a gamma distribution, in closed form: E exp(-x/2) = (1 + s/2)^-2.
    a, b = drafted(150, 8, spread=0), drafted(150, 9, hard=1.5, skill=0.8, spread=0)
    easy, hard = (1 + 0.25) ** -2, (1 + 0.375) ** -2
    difference = 0.95 * easy - 0.8 * hard
    composition = (easy - hard) * (0.95 + 0.8) / 2
    found = split(("a", a), ("b", b), "accuracy", **QUICK).estimates
    assert found["difference"].lo < difference < found["difference"].hi
    assert found["composition"].value == pytest.approx(composition, abs=0.01)
    assert found["rate"].value == pytest.approx(difference - composition, abs=0.015)


def test_sets_without_common_entropies_are_not_split():
    a, b = drafted(8, 10), drafted(8, 11)
    far = [replace(text, entropy=text.entropy + 9) for text in b.texts]
    found = split(("a", a), ("b", replace(b, texts=far)), "tau_walked", **QUICK)
    assert not found.estimates
    assert found.bins
    assert "has an entropy that" in found.why_not
    assert "not split" in found.sentence()


def test_few_prompts_and_unknown_entropies_are_not_split():
    a, few = drafted(8, 12), drafted(4, 13)
    assert "too few" in split(("a", a), ("b", few), "tau_walked", **QUICK).why_not
    blind = replace(a, texts=[replace(text, entropy=None) for text in a.texts])
    found = split(("a", blind), ("b", a), "tau_walked", **QUICK)
    assert "choices" in found.why_not
    assert not found.bins


def test_a_bin_that_one_set_lacks_counts_as_composition():
    a, b = drafted(20, 14), drafted(20, 15)
    one = b.texts[0]
    rare = [replace(one, entropy=one.entropy + 50), *b.texts[1:]]
    found = split(("a", a), ("b", replace(b, texts=rare)), "tau_uniform", **QUICK)
    value = {name: one.value for name, one in found.estimates.items()}
    assert value["composition"] + value["rate"] == pytest.approx(value["difference"], abs=1e-12)


def test_each_set_is_resampled_on_its_own():
    one = drafted(30, 16)
    found = split(("a", one), ("b", one), "tau_walked", seed=0, draws=2000)
    total = found.estimates["difference"]
    assert total.value == 0
    assert total.lo < -0.02  # the same draw on both sides would leave no width
    assert total.hi > 0.02
    assert "may be chance" in found.sentence()


# --- causes -------------------------------------------------------------------------------------


def test_kinds_that_certainly_differ_are_found_and_named():
    run = joined(drafted(24, 20, name="code"), drafted(24, 21, hard=1.6, name="chat"))
    domain, template = findings(run, seed=0, draws=2000)
    assert (domain["cause"], domain["status"]) == ("data.domain", "found")
    assert domain["kind"] == "explanation"
    assert domain["recoverable"] is None
    assert domain["delta"]["value"] is None
    assert "code gets" in domain["evidence"]
    assert "chat" in domain["evidence"]
    assert "because the target is surer" in domain["evidence"]
    assert domain["remedy"]
    assert (template["cause"], template["status"]) == ("data.template", "not_tested")
    assert "both as messages and as text" in template["evidence"]


def test_kinds_that_are_alike_are_not_found_and_the_prompts_that_would_settle_it_are_named():
    wrong = 0
    for seed in range(10):
        a = drafted(14, 100 + seed, name="code")
        b = drafted(14, 200 + seed, name="chat")
        domain = findings(joined(a, b), seed=0, draws=1000)[0]
        wrong += domain["status"] == "found"
        if domain["status"] == "not_identifiable":
            assert "prompts would settle it" in domain["evidence"]
    assert wrong <= 2


def test_a_template_that_costs_is_found():
    run = joined(
        drafted(12, 22, form="messages"), drafted(12, 23, skill=0.6, form="text", name="y")
    )
    template = findings(run, seed=0, draws=2000)[1]
    assert template["status"] == "found"
    assert "chat template gets" in template["evidence"]
    assert "at equal entropy" in template["evidence"]


def test_a_difference_that_is_certainly_small_is_excluded():
    same = [drafted(12, 24, name=name) for name in ("code", "chat")]
    always = [replace(one, right=np.ones_like(one.right)) for one in same]
    assert findings(joined(*always), **QUICK)[0]["status"] == "excluded"


def test_three_kinds_are_each_compared_with_the_rest_and_corrected_for():
    run = joined(*(drafted(6, 30 + i, name=name) for i, name in enumerate(("a", "b", "c"))))
    pairs = sets_by(run, ["a"] * 6 + ["b"] * 6 + ["c"] * 6)
    assert [(a[0], len(a[1].texts), b[0], len(b[1].texts)) for a, b in pairs] == [
        (name, 6, "all other prompts", 12) for name in ("a", "b", "c")
    ]
    one, three = (contrast(*pairs[0], comparisons=n, seed=0, draws=2000) for n in (1, 3))
    assert one.difference == three.difference
    assert three.certain <= one.certain


def test_sets_that_are_too_small_are_not_tested_and_say_so():
    run = joined(drafted(3, 40, name="code"), drafted(20, 41, hard=3.0, name="chat"))
    domain = findings(run, **QUICK)[0]
    assert domain["status"] == "not_tested"
    assert "code 3, chat 20" in domain["evidence"]


def test_training_texts_can_stand_beside_the_prompts():
    prompts, training = drafted(14, 50, hard=2.0), drafted(20, 51)
    alone = findings(prompts, seed=0, draws=1000)[0]
    assert alone["status"] == "not_tested"
    beside = findings(prompts, beside=("training text", training), seed=0, draws=1000)[0]
    assert beside["status"] == "found"
    assert "training text gets" in beside["evidence"]


def test_anchors_drawn_at_random_are_compared_over_all_of_them():
    prompts, training = drafted(14, 52), drafted(14, 53)
    drawn = replace(training, visited=np.zeros_like(training.visited))
    found = contrast(("training text", drawn), ("prompts", prompts), **QUICK)
    assert found.split.number == "tau_uniform"
    assert found.tau_b.value == pytest.approx(prompts.jumps.mean())
    assert "(all anchors)" in found.sentence()
