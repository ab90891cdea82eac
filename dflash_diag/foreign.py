"""Captures made by other code, and the target's tensors that they leave out.

Such a capture is a safetensors file with ``tokens`` [T], ``hidden_states`` [T, K, H] and
``layer_ids`` [K]; layer id j is the raw output of decoder layer j, -1 the embedding output. An
entry ``n_prompt_tokens`` in the file's metadata, or as a tensor, says where the continuation
begins; without it every token after the first counts as generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dflash_diag.bundle import Capture, CapturedPrompt
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.storage import StrPath, read_json

_NEEDED = ("tokens", "hidden_states", "layer_ids")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORMS = ("norm.weight", "ln_f.weight", "final_layernorm.weight", "norm_f.weight")
_ONE_PLUS = ("qwen3_5", "qwen3_next", "gemma")
"""Families whose final norm multiplies by 1 + w."""


def load_foreign(path: Path, files: Sequence[Path], target: StrPath | None) -> Capture:
    """Read a capture made by other code.

    Raises
    ------
    CaptureError
        A file without the three tensors, of contradicting shapes, or unlike the target.
    """
    prompts, layers, sizes, highest = [], set(), set(), -1
    for file in files:
        prompt, layer_ids, hidden, top = _read_sequence(file)
        highest = max(highest, top)
        prompts.append(prompt)
        layers.add(layer_ids)
        sizes.add(hidden)
    if len(layers) != 1 or len(sizes) != 1:
        raise CaptureError(f"the files of {path} hold different layers or hidden sizes")
    (layer_ids,), (hidden_size,) = layers, sizes
    facts: dict[str, Any] = {"hidden_size": hidden_size, "source": None}
    shared: dict[str, tuple[Path, str]] = {}
    if target is not None:
        shared, found = _lent_by(Path(target))
        if found["hidden_size"] != hidden_size:
            raise CaptureError(
                f"{path} holds states of width {hidden_size}",
                f"{found['hidden_size']}, the hidden size of {target}",
                "was it made of another target?",
            )
        facts |= found
        if highest >= found["vocab_size"]:
            raise CaptureError(
                f"{path} holds token id {highest}",
                f"ids below {found['vocab_size']}, the vocabulary of {target}",
            )
        beyond = [j for j in layer_ids if not -1 <= j < found["n_layers"]]
        if beyond:
            raise CaptureError(
                f"{path} holds layer {beyond[0]} of a target with {found['n_layers']} layers"
            )
    return Capture(
        path=path,
        target_facts=facts,
        layer_ids=layer_ids,
        prompts=tuple(prompts),
        facts={"max_new_tokens": max(p.n_generated for p in prompts), "target": facts},
        sequence_files=tuple(files),
        shared_tensors=shared,
        foreign=True,
    )


def _read_sequence(path: Path) -> tuple[CapturedPrompt, tuple[int, ...], int, int]:
    """The prompt, its layers, the hidden size, and the highest token id."""
    try:
        with safe_open(path, "pt") as file:
            keys = set(file.keys())
            lacking = [name for name in _NEEDED if name not in keys]
            if lacking:
                raise CaptureError(
                    f"{path} has no {' and no '.join(lacking)}", f"tensors {', '.join(_NEEDED)}"
                )
            tokens = file.get_tensor("tokens")
            n_tokens = list(tokens.shape)
            shape = file.get_slice("hidden_states").get_shape()
            layers = file.get_tensor("layer_ids").flatten()
            metadata = file.metadata() or {}
            n_prompt: Any = metadata.get("n_prompt_tokens", 1)
            if "n_prompt_tokens" in keys:
                n_prompt = file.get_tensor("n_prompt_tokens").tolist()
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} is not a safetensors file ({error})") from error
    if isinstance(n_prompt, list) and len(n_prompt) == 1:
        (n_prompt,) = n_prompt
    try:
        n_prompt = int(n_prompt)
    except (TypeError, ValueError) as error:
        raise CaptureError(f"{path}: n_prompt_tokens is {n_prompt!r}", "one integer") from error
    for name, values in (("tokens", tokens), ("layer_ids", layers)):
        if values.is_floating_point() or values.is_complex() or values.dtype is torch.bool:
            raise CaptureError(f"{path}: {name} are {values.dtype}", "integers")
    layer_ids = tuple(layers.tolist())
    if len(n_tokens) != 1 or len(shape) != 3 or shape[:2] != [n_tokens[0], len(layer_ids)]:
        raise CaptureError(
            f"{path}: tokens {n_tokens}, hidden_states {shape}, {len(layer_ids)} layer_ids",
            "shapes [T], [T, K, H] and [K]",
        )
    if len(set(layer_ids)) != len(layer_ids):
        raise CaptureError(f"{path}: layer_ids {list(layer_ids)}", "each layer once")
    if not 1 <= n_prompt < n_tokens[0]:
        raise CaptureError(
            f"{path}: n_prompt_tokens is {n_prompt} of {n_tokens[0]} tokens",
            "a prompt and a continuation",
        )
    if tokens.min() < 0:
        raise CaptureError(f"{path}: token id {int(tokens.min())}", "ids from 0")
    prompt = CapturedPrompt(
        id=metadata.get("id", path.stem),
        n_prompt_tokens=n_prompt,
        n_generated=n_tokens[0] - n_prompt,
        ended=False,
    )
    return prompt, layer_ids, shape[2], int(tokens.max())


def _lent_by(folder: Path) -> tuple[dict[str, tuple[Path, str]], dict[str, Any]]:
    """Embedding, head and final norm of a target's folder, and its facts; loads no model."""
    try:
        config = read_json(folder / "config.json")
    except BadInput as error:
        raise BadInput(f"{folder} is no target ({error.found})", "a folder with config.json") from (
            error
        )
    config = {**config, **config.get("text_config", {})}
    where = _tensor_files(folder)
    embedding = _one(where, _EMBEDDINGS, folder)
    prefix = embedding[: -len(next(e for e in _EMBEDDINGS if embedding.endswith(e)))]
    shared = {
        "embedding": (where[embedding], embedding),
        "final_norm": _named(where, [prefix + name for name in _NORMS], folder),
    }
    heads = [key for key in where if key.endswith(_HEADS)]
    shared["head"] = (where[heads[0]], heads[0]) if heads else shared["embedding"]
    rows, width = _shape(*shared["head"])
    family = str(config.get("model_type", ""))
    return shared, {
        "source": folder.name,
        "hidden_size": width,
        "vocab_size": rows,
        "n_layers": int(config["num_hidden_layers"]),
        "layer_types": config.get("layer_types"),
        "max_positions": config.get("max_position_embeddings"),
        "tied": not heads,
        "final_norm": {
            "style": "one_plus" if family.startswith(_ONE_PLUS) else "plain",
            "eps": float(config.get("rms_norm_eps", 1e-6)),
        },
    }


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a folder lies."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise BadInput(f"{path} is not a safetensors file ({error})") from error
    return found


def _one(where: Mapping[str, Path], endings: tuple[str, ...], folder: Path) -> str:
    found = [k for k in where if k.endswith(endings) and "visual" not in k and "mtp" not in k]
    if not found:
        raise BadInput(f"{folder} holds no tensor {endings[0]}", "a target's weights")
    return min(found, key=len)


def _named(where: Mapping[str, Path], names: Sequence[str], folder: Path) -> tuple[Path, str]:
    for name in names:
        if name in where:
            return where[name], name
    raise BadInput(f"{folder} holds no tensor {names[0]}", "a target's weights")


def _shape(path: Path, key: str) -> list[int]:
    with safe_open(path, "pt") as file:
        return list(file.get_slice(key).get_shape())
