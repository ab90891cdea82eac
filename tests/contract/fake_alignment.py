"""A hand-made record of readings that were tried, in the format of `dflash_diag.findings`."""

from __future__ import annotations

BLOCK = 8


def numbers(value, half=0.1):
    return {"value": value, "lo": value - half, "hi": value + half}


def tried(cause, setting, delta, *, found=False, whole=True):
    return {
        "cause": cause,
        "settings": [setting],
        "whole": whole,
        "equal": False,
        "gain": numbers(delta / 10, 0.01),
        "p": 0.0001 if found else 1.0,
        "p_adjusted": 0.01 if found else 1.0,
        "tau": numbers(1.6 + delta),
        "delta": numbers(delta),
        "found": found,
        "excluded": not found and delta + 0.1 < 0.05,
    }


def finding(cause, status, delta=None):
    none = {"value": None, "lo": None, "hi": None}
    return {
        "cause": cause,
        "status": status,
        "kind": "training_fault",
        "recoverable": False,
        "settings": ["context_bound=inclusive"] if status == "found" else [],
        "tau_own_reading": none if delta is None else numbers(1.6 + delta),
        "delta": none if delta is None else numbers(delta),
        "evidence": "Read with <b>it</b>: better; about 90 prompts would settle it.",
        "aliases": [],
        "remedy": "Retrain." if status == "found" else "",
    }


def alignment(n_prompts: int) -> dict:
    offsets = [-3, -2, -1, 1, 2, 3]
    first = [
        tried("mask.anchor_included", "context_bound=inclusive", 1.1, found=True),
        tried("layers.offset", "layer_ids=0,2", -0.3, whole=False),
        *(tried("position.block_offset", f"position_offset={d}", -0.1 * abs(d)) for d in offsets),
    ]
    base = {"settings": [], "tau": numbers(1.6), "accuracy": 0.2, "tried": first}
    on_top = {**base, "settings": ["context_bound=inclusive"], "tau": numbers(2.7)}
    on_top["tried"] = [tried("rope.theta", "rope_theta=1000", -0.5)]
    phases = [[abs(d) * 15.0 + k for k in range(BLOCK)] for d in (-3, -2, -1, 0, 1, 2, 3)]
    return {
        "n_prompts": n_prompts,
        "declared": {},
        "rounds": [base, on_top],
        "pairs": None,
        "shuffled": tried("hidden.ignored_by_drafter", "", -0.6),
        "findings": [
            finding("mask.anchor_included", "found", 1.1),
            finding("position.block_offset", "not_identifiable", 0.0),
            finding("mask.cross_block_leak", "excluded", -0.5),
            finding("mask.window", "not_tested"),
        ],
        "positions": {
            "offsets": [-3, -2, -1, 0, 1, 2, 3],
            "phase_degrees": phases,
            "shifts": [
                {"check": "everything moved by 64", "expected": "no change", "rel_rms": 2e-6},
                {"check": "block moved by +1", "expected": "a change", "rel_rms": 0.3},
            ],
        },
        "density": [
            {
                "other_blocks": others,
                "anchors": n,
                "accuracy": 0.2 - 0.01 * n**0.5,
                "tau_uniform": 1.5,
                "n_prompts": n_prompts,
            }
            for others, counts in (("hidden", (1,)), ("later", (4, 8)), ("all", (4, 8)))
            for n in counts
        ],
    }
