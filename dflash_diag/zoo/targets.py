"""Train the example's target models from scratch on the corpus."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dflash_diag.zoo import recipe
from dflash_diag.zoo.recipe import TargetRecipe

log = logging.getLogger(__name__)


def build(
    work: Path,
    name: str,
    plan: TargetRecipe,
    *,
    device: str,
    seconds: float | None = None,
    compiled: bool = True,
) -> None:
    """Train target ``name`` and write it to ``work/targets/name`` in bfloat16; resumes.

    ``seconds`` fits the number of steps to a time: the speed of this machine is measured first.
    ``compiled`` runs `torch.compile` over the layers, on a GPU only.
    """
    final = work / "targets" / name
    if (final / "training.json").exists():
        return
    torch.manual_seed(recipe.SEED)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = new_model(plan)
    nn.Module.to(model, torch.device(device))
    if compiled and device == "cuda":
        for layer in model.model.layers:
            layer.compile()
    run = Training(
        model, plan, np.load(work / "train.npy"), device, checkpoint=work / f"{name}.partial.pt"
    )
    run.fit(seconds)
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(final)
    saved = AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16)
    nn.Module.to(saved, torch.device(device))
    loss = validation_loss(saved, np.load(work / "validation.npy"), plan.context, device)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": run.total_steps,
        "tokens_seen": run.total_steps * plan.batch * plan.context,
        "seconds": round(run.elapsed, 1),
        "validation_loss": round(loss, 4),
    }
    (final / "training.json").write_text(json.dumps(facts, indent=1))
    run.checkpoint.unlink(missing_ok=True)
    log.info("target %s: %s", name, facts)


def new_model(plan: TargetRecipe) -> PreTrainedModel:
    """A freshly initialised target; the end-of-text token is its EOS."""
    end = recipe.SPECIAL_TOKENS.index(recipe.END_OF_TEXT)
    config = AutoConfig.for_model(
        plan.model_type, **plan.config, bos_token_id=None, eos_token_id=end, pad_token_id=None
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def schedule(step: int, total: int, warmup: int) -> float:
    """Linear warm-up, then cosine to 2 % of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class Training:
    """AdamW on random windows of a token stream; checkpoints every 60 s and resumes."""

    def __init__(
        self,
        model: nn.Module,
        plan: TargetRecipe,
        stream: np.ndarray,
        device: str,
        checkpoint: Path,
    ) -> None:
        self.model, self.plan, self.device, self.checkpoint = model, plan, device, checkpoint
        self.stream = torch.from_numpy(stream.astype(np.int32)).to(device)
        decay = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": plan.weight_decay},
                {"params": rest, "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
            betas=(0.9, 0.95),
            fused=device == "cuda",
        )
        self.step, self.elapsed, self.total_steps = 0, 0.0, plan.steps
        if checkpoint.exists():
            state: dict[str, Any] = torch.load(checkpoint, map_location=device, weights_only=True)
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.elapsed = state["step"], state["elapsed"]
            self.total_steps = state["total_steps"]
            log.info("resumed at step %d of %d", self.step, self.total_steps)

    def batch(self, step: int) -> Tensor:
        """Random windows [batch, context + 1]; a function of the step, so a resume repeats none."""
        generator = torch.Generator().manual_seed(recipe.SEED * 7919 + step)
        width = self.plan.context + 1
        starts = torch.randint(
            0, self.stream.shape[0] - width, (self.plan.batch,), generator=generator
        ).to(self.device)
        return self.stream[starts[:, None] + torch.arange(width, device=self.device)].long()

    def loss(self, tokens: Tensor) -> Tensor:
        """Next-token cross-entropy."""
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    def train_step(self) -> Tensor:
        """One optimizer step; returns the loss, still on the device."""
        rate = self.plan.learning_rate * schedule(self.step, self.total_steps, self.plan.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(self.batch(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def fit(self, seconds: float | None) -> None:
        """Train to the last step."""
        begin, saved = time.monotonic() - self.elapsed, time.monotonic()
        if seconds is not None and self.step == 0:
            self.total_steps = self._steps_in(seconds, begin)
        while self.step < self.total_steps:
            loss = self.train_step()
            if self.step % 50 == 0 or self.step == self.total_steps:
                self.elapsed = time.monotonic() - begin
                log.info(
                    "step %d/%d %.0f s loss %.3f", self.step, self.total_steps, self.elapsed, loss
                )
            if time.monotonic() - saved > 60:
                self.save()
                saved = time.monotonic()

    def _steps_in(self, seconds: float, begin: float) -> int:
        """Steps that fit into ``seconds``, from the speed of the first ones (those count)."""
        self.total_steps = 10**6
        measure: Callable[[int], float] = self._seconds_for
        measure(8)
        pace = measure(12) / 12
        left = seconds - (time.monotonic() - begin)
        steps = self.step + max(1, int(left / pace))
        log.info("%.3f s a step: %d steps", pace, steps)
        return steps

    def _seconds_for(self, steps: int) -> float:
        start = time.monotonic()
        for _ in range(steps):
            loss = self.train_step()
        float(loss)  # waits for the device
        return time.monotonic() - start

    def save(self) -> None:
        """Checkpoint, written beside and renamed."""
        partial = self.checkpoint.with_suffix(".writing")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "elapsed": self.elapsed,
                "total_steps": self.total_steps,
            },
            partial,
        )
        partial.replace(self.checkpoint)


@torch.no_grad()
def validation_loss(model: nn.Module, stream: np.ndarray, context: int, device: str) -> float:
    """Mean next-token loss in nats over consecutive windows of held-out files."""
    rows = min(256, (len(stream) - 1) // context)
    tokens = torch.from_numpy(stream[: rows * context + 1].astype(np.int64)).to(device)
    total = 0.0
    for start in range(0, rows, 32):
        size = min(32, rows - start)
        part = tokens[start * context : (start + size) * context + 1]
        inputs, labels = part[:-1].view(size, context), part[1:].view(size, context)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=inputs, use_cache=False).logits
        total += F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()).item() * size
    return total / rows
