"""Which tensors of a drafter do anything: each is silenced in turn, and the output compared.

A tensor that a file holds and a drafter loads may still do nothing: never trained away from zero,
or skipped by the reading under which the drafter runs. Shapes are fine then, and nothing warns.

Symbols: T tokens, A anchors, K tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dflash_diag.blocks import draft_blocks
from dflash_diag.bundle import Capture
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, RMSNorm
from dflash_diag.errors import CaptureError

ROWS = 96
"""Context rows at most: one pass for every tensor has to be cheap."""
ANCHORS = 4


@dataclass(frozen=True, eq=False)
class Sample:
    """A few blocks to draft, cut from a text; its positions start at 0."""

    what: str
    """In words, where it comes from."""
    embedding: Tensor
    """[V, H]."""
    tokens: Tensor
    """[T] int64."""
    states: Tensor
    """[T, K, H] of the tapped layers."""
    anchors: Tensor
    """[A] positions."""


def captured_sample(capture: Capture, convention: Convention) -> Sample:
    """The first anchors of the first prompt that has as many.

    Raises
    ------
    CaptureError
        The capture lacks a tapped layer, positions, or the embedding; or no prompt has an anchor.
    """
    if capture.thinned:
        raise CaptureError(f"{capture.path} holds the states of some positions only")
    for index, prompt in enumerate(capture.prompts):
        if prompt.n_generated < ANCHORS:
            continue
        first, end = prompt.n_prompt_tokens, prompt.n_prompt_tokens + ANCHORS
        # A shift of all positions changes nothing, so that the cut text may start at 0.
        start = max(0, end - ROWS)
        return Sample(
            f"{ANCHORS} blocks of prompt {prompt.id}",
            capture.embedding,
            capture.tokens(index)[start:end],
            _finite(capture.states(index, convention.taps)[start:end], prompt.id),
            torch.arange(first, end) - start,
        )
    raise CaptureError(f"no prompt of {capture.path} has {ANCHORS} generated tokens")


def _finite(states: Tensor, prompt: str) -> Tensor:
    if not states.isfinite().all():
        raise CaptureError(f"states of prompt {prompt!r} are not finite", "finite states")
    return states


def random_sample(drafter: Drafter, embedding: Tensor | None = None) -> Sample:
    """Normal states, and normal embeddings where none that fits is given; always the same ones."""
    generator = torch.Generator().manual_seed(0)
    width = drafter.fc.in_features // drafter.shape.n_taps
    rows, hidden = drafter.convention.mask_token_id + 1, drafter.shape.hidden_size
    if embedding is None or embedding.shape[1] != hidden or len(embedding) < rows:
        embedding = torch.randn(rows, hidden, generator=generator)
    n = ROWS // 3
    return Sample(
        f"{ANCHORS} blocks over random states",
        embedding,
        torch.randint(0, len(embedding), (n,), generator=generator),
        torch.randn(n, drafter.shape.n_taps, width, generator=generator),
        torch.arange(n - ANCHORS, n),
    )


@torch.inference_mode()
def effects(drafter: Drafter, sample: Sample) -> dict[str, float]:
    """How much each tensor changes what the head reads.

    Returns
    -------
    dict
        By name, the root mean square of the change when the tensor is silenced (made 0; a norm that
        scales by 1 + w made -1), relative to that of the output. Exactly 0 where nothing changes.
    """
    weight = drafter.fc.weight
    embedding = sample.embedding.to(weight.device, weight.dtype)
    tokens, anchors = sample.tokens.to(weight.device), sample.anchors.to(weight.device)
    states = sample.states.to(weight.device, weight.dtype)

    def output() -> Tensor:
        features = drafter.features(states)
        return draft_blocks(drafter, embedding, tokens, anchors, features).float()

    plain = output()
    size = plain.norm().clamp_min(torch.finfo(torch.float32).tiny)
    found = {}
    for name, parameter in drafter.named_parameters():
        silent = -1.0 if _scales_by_one_plus(drafter, name) else 0.0
        kept = parameter.data
        parameter.data = torch.full_like(kept, silent)
        try:
            found[name] = float((output() - plain).norm() / size)
        finally:
            parameter.data = kept
    return found


def _scales_by_one_plus(drafter: nn.Module, name: str) -> bool:
    module = drafter.get_submodule(name.rpartition(".")[0])
    return isinstance(module, RMSNorm) and module.one_plus
