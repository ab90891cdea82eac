"""Hand-made comparisons and audits of hidden states, as a run measures them."""

from __future__ import annotations

from typing import Any

from dflash_diag.divergence import deviation, with_floor

LAYERS = range(-1, 4)
KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
PARTS = {
    "linear_attention": ("input_layernorm", "linear_attn", "mlp", "output"),
    "full_attention": ("input_layernorm", "self_attn", "mlp", "output"),
}
FLOOR = 0.004


def numbers(rel_rms: float | None, **changes: Any) -> dict[str, Any]:
    """One pair of tensors with a difference of ``rel_rms``; None: nothing in it is a number."""
    import torch

    y = torch.ones(4, 8)
    x = torch.full_like(y, torch.nan) if rel_rms is None else y * (1 + rel_rms)
    found = deviation(x, y)
    found["max_abs_prompt"] = None if found.pop("max_abs_sequence") is None else "p00"
    return {**found, **changes}


def floors(places: list[tuple[int, str]]) -> dict[tuple[int, str], dict[str, Any]]:
    return {place: numbers(0.0 if place[0] < 0 else FLOOR) for place in places}


def layer_rows(times: dict[int, float], *, broken: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Layers whose difference is ``times`` the floor, 1 by default; ``broken`` hold no numbers."""
    rows = []
    for layer in LAYERS:
        error = None if layer in broken else FLOOR * times.get(layer, min(layer + 1, 1))
        kind = KINDS[layer] if layer >= 0 else None
        rows.append({"layer": layer, "module": "output", "kind": kind, **numbers(error)})
    return with_floor(rows, floors([(layer, "output") for layer in LAYERS]))


def module_rows(bad: tuple[int, str] | None = None) -> list[dict[str, Any]]:
    """Every module; from ``bad`` on the error is ten floors, and made there."""
    places = [(-1, "output")]
    places += [(layer, part) for layer in range(4) for part in PARTS[KINDS[layer]]]
    start = len(places) if bad is None else places.index(bad)
    rows = [
        {
            "layer": layer,
            "module": module,
            **numbers(FLOOR * (0 if layer < 0 else 10 if i >= start else 1)),
        }
        for i, (layer, module) in enumerate(places)
    ]
    for row in rows:
        row["max_abs_sequence"] = 0
        row.pop("max_abs_prompt")
    found = with_floor(rows, floors(places))
    for i, row in enumerate(found[1:], start=1):
        local = 10.0 if i == start else 0.5
        row |= {"local_rel_rms": local * FLOOR, "local_floor": FLOOR, "local_times_floor": local}
    return found


def flip_rows(n_prompts: int, flipped: dict[int, float]) -> list[dict[str, Any]]:
    """Ten positions a prompt; of the first prompt those in ``flipped`` flip, by that margin."""
    return [
        {
            "prompt": f"p{prompt:02d}",
            "position": 20 + i,
            "flipped": prompt == 0 and i in flipped,
            "margin_a": flipped.get(i, 2.0) if prompt == 0 else 2.0,
            "margin_b": 2 * flipped.get(i, 2.0) if prompt == 0 else 2.0,
            "limit": 0.05,
            "decisive": prompt == 0 and flipped.get(i, 0.0) > 0.05,
        }
        for prompt in range(n_prompts)
        for i in range(10)
    ]


def comparison(
    layers: list[dict[str, Any]],
    modules: list[dict[str, Any]] | None = None,
    flips: list[dict[str, Any]] | None = None,
    n_prompts: int = 6,
) -> dict[str, Any]:
    """One side, as `dflash_diag.state_runs.StateRun.divergence` has it."""
    prompts = [
        {
            "prompt": f"p{i:02d}",
            "layer": row["layer"],
            "n_tokens": 4,
            "rel_rms": row["rel_rms"] and row["rel_rms"] * (1 + i / 10),
            "token_max": row["token_max"],
            "token": None if row["rel_rms"] is None else 20 + i,
        }
        for i in range(n_prompts)
        for row in layers
    ]
    return {
        "layers": layers,
        "prompts": prompts,
        "floor_note": "Noise floor: torch/bfloat16 against torch/float32, over 4 prompts.",
        "modules": modules or [],
        "modules_note": "Modules: torch/float32 against torch/bfloat16." if modules else "None.",
        "flips": flips or [],
    }


def comparisons(n_prompts: int = 6) -> dict[str, dict[str, Any]]:
    """A side within the noise, one above it with a module to blame, and one with broken rows."""
    noise = flip_rows(n_prompts, {3: 0.01})
    above = flip_rows(n_prompts, {3: 0.01, 4: 0.4, 5: 1.5, 6: 0.2})
    late = {2: 9.0, 3: 12.0}
    return {
        "torch/bfloat16": comparison(layer_rows({}), module_rows(), noise, n_prompts),
        "fla/bfloat16": comparison(
            layer_rows(late), module_rows((2, "linear_attn")), above, n_prompts
        ),
        "<b>broken</b>": comparison(layer_rows({}, broken=(3,)), n_prompts=n_prompts),
    }


def case_rows(times: dict[str, float]) -> list[dict[str, Any]]:
    """Rows of a check: cases, each as many noise floors apart from layer 1 on."""
    return [
        {
            "case": case,
            "layer": layer,
            "rel_rms": FLOOR * (n if layer >= 1 else 0.0),
            "floor": FLOOR,
            "times_floor": n if layer >= 1 else 0.0,
            "first_rows": 0.0,
        }
        for case, n in times.items()
        for layer in LAYERS
    ]


def state_rows(n_prompts: int, *, zeros: int = 0, nans: int = 0) -> list[dict[str, Any]]:
    """Rows of ``hidden.rows``; layer 2 of the first prompt holds zeros or values that are none."""
    return [
        {
            "prompt": f"p{i:02d}",
            "layer": layer,
            "n_tokens": 60,
            "n_rows": 60,
            "nan_rows": nans if (i, layer) == (0, 2) else 0,
            "inf_rows": 0,
            "zero_rows": zeros if (i, layer) == (0, 2) else 0,
            "first_bad": 7 if (i, layer) == (0, 2) and zeros + nans else None,
            "largest": 3.0 + layer,
            "rms": 0.5 + 0.1 * layer + 0.01 * i,
            "dtype": "float32",
        }
        for i in range(n_prompts)
        for layer in LAYERS
    ]


def identity_rows(n_prompts: int, wrong: dict[int, str] | None = None) -> list[dict[str, Any]]:
    """Rows of ``hidden.identity``; layers in ``wrong`` are what is said there."""
    wrong = wrong or {}
    return [
        {
            "prompt": f"p{i:02d}",
            "layer": layer,
            "kind": "other_layer" if layer in wrong else "right",
            "rel_rms": 0.6 if layer in wrong else FLOOR / 2,
            "explained": FLOOR / 2,
            "what": wrong.get(layer, f"layer {layer}, as it should be"),
            "rough": False,
            "floor": FLOOR,
        }
        for i in range(n_prompts)
        for layer in LAYERS
    ]


def argmax_rows(n_prompts: int, *, decisive: int = 0) -> list[dict[str, Any]]:
    """Rows of ``hidden.argmax``: one near-tie in the first prompt, and perhaps more than that."""
    return [
        {
            "prompt": f"p{i:02d}",
            "n": 60,
            "n_equal": 59 - decisive if i == 0 else 60,
            "n_decisive": decisive if i == 0 else 0,
            "n_unnormed": 0,
            "largest_margin": 1.0 if i == 0 else 0.0,
        }
        for i in range(n_prompts)
    ]


def checks(n_prompts: int = 6) -> dict[str, Any]:
    """An audit without faults but for a chunk of 63 tokens and rows of zeros."""
    return {
        "hidden.rows": state_rows(n_prompts, zeros=2),
        "hidden.argmax": argmax_rows(n_prompts),
        "hidden.identity": identity_rows(n_prompts, {2: "the states of layer 1"}),
        "hidden.batch": case_rows({"sequence 1 of 3": 0.2, "sequence 2 of 3": 0.0}),
        "hidden.padding": case_rows({"batch of 1": 0.1, "batch of 2": 0.3}),
        "hidden.packing": case_rows({"document 1 of 2": 0.1, "document 2 of 2": 1.4}),
        "hidden.chunks": case_rows({"63 tokens": 40.0, "64 tokens": 0.4, "65 tokens": 0.4}),
        "hidden.decode": case_rows({"prefill and decode": 1.1}),
        "floor_note": "Noise floor: torch/bfloat16 against torch/float32, over 4 prompts.",
    }
