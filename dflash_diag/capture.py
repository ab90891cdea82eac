"""Make a Capture: greedy continuations and hidden states of a target, for a list of prompts.

The continuations are the target's own, or a server's; the states are always the target's. The work
is done in a hidden folder beside the result, prompt by prompt, and the folder is renamed when it is
complete. A run that was stopped is picked up where it ended.
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
from dflash_diag.backends import BackendName
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
from dflash_diag.servers import Asked, Served, Server, ServerError, text_for
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
    backend: BackendName = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reference: Server | None = None,
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
    reference
        The server whose continuations are taken instead of the target's own. It is asked only for
        what is not there yet.
    seed
        Recorded only: greedy decoding draws nothing.
    silent
        Show no progress.

    Raises
    ------
    BadInput
        A target, prompt, option or server that cannot be used.
    OutputError
        ``out`` holds something else, or cannot be written.
    Interrupted
        Stopped by the keyboard, or a server went away; the same call resumes.
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
    if reference is not None:
        request["reference"] = reference.identity()
    facts = target.facts()
    key = content_key(SCHEMA, request, facts, [p.to_json() for p in prompts], encoded)
    existing = _existing(out, key)
    if existing is not None:
        return existing
    work = _open_work(out, key)
    first, served = "capture" if reference is None else "reference", None
    stage: Progress[Any] = progress(len(prompts), first, unit="prompt", silent=silent)
    try:
        if reference is not None:
            with stage, reference:
                answers = _ask(work, reference, target, prompts, encoded, max_new_tokens, stage)
            request["reference"] = _reference_facts(work, prompts, answers)
            usable = [i for i, answer in enumerate(answers) if not answer.unusable]
            prompts = [prompts[i] for i in usable]
            encoded = [encoded[i] for i in usable]
            served = [_as_continuation(answers[i]) for i in usable]
            stage = progress(len(prompts), "capture", unit="prompt", silent=silent)
        with stage:
            _fill(work, target, prompts, encoded, served, max_new_tokens, layer_ids, stage)
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
            f"{stage.desc} stopped after {stage.done} of {stage.total} prompts; "
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
    for folder in ("states", "parts", "reference", "shared"):
        make_dir(work / folder)
    write_json(work / "run.json", {"key": key})
    return work


def _ask(
    work: Path,
    server: Server,
    target: Target,
    prompts: Sequence[Prompt],
    encoded: Sequence[list[int]],
    max_new_tokens: int,
    stage: Progress[Any],
) -> list[Served]:
    """A server's continuation of every prompt; each is kept as soon as it is there.

    What an earlier run got is taken only from the same server: model, version and precision.
    """
    about = work / "reference" / "server.json"
    answers: dict[int, Served] = {}
    files = [work / "reference" / f"{i:05d}.json" for i in range(len(prompts))]
    for i, file in enumerate(files):
        if file.is_file():
            answers[i] = Served.from_json(read_json(file))
    todo = [i for i in range(len(prompts)) if i not in answers]
    asked = {i: _asked(target, prompts[i], encoded[i], max_new_tokens) for i in todo}
    if todo:
        server.open(next((a for a in asked.values() if a.text is not None), asked[todo[0]]))
        if answers and read_json(about) != server.facts():
            for i in answers:
                files[i].unlink()
            return _ask(work, server, target, prompts, encoded, max_new_tokens, stage)
        write_json(about, server.facts())
    stage.update(len(answers))
    for i in todo:
        try:
            answers[i] = server.complete(asked[i], target.tokenizer)
        except Interrupted as error:
            raise Interrupted(
                f"{error}; {len(answers)} of {len(prompts)} prompts are kept, "
                "and the same command goes on from there"
            ) from error
        write_json(files[i], answers[i].to_json())
        stage.update()
    return [answers[i] for i in range(len(prompts))]


def _asked(target: Target, prompt: Prompt, ids: list[int], max_new_tokens: int) -> Asked:
    return Asked(
        id=prompt.id,
        ids=tuple(ids),
        text=text_for(ids, prompt.text, target.tokenizer),
        max_new_tokens=max_new_tokens,
        vocab_size=target.vocab_size,
        eos_ids=target.eos_ids,
    )


def _as_continuation(answer: Served) -> Continuation:
    return Continuation(
        list(answer.ids), answer.ended, origin=answer.how, finish_reason=answer.finish_reason
    )


def _reference_facts(
    work: Path, prompts: Sequence[Prompt], answers: Sequence[Served]
) -> dict[str, Any]:
    """What a capture records about the server, and the prompts that it could not continue.

    Raises
    ------
    ServerError
        There is no other prompt.
    """
    unusable = [
        {"id": prompt.id, "reason": answer.unusable}
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.unusable
    ]
    server = read_json(work / "reference" / "server.json")
    if len(unusable) == len(prompts):
        raise ServerError(
            f"{server['url']} gives text that tells no prompt's tokens "
            f"({unusable[0]['id']}: {unusable[0]['reason']})",
            "a server that takes and returns token ids (SGLang, vLLM)",
        )
    how = sorted({answer.how for answer in answers if not answer.unusable})
    return {**server, "tokens_by": how, "unusable": unusable}


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
    served: Sequence[Continuation] | None,
    max_new_tokens: int,
    layer_ids: Sequence[int],
    stage: Progress[Any],
) -> None:
    """Write the parts of every prompt that has none yet; without ``served``, the target decodes."""
    todo = [i for i in range(len(prompts)) if not _Part(work, i).finished()]
    stage.update(len(prompts) - len(todo))
    for first in range(0, len(todo), BATCH):
        batch = todo[first : first + BATCH]
        if served is None:
            made = greedy(target, [encoded[i] for i in batch], max_new_tokens)
        else:
            made = [served[i] for i in batch]
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
    own = made.origin == "target"
    if own and gap > _TOLERANCE[target.dtype] * float(forced.logits.abs().max()):
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
        origin=made.origin,
        finish_reason=made.finish_reason,
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
    text = ["id", "prompt_text", "continuation_text", "origin", "finish_reason"]
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
        for folder in ("parts", "reference"):
            shutil.rmtree(work / folder)
        (work / "run.json").unlink()
