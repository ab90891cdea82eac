"""Train all drafters of a target in one process, on the same batches and the same states.

The drafters differ in how their trainer reads the world: each has one fault of `DrafterRecipe`, or
none.

Shapes: N sequences, T tokens, A anchors, B block size, D = B-1 labels, S = A*B slots, K taps,
H hidden size, L stored layers, V vocabulary.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.masks import MaskRule
from dflash_diag.zoo import muon, recipe
from dflash_diag.zoo.recipe import DrafterRecipe, SequenceRecipe
from dflash_diag.zoo.sequences import load_target

log = logging.getLogger(__name__)

LOG_EVERY = 50
SAVE_EVERY_SECONDS = 90
ROPE_THETA = 10_000.0


def new_drafter(plan: DrafterRecipe, hidden_size: int) -> Drafter:
    """A freshly initialised drafter; every drafter of one shape starts from the same weights."""
    shape = DrafterShape(
        hidden_size=hidden_size,
        n_taps=len(plan.layer_ids),
        n_layers=plan.n_layers,
        n_heads=plan.n_heads,
        n_kv_heads=plan.n_kv_heads,
        head_width=plan.head_width,
        mlp_size=plan.mlp_size,
    )
    convention = Convention(
        block_size=plan.block_size,
        layer_ids=plan.layer_ids,
        in_block=("bidirectional",) * plan.n_layers,
        window=(None,) * plan.n_layers,
        rope_theta=ROPE_THETA,
        rotary_width=plan.head_width,
        mask_token_id=plan.mask_token_id,
    )
    torch.manual_seed(recipe.SEED)
    drafter = Drafter(shape, convention)
    for parameter in drafter.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    return drafter


@dataclass
class World:
    """What all drafters of a target share: its texts, its states, its embedding and head."""

    target: PreTrainedModel
    tokens: Tensor
    """[n, T] int64."""
    prefix: Tensor
    """[n] tokens that the target was given; anchors lie after them."""
    end: Tensor
    """[n] where each text ends; what follows is padding."""
    layers: tuple[int, ...]
    """Layers whose raw outputs the trainers read, ascending."""
    bank: Tensor | None = None
    """[n, T, L, H] states of all sequences, where there is room for them."""

    @property
    def n_layers(self) -> int:
        """Decoder layers of the target."""
        return len(self.target.model.layers)

    @property
    def embedding(self) -> Tensor:
        """[V, H], also the head: the example's targets tie them."""
        weight = cast("Tensor", self.target.get_input_embeddings().weight)
        return weight.detach()

    def target_logits(self, last: Tensor) -> Tensor:
        """Logits [..., V] of raw last-layer states [..., H]."""
        normed: Tensor = self.target.model.norm(last)
        return normed @ self.embedding.T

    @torch.no_grad()
    def states(self, rows: Tensor) -> Tensor:
        """[N, T, L, H] raw outputs of `layers` for sequences ``rows``, from one forward."""
        if self.bank is not None:
            return self.bank[rows]
        kept: dict[int, Tensor] = {}
        decoder = self.target.model
        handles = [
            decoder.layers[i].register_forward_hook(
                lambda _m, _a, output, i=i: kept.__setitem__(i, output)
            )
            for i in self.layers
        ]
        try:
            decoder(input_ids=self.tokens[rows], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([kept[i] for i in self.layers], dim=2)


def observe(
    target: PreTrainedModel,
    tokens: np.ndarray,
    prefix: np.ndarray,
    layers: tuple[int, ...],
    end: np.ndarray | None = None,
) -> World:
    """The world of one target; its states are kept where they fit, else computed batch by batch."""
    device = target.device
    end = np.full(len(tokens), tokens.shape[1]) if end is None else end
    world = World(
        target=target,
        tokens=torch.from_numpy(tokens.astype(np.int64)).to(device),
        prefix=torch.from_numpy(prefix.astype(np.int64)).to(device),
        end=torch.from_numpy(end.astype(np.int64)).to(device),
        layers=layers,
    )
    shape = (*tokens.shape, len(layers), target.config.hidden_size)
    if math.prod(shape) * target.dtype.itemsize > room(device):
        return world
    bank = torch.empty(shape, dtype=target.dtype, device=device)
    for part in torch.arange(len(tokens), device=device).split(256):
        bank[part] = world.states(part)
    world.bank = bank
    return world


def room(device: torch.device) -> int:
    """Bytes that states may take: half of a GPU's free memory, or 1 GiB on a CPU."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**30


def needed_layers(
    plans: Iterator[DrafterRecipe] | list[DrafterRecipe], n_layers: int
) -> tuple[int, ...]:
    """Layers whose outputs any of the trainers reads; the last one gives target logits."""
    taps = {i + plan.layer_shift for plan in plans for i in plan.layer_ids}
    return tuple(sorted(taps | {n_layers - 1}))


@dataclass
class Batch:
    """Anchors drawn in some sequences, and what every trainer sees of them."""

    tokens: Tensor
    """[N, T]."""
    anchors: Tensor
    """[N, A] ascending positions."""
    states: Tensor
    """[N, T, L, H]."""


def draw(world: World, plan: DrafterRecipe, seed: int) -> Batch:
    """Random sequences and anchors: uniform after the prefix, all labels inside the sequence.

    The draw is a function of the seed alone, on any device.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, len(world.tokens), (plan.batch,), generator=generator)
    return batch_of(world, rows, plan, generator)


def batch_of(world: World, rows: Tensor, plan: DrafterRecipe, generator: torch.Generator) -> Batch:
    """Anchors and states of sequences ``rows`` [N]."""
    anchors = anchors_of(world, rows, plan, generator)
    rows = rows.to(world.tokens.device)
    return Batch(world.tokens[rows], anchors, world.states(rows))


def anchors_of(
    world: World, rows: Tensor, plan: DrafterRecipe, generator: torch.Generator
) -> Tensor:
    """[N, A] anchors for sequences ``rows``."""
    seeds = torch.randint(0, 2**31 - 1, (len(rows),), generator=generator).tolist()
    prefixes, ends = world.prefix.cpu()[rows].tolist(), world.end.cpu()[rows].tolist()
    drawn = [
        sequence_anchors(seed, prefix, end, plan)
        for seed, prefix, end in zip(seeds, prefixes, ends, strict=True)
    ]
    return torch.stack(drawn).to(world.tokens.device)


def sequence_anchors(seed: int, prefix: int, length: int, plan: DrafterRecipe) -> Tensor:
    """[A] anchors of one sequence, ascending: uniform after the prefix, without repetition.

    The last ones still have all their labels, even for a trainer that shifts them by one.
    """
    generator = torch.Generator().manual_seed(seed)
    count = length - plan.block_size - prefix
    chosen = torch.randperm(count, generator=generator)[: plan.n_anchors]
    return prefix + chosen.sort().values


def sequence_seed(split: str, row: int) -> int:
    """Seed of the anchors that are measured in a kept sequence."""
    return recipe.SEED + 2 * row + (split == "train")


@dataclass
class View:
    """One trainer's view of a batch."""

    states: Tensor
    """[N, T, K, H] what it feeds to ``fc``."""
    positions: Tensor
    """[N, S] positions of the slots."""
    mask: Tensor
    """[N, S, T + S] visibility."""
    labels: Tensor
    """[N, A, D] ids."""
    teacher: Tensor | None
    """[N, A, D, V] target logits where the loss needs them."""


def view(world: World, batch: Batch, plan: DrafterRecipe, seed: int) -> View:
    """What the trainer of ``plan`` makes of a batch, its fault included."""
    tokens, states = batch.tokens, batch.states
    device = tokens.device
    columns = [world.layers.index(i + plan.layer_shift) for i in plan.layer_ids]
    slots = torch.arange(plan.block_size, device=device)
    label_positions = batch.anchors[..., None] + slots[1:] + plan.label_offset
    labels = torch.gather(tokens, 1, label_positions.flatten(1)).view_as(label_positions)
    teacher = None
    if plan.hidden_noise or plan.soft_kl_weight:
        last = world.layers.index(world.n_layers - 1)
        if plan.hidden_noise:
            # The fault: noise meant for the drafter's input also reaches the row that makes labels.
            generator = torch.Generator(device).manual_seed(seed)
            spread = states.float().pow(2).mean(-1, keepdim=True).sqrt().to(states.dtype)
            noise = torch.randn(
                states.shape, generator=generator, device=device, dtype=states.dtype
            )
            states = states + plan.hidden_noise * spread * noise
        sequence = torch.arange(len(tokens), device=device)[:, None, None]
        rows = states[:, :, last][sequence, label_positions - 1]
        teacher = world.target_logits(rows)
        if plan.hidden_noise:
            labels, teacher = teacher.argmax(-1), None
    fed = states[:, :, columns]
    rule = MaskRule(
        block_size=plan.block_size,
        context_bound=plan.context_bound,
        in_block=plan.in_block,
        other_blocks="later" if plan.later_blocks_leak else "hidden",
    )
    return View(
        states=torch.zeros_like(fed) if plan.zero_context else fed,
        positions=(batch.anchors[..., None] + slots + plan.position_offset).flatten(1),
        mask=rule.training(batch.anchors, tokens.shape[1]),
        labels=labels,
        teacher=teacher,
    )


def noise_embeddings(world: World, batch: Batch, plan: DrafterRecipe) -> Tensor:
    """[N, S, H]: each block is its anchor's token and then mask tokens."""
    tokens = batch.tokens
    ids = tokens.new_full((*batch.anchors.shape, plan.block_size), plan.mask_token_id)
    ids[..., 0] = torch.gather(tokens, 1, batch.anchors)
    return F.embedding(ids.flatten(1), world.embedding)


def slot_weights(plan: DrafterRecipe, device: torch.device) -> Tensor:
    """exp(-(k-1)/gamma) for slots k = 1..D (arXiv 2602.06036, A.1)."""
    k = torch.arange(1, plan.block_size, device=device)
    return torch.exp(-(k - 1) / plan.loss_decay_gamma)


def loss_and_logits(
    drafter: Drafter,
    noise: Tensor,
    context: Tensor,
    head: Tensor,
    seen: View,
    weights: Tensor,
    soft_kl_weight: float,
) -> tuple[Tensor, Tensor]:
    """One trainer's loss, and its logits [N, A, D, V].

    Cross-entropy weighted by slot, mixed with KL to the target where the trainer does so.
    """
    n, n_anchors, d = seen.labels.shape
    # Without cuDNN's attention: a run on a GPU in which it could be chosen ended in NaN, those
    # without it did not.
    device = noise.device.type
    with (
        torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"),
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    ):
        features = drafter.features(seen.states)
        hidden = drafter(noise, seen.positions, features, context, seen.mask)
        logits = hidden.unflatten(1, (n_anchors, d + 1))[:, :, 1:] @ head.T
    flat = logits.float().flatten(0, -2)
    each = F.cross_entropy(flat, seen.labels.flatten(), reduction="none").view(n, n_anchors, d)
    if seen.teacher is not None:
        teacher = seen.teacher.float().log_softmax(-1)
        divergence = (teacher.exp() * (teacher - logits.float().log_softmax(-1))).sum(-1)
        each = soft_kl_weight * divergence + (1 - soft_kl_weight) * each
    return (each * weights).sum() / (weights.sum() * n * n_anchors), logits


@torch.no_grad()
def training_metrics(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """What this trainer's dashboard shows, over all anchors of the batch.

    ``streak`` is the mean number of leading slots whose argmax is the label; ``dds4`` and ``dds8``
    count leading slots whose label is among the top 4 or 8. None counts a bonus token.
    """
    top = logits.topk(8, dim=-1).indices == labels[..., None]
    right = top[..., 0]
    lead = {k: top[..., :k].any(-1).cumprod(-1).sum(-1).float().mean().item() for k in (1, 4, 8)}
    return {
        "accuracy": round(right.float().mean().item(), 4),
        "streak": round(lead[1], 4),
        "dds4": round(lead[4], 4),
        "dds8": round(lead[8], 4),
        "slot_accuracy": [round(x, 4) for x in right.float().flatten(0, -2).mean(0).tolist()],
    }


def learning_rate(step: int, plan: DrafterRecipe) -> float:
    """Share of the peak: linear warm-up, constant, and a cosine to 2 % over the last steps."""
    warm = min(1.0, (step + 1) / max(1, plan.warmup))
    progress = max(0.0, (step - plan.steps + plan.decay) / max(1, plan.decay))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Optimizer:
    """Muon for the matrices, AdamW for the norms, one schedule for both.

    After 250 steps on the full-attention target it predicted 30 % of first slots, AdamW alone 14 %.
    """

    def __init__(self, drafter: Drafter, plan: DrafterRecipe) -> None:
        self.plan = plan
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim != 2]
        self.parameters = [*matrices, *vectors]
        self.muon = torch.optim.Muon(
            matrices,
            lr=plan.learning_rate,
            weight_decay=plan.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW(
            vectors,
            lr=plan.vector_learning_rate,
            weight_decay=0.0,
            betas=(0.9, 0.95),
            fused=vectors[0].is_cuda,
        )
        self.parts: dict[str, torch.optim.Optimizer] = {"muon": self.muon, "adamw": self.adamw}

    def rate(self, step: int) -> float:
        """The matrices' learning rate at ``step``, from 0."""
        return self.plan.learning_rate * learning_rate(step, self.plan)

    @staticmethod
    def step_together(optimizers: list[Optimizer], step: int) -> None:
        """Clip, update and clear every drafter."""
        for one in optimizers:
            torch.nn.utils.clip_grad_norm_(one.parameters, 1.0)
            share = learning_rate(step, one.plan)
            one.muon.param_groups[0]["lr"] = one.plan.learning_rate * share
            one.adamw.param_groups[0]["lr"] = one.plan.vector_learning_rate * share
            one.adamw.step()
        muon.step_together([one.muon for one in optimizers])
        for one in optimizers:
            one.muon.zero_grad()
            one.adamw.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """State of both parts."""
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Group:
    """Drafters of one shape that train together until each has done its own number of steps."""

    def __init__(
        self,
        plans: dict[str, DrafterRecipe],
        world: World,
        checkpoint: Path,
        *,
        compiled: bool = True,
    ) -> None:
        self.plans, self.world, self.checkpoint = plans, world, checkpoint
        device = world.tokens.device
        hidden = world.embedding.shape[1]
        self.drafters = {n: new_drafter(p, hidden).to(device) for n, p in plans.items()}
        for drafter in self.drafters.values():
            # Moves the frequencies here, not inside the compiled function.
            drafter.rotary.table(torch.zeros(1, dtype=torch.int64, device=device))
        self.optimizers = {n: Optimizer(self.drafters[n], p) for n, p in plans.items()}
        self.logs: dict[str, list[dict[str, Any]]] = {n: [] for n in plans}
        self.step = 0
        # Compiled once for all drafters of a shape; nearly twice as fast on a CPU.
        self.loss_and_logits = torch.compile(loss_and_logits) if compiled else loss_and_logits
        if checkpoint.exists():
            state = torch.load(checkpoint, map_location=device, weights_only=True)
            self.step, self.logs = state["step"], state["logs"]
            for name in plans:
                self.drafters[name].load_state_dict(state["drafters"][name])
                self.optimizers[name].load_state_dict(state["optimizers"][name])
            log.info("resumed at step %d", self.step)

    def train(self) -> None:
        """Train every drafter to its last step."""
        total = max(p.steps for p in self.plans.values())
        begin = saved = time.monotonic()
        while self.step < total:
            active = [n for n, p in self.plans.items() if self.step < p.steps]
            self.train_step(active)
            self.step += 1
            if self.step % LOG_EVERY == 0 or self.step == total:
                seconds = time.monotonic() - begin
                log.info("step %d/%d %d drafters %.0f s", self.step, total, len(active), seconds)
            if time.monotonic() - saved > SAVE_EVERY_SECONDS or self.step == total:
                self.save()
                saved = time.monotonic()

    def train_step(self, active: list[str]) -> None:
        """One batch for all active drafters."""
        first = self.plans[active[0]]
        batch = draw(self.world, first, recipe.SEED * 31 + self.step)
        noise = noise_embeddings(self.world, batch, first)
        context = torch.arange(self.world.tokens.shape[1], device=noise.device)[None]
        losses: list[Tensor] = []
        for name in active:
            plan = self.plans[name]
            seen = view(self.world, batch, plan, recipe.SEED + self.step)
            loss, logits = self.loss_and_logits(
                self.drafters[name],
                noise,
                context,
                self.world.embedding,
                seen,
                slot_weights(plan, noise.device),
                plan.soft_kl_weight,
            )
            loss.backward()
            losses.append(loss.detach())
            if self.step == 0 or (self.step + 1) % LOG_EVERY == 0 or self.step + 1 == plan.steps:
                entry = {"step": self.step + 1, "loss": round(loss.item(), 4)}
                metrics = training_metrics(logits.detach(), seen.labels)
                rate = float(f"{self.optimizers[name].rate(self.step):.3g}")
                self.logs[name].append({**entry, **metrics, "lr": rate})
        finite = torch.stack(losses).isfinite()
        if not finite.all():
            broken = [n for n, ok in zip(active, finite.tolist(), strict=True) if not ok]
            raise FloatingPointError(f"step {self.step + 1}: no finite loss for {broken}")
        Optimizer.step_together([self.optimizers[n] for n in active], self.step)

    def save(self) -> None:
        """Checkpoint, written beside and renamed."""
        partial = self.checkpoint.with_suffix(".writing")
        torch.save(
            {
                "step": self.step,
                "logs": self.logs,
                "drafters": {n: d.state_dict() for n, d in self.drafters.items()},
                "optimizers": {n: o.state_dict() for n, o in self.optimizers.items()},
            },
            partial,
        )
        partial.replace(self.checkpoint)


@torch.no_grad()
def held_out_metrics(drafter: Drafter, world: World, reading: DrafterRecipe) -> dict[str, Any]:
    """Training metrics of one drafter on held-out sequences, under some reading."""
    total: list[tuple[Tensor, Tensor]] = []
    for part in torch.arange(len(world.tokens)).split(reading.batch):
        anchors = [
            sequence_anchors(
                sequence_seed("validation", row),
                int(world.prefix[row]),
                int(world.end[row]),
                reading,
            )
            for row in part.tolist()
        ]
        start, rows = int(part[0]), part.to(world.tokens.device)
        batch = Batch(
            world.tokens[rows], torch.stack(anchors).to(world.tokens.device), world.states(rows)
        )
        seen = view(world, batch, reading, recipe.SEED + start)
        noise = noise_embeddings(world, batch, reading).float()
        context = torch.arange(world.tokens.shape[1], device=noise.device)[None]
        hidden = drafter(
            noise, seen.positions, drafter.features(seen.states.float()), context, seen.mask
        )
        blocks = hidden.unflatten(1, (reading.n_anchors, reading.block_size))[:, :, 1:]
        total.append((blocks @ world.embedding.T.float(), seen.labels))
    return training_metrics(torch.cat([t[0] for t in total]), torch.cat([t[1] for t in total]))


def build(
    work: Path,
    plans: dict[str, DrafterRecipe],
    target_name: str,
    sequences: SequenceRecipe,
    *,
    device: str,
    compiled: bool = True,
) -> None:
    """Train the drafters of one target; writes ``work/drafters/NAME`` and resumes."""
    plans = {n: p for n, p in plans.items() if p.target == target_name}
    done = work / "drafters" / f"{target_name}.json"
    if done.exists():
        return
    done.parent.mkdir(parents=True, exist_ok=True)
    target = load_target(work / "targets" / target_name, device)
    data = np.load(work / "sequences" / f"{target_name}.npz")
    layers = needed_layers(list(plans.values()), target.config.num_hidden_layers)
    held_out = observe(target, *_split(data, "validation", layers, sequences.kept_validation))
    world = observe(target, *_split(data, "train", layers))
    held = "anew for every batch" if world.bank is None else "kept"
    log.info("%d sequences, their states %s", len(data["train"]), held)
    report: dict[str, Any] = {}
    for shape in sorted({(p.n_layers, len(p.layer_ids)) for p in plans.values()}, reverse=True):
        same = {n: p for n, p in plans.items() if (p.n_layers, len(p.layer_ids)) == shape}
        label = f"{target_name}-{shape[0]}x{shape[1]}"
        group = Group(same, world, work / "drafters" / f"{label}.partial.pt", compiled=compiled)
        group.train()
        for name, drafter in group.drafters.items():
            write(work / "drafters" / name, drafter, group, name)
            report[name] = evaluate(drafter, held_out, same[name])
            log.info("%s: %s", name, json.dumps(report[name]))
    done.write_text(json.dumps(report, indent=1))


def _split(
    data: Any, split: str, layers: tuple[int, ...], count: int | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], np.ndarray | None]:
    """The first ``count`` texts of a split, as `observe` takes them."""
    end = data[f"{split}_end"][:count] if f"{split}_end" in data else None
    return data[split][:count], data[f"{split}_prefix"][:count], layers, end


def evaluate(drafter: Drafter, held_out: World, plan: DrafterRecipe) -> dict[str, Any]:
    """Held-out metrics under the drafter's own reading and under the serving rule."""
    serving = replace(plan, **{name: getattr(recipe.HEALTHY, name) for name in recipe.FAULTS})
    out: dict[str, Any] = {
        "own_reading": held_out_metrics(drafter, held_out, plan),
        "serving_rule": held_out_metrics(drafter, held_out, serving),
    }
    if plan.hidden_noise:
        batch = draw(held_out, plan, recipe.SEED)
        noisy = view(held_out, batch, plan, recipe.SEED).labels
        clean = view(held_out, batch, serving, recipe.SEED).labels
        out["labels_changed_by_noise"] = round((noisy != clean).float().mean().item(), 4)
    return out


def write(folder: Path, drafter: Drafter, group: Group, name: str) -> None:
    """Weights, optimizer state, training log and arguments, as this trainer leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {n: t.detach().cpu() for n, t in drafter.state_dict().items()}
    optimizer = group.optimizers[name].state_dict()
    torch.save(
        {"model": state, "optimizer": optimizer, "step": group.plans[name].steps},
        folder / "training.pt",
    )
    lines = [json.dumps(entry) for entry in group.logs[name]]
    (folder / "training_log.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "recipe.json").write_text(json.dumps(asdict(group.plans[name]), indent=1))
