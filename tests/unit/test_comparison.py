"""Slots, prompts and trend of a comparison, against counts by hand and by brute force."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dflash_diag import metrics, stats
from dflash_diag.compare import Side, pair
from dflash_diag.comparison import Member, compared, differing, hangs_on, prompts, slots
from dflash_diag.stats import Estimate, ratio
from dflash_diag.training_logs import TrainingLog, read_training_log
from dflash_diag.trend import Point, line_of, logged, trend

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fakes import simulated_scores

DRAWS = 400


def member(name, jumps, *, n_proposed=7, facts=None, step=None, **more) -> Member:
    side = Side.of(jumps, name=name, capture="text", step=step)
    return Member(side, jumps, n_proposed, facts or {}, **more)


def scored(name, skill, seed, **more) -> Member:
    scores = simulated_scores(skill=skill, seed=seed, n_prompts=12)
    return member(name, {row["id"]: row["rounds"] for row in metrics.per_prompt(scores)}, **more)


# --- slots ----------------------------------------------------------------------------------------


def test_rates_of_slots_by_hand():
    """a accepts 0, 2 and 1 of 2 in p, 2 in q; b accepts 0 and 1 in p, 0 in q."""
    a = member("a", {"p": [1, 3, 2], "q": [3]}, n_proposed=2)
    b = member("b", {"p": [1, 2], "q": [1]}, n_proposed=2)
    first, second = slots(a, b, seed=0, draws=DRAWS)
    assert (first["survival_a"], first["survival_b"]) == (3 / 4, 1 / 3)
    assert (second["survival_a"], second["survival_b"]) == (2 / 4, 0)
    assert (second["conditional_a"], second["conditional_b"]) == (2 / 3, 0)
    assert first["n_before"] == [4, 3]
    assert second["n_before"] == [3, 1]
    assert first["survival_delta"]["value"] == pytest.approx(3 / 4 - 1 / 3)


def test_slots_agree_with_the_metrics_on_scores():
    ours, theirs = (
        simulated_scores(skill=s, seed=i, n_prompts=12) for i, s in enumerate((0.5, 0.8))
    )
    rows = slots(scored("a", 0.5, 0), scored("b", 0.8, 1), seed=5, draws=DRAWS)
    both = metrics.paired(ours, theirs, trees=False)
    for rate in ("survival", "conditional"):
        expected = stats.differences(
            {k: both[f"{rate}_walked@{k}"] for k in range(1, 8)}, seed=5, draws=DRAWS
        )
        assert [row[f"{rate}_delta"] for row in rows] == [
            expected[k].to_json() for k in range(1, 8)
        ]


def test_slots_end_with_the_shorter_block():
    wide = scored("wide", 0.6, 0)
    narrow = member(
        "narrow", {i: [min(j, 4) for j in r] for i, r in wide.jumps.items()}, n_proposed=3
    )
    rows = slots(wide, narrow, seed=0, draws=DRAWS)
    assert [row["k"] for row in rows] == [1, 2, 3]
    assert all(row["survival_delta"]["value"] == 0 for row in rows)


# --- prompts --------------------------------------------------------------------------------------


def by_brute_force(a, b) -> int | None:
    n = len(a.numerators)
    sign = np.sign(
        a.numerators.sum() / a.denominators.sum() - b.numerators.sum() / b.denominators.sum()
    )
    for count in range(1, n):
        for left in itertools.combinations(range(n), n - count):
            at = list(left)
            delta = a.numerators[at].sum() / a.denominators[at].sum()
            delta -= b.numerators[at].sum() / b.denominators[at].sum()
            if sign * delta <= 0:
                return count
    return None


def test_a_lead_hangs_on_as_many_prompts_as_brute_force_says():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(60):
        a, b = (
            ratio(r + rng.integers(0, 6, 7), r) for r in rng.integers(1, 6, (2, 7)).astype(float)
        )
        found.append((hangs_on(a, b), by_brute_force(a, b)))
    known = [(mine, truth) for mine, truth in found if mine]
    assert all(truth is not None and mine >= truth for mine, truth in known)
    assert np.mean([mine == truth for mine, truth in known]) > 0.9
    assert {mine for mine, _ in known} >= {1, 2, 3}
    assert [truth for mine, truth in found if mine is None] == [None] * (len(found) - len(known))


def test_a_lead_on_one_prompt_hangs_on_it():
    level = {f"p{i}": [2, 2] for i in range(8)}
    a, b = member("a", level | {"p0": [8, 8]}), member("b", level)
    found = prompts(a.side, b.side, pair(a.side, b.side, seed=0, draws=DRAWS))
    assert (found["n_better"], found["n_worse"], found["n_hangs"]) == (1, 0, 1)
    assert found["rows"][0] == {"id": "p0", "tau_a": 8, "tau_b": 2, "delta": 6}
    same = prompts(b.side, b.side, pair(b.side, b.side, seed=0, draws=DRAWS))
    assert (same["n_better"], same["n_worse"], same["n_hangs"]) == (0, 0, 0)


# --- side by side ---------------------------------------------------------------------------------


def test_what_is_unlike_is_listed_with_every_value():
    facts = {"dtype": "float32", "torch": "2.9"}
    members = [scored("a", 0.5, 0, facts=facts), scored("b", 0.5, 1, facts={"torch": "2.9"})]
    assert differing(members) == [{"what": "dtype", "values": {"a": "float32", "b": None}}]
    assert differing([members[0], scored("c", 0.5, 2, facts=dict(facts))]) == []


def test_taus_are_over_the_prompts_that_all_have():
    a, b = scored("a", 0.5, 0), scored("b", 0.7, 1)
    few = {one: b.jumps[one] for one in list(b.jumps)[:5]}
    found = compared([a, b, member("few", few)], seed=0, draws=DRAWS)
    assert [one["n_prompts"] for one in found["drafters"]] == [5, 5, 5]
    assert [one["n_scored"] for one in found["drafters"]] == [12, 12, 5]
    assert found["drafters"][1]["tau"] == found["drafters"][2]["tau"]
    assert [one["n_prompts"] for one in found["pairs"]] == [12, 5, 5]
    assert "Taus are over the 5 prompts that all have." in found["notes"]


def test_block_sizes_that_differ_are_said():
    a = scored("a", 0.5, 0)
    narrow = member("b", {i: [min(j, 4) for j in r] for i, r in a.jumps.items()}, n_proposed=3)
    found = compared([a, narrow], seed=0, draws=DRAWS)
    assert any("a 7, b 3" in note for note in found["notes"])
    assert found["pairs"][0]["delta_tau"]["value"] != 0


def test_what_stands_beside_is_shown_and_not_paired():
    a, b, c = scored("a", 0.5, 0), scored("b", 0.6, 1), scored("c", 0.8, 2, is_reference=True)
    found = compared([a, b], seed=0, draws=DRAWS, beside=[c])
    assert [(one["a"], one["b"]) for one in found["pairs"]] == [("a", "b")]
    assert [(one["name"], one["reference"]) for one in found["drafters"]] == [
        ("a", False), ("b", False), ("c", True)
    ]  # fmt: skip


# --- trend ----------------------------------------------------------------------------------------


def point(step, skill, *, line="/run", capture="text", seed=None, name=None) -> Point:
    one = scored(name or f"step_{step}", skill, step if seed is None else seed, step=step).side
    one = Side(one.name, one.step, capture, one.ids, one.tokens, one.rounds)
    return Point(one, Estimate(2.0, 1.9, 2.1, 12, "tokens"), line)


def test_the_last_step_is_compared_with_the_one_before_and_with_the_first():
    points = [point(100, 0.3), point(300, 0.7), point(200, 0.5)]
    found = trend(points[:2], points[2], seed=0, draws=DRAWS)
    assert [one["step"] for one in found["points"]] == [100, 200, 300]
    assert [(one["since"], one["steps"]) for one in found["changes"]] == [
        ("before", [200, 300]), ("first", [100, 300])
    ]  # fmt: skip
    expected = pair(points[1].side, points[2].side, seed=0, draws=DRAWS)
    assert found["changes"][0]["delta_tau"] == expected.delta_tau.to_json()
    assert found["changes"][0]["p_adjusted"] >= expected.p


def test_of_one_step_the_latest_measurement_counts():
    own = point(200, 0.6)
    again = [
        point(100, 0.3, name="old"),
        point(100, 0.4, name="new"),
        point(200, 0.1, name="own before"),
    ]
    found = trend(again, own, seed=0, draws=DRAWS)
    assert [one["name"] for one in found["points"]] == ["new", "step_200"]


def test_what_cannot_stand_on_the_line_is_left_out_and_said():
    others = [
        point(100, 0.3, capture="other"),
        point(None, 0.3, seed=9),
        point(50, 0.2, line="/other"),
    ]
    alone = trend(others, point(200, 0.5), seed=0, draws=DRAWS)
    assert alone == (
        "Step 200 is the only one of its training. Left out: 1 checkpoint without a step. "
        "Left out: 1 checkpoint measured on other text."
    )
    found = trend([*others, point(100, 0.3)], point(200, 0.5), seed=0, draws=DRAWS)
    assert [one["step"] for one in found["points"]] == [100, 200]
    assert len(found["left_out"]) == 2
    assert "nor its name" in trend([], point(None, 0.5, seed=9), seed=0, draws=DRAWS)


def test_other_trainings_are_lines_of_their_own():
    others = [point(100, 0.3, line="/b"), point(200, 0.4, line="/b"), point(100, 0.3)]
    found = trend(others, point(200, 0.5), seed=0, draws=DRAWS)
    assert [(one["line"], one["step"]) for one in found["points"]] == [
        ("/run", 100), ("/run", 200), ("/b", 100), ("/b", 200)
    ]  # fmt: skip
    assert len(found["changes"]) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("/runs/a/step_100", "/runs/a"),
        ("/runs/a/step_100/draft_model", "/runs/a"),
        ("/runs/a/ckpt.step=100.pt", "/runs/a"),
        ("/runs/a/final", "/runs/a"),
    ],
)
def test_the_training_of_a_checkpoint_is_where_its_steps_lie(path, line):
    assert line_of(path) == line


def test_a_length_is_drawn_before_a_share(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"step": 1, "train/accuracy": 0.1, "train/streak": 0.5, "val/tau": 1.5, "lr": 1}\n'
        '{"step": 2, "train/accuracy": 0.2, "train/streak": 0.7}\n'
    )
    found = logged(read_training_log(path))
    assert found["unit"] == "tokens"
    assert [(one["name"], one["steps"], one["values"]) for one in found["lines"]] == [
        ("train streak", [1, 2], [0.5, 0.7]), ("val tau", [1], [1.5])
    ]  # fmt: skip
    path.write_text('{"step": 1, "train/accuracy": 0.1}\n')
    assert logged(read_training_log(path))["unit"] == "share"


def test_a_long_log_is_thinned_and_keeps_its_last_step():
    steps = range(1, 1002)
    rows = [{"step": s, "phase": "train", "group": "train", "metric": "streak", "value": float(s),
             "known": True} for s in steps]  # fmt: skip
    (line,) = logged(TrainingLog(Path("x"), "csv", pd.DataFrame(rows)))["lines"]
    assert len(line["steps"]) <= 200
    assert line["steps"][-1] == 1001
    assert line["values"] == [float(one) for one in line["steps"]]
