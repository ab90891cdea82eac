"""The DFlash drafter: a small block-diffusion transformer that reads a target's hidden states.

One forward drafts a whole block. The tapped states of committed tokens are concatenated, projected
by ``fc`` and normed; every layer turns these *features* into extra keys and values (they are never
added to the residual stream). The block itself is the anchor's embedding followed by mask tokens.
Architecture: arXiv 2602.06036; tensor names are those of z-lab's checkpoints. The parts that some
drafters have beside it are in `dflash_diag.additions`.

Shapes use N sequences, T context rows, A anchors, B block size, S = A*B slots, H hidden size,
K tapped layers, h heads, g key/value heads, d head width.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_diag.additions import (
    BlockConvolution,
    CandidateSelector,
    ConvolutionShape,
    MarkovHead,
    MarkovShape,
    SelectorShape,
)
from dflash_diag.attention import Attend, eager_attention, sdpa_attention
from dflash_diag.conventions import Convention


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """Sizes that the tensors of a checkpoint fix."""

    hidden_size: int
    n_taps: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_width: int
    mlp_size: int
    target_hidden_size: int | None = None
    """Width of one tapped layer, where it differs from ``hidden_size``."""
    attention_bias: bool = False
    norm_eps: float = 1e-6
    convolution: ConvolutionShape | None = None
    """Of the convolutions around the halves of every layer, if it has them (DFlash2)."""
    markov: MarkovShape | None = None
    """Of its Markov head (DSpark)."""
    selector: SelectorShape | None = None
    """Of its candidate selector (DFlash2)."""
    embedding_rows: int = 0
    """Tokens of its own embedding; 0 if it borrows the target's."""
    head_rows: int = 0
    """Tokens of its own head, V_d; 0 if it borrows the target's."""
    has_map: bool = False
    """Whether its vocabulary has a map to the target's (``d2t``)."""


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32; scales by w, or by 1 + w if ``one_plus``."""

    def __init__(self, size: int, eps: float, *, one_plus: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if one_plus else torch.ones(size))
        self.eps, self.one_plus = eps, one_plus

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.one_plus:
            return (y * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * y.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding over the first ``width`` dimensions of a head.

    Frequencies stay in float32 whatever the weights' type: rounded ones dephase with position.
    """

    inv_freq: Tensor

    def __init__(self, *, theta: float, width: int, interleaved: bool, scaling: str | None) -> None:
        super().__init__()
        inv_freq, self.attention_factor = rope_frequencies(theta, width, scaling)
        self.width, self.interleaved = width, interleaved
        # A plain attribute, not a buffer: ``module.to(bfloat16)`` must not round it.
        self.inv_freq = inv_freq

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines: two tensors [..., width], in float32, for integer positions [...]."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angle = positions.float()[..., None] * self.inv_freq
        pair = (
            torch.repeat_interleave(angle, 2, dim=-1)
            if self.interleaved
            else torch.cat([angle, angle], dim=-1)
        )
        return pair.cos() * self.attention_factor, pair.sin() * self.attention_factor

    def rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads ``x`` [..., d] by a table that broadcasts against [..., width]."""
        cos, sin = (t.to(x.dtype) for t in table)
        turned, rest = x[..., : self.width], x[..., self.width :]
        if self.interleaved:
            partner = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
        else:
            low, high = turned.chunk(2, dim=-1)
            partner = torch.cat([-high, low], dim=-1)
        turned = turned * cos + partner * sin
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rope_frequencies(theta: float, width: int, scaling: str | None) -> tuple[Tensor, float]:
    """Inverse frequencies [width/2] in float32, and the factor on cosines and sines.

    ``scaling`` is canonical JSON of a ``rope_scaling`` entry, with ``max_position_embeddings``
    beside it where that matters; its formula is transformers' own. Always real numbers on the CPU,
    also where the drafter is being built on the meta device.
    """
    inv_freq = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width)
    parameters = json.loads(scaling) if scaling else {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return inv_freq.float(), 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    longest = int(parameters.pop("max_position_embeddings", 32768))
    config = Qwen3Config(
        head_dim=width,
        hidden_size=width,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=longest,
        rope_parameters={**parameters, "rope_type": kind, "rope_theta": theta},
    )
    with torch.device("cpu"):
        scaled, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
    return scaled.float(), float(factor)


class Attention(nn.Module):
    """Grouped-query attention of block slots over context features and slots."""

    def __init__(self, shape: DrafterShape, rotary: Rotary, *, one_plus: bool) -> None:
        super().__init__()
        h, d, bias = shape.hidden_size, shape.head_width, shape.attention_bias
        self.q_proj = nn.Linear(h, shape.n_heads * d, bias=bias)
        self.k_proj = nn.Linear(h, shape.n_kv_heads * d, bias=bias)
        self.v_proj = nn.Linear(h, shape.n_kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(shape.n_heads * d, h, bias=bias)
        self.q_norm = RMSNorm(d, shape.norm_eps, one_plus=one_plus)
        self.k_norm = RMSNorm(d, shape.norm_eps, one_plus=one_plus)
        self.shape, self.rotary = shape, rotary

    def queries(
        self, x: Tensor, table: tuple[Tensor, Tensor], rows: Tensor | EllipsisType = ...
    ) -> Tensor:
        """Rotated queries [..., h, d] of normed hidden states [..., H], or of their ``rows``."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.shape.head_width)))
        return self.rotary.rotate(q[rows], _over_heads(table))

    def keys_values(
        self, x: Tensor, table: tuple[Tensor, Tensor], rows: Tensor | EllipsisType = ...
    ) -> tuple[Tensor, Tensor]:
        """Rotated keys and plain values, each [..., g, d], of features or hidden states."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.shape.head_width)))
        v = self.v_proj(x).unflatten(-1, (-1, self.shape.head_width))
        return self.rotary.rotate(k[rows], _over_heads(table)), v[rows]


def _over_heads(table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return table[0].unsqueeze(-2), table[1].unsqueeze(-2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.mlp_size, bias=False)
        self.down_proj = nn.Linear(shape.mlp_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One pre-norm transformer layer; the context enters as keys and values only."""

    def __init__(
        self, shape: DrafterShape, rotary: Rotary, *, one_plus: bool, block_size: int
    ) -> None:
        super().__init__()
        self.self_attn = Attention(shape, rotary, one_plus=one_plus)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps, one_plus=one_plus)
        self.post_attention_layernorm = RMSNorm(
            shape.hidden_size, shape.norm_eps, one_plus=one_plus
        )
        conv, sizes = shape.convolution, (shape.hidden_size, block_size)
        self.attention_conv = BlockConvolution(conv, *sizes) if conv else None
        self.mlp_conv = BlockConvolution(conv, *sizes) if conv else None

    def finish(self, hidden: Tensor, attended: Tensor, taps: Tensor | None) -> Tensor:
        """Add attention output [..., h, d] and the MLP to ``hidden`` [..., S, H].

        ``taps`` are those that the convolution before the attention computed for after it.
        """
        attended = self.self_attn.o_proj(attended.flatten(-2))
        if self.attention_conv is not None and taps is not None:
            attended = self.attention_conv.after(attended, taps)
        hidden = hidden + attended
        x = self.post_attention_layernorm(hidden)
        if self.mlp_conv is None:
            return hidden + self.mlp(x)
        x, taps = self.mlp_conv.before(x)
        return hidden + self.mlp_conv.after(self.mlp(x), taps)


class Drafter(nn.Module):
    """A DFlash drafter under one reading of its weights.

    What it does not borrow from the target it has as ``embed_tokens`` and ``lm_head`` (with ``d2t``
    where its vocabulary is reduced), and what chooses its tokens as ``markov_head`` or
    ``candidate_selector``; each is None where it has no such part.
    """

    d2t: Tensor | None
    """[V_d] int64, read as ``convention.vocabulary_map`` says."""

    def __init__(self, shape: DrafterShape, convention: Convention) -> None:
        super().__init__()
        one_plus = convention.norm_style == "one_plus"
        self.shape, self.convention = shape, convention
        self.rotary = Rotary(
            theta=convention.rope_theta,
            width=convention.rotary_width,
            interleaved=convention.rope_interleaved,
            scaling=convention.rope_scaling,
        )
        width = shape.target_hidden_size or shape.hidden_size
        self.fc = nn.Linear(shape.n_taps * width, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps, one_plus=one_plus)
        self.layers = nn.ModuleList(
            DrafterLayer(shape, self.rotary, one_plus=one_plus, block_size=convention.block_size)
            for _ in range(shape.n_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps, one_plus=one_plus)
        size, rows = shape.hidden_size, shape.head_rows
        self.embed_tokens = nn.Embedding(n, size) if (n := shape.embedding_rows) else None
        self.lm_head = nn.Linear(size, rows, bias=False) if rows else None
        d2t = torch.zeros(rows, dtype=torch.long) if shape.has_map else None
        self.register_buffer("d2t", d2t)
        self.markov_head = MarkovHead(shape.markov, size) if shape.markov else None
        self.candidate_selector = (
            CandidateSelector(shape.selector, size) if shape.selector else None
        )

    def under(self, convention: Convention) -> Drafter:
        """The same weights, shared, under another reading."""
        with torch.device("meta"):
            other = Drafter(self.shape, convention)
        other.load_state_dict(self.state_dict(), assign=True)
        return other.requires_grad_(False).eval()

    @property
    def stack(self) -> list[DrafterLayer]:
        """The layers, first to last."""
        return cast("list[DrafterLayer]", list(self.layers))

    def features(self, states: Tensor) -> Tensor:
        """Context features [..., T, H] of tapped states [..., T, K, H] (or [..., T, K*H])."""
        width = self.fc.in_features // self.shape.n_taps
        apart = tuple(states.shape[-2:]) == (self.shape.n_taps, width)
        projected = self.fc(states.flatten(-2) if apart else states)
        return _times(self.convention.feature_norm, self.hidden_norm, projected)

    def head_input(self, hidden: Tensor) -> Tensor:
        """What the target's head reads."""
        return _times(self.convention.final_norm, self.norm, hidden)

    def forward(
        self,
        noise: Tensor,
        noise_positions: Tensor,
        features: Tensor,
        context_positions: Tensor,
        masks: Tensor | list[Tensor],
        *,
        implementation: str = "sdpa",
    ) -> Tensor:
        """All slots against all keys under dense masks: the plain form, used for training.

        Parameters
        ----------
        noise
            [N, S, H] embeddings of the slots' tokens (anchor or mask token), whole blocks one after
            another.
        noise_positions, context_positions
            [N, S] and [N, T] integer positions.
        features
            [N, T, H] from `features`.
        masks
            [N, S, T + S] bool, one for all layers or a list with one a layer; true is visible.
        implementation
            ``sdpa`` or ``eager``.

        Returns
        -------
        Tensor
            [N, S, H] what the head reads.
        """
        attend = sdpa_attention if implementation == "sdpa" else eager_attention
        context_table = self.rotary.table(context_positions)
        noise_table = self.rotary.table(noise_positions)
        hidden = noise
        for index, layer in enumerate(self.stack):
            x, taps = layer.input_layernorm(hidden), None
            if layer.attention_conv is not None:
                x, taps = layer.attention_conv.before(x)
            q = layer.self_attn.queries(x, noise_table)
            k_context, v_context = layer.self_attn.keys_values(features, context_table)
            k_noise, v_noise = layer.self_attn.keys_values(x, noise_table)
            k = torch.cat([k_context, k_noise], dim=1)
            v = torch.cat([v_context, v_noise], dim=1)
            mask = masks[index] if isinstance(masks, list) else masks
            hidden = layer.finish(hidden, attend(q, k, v, mask), taps)
        return self.head_input(hidden)

    def context(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [T, g, d] of every layer for features [T, H] at ``positions`` [T]."""
        table = self.rotary.table(positions)
        return [layer.self_attn.keys_values(features, table) for layer in self.stack]

    def blocks(
        self,
        noise: Tensor,
        slots: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        attend: Sequence[Attend],
        read: slice = slice(None),
    ) -> Tensor:
        """Many blocks over one shared context: the form used for scoring.

        The same function as `forward`, without masks over other blocks' slots and without
        computing the context anew for each block.

        Parameters
        ----------
        noise
            [U, H] embeddings of the distinct tokens in the blocks: all mask tokens are one row, so
            that the first layer projects it once.
        slots
            [A, B] the row of ``noise`` that each slot holds.
        positions
            [A, B] integer positions.
        context
            From `context`, one pair a layer.
        attend
            One a layer: what the slots see, and how that is computed.
        read
            Slots that the head reads: the last layer's attention need not ask for others.

        Returns
        -------
        Tensor
            [A, B, H] what the head reads, B being the slots of ``read``.
        """
        table = self.rotary.table(positions)
        hidden = noise[slots]
        asked = self.asked(read)
        for index, (layer, pair, attention) in enumerate(
            zip(self.stack, context, attend, strict=True)
        ):
            x, taps = layer.input_layernorm(noise if index == 0 else hidden), None
            rows = slots if index == 0 else ...
            if layer.attention_conv is not None:
                (x, taps), rows = layer.attention_conv.before(x[rows]), ...
            own = layer.self_attn.keys_values(x, table, rows)
            if (asking := asked[index]) != slice(None):
                hidden, table = hidden[:, asking], (table[0][:, asking], table[1][:, asking])
                # In one piece: otherwise a product over it runs block by block.
                x, rows = (x[:, asking].contiguous(), ...) if rows is ... else (x, slots[:, asking])
            q = layer.self_attn.queries(x, table, rows)
            hidden = layer.finish(hidden, attention(q, pair, own), taps)
        return self.head_input(hidden if asked[-1] == read else hidden[:, read])

    def asked(self, read: slice) -> list[slice]:
        """Slots of each layer whose attention is needed where the head reads those of ``read``.

        That is all of them but in the last layer, and there too if a convolution mixes slots.
        """
        mixes = self.stack[-1].attention_conv is not None
        return [slice(None)] * (len(self.stack) - 1) + [slice(None) if mixes else read]


def _times(how_often: str, norm: nn.Module, x: Tensor) -> Tensor:
    """``x`` normed once, twice, or not at all."""
    for _ in range({"skipped": 0, "once": 1, "twice": 2}[how_often]):
        x = norm(x)
    return x
