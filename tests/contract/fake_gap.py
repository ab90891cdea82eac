"""A hand-made training measurement and gap, in the format of `dflash_diag.gap_runs`."""

from __future__ import annotations

HOW = {
    "reading": {"context_bound": "inclusive"},
    "declared": {"context_bound": "strict"},
    "context": "own",
    "noise": 0.0,
    "labels": "tokens",
    "anchors": "stored",
    "dtype": "bfloat16",
    "served_dtype": "float32",
    "states": "fla/bfloat16",
    "served_states": "torch/float32",
}


def numbers(value, half):
    return {"value": value, "lo": value - half, "hi": value + half}


def replayed() -> dict:
    """Two splits, and claims of which one is reached and one is not."""
    table = {"accuracy uniform": numbers(0.5, 0.05), "streak uniform": numbers(2.9, 0.3)}
    table |= {"topk_oracle@4 uniform": numbers(4.1, 0.4), "marginal@1 uniform": numbers(0.8, 0.05)}
    split = {"n_texts": 24, "n_anchors": 576, "numbers": table}
    claim = {"split": "train", "step": 2400, "by": "bounds"}
    claims = [
        {**claim, "name": "<i>streak", "value": 3.1, "fits": ["streak uniform"]}
        | {"spread": [3.0, 3.3]},
        {**claim, "name": "dds4", "value": 5.9, "fits": ["topk_oracle@4 uniform", "other"]}
        | {"spread": [5.9, 5.9]},
    ]
    return {"splits": {"train": split, "validation": split}, "claims": claims, **HOW}


def gap() -> dict:
    """Four parts of which one was merged, and one that could not be measured."""

    def bar(factors, value, half, orders=0.0):
        found = {"factors": factors, **numbers(value, half)}
        return found | {"lo_order": value - orders, "hi_order": value + orders}

    return {
        "claim": {"name": "streak", "value": 3.1, "fits": ["streak uniform"]},
        "step": 2400,
        "spread": [3.0, 3.3],
        "definition": "streak uniform",
        "means": "Accepted tokens a round, over all anchors, pooled.",
        "split": "train",
        "sizes": {"train": 24, "validation": 24, "your prompts": 6},
        "claimed": 3.1,
        "replayed": numbers(2.9, 0.3),
        "served": numbers(1.6, 0.1),
        "n_orders": 60,
        "bars": [
            bar(["unexplained"], -0.2, 0.3),
            bar(["metric definition"], 1.0, 0.0),
            bar(["anchor population", "data: your prompts"], -0.8, 0.2, 0.3),
            bar(["mask and convention"], -1.5, 0.1, 0.4),
        ],
        **HOW,
        "not_measured": [{"factor": "hidden-state backend", "reason": "Computed <i>here</i>."}],
    }
