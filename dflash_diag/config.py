"""What a run is told: one list of parameters for the command line and the notebooks."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer

from dflash_diag import paths, storage
from dflash_diag.errors import BadInput
from dflash_diag.example import EXAMPLE, EXAMPLES, Example
from dflash_diag.servers import TIMEOUT_S, bare_url
from dflash_diag.stats import DRAWS

PATHS = (
    "drafter",
    "reference",
    "capture",
    "served_output",
    "training_log",
    "training_sequences",
    "history",
)
"""Fields that name a file or a folder."""
_WORD = "(auto|fla|torch|chunked|recurrent|causal-conv1d|torch-conv)"
"""A word of ``--backend``; `dflash_diag.backends.Wish` reads them."""

NEW_TOKENS = 128
"""G where nobody says otherwise."""


class RunConfig(BaseModel):
    """Every parameter of a run: the command line's options and the notebooks' are these fields.

    An empty string stands for "not given".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    example: Literal["", "hybrid", "smollm2"] = Field(
        "", description="embedded example that is meant where nothing is named; hybrid by default"
    )
    target: str = Field("", description="folder of the target, its .gguf file, or its hub id")
    drafter: str = Field("", description="checkpoint to judge")
    reference: str = Field("", description="checkpoint to compare with")
    prompts: str = Field("", description="JSONL file of prompts")
    max_new_tokens: int = Field(0, ge=0, description="G; 0 is the default")
    capture: str = Field("", description="capture to use; no target is needed then")
    against: str = Field("", description="captures, or BACKEND/DTYPE, to compare states with")
    prompt: str = Field("", description="prompt whose modules are compared; the first by default")
    like: str = Field("", description="capture whose tokens a new one takes")
    overrides: tuple[str, ...] = Field((), description="field=value of the convention")
    lossless_prompts: int = Field(0, ge=0, description="prompts that are decoded; 0: all")
    served_output: str = Field("", description="a server's output to check")
    claims: tuple[str, ...] = Field((), description="NAME=VALUE that a dashboard showed")
    training_log: str = Field("", description="log of the training, whose numbers are claims")
    training_sequences: str = Field("", description="texts that it trained on, to measure again")
    training_rows: int = Field(0, ge=0, description="texts of each split; 0: 32")
    trained_states: str = Field(
        "",
        pattern=rf"^({_WORD}(\+{_WORD})*/(float32|bfloat16|float16))?$",
        description="BACKEND/DTYPE with which training computed the target's states",
    )
    step: str = Field("", description="FILE.py:FUNC, one training step to audit")
    beside: tuple[str, ...] = Field((), description="further drafters or runs to compare with")
    history: str = Field("", description="history.parquet of a watched folder, for the trend")
    server: str = Field("", repr=False, description="address of a server that continues prompts")
    server_model: str = Field("", description="name of the model there")
    server_timeout: float = Field(
        TIMEOUT_S, gt=0, allow_inf_nan=False, description="seconds for one prompt"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="for the chat template")
    render: tuple[str, ...] = Field((), description="other renderings to price: off, system=TEXT")
    layers: Literal["taps", "around", "all"] = "around"
    device: str = Field("auto", pattern=r"^(auto|cpu|split|cuda(:\d+)?)$")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    backend: str = Field("auto", pattern=rf"^{_WORD}(\+{_WORD})*$")
    compiled: bool = Field(False, description="compile the drafter's layers on a GPU")
    seed: int = Field(0, ge=0, description="of the resampling")
    draws: int = Field(DRAWS, ge=200, description="resamples behind an interval")
    out: str = Field("", description="folder of the run")

    @field_serializer("server")
    def _no_password(self, server: str) -> str:
        """What is written down of an address has no password and no key in it."""
        return bare_url(server) if server else ""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """A configuration from options or parameters; JSON text may stand for an object.

        Raises
        ------
        BadInput
            An unknown name, or a value that the field cannot take.
        """
        known = dict(values)
        text = known.get("chat_template_kwargs")
        if isinstance(text, str):
            known["chat_template_kwargs"] = _json_object(text)
        try:
            made = cls(**known)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "the configuration"
            option = _OPTIONS.get(name.split(".")[0], f"--{name.replace('_', '-')}")
            if first["type"] == "extra_forbidden":
                raise BadInput(
                    f"unknown parameter {name}", f"one of {', '.join(cls.model_fields)}"
                ) from error
            found = f"{option} {first['input']}"
            expected = first["msg"].removeprefix("Input should be ")
            if first["type"] == "string_pattern_mismatch":
                expected = _PATTERNS[name]
            raise BadInput(found, expected) from error
        if made.server:
            bare_url(made.server)
        return made

    @classmethod
    def from_notebook(cls, names: Mapping[str, Any]) -> Self:
        """A configuration from a notebook's globals: its parameters, and more under ``options``.

        Raises
        ------
        BadInput
            A parameter was passed that there is not: papermill only logs that, and would go on with
            another drafter than was meant.
        """
        unknown = _injected(names) - {*cls.model_fields, "options"}
        if unknown:
            raise BadInput(
                f"unknown parameter {', '.join(sorted(unknown))}",
                f"options, or one of {', '.join(cls.model_fields)}",
            )
        given = {k: names[k] for k in cls.model_fields if k in names}
        return cls.read({**given, **names.get("options", {})})

    @property
    def is_example(self) -> bool:
        """Whether nothing was named, so that an embedded example is meant."""
        return not (self.target or self.drafter or self.prompts or self.capture)

    @property
    def embedded(self) -> Example:
        """The embedded example that is meant where nothing is named."""
        return EXAMPLES[self.example] if self.example else EXAMPLE

    def resolved(
        self, *, needs_drafter: bool = True, needs_prompts: bool = True, brief: bool = False
    ) -> RunConfig:
        """The same with paths made absolute and the embedded example filled in.

        Parameters
        ----------
        needs_drafter
            Whether nothing can be done without one.
        needs_prompts
            Whether training texts cannot stand for prompts.
        brief
            Leave out of the example what takes long and names no cause: measuring the training
            again, and states that would be computed anew.

        Raises
        ------
        BadInput
            Something needed was not given.
        """
        filled = self
        if self.capture and self.server:
            raise BadInput(
                "both --capture and --server",
                "a capture, which has its text already, or a server that is to write it",
            )
        if self.example and not self.is_example:
            raise BadInput(
                f"both --example {self.example} and inputs of your own",
                "one of them: an example brings its own target, drafter and prompts",
            )
        if self.is_example:
            data, example = paths.data_dir(), self.embedded
            filled = self.model_copy(
                update={
                    "target": str(example.part(example.target)),
                    "drafter": str(example.part(example.drafter)),
                    "reference": self.reference or example.optional(example.reference),
                    "prompts": ",".join(str(data / name) for name, _ in example.prompts),
                    "max_new_tokens": self.max_new_tokens or example.max_new_tokens,
                    "against": self.against or example.against_specs(live=not brief),
                    "training_sequences": self.training_sequences
                    or ("" if brief else example.optional(example.training_sequences)),
                    "training_rows": self.training_rows or example.training_rows,
                    "training_log": self.training_log or example.optional(example.training_log),
                    "step": self.step or example.step_spec(),
                    "lossless_prompts": self.lossless_prompts or example.lossless_prompts,
                    "render": self.render or (() if brief else example.render),
                }
            )
        elif needs_drafter and not self.drafter:
            raise BadInput("no drafter is named", do="give --drafter")
        elif not self.capture and not (
            self.target and (self.prompts or (self.training_sequences and not needs_prompts))
        ):
            lacking = [n for n in ("target", "prompts") if not getattr(self, n)]
            raise BadInput(
                f"no {' and no '.join(lacking)}",
                "a target with prompts, or a capture",
                "give --target and --prompts, or --capture",
            )
        update: dict[str, Any] = {
            name: str(Path(getattr(filled, name)).expanduser().resolve())
            for name in PATHS
            if getattr(filled, name)
        }
        if filled.step:
            file, colon, function = filled.step.rpartition(":")
            path = Path(file).expanduser()
            if not (colon and function.isidentifier() and path.is_file()):
                raise BadInput(f"--step {filled.step}", "FILE.py:FUNC, a function in a file")
            update["step"] = f"{path.resolve()}:{function}"
        if Path(filled.target).expanduser().exists() and filled.target:
            update["target"] = str(Path(filled.target).expanduser().resolve())
        if filled.prompts and not self.is_example:
            update["prompts"] = str(Path(filled.prompts).expanduser().resolve())
        update["beside"] = tuple(str(Path(p).expanduser().resolve()) for p in filled.beside)
        update["against"] = ",".join(map(_absolute, filter(None, filled.against.split(","))))
        update["max_new_tokens"] = filled.max_new_tokens or NEW_TOKENS
        filled = filled.model_copy(update=update)
        named = Path(self.out).expanduser() if self.out else self.default_out()
        out = named.resolve()
        return filled.model_copy(update={"out": str(out)})

    def default_out(self) -> Path:
        """A folder that the same command, and a notebook with the same parameters, names again."""
        root = (paths.checkout() or Path.cwd()) / "out"
        if self.is_example:
            return root / ("example" if self.embedded is EXAMPLE else f"example-{self.example}")
        content = self.model_dump(mode="json", exclude={"out", "seed", "draws", "server_timeout"})
        name = Path(self.drafter or self.target).name or "run"
        return root / f"{name}-{storage.content_key(content)[:8]}"


def _injected(names: Mapping[str, Any]) -> set[str]:
    """What papermill has assigned: the cells that it adds begin with a comment of its own."""
    found: set[str] = set()
    for cell in names.get("In", ()):
        if not cell.startswith("# Parameters\n"):
            continue
        with suppress(SyntaxError):  # a magic: somebody's own cell, since papermill adds none
            assigned = [one for one in ast.parse(cell).body if isinstance(one, ast.Assign)]
            targets = [target for one in assigned for target in one.targets]
            found |= {one.id for one in targets if isinstance(one, ast.Name)}
    return found


def _absolute(spec: str) -> str:
    """A capture's folder made absolute; a backend and dtype as they are."""
    path = Path(spec.strip()).expanduser()
    return str(path.resolve()) if path.exists() else spec.strip()


_OPTIONS = {"overrides": "--set", "claims": "--claim", "compiled": "--compile"}
"""Options that are not called like their field."""
_PATTERNS = {
    "device": "auto, cpu, cuda, cuda:N or split",
    "trained_states": "a backend and a dtype, such as fla/bfloat16",
    "backend": "auto, fla or torch, with +chunked, +recurrent, +causal-conv1d or +torch-conv",
}
"""What a field with a pattern takes, in words."""


def _json_object(text: str) -> dict[str, Any]:
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise BadInput(f"--chat-template-kwargs {text}", f"a JSON object ({why})") from error
    if not isinstance(value, dict):
        raise BadInput(f"--chat-template-kwargs {text}", "a JSON object")
    return value
