"""One run: a configuration, a folder, and everything in it computed once.

::

    OUT/run.json                      the configuration
    OUT/captures/KEY/                 what the target did (unless --capture names one)
    OUT/scores/KEY/                   scores and metrics of one drafter
    OUT/static/KEY.json               what one drafter's files say without being scored
    OUT/lossless/KEY.json             outcome of the lossless check
    OUT/divergence/KEY.json           comparison with another backend, dtype or capture
    OUT/state_checks/KEY.json         audit of the hidden states
    OUT/influence/KEY.json            what one drafter's proposals depend on
    OUT/gap/KEY.json                  the training measurement again, and its way to serving
    OUT/audit/KEY.json                what the training step does
    OUT/compare/KEY.json              drafters and other runs, paired by prompt
    OUT/results/ID/                   one diagnostic's result
    OUT/notebooks/*.ipynb             executed copies
    OUT/index.html, *.html            the report
    OUT/summary.json, junit.xml       the same for programs

A KEY is a hash of what the content depends on. What is there under its key is read, never computed
again, so an interrupted run goes on where it stopped and a notebook only loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_diag import diagnostics, storage, weight_files
from dflash_diag.compare_runs import beside_key, check_beside, is_run
from dflash_diag.config import NEW_TOKENS, RunConfig
from dflash_diag.diagnostics.base import DRAFTER, REFERENCE, Continuation, Skip
from dflash_diag.diagnostics.reference import doubt, doubted
from dflash_diag.errors import BadInput, CaptureError, CheckpointError, DiagError
from dflash_diag.gguf_file import in_gguf
from dflash_diag.progress import progress
from dflash_diag.prompts import Prompt, read_prompts
from dflash_diag.results import Result, Verdict, worst
from dflash_diag.state_runs import StateRun
from dflash_diag.target_config import read_target_config

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from dflash_diag.capture import Capture
    from dflash_diag.checkpoints import Checkpoint, TensorProblem
    from dflash_diag.claims import Line
    from dflash_diag.conventions import Convention
    from dflash_diag.decoding import Lossless, Mismatch
    from dflash_diag.drafter import Drafter
    from dflash_diag.gap_runs import GapRun
    from dflash_diag.influence import Influence
    from dflash_diag.scoring import Scores
    from dflash_diag.servers import Server
    from dflash_diag.strata import Text
    from dflash_diag.targets import Target
    from dflash_diag.training_audit import Audit, Step

T = TypeVar("T")

SCORE_RESULTS = (
    "target.lossless",
    "target.served",
    "target.reference",
    "acceptance.headline",
    "acceptance.comparison",
)
"""Diagnostics that the verb score looks at."""
FAIL_ON: Mapping[str, frozenset[Verdict]] = {
    "none": frozenset(),
    "warn": frozenset({Verdict.WARN, Verdict.FAIL, Verdict.ERROR}),
    "fail": frozenset({Verdict.FAIL, Verdict.ERROR}),
}
"""Verdicts at which ``--fail-on`` makes the exit code 1."""


BESIDE = "beside"
"""How the roles of further drafters begin: ``beside/0``."""
COMPARE = "compare."
"""How the ids of the diagnostics begin that look at them."""


def spread(items: Sequence[T], most: int) -> Sequence[T]:
    """At most so many of some items, evenly spread over them."""
    if len(items) <= most:
        return items
    return [items[i * len(items) // most] for i in range(most)]


def fail_on(limit: str) -> frozenset[Verdict]:
    """Verdicts that ``--fail-on`` names.

    Raises
    ------
    BadInput
        Not one of ``none``, ``warn``, ``fail``.
    """
    if limit not in FAIL_ON:
        raise BadInput(f"--fail-on {limit}", f"one of {', '.join(FAIL_ON)}")
    return FAIL_ON[limit]


@dataclass(frozen=True, eq=False)
class Reading:
    """A drafter's checkpoint, the convention under which it is read, and its audit."""

    name: str
    checkpoint: Checkpoint
    convention: Convention
    problems: Sequence[TensorProblem]

    @classmethod
    def read(cls, path: str, settings: Sequence[str] = ()) -> Reading:
        """Open a checkpoint; its weights are not read yet."""
        from dflash_diag.checkpoints import audit, read_checkpoint, resolve_convention

        checkpoint = read_checkpoint(path)
        convention = resolve_convention(checkpoint, settings=settings)
        problems = audit(checkpoint, convention=convention)
        return cls(_label(Path(path)), checkpoint, convention, problems)

    def check(self, target: Mapping[str, Any]) -> None:
        """Refuse what the target at hand cannot have; facts that are unknown are not checked."""
        from dflash_diag.checkpoints import TargetFacts, check_against_target

        sizes = ("hidden_size", "vocab_size", "n_layers")
        if any(target.get(name) is None for name in sizes):
            return
        facts = TargetFacts(**{name: int(target[name]) for name in sizes})
        check_against_target(self.checkpoint, self.convention, facts)


def _label(path: Path) -> str:
    """What a checkpoint is called: its folder, or its file without the suffix."""
    return path.stem if path.suffix in weight_files.SUFFIXES else path.name


def _declared_facts(target: str) -> dict[str, Any]:
    """Sizes as a target's folder or GGUF file states them; empty for a hub id."""
    if not target or not (in_gguf(target) or (Path(target) / "config.json").is_file()):
        return {}
    config = read_target_config(target)
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "n_layers": config.num_hidden_layers,
    }


def _server(config: RunConfig) -> Server | None:
    """The server that continues the prompts, if one was named."""
    from dflash_diag.servers import Server

    if not config.server:
        return None
    return Server(
        config.server, model=config.server_model, timeout=config.server_timeout, seed=config.seed
    )


def _or_none(get: Callable[[], T]) -> T | None:
    """What ``get`` returns, or None where the capture does not hold it."""
    try:
        return get()
    except CaptureError:
        return None


def lines_of(config: RunConfig) -> list[Line]:
    """Numbers that were claimed, typed in or logged.

    Raises
    ------
    BadInput
        A claim or a log that cannot be read.
    """
    from dflash_diag.claims import read_claims, read_log

    lines = read_claims(config.claims)
    if config.training_log:
        from dflash_diag.training_logs import read_training_log

        lines += read_log(read_training_log(config.training_log))
    return lines


def capture_only(config: RunConfig) -> Capture:
    """What the verb capture does: run the target and keep the bundle.

    Raises
    ------
    BadInput
        No target, no prompts and no capture to be like, or one of them cannot be used.
    """
    from dflash_diag.bundle import Capture
    from dflash_diag.capture import make_capture

    if not config.target:
        raise BadInput("no target", do="give --target")
    if not (config.prompts or config.like):
        raise BadInput("no prompts", do="give --prompts, or --like with a capture")
    others = {
        "--prompts": config.prompts,
        "--max-new-tokens": config.max_new_tokens,
        "--server": config.server,
    }
    other = next((name for name, value in others.items() if value), None)
    if config.like and other:
        raise BadInput(
            f"--like and {other}", "one of the two: a capture's tokens are what they are"
        )
    like = Capture.load(config.like) if config.like else None
    prompts = read_prompts(config.prompts) if like is None else []
    taps: set[int] = set()
    beside = (one for one in config.beside if not is_run(one))
    for path in filter(None, (config.drafter, config.reference, *beside)):
        reading = Reading.read(path)
        reading.check(_declared_facts(config.target))
        taps |= set(reading.convention.taps)
    content = config.model_dump(mode="json", exclude={"out", "server_timeout"})
    default = f"captures/{Path(config.target).name}-{storage.content_key(content)[:8]}"
    return make_capture(
        config.target,
        prompts,
        config.out or default,
        max_new_tokens=None if like else config.max_new_tokens or NEW_TOKENS,
        like=like,
        layers=config.layers,
        taps=sorted(taps) or None,
        dtype=config.dtype,
        device=config.device,
        backend=config.backend,
        chat_template_kwargs=config.chat_template_kwargs,
        reference=_server(config),
    )


def judge_text(config: RunConfig, capture: Capture) -> Result | None:
    """Whether a capture's text, if a server wrote it, is the target's own; nothing is kept."""
    if capture.reference is None:
        return None
    run = Run(config, [], config)
    run.capture = capture  # it was just made, so that its hashes need no check
    return diagnostics.get("target.reference")(run)


class Answer(str):
    """A sentence that notebooks show as text rather than in quotes."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<p class="answer">{escape(self)}</p>'


class Run:
    """A run's inputs and results; implements `dflash_diag.diagnostics.Inputs`."""

    def __init__(self, config: RunConfig, prompts: Sequence[Prompt], given: RunConfig) -> None:
        self.config, self.given, self.prompts = config, given, list(prompts)
        self.seed, self.draws = config.seed, config.draws
        self.out = Path(config.out)
        self._readings: dict[str, Reading] = {}
        self._results: dict[str, Result] = {}
        self._metrics: dict[str, dict[str, Any]] = {}
        self._scores: dict[str, Scores] = {}
        self._alignment: Mapping[str, Any] = {}
        self._doctor: Mapping[str, Any] | None = None
        self._claimed: list[Line] | None = None
        self._comparison: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        names = " beside ".join(self.name(role) for role in self.roles)
        return f"{names}, on {self.target_name}" if names else self.target_name

    def _repr_html_(self) -> str:
        return f'<p class="kicker">{escape(repr(self))}</p>'

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        strict: bool = True,
        needs_drafter: bool = True,
        needs_prompts: bool = True,
        brief: bool = False,
    ) -> Run:
        """Check every input that can be checked without the target's weights; write nothing.

        Parameters
        ----------
        strict
            Refuse a drafter whose tensors are not those of its configuration.
        needs_drafter
            Whether nothing can be done without one.
        needs_prompts
            Whether training texts cannot stand for prompts.
        brief
            Leave out of the example what takes long and names no cause.

        Raises
        ------
        BadInput
            Something given cannot be used.
        """
        resolved = config.resolved(
            needs_drafter=needs_drafter, needs_prompts=needs_prompts, brief=brief
        )
        if resolved.device.startswith("cuda"):
            from dflash_diag.targets import resolve_device

            resolve_device(resolved.device)
        if resolved.training_sequences:
            from dflash_diag.training_sequences import check_ids, read_training_sequences

            texts = read_training_sequences(resolved.training_sequences)
            check_ids(texts, _declared_facts(resolved.target).get("vocab_size"))
        if resolved.served_output:
            from dflash_diag.references import read_served

            read_served(resolved.served_output)
        prompts = []
        if config.is_example:
            prompts = config.embedded.read_prompts()
        elif resolved.prompts and not resolved.capture:
            prompts = read_prompts(resolved.prompts)
        run = cls(resolved, prompts, config)
        run.claimed()
        check_beside(resolved)
        for role in (*run.roles, *run.others):
            reading = run.reading(role)
            if strict and reading.problems:
                others = len(reading.problems) - 1
                raise CheckpointError(
                    f"{reading.name}: {reading.problems[0]}"
                    + (f", and {others} more" if others else ""),
                    "the tensors that its configuration names",
                )
            reading.check(_declared_facts(resolved.target))
            run._check_length(reading)
        if resolved.capture:
            _ = run.capture
        _ = run.states.sides
        return run

    def _check_length(self, reading: Reading) -> None:
        """Refuse a G that leaves no complete block, before anything is computed."""
        if self.config.capture:
            return
        g, d = self.config.max_new_tokens, reading.convention.n_proposed
        if g <= d:
            raise BadInput(
                f"--max-new-tokens {g} is too short for one complete block",
                f"more than the {d} tokens that {reading.name} proposes",
            )

    # --- inputs -----------------------------------------------------------------------------------

    @property
    def roles(self) -> list[str]:
        return [role for role in (DRAFTER, REFERENCE) if getattr(self.config, role)]

    @property
    def others(self) -> list[str]:
        """Roles of further checkpoints that the comparison takes in, in their order."""
        beside = enumerate(self.config.beside)
        return [f"{BESIDE}/{index}" for index, path in beside if not is_run(path)]

    def path(self, role: str) -> str:
        """Where a drafter's checkpoint is."""
        kind, _, index = role.partition("/")
        return self.config.beside[int(index)] if kind == BESIDE else getattr(self.config, role)

    def reading(self, role: str) -> Reading:
        """A drafter's checkpoint with the convention under which it is read."""
        if role not in self._readings:
            path = self.path(role)
            settings = self.config.overrides if role == DRAFTER else ()
            self._readings[role] = Reading.read(path, settings)
        return self._readings[role]

    def name(self, role: str) -> str:
        """The checkpoint's folder, with its parent where two are called the same."""
        own = Path(self.path(role))
        others = [Path(self.path(r)) for r in (*self.roles, *self.others) if r != role]
        same = any(_label(own) == _label(other) and own != other for other in others)
        return f"{own.parent.name}/{_label(own)}" if same else _label(own)

    def step_of(self, role: str) -> int | None:
        """The training step of a drafter's checkpoint, where something tells it."""
        from dflash_diag.checkpoints.training_step import training_step

        return training_step(self.checkpoint(role))

    @property
    def target_name(self) -> str:
        """What the target is called."""
        if self.config.target:
            path = Path(self.config.target)
            generic = path.name in ("target", "model", "base")
            return f"{path.parent.name}/{path.name}" if generic and path.exists() else path.name
        return str(self.capture.target_facts.get("source", "target"))

    def checkpoint(self, role: str) -> Checkpoint:
        return self.reading(role).checkpoint

    def problems(self, role: str) -> Sequence[TensorProblem]:
        return self.reading(role).problems

    def convention(self, role: str) -> Convention:
        return self.reading(role).convention

    @cached_property
    def capture(self) -> Capture:
        """The capture: the one named, the one made before, or a new one.

        Raises
        ------
        CaptureError
            It is damaged, or of another target.
        CheckpointError
            A drafter declares what this target cannot have.
        """
        from dflash_diag.bundle import Capture

        if self.config.capture:
            found = Capture.load(self.config.capture, target=self.config.target or None)
        else:
            folder = self.out / "captures" / self.capture_key[:12]
            if not (folder / "manifest.json").is_file():
                self._make_capture(folder)
            # Hashed whole before it is scored; showing results should not wait for that.
            found = Capture.load(folder, verify=False)
        for role in (*self.roles, *self.others):
            self.reading(role).check(found.target_facts)
        return found

    def _make_capture(self, folder: Path) -> None:
        from dflash_diag.capture import make_capture

        make_capture(
            self.target,
            self.prompts,
            folder,
            max_new_tokens=self.config.max_new_tokens,
            layers=self.config.layers,
            taps=self.taps or None,
            chat_template_kwargs=self.config.chat_template_kwargs,
            reference=_server(self.config),
        )

    @property
    def taps(self) -> list[int]:
        """Layers that some drafter of the run reads."""
        roles = (*self.roles, *self.others)
        return sorted({tap for role in roles for tap in self.convention(role).taps})

    @cached_property
    def target(self) -> Target:
        """The target, loaded.

        Raises
        ------
        BadInput
            It cannot be loaded.
        """
        from dflash_diag.targets import load_target

        return load_target(
            self.config.target,
            device=self.config.device,
            dtype=self.config.dtype,
            backend=self.config.backend,
        )

    @cached_property
    def capture_key(self) -> str:
        """What a capture that the run would make depends on."""
        from dflash_diag.targets import fingerprint

        folder, server = Path(self.config.target), _server(self.config)
        return storage.content_key(
            "capture/1",
            *([server.identity()] if server else []),
            fingerprint(folder) if folder.exists() else self.config.target,
            [prompt.to_json() for prompt in self.prompts],
            self.taps,
            self.config.model_dump(
                mode="json",
                include={"max_new_tokens", "layers", "device", "dtype", "backend"}
                | {"chat_template_kwargs"},
            ),
        )

    @cached_property
    def capture_digest(self) -> str:
        """Hash of what the capture holds."""
        return self.digest_of(self.capture)

    @cached_property
    def text_digest(self) -> str:
        """Hash of the prompts and of what the target made of them: equal text can be compared."""
        from dflash_diag.compare import text_digest

        capture = self.capture
        return text_digest(
            (one.id, one.n_prompt_tokens, capture.tokens(i).tolist())
            for i, one in enumerate(capture.prompts)
        )

    @staticmethod
    def digest_of(capture: Capture) -> str:
        """Hash of what a capture holds."""
        path = capture.path
        files = [path / "manifest.json"] if path.is_dir() else [path]
        if path.is_dir() and not files[0].is_file():
            files = list(capture.sequence_files)
        return storage.content_key([storage.sha256_file(file) for file in files])

    # --- measured -----------------------------------------------------------------------------

    def static(self, role: str) -> Sequence[Mapping[str, Any]]:
        path = self.out / "static" / f"{self._static_key(role)[:12]}.json"
        if not path.is_file():
            storage.write_json(path, self._audit_static(role))
        found: Sequence[Mapping[str, Any]] = storage.read_json(path)
        return found

    def _audit_static(self, role: str) -> list[dict[str, Any]]:
        from dflash_diag import static_audit

        reading, capture = self.reading(role), self.capture
        drafter, why = None, ""
        try:
            drafter = self.drafter(role, strict=False)
        except CheckpointError as error:
            why = str(error)
        tokenizer = None
        if self.config.target:
            from dflash_diag.targets import load_tokenizer

            found = load_tokenizer(self.config.target)
            tokenizer = None if found is None else static_audit.TokenizerFacts.of(found)
        material = static_audit.Material(
            checkpoint=reading.checkpoint,
            convention=reading.convention,
            problems=reading.problems,
            drafter=drafter,
            unloadable=why,
            sample=_or_none(lambda: static_audit.captured_sample(capture, reading.convention)),
            target=capture.target_facts,
            embedding=_or_none(lambda: capture.embedding),
            head=_or_none(lambda: capture.head),
            tokenizer=tokenizer,
            texts=[capture.tokens(i) for i in range(len(capture))],
        )
        return [one.to_json() for one in static_audit.audit_static(material)]

    def _static_key(self, role: str) -> str:
        from dflash_diag.static_audit import beside

        checkpoint = self.checkpoint(role)
        return storage.content_key(
            "static/1",
            self.score_key(role),
            self.config.target,
            checkpoint.config,
            checkpoint.training_args,
            beside(checkpoint),
        )

    def scores(self, role: str) -> Scores:
        """Scores of one drafter, computed if they are not there."""
        if role not in self._scores:
            self._scores[role] = self.scores_on(self.capture, role)
        return self._scores[role]

    def scores_on(self, capture: Capture, role: str) -> Scores:
        """Scores of one drafter on another capture of the target."""
        from dflash_diag.scoring import Scores

        folder = self.scores_folder(role, self.digest_of(capture))
        if not folder.is_dir():
            with storage.staged_dir(folder) as stage:
                self._score(capture, role).save(stage)
        return Scores.load(folder)

    def scores_folder(self, role: str, digest: str = "") -> Path:
        """Where the scores of a drafter on the run's capture, or on another one, are kept."""
        return self.out / "scores" / self.score_key(role, digest)[:12]

    def _score(self, capture: Capture, role: str) -> Scores:
        from dflash_diag.bundle import Capture
        from dflash_diag.scoring import score

        Capture.load(capture.path, target=self.config.target or None)
        return score(capture, self.drafter(role), compiled=self.config.compiled)

    def drafter(
        self, role: str, *, strict: bool = True, dtype: torch.dtype | None = None
    ) -> Drafter:
        """A drafter, loaded under its convention; ``strict`` as in `load_drafter`.

        Without ``dtype`` it is the run's: float32 on a CPU unless another was given.
        """
        import torch

        from dflash_diag.checkpoints import load_drafter
        from dflash_diag.targets import DTYPES, resolve_device

        device = resolve_device(self.config.device)
        usual = DTYPES.get(self.config.dtype) or (torch.float32 if device.type == "cpu" else None)
        return load_drafter(
            self.checkpoint(role),
            self.convention(role),
            dtype=dtype or usual,
            device=device,
            strict=strict,
        )

    def score_key(self, role: str, digest: str = "") -> str:
        """What the scores of a drafter depend on."""
        return storage.content_key(
            "scores/1",
            digest or self.capture_digest,
            self.checkpoint(role).weights_sha256,
            {k: v["value"] for k, v in self.convention(role).to_json().items()},
            self.config.device,
            self.config.dtype,
        )

    def metrics(self, role: str) -> Mapping[str, Any]:
        """What ``score --json`` writes for one drafter."""
        from dflash_diag import metrics

        if role not in self._metrics:
            checked = self._lossless_or_none()
            counts = None if checked is None else {k: checked[k] for k in ("checked", "ok")}
            found = metrics.score_json(
                self.scores(role), seed=self.seed, draws=self.draws, lossless=counts
            )
            text = doubted(self)
            if text is not None:
                found["notes"] += [f"{doubt(text)} Accepted means equal to that text."]
            found["notes"] += self._contradictions(role)
            self._metrics[role] = found
        return self._metrics[role]

    def _contradictions(self, role: str) -> list[str]:
        """Keys of a checkpoint that contradict each other and that no setting overrides."""
        from dflash_diag.checkpoints import contradictions

        given = {text.partition("=")[0].strip() for text in self.config.overrides}
        given = given if role == DRAFTER else set()
        found = contradictions(self.checkpoint(role))
        return [
            f"The configuration contradicts itself: {c}." for c in found if c.field not in given
        ]

    def lossless(self) -> Mapping[str, Any]:
        outcome = self._lossless_or_none()
        if outcome is None:
            raise Skip(
                "Only a capture is at hand, not its target, so nothing can be decoded with it "
                "(give --target)."
            )
        return outcome

    def _lossless_or_none(self) -> Mapping[str, Any] | None:
        if not self.config.target:
            return None
        return self._lossless

    def served(self) -> Mapping[str, Any] | None:
        if not self.config.served_output:
            return None
        return self._served

    @cached_property
    def _served(self) -> Mapping[str, Any]:
        from dflash_diag.references import check_served, read_served

        outputs = read_served(self.config.served_output)
        tokenizer = None
        if any(one.text is not None for one in outputs) and self.config.target:
            from dflash_diag.targets import load_tokenizer

            tokenizer = load_tokenizer(self.config.target)
        found = check_served(self.capture, outputs, tokenizer=tokenizer)
        return self._compared(found, {one.id for one in outputs})

    def reference(self) -> Mapping[str, Any] | None:
        from dflash_diag.references import check_reference

        return check_reference(self.capture)

    @cached_property
    def _lossless(self) -> Mapping[str, Any]:
        content = ["lossless/2", self.score_key(DRAFTER), self.config.backend]
        limit = self.config.lossless_prompts
        whole, some = (
            self.out / "lossless" / f"{storage.content_key(*content, *more)[:12]}.json"
            for more in ((), (limit,))
        )
        path = some if 0 < limit < len(self.capture) and not whole.is_file() else whole
        if not path.is_file():
            storage.write_json(path, self._check_lossless())
        found: Mapping[str, Any] = storage.read_json(path)
        return found

    def _check_lossless(self) -> dict[str, Any]:
        """Draft and verify prompts with the judged drafter, on the target itself."""
        from dflash_diag.decoding import check_lossless, expect_as_captured
        from dflash_diag.scoring import proposer

        capture, g = self.capture, self.capture.max_new_tokens
        known = expect_as_captured(self.target, capture)
        known = list(spread(known, self.config.lossless_prompts or len(known)))
        with progress(len(known), "lossless check", unit="prompt") as stage:
            found = check_lossless(
                self.target,
                proposer(capture, self.drafter(DRAFTER)),
                known,
                g,
                tick=stage.update,
            )
        return {**self._compared(found, {one.id for one in known}), "rounds": found.rounds}

    def _compared(self, found: Lossless, ids: set[str]) -> dict[str, Any]:
        """A comparison with plain greedy output as one row a prompt."""
        first: dict[str, Mismatch] = {}
        faulty = {m.prompt for m in found.mismatches if m.kind == "state_fault"}
        for mismatch in found.mismatches:
            first.setdefault(mismatch.prompt, mismatch)
        rows = []
        for one in self.capture.prompts:
            if one.id not in ids:
                continue
            at = first.get(one.id)
            cause = "" if at is None else "state_fault" if one.id in faulty else "rounding"
            same = one.n_generated if at is None else at.position - one.n_prompt_tokens
            rows.append(
                {
                    "id": one.id,
                    "n_tokens": one.n_generated,
                    "n_same": same,
                    "cause": cause,
                    "margin": None if at is None else at.margin,
                }
            )
        note = f"Noise floor: {found.noise_floor:.2g} logits ({found.how})."
        return {"checked": found.checked, "ok": found.ok, "rows": rows, "notes": [note]}

    @cached_property
    def states(self) -> StateRun:
        """The hidden-state part of the run."""
        return StateRun(self)

    def sides(self) -> list[str]:
        return list(self.states.sides)

    def divergence(self, side: str) -> Mapping[str, Any]:
        return self.states.divergence(side)

    def side_scores(self, side: str) -> tuple[Scores, Scores]:
        return self.states.scores(side)

    def state_checks(self) -> Mapping[str, Any]:
        return self.states.checks()

    def alignment(self) -> Mapping[str, Any]:
        from dflash_diag.alignment_runs import alignment_of

        if DRAFTER not in self.roles:
            raise Skip("No drafter was given, so there is no convention to look for (--drafter).")
        if not self._alignment:
            self._alignment = alignment_of(self, DRAFTER)
        return self._alignment

    def doctor(self) -> Mapping[str, Any]:
        from dflash_diag.doctor import examine

        if DRAFTER not in self.roles:
            raise Skip("No drafter was given (--drafter).")
        if self._doctor is None:
            self._doctor = examine(self).to_json()
        return self._doctor

    def renderings(self) -> Mapping[str, Any]:
        from dflash_diag.rendering_runs import renderings_of

        return renderings_of(self)

    def replay(self) -> Mapping[str, Any]:
        from dflash_diag.gap_runs import replay_of

        return replay_of(self)

    def gap(self) -> Mapping[str, Any]:
        from dflash_diag.gap_runs import gap_of

        return gap_of(self)

    @cached_property
    def training(self) -> GapRun:
        """The training side of the judged drafter."""
        from dflash_diag.gap_runs import GapRun

        return GapRun(self)

    @cached_property
    def training_key(self) -> str:
        """What measuring the training again depends on."""
        return storage.content_key(
            self.score_key(DRAFTER),
            self.checkpoint(DRAFTER).training_args,
            self.config.target,
            self.config.backend,
            self.config.against,
            self.config.trained_states,
            self.config.training_rows,
            self.states.digests,
            self._given_files,
        )

    def claimed(self) -> list[Line]:
        if self._claimed is None:
            self._claimed = lines_of(self.config)
        return self._claimed

    def compared(self) -> Mapping[str, Any]:
        from dflash_diag.compare_runs import NOTHING, compared_of

        if len(self.roles) + len(self.config.beside) < 2:
            raise Skip(NOTHING)
        if self._comparison is None:
            self._comparison = compared_of(self)
        return self._comparison

    def influence(self, role: str) -> Influence:
        from dflash_diag.influence import Influence

        key = storage.content_key("influence/1", self.score_key(role))
        path = self.out / "influence" / f"{key[:12]}.json"
        if not path.is_file():
            storage.write_json(path, self._probe(role))
        return Influence.from_json(storage.read_json(path))

    def _probe(self, role: str) -> Influence:
        """Try the drafter on the longest text, at its first and its last whole block."""
        from dflash_diag.adapters.builtin import Builtin
        from dflash_diag.influence import probe
        from dflash_diag.scoring import tapped_states

        capture, how = self.capture, self.convention(role)
        if capture.thinned:
            raise Skip("A capture that keeps only some positions cannot be drafted on.")
        lengths = [one.n_prompt_tokens + one.n_generated for one in capture.prompts]
        index = lengths.index(max(lengths))
        first, last = capture.prompts[index].n_prompt_tokens, max(lengths) - how.block_size
        if not 2 <= first <= last:
            raise Skip(f"No text has room for a block of {how.block_size} after two tokens.")
        return probe(
            Builtin.of_capture(capture, self.drafter(role)),
            tapped_states(capture, index, how),
            capture.tokens(index),
            (first, last),
            how,
            seed=self.seed,
        )

    @cached_property
    def step(self) -> Step:
        """The training step; its file is run when this is first asked for.

        Raises
        ------
        BadInput
            It cannot be loaded.
        """
        from dflash_diag.training_audit import load_step

        return load_step(self.config.step)

    def audit(self) -> Audit:
        from dflash_diag.audit_runs import audit_of
        from dflash_diag.diagnostics.training_audit import NO_STEP

        if not self.config.step:
            raise Skip(NO_STEP)
        return audit_of(self)

    def continuations(self) -> list[Continuation]:
        capture = self.capture
        return [
            Continuation(
                prompt.id,
                prompt.n_prompt_tokens,
                capture.continuation(i).tolist(),
                prompt.continuation_text,
                self._pieces(i),
            )
            for i, prompt in enumerate(capture.prompts)
        ]

    def texts(self) -> list[Text]:
        from dflash_diag.strata import texts_of

        return texts_of(self.capture)

    def _pieces(self, i: int) -> list[str] | None:
        """Text of each generated token of prompt ``i``; None where there is no tokenizer."""
        if self.capture.foreign:
            return None
        rows = self.capture.positions(i)
        start, end = self.capture.prompts[i].n_prompt_tokens, len(self.capture.tokens(i))
        texts = rows["text"][rows["position"].between(start, end - 1)].to_list()
        known = len(texts) == end - start and all(isinstance(one, str) for one in texts)
        return texts if known else None

    @cached_property
    def _provenance(self) -> dict[str, Any]:
        from dflash_diag import provenance

        defaults = RunConfig().model_dump(mode="json")
        given = self.given.model_dump(mode="json")
        return provenance.collect(
            given={k: v for k, v in given.items() if v != defaults[k]},
            defaulted={k: v for k, v in given.items() if v == defaults[k]},
            drafters={
                self.name(role): {"files": self.checkpoint(role).files} for role in self.roles
            },
            target=dict(self.capture.target_facts),
            capture=self.capture_digest,
            text=self.text_digest,
            seed=self.seed,
            draws=self.draws,
        )

    def provenance(self) -> Mapping[str, Any]:
        return self._provenance

    # --- results ------------------------------------------------------------------------------

    def result(self, id: str) -> Result:  # noqa: A002 - it is the id
        """One diagnostic's result: read if it is there under the same key, else measured and kept.

        Raises
        ------
        BadInput
            There is no such diagnostic, or something given cannot be used.
        """
        if id not in self._results:
            self._results[id] = self._stored(id) or self._measured(id)
        return self._results[id]

    def _stored(self, id: str) -> Result | None:  # noqa: A002
        folder = self.out / "results" / id
        if not (folder / "result.json").is_file():
            return None
        found = Result.load(folder)
        if found.provenance.get("result_key") != self._result_key(id):
            return None
        try:
            # Thresholds may have moved since; judging again is free.
            return diagnostics.get(id).rejudge(found)
        except Exception as error:  # whatever a table that was changed leads to
            raise BadInput(
                f"{folder} is not what {id} finds ({error})",
                "a result of this version",
                "remove the folder, and it is measured again",
            ) from error

    def _measured(self, id: str) -> Result:  # noqa: A002
        made = diagnostics.get(id)(self)
        made = dataclasses.replace(
            made,
            frame=made.frame,
            provenance={**made.provenance, "result_key": self._result_key(id)},
        )
        if made.verdict is not Verdict.ERROR:
            made.save(self.out / "results" / id)
        return made

    def _result_key(self, id: str) -> str:  # noqa: A002
        return storage.content_key(
            id,
            diagnostics.get(id).version,
            [[role, self.name(role), self._static_key(role)] for role in self.roles],
            self.config.target,
            self.config.served_output,
            self.config.against,
            self.states.digests,
            self.capture_digest,
            self.config.prompt,
            self.config.lossless_prompts,
            self.config.claims,
            self.config.trained_states,
            self.config.training_rows,
            self._given_files,
            self.seed,
            self.draws,
            *([beside_key(self)] if id.startswith(COMPARE) else []),
        )

    @cached_property
    def _given_files(self) -> list[str]:
        """Hashes of the files of training that the run was given."""
        config = self.config
        names = [config.training_log, config.training_sequences, config.step.rpartition(":")[0]]
        found = [config.step.rpartition(":")[2]]
        for path in map(Path, filter(None, names)):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            found += [storage.sha256_file(one) for one in files if one.is_file()]
        return found

    def results(self) -> list[Result]:
        """Every diagnostic's result, in the registry's order."""
        return [self.result(one) for one in diagnostics.catalogue()]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes of this machine out of the folder.

        Raises
        ------
        OutputError
            Another process is at work in it.
        """
        with storage.kept_alone(self.out):
            yield

    def table(self, *ids: str) -> pd.DataFrame:
        """Verdict, question and answer of some diagnostics, or of all."""
        import pandas as pd

        found = [self.result(one) for one in ids or diagnostics.catalogue()]
        return pd.DataFrame(
            {
                "verdict": [f"{one.verdict.glyph} {one.verdict.name}" for one in found],
                "question": [one.question for one in found],
                "answer": [one.headline for one in found],
            }
        )

    def answer(self, id: str) -> Answer:  # noqa: A002
        """The sentence that answers a diagnostic's question."""
        found = self.result(id)
        return Answer(f"{found.verdict.glyph} {found.verdict.name}: {found.headline}")

    def compute(self) -> list[Result]:
        """Everything, stage by stage, with progress; what is there already costs nothing."""
        if self.config.step:
            _ = self.step  # a file that cannot be run is told of before anything is computed
        _ = self.capture
        for role in (*self.roles, *self.others):
            self.scores(role)
        if self.config.beside:
            self.compared()  # other text is refused before the rest is computed
        self._lossless_or_none()
        self.states.compute()
        with suppress(Skip, DiagError):  # its diagnostic says why
            self.renderings()  # the training, asked for below, may be measured elsewhere by now
        ids = list(diagnostics.catalogue())
        with progress(len(ids), "diagnostics", unit="question") as stage:
            for one in ids:
                stage.update(0, note=one)
                self.result(one)
                stage.update()
        return self.results()

    def verdict(self, only: Sequence[str] | None = None) -> Verdict:
        """The worst verdict; what was skipped does not count."""
        ids = list(diagnostics.catalogue()) if only is None else only
        found = [self.result(one).verdict for one in ids]
        return worst([one for one in found if one is not Verdict.SKIPPED])

    def having(
        self, verdicts: Container[Verdict], only: Sequence[str] | None = None
    ) -> list[Result]:
        """Results that have one of some verdicts."""
        ids = list(diagnostics.catalogue()) if only is None else only
        found = [self.result(one) for one in ids]
        return [one for one in found if one.verdict in verdicts]
