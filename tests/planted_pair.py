"""Single faults, and sound runs, of the example whose target nobody here trained.

The same ways as in `planted`, on another architecture, format, vocabulary and kind of text; plus a
drafter of another target of the same width, which only a second target of that width can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from planted import (
    ROWS,
    UNUSED,
    Case,
    States,
    Weights,
    drawn_anew,
    each,
    fc_columns,
    first_half_lost,
    in_float32,
    interleaved,
    norms_less_one,
    of_the_next_prompt,
    one_row_early,
    one_row_late,
    rounded,
    silenced,
    with_more_layers,
    without,
)
from torch import Tensor

from dflash_diag.capture import make_capture
from dflash_diag.example import SMOLLM2
from dflash_diag.prompts import Prompt
from dflash_diag.targets import Target, load_target

TAPS = (1, 14, 27)
DRAFTER = "smollm2/drafter"
LENGTH = 64
"""G of every capture."""

IN_GERMAN = (
    "Warum ist der Himmel am Abend rot?",
    "Schreibe einen kurzen Brief an deine Großmutter über den Winter in den Bergen.",
    "Erkläre mir, wie ein Brot gebacken wird.",
    "Was ist der Unterschied zwischen einem See und einem Meer?",
    "Nenne fünf Städte in Deutschland und sage, wofür sie bekannt sind.",
    "Erzähle eine Geschichte von einem Fuchs, der das Fliegen lernen wollte.",
    "Wie funktioniert eine Dampfmaschine?",
    "Übersetze ins Deutsche: The train to the coast leaves at seven in the morning.",
    "Welche Vögel bleiben im Winter hier, und was fressen sie?",
    "Gib mir ein Rezept für eine Suppe aus Kartoffeln und Lauch.",
    "Warum schlafen Menschen, und wie viele Stunden brauchen Kinder?",
    "Schreibe ein Gedicht über den Regen auf dem Dach.",
)


def in_german() -> list[Prompt]:
    """Questions in a language that the drafter was not trained on."""
    return [
        Prompt(id=f"german{i:02d}", messages=({"role": "user", "content": text},))
        for i, text in enumerate(IN_GERMAN)
    ]


def of_random_tokens(n: int = 12, length: int = 40) -> list[Prompt]:
    """Prompts that are no text; the special tokens are the vocabulary's first 17."""
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(17, 49152, (n, length), generator=drawn).tolist()
    return [Prompt(id=f"random{i:02d}", prompt_ids=tuple(one)) for i, one in enumerate(ids)]


def as_plain_text() -> list[Prompt]:
    """The example's questions without the chat template."""
    return [
        Prompt(id=one.id, text="\n\n".join(part["content"] for part in one.messages or ()))
        for one in SMOLLM2.read_prompts()
    ]


def of_its_size(target: Target) -> Target:
    """Its weights drawn anew in place: another model of the same shape and vocabulary."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in target.model.parameters():
            if weight.ndim == 2:
                weight.normal_(0, weight.shape[1] ** -0.5)
    return target


def captures(folder: Path) -> dict[str, Path]:
    """Every capture that a case asks for; what is there is not made again."""
    usual = SMOLLM2.read_prompts()
    plans: dict[str, list[Prompt]] = {
        "default": usual,
        "plain": as_plain_text(),
        "german": in_german(),
        "random": of_random_tokens(),
        "another target": usual[::2],
    }
    target: Target | None = None
    for name, prompts in plans.items():
        if (folder / name / "manifest.json").is_file():
            continue
        target = target or load_target(SMOLLM2.part(SMOLLM2.target), device="cpu")
        if name == "another target":  # the last: its weights are overwritten
            target = of_its_size(target)
        make_capture(target, prompts, folder / name, max_new_tokens=LENGTH, taps=TAPS, silent=True)
    return {name: folder / name for name in plans}


# --- weights and states -----------------------------------------------------------------------


def for_another_basis(weights: Weights) -> Weights:
    """Exactly as good, on a target that is this one with its hidden dimensions renamed.

    That is what a drafter of another model of the same width is here: a good one, whose states,
    embedding and head mean something else.
    """
    drawn, width = torch.Generator().manual_seed(0), len(weights["fc.weight"])
    order = torch.randperm(width, generator=drawn)
    sign = torch.randint(0, 2, (width,), generator=drawn) * 2 - 1

    def columns(value: Tensor) -> Tensor:
        return torch.cat([part[:, order] * sign for part in value.split(width, dim=1)], dim=1)

    def rows(value: Tensor) -> Tensor:
        return value[order] * sign[:, None]

    found = {}
    for name, value in weights.items():
        if value.shape == (width,):
            value = value[order]
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            value = rows(value)
        elif name == "fc.weight":
            value = rows(columns(value))
        elif value.ndim == 2:
            value = columns(value)
        found[name] = value.to(weights[name].dtype)
    return found


def noisy(layer: int, states: Tensor) -> Tensor:
    """Tapped layers as a coarse quantisation leaves them."""
    if layer not in TAPS:
        return states
    spread = states.float().square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    return (states.float() + 1.2 * spread * noise).to(states.dtype)


def one_layer_scaled(layer: int, states: Tensor) -> Tensor:
    """One tap in other units than the others."""
    return states * 8 if layer == TAPS[-1] else states


def two_layers_swapped(prompts: Sequence[States]) -> Sequence[States]:
    """Two tapped layers under each other's name."""
    return [states | {1: states[27], 27: states[1]} for states in prompts]


# --- the cases --------------------------------------------------------------------------------


def case(name: str, *causes: str, **fields: object) -> Case:
    """A case of this pair, with one planted cause or none."""
    return Case(name=name, drafter=DRAFTER, causes=(causes,) if causes else (), **fields)


SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
    "use_sliding_window": True,
    "is_causal": False,
}

SINGLE = (
    case("theta x100", "rope.theta", config={"rope_theta": 1e6}),
    case("theta x2", "rope.theta", config={"rope_theta": 2e4}),
    case("a quarter of each head", "rope.rotary_width", config={"partial_rotary_factor": 0.25}),
    case(
        "neighbours paired",
        "rope.interleaving",
        config={"is_neox_style": False, "rope_is_neox_style": False},
    ),
    case(
        "linear scaling",
        "rope.scaling",
        config={"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    case("layers one early", "layers.offset", config={".target_layer_ids": [0, 13, 26]}),
    case("layers one late", "layers.offset", config={".target_layer_ids": [2, 15, 28]}),
    case("layers permuted", "layers.order", config={".target_layer_ids": [14, 1, 27]}),
    case("layers descending", "layers.order", config={".target_layer_ids": [27, 14, 1]}),
    case("mask token is a word", "mask_token.id", config={".mask_token_id": 700}),
    case("mask token is eos", "mask_token.id", config={".mask_token_id": 2}),
    case("causal", "mask.block_causality", config={"is_causal": True}),
    case("a window of 16", "mask.window", config=SLIDING),
    case("blocks too wide", "block.width", config={"block_size": 9}),
    # It costs 0.04 tokens a round, which counts as none and takes more prompts to see.
    case("blocks too narrow", "block.width", config={"block_size": 7}, may_abstain=True),
    case(
        "the anchor in the context",
        "mask.anchor_included",
        options={"overrides": ("context_bound=inclusive",)},
    ),
    case(
        "block a position late",
        "position.block_offset",
        options={"overrides": ("position_offset=1",)},
    ),
    case(
        "block a position early",
        "position.block_offset",
        options={"overrides": ("position_offset=-1",)},
    ),
    case("labels a token late", "label.shift", options={"overrides": ("label_offset=1",)}),
    case("embedding scaled up", "embedding.scale", config={"input_embedding_scale": 400.0}),
    case("norms less one", "norm.missing_or_doubled", weights=norms_less_one),
    case("weights interleaved", "rope.interleaving", weights=lambda w: interleaved(w, 64)),
    case("fc permuted", "layers.order", weights=fc_columns((1, 0, 2))),
    case("never trained", "checkpoint.wrong_target", weights=drawn_anew),
    case("of another target", "checkpoint.wrong_target", weights=for_another_basis),
    case("on another target", "checkpoint.wrong_target", capture="another target"),
    case("fc is zero", "hidden.ignored_by_drafter", *UNUSED, weights=silenced("fc.weight")),
    case("an MLP is zero", *UNUSED, weights=silenced("layers.1.mlp.down_proj.weight")),
    case("a tensor is missing", *UNUSED, weights=without("layers.1.mlp.up_proj.weight")),
    case("a layer is not counted", *UNUSED, weights=with_more_layers),
    case(
        "block sizes contradict",
        "checkpoint.config_contradiction",
        "block.width",
        config={"block_size": 6, ".block_size": 8},
    ),
    case("states a row late", *ROWS, states=each(one_row_late)),
    case("states a row early", *ROWS, states=each(one_row_early)),
    case("half of the states lost", *ROWS, states=each(first_half_lost)),
    case("two layers under wrong names", *ROWS, states=two_layers_swapped),
    case("states of another prompt", *ROWS, states=of_the_next_prompt),
    case("one layer scaled", *ROWS, states=each(one_layer_scaled)),
    case(
        "coarse taps against good ones",
        "hidden.backend",
        "hidden.dtype",
        states=each(noisy),
        options={"against": "default", "target": ""},
    ),
)
"""Faults made by rewriting files."""

HEALTHY = (
    case("healthy"),
    case("no template", capture="plain"),
    case("random tokens", capture="random"),
    case("another language", capture="german"),
    case("healthy in float32 files", weights=in_float32),
    case("states in bfloat16", states=each(rounded)),
    case("healthy, other resamples", options={"seed": 7}),
)
"""Nothing is wrong with these."""

GROUPS = {"single": SINGLE, "healthy": HEALTHY}
