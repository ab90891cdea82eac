"""One set of inputs for every diagnostic."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import fake_alignment
import fake_compare
import fake_gap
import fake_states
from fakes import FakeInputs, simulated_scores

from dflash_diag.claims import read_claims
from dflash_diag.doctor.merging import merged

if TYPE_CHECKING:
    from dflash_diag.checkpoints import Checkpoint


def continuations(n_prompts: int, generated: int) -> list:
    from dflash_diag.diagnostics.base import Continuation

    rng = np.random.default_rng(3)
    made = []
    for i in range(n_prompts):
        ids = rng.integers(0, 300, generated)
        if i == 0:
            ids[20:] = np.resize(ids[:20], generated - 20)
        made.append(Continuation(f"p{i:02d}", 20, ids.tolist(), "a = 1\nb = 2\na = 1\n"))
    return made


def texts(n_prompts: int, generated: int) -> list:
    """Easy prompts and hard ones, under the ids of the scores; every other one ended by itself."""
    from dflash_diag.strata import Text

    rng = np.random.default_rng(4)
    made = []
    for i in range(n_prompts):
        tokens = rng.integers(0, 300, 20 + generated)
        made.append(
            Text(
                id=f"p{i:02d}",
                start=20,
                tokens=tokens,
                ended=i % 2 == 0,
                form="messages" if i % 3 else "text",
                kind="<b>easy</b>" if i % 2 else "hard",
                entropy=rng.gamma(2.0, 0.5, len(tokens)),
                choice=np.roll(tokens, -1),
            )
        )
    return made


@cache
def checkpoint() -> Checkpoint:
    import torch

    from dflash_diag.checkpoints import read_checkpoint
    from dflash_diag.drafter import Drafter, DrafterShape

    shape = DrafterShape(
        hidden_size=8, n_taps=2, n_layers=2, n_heads=2, n_kv_heads=1, head_width=4, mlp_size=16
    )
    torch.manual_seed(0)
    config = {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "block_size": 8,
        "rope_theta": 10_000.0,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 299},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torch.save(Drafter(shape, convention()).state_dict(), path)
        made = read_checkpoint(path, config=config)
        for name in made.tensors:
            made.tensors[name]  # kept once it is read, so that the file may go
    return replace(made, training_args={"lr": 1e-3, "optimizer": {"name": "adamw"}})


def static_checks() -> list[dict]:
    """A finding, a note, something not at hand, and a check without a complaint."""
    finding = {"cause": "mask_token.id", "severity": "fail", "evidence": {"is": "eos"}}
    finding |= {"text": "The mask token 0 is the token <b>that</b> ends a text."}
    note = {"cause": "layers.order", "severity": "note", "evidence": {}, "text": "Not sorted."}
    rest = {"findings": [], "untested": [], "measured": {}}
    effects = {"fc.weight": 0.9, "layers.0.mlp.up_proj.weight": 0.0, "layers.1.norm.weight": 0.2}
    return [
        {**rest, "check": "effect", "found": "3 tensors", "expected": "an effect"}
        | {"measured": {"effects": effects, "on": "4 blocks"}},
        {**rest, "check": "tapped layers", "found": "layers 1, 0", "expected": "layers"}
        | {"findings": [note]},
        {**rest, "check": "mask token", "found": "token 0", "expected": "another"}
        | {"findings": [finding], "untested": ["no text is at hand"]},
        {**rest, "check": "norms", "found": "", "expected": "", "untested": ["no norms"]},
    ]


def convention():
    from dflash_diag.conventions import Convention, Source

    stated = ("block_size", "layer_ids", "mask_token_id", "rope_theta")
    return Convention(
        block_size=8,
        layer_ids=(0, 1),
        in_block=("bidirectional", "bidirectional"),
        window=(None, None),
        rope_theta=10_000.0,
        rotary_width=4,
        mask_token_id=299,
        sources={name: Source(name, "declared") for name in stated},
    )


@cache
def probed():
    """A drafter that is causal where its convention says otherwise, as the probes see it."""
    import torch

    from dflash_diag.adapters.builtin import Builtin
    from dflash_diag.drafter import Drafter, DrafterShape
    from dflash_diag.influence import probe

    shape = DrafterShape(
        hidden_size=8, n_taps=2, n_layers=2, n_heads=2, n_kv_heads=1, head_width=4, mlp_size=16
    )
    torch.manual_seed(0)
    causal = replace(convention(), in_block=("causal", "causal"))
    drafter = Drafter(shape, causal).eval().requires_grad_(requires_grad=False)
    bits = torch.randn(300, 8), torch.randn(300, 8)
    tokens = torch.randint(0, 299, (30,))
    return probe(Builtin(drafter, *bits), torch.randn(30, 2, 8), tokens, (8, 20), convention())


@cache
def audited():
    """A training step that leaks and mixes its loss, as the audit sees it."""
    from toy_trainer import Trainer, material

    from dflash_diag.training_audit import audit_step

    return audit_step(Trainer(bound=1, share=0.4), material(), "<b>step</b>")


def lossless_rows(n_prompts: int, generated: int) -> dict:
    rows = [
        {"id": f"p{i:02d}", "n_tokens": generated, "n_same": generated, "cause": "", "margin": None}
        for i in range(n_prompts)
    ]
    rows[-1] |= {"n_same": 9, "cause": "rounding", "margin": 1e-7}
    return {"rows": rows, "notes": ["Noise floor: 1e-06 logits."]}


def reference_rows(n_prompts: int, generated: int) -> dict:
    same = {"n_tokens": generated, "n_equal": generated, "n_rounding": 0, "n_differ": 0}
    same |= {"first_differ": None, "margin": None, "gap": 0.0, "kind": "", "stopped_early": False}
    same |= {"how": "ids", "finish_reason": "length"}
    rows = [{"id": f"p{i:02d}", **same} for i in range(n_prompts)]
    rows[0] |= {
        "n_equal": generated - 1,
        "n_rounding": 1,
        "margin": 0.01,
        "gap": 0.01,
        "kind": "rounding",
    }
    server = {"url": "http://127.0.0.1:8000", "dialect": "sglang", "model": "<b>m</b>"}
    server |= {"version": None, "precision": None, "tokens_by": ["ids"], "unusable": []}
    return {"server": server, "rows": rows, "notes": ["Rounding: 0.0078 of the highest logit."]}


def examined(aligned):
    """What the doctor makes of the readings, as ``doctor --json`` has it."""
    tau = {"value": 1.64, "lo": 1.53, "hi": 1.78}
    return {
        "schema": "dflash_diag.doctor/1",
        "verdict": "FAIL",
        "headline": "<b>step_8000</b> is accepted 1.64 [1.53, 1.78] tokens a round. Retrain.",
        "said": "<b>step_8000</b> is accepted 1.64 [1.53, 1.78] tokens a round.",
        "to_do": "Retrain.",
        "tau_declared": tau,
        "tau_best": tau,
        "claims": [],
        "findings": merged(aligned["findings"]),
        "cautions": [],
    }


def make_inputs(*, reference: bool = True, n_prompts: int = 6, **scores) -> FakeInputs:
    generated = scores.setdefault("generated", 48)
    drafters = {"drafter": simulated_scores(skill=0.45, n_prompts=n_prompts, **scores)}
    if reference:
        drafters["reference"] = simulated_scores(skill=0.85, seed=1, n_prompts=n_prompts, **scores)
    made = FakeInputs(drafters, {"drafter": "step_8000", "reference": "<b>published</b>"})
    made.checkpoints = dict.fromkeys(drafters, checkpoint())
    made.conventions = dict.fromkeys(drafters, convention())
    made.static_checks = static_checks()
    made.made_continuations = continuations(n_prompts, generated)
    made.made_texts = texts(n_prompts, generated)
    made.lossless_check = lossless_rows(n_prompts, generated)
    made.comparisons = fake_states.comparisons(n_prompts)
    # The first side changes nothing, the second is scored as another drafter would be.
    made.scored_sides = {"torch/bfloat16": drafters["drafter"]}
    made.scored_sides["fla/bfloat16"] = simulated_scores(
        skill=0.65, seed=2, n_prompts=n_prompts, **scores
    )
    made.checks = fake_states.checks(n_prompts)
    made.aligned = fake_alignment.alignment(n_prompts)
    made.examined = examined(made.aligned)
    made.served_check = lossless_rows(n_prompts, generated)
    made.reference_check = reference_rows(n_prompts, generated)
    made.probed = probed()
    made.replayed, made.gaps = fake_gap.replayed(), fake_gap.gap()
    made.rendered = rendered(n_prompts)
    made.claimed_lines = read_claims(["streak=1.24", "dds4=2.78", "dds8=3.58", "eval/<b>=0.4"])
    made.audited = audited()
    if reference:
        earlier = simulated_scores(skill=0.4, seed=3, n_prompts=n_prompts, **scores)
        members = [
            fake_compare.member(drafters["drafter"], "step_8000", 8000),
            fake_compare.member(earlier, "step_4000", 4000, facts={"target's dtype": "bfloat16"}),
            fake_compare.member(drafters["reference"], "<b>published</b>", is_reference=True),
        ]
        made.side_by_side = fake_compare.comparison(members, draws=made.draws)
    return made


@pytest.fixture(scope="session")
def inputs() -> FakeInputs:
    return make_inputs()


@pytest.fixture
def another():
    """Makes inputs of another kind."""
    return make_inputs


def rendered(n_prompts):
    """A template, and two renderings: one that costs something and one that may not."""
    usual = {"value": 2.6, "lo": 2.2, "hi": 3.0}
    rows = [
        {
            "rendering": "off",
            "name": "template off",
            "delta": {"value": -0.7, "lo": -0.9, "hi": -0.5},
        },
        {"rendering": "system=<b>", "name": "system prompt “<b>”"}
        | {"delta": {"value": -0.1, "lo": -0.3, "hi": 0.1}},
    ]
    for row in rows:
        row["tau"] = {key: usual[key] + row["delta"]["value"] for key in usual}
        row |= {"tau_usual": usual, "n_prompts": n_prompts, "p": 0.04}
    template = {"dialect": "ChatML", "sha256": "0" * 64}
    refused = {"system prompt empty": "prompt '<b>': the chat template refuses it"}
    return {"template": template, "target": "<i>m", "rows": rows, "refused": refused}
