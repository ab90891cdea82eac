"""Make a Capture: greedy continuations and hidden states of a target, for a list of prompts.

The work is done in a hidden folder beside the result, prompt by prompt, and the folder is renamed
when it is complete. A run that was stopped is picked up where it ended.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dflash_diag import provenance
from dflash_diag.bundle import (
    SCHEMA,
    Capture,
    CapturedPrompt,
    layer_key,
    manifest_text,
    sequence_name,
)
from dflash_diag.decoding import (
    TOP,
    Continuation,
    decode_gap,
    greedy,
    logit_noise,
    teacher_forced,
)
from dflash_diag.errors import BadInput, Interrupted, OutputError, PromptError
from dflash_diag.hidden_states import LayerMode, select_layers
from dflash_diag.progress import Progress, progress
from dflash_diag.prompts import Prompt
from dflash_diag.storage import (
    StrPath,
    atomic_write,
    content_key,
    make_dir,
    output_errors,
    read_json,
    replace_dir,
    sha256_file,
    write_json,
)
from dflash_diag.targets import Target, load_target

__all__ = ["Capture", "CapturedPrompt", "make_capture"]

BATCH = 8
"""Prompts that are decoded side by side."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Share of the highest logit by which decoding in a batch may miss the teacher-forced choice."""

_ROWS = 256
"""Rows of logits that are turned into probabilities at a time."""


def make_capture(
    target: Target | StrPath,
    prompts: Sequence[Prompt],
    out: StrPath,
    *,
    max_new_tokens: int,
    layers: LayerMode = "around",
    taps: Iterable[int] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    seed: int | None = None,
    silent: bool = False,
) -> Capture:
    """Capture a target on prompts, or open the same capture if it is already there.

    Parameters
    ----------
    target
        A loaded target, or what `load_target` takes, to which ``dtype``, ``device`` and ``backend``
        go.
    out
        The capture's folder.
    max_new_tokens
        G: generated tokens, fewer where a prompt's continuation ends by itself.
    layers, taps
        See `select_layers`.
    seed
        Recorded only: greedy decoding draws nothing.
    silent
        Show no progress.

    Raises
    ------
    BadInput
        A target, prompt or option that cannot be used.
    OutputError
        ``out`` holds something else, or cannot be written.
    Interrupted
        Stopped by the keyboard; the same call resumes.
    """
    if max_new_tokens < 1:
        raise BadInput(f"--max-new-tokens {max_new_tokens}", "at least 1")
    if not prompts:
        raise PromptError("no prompts", "at least one")
    out = Path(out)
    if not isinstance(target, Target):
        target = load_target(target, device=device, dtype=dtype, backend=backend)
    layer_ids = select_layers(layers, target.n_layers, taps)
    encoded = [_encode(target, p, max_new_tokens, chat_template_kwargs) for p in prompts]
    request = {
        "max_new_tokens": max_new_tokens,
        "layer_ids": list(layer_ids),
        "chat_template_kwargs": dict(chat_template_kwargs or {}),
        "seed": seed,
    }
    facts = target.facts()
    key = content_key(SCHEMA, request, facts, [p.to_json() for p in prompts], encoded)
    existing = _existing(out, key)
    if existing is not None:
        return existing
    work = _open_work(out, key)
    stage: Progress[Any] = progress(len(prompts), "capture", unit="prompt", silent=silent)
    try:
        with stage:
            _fill(work, target, prompts, encoded, max_new_tokens, layer_ids, stage)
        facts = {
            "schema": SCHEMA,
            "key": key,
            **request,
            "n_prompts": len(prompts),
            "target": facts,
            "shared": _store_shared(work, out, target),
            "provenance": provenance.collect(given=request, device=str(target.device)),
        }
        _finish(work, prompts, facts)
        replace_dir(work, out)
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"capture stopped after {stage.done} of {len(prompts)} prompts; "
            "the same command goes on from there"
        ) from error
    except OutputError:
        # On a full disk the half-made folder would be what fills it.
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Capture.load(out, verify=False)


def _encode(
    target: Target, prompt: Prompt, max_new_tokens: int, template: Mapping[str, Any] | None
) -> list[int]:
    ids = target.encode(prompt, template)
    limit = target.max_positions
    if limit is not None and len(ids) + max_new_tokens > limit:
        raise PromptError(
            f"prompt {prompt.id!r} has {len(ids)} tokens and {max_new_tokens} are to follow",
            f"at most {limit} in all, the target's positions",
            "shorten it, or lower --max-new-tokens",
        )
    return ids


def _existing(out: Path, key: str) -> Capture | None:
    """The capture at ``out``, if it is the one that was asked for."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    if not out.is_dir():
        raise OutputError(f"{out} is a file", "a folder for the capture")
    if not (out / "capture.json").is_file():
        raise OutputError(f"{out} holds something that is no capture", do="choose another folder")
    capture = Capture.load(out)
    if capture.facts.get("key") != key:
        raise OutputError(
            f"{out} holds a capture of other prompts, of another target or with other settings",
            do="remove it, or choose another folder",
        )
    return capture


def _open_work(out: Path, key: str) -> Path:
    """The folder of an unfinished run of the same request, or a new one."""
    work = out.parent / f".{out.name}.partial"
    if (work / "run.json").is_file() and read_json(work / "run.json").get("key") == key:
        return work
    with output_errors(work):
        if work.exists():
            shutil.rmtree(work)
    for folder in ("states", "parts", "shared"):
        make_dir(work / folder)
    write_json(work / "run.json", {"key": key})
    return work


@dataclass(frozen=True)
class _Part:
    """The files of one finished prompt."""

    work: Path
    index: int

    @property
    def states(self) -> Path:
        return self.work / sequence_name(self.index)

    @property
    def row(self) -> Path:
        return self.work / "parts" / f"{self.index:05d}.json"

    @property
    def positions(self) -> Path:
        return self.work / "parts" / f"{self.index:05d}.parquet"

    def finished(self) -> bool:
        """Whether an earlier run completed it; the row, written last, vouches for the states."""
        if not (self.row.is_file() and self.positions.is_file() and self.states.is_file()):
            return False
        return bool(read_json(self.row)["states_sha256"] == sha256_file(self.states))


def _fill(
    work: Path,
    target: Target,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    max_new_tokens: int,
    layer_ids: Sequence[int],
    stage: Progress[Any],
) -> None:
    """Write the parts of every prompt that has none yet."""
    todo = [i for i in range(len(prompts)) if not _Part(work, i).finished()]
    stage.update(len(prompts) - len(todo))
    for first in range(0, len(todo), BATCH):
        batch = todo[first : first + BATCH]
        made = greedy(target, [encoded[i] for i in batch], max_new_tokens)
        for i, continuation in zip(batch, made, strict=True):
            _write_part(
                _Part(work, i),
                target,
                prompts[i],
                encoded[i],
                continuation,
                max_new_tokens,
                layer_ids,
            )
            stage.update()


def _write_part(
    part: _Part,
    target: Target,
    prompt: Prompt,
    ids: list[int],
    made: Continuation,
    max_new_tokens: int,
    layer_ids: Sequence[int],
) -> None:
    tokens = [*ids, *made.ids]
    forced = teacher_forced(target, tokens, layer_ids)
    gap = float(decode_gap(forced, len(ids), made.ids).max())
    if gap > _TOLERANCE[target.dtype] * float(forced.logits.abs().max()):
        # This target does not take padding, or its batched kernels differ: decode it alone.
        made = greedy(target, [ids], max_new_tokens)[0]
        tokens = [*ids, *made.ids]
        forced = teacher_forced(target, tokens, layer_ids)
        gap = float(decode_gap(forced, len(ids), made.ids).max())
    states = {
        layer_key(layer): forced.states[:, k].contiguous().cpu()
        for k, layer in enumerate(layer_ids)
    }
    content = save({"tokens": torch.tensor(tokens), **states}, metadata={"id": prompt.id})
    atomic_write(part.states, content)
    frame = _choices(forced.logits)
    frame.insert(0, "prompt", part.index)
    frame.insert(1, "position", range(len(tokens)))
    frame.insert(2, "token", tokens)
    frame.insert(3, "text", [target.decode([t]) for t in tokens])
    _write_parquet(part.positions, frame)
    row = CapturedPrompt(
        id=prompt.id,
        n_prompt_tokens=len(ids),
        n_generated=len(made.ids),
        ended=made.ended,
        logit_noise=logit_noise(forced, len(ids), made),
        decode_gap=gap,
        prompt_text=prompt.text if prompt.text is not None else target.decode(ids),
        continuation_text=target.decode(made.ids),
    )
    write_json(part.row, {**asdict(row), "states_sha256": sha256_file(part.states)})


def _choices(logits: Tensor) -> Any:
    """Top choices, margin and entropy of every row of logits [T, V], as a frame of T rows."""
    import pandas as pd

    columns: dict[str, list[Any]] = {
        name: [] for name in ("top_ids", "top_logprobs", "top_logit", "margin", "entropy")
    }
    for rows in logits.split(_ROWS):
        scores = rows.float()
        norm = scores.logsumexp(-1)
        best, ids = scores.topk(min(TOP, scores.shape[-1]))
        logprobs = scores - norm[:, None]
        entropy = -(logprobs.exp() * logprobs).nan_to_num(0.0).sum(-1)
        columns["top_ids"] += list(ids.int().cpu().numpy())
        columns["top_logprobs"] += list((best - norm[:, None]).cpu().numpy())
        columns["top_logit"] += best[:, 0].tolist()
        columns["margin"] += (best[:, 0] - best[:, 1]).tolist()
        columns["entropy"] += entropy.tolist()
    frame = pd.DataFrame(columns)
    floats = ["top_logit", "margin", "entropy"]
    return frame.astype(dict.fromkeys(floats, "float32"))


def _write_parquet(path: Path, frame: Any) -> None:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    atomic_write(path, buffer.getvalue())


def _store_shared(work: Path, out: Path, target: Target) -> dict[str, str]:
    """Write the tensors that a drafter borrows, each once, and link those of sibling captures.

    Returns
    -------
    dict
        Name to path inside the bundle; a tied head has the embedding's.
    """
    parts = target.parts
    weights = {"embedding": parts.embedding.weight, "final_norm": parts.final_norm.weight}
    if not parts.tied:
        weights["head"] = parts.head.weight
    names = {}
    for name, weight in weights.items():
        content = save({"weight": weight.detach().cpu().contiguous()})
        digest = hashlib.sha256(content).hexdigest()
        names[name] = f"shared/{digest}.safetensors"
        if not _linked(names[name], digest, work, out):
            atomic_write(work / names[name], content)
    return {"head": names["embedding"], **names}


def _linked(name: str, digest: str, work: Path, out: Path) -> bool:
    """Whether a capture beside ``out`` lent its copy of a shared file, by a hard link."""
    if (work / name).is_file():
        return sha256_file(work / name) == digest
    for twin in sorted(out.parent.glob(f"*/{name}")):
        if sha256_file(twin) != digest:
            continue
        try:
            os.link(twin, work / name)
        except OSError:
            # Not every file system has hard links; the caller then writes a copy.
            return False
        return True
    return False


def _finish(work: Path, prompts: Sequence[Prompt], facts: dict[str, Any]) -> None:
    """Join the parts into tables, and seal the folder with its manifest."""
    import pandas as pd

    parts = [_Part(work, i) for i in range(len(prompts))]
    rows = [read_json(part.row) for part in parts]
    frame = pd.DataFrame(rows).drop(columns="states_sha256")
    text = ["id", "prompt_text", "continuation_text"]
    _write_parquet(work / "prompts.parquet", frame.astype(dict.fromkeys(text, "string")))
    positions = pd.concat([pd.read_parquet(part.positions) for part in parts], ignore_index=True)
    _write_parquet(work / "positions.parquet", positions)
    write_json(work / "capture.json", facts)
    files = [work / name for name in ("capture.json", "prompts.parquet", "positions.parquet")]
    files += [part.states for part in parts]
    files += [work / name for name in set(facts["shared"].values())]
    hashes = {path.relative_to(work).as_posix(): sha256_file(path) for path in files}
    atomic_write(work / "manifest.json", manifest_text(hashes))
    with output_errors(work):
        shutil.rmtree(work / "parts")
        (work / "run.json").unlink()
