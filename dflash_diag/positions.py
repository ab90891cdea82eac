"""Where the block sits: rotary phase errors of each slot, and shifts that must change nothing.

Rotary attention sees differences of positions only. Moving the block by d against the context turns
pair i of every query by d * w_i radians against every context key, w_i being the pair's frequency;
moving everything by the same number changes nothing, and moving the context by -d is the same
function as moving the block by d. The first is what a wrong offset costs, the other two are proved
on the drafter as it runs.

Symbols: A anchors, B block size, T context rows, d offset, h heads, w_i frequency of pair i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash_diag.drafter import Drafter
from dflash_diag.masks import rules_of

BLOCKS = 8
"""Blocks that are looked at: the same numbers come out of many more, to a degree or two."""
UNIFORM = 64
"""Positions by which everything is moved."""


@dataclass(frozen=True, eq=False)
class Block:
    """One real block: its anchor, the embeddings of its slots, and the features before it."""

    anchor: int
    noise: Tensor
    """[B, H]."""
    features: Tensor
    """[a, H] of the context rows that it sees."""


def run_block(drafter: Drafter, block: Block, *, context: int = 0, slots: int = 0) -> Tensor:
    """What the head reads [B, H], with the context's or the block's positions moved."""
    how = drafter.convention
    rows = torch.arange(len(block.features), device=block.noise.device)
    at = block.anchor + how.position_offset + slots
    positions = at + torch.arange(how.block_size, device=block.noise.device)
    anchor = torch.tensor([[block.anchor]], device=block.noise.device)
    masks = [rule.training(anchor, len(block.features)) for rule in rules_of(how)]
    hidden = drafter(
        block.noise[None], positions[None], block.features[None], (rows + context)[None], masks
    )
    return hidden[0]


@torch.inference_mode()
def pair_energies(drafter: Drafter, blocks: Sequence[Block]) -> Tensor:
    """How much each rotated pair counts in attention from a slot to the context: [B, width / 2].

    The product of the pair's mean lengths in queries and in context keys, over all layers and
    heads; each slot's add up to 1.
    """
    how, width = drafter.convention, drafter.convention.rotary_width
    total = torch.zeros(how.block_size, width // 2)
    for block in blocks:
        queries, keys = _heads(drafter, block)
        # Keys come in twos: of the context, then of the block itself.
        for q, k in zip(queries, keys[::2], strict=True):
            total += (_lengths(q, how.rope_interleaved, width).mean(1)
                      * _lengths(k, how.rope_interleaved, width).mean((0, 1))).cpu()  # fmt: skip
    return total / total.sum(-1, keepdim=True)


def _heads(drafter: Drafter, block: Block) -> tuple[list[Tensor], list[Tensor]]:
    """Normed queries and keys of every layer, before they are rotated."""
    queries: list[Tensor] = []
    keys: list[Tensor] = []

    def into(kept: list[Tensor]) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda _module, _args, out: kept.append(out[0].float())

    hooks = []
    for layer in drafter.stack:
        hooks.append(layer.self_attn.q_norm.register_forward_hook(into(queries)))
        hooks.append(layer.self_attn.k_norm.register_forward_hook(into(keys)))
    try:
        run_block(drafter, block)
    finally:
        for hook in hooks:
            hook.remove()
    return queries, keys


def _lengths(x: Tensor, interleaved: bool, width: int) -> Tensor:
    """Lengths [..., width / 2] of the rotated pairs of heads [..., d]."""
    turned = x[..., :width]
    pairs = turned.unflatten(-1, (-1, 2)) if interleaved else torch.stack(turned.chunk(2, -1), -1)
    return pairs.norm(dim=-1)


def phase_errors(drafter: Drafter, energies: Tensor, offsets: Sequence[int]) -> Tensor:
    """Root-mean-square phase error in degrees of each offset and slot: [len(offsets), B].

    Pairs count by `pair_energies`; a phase is taken the short way round, so that 180 is the worst
    of a single pair and 104 what random phases would give.
    """
    shifts = torch.tensor(list(offsets), dtype=torch.float64)
    turns = shifts[:, None] * drafter.rotary.inv_freq.double().cpu()
    wrapped = torch.remainder(turns + math.pi, 2 * math.pi) - math.pi
    mean_square = (wrapped**2) @ energies.double().T
    return torch.rad2deg(mean_square.sqrt())


@torch.inference_mode()
def shift_checks(drafter: Drafter, blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Shifts that must change nothing, and what they change: relative RMS over the blocks."""
    plain = torch.cat([run_block(drafter, block) for block in blocks])
    moved = torch.cat(
        [run_block(drafter, block, context=UNIFORM, slots=UNIFORM) for block in blocks]
    )
    block_by = torch.cat([run_block(drafter, block, slots=1) for block in blocks])
    context_by = torch.cat([run_block(drafter, block, context=-1) for block in blocks])

    def apart(a: Tensor, b: Tensor) -> float:
        return float((a - b).double().norm() / b.double().norm())

    return [
        {
            "check": f"everything moved by {UNIFORM}",
            "expected": "no change",
            "rel_rms": apart(moved, plain),
        },
        {
            "check": "context moved by -1 against block moved by +1",
            "expected": "the same",
            "rel_rms": apart(context_by, block_by),
        },
        {"check": "block moved by +1", "expected": "a change", "rel_rms": apart(block_by, plain)},
    ]
