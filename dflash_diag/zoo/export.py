"""Write ``data/zoo``: models, drafters, logs and sequences in the layouts that people have."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_diag import example, storage
from dflash_diag.zoo import recipe
from dflash_diag.zoo.drafters import ROPE_THETA, sequence_anchors, sequence_seed
from dflash_diag.zoo.recipe import ChatRecipe, DrafterRecipe, Recipe

log = logging.getLogger(__name__)

CHECKPOINT = "training_checkpoint"
"""The drafter that is kept as its trainer saved it, not exported."""


def build(work: Path, out: Path, plan: Recipe) -> None:
    """Export all of ``plan`` to ``out``, sum it up in its manifest; what else lies there stays."""
    with storage.staged_dir(out) as stage:
        for name in plan.targets:
            export_target(work, stage / name / "target", name)
            export_sequences(work, stage / name / "sequences", name, plan)
        for name, chat in plan.chats.items():
            export_chats(work, stage / name / "sequences", name, chat, plan)
        for name, drafter in plan.drafters.items():
            if name == CHECKPOINT:
                export_raw_checkpoint(work, stage / CHECKPOINT, drafter)
            elif drafter.target == "hybrid":
                export_drafter(work, stage / "hybrid" / "drafters" / name, name, drafter)
            else:
                export_drafter(work, stage / drafter.target / "drafter", name, drafter)
        for other in out.iterdir() if out.is_dir() else ():
            if other.is_dir() and not (stage / other.name).exists():
                shutil.copytree(other, stage / other.name)
        old = out / example.MANIFEST
        before = storage.read_json(old)["measured"] if old.is_file() else {}
        write_manifest(stage, before | measured(work, plan))
    log.info("wrote %s", out)


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Sum up everything in the example's folder."""
    manifest = {
        "schema": example.SCHEMA,
        "measured": facts,
        "files": {
            path.relative_to(folder).as_posix(): storage.sha256_file(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path != folder / example.MANIFEST
        },
    }
    storage.write_json(folder / example.MANIFEST, manifest)


def export_target(work: Path, folder: Path, name: str) -> None:
    """A transformers folder with its tokenizer."""
    folder.mkdir(parents=True)
    source = work / "targets" / name
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(source / file, folder / file)
    shutil.copy(work / "tokenizer.json", folder / "tokenizer.json")
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": recipe.END_OF_TEXT,
        "mask_token": recipe.MASK_TOKEN,
        "model_max_length": 1024,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=1) + "\n")


def export_sequences(work: Path, folder: Path, name: str, plan: Recipe) -> None:
    """Token ids [n, T], prefix lengths [n], and the anchors [n, A] that each one's seed draws."""
    folder.mkdir(parents=True)
    data = np.load(work / "sequences" / f"{name}.npz")
    kept = plan.sequences[name]
    trainer = next(p for p in plan.drafters.values() if p.target == name)
    for split, count in (("train", kept.kept_train), ("validation", kept.kept_validation)):
        tokens = torch.from_numpy(data[split][:count].astype(np.int32))
        prefix = torch.from_numpy(data[f"{split}_prefix"][:count].astype(np.int32))
        seeds = [sequence_seed(split, row) for row in range(len(tokens))]
        anchors = torch.stack(
            [
                sequence_anchors(seed, int(start), tokens.shape[1], trainer)
                for seed, start in zip(seeds, prefix, strict=True)
            ]
        )
        save_file(
            {
                "tokens": tokens,
                "prefix": prefix,
                "anchor_seed": torch.tensor(seeds, dtype=torch.int64),
                "anchors": anchors.int(),
            },
            folder / f"{split}.safetensors",
        )


def export_chats(work: Path, folder: Path, name: str, kept: ChatRecipe, plan: Recipe) -> None:
    """The same of conversations, one a line: they differ in length."""
    folder.mkdir(parents=True)
    data = np.load(work / "sequences" / f"{name}.npz")
    trainer = next(p for p in plan.drafters.values() if p.target == name)
    for split, count in (("train", kept.kept_train), ("validation", kept.kept_validation)):
        rows = zip(
            data[split][:count].tolist(),
            data[f"{split}_prefix"][:count].tolist(),
            data[f"{split}_end"][:count].tolist(),
            strict=True,
        )
        with (folder / f"{split}.jsonl").open("w") as file:
            for row, (tokens, prefix, end) in enumerate(rows):
                seed = sequence_seed(split, row)
                text = {
                    "tokens": tokens[:end],
                    "prefix": prefix,
                    "anchor_seed": seed,
                    "anchors": sequence_anchors(seed, prefix, end, trainer).tolist(),
                }
                file.write(json.dumps(text, separators=(",", ":")) + "\n")


def export_drafter(work: Path, folder: Path, name: str, drafter: DrafterRecipe) -> None:
    """A folder in z-lab's layout, with the trainer's log and arguments beside it."""
    folder.mkdir(parents=True)
    trained = Trained.read(work, name)
    weights = {key: value.to(torch.bfloat16) for key, value in trained.weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", zlab_config(drafter, work))
    write_json(folder / "training_args.json", training_arguments(drafter, trained.steps))
    shutil.copy(trained.log, folder / "training_log.jsonl")


def export_raw_checkpoint(work: Path, folder: Path, drafter: DrafterRecipe) -> None:
    """A ``.pt`` as trainers leave it: wrapped weights, optimizer, step, Namespace of arguments."""
    folder.mkdir(parents=True)
    trained = Trained.read(work, CHECKPOINT)
    content = {
        "model": {f"module.{key}": value for key, value in trained.weights.items()},
        "optimizer": trained.optimizer,
        "step": trained.steps,
        "args": argparse.Namespace(**training_arguments(drafter, trained.steps)),
    }
    torch.save(content, folder / "checkpoint.pt")
    write_json(folder / "config.json", zlab_config(drafter, work))
    shutil.copy(trained.log, folder / "training_log.jsonl")


@dataclass
class Trained:
    """What the drafter stage left of one drafter."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    steps: int
    log: Path

    @classmethod
    def read(cls, work: Path, name: str) -> Trained:
        """Read ``work/drafters/NAME``."""
        folder = work / "drafters" / name
        state = torch.load(folder / "training.pt", map_location="cpu", weights_only=True)
        return cls(state["model"], state["optimizer"], state["step"], folder / "training_log.jsonl")


def zlab_config(drafter: DrafterRecipe, work: Path) -> dict[str, Any]:
    """``config.json``: what the trainer believes that it trained, faults unmentioned."""
    target = storage.read_json(work / "targets" / drafter.target / "config.json")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": target["hidden_size"],
        "intermediate_size": drafter.mlp_size,
        "num_hidden_layers": drafter.n_layers,
        "num_attention_heads": drafter.n_heads,
        "num_key_value_heads": drafter.n_kv_heads,
        "head_dim": drafter.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "layer_types": ["full_attention"] * drafter.n_layers,
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": target["vocab_size"],
        "tie_word_embeddings": False,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": drafter.block_size,
        "dflash_config": {
            "mask_token_id": drafter.mask_token_id,
            "target_layer_ids": list(drafter.layer_ids),
        },
    }


def training_arguments(drafter: DrafterRecipe, steps: int) -> dict[str, Any]:
    """The trainer's arguments: what somebody chose, not what the code got wrong."""
    public = recipe.PUBLIC_TARGETS.get(drafter.target)
    target = f"data/zoo/{drafter.target}/target" if public is None else Path(public.file).name
    return {
        "target": target,
        "target_layer_ids": list(drafter.layer_ids),
        "block_size": drafter.block_size,
        "num_anchors": drafter.n_anchors,
        "batch_size": drafter.batch,
        "max_steps": steps,
        "optimizer": "muon (matrices) + adamw (norms)",
        "learning_rate": drafter.learning_rate,
        "warmup_steps": drafter.warmup,
        "decay_steps": drafter.decay,
        "weight_decay": drafter.weight_decay,
        "loss_decay_gamma": drafter.loss_decay_gamma,
        "soft_kl_weight": drafter.soft_kl_weight,
        "hidden_noise": drafter.hidden_noise,
        "seed": recipe.SEED,
    }


def measured(work: Path, plan: Recipe) -> dict[str, Any]:
    """What the stages measured on the way, for whoever reads the manifest."""
    files = {"corpus": work / "corpus.json"} if plan.targets else {}
    for name in plan.targets:
        files[f"target {name}"] = work / "targets" / name / "training.json"
    for name in plan.chats:
        files[f"sequences {name}"] = work / "sequences" / f"{name}.json"
    for name in (*plan.targets, *plan.public_targets):
        files[f"drafters {name}"] = work / "drafters" / f"{name}.json"
    return {name: storage.read_json(file) for name, file in files.items()}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented JSON, ended by a newline."""
    path.write_text(json.dumps(content, indent=2) + "\n")
