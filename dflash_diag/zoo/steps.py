"""The zoo's trainer, fault by fault, as steps that can be audited.

Each function below is one drafter's training step under the arguments of
`dflash_diag.training_audit`; `_step` is all the adapter that this trainer needs. What is trained is
the finished drafter, so that the audit sees a loss as it was in the end.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dflash_diag import paths
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.drafter import Drafter
from dflash_diag.zoo import drafters, recipe
from dflash_diag.zoo.drafters import Batch, World, loss_and_logits, needed_layers
from dflash_diag.zoo.sequences import load_target

N_LAYERS = int(str(recipe.HYBRID.config["num_hidden_layers"]))
LAYERS = needed_layers(list(recipe.DRAFTERS.values()), N_LAYERS)
"""Layers that some drafter's trainer reads; the trainers pick their own."""


@cache
def _world(device: str) -> World:
    """The target, for its embedding, its final norm and its head."""
    target = load_target(paths.data_dir() / "zoo" / "hybrid" / "target", device)
    nothing = torch.zeros(0, dtype=torch.int64)
    return World(target.requires_grad_(requires_grad=False), nothing, nothing, nothing, LAYERS)


@cache
def _drafter(name: str, device: str) -> Drafter:
    checkpoint = read_checkpoint(paths.data_dir() / "zoo" / "hybrid" / "drafters" / name)
    how = resolve_convention(checkpoint)
    drafter = load_drafter(checkpoint, how, dtype=torch.float32, device=torch.device(device))
    return drafter.train().requires_grad_()


def _step(
    tokens: Tensor,
    states: Tensor,
    anchors: Tensor,
    loss_mask: Tensor,
    data_seed: int,  # noqa: ARG001 - it draws anchors, which are given
    noise_seed: int,
    *,
    name: str,
) -> tuple[Any, ...]:
    """The trainer's own view of one text, and its own loss."""
    plan, device = recipe.DRAFTERS[name], str(tokens.device)
    world, drafter = _world(device), _drafter(name, device)
    batch = Batch(tokens[None], anchors[None], states[None].to(world.target.dtype))
    seen = drafters.view(world, batch, plan, noise_seed)
    noise = drafters.noise_embeddings(world, batch, plan)
    at = anchors[:, None] + torch.arange(1, plan.block_size, device=anchors.device)
    # This trainer's texts are trained on from their first anchor on, so that it has no loss mask.
    weights = drafters.slot_weights(plan, tokens.device) * loss_mask[at + plan.label_offset]
    context = torch.arange(len(tokens), device=tokens.device)[None]
    loss, logits = loss_and_logits(
        drafter, noise, context, world.embedding, seen, weights, plan.soft_kl_weight
    )
    whole = (weights > 0).all(-1)  # it draws no anchor whose labels are not all trained on
    metrics = drafters.training_metrics(logits[0, whole].detach(), seen.labels[0, whole])
    reported = {k: metrics[k] for k in ("accuracy", "streak", "dds4", "dds8")}
    teacher = None if seen.teacher is None else seen.teacher[0]
    return loss, logits[0], seen.labels[0], weights, teacher, reported


def _of(name: str) -> Any:
    step = partial(_step, name=name)
    step.layers = LAYERS  # type: ignore[attr-defined]
    return step


healthy = _of("healthy")
reference = _of("reference")
anchor_included = _of("anchor_included")
cross_block_leak = _of("cross_block_leak")
block_causal = _of("block_causal")
position_plus_one = _of("position_plus_one")
label_shift = _of("label_shift")
layer_offset = _of("layer_offset")
last_layer_in_fc = _of("last_layer_in_fc")
noise_on_target_logits = _of("noise_on_target_logits")
soft_kl_loss = _of("soft_kl_loss")
ignored_context = _of("ignored_context")
