"""Statements of a checkpoint that some readers take otherwise than they are taken here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dflash_diag.checkpoints import attention
from dflash_diag.checkpoints.contradictions import as_outputs, plain
from dflash_diag.checkpoints.keys import Value, architectures, at, head_width, n_target_layers
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.resolving import read_fields
from dflash_diag.checkpoints.stacks.detecting import ARCHITECTURES, Stack, detect_stack
from dflash_diag.checkpoints.vocabulary import possible_kinds


@dataclass(frozen=True)
class Ambiguity:
    """One statement that some readers take otherwise than it is taken here."""

    field: str
    used: Any
    other: Any
    readers: str
    """Who takes it as ``other``."""
    why: str

    def __str__(self) -> str:
        return f"{self.field}: {self.used!r} here, {self.other!r} in {self.readers} ({self.why})"


def ambiguities(checkpoint: Checkpoint) -> list[Ambiguity]:
    """Whatever the files state and not everybody reads alike."""
    stack = detect_stack(checkpoint)
    values = read_fields(checkpoint, stack.reader)
    return [found for look in _LOOKS for found in look(checkpoint, stack, values)]


_Found = Iterator[Ambiguity]
_Values = Mapping[str, Value]


def _value(values: _Values, name: str, otherwise: Any) -> Any:
    return values[name].value if name in values else otherwise


def _architecture(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    del values
    for name in architectures(checkpoint.config):
        if name not in ARCHITECTURES and not name.startswith("Qwen3DFlash"):
            yield Ambiguity(
                "proposal", stack.title, "unknown", "whoever knows it",
                f"no stack writes the architecture {name}",
            )  # fmt: skip


def _rotary(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    width, whole = values["rotary_width"].value, head_width(checkpoint)
    key = values["rotary_width"].source.key
    qwen = "z-lab's and the trainers' code (transformers' Qwen3 class)"
    if width != whole:
        yield Ambiguity("rotary_width", width, whole, qwen,
                        f"they ignore {key}; vLLM and SGLang honour it")  # fmt: skip
    if _value(values, "rope_interleaved", False):
        key = values["rope_interleaved"].source.key
        yield Ambiguity("rope_interleaved", True, False, qwen, f"they ignore {key}")
    scaling = values["rope_scaling"].value
    if scaling is not None and stack.name == "modelopt":
        yield Ambiguity("rope_scaling", scaling, None, "Model-Optimizer's trainer",
                        "it adds the scaling on export")  # fmt: skip


def _layers(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    del stack
    if "layer_ids" not in values:
        return
    ids, key = values["layer_ids"].value, values["layer_ids"].source.key
    if list(ids) != sorted(ids):
        yield Ambiguity("layer_ids", list(ids), sorted(ids), "vLLM and SGLang",
                        "they tap in ascending order, fc reads in the listed one")  # fmt: skip
    taps = as_outputs(ids, _value(values, "layer_id_rule", "output"))
    target = n_target_layers(checkpoint)
    if target and target[0] - 1 in taps:
        normed = _value(values, "last_layer_normed", False)
        hooks, hugging = (
            "vLLM, SGLang and trainers with hooks",
            "whoever reads transformers' states",
        )
        who = hooks if normed else hugging
        yield Ambiguity("last_layer_normed", normed, not normed, who,
                        f"{key} lists the target's last layer")  # fmt: skip
    if -1 in taps:
        yield Ambiguity("layer_ids", -1, "the last layer", "verl-SpeCo's code",
                        "-1 is read as the embedding output here")  # fmt: skip


def _in_block(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    """Keys of causality that the servers do not read."""
    used, key = values["in_block"].value, values["in_block"].source.key
    config = checkpoint.config
    plainly = attention.causal_where_sliding
    sglang = attention.causality("is_causal", otherwise=plainly)(checkpoint).value
    if key and used != sglang:
        yield Ambiguity("in_block", plain(used), plain(sglang), "SGLang",
                        "it reads is_causal, else the layer types")  # fmt: skip
    free = config.get("sliding_window_non_causal")
    slides = any(_value(values, "window", ()))
    if stack.name == "speculators" and slides and not free and used != ("causal",) * len(used):
        yield Ambiguity("in_block", plain(used), "causal", "vLLM",
                        "it makes full layers causal too where sliding ones are")  # fmt: skip


def _window(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    del stack
    windows = values["window"].value
    if not any(windows):
        return
    if at(checkpoint.config, "dflash_config.use_swa"):
        yield Ambiguity("window", plain(windows), None, "SGLang and z-lab's code",
                        "they do not read dflash_config.use_swa")  # fmt: skip
    if _value(values, "window_rule", "slot") == "anchor":
        yield Ambiguity("window_rule", "anchor", "slot", "vLLM and SGLang",
                        "their windows move with the slot")  # fmt: skip


def _borrowed(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    del stack
    for name in ("embedding", "head"):
        if _value(values, name, "target") == "own":
            yield Ambiguity(name, "own", "target", "SGLang and z-lab's code",
                            f"they ignore {values[name].source.key}")  # fmt: skip
    if "vocabulary_map" in values:
        used = values["vocabulary_map"].value
        yield Ambiguity("vocabulary_map", used, "none", "SGLang and z-lab's code",
                        "they ignore d2t and use the target's whole head")  # fmt: skip
        for kind in possible_kinds(checkpoint):
            if kind != used:
                yield Ambiguity("vocabulary_map", used, kind, "whoever stores target ids",
                                "the values of d2t fit both")  # fmt: skip
    if (checkpoint.folder / "mask_embedding.pt").exists():
        yield Ambiguity("mask_token_id", "the target's embedding of it", "mask_embedding.pt",
                        "vLLM and SGLang", "they put it in place of the row")  # fmt: skip


def _proposal(checkpoint: Checkpoint, stack: Stack, values: _Values) -> _Found:
    del stack
    step = values["proposal"].value
    if step != "argmax":
        yield Ambiguity("proposal", step, "argmax", "whoever ignores tensors that it does not know",
                        f"without {values['proposal'].source.key} the numbers are of another "
                        "drafter")  # fmt: skip
    if values["embedding_scale"].value != 1.0:
        key = values["embedding_scale"].source.key
        yield Ambiguity("embedding_scale", values["embedding_scale"].value, 1.0,
                        "SpecForge, and vLLM for plain DFlash", f"they ignore {key}")  # fmt: skip
    factor = checkpoint.config.get("logit_scale")
    if factor is not None and factor != values["logit_scale"].value:
        yield Ambiguity("logit_scale", values["logit_scale"].value, factor, "vLLM",
                        "it reads logit_scale; z-lab's code output_multiplier")  # fmt: skip


_LOOKS: tuple[Callable[[Checkpoint, Stack, _Values], _Found], ...] = (
    _architecture, _rotary, _layers, _in_block, _window, _borrowed, _proposal,
)  # fmt: skip
