"""Text that the targets write themselves: what drafters train on, and what is replayed later."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash_diag.zoo import recipe
from dflash_diag.zoo.recipe import SequenceRecipe

log = logging.getLogger(__name__)

GENERATION_BATCH = 2048


def build(work: Path, name: str, plan: SequenceRecipe, *, device: str) -> None:
    """Write ``work/sequences/name.npz``: token ids and prefix lengths; resumes batch by batch."""
    final = work / "sequences" / f"{name}.npz"
    if final.exists():
        return
    model = load_target(work / "targets" / name, device)
    parts: dict[str, np.ndarray] = {}
    for split, count in (("train", plan.train), ("validation", plan.validation)):
        stream = np.load(work / f"{split}.npy", mmap_mode="r")
        rng = np.random.default_rng([recipe.SEED, split == "train"])
        tokens, prefixes = [], []
        size = min(GENERATION_BATCH, max(2, count // 2))
        for index in range(-(-count // size)):
            cache = work / "sequences" / f"{name}.{split}.{index}.npy"
            length = int(rng.integers(plan.prefix[0], plan.prefix[1] + 1))
            starts = line_starts(stream, rng, size, length)
            if not cache.exists():
                prompt = np.stack([stream[s : s + length] for s in starts]).astype(np.int64)
                cache.parent.mkdir(parents=True, exist_ok=True)
                torch.manual_seed(recipe.SEED + 31 * index + (split == "train"))
                written = write(
                    model, torch.from_numpy(prompt).to(device), plan, sampled=index % 2 == 1
                )
                np.save(cache, written.cpu().numpy().astype(np.uint16))
                log.info("sequences %s %s %d", name, split, index)
            tokens.append(np.load(cache))
            prefixes.append(np.full(size, length, np.int16))
        order = np.random.default_rng(recipe.SEED).permutation(size * len(tokens))[:count]
        parts[split] = np.concatenate(tokens)[order]
        parts[f"{split}_prefix"] = np.concatenate(prefixes)[order]
    np.savez(final, allow_pickle=False, **parts)


def load_target(folder: Path, device: str) -> PreTrainedModel:
    """The trained target, as it will be served: bfloat16 on a GPU, float32 on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    nn.Module.to(model, torch.device(device))
    return model.eval()


def line_starts(
    stream: np.ndarray, rng: np.random.Generator, count: int, length: int
) -> np.ndarray:
    """Where prefixes begin: half at the start of a file, half anywhere."""
    ends = np.flatnonzero(np.asarray(stream) == recipe.SPECIAL_TOKENS.index(recipe.END_OF_TEXT))
    ends = ends[ends < len(stream) - length - 1]
    anywhere = rng.integers(0, len(stream) - length - 1, count)
    if not len(ends):
        return anywhere
    return np.where(np.arange(count) % 2 == 0, rng.choice(ends, count) + 1, anywhere)


@torch.no_grad()
def write(model: PreTrainedModel, prompt: Tensor, plan: SequenceRecipe, *, sampled: bool) -> Tensor:
    """Continue prompts [N, P] to [N, length]; text may run past an end-of-text token."""
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = (
        {"do_sample": True, "temperature": plan.temperature, "top_k": 0, "top_p": 1.0}
        if sampled
        else {"do_sample": False}
    )
    generate: Any = model.generate
    made: Tensor = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=plan.length - prompt.shape[1],
        pad_token_id=0,
        **options,
    )
    return made
