"""The verb ``report``."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_diag.cli.options import (
    OUTPUT,
    Against,
    Backend,
    Beside,
    CaptureDir,
    Claims,
    Compiled,
    Device,
    Drafter,
    Dtype,
    Example,
    FailOn,
    History,
    Layers,
    LosslessPrompts,
    NewTokens,
    OnePrompt,
    Out,
    Overrides,
    Prompts,
    Reference,
    Render,
    Seed,
    ServedOutput,
    ServerModel,
    ServerTimeout,
    ServerUrl,
    Step,
    Target,
    TemplateKwargs,
    TrainedStates,
    TrainingLog,
    TrainingRows,
    TrainingSequences,
    code_of,
    config_of,
    may_open,
)
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag report

  dflash-diag report --target ./target --drafter ./step_8000 --reference ./published \\
      --prompts mine.jsonl --out reports/step_8000

  dflash-diag report --capture captures/mine --drafter ./step_8000 --fail-on fail
"""


def verb(
    example: Example = "",
    target: Target = "",
    drafter: Drafter = "",
    reference: Reference = "",
    prompts: Prompts = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    against: Against = "",
    prompt: OnePrompt = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    claims: Claims = [],  # noqa: B006 - typer's way to repeat an option
    training_log: TrainingLog = "",
    training_sequences: TrainingSequences = "",
    training_rows: TrainingRows = 0,
    trained_states: TrainedStates = "",
    beside: Beside = [],  # noqa: B006 - typer's way to repeat an option
    history: History = "",
    step: Step = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    render: Render = [],  # noqa: B006 - typer's way to repeat an option
    lossless_prompts: LosslessPrompts = 0,
    compiled: Compiled = False,
    seed: Seed = 0,
    fail_on: FailOn = "none",
    out: Out = "",
    open_: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Show the report in the browser; the example's is shown unless told otherwise.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
) -> int:
    """Write the HTML report; with no options, that of the embedded example.

    Captures the target if needed, scores the drafters, runs all notebooks and writes a site that
    needs no network: OUT/index.html, and summary.json, junit.xml, results/ and notebooks/ beside
    it. Running the same command again reuses what is there.
    """
    from dflash_diag import report, runs

    config, refused = config_of(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config)
    with run.alone():
        index = report.build(run)
    typer.echo(str(index))
    if may_open() if open_ is None and run.given.is_example else open_:
        typer.launch(index.resolve().as_uri())
    return code_of(run.having(refused))
