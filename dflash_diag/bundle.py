"""A Capture on disk: everything that an evaluation needs from a target, in one folder.

Reading one loads neither transformers nor the target, and opens no connection.

The folder holds ``capture.json`` (facts), ``prompts.parquet``, ``positions.parquet`` (one row a
position), ``states/NNNNN.safetensors`` (``tokens`` [T] and ``layer.J`` [T, H] of one prompt; a
thinned capture has ``rows`` [R], and R rows of states),
``shared/SHA256.safetensors`` (embedding, head and final norm, under their own hash) and
``manifest.json`` with the sha256 of every other file.

Symbols: T tokens, R positions held, K layers asked for, H hidden size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dflash_diag.bundle_checks import (
    AGAIN,
    POSITION_COLUMNS,
    PROMPT_COLUMNS,
    check_facts,
    check_inside,
    check_positions,
    check_prompts,
    check_tensor,
)
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.gguf_file import GgufFile, in_gguf
from dflash_diag.storage import StrPath, read_json, read_parquet, sha256_file, to_json_text

if TYPE_CHECKING:
    import pandas as pd

    from dflash_diag.foreign import Dump

SCHEMA = "dflash_diag.capture/1"
MANIFEST_SCHEMA = "dflash_diag.manifest/1"
SHARED = ("embedding", "head", "final_norm")


@dataclass(frozen=True)
class CapturedPrompt:
    """One prompt and its greedy continuation."""

    id: str
    n_prompt_tokens: int
    """P."""
    n_generated: int
    """G: the actual length, the end-of-sequence token included."""
    ended: bool
    """Whether generation ended by itself before the requested length."""
    logit_noise: float | None = None
    """Largest difference between a logit decoded step by step and teacher-forced; None where
    nothing was decoded."""
    decode_gap: float | None = None
    """Largest distance of a generated token below the teacher-forced choice, in logits."""
    prompt_text: str | None = None
    continuation_text: str | None = None
    origin: str = "target"
    """Who continued it: the ``target``, or a server by ``ids``, ``text`` or ``uncounted text``."""
    finish_reason: str | None = None
    """Why a server stopped, in its own words."""
    form: str | None = None
    """How the prompt was given: as ``text``, ``messages`` or ``prompt_ids``; None if unknown."""
    kind: str | None = None
    """What sort of prompt it is, if its line said so."""


@dataclass(frozen=True, eq=False)
class Capture:
    """A read-only view of a capture. Made by `Capture.load`.

    Raises
    ------
    CaptureError
        Whatever is asked for is not in it.
    """

    path: Path
    target_facts: Mapping[str, Any]
    """``hidden_size``, ``vocab_size``, ``n_layers``, ``layer_types``, ``dtype``, ``backend``, …"""
    layer_ids: tuple[int, ...]
    """Layers whose states it holds of every prompt; -1 is the embedding output."""
    prompts: tuple[CapturedPrompt, ...]
    facts: Mapping[str, Any] = field(repr=False)
    """All of ``capture.json``."""
    sequence_files: tuple[Path, ...] = field(repr=False)
    shared_tensors: Mapping[str, tuple[Path, str]] = field(repr=False)
    """Embedding, head and final norm: the file that holds each, and its key there."""
    dumps: tuple[Dump, ...] = field(default=(), repr=False)
    """Its sequences, if it was made by other code."""

    @classmethod
    def load(
        cls,
        path: StrPath,
        *,
        verify: bool = True,
        target: StrPath | None = None,
        layer_ids: Sequence[int] | None = None,
    ) -> Capture:
        """Open a capture and check it against its manifest.

        Parameters
        ----------
        path
            A bundle's folder; or a capture made by other code, which is a safetensors or
            ``torch.save`` file with ``tokens`` [T], ``hidden_states`` [T, K, H] and ``layer_ids``
            [K], or what SpecForge or speculators writes, or a folder of such files.
        verify
            Whether to hash every file. Otherwise only their presence is checked.
        target
            The target's folder or GGUF file: must be the one that a bundle was made of; for a
            capture made by other code it lends embedding, head and final norm.
        layer_ids
            For a capture made by other code that does not name its layers: these, in the order of
            its states.

        Raises
        ------
        CaptureError
            Nothing there, incomplete, damaged, of another schema, or of another target.
        """
        path = Path(path)
        if any((path / name).is_file() for name in ("capture.json", "manifest.json")):
            capture = _load_bundle(path, verify=verify)
            if target is not None:
                capture.check_target(target)
            return capture
        from dflash_diag.foreign import SUFFIXES, load_foreign

        found = (p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        files = [path] if path.is_file() else sorted(found)
        if not files:
            what = f"{path} holds no capture" if path.exists() else f"no such capture: {path}"
            raise CaptureError(what, "a folder made by the verb capture")
        return load_foreign(path, files, target, layer_ids)

    @property
    def foreign(self) -> bool:
        """Whether it was made by other code."""
        return bool(self.dumps)

    def __len__(self) -> int:
        return len(self.prompts)

    def index(self, prompt_id: str) -> int:
        """Position of a prompt by its id."""
        for i, prompt in enumerate(self.prompts):
            if prompt.id == prompt_id:
                return i
        raise CaptureError(f"no prompt {prompt_id!r} in {self.path}")

    def tokens(self, i: int) -> Tensor:
        """Tokens of prompt ``i`` and its continuation: int64 [T]."""
        if self.foreign:
            return self.dumps[i].tokens()
        prompt = self.prompts[i]
        shape = (prompt.n_prompt_tokens + prompt.n_generated,)
        return self._stored(i, "tokens", shape, whole=True).long()

    def continuation(self, i: int) -> Tensor:
        """The greedy continuation alone: int64 [G]."""
        return self.tokens(i)[self.prompts[i].n_prompt_tokens :]

    def layers(self, i: int) -> tuple[int, ...]:
        """Layers whose states it holds of prompt ``i``, which may be more than ``layer_ids``."""
        if self.foreign:
            return self.layer_ids
        with self._open(self.sequence_files[i]) as file:
            found = [_LAYER.fullmatch(key) for key in file.keys()]  # noqa: SIM118
        return tuple(sorted(int(match[1]) for match in found if match))

    @property
    def thinned(self) -> bool:
        """Whether it holds the states and choices of some positions only."""
        return self.facts.get("keep_rows") is not None

    def rows(self, i: int) -> Tensor:
        """Positions of prompt ``i`` whose states it holds: int64 [R], all T unless `thinned`."""
        if not self.thinned:
            return torch.arange(len(self.tokens(i)))
        found, n = self._stored(i, "rows", (None,), whole=True).long(), len(self.tokens(i))
        if len(found) and not (int(found.min()) >= 0 and int(found.max()) < n):
            raise CaptureError(f"{self.sequence_files[i]}: rows outside of {n} tokens", do=AGAIN)
        return found

    def states(self, i: int, layer_ids: Iterable[int]) -> Tensor:
        """States [R, K, H] of prompt ``i``: raw outputs of decoder layers, -1 the embeddings.

        One row for each of `rows`, which are all T positions unless the capture is `thinned`.
        """
        wanted, held = list(layer_ids), self.layers(i)
        lacking = [j for j in wanted if j not in held]
        if lacking:
            raise CaptureError(
                f"{self.path} has no states of layer {', '.join(map(str, lacking))} "
                f"(it has {', '.join(map(str, held))})",
                do="capture again with these taps, or with --layers all",
            )
        if self.foreign:
            return self.dumps[i].states(wanted)
        shape = len(self.rows(i)), int(self.target_facts["hidden_size"])
        path, keys = self.sequence_files[i], [layer_key(j) for j in wanted]
        found = self._read(path, *keys)
        return torch.stack([check_tensor(path, k, found[k], shape) for k in keys], dim=1)

    @cached_property
    def embedding(self) -> Tensor:
        """The target's embedding: [V, H]."""
        return self._shared("embedding")

    @cached_property
    def head(self) -> Tensor:
        """The target's head: [V, H]; the very tensor of `embedding` where the two are tied."""
        if self.shared_tensors.get("head") == self.shared_tensors.get("embedding"):
            return self.embedding
        return self._shared("head")

    @cached_property
    def final_norm_weight(self) -> Tensor:
        """Weight of the target's final norm: [H]; ``target_facts["final_norm"]`` has the rest."""
        return self._shared("final_norm")

    def final_norm(self, states: Tensor) -> Tensor:
        """The target's final norm, applied to states [..., H]."""
        how = self.target_facts["final_norm"]
        if how["style"] == "other":
            raise CaptureError(f"{self.path}: the target's final norm is no plain RMSNorm")
        x = states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + how["eps"])
        weight = self.final_norm_weight.to(states.device).float()
        return (x * (1 + weight if how["style"] == "one_plus" else weight)).to(states.dtype)

    def positions(self, i: int) -> pd.DataFrame:
        """What the target itself would say at the `rows` of prompt ``i``, teacher-forced.

        One row a position t: ``position``, ``token`` (there), ``text`` of that token, and of the
        distribution of the token at t+1 ``top_ids`` and ``top_logprobs`` (lists of 8, best first),
        ``top_logit``, ``margin`` (first logit minus second) and ``entropy`` [nats].
        """
        table = self._positions
        return table[table["prompt"] == i].drop(columns="prompt").reset_index(drop=True)

    def top_choices(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and log-probabilities of the target's best 8 at the `rows`: [R, 8] each."""
        rows = self.positions(i)
        if not len(rows):
            raise CaptureError(f"{self.path} holds no choices at prompt {i}", do=AGAIN)
        return np.stack(rows["top_ids"].to_list()), np.stack(rows["top_logprobs"].to_list())

    @cached_property
    def _positions(self) -> pd.DataFrame:
        if self.foreign:
            raise CaptureError(
                f"{self.path} was made by other code and holds no choices of the target",
                do="make a capture with the verb capture",
            )
        path = self.path / "positions.parquet"
        table = _table(path, POSITION_COLUMNS)
        check_positions(path, table)
        return table

    @property
    def reference(self) -> Mapping[str, Any] | None:
        """The server that continued the prompts; None where the target itself did."""
        return self.facts.get("reference")

    @property
    def max_new_tokens(self) -> int:
        """G as requested."""
        return int(self.facts["max_new_tokens"])

    def check_target(self, folder: StrPath) -> None:
        """Make sure that this capture was made of the target in ``folder``, or in that GGUF file.

        Raises
        ------
        CaptureError
            Another target, by the hashes of weights and tokenizer.
        """
        from dflash_diag.targets import fingerprint

        ours = self.target_facts.get("files") or {}
        if not Path(folder).exists() or not ours:
            return
        theirs = fingerprint(folder)
        for part in ("weights", "tokenizer"):
            if set(ours.get(part, {}).values()) != set(theirs[part].values()):
                raise CaptureError(
                    f"{self.path} was made of another target: the {part} of {folder} differ",
                    f"the target {self.target_facts.get('source')!r} of the capture",
                    "capture this target, or name the capture's own",
                )

    def _shared(self, name: str) -> Tensor:
        if name not in self.shared_tensors:
            raise CaptureError(
                f"{self.path} holds no {name.replace('_', ' ')} of the target",
                do="give the target with --target",
            )
        path, key = self.shared_tensors[name]
        # Kept for later uses, gradients among them, whatever mode it is first asked for in.
        with torch.inference_mode(mode=False):
            tensor = (
                GgufFile.read(path).tensor(key) if in_gguf(path) else self._read(path, key)[key]
            )
        return check_tensor(path, key, tensor, (None,) if name == "final_norm" else (None, None))

    def _stored(
        self, i: int, key: str, shape: tuple[int | None, ...], *, whole: bool = False
    ) -> Tensor:
        """A tensor of prompt ``i``."""
        path = self.sequence_files[i]
        return check_tensor(path, key, self._read(path, key)[key], shape, whole=whole)

    def _read(self, path: Path, *keys: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        with self._open(path) as file:
            for key in keys:
                try:
                    found[key] = file.get_tensor(key)
                except SafetensorError as error:
                    said = f"{path}: {key} cannot be read ({error})"
                    raise CaptureError(said, do=AGAIN) from error
        return found

    def _open(self, path: Path) -> Any:
        try:
            if path.exists() and not path.is_file():
                raise CaptureError(f"{path} is no file", "a safetensors file", AGAIN)
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise CaptureError(f"{path} cannot be read ({error})", do=AGAIN) from error


_LAYER = re.compile(r"layer\.(-?\d{1,9})")


def layer_key(layer_id: int) -> str:
    """Name of a layer's states in a sequence file."""
    return f"layer.{layer_id}"


def sequence_name(index: int) -> str:
    """Path of a prompt's tokens and states inside the bundle."""
    return f"states/{index:05d}.safetensors"


def manifest_text(files: Mapping[str, str]) -> str:
    """The one text that a manifest of these hashes has."""
    return to_json_text({"schema": MANIFEST_SCHEMA, "files": dict(sorted(files.items()))})


def _load_bundle(path: Path, *, verify: bool) -> Capture:
    _check_manifest(path, verify=verify)
    facts = _read(path / "capture.json")
    if facts.get("schema") != SCHEMA:
        raise CaptureError(f"{path} has schema {facts.get('schema')!r}", repr(SCHEMA), AGAIN)
    check_facts(path / "capture.json", facts)
    rows = _table(path / "prompts.parquet", PROMPT_COLUMNS).to_dict("records")
    check_prompts(path / "prompts.parquet", rows)
    prompts = tuple(
        CapturedPrompt(
            id=row["id"],
            n_prompt_tokens=int(row["n_prompt_tokens"]),
            n_generated=int(row["n_generated"]),
            ended=bool(row["ended"]),
            logit_noise=_number(row["logit_noise"]),
            decode_gap=_number(row["decode_gap"]),
            prompt_text=_text(row["prompt_text"]),
            continuation_text=_text(row["continuation_text"]),
            origin=_text(row.get("origin")) or "target",
            finish_reason=_text(row.get("finish_reason")),
            form=_text(row.get("form")),
            kind=_text(row.get("kind")),
        )
        for row in rows
    )
    return Capture(
        path=path,
        target_facts=facts["target"],
        layer_ids=tuple(facts["layer_ids"]),
        prompts=prompts,
        facts=facts,
        sequence_files=tuple(path / sequence_name(i) for i in range(len(prompts))),
        shared_tensors={name: (path / file, "weight") for name, file in facts["shared"].items()},
    )


def _number(value: Any) -> float | None:
    return None if value != value else float(value)  # NaN: not measured


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _check_manifest(path: Path, *, verify: bool) -> None:
    manifest = path / "manifest.json"
    if not manifest.is_file():
        raise CaptureError(f"{path} has no manifest.json", "a complete capture", AGAIN)
    content = _read(manifest)
    files = content.get("files")
    if content.get("schema") != MANIFEST_SCHEMA or not isinstance(files, dict):
        raise CaptureError(f"{manifest} has schema {content.get('schema')!r}", do=AGAIN)
    if manifest.read_bytes() != manifest_text(files).encode("utf-8", "surrogatepass"):
        raise CaptureError(f"{manifest} was changed", do=AGAIN)
    for name, expected in files.items():
        check_inside(manifest, name)
        if not (path / name).is_file():
            raise CaptureError(f"{path / name} is missing", "a complete capture", AGAIN)
        if verify and sha256_file(path / name) != expected:
            raise CaptureError(
                f"{path / name} is damaged: its sha256 is not the manifest's", do=AGAIN
            )


def _table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    try:
        return read_parquet(path, columns)
    except BadInput as error:
        raise CaptureError(error.found, error.expected, AGAIN) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except BadInput as error:
        raise CaptureError(error.found, error.expected, AGAIN) from error
    if not isinstance(content, dict):
        raise CaptureError(f"{path} is not a JSON object", do=AGAIN)
    return content
