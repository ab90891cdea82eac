"""The verb ``score``."""

from __future__ import annotations

import typer

from dflash_diag.cli.options import (
    Backend,
    CaptureDir,
    Compiled,
    Device,
    Drafter,
    Dtype,
    Example,
    FailOn,
    Json,
    Layers,
    NewTokens,
    Out,
    Overrides,
    Prompts,
    Reference,
    Seed,
    ServedOutput,
    ServerModel,
    ServerTimeout,
    ServerUrl,
    Target,
    TemplateKwargs,
    code_of,
    config_of,
)
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag score --target ./target --drafter ./step_8000 --prompts mine.jsonl

  dflash-diag score --capture captures/mine --drafter ./step_8000 --json step_8000.json

  dflash-diag score --capture captures/mine --drafter ./step_8000 --set context_bound=inclusive
"""


def verb(
    drafter: Drafter,
    example: Example = "",
    target: Target = "",
    prompts: Prompts = "",
    reference: Reference = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    compiled: Compiled = False,
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Score one drafter: how many tokens are accepted, where and on which prompts.

    Needs either --target and --prompts, or --capture. Walked numbers are what greedy decoding gets;
    uniform ones are what most training dashboards show. Intervals are 95 %, over prompts.
    """
    from dflash_diag import runs, storage, views

    config, refused = config_of(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config)
    with run.alone():
        scored, text = run.metrics("drafter"), views.score_text(run)
    if json == "-":
        typer.echo(storage.to_json_text(scored), nl=False)
    else:
        if json:
            storage.write_json(json, scored)
        typer.echo(text)
    return code_of(run.having(refused, only=runs.SCORE_RESULTS))
