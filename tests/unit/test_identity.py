"""States that are not what they claim are named after what they are, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_diag.identity import identify, rotation_error
from dflash_diag.modules import OUTPUT, Place

T, H, FLOOR = 60, 96, 0.004
LAYER = 1


def draw(*shape, seed=0):
    return torch.tensor(np.random.default_rng(seed).normal(size=shape))


def rms_norm(value, weight):
    return weight * value / value.square().mean(-1, keepdim=True).sqrt()


INPUT_NORM, FINAL_NORM = (1 + 0.3 * draw(H, seed=s) for s in (7, 8))


@pytest.fixture(scope="module")
def trace():
    """A residual stream whose layers resemble each other, with a loud channel and a loud token."""
    stream = draw(T, H, seed=1)
    stream[:, 5] += 8
    stream[0] *= 20
    found = {}
    for layer in range(-1, 4):
        stream = stream + 0.8 * draw(T, H, seed=10 + layer)
        found[Place(layer, OUTPUT)] = stream
    own = found[Place(LAYER, OUTPUT)]
    found[Place(LAYER, "mlp")] = draw(T, H, seed=30)
    found[Place(LAYER + 1, "input_layernorm")] = rms_norm(own, INPUT_NORM)
    found[Place(LAYER + 1, "self_attn")] = draw(T, H, seed=31)
    return found


@pytest.fixture(scope="module")
def own(trace):
    return trace[Place(LAYER, OUTPUT)]


def named(trace, states):
    """The name of some states, the same as they come and rounded to bfloat16."""
    as_it_is, rounded = (
        identify(
            LAYER,
            one,
            trace,
            floor=lambda _place: FLOOR,
            final_norm=lambda value: rms_norm(value, FINAL_NORM),
        )
        for one in (states, states.bfloat16())
    )
    assert rounded.kind == as_it_is.kind
    return as_it_is


EXACT = {
    "as it should be": (lambda y, t: y, "right", "layer 1, as it should be"),
    "a row late": (lambda y, t: y.roll(1, 0), "shifted", "row t holds the state of token t-1"),
    "the next layer": (lambda y, t: t[Place(2, OUTPUT)], "other_layer", "states of layer 2"),
    "before the sum": (lambda y, t: t[Place(1, "mlp")], "other_module", "layer 1's mlp"),
    "one module late": (
        lambda y, t: t[Place(2, "input_layernorm")],
        "other_module",
        "after the next layer's input norm (layer 2's input_layernorm), one module late",
    ),
    "a branch of the next layer": (
        lambda y, t: t[Place(2, "self_attn")],
        "other_module",
        "the output of layer 2's self_attn, not of layer 1",
    ),
    "normed": (lambda y, t: rms_norm(y, FINAL_NORM), "normed", "after the final norm"),
    "normed twice": (
        lambda y, t: rms_norm(rms_norm(y, FINAL_NORM), FINAL_NORM),
        "normed",
        "after the final norm, twice",
    ),
    "normed without a weight": (
        lambda y, t: rms_norm(y, 1.0),
        "normed",
        "after an RMS norm without its weight",
    ),
    "layer-normed": (
        lambda y, t: rms_norm(y - y.mean(-1, keepdim=True), 1.0),
        "normed",
        "after a layer norm without its weight",
    ),
    "centred": (lambda y, t: y - y.mean(-1, keepdim=True), "centred", "less the mean of each row"),
    "a scale": (lambda y, t: -1.5 * y, "scaled", "layer 1 times -1.5"),
    "an offset": (lambda y, t: y + 0.25, "offset", "layer 1 plus 0.25"),
    "a bias": (lambda y, t: y + draw(H, seed=40), "offset", "plus one vector"),
    "another basis": (
        lambda y, t: y @ torch.linalg.qr(draw(H, H, seed=41)).Q,
        "rotated",
        "an orthogonal rotation",
    ),
    "channels in another order": (lambda y, t: y.flip(-1), "rotated", "an orthogonal rotation"),
    "some rows": (
        lambda y, t: torch.cat([y[:50], y[9:10].expand(10, -1)]),
        "some_rows",
        "layer 1, but 10 of 60 rows differ: 50-59",
    ),
}


@pytest.mark.parametrize("fault", EXACT)
def test_a_fault_is_named(fault, trace, own):
    plant, kind, words = EXACT[fault]
    found = named(trace, plant(own, trace))
    assert (found.kind, found.rough) == (kind, False)
    assert words in found.text
    assert found.explained < 2 * FLOOR


ROUGH = {
    "a scale, as integers": (lambda y: (100 * y).round() + 0.5, 2e-3, "layer 1 times 100"),
    "a scale in few bits": (lambda y: 10 * (y / 2).round(), 0.19, "layer 1 times"),
    "an offset and noise": (
        lambda y: y + 2 + 0.2 * draw(T, H, seed=50),
        0.05,
        "layer 1 plus",
    ),
    "a norm and noise": (
        lambda y: rms_norm(y, FINAL_NORM) + 0.05 * draw(T, H, seed=51),
        0.05,
        "layer 1 after the final norm",
    ),
}


@pytest.mark.parametrize("fault", ROUGH)
def test_a_fault_beside_other_errors_is_named_with_what_is_left(fault, trace, own):
    plant, left, words = ROUGH[fault]
    found = named(trace, plant(own))
    assert words in found.text
    assert found.rough == (left > 2 * FLOOR)
    assert found.explained == pytest.approx(left, rel=0.5)
    assert found.explained < found.rel_rms / 3


@pytest.mark.parametrize(
    ("size", "by_row"),
    [(2.1 * FLOOR, True), (0.02, True), (0.05, True), (0.19, True), (0.01, False), (0.05, False)],
)
@pytest.mark.parametrize("seed", range(5))
def test_noise_is_near_whatever_its_size(size, by_row, seed, trace, own):
    """Nothing that is fitted to it takes a name, least of all a rotation."""
    noise = draw(T, H, seed=60 + seed)
    if by_row:  # as large in each row as the row is loud
        noise *= own.norm(dim=-1, keepdim=True)
    found = named(trace, own + noise * size * own.norm() / noise.norm())
    assert found.kind == "near"
    assert found.text == "layer 1, no known fault"
    assert found.rel_rms == pytest.approx(size, rel=1e-6)


def test_what_resembles_nothing_is_unknown(trace, own):
    found = named(trace, draw(T, H, seed=70) * own.std())
    assert (found.kind, found.text) == ("unknown", "nothing near layer 1")


def test_a_rotation_error_is_the_distance_to_the_best_of_all_rotations():
    """Against scipy's, which looks for the rotation itself; with more channels and fewer."""
    from scipy.linalg import orthogonal_procrustes

    for t, h in ((40, 12), (12, 40)):
        y = draw(t, h, seed=2)
        x = y @ torch.linalg.qr(draw(h, h, seed=3)).Q + 0.1 * draw(t, h, seed=4)
        q, _ = orthogonal_procrustes(y.numpy(), x.numpy())
        expected = float((x - y @ torch.tensor(q)).norm() / y.norm())
        assert rotation_error(x, y) == pytest.approx(expected, rel=1e-9)
    assert rotation_error(y[:2], y[:2]) == float("inf")
