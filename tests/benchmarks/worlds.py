"""What the tables of scoring are measured on: a drafter, a head, and texts with their states.

`full` is a drafter of the 27B shape with random weights, `tiny` one of the same kind for trying the
table out on a CPU, `example` the embedded example, trained and captured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash_diag import load_drafter, make_capture, read_checkpoint, resolve_convention
from dflash_diag.bundle import Capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.example import EXAMPLE
from dflash_diag.scoring import tapped_states

SHAPE = DrafterShape(
    hidden_size=5120,
    n_taps=5,
    n_layers=5,
    n_heads=32,
    n_kv_heads=8,
    head_width=128,
    mlp_size=17408,
)
TINY = DrafterShape(
    hidden_size=64,
    n_taps=5,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_width=16,
    mlp_size=128,
)
TAPS = (1, 16, 31, 46, 61)
VOCABULARY, MASK_TOKEN, THETA = 248_320, 5, 1e7


def plain_reading(shape: DrafterShape, taps: tuple[int, ...], block: int = 16) -> Convention:
    """How a drafter of some shape is read that has nothing special about it."""
    return Convention(
        block_size=block,
        layer_ids=taps,
        in_block=("bidirectional",) * shape.n_layers,
        window=(None,) * shape.n_layers,
        rope_theta=THETA,
        rotary_width=shape.head_width,
        mask_token_id=MASK_TOKEN,
    )


def checkpoint_config(
    shape: DrafterShape, how: Convention, *, n_target_layers: int, vocabulary: int
) -> dict[str, Any]:
    """``config.json`` of such a drafter in z-lab's form."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": how.block_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_width,
        "num_target_layers": n_target_layers,
        "vocab_size": vocabulary,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": how.rope_theta,
        "max_position_embeddings": 65_536,
        "dflash_config": {
            "mask_token_id": how.mask_token_id,
            "target_layer_ids": list(how.layer_ids),
        },
    }


def write_config(folder: Path, config: dict[str, Any]) -> None:
    """As ``config.json`` of a checkpoint."""
    (folder / "config.json").write_text(json.dumps(config))


@dataclass(frozen=True, eq=False)
class Text:
    """One sequence and the anchors at which blocks are drafted."""

    tokens: Tensor
    """[T]."""
    states: Tensor
    """[T, K, H] of its tapped layers, or of fewer positions at the end."""
    anchors: Tensor
    """[A] ascending; the D labels of each are among the tokens."""
    last: int
    """The last anchor: how many rows of the states are read."""

    def labels(self, n: int) -> Tensor:
        """[A, n]."""
        return self.tokens[self.anchors[:, None] + 1 + torch.arange(n, device=self.tokens.device)]


@dataclass(frozen=True, eq=False)
class Problem:
    """Blocks to be drafted and rated."""

    drafter: Drafter
    embedding: Tensor
    head: Tensor
    texts: list[Text]

    @property
    def n_blocks(self) -> int:
        return sum(len(text.anchors) for text in self.texts)

    @property
    def context(self) -> int:
        """Rows of the longest context."""
        return max(text.last for text in self.texts)

    def flop(self) -> float:
        """Operations that have to be done: products, twice a multiplication.

        Those of fc, of context keys and values, of all slots of all layers, of attention that is
        visible, and of the head's rows that propose.
        """
        shape, how = self.drafter.shape, self.drafter.convention
        h, kv = shape.hidden_size, shape.n_kv_heads * shape.head_width
        wide = shape.n_heads * shape.head_width
        layer = 2 * h * wide + 2 * h * kv + 3 * h * shape.mlp_size
        products = 0.0
        for text in self.texts:
            n, size = len(text.anchors), how.block_size
            seen = float(text.anchors.sum()) + n * size
            products += (
                text.last * self.drafter.fc.in_features * h
                + shape.n_layers * text.last * 2 * h * kv
                + shape.n_layers * n * size * layer
                + shape.n_layers * 2 * wide * size * seen
                + n * how.n_proposed * h * len(self.head)
            )
        return 2.0 * products


@dataclass(frozen=True, eq=False)
class World:
    """Weights, and the longest text of which problems are cut."""

    whole: Problem
    """What the table compares on."""
    tokens: Tensor
    states: Tensor

    def problem(self, anchors: int, context: int, words: int) -> Problem:
        """So many anchors, evenly over the second half of a context (or over more of it)."""
        first = max(1, context - max(anchors, context // 2))
        at = torch.linspace(first, context - 1, anchors).long().to(self.tokens.device)
        size = self.whole.drafter.convention.block_size
        text = Text(self.tokens[: context + size] % words, self.states, at, context - 1)
        return replace(self.whole, head=self.whole.head[:words], texts=[text])

    @property
    def longest(self) -> int:
        """The longest context of which problems can be cut."""
        return len(self.tokens) - self.whole.drafter.convention.block_size


def full(
    shape: DrafterShape, place: torch.device, *, vocabulary: int, anchors: int, longest: int
) -> World:
    """Random weights on a device: the table compares on a context twice as long as its anchors."""
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    how = plain_reading(shape, TAPS)
    torch.manual_seed(0)
    with torch.device(place):
        torch.set_default_dtype(dtype)
        drafter = Drafter(shape, how).eval().requires_grad_(requires_grad=False)
        torch.set_default_dtype(torch.float32)
        head = torch.empty(vocabulary, shape.hidden_size, dtype=dtype)
        tokens = torch.randint(vocabulary, (longest + how.block_size,))
        states = torch.empty(longest, shape.n_taps, shape.hidden_size, dtype=dtype)
    for one in (*drafter.parameters(), head):
        if one.ndim > 1:
            one.normal_(0, 0.02)
    states.normal_()
    world = World(Problem(drafter, head, head, []), tokens, states)
    return replace(world, whole=world.problem(anchors, 2 * anchors, vocabulary))


def example(folder: Path) -> tuple[World, Capture]:
    """The embedded example's reference drafter, on what its target makes of its prompts.

    Parameters
    ----------
    folder
        Where the capture is put.
    """
    checkpoint = read_checkpoint(EXAMPLE.part(EXAMPLE.reference))
    how = resolve_convention(checkpoint)
    capture = make_capture(
        str(EXAMPLE.part(EXAMPLE.target)),
        EXAMPLE.read_prompts(),
        folder,
        max_new_tokens=EXAMPLE.max_new_tokens,
        layers="taps",
        taps=how.taps,
    )
    texts = []
    for i, prompt in enumerate(capture.prompts):
        first, end = prompt.n_prompt_tokens, prompt.n_generated - how.n_proposed
        anchors = torch.arange(first, first + max(0, end))
        if len(anchors):
            states = tapped_states(capture, i, how)
            texts.append(Text(capture.tokens(i), states, anchors, int(anchors[-1])))
    drafter = load_drafter(checkpoint, how, dtype=torch.float32)
    whole = Problem(drafter, capture.embedding, capture.head, texts)
    tokens, states = (torch.cat([getattr(t, name) for t in texts]) for name in ("tokens", "states"))
    return World(whole, tokens, states), capture
