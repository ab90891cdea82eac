"""Which stack wrote a checkpoint: the signs in its files, in the order in which they decide.

Files come before configuration, and configuration before nothing at all. Every sign is kept: those
of the stack that is chosen as evidence, those of others as what speaks against it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_diag.checkpoints.keys import architectures, at, first
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks import (
    automodel,
    deepspec,
    modelopt,
    specforge,
    speco,
    speculators,
    vllm,
    zlab,
)
from dflash_diag.checkpoints.stacks.common import Reader, StackName
from dflash_diag.errors import CheckpointError

READERS: Mapping[StackName, Reader] = {
    one.name: one
    for one in (
        zlab.READER,
        specforge.READER,
        speculators.READER,
        deepspec.READER,
        automodel.READER,
        modelopt.READER,
        speco.READER,
        vllm.READER,
    )
}


_Signs = Iterator[tuple[StackName, str]]


@dataclass(frozen=True)
class Stack:
    """The stack whose reader a checkpoint is read by."""

    name: StackName
    title: str
    evidence: tuple[str, ...]
    """What in the files names it."""
    against: tuple[str, ...] = ()
    """Signs of other stacks, which decide less."""

    @property
    def reader(self) -> Reader:
        """What its keys mean."""
        return READERS[self.name]

    def __str__(self) -> str:
        return f"{self.title} ({'; '.join(self.evidence)})"


def detect_stack(checkpoint: Checkpoint) -> Stack:
    """The stack that wrote a checkpoint, and the signs that say so.

    Raises
    ------
    CheckpointError
        The architecture is no DFlash drafter's, and no key of one is there.
    """
    signs = list(_signs(checkpoint))
    if not signs:
        names = architectures(checkpoint.config)
        if names and not any("dflash" in name.lower() for name in names):
            raise CheckpointError(
                f"the architecture is {', '.join(names)}, and no key of a DFlash drafter is there",
                "the configuration of a DFlash drafter",
            )
        nothing = "nothing in the files names a stack; read as most are"
        return Stack("zlab", READERS["zlab"].title, (nothing,))
    chosen = signs[0][0]
    title = READERS[chosen].title
    evidence = tuple(sign for name, sign in signs if name == chosen)
    against = tuple(f"{READERS[name].title}: {sign}" for name, sign in signs if name != chosen)
    # Every stack but speculators builds on z-lab's keys, which therefore speak against none.
    if chosen != "speculators":
        against = tuple(one for one in against if not one.startswith("z-lab: "))
    return Stack(chosen, title, evidence, against)


def _signs(checkpoint: Checkpoint) -> _Signs:
    yield from _in_files(checkpoint)
    yield from _in_configuration(checkpoint)


def _in_files(checkpoint: Checkpoint) -> _Signs:
    extra, folder = checkpoint.extra, checkpoint.folder
    stored = checkpoint.tensors.stored_names.values()
    if extra.get("state_dict_at") == "draft_state_dict" and "strategy" in extra:
        yield "specforge", "draft_state_dict and strategy in a training state"
    if any("dflash_module." in name for name in stored):
        yield "modelopt", "tensors are named dflash_module.…"
    if any(name.startswith(("markov_w", "confidence_proj.")) for name in stored):
        yield "modelopt", "DSpark's tensors stand outside any module"
    states = [p.name for p in folder.glob("training_state.rank*.pt")]
    for name in [*(["train_config.py"] if (folder / "train_config.py").exists() else []), *states]:
        yield "deepspec", f"{name} beside the weights"
    model_type = checkpoint.config.get("model_type")
    if (folder / "metadata.json").exists() and model_type == "dflash":
        yield "speco", "metadata.json, and model_type is dflash"


_WRITERS: Mapping[str, StackName] = {
    "DFlashSpeculator": "speculators",
    "DSparkSpeculator": "speculators",
    "XPressSpeculator": "speculators",
    "Qwen3DSparkModel": "deepspec",
    "Gemma4DSparkModel": "deepspec",
    "DSparkDraftModel": "specforge",
    "DominoDraftModel": "specforge",
}
"""Architectures that one stack alone writes."""
ARCHITECTURES = frozenset((*_WRITERS, "DFlashDraftModel", "DFlash2DraftModel"))
"""All that are known, beside Automodel's Qwen3DFlash…"""


def _in_configuration(checkpoint: Checkpoint) -> _Signs:
    config, folder = checkpoint.config, checkpoint.folder
    names = architectures(config)
    for key in ("speculators_model_type", "transformer_layer_config", speculators.IDS):
        if config.get(key) is not None:
            yield "speculators", f"the configuration has {key}"
            break
    if "transformer_layer_config" in config and (folder / "optimizer_state_dict.pt").exists():
        yield "speculators", "optimizer_state_dict.pt beside the weights"
    for name in names:
        if name in _WRITERS:
            yield _WRITERS[name], f"the architecture is {name}"
    flat = config.get("target_layer_ids") is not None and "dflash_config" not in config
    if flat and config.get("num_anchors") is not None:
        yield "deepspec", "target_layer_ids and num_anchors at the top level, no dflash_config"
    for name in names:
        if name.startswith("Qwen3DFlash"):
            yield "automodel", f"the architecture is {name}"
    nested = [key for key in ("use_swa", "swa_window_size", "causal")
              if at(config, f"dflash_config.{key}") is not None]  # fmt: skip
    if nested:
        yield "modelopt", f"dflash_config has {', '.join(nested)}"
    if config.get("model_type") == "dflash":
        yield "speco", "model_type is dflash"
    if config.get("num_context_layers") is not None:
        yield "speco", "the configuration has num_context_layers"
    value, key = first(config, *vllm.IDS)
    if value is not None and (vllm.IDS[key] == "input" or key == "dspark_target_layer_ids"):
        yield "vllm", f"the configuration has {key}"
    yield from _zlab(config, names)


def _zlab(config: Mapping[str, Any], names: list[str]) -> _Signs:
    ours = [name for name in names if name in ("DFlashDraftModel", "DFlash2DraftModel")]
    if ours:
        yield "zlab", f"the architecture is {ours[0]}"
    if isinstance(config.get("dflash_config"), Mapping):
        yield "zlab", "the configuration has dflash_config"
    elif config.get("target_layer_ids") is not None and config.get("mask_token_id") is not None:
        yield "zlab", "target_layer_ids and mask_token_id at the top level"
