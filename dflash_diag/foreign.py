"""Captures made by other code, and the target's tensors that they leave out.

Such a capture is a safetensors file, or one written by ``torch.save``, with ``tokens`` [T],
``hidden_states`` [T, K, H] and ``layer_ids`` [K]; layer id j is the raw output of decoder layer j,
-1 the embedding output. ``n_prompt_tokens``, in the file's metadata or as a tensor, says where the
continuation begins; without it every token after the first counts as generated.

What trainers leave on the disk is read as it is: SpecForge's ``input_ids`` with
``aux_hidden_state`` [1, T, K·H], speculators' ``token_ids`` or ``input_ids`` with ``hidden_states``
[T, K, H] or a list of K tensors. Where they have a ``loss_mask``, its last run of ones is the
continuation, and what follows it is left out. Nothing in a pickle is ever executed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_diag.bundle import Capture, CapturedPrompt
from dflash_diag.checkpoints.pickles import UnsafePickle
from dflash_diag.checkpoints.placeholders import TensorRef, as_mapping
from dflash_diag.checkpoints.torchzip import TorchZip, explain_bare_pickle
from dflash_diag.errors import BadInput, CaptureError, CheckpointError
from dflash_diag.gguf_file import EMBEDDING, FINAL_NORM, HEAD, GgufFile, in_gguf
from dflash_diag.storage import StrPath
from dflash_diag.target_config import read_target_config

SUFFIXES = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
"""Files that a folder is searched for."""

_TOKENS = ("tokens", "input_ids", "token_ids")
_STATES = ("aux_hidden_states", "aux_hidden_state", "hidden_states")
_LAYERS = ("layer_ids", "target_layer_ids")
_LAYER_INPUTS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
"""Layer ids that name a layer's input: the output of the layer before."""
_PROMPT = ("n_prompt_tokens", "prompt_length", "prompt_len")
_NESTED = ("metadata", "config")
"""Mappings inside a file in which such values are looked for as well."""

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORMS = ("norm.weight", "ln_f.weight", "final_layernorm.weight", "norm_f.weight")
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_COMPARABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64, *_INTEGERS)
"""Types of states that can be compared. The audit says of integers that they are no states."""
_ONE_PLUS = ("qwen3_5", "qwen3_next", "gemma")
"""Families whose final norm multiplies by 1 + w."""


@dataclass(frozen=True)
class Dump:
    """One sequence in a file of other code; the file is opened whenever it is asked."""

    path: Path
    prompt: CapturedPrompt
    layer_ids: tuple[int, ...]
    hidden_size: int
    highest: int
    """The highest token id."""

    @property
    def n_tokens(self) -> int:
        """T, without what follows the continuation."""
        return self.prompt.n_prompt_tokens + self.prompt.n_generated

    def tokens(self) -> Tensor:
        """int64 [T]."""
        return _flat(_open(self.path), self.path)[: self.n_tokens].long()

    def states(self, layer_ids: Iterable[int]) -> Tensor:
        """[T, K, H] of some of its layers."""
        (found,) = _all(_open(self.path), _STATES)[:1]
        if isinstance(found, list):
            layers = [one[0] if one.ndim == 3 else one for one in found]
        else:
            # [T, K, H], [T, K·H] and a batch of one of either lie in memory alike.
            layers = found.reshape(-1, len(self.layer_ids), self.hidden_size).unbind(1)
        columns = [layers[self.layer_ids.index(j)][: self.n_tokens] for j in layer_ids]
        return torch.stack(columns, dim=1)


@dataclass(frozen=True, eq=False)
class _File:
    """Values of a file by name; tensors are read when they are asked for."""

    names: frozenset[str]
    get: Callable[[str], Any]


def load_foreign(
    path: Path, files: Sequence[Path], target: StrPath | None, layer_ids: Sequence[int] | None
) -> Capture:
    """Read a capture made by other code.

    Parameters
    ----------
    layer_ids
        The layers, in the order of the states, for files that do not name them.

    Raises
    ------
    CaptureError
        A file that lacks something, contradicts itself, would run code, or is unlike the target.
    """
    dumps = [_read(file, path, layer_ids) for file in files]
    layers, sizes = {d.layer_ids for d in dumps}, {d.hidden_size for d in dumps}
    if len(layers) != 1 or len(sizes) != 1:
        raise CaptureError(f"the files of {path} hold different layers or hidden sizes")
    (found_ids,), (hidden_size,) = layers, sizes
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
        highest = max(d.highest for d in dumps)
        if highest >= found["vocab_size"]:
            raise CaptureError(
                f"{path} holds token id {highest}",
                f"ids below {found['vocab_size']}, the vocabulary of {target}",
            )
        beyond = [j for j in found_ids if not -1 <= j < found["n_layers"]]
        if beyond:
            raise CaptureError(
                f"{path} holds layer {beyond[0]} of a target with {found['n_layers']} layers"
            )
    prompts = tuple(d.prompt for d in dumps)
    return Capture(
        path=path,
        target_facts=facts,
        layer_ids=found_ids,
        prompts=prompts,
        facts={"max_new_tokens": max(p.n_generated for p in prompts), "target": facts},
        sequence_files=tuple(files),
        shared_tensors=shared,
        dumps=tuple(dumps),
    )


def _read(path: Path, root: Path, given: Sequence[int] | None) -> Dump:
    """Find out what a file holds, and check that it fits together."""
    file = _open(path)
    kinds = {"tokens": _TOKENS, "hidden_states": _STATES}
    lacking = [name for name, aliases in kinds.items() if not _all(file, aliases)]
    if lacking:
        raise CaptureError(
            f"{path} has no {' and no '.join(lacking)}",
            "tensors tokens, hidden_states, layer_ids, or what SpecForge or speculators writes",
        )
    tokens = _flat(file, path)
    if tokens.ndim != 1 or not len(tokens):
        raise CaptureError(f"{path}: tokens {list(tokens.shape)}", "shape [T], at least one token")
    layer_ids = _layer_ids(file, path, given)
    if not layer_ids:
        raise CaptureError(f"{path}: layer_ids are empty", "at least one layer")
    if len(set(layer_ids)) != len(layer_ids):
        raise CaptureError(f"{path}: layer_ids {list(layer_ids)}", "each layer once")
    hidden_size = _width(file, path, len(tokens), layer_ids)
    n_prompt, end = _continuation(file, path, len(tokens))
    if not 1 <= n_prompt < end:
        raise CaptureError(
            f"{path}: n_prompt_tokens is {n_prompt} of {end} tokens", "a prompt and a continuation"
        )
    if tokens.min() < 0:
        raise CaptureError(f"{path}: token id {int(tokens.min())}", "ids from 0")
    own = file.get("id") if "id" in file.names else None
    name = path.relative_to(root).with_suffix("").as_posix() if path != root else path.stem
    prompt = CapturedPrompt(
        id=own if isinstance(own, str) else name,
        n_prompt_tokens=n_prompt,
        n_generated=end - n_prompt,
        ended=False,
    )
    return Dump(path, prompt, layer_ids, hidden_size, int(tokens[:end].max()))


def _open(path: Path) -> _File:
    try:
        with path.open("rb") as stream:
            start = stream.read(9)
        if path.suffix == ".safetensors" or start[8:] == b"{":
            return _open_safetensors(path)
        if start[:4] != b"PK\x03\x04":
            raise explain_bare_pickle(path)
        return _open_torch(path)
    except UnsafePickle:
        raise
    except CheckpointError as error:
        raise CaptureError(error.found, error.expected, error.do) from error
    except (OSError, SafetensorError) as error:
        raise CaptureError(f"{path} is not a safetensors file ({error})") from error


def _open_safetensors(path: Path) -> _File:
    file = safe_open(path, "pt")
    metadata, keys = file.metadata() or {}, set(file.keys())

    def get(name: str) -> Any:
        try:
            return file.get_tensor(name) if name in keys else _parsed(metadata[name])
        except SafetensorError as error:
            raise CaptureError(f"{path}: {name} cannot be read ({error})") from error

    return _File(frozenset(keys | set(metadata)), get)


def _parsed(text: str) -> Any:
    """Numbers and lists in metadata, which can hold only text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, int | list) else text


def _open_torch(path: Path) -> _File:
    archive = TorchZip(path)
    content = as_mapping(archive.content)
    if content is None:
        raise CaptureError(f"{path} holds a {type(archive.content).__name__}", "named tensors")
    values = {k: v for k, v in content.items() if isinstance(k, str)}
    for name in _NESTED:
        inner = as_mapping(values.get(name)) or {}
        values |= {k: v for k, v in inner.items() if isinstance(k, str) and k not in values}

    def made(value: Any) -> Any:
        if isinstance(value, TensorRef):
            return archive.tensor(value)
        return [made(v) for v in value] if isinstance(value, list | tuple) else value

    return _File(frozenset(values), lambda name: made(values[name]))


def _all(file: _File, aliases: Sequence[str]) -> list[Any]:
    """What a file has under some names, the first name first."""
    return [file.get(name) for name in aliases if name in file.names]


def _flat(file: _File, path: Path) -> Tensor:
    """The tokens, without a leading batch dimension of 1."""
    value = _integers(_all(file, _TOKENS)[0], path, "tokens")
    return value[0] if value.ndim == 2 and len(value) == 1 else value


def _tensor(value: Any, path: Path, name: str) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CaptureError(f"{path}: {name} are a {type(value).__name__}", "numbers") from error


def _integers(value: Any, path: Path, name: str) -> Tensor:
    """int64, if they are integers of any width."""
    found = _tensor(value, path, name)
    if isinstance(value, list | tuple) and not len(value):
        return found.long()  # torch makes floats of nothing
    if found.dtype not in (*_INTEGERS, torch.uint16, torch.uint32, torch.uint64):
        raise CaptureError(f"{path}: {name} are {found.dtype}", "integers")
    return found.long()


def _layer_ids(file: _File, path: Path, given: Sequence[int] | None) -> tuple[int, ...]:
    found = [_integers(v, path, "layer_ids").flatten() for v in _all(file, _LAYERS)[:1]]
    inputs = _all(file, _LAYER_INPUTS)[:1]
    found = found or [_integers(v, path, "layer_ids").flatten() - 1 for v in inputs]
    if not found and given is None:
        raise CaptureError(
            f"{path} does not say which layers its states are of",
            "layer_ids in the file: j is the output of decoder layer j, -1 the embeddings",
            "add them to the file, or give layer_ids to Capture.load in Python",
        )
    if not found:
        return tuple(given or ())
    layers = tuple(found[0].tolist())
    if given is not None and tuple(given) != layers:
        raise CaptureError(f"{path} holds layers {list(layers)}", f"{list(given)}, as given")
    return layers


def _width(file: _File, path: Path, n_tokens: int, layer_ids: tuple[int, ...]) -> int:
    """H, if the states have a type and a shape that can be read."""
    if "hidden_states_scales" in file.names:
        raise CaptureError(f"{path} holds quantised states", "states in a float type")
    value, k = _all(file, _STATES)[0], len(layer_ids)
    tensors = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Tensor)]
    shapes = [list(one.shape) for one in tensors]
    if not isinstance(value, Tensor | list):
        text = f"hidden_states that are a {type(value).__name__}"
    elif isinstance(value, Tensor):
        text = f"hidden_states {shapes[0]}"
    elif len(value) != len(tensors):
        other = next(v for v in value if not isinstance(v, Tensor))
        text = f"a list of {len(value)} states, one of them a {type(other).__name__}"
    else:
        text = f"a list of {len(value)} states {shapes[:1]}"
    found = f"{path}: tokens [{n_tokens}], {text}, {k} layer_ids"
    _check_types(tensors, found)
    sizes = {_size(shape, n_tokens, k, each=isinstance(value, list)) for shape in shapes}
    complete = isinstance(value, Tensor) or len(value) == len(tensors) == k
    size = sizes.pop() if complete and len(sizes) == 1 else None
    if not size:
        raise CaptureError(found, "shapes [T], [T, K, H] and [K]")
    return size


def _check_types(tensors: Sequence[Tensor], found: str) -> None:
    """Refuse types that cannot be compared, and several in one file."""
    types = sorted({str(one.dtype).removeprefix("torch.") for one in tensors})
    if len(types) > 1 or any(one.dtype not in _COMPARABLE for one in tensors):
        raise CaptureError(
            f"{found}, in {' and '.join(types)}",
            "states in float32, bfloat16 or float16",
            "save them in one of these; quantised ones times their scale",
        )


def _size(shape: list[int], n_tokens: int, k: int, *, each: bool) -> int | None:
    """H of states of one shape; ``each``: of one layer. None where the shape fits nothing."""
    for rest in [shape] + [shape[1:]] * (shape[:1] == [1]):
        if each and len(rest) == 2 and rest[0] == n_tokens:
            return rest[1]
        if not each and len(rest) == 3 and rest[:2] == [n_tokens, k]:
            return rest[2]
        if not each and len(rest) == 2 and rest[0] == n_tokens and rest[1] % k == 0:
            return rest[1] // k
    return None


def _continuation(file: _File, path: Path, n_tokens: int) -> tuple[int, int]:
    """Where the continuation begins and ends."""
    said = _all(file, _PROMPT)[:1]
    if said:
        value: Any = said[0].tolist() if isinstance(said[0], Tensor) else said[0]
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        try:
            whole = int(value)
        except (TypeError, ValueError, OverflowError):
            whole = None
        if (
            whole is None
            or isinstance(value, bool)
            or (isinstance(value, float) and value != whole)
        ):
            raise CaptureError(f"{path}: n_prompt_tokens is {value!r:.40}", "one integer")
        return whole, n_tokens
    if "loss_mask" not in file.names:
        return 1, n_tokens
    mask = _tensor(file.get("loss_mask"), path, "loss_mask").flatten() > 0
    if len(mask) != n_tokens or not bool(mask.any()):
        raise CaptureError(
            f"{path}: a loss_mask of {len(mask)} entries, {int(mask.sum())} of them set",
            f"{n_tokens} entries, as many as tokens, and a continuation among them",
        )
    end = int(mask.nonzero()[-1]) + 1
    before = (~mask[:end]).nonzero()
    return (int(before[-1]) + 1 if len(before) else 1), end


def _lent_by_gguf(path: Path) -> tuple[dict[str, tuple[Path, str]], dict[str, Any]]:
    """What a GGUF file lends, dequantised, and its facts."""
    file, config = GgufFile.read(path), read_target_config(path)
    lacking = next((name for name in (EMBEDDING, FINAL_NORM) if name not in file.tensors), None)
    if lacking:
        raise BadInput(f"{path} holds no tensor {lacking}", "a target's weights")
    tied = HEAD not in file.tensors
    head = EMBEDDING if tied else HEAD
    shared = {"embedding": EMBEDDING, "final_norm": FINAL_NORM, "head": head}
    rows, width = file.tensors[head].shape
    return {name: (path, key) for name, key in shared.items()}, {
        "source": path.name,
        "hidden_size": width,
        "vocab_size": rows,
        "n_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "max_positions": config.max_position_embeddings,
        "tied": tied,
        # Where a family multiplies by 1 + w, that sum is what the file holds.
        "final_norm": {"style": "plain", "eps": config.rms_norm_eps},
    }


def _lent_by(folder: Path) -> tuple[dict[str, tuple[Path, str]], dict[str, Any]]:
    """Embedding, head and final norm of a target's files, and its facts; loads no model."""
    if in_gguf(folder):
        return _lent_by_gguf(folder)
    try:
        config = read_target_config(folder)
    except BadInput as error:
        raise BadInput(f"{folder} is no target ({error.found})", "a folder with config.json") from (
            error
        )
    if config.num_hidden_layers is None:
        raise BadInput(f"{folder / 'config.json'} has no num_hidden_layers", "a whole number")
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
    return shared, {
        "source": folder.name,
        "hidden_size": width,
        "vocab_size": rows,
        "n_layers": config.num_hidden_layers,
        "layer_types": config.layer_types,
        "max_positions": config.max_position_embeddings,
        "tied": not heads,
        "final_norm": {
            "style": "one_plus" if config.model_type.startswith(_ONE_PLUS) else "plain",
            "eps": config.rms_norm_eps,
        },
    }


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Where each tensor of a folder lies."""
    found: dict[str, Path] = {}
    for path in sorted(p for p in folder.glob("*.safetensors") if p.is_file()):
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
