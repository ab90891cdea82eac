"""Drafters and captures with one planted fault, two, or none, made from the embedded example.

A fault is made the way that it happens: a configuration is rewritten, a tensor is changed, or the
states of a capture are. What comes out are files; nothing else tells the doctor what was done.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_diag.bundle import Capture, manifest_text
from dflash_diag.hidden_states import recorded
from dflash_diag.paths import data_dir
from dflash_diag.storage import read_json, sha256_file
from dflash_diag.targets import load_target

HYBRID = data_dir() / "zoo" / "hybrid"
FULL = data_dir() / "zoo" / "full"
TAPS = (1, 4, 7, 10, 13)

Weights = dict[str, Tensor]
States = dict[int, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One drafter on one capture, and what the doctor is expected to say."""

    name: str
    causes: tuple[tuple[str, ...], ...] = ()
    """The planted causes; each is a choice of ids where the files cannot tell them apart. None is a
    sound drafter."""
    drafter: str = "healthy"
    """Of the hybrid target's, or with a slash, the folder of one in the zoo."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that are rewritten; a dot leads into ``dflash_config``."""
    weights: Callable[[Weights], Weights] | None = None
    states: Callable[[Sequence[States]], Sequence[States]] | None = None
    """What becomes of the captured states of all prompts; the live target is then at hand."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the run's configuration."""
    capture: str = "default"
    """Which capture: see `tests/benchmarks/doctor.py`."""
    may_abstain: bool = False
    """Whether ``not_identifiable`` is right too: no data of this size tells."""


def files_of(case: Case, folder: Path) -> Path:
    """The case's drafter, written into ``folder``."""
    inside = HYBRID / "drafters" if "/" not in case.drafter else data_dir() / "zoo"
    source = inside / case.drafter
    out = folder / "drafter"
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("training_*"))
    config = read_json(out / "config.json")
    for key, value in case.config.items():
        inside = config["dflash_config"] if key.startswith(".") else config
        if value is None:
            inside.pop(key.lstrip("."))
        else:
            inside[key.lstrip(".")] = value
    (out / "config.json").write_text(json.dumps(config))
    if case.weights is not None:
        weights = case.weights(load_file(out / "model.safetensors"))
        save_file({k: v.contiguous() for k, v in weights.items()}, out / "model.safetensors")
    return out


def changed_capture(
    source: Path, folder: Path, change: Callable[[Sequence[States]], Sequence[States]]
) -> Path:
    """A copy of a capture whose states are others, with hashes that fit them."""
    out = folder / "capture"
    shutil.copytree(source, out)
    capture = Capture.load(source)
    before = []
    for i in range(len(capture)):
        layers = capture.layers(i)
        before.append(dict(zip(layers, capture.states(i, layers).unbind(1), strict=True)))
    manifest = read_json(out / "manifest.json")["files"]
    for i, states in enumerate(change(before)):
        file = out / f"states/{i:05d}.safetensors"
        content = load_file(file)
        content |= {f"layer.{layer}": value.contiguous() for layer, value in states.items()}
        save_file(content, file)
        manifest[f"states/{i:05d}.safetensors"] = sha256_file(file)
    (out / "manifest.json").write_text(manifest_text(manifest))
    return out


def moved_capture(source: Path, folder: Path, by: int) -> Path:
    """A copy of the example's capture whose states the target made with later positions."""
    capture, target = Capture.load(source), load_target(str(HYBRID / "target"), device="cpu")

    def change(before: Sequence[States]) -> Sequence[States]:
        return [
            {layer: value.to(known[layer].dtype) for layer, value in again(i, known).items()}
            for i, known in enumerate(before)
        ]

    def again(i: int, layers: Iterable[int]) -> States:
        ids = capture.tokens(i)[None]
        at = torch.arange(by, by + ids.shape[1])[None]
        with torch.inference_mode(), recorded(target.parts, layers) as made:
            target.logits(ids, attention_mask=torch.ones_like(ids), position_ids=at)
        return {layer: value[0] for layer, value in made.items()}

    return changed_capture(source, folder, change)


# --- weights ----------------------------------------------------------------------------------


def norms_less_one(weights: Weights) -> Weights:
    """RMSNorm weights as code has them that scales by 1 + w."""
    return {k: v - 1 if "norm" in k else v for k, v in weights.items()}


def fc_columns(order: Sequence[int]) -> Callable[[Weights], Weights]:
    """The taps' columns of ``fc`` in another order."""

    def change(weights: Weights) -> Weights:
        parts = weights["fc.weight"].chunk(len(order), dim=1)
        return weights | {"fc.weight": torch.cat([parts[i] for i in order], dim=1)}

    return change


def interleaved(weights: Weights, width: int = 32) -> Weights:
    """Queries and keys laid out for code that pairs neighbouring dimensions."""
    half = width // 2
    order = torch.stack([torch.arange(half), torch.arange(half) + half], 1).flatten()

    def rows(value: Tensor) -> Tensor:
        return value.unflatten(0, (-1, width))[:, order].flatten(0, 1)

    found = {}
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            value = rows(value)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            value = value[order]
        found[name] = value
    return found


def silenced(*names: str) -> Callable[[Weights], Weights]:
    """Some tensors all zero."""
    return lambda weights: {
        k: torch.zeros_like(v) if k.endswith(names) else v for k, v in weights.items()
    }


def without(*names: str) -> Callable[[Weights], Weights]:
    """Some tensors left out of the file."""
    return lambda weights: {k: v for k, v in weights.items() if not k.endswith(names)}


def with_more_layers(weights: Weights) -> Weights:
    """A layer in the file that the configuration does not count."""
    last = {k: v for k, v in weights.items() if k.startswith("layers.1.")}
    return weights | {k.replace("layers.1.", "layers.2."): v.clone() for k, v in last.items()}


def drawn_anew(weights: Weights) -> Weights:
    """Matrices that were never trained."""
    generator = torch.Generator().manual_seed(0)
    return {
        k: (0.02 * torch.randn(v.shape, generator=generator)).to(v.dtype) if v.ndim == 2 else v
        for k, v in weights.items()
    }


def with_scrambled_head(weights: Weights) -> Weights:
    """A head of its own whose rows belong to other tokens."""
    head = load_file(HYBRID / "target" / "model.safetensors")["model.embed_tokens.weight"]
    order = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))
    return weights | {"lm_head.weight": head[order].clone()}


def in_float32(weights: Weights) -> Weights:
    """The same in another precision."""
    return {k: v.float() for k, v in weights.items()}


# --- states -----------------------------------------------------------------------------------


def each(change: Callable[[int, Tensor], Tensor]) -> Callable[[Sequence[States]], Sequence[States]]:
    """A change of each layer's states [T, H], the same on every prompt."""
    return lambda prompts: [{k: change(k, v) for k, v in states.items()} for states in prompts]


def one_row_late(_layer: int, states: Tensor) -> Tensor:
    """The state of the token before, as off-by-one dumps have it."""
    return torch.cat([states[:1], states[:-1]])


def one_row_early(_layer: int, states: Tensor) -> Tensor:
    """The state of the token behind: what is not known yet when a server drafts."""
    return torch.cat([states[1:], states[-1:]])


def first_half_lost(_layer: int, states: Tensor) -> Tensor:
    """Zeros where a prefix cache did not deliver."""
    return torch.where(torch.arange(len(states))[:, None] < len(states) // 2, 0, states)


def noisy(layer: int, states: Tensor) -> Tensor:
    """Tapped layers as a coarse quantisation leaves them."""
    if layer not in TAPS:
        return states
    generator = torch.Generator().manual_seed(0)
    spread = states.float().square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(states.shape, generator=generator)
    return (states.float() + 1.2 * spread * noise).to(states.dtype)


def rounded(_layer: int, states: Tensor) -> Tensor:
    """Rounded to bfloat16: another precision, and no fault."""
    return states.to(torch.bfloat16).to(states.dtype)


def two_layers_swapped(prompts: Sequence[States]) -> Sequence[States]:
    """Two tapped layers under each other's name."""
    return [states | {4: states[10], 10: states[4]} for states in prompts]


def of_the_next_prompt(prompts: Sequence[States]) -> Sequence[States]:
    """Each prompt with the states of the next, repeated where they are too short."""
    found = []
    for i, own in enumerate(prompts):
        other = prompts[(i + 1) % len(prompts)]
        length = len(own[TAPS[0]])
        rows = torch.arange(length) % len(other[TAPS[0]])
        found.append({layer: other[layer][rows] for layer in own})
    return found


def one_layer_scaled(layer: int, states: Tensor) -> Tensor:
    """One tap in other units than the others."""
    return states * 8 if layer == TAPS[-1] else states


# --- the cases --------------------------------------------------------------------------------

ROWS = ("hidden.rows",)
UNUSED = ("checkpoint.missing_or_unused_tensors",)

TRAINED = (
    Case(name="anchor_included", drafter="anchor_included", causes=(("mask.anchor_included",),)),
    Case(name="cross_block_leak", drafter="cross_block_leak", causes=(("mask.cross_block_leak",),)),
    Case(name="block_causal", drafter="block_causal", causes=(("mask.block_causality",),)),
    Case(name="label_shift", drafter="label_shift", causes=(("label.shift",),)),
    Case(
        name="position_plus_one",
        drafter="position_plus_one",
        causes=(("position.block_offset",),),
        may_abstain=True,
    ),
    Case(
        name="layer_offset",
        drafter="layer_offset",
        causes=(("layers.offset",),),
        may_abstain=True,
    ),
    Case(
        name="last_layer_in_fc",
        drafter="last_layer_in_fc",
        causes=(("layers.last_layer_in_fc",),),
    ),
    Case(
        name="noise_on_target_logits",
        drafter="noise_on_target_logits",
        causes=(("training.noise_on_target_logits",),),
        options={"step": "noise_on_target_logits"},
    ),
    Case(
        name="soft_kl_loss",
        drafter="soft_kl_loss",
        causes=(("training.loss_mismatch",),),
        options={"step": "soft_kl_loss"},
    ),
    Case(
        name="noise_on_target_logits, no step",
        drafter="noise_on_target_logits",
        causes=(("training.noise_on_target_logits",),),
        may_abstain=True,
    ),
    Case(
        name="soft_kl_loss, no step",
        drafter="soft_kl_loss",
        causes=(("training.loss_mismatch",),),
        may_abstain=True,
    ),
    Case(
        name="ignored_context",
        drafter="ignored_context",
        causes=(("hidden.ignored_by_drafter",),),
    ),
)
"""The example's own drafters, each trained with one fault."""

SLIDING = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 16,
    "use_sliding_window": True,
    "is_causal": False,
}

SINGLE = (
    Case(name="theta x100", config={"rope_theta": 1e6}, causes=(("rope.theta",),)),
    Case(name="theta /100", config={"rope_theta": 100.0}, causes=(("rope.theta",),)),
    Case(
        name="a quarter of each head",
        config={"partial_rotary_factor": 0.25},
        causes=(("rope.rotary_width",),),
    ),
    Case(
        name="neighbours paired",
        config={"is_neox_style": False, "rope_is_neox_style": False},
        causes=(("rope.interleaving",),),
    ),
    Case(name="weights interleaved", weights=interleaved, causes=(("rope.interleaving",),)),
    Case(
        name="linear scaling",
        config={"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        causes=(("rope.scaling",),),
    ),
    Case(
        name="layers one early",
        config={".target_layer_ids": [0, 3, 6, 9, 12]},
        causes=(("layers.offset",),),
    ),
    Case(
        name="layers one late",
        config={".target_layer_ids": [2, 5, 8, 11, 14]},
        causes=(("layers.offset",),),
    ),
    Case(
        name="layers permuted",
        config={".target_layer_ids": [4, 10, 1, 7, 13]},
        causes=(("layers.order",),),
    ),
    Case(
        name="layers descending",
        config={".target_layer_ids": [13, 10, 7, 4, 1]},
        causes=(("layers.order",),),
    ),
    Case(name="fc permuted", weights=fc_columns((2, 1, 0, 3, 4)), causes=(("layers.order",),)),
    Case(name="mask token is eos", config={".mask_token_id": 0}, causes=(("mask_token.id",),)),
    Case(name="mask token is a word", config={".mask_token_id": 700}, causes=(("mask_token.id",),)),
    Case(name="causal", config={"is_causal": True}, causes=(("mask.block_causality",),)),
    Case(name="a window of 16", config=SLIDING, causes=(("mask.window",),)),
    Case(name="blocks too wide", config={"block_size": 9}, causes=(("block.width",),)),
    Case(
        name="embedding scaled up",
        config={"input_embedding_scale": 400.0},
        causes=(("embedding.scale",),),
    ),
    Case(name="norms less one", weights=norms_less_one, causes=(("norm.missing_or_doubled",),)),
    Case(
        name="never trained",
        weights=drawn_anew,
        causes=(("checkpoint.wrong_target",),),
    ),
    Case(
        name="fc is zero",
        weights=silenced("fc.weight"),
        causes=(("hidden.ignored_by_drafter", *UNUSED),),
    ),
    Case(
        name="an MLP is zero", weights=silenced("layers.1.mlp.down_proj.weight"), causes=(UNUSED,)
    ),
    Case(
        name="a tensor is missing", weights=without("layers.1.mlp.up_proj.weight"), causes=(UNUSED,)
    ),
    Case(name="a layer is not counted", weights=with_more_layers, causes=(UNUSED,)),
    Case(
        name="block sizes contradict",
        config={"block_size": 6, ".block_size": 8},
        causes=(("checkpoint.config_contradiction", "block.width"),),
    ),
    Case(
        name="a scrambled head of its own",
        weights=with_scrambled_head,
        config={"head": "own"},
        options={"overrides": ("head=own",)},
        causes=(("head.tying_or_vocab",),),
    ),
    Case(name="states a row late", states=each(one_row_late), causes=(ROWS,)),
    Case(name="states a row early", states=each(one_row_early), causes=(ROWS,)),
    Case(name="half of the states lost", states=each(first_half_lost), causes=(ROWS,)),
    Case(name="two layers under wrong names", states=two_layers_swapped, causes=(ROWS,)),
    Case(name="states of another prompt", states=of_the_next_prompt, causes=(ROWS,)),
    Case(name="one layer scaled", states=each(one_layer_scaled), causes=(ROWS,)),
    Case(
        name="coarse taps against good ones",
        states=each(noisy),
        options={"against": "default", "target": ""},
        causes=(("hidden.backend", "hidden.dtype"),),
    ),
)
"""Faults made by rewriting files."""

HEALTHY = (
    Case(name="healthy"),
    Case(name="embedding scaled, to no effect", config={"input_embedding_scale": 16.0}),
    Case(name="reference", drafter="reference"),
    Case(name="healthy in float32 files", weights=in_float32),
    Case(name="healthy in bfloat16", options={"dtype": "bfloat16"}),
    Case(name="states in bfloat16", states=each(rounded)),
    Case(name="healthy, other prompts", capture="others"),
    Case(name="reference, other prompts", drafter="reference", capture="others"),
    Case(name="healthy, random tokens", capture="random"),
    Case(name="healthy, longer", capture="longer"),
    Case(name="all positions moved by 1000", capture="moved"),
    Case(name="healthy, other resamples", options={"seed": 7}),
    Case(name="full attention", drafter="full/drafter", capture="full"),
    Case(
        name="theta unlike the target's",
        config={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
)
"""Nothing is wrong with these."""

PAIRS = (
    Case(
        name="theta and order",
        config={"rope_theta": 1e6, ".target_layer_ids": [4, 10, 1, 7, 13]},
        causes=(("rope.theta",), ("layers.order",)),
    ),
    Case(
        name="mask token and theta",
        config={".mask_token_id": 0, "rope_theta": 100.0},
        causes=(("mask_token.id",), ("rope.theta",)),
    ),
    Case(
        name="anchor included and theta",
        drafter="anchor_included",
        config={"rope_theta": 1e6},
        causes=(("mask.anchor_included",), ("rope.theta",)),
    ),
    Case(
        name="causal training and mask token",
        drafter="block_causal",
        config={".mask_token_id": 0},
        causes=(("mask.block_causality",), ("mask_token.id",)),
    ),
    Case(
        name="shifted labels and mask token",
        drafter="label_shift",
        config={".mask_token_id": 0},
        causes=(("label.shift",), ("mask_token.id",)),
    ),
    Case(
        name="window and order",
        config=SLIDING | {".target_layer_ids": [4, 10, 1, 7, 13]},
        causes=(("mask.window",), ("layers.order",)),
    ),
    Case(
        name="anchor included and layers",
        drafter="anchor_included",
        config={".target_layer_ids": [2, 5, 8, 11, 14]},
        causes=(("mask.anchor_included",), ("layers.offset",)),
    ),
    Case(
        name="causal and order",
        config={"is_causal": True, ".target_layer_ids": [13, 10, 7, 4, 1]},
        causes=(("mask.block_causality",), ("layers.order",)),
    ),
    Case(
        name="states a row late and theta",
        states=each(one_row_late),
        config={"rope_theta": 1e6},
        causes=(ROWS, ("rope.theta",)),
    ),
    Case(
        name="half of the states lost and order",
        states=each(first_half_lost),
        config={".target_layer_ids": [4, 10, 1, 7, 13]},
        causes=(ROWS, ("layers.order",)),
    ),
)
"""Two faults at once."""
