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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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
    Forced,
    decode_gap,
    greedy,
    logit_noise,
    teacher_forced,
)
from dflash_diag.errors import BadInput, Interrupted, OutputError, PromptError
from dflash_diag.hidden_states import LayerMode, select_layers, weight_of
from dflash_diag.progress import Progress, progress
from dflash_diag.prompts import Prompt
from dflash_diag.servers import Asked, Served, Server, ServerError, text_for
from dflash_diag.storage import (
    StrPath,
    atomic_file,
    atomic_write,
    content_key,
    kept_alone,
    make_dir,
    output_errors,
    read_json,
    replace_dir,
    sha256_file,
    write_json,
)
from dflash_diag.targets import Target, load_target
from dflash_diag.tensorfile import TensorFile

__all__ = ["Capture", "CapturedPrompt", "make_capture"]

BATCH, GPU_BATCH = 16, 32
"""Prompts that are decoded side by side; a GPU waits for its launches and decodes more as fast."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Share of the highest logit by which decoding in a batch may miss the teacher-forced choice."""


def make_capture(
    target: Target | StrPath,
    prompts: Sequence[Prompt],
    out: StrPath,
    *,
    max_new_tokens: int | None = None,
    like: Given | None = None,
    layers: LayerMode = "around",
    taps: Iterable[int] | None = None,
    all_layers_for: int = 0,
    keep_rows: int | None = None,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
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
    like
        Another capture, or other texts, whose tokens are run through this target, in place of
        prompts and decoding; G is then its own. Two captures of the same tokens can be compared.
    layers, taps
        See `select_layers`.
    all_layers_for
        Prompts, the first ones, of which every layer is kept.
    keep_rows
        Positions a prompt whose states and choices are kept, spread evenly and ending with the
        last. They are those of the full forward. Such a capture is for comparing states; it cannot
        be scored.
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
    if like is not None and (prompts or max_new_tokens is not None):
        raise BadInput("prompts or a length beside a capture to be like", "one of the two")
    if like is None and (max_new_tokens is None or max_new_tokens < 1):
        raise BadInput(f"--max-new-tokens {max_new_tokens}", "at least 1")
    if like is None and not prompts:
        raise PromptError("no prompts", "at least one")
    if keep_rows is not None and keep_rows < 1:
        raise BadInput(f"keep_rows={keep_rows}", "at least 1")
    out = Path(out)
    if not isinstance(target, Target):
        target = load_target(target, device=device, dtype=dtype, backend=backend)
    plan = _Plan(
        layer_ids=select_layers(layers, target.n_layers, taps),
        all_layers=select_layers("all", target.n_layers),
        all_layers_for=all_layers_for,
        keep_rows=keep_rows,
        max_new_tokens=(max_new_tokens or 0) if like is None else like.max_new_tokens,
    )
    if like is None:
        texts = [_Text.of(target, p, plan.max_new_tokens, chat_template_kwargs) for p in prompts]
    else:
        texts = [_Text.like(target, like, i) for i in range(len(like))]
    request = {
        "max_new_tokens": plan.max_new_tokens,
        "layer_ids": list(plan.layer_ids),
        "chat_template_kwargs": dict(chat_template_kwargs or {}),
        "seed": seed,
    }
    if like is not None:
        tokens = content_key([[t.id, t.prompt_ids, t.given and t.given.ids] for t in texts])
        request["like"] = {"tokens": tokens, "source": like.target_facts.get("source")}
        if like.reference is not None:
            request["reference"] = dict(like.reference)
    if all_layers_for:
        request["all_layers_for"] = all_layers_for
    if keep_rows is not None:
        request["keep_rows"] = keep_rows
    if reference is not None:
        request["reference"] = reference.identity()
    encoded = [t.prompt_ids for t in texts]
    key = content_key(SCHEMA, request, target.facts(), [p.to_json() for p in prompts], encoded)
    if (existing := _existing(out, key)) is not None:
        return existing
    with kept_alone(out):
        if (existing := _existing(out, key)) is not None:  # another process has just ended
            return existing
        work = _open_work(out, key)
        _make(work, out, target, prompts, texts, plan, request, key, reference, silent=silent)
    return Capture.load(out, verify=False)


def _make(
    work: Path,
    out: Path,
    target: Target,
    prompts: Sequence[Prompt],
    texts: Sequence[_Text],
    plan: _Plan,
    request: dict[str, Any],
    key: str,
    reference: Server | None,
    *,
    silent: bool,
) -> None:
    """Fill the folder of an unfinished run, and put it in its place."""
    try:
        if reference is not None:
            texts = _served(work, reference, target, prompts, texts, plan, request, silent=silent)
        _fill(work, target, texts, plan, silent=silent)
        facts = {
            "schema": SCHEMA,
            "key": key,
            **request,
            "n_prompts": len(texts),
            "target": target.facts(),
            # A capture that cannot be scored needs nothing that a drafter borrows.
            "shared": {} if plan.keep_rows is not None else _store_shared(work, out, target),
            "provenance": provenance.collect(given=request, device=str(target.device)),
        }
        _finish(work, len(texts), facts)
        replace_dir(work, out)
    except KeyboardInterrupt as error:
        done = len(list((work / "parts").glob("*.json")))
        raise Interrupted(
            f"capture stopped after {done} of {len(texts)} prompts; "
            "the same command goes on from there"
        ) from error
    except OutputError:
        # On a full disk the half-made folder would be what fills it.
        shutil.rmtree(work, ignore_errors=True)
        raise


class Given(Protocol):
    """Texts with their continuations: a `Capture`, or whatever looks like one."""

    @property
    def prompts(self) -> Sequence[CapturedPrompt]: ...

    @property
    def target_facts(self) -> Mapping[str, Any]: ...

    @property
    def reference(self) -> Mapping[str, Any] | None: ...

    @property
    def max_new_tokens(self) -> int: ...

    def tokens(self, i: int) -> Tensor: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class _Plan:
    """Which states of a prompt are kept, and how long its continuation may be."""

    layer_ids: tuple[int, ...]
    all_layers: tuple[int, ...]
    all_layers_for: int
    keep_rows: int | None
    max_new_tokens: int

    def layers(self, index: int) -> tuple[int, ...]:
        return self.all_layers if index < self.all_layers_for else self.layer_ids

    def rows(self, n_tokens: int) -> Tensor | None:
        """Positions [R] to keep, ascending; None if all are."""
        if self.keep_rows is None:
            return None
        n = min(self.keep_rows, n_tokens)
        return torch.arange(1, n + 1) * n_tokens // n - 1


@dataclass(frozen=True)
class _Text:
    """A prompt in tokens, with its continuation where that is given."""

    id: str
    prompt_ids: list[int]
    prompt_text: str | None
    given: Continuation | None = None
    form: str | None = None
    kind: str | None = None

    @classmethod
    def of(
        cls, target: Target, prompt: Prompt, g: int, template: Mapping[str, Any] | None
    ) -> _Text:
        ids = target.encode(prompt, template)
        _check_length(target, prompt.id, len(ids), g)
        text = prompt.text if prompt.text is not None else target.decode(ids)
        return cls(prompt.id, ids, text, form=prompt.form, kind=prompt.kind)

    @classmethod
    def like(cls, target: Target, capture: Given, i: int) -> _Text:
        prompt, tokens = capture.prompts[i], capture.tokens(i).tolist()
        target.check_ids(prompt.id, tokens)
        ids, given = tokens[: prompt.n_prompt_tokens], tokens[prompt.n_prompt_tokens :]
        _check_length(target, prompt.id, len(ids), len(given))
        text = prompt.prompt_text if prompt.prompt_text is not None else target.decode(ids)
        made = Continuation(
            given, prompt.ended, origin=prompt.origin, finish_reason=prompt.finish_reason
        )
        return cls(prompt.id, ids, text, made, prompt.form, prompt.kind)


def _check_length(target: Target, name: str, n_prompt: int, n_more: int) -> None:
    limit = target.max_positions
    if limit is not None and n_prompt + n_more > limit:
        raise PromptError(
            f"prompt {name!r} has {n_prompt} tokens and {n_more} are to follow",
            f"at most {limit} in all, the target's positions",
            "shorten it, or lower --max-new-tokens",
        )


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
        for half in work.rglob(".*"):  # a file that was being written when the run was killed
            half.unlink()
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


def _served(
    work: Path,
    server: Server,
    target: Target,
    prompts: Sequence[Prompt],
    texts: Sequence[_Text],
    plan: _Plan,
    request: dict[str, Any],
    *,
    silent: bool,
) -> list[_Text]:
    """Prompts with a server's continuation; those that it could not continue are left out.

    What the capture records about the server goes into ``request``.
    """
    encoded = [t.prompt_ids for t in texts]
    stage: Progress[Any] = progress(len(prompts), "reference", unit="prompt", silent=silent)
    with stage, server:
        answers = _ask(work, server, target, prompts, encoded, plan.max_new_tokens, stage)
    request["reference"] = _reference_facts(work, prompts, answers)
    return [
        replace(text, given=_as_continuation(answer))
        for text, answer in zip(texts, answers, strict=True)
        if not answer.unusable
    ]


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


def _fill(work: Path, target: Target, texts: Sequence[_Text], plan: _Plan, *, silent: bool) -> None:
    """Write the parts of every prompt that has none yet."""
    todo = [i for i in range(len(texts)) if not _Part(work, i).finished()]
    done = len(texts) - len(todo)
    steps = [plan.max_new_tokens if t.given is None else len(t.given.ids) for t in texts]
    total = sum(steps[i] for i in todo)
    alone, size = True, GPU_BATCH if target.device.type == "cuda" else BATCH
    with progress(total, "capture", unit="token", silent=silent) as stage:
        for first in range(0, len(todo), size):
            batch = todo[first : first + size]
            made = _decode(target, [texts[i] for i in batch if texts[i].given is None], plan, stage)
            for i in batch:
                given = texts[i].given
                part, how = _Part(work, i), given or made.pop(0)
                alone = _write_part(part, target, texts[i], how, plan, alone)
                done += 1
                stage.update(len(given.ids) if given else 0, note=f"{done} of {len(texts)} prompts")


def _decode(
    target: Target, texts: Sequence[_Text], plan: _Plan, stage: Progress[Any]
) -> list[Continuation]:
    """Continuations of a batch of prompts."""
    if not texts:
        return []
    g, n = plan.max_new_tokens, len(texts)
    made = greedy(target, [t.prompt_ids for t in texts], g, tick=lambda: stage.update(n))
    # What was not generated because all had ended is done as well.
    stage.update(n * (g - max(len(one.ids) for one in made)))
    return made


def _write_part(
    part: _Part, target: Target, text: _Text, made: Continuation, plan: _Plan, alone: bool
) -> bool:
    """Run the target over one text and keep what it says and the states.

    Parameters
    ----------
    alone
        Whether to decode a text again, by itself, where decoding in a batch looks wrong.

    Returns
    -------
    bool
        Whether that is worth trying for others. Where it does not help, the gap is the target's own
        rounding (large where logits are nearly equal), and each try costs a whole decoding.
    """
    n_prompt = len(text.prompt_ids)
    forced = _forward(part, target, text, made, plan)
    gap = noise = None
    if made.top_logits is not None:
        gap = float(decode_gap(forced, n_prompt, made.ids).max())
        if alone and gap > _TOLERANCE[target.dtype] * float(made.top_logits.abs().max()):
            # This target does not take padding, or its batched kernels differ: decode it alone.
            made, before = greedy(target, [text.prompt_ids], plan.max_new_tokens)[0], gap
            forced = _forward(part, target, text, made, plan)
            gap = float(decode_gap(forced, n_prompt, made.ids).max())
            alone = gap < before / 2
        noise = logit_noise(forced, n_prompt, made)
    elif made.origin != "target":
        gap = float(decode_gap(forced, n_prompt, made.ids).max())
    tokens = [*text.prompt_ids, *made.ids]
    rows = plan.rows(len(tokens))
    positions = range(len(tokens)) if rows is None else rows.tolist()
    frame = _choices(forced, rows)
    frame.insert(0, "prompt", part.index)
    frame.insert(1, "position", positions)
    frame.insert(2, "token", [tokens[t] for t in positions])
    frame.insert(3, "text", [target.decode([tokens[t]]) for t in positions])
    _write_parquet(part.positions, frame)
    row = CapturedPrompt(
        id=text.id,
        n_prompt_tokens=n_prompt,
        n_generated=len(made.ids),
        ended=made.ended,
        logit_noise=noise,
        decode_gap=gap,
        prompt_text=text.prompt_text,
        continuation_text=target.decode(made.ids),
        origin=made.origin,
        finish_reason=made.finish_reason,
        form=text.form,
        kind=text.kind,
    )
    write_json(part.row, {**asdict(row), "states_sha256": sha256_file(part.states)})
    return alone


def _forward(part: _Part, target: Target, text: _Text, made: Continuation, plan: _Plan) -> Forced:
    """Run the target over one text, and write its states as they come."""
    tokens = [*text.prompt_ids, *made.ids]
    layer_ids, rows = plan.layers(part.index), plan.rows(len(tokens))
    first = {"tokens": torch.tensor(tokens)} | ({} if rows is None else {"rows": rows})
    files: list[TensorFile] = []
    with atomic_file(part.states) as file:

        def begin(states: dict[str, Tensor]) -> None:
            layout = {name: (t.dtype, tuple(t.shape)) for name, t in (first | states).items()}
            files.append(TensorFile(file, layout, {"id": text.id}))
            for name, tensor in first.items():
                files[0].put(name, tensor)

        def take(layer_id: int, states: Tensor) -> None:
            if not files:
                begin(dict.fromkeys(map(layer_key, layer_ids), states))
            files[0].put(layer_key(layer_id), states)

        forced = teacher_forced(target, tokens, layer_ids, rows=rows, sink=take)
        if not files:
            begin({})
        files[0].check()
    return forced


@torch.inference_mode()
def _choices(forced: Forced, rows: Tensor | None) -> Any:
    """Top choices, margin and entropy of the kept positions, as a frame with a row for each."""
    import pandas as pd

    columns: dict[str, list[Any]] = {
        name: [] for name in ("top_ids", "top_logprobs", "top_logit", "margin", "entropy")
    }
    for logits in forced.logits(rows):
        scores = logits.float()
        norm = scores.logsumexp(-1, keepdim=True)
        best, ids = scores.topk(min(TOP, scores.shape[-1]))
        # The last use of the scores, so in place; a masked word's 0 x -inf counts as 0.
        logprobs = scores.sub_(norm).clamp_(min=torch.finfo(torch.float32).min)
        entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        columns["top_ids"] += list(ids.int().cpu().numpy())
        columns["top_logprobs"] += list((best - norm).cpu().numpy())
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
    modules = {"embedding": parts.embedding, "final_norm": parts.final_norm}
    if not parts.tied:
        modules["head"] = parts.head
    names = {}
    for name, module in modules.items():
        content = save({"weight": weight_of(module).cpu().contiguous()})
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


_TEXT_COLUMNS = (
    "id",
    "prompt_text",
    "continuation_text",
    "origin",
    "finish_reason",
    "form",
    "kind",
)


def _finish(work: Path, n_prompts: int, facts: dict[str, Any]) -> None:
    """Join the parts into tables, and seal the folder with its manifest."""
    import pandas as pd

    parts = [_Part(work, i) for i in range(n_prompts)]
    rows = [read_json(part.row) for part in parts]
    frame = pd.DataFrame(rows).drop(columns="states_sha256")
    kinds = dict.fromkeys(_TEXT_COLUMNS, "string")
    kinds |= dict.fromkeys(("logit_noise", "decode_gap"), "float64")
    _write_parquet(work / "prompts.parquet", frame.astype(kinds))
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
