"""The parts of a gap in worlds whose parts are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dflash_diag.config import RunConfig
from dflash_diag.definitions import DEFINITIONS
from dflash_diag.errors import BadInput
from dflash_diag.gap import (
    BACKEND,
    GREEDY,
    METRIC,
    NOISE,
    PRECISION,
    PROMPTS,
    READING,
    REGION,
    UNEXPLAINED,
    UNSEEN,
    WALK,
    WITHOUT_TEXTS,
    Level,
    World,
    decompose,
)
from dflash_diag.metrics import measure
from dflash_diag.replay import Replayed, take, visited
from dflash_diag.scoring import Scores

D, VOCAB = 7, 50


def table(n_texts, runs, *, name, n_anchors=30, prompt_part=0, valid=None):
    """Blocks whose accepted lengths are ``runs(text, anchor) -> int``."""
    text = np.repeat(np.arange(n_texts), n_anchors)
    anchor = np.tile(np.arange(10, 10 + n_anchors), n_texts)
    length = np.array([runs(t, a) for t, a in zip(text, anchor - 10, strict=True)])
    labels = np.full((len(text), D), 3)
    right = np.arange(D) < length[:, None]
    scores = Scores(
        prompt_ids=[f"{name}{i}" for i in range(n_texts)],
        n_prompt_tokens=np.full(n_texts, 10),
        n_generated=np.full(n_texts, n_anchors + D),
        unscored=[],
        prompt=text.astype(np.int32),
        anchor=anchor.astype(np.int32),
        labels=labels,
        proposed=np.where(right, labels, 4),
        rank=np.where(right, 0, 5).astype(np.int32),
        label_logprob=np.zeros(labels.shape, np.float32),
        topk_ids=np.zeros((*labels.shape, 16), np.int32),
        topk_logprobs=np.zeros((*labels.shape, 16), np.float32),
        block_size=D + 1,
        convention={},
        provenance={},
        valid=valid,
    )
    return Replayed(scores, anchor < 10 + prompt_part)


def level(factor, population, make, n_texts, *, generated):
    """``make(served, quiet)`` gives accepted lengths."""
    member = {f"{population}{i}": i for i in range(n_texts)}

    def replayed(served):
        return table(n_texts, make(READING in served, NOISE in served), name=population)

    return Level(factor, population, member, generated, replayed)


def constant(value):
    return lambda served, quiet: lambda text, anchor: value


def world(levels, **more):
    sizes = {one.population: 1 + max(one.member.values()) for one in levels}
    return World(levels, sizes, more.pop("definition", DEFINITIONS["streak uniform"]), **more)


def parts(found):
    return {bar.name: bar.change.value for bar in found.bars}


def test_where_everything_is_the_same_only_the_bonus_counts():
    levels = [
        level("", "train", constant(3), 5, generated=False),
        level(PROMPTS, "your prompts", constant(3), 4, generated=True),
    ]
    found = decompose(world(levels), 3.4, seed=0, draws=300)
    assert parts(found) == pytest.approx({UNEXPLAINED: -0.4, METRIC: 1, WALK: 0, PROMPTS: 0})
    assert found.replayed.value == 3
    assert found.served.value == 4
    # No text differs from another, so no interval has a width.
    assert all(bar.change.lo == bar.change.hi for bar in found.bars)


def test_effects_that_add_up_are_found_exactly():
    def runs(base):
        return lambda served, quiet: lambda text, anchor: base - 2 * served - (not quiet)

    levels = [
        level("", "train", runs(6), 5, generated=False),
        level(UNSEEN, "validation", runs(5), 5, generated=False),
        level(GREEDY, "validation", runs(6), 5, generated=True),
        level(PROMPTS, "your prompts", runs(4), 4, generated=True),
    ]
    found = decompose(world(levels, readings=True, noise=True), 5.5, seed=0, draws=300)
    assert parts(found) == pytest.approx(
        {UNEXPLAINED: -0.5, METRIC: 1, WALK: 0, UNSEEN: -1, GREEDY: 1, PROMPTS: -2}
        | {READING: -2, NOISE: 1}
    )
    assert all(bar.lo_order == pytest.approx(bar.hi_order) for bar in found.bars)


def test_how_training_computed_is_asked_for_first_and_on_the_first_texts_alone():
    asked = []

    def part(factor, population, *, generated):
        member = {f"{population}{i}": i for i in range(4)}

        def replayed(served):
            asked.append((factor, served))
            length = 3 + (PRECISION not in served) + 2 * (READING not in served)
            length += BACKEND in served
            return table(4, lambda text, anchor: length, name=population)

        return Level(factor, population, member, generated, replayed)

    levels = [part("", "train", generated=False), part(PROMPTS, "your prompts", generated=True)]
    found = decompose(
        world(levels, readings=True, precision=True, backend=True), None, seed=0, draws=300
    )
    assert parts(found) == pytest.approx(
        {METRIC: 1, BACKEND: 1, PRECISION: -1, WALK: 0, PROMPTS: 0, READING: -2}
    )
    early = [(level, set(how)) for level, how in asked if not {BACKEND, PRECISION} <= how]
    assert len(early) == 3
    assert all(level == "" and READING not in how for level, how in early)


def uneven(scale):
    """Accepted lengths that differ by text, anchor and reading, so that everything interacts."""

    def make(served, quiet):
        def runs(text, anchor):
            rng = np.random.default_rng([text, anchor, served, int(scale * 10)])
            return int(min(D, rng.poisson(scale * (1 + (text % 3)) / (1 + served))))

        return runs

    return make


def interacting():
    return world(
        [
            level("", "train", uneven(2.0), 12, generated=False),
            level(GREEDY, "train", uneven(1.6), 12, generated=True),
            level(PROMPTS, "your prompts", uneven(1.2), 10, generated=True),
        ],
        readings=True,
    )


def test_bars_sum_to_the_gap_and_lie_within_their_orders():
    made = interacting()
    found = decompose(made, 3.3, seed=0, draws=1_000)
    total = sum(bar.change.value for bar in found.bars)
    assert total == pytest.approx(found.served.value - 3.3, abs=1e-9)
    for bar in found.bars:
        assert bar.lo_order - 1e-9 <= bar.change.value <= bar.hi_order + 1e-9
        assert bar.change.lo <= bar.change.value <= bar.change.hi
    assert any(bar.hi_order - bar.lo_order > 0.1 for bar in found.bars)
    # The last state is the walked tau that the acceptance page shows.
    served = made.levels[-1].replayed(frozenset({READING})).scores
    assert found.served.value == pytest.approx(measure(served, seed=0)["tau_walked_micro"].value)


def test_bars_sum_in_every_resample():
    """Not only the point estimates: whatever is drawn, parts and ends are of the same draw."""
    made = interacting()
    whole = frozenset(made.factors)
    from dflash_diag.shapley import shares

    plan = shares(made.factors, made.feasible)
    rng = np.random.default_rng(0)
    weights = {name: rng.integers(0, 4, (50, n)).astype(float) for name, n in made.sizes.items()}
    values = {}
    for state in plan.states:
        at, statistic, members = made.measure(state)
        values[state] = statistic.value(weights[at.population][:, members])
    np.testing.assert_allclose(
        sum(plan.means(values)), values[whole] - values[frozenset()], atol=1e-9
    )


def test_decoding_is_followed_only_where_the_target_speaks():
    made = interacting()
    assert not made.feasible(frozenset({WALK}))
    assert made.feasible(frozenset({WALK, GREEDY}))
    assert not made.feasible(frozenset({PROMPTS}))
    assert made.feasible(frozenset({GREEDY, PROMPTS}))
    assert not replace(made, prompt_too=True, _kept={}).feasible(frozenset({WALK, GREEDY}))
    assert replace(made, prompt_too=True, _kept={}).feasible(frozenset({WALK, GREEDY, REGION}))


def test_anchors_in_the_prompt_are_a_part_of_their_own():
    """Ten of thirty anchors lie in the prompt, where two more tokens are accepted."""

    def runs(text, anchor):
        return 5 if anchor < 10 else 3

    def part(factor, population, *, generated):
        made = table(4, runs, name=population, prompt_part=10)
        member = {f"{population}{i}": i for i in range(4)}
        return Level(factor, population, member, generated, lambda served: made)

    levels = [
        part("", "train", generated=False),
        part(PROMPTS, "your prompts", generated=True),
    ]
    found = decompose(world(levels, prompt_too=True), None, seed=0, draws=300)
    assert parts(found) == pytest.approx({METRIC: 1, REGION: -2 / 3, WALK: 0, PROMPTS: 0})


def test_without_texts_or_claim_what_is_left_is_still_taken_apart():
    levels = [level("", "your prompts", uneven(1.2), 10, generated=True)]
    found = decompose(world(levels, readings=True), None, seed=0, draws=300)
    assert [bar.name for bar in found.bars] == [METRIC, WALK, READING]
    total = sum(bar.change.value for bar in found.bars)
    assert total == pytest.approx(found.served.value - found.replayed.value, abs=1e-9)


def test_two_equal_ends_have_no_parts():
    levels = [level("", "your prompts", uneven(1.2), 10, generated=True)]
    made = world(levels, definition=DEFINITIONS["tau walked"])
    found = decompose(made, 2.0, seed=0, draws=300)
    assert [bar.name for bar in found.bars] == [WITHOUT_TEXTS]
    assert found.bars[0].change.value == pytest.approx(found.served.value - 2.0)


@pytest.mark.parametrize(
    "name", ["tau walked macro", "topk_oracle@4 + 1 uniform", "eal_product uniform"]
)
def test_any_definition_can_be_the_start(name):
    made = replace(interacting(), definition=DEFINITIONS[name], _kept={})
    found = decompose(made, 3.0, seed=0, draws=300)
    total = sum(bar.change.value for bar in found.bars)
    assert total == pytest.approx(found.served.value - 3.0, abs=1e-9)


def test_a_walk_starts_anew_at_each_text():
    made = table(2, lambda text, anchor: 2 + text, name="x", n_anchors=9)
    rows = take(made.scores, visited(made.scores))
    assert rows.anchor.tolist() == [10, 13, 16, 10, 14, 18]
    assert rows.prompt.tolist() == [0, 0, 0, 1, 1, 1]


def test_how_training_computed_states_is_a_backend_and_a_dtype():
    assert RunConfig.read({"trained_states": "torch+recurrent/bfloat16"}).trained_states
    for wrong in ("magic", "torch", "torch/int3", "bfloat16"):
        with pytest.raises(BadInput, match=f"--trained-states {wrong}.* such as fla/bfloat16"):
            RunConfig.read({"trained_states": wrong})
