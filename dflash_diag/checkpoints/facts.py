"""What a checkpoint is checked against: the few numbers of the target that bind its drafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes of the target model."""

    hidden_size: int
    """H: width of the residual stream, and of every tapped state."""
    vocab_size: int
    """V: rows of the input embedding (which may exceed the tokenizer's length)."""
    n_layers: int
    """Decoder layers; tapped layers are numbered 0..n_layers-1."""
