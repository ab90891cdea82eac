"""Open a drafter's checkpoint: an exported folder, a safetensors file, or a raw training file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dflash_diag.checkpoints.names import clean_names, find_state_dict
from dflash_diag.checkpoints.placeholders import as_mapping, is_namespace, to_plain
from dflash_diag.checkpoints.tensors import LazyTensors, PickledSource, SafetensorsSource
from dflash_diag.checkpoints.torchzip import TorchZip, explain_bare_pickle
from dflash_diag.errors import BadInput, CheckpointError
from dflash_diag.storage import StrPath, read_json, sha256_file
from dflash_diag.weight_files import EXPORTED, INDEX, RAW, is_other_state

Kind = Literal["safetensors", "raw"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Checkpoint:
    """A drafter's files, opened but not yet read: tensors are mapped when they are asked for."""

    path: Path
    """What was asked for: a folder or a file."""
    kind: Kind
    """``safetensors``: an export; ``raw``: a training state written by torch.save."""
    config: dict[str, Any]
    config_source: str
    """Where ``config`` was found: a file's path, ``given``, or a key inside the file."""
    tensors: LazyTensors
    """The drafter's tensors under their names without wrappers."""
    training_args: dict[str, Any] | None = None
    """The trainer's arguments as plain values, if the checkpoint carries them."""
    extra: dict[str, Any]
    """Other plain values of a raw file (step, epoch), and what was set aside."""
    weight_files: tuple[Path, ...]

    @property
    def body(self) -> Mapping[str, Any]:
        """Settings of the transformer itself: what speculators nests, else all of ``config``."""
        nested = self.config.get("transformer_layer_config")
        return nested if isinstance(nested, Mapping) else self.config

    @property
    def folder(self) -> Path:
        """Where the weights lie."""
        return self.weight_files[0].parent

    @cached_property
    def files(self) -> dict[str, str]:
        """sha256 of the files read, by name.

        A raw training file is not hashed whole, since that would read its optimizer's state; its
        entry ``<name>#weights`` is the digest of the drafter's tensors.
        """
        sums = {}
        config = Path(self.config_source)
        if config.is_file():
            sums[config.name] = sha256_file(config)
        if self.kind == "raw":
            return sums | {f"{self.weight_files[0].name}#weights": self.weights_sha256}
        return sums | {path.name: sha256_file(path) for path in self.weight_files}

    @cached_property
    def weights_sha256(self) -> str:
        """Digest of the tensors' names, types, shapes and values, whatever file holds them."""
        return self.tensors.sha256()


def read_checkpoint(
    path: StrPath, *, config: Mapping[str, Any] | StrPath | None = None
) -> Checkpoint:
    """Open a drafter's checkpoint; nothing in it is executed, and weights are not read yet.

    Parameters
    ----------
    path
        A folder with ``config.json`` and safetensors (one file, or shards with an index) or one
        raw training file; or such a file itself.
    config
        The drafter's configuration or the path of its JSON, where the checkpoint has none or
        another is meant.

    Raises
    ------
    CheckpointError
        No such file, not a checkpoint, damaged, or a pickle that would run code.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise CheckpointError(f"no such file or folder: {path}")
        weights = _weights_in(path) if path.is_dir() else (path,)
        if path.is_file() and path.suffix == ".json":
            raise CheckpointError(
                f"{path} holds no weights", "a checkpoint", f"name its folder {path.parent}"
            )
        folders = [str(p) for p in weights if not p.is_file()]
        if folders:
            raise CheckpointError(f"{folders[0]} is not a file", "a file of tensors")
        if _is_safetensors(weights[0]):
            return _read_safetensors(path, weights, config)
        return _read_raw(path, weights[0], config)
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} cannot be read: permission denied") from error
    except OSError as error:  # a link to itself, a device, a disk that fails
        why = error.strerror or str(error)
        raise CheckpointError(f"{path} cannot be read ({why})", "a checkpoint") from error


def _weights_in(folder: Path) -> tuple[Path, ...]:
    """The files of a folder that hold the weights."""
    if (folder / "model.safetensors").exists():
        return (folder / "model.safetensors",)
    if (folder / INDEX).exists():
        return _shards(folder / INDEX)
    for suffixes in (EXPORTED, RAW):
        found = sorted(
            p for p in folder.iterdir() if p.suffix in suffixes and not is_other_state(p)
        )
        if len(found) == 1:
            return tuple(found)
        if found:
            names = ", ".join(p.name for p in found[:6])
            raise CheckpointError(
                f"{folder} holds several files that could be the weights ({names})",
                "one model.safetensors, or one training file",
                "name the file itself",
            )
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
    raise CheckpointError(
        f"{folder} is not a checkpoint: it holds {names}",
        "config.json with model.safetensors, or a .pt file",
    )


def _shards(index: Path) -> tuple[Path, ...]:
    content = _json_object(index)
    weight_map = content.get("weight_map")
    named = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not named or not all(isinstance(s, str) and Path(s).name == s for s in named):
        raise CheckpointError(
            f"{index} lists no usable shards", "weight_map with names of files beside it"
        )
    paths = tuple(index.parent / name for name in sorted(set(named)))
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise CheckpointError(
            f"{index.parent} lacks {', '.join(missing)}",
            f"the {len(paths)} shards that {index.name} lists",
        )
    return paths


def _is_safetensors(path: Path) -> bool:
    """By name or by content: a length of 8 bytes, then a JSON object."""
    if path.suffix == ".safetensors":
        return True
    with path.open("rb") as file:
        start = file.read(9)
    length = int.from_bytes(start[:8], "little")
    return start[8:] == b"{" and length <= path.stat().st_size


def _read_safetensors(
    path: Path, weights: tuple[Path, ...], config: Mapping[str, Any] | StrPath | None
) -> Checkpoint:
    source = SafetensorsSource(weights)
    stored, beside = clean_names(source.names(), str(path))
    folder = weights[0].parent
    settings, where = _config(config, folder, None, weights[0])
    return Checkpoint(
        path=path,
        kind="safetensors",
        config=settings,
        config_source=where,
        tensors=LazyTensors(source, stored),
        training_args=_args_beside(folder),
        extra={"set_aside": beside} if beside else {},
        weight_files=weights,
    )


def _read_raw(path: Path, file: Path, config: Mapping[str, Any] | StrPath | None) -> Checkpoint:
    with file.open("rb") as handle:
        magic = handle.read(4)
    if not magic:
        raise CheckpointError(f"{file} is empty", "a checkpoint")
    if magic != b"PK\x03\x04":
        raise explain_bare_pickle(file)
    archive = TorchZip(file)
    keys, refs = find_state_dict(archive.content, str(file))
    source = PickledSource(archive, refs)
    stored, beside = clean_names(refs, str(file))
    content = as_mapping(archive.content) or {}
    settings, where = _config(config, file.parent, content, file)
    args = _args_inside(content)
    extra: dict[str, Any] = {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, str | int | float | bool)
    }
    extra |= {"state_dict_at": keys} if keys else {}
    extra |= {"set_aside": beside} if beside else {}
    return Checkpoint(
        path=path,
        kind="raw",
        config=settings,
        config_source=where,
        tensors=LazyTensors(source, stored),
        training_args=args if args is not None else _args_beside(file.parent),
        extra=extra,
        weight_files=(file,),
    )


_CONFIG_KEYS = ("draft_config", "drafter_config", "model_config", "config")
_ARGS_KEYS = ("args", "training_args", "hparams", "hyper_parameters", "opt")


def _config(
    given: Mapping[str, Any] | StrPath | None,
    folder: Path,
    content: Mapping[Any, Any] | None,
    weights: Path,
) -> tuple[dict[str, Any], str]:
    """The configuration and where it was: given, else inside the file, else beside it."""
    if isinstance(given, Mapping):
        return dict(given), "given"
    if given is not None:
        given = Path(given)
        given = given / "config.json" if given.is_dir() else given
        return _json_object(given), str(given)
    for key in _CONFIG_KEYS:
        found = to_plain(content.get(key)) if content else None
        found = _parsed(found)
        if isinstance(found, dict) and "hidden_size" in found:
            return found, f"{weights}#{key}"
    if (folder / "config.json").exists():
        return _json_object(folder / "config.json"), str(folder / "config.json")
    inside = " or inside it" if content is not None else ""
    raise CheckpointError(
        f"{weights} has no configuration",
        f"config.json beside it{inside}",
        "put the drafter's config.json there, or give it",
    )


def _parsed(value: Any) -> Any:
    """A configuration that was saved as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value


def _args_inside(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """The trainer's arguments: a namespace under any key, or a dict under a usual one."""
    for key, value in content.items():
        if is_namespace(value) or (key in _ARGS_KEYS and value):
            found = to_plain(value)
            if isinstance(found, dict):
                return found
    return None


def _args_beside(folder: Path) -> dict[str, Any] | None:
    path = folder / "training_args.json"
    return _json_object(path) if path.exists() else None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except BadInput as error:
        raise CheckpointError(error.found, error.expected, error.do) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}", "a JSON object")
    return content
