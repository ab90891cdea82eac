"""What DFlash2 and DSpark add to a DFlash drafter, under the names that their checkpoints use.

DFlash2 wraps the two halves of every layer in a short convolution over the slots of the block, and
chooses tokens with a selector that rates each candidate against the token before it. DSpark adds a
bias to each slot's logits that depends on the token before it. What these parts propose together is
`dflash_diag.proposals`' business.

Shapes use M blocks, B block size, H hidden size, K taps, G groups of channels, V vocabulary of the
target, V_d of the drafter, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ConvolutionShape:
    """Sizes of the convolutions around a layer's halves."""

    taps: int
    """K: a slot and the K-1 slots before it."""
    groups: int
    """G: each computes one set of taps for its H/G channels."""


@dataclass(frozen=True)
class MarkovShape:
    """Sizes of a Markov head."""

    n_before: int
    """Tokens that may come before: V."""
    n_biased: int
    """Tokens whose logits are biased: V_d."""
    rank: int
    kind: Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class SelectorShape:
    """Sizes of a candidate selector."""

    n_tokens: int
    rank: int
    n_candidates: int
    """Tokens with the highest logits of a slot, among which it chooses."""


class BlockConvolution(nn.Module):
    """A causal convolution over the slots of one block, before and after half a layer.

    Its taps are fixed ones plus ones computed from the input of the first convolution, and serve
    both. No tap reaches over the edge of a block: before slot 0 there are zeros.
    """

    def __init__(self, shape: ConvolutionShape, hidden_size: int, block_size: int) -> None:
        super().__init__()
        self.shape, self.block_size = shape, block_size
        base = torch.zeros(2, shape.taps, hidden_size)
        base[:, 0] = 1.0  # with no computed taps: the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(hidden_size, 2 * shape.taps * shape.groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The half's input, and the computed taps for its output.

        Parameters
        ----------
        x
            [..., S, H], S being any number of whole blocks.
        """
        sizes = (2, self.shape.taps, self.shape.groups)
        first, second = self.kernel_projection(x).unflatten(-1, sizes).unbind(-3)
        return self._convolved(x, first, self.base_kernel[0]), second

    def after(self, y: Tensor, taps: Tensor) -> Tensor:
        """The half's output [..., S, H], convolved with the ``taps`` that `before` computed."""
        return self._convolved(y, taps, self.base_kernel[1])

    def _convolved(self, x: Tensor, computed: Tensor, fixed: Tensor) -> Tensor:
        split = (self.shape.groups, -1)
        blocks = x.unflatten(-1, split).unflatten(-3, (-1, self.block_size))
        computed = computed.unflatten(-3, (-1, self.block_size))[..., None]
        fixed = fixed.to(x.dtype).unflatten(-1, split)
        out = torch.zeros_like(blocks)
        for tap in range(min(self.shape.taps, self.block_size)):
            kept = blocks[..., : self.block_size - tap, :, :]
            out = out + (fixed[tap] + computed[..., tap, :, :]) * F.pad(kept, (0, 0, 0, 0, tap, 0))
        return out.flatten(-4, -3).flatten(-2)


class MarkovHead(nn.Module):
    """A bias on a slot's logits from the token before it (DSpark): W2 f(W1[token], hidden state).

    ``vanilla`` takes W1's row as it is, ``gated`` scales it by a gate computed from the slot's
    hidden state, ``rnn`` carries a state along the block. The state is zero before the first slot
    that proposes, as where drafters are served (SGLang); in the same-slot layout ``speculators``
    trains it one slot earlier, from the anchor's.
    """

    def __init__(self, shape: MarkovShape, hidden_size: int) -> None:
        super().__init__()
        self.shape, rank = shape, shape.rank
        self.markov_w1 = nn.Parameter(torch.randn(shape.n_before, rank) * 0.01)
        self.markov_w2 = nn.Parameter(torch.randn(shape.n_biased, rank) * rank**-0.5)
        if shape.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif shape.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def start(self, n_blocks: int) -> Tensor:
        """The state [M, r] before the first slot."""
        return self.markov_w1.new_zeros(n_blocks, self.shape.rank)

    def step(self, state: Tensor, previous: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, and what W2 reads at this slot.

        Parameters
        ----------
        state
            [M, r], of which only ``rnn`` makes use.
        previous
            [M] the tokens before the slot, in the target's vocabulary.
        hidden
            [M, H] what the head reads at the slot.

        Returns
        -------
        tuple of Tensor
            State and latent, each [M, r]; the bias [M, V_d] is the latent times W2 transposed.
        """
        row = self.markov_w1[previous]
        if self.shape.kind == "vanilla":
            return state, row
        if self.shape.kind == "gated":
            return state, torch.sigmoid(self.gate_proj(torch.cat([hidden, row], dim=-1))) * row
        joint = self.joint_proj(torch.cat([state, row, hidden], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return gate * state + (1.0 - gate) * torch.tanh(candidate), torch.tanh(out)


class CandidateSelector(nn.Module):
    """Rates a slot's candidates against the token before them (DFlash2)."""

    def __init__(self, shape: SelectorShape, hidden_size: int) -> None:
        super().__init__()
        self.shape = shape
        sizes = shape.n_tokens, shape.rank
        self.predecessor_codebook = nn.Parameter(torch.randn(sizes) * 0.02)
        self.successor_codebook = nn.Parameter(torch.randn(sizes) * 0.02)
        self.hidden_projection = nn.Linear(hidden_size, shape.rank, bias=False)

    def transitions(self, previous: Tensor, projected: Tensor, candidates: Tensor) -> Tensor:
        """What is added to each candidate's logit: <A[previous] * projected, C[candidate]>.

        Parameters
        ----------
        previous
            [M] the tokens before the slot.
        projected
            [M, r] the slot's hidden state after ``hidden_projection``.
        candidates
            [M, k] ids.
        """
        wanted = self.predecessor_codebook[previous] * projected
        return (self.successor_codebook[candidates] @ wanted[..., None])[..., 0]
