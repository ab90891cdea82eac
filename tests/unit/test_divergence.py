"""The numbers of a difference, against plain float64 arithmetic, and the rules that judge them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dflash_diag.divergence import (
    ASSUMED_FLOOR,
    Deviation,
    deviation,
    first_above,
    times_floor,
    with_floor,
)


def pair(t=50, w=2000, scale=0.01, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=(t, w))
    y[:, 7] *= 1000  # a massive activation
    return y + scale * rng.normal(size=(t, w)), y


def test_the_numbers_are_those_of_the_formulas():
    x, y = pair()
    found = deviation(torch.tensor(x), torch.tensor(y))
    rows = np.linalg.norm(x - y, axis=1) / np.linalg.norm(y, axis=1)
    kept = np.delete(np.arange(2000), np.argsort((y**2).sum(0))[-2:])
    token, channel = np.unravel_index(np.abs(x - y).argmax(), x.shape)
    assert found["rel_rms"] == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)
    assert found["rel_rms_trimmed"] == pytest.approx(
        np.linalg.norm((x - y)[:, kept]) / np.linalg.norm(y[:, kept]), rel=1e-12
    )
    cosine = (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)
    assert found["one_minus_cos"] == pytest.approx(1 - cosine, abs=1e-13)
    for name, q in (("token_p50", 0.5), ("token_p99", 0.99), ("token_max", 1.0)):
        assert found[name] == pytest.approx(np.quantile(rows, q), rel=1e-9)
    assert found["max_abs"] == pytest.approx(np.abs(x - y).max(), rel=1e-12)
    assert (found["max_abs_token"], found["max_abs_channel"]) == (token, channel)
    # The massive channel hides the error from the untrimmed number.
    assert found["rel_rms_trimmed"] > 10 * found["rel_rms"]


def test_sequences_taken_in_one_by_one_give_the_numbers_of_all_together():
    x, y = (torch.tensor(one) for one in pair())
    parts = Deviation()
    parts.add(x[:20], y[:20], sequence=0)
    parts.add(x[20:], y[20:], sequence=1, positions=torch.arange(100, 130))
    whole, found = deviation(x, y), parts.to_json()
    for name, value in whole.items():
        if not name.startswith("max_abs_"):
            assert found[name] == pytest.approx(value, rel=1e-12), name
    token = whole["max_abs_token"]
    expected = (0, token) if token < 20 else (1, token + 80)
    assert (found["max_abs_sequence"], found["max_abs_token"]) == expected


def test_a_cosine_hides_a_scale_and_the_relative_rms_shows_it():
    _, y = pair()
    found = deviation(torch.tensor(1.5 * y), torch.tensor(y))
    assert found["one_minus_cos"] < 1e-12
    assert found["rel_rms"] == pytest.approx(0.5)


def test_rows_that_are_no_numbers_are_counted_apart():
    x, y = (torch.tensor(one) for one in pair())
    expected = deviation(x[4:], y[4:])
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0.0
    x[3, 0], x[3, 1] = float("nan"), float("inf")
    found = deviation(x, y)
    assert (found["nan_rows"], found["inf_rows"], found["zero_rows"]) == (2, 1, 1)
    assert found["n_tokens"] == 50
    assert found["token_p50"] == pytest.approx(expected["token_p50"], rel=0.1)
    broken = deviation(torch.full((3, 4), float("nan")), torch.ones(3, 4))
    assert broken["rel_rms"] is None
    assert broken["nan_rows"] == 3
    (row,) = with_floor([{"layer": 0, "module": "output", **broken}], None)
    assert row["above"]


def row(layer, error, module="output", **more):
    same = dict.fromkeys(("rel_rms", "rel_rms_trimmed", "token_p99"), error)
    none = dict.fromkeys(("nan_rows", "inf_rows", "zero_rows"), 0)
    return {"layer": layer, "module": module, **same, **none, **more}


def test_twice_the_floor_is_the_limit():
    floor = {(0, "output"): row(0, 0.01), (1, "output"): row(1, 0.01)}
    rows = with_floor([row(0, 0.0199), row(1, 0.0201)], floor)
    assert [r["above"] for r in rows] == [False, True]
    assert rows[1]["times_floor"] == pytest.approx(2.01)
    # Without a measured one the assumed floor holds, but not for single tokens.
    assumed = with_floor([row(0, 1.9 * ASSUMED_FLOOR, token_p99=1.0)], None)
    assert not assumed[0]["above"]
    assert not assumed[0]["floor_measured"]
    assert times_floor(0.0, 0.0) == 0
    assert times_floor(1e-9, 0.0) == math.inf


def test_the_first_above_is_created_or_inherited():
    floor = {(i, "output"): row(i, 0.01) for i in range(-1, 4)}
    rows = with_floor([row(i, e) for i, e in ((-1, 0), (0, 0.01), (1, 0.03), (2, 0.04))], floor)
    first = first_above(rows)
    assert (first["layer"], first["origin"]) == (1, "created")
    assert first["input"] == {"layer": 0, "module": "output", "rel_rms": 0.01}
    # The layer by itself is clean: what came in adds up.
    rows[2]["local_times_floor"] = 0.7
    assert first_above(rows)["origin"] == "inherited"
    # Layers in between were not kept.
    far = with_floor([row(0, 0.01), row(3, 0.03)], floor)
    assert first_above(far)["origin"] == "unknown"
    assert first_above(rows[:2]) is None
