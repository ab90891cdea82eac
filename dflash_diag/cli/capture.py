"""The verb ``capture``."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_diag.cli.options import (
    DONE,
    INPUTS,
    Backend,
    Beside,
    Device,
    Drafter,
    Dtype,
    Layers,
    NewTokens,
    Out,
    Prompts,
    Reference,
    ServerModel,
    ServerTimeout,
    ServerUrl,
    Target,
    TemplateKwargs,
    config_of,
    option,
)
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag capture --target Qwen/Qwen3.5-4B --prompts mine.jsonl --out captures/mine

  dflash-diag capture --target ./target --prompts mine.jsonl --server http://localhost:30000

  dflash-diag score --capture captures/mine --drafter checkpoints/step_8000

  dflash-diag capture --target ./target --like captures/mine --backend torch --out captures/torch
"""


def verb(
    target: Target,
    prompts: Prompts = "",
    drafter: Drafter = "",
    reference: Reference = "",
    beside: Beside = [],  # noqa: B006 - typer's way to repeat an option
    max_new_tokens: NewTokens = 0,
    like: Annotated[
        str,
        option(
            "Take the tokens of this capture in place of prompts and decoding, to compare with it.",
            metavar="CAPTURE",
            panel=INPUTS,
        ),
    ] = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    out: Out = "",
) -> int:
    """Run a target over prompts once and keep what scoring needs.

    The capture holds the greedy continuations and the hidden states, so it can be made on a GPU
    machine and scored on a laptop. Prints the folder and, on standard error, whether the text that
    a server wrote is the target's own.

    With --drafter, --reference and --beside, the states kept are those that these drafters tap (and
    their neighbours); without, those that the usual layer rule picks. --layers all keeps every
    layer.

    With --like nothing is decoded: this target, backend and precision run over the tokens of a
    capture that is there, so that the two can be compared state by state.
    """
    from dflash_diag import runs, views

    config = config_of(locals())
    made = runs.capture_only(config)
    typer.echo(str(made.path))
    text = runs.judge_text(config, made)
    if text is not None:
        # Not on standard output, where a script finds the folder.
        typer.echo(f"server  {views.verdict_line(text)}", err=True)
    return DONE
