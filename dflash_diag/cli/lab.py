"""The verb ``lab``."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_diag.cli.options import (
    MACHINE,
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
    config_of,
    may_open,
    option,
)
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag lab

  dflash-diag lab --target ./target --drafter ./step_8000 --prompts mine.jsonl

  dflash-diag lab --capture captures/mine --drafter ./step_8000 --no-browser --port 9000
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
    out: Out = "",
    port: Annotated[
        int,
        option(
            "Where JupyterLab listens, on this machine only.",
            metavar="N",
            panel=MACHINE,
            show_default="the first free one from 8888 on",
        ),
    ] = 0,
    no_browser: Annotated[
        bool,
        typer.Option(
            "--no-browser",
            help="Open no browser; the address is printed.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> int:
    """Open JupyterLab on the notebooks; with no options, on the embedded example.

    Writes copies with the given parameters into OUT/lab, which are yours to change, and opens the
    first. Run All works in each: what a report has computed in OUT is loaded, the rest is computed.
    Ctrl-C ends JupyterLab and its kernels.
    """
    from dflash_diag import lab, lab_server, runs

    copies = lab.write(runs.Run.open(config_of(locals())))
    typer.echo(f"notebooks: {copies.folder}")
    for name in copies.kept:
        typer.echo(f"kept as you changed it: {copies.folder / name} (delete it for a new copy)")
    try:
        with lab_server.serving(
            copies.folder, lab.FIRST, port=port, browser=may_open() and not no_browser
        ) as started:
            typer.echo(f"JupyterLab: {started.url}\nCtrl-C ends it.")
            started.wait()
    except KeyboardInterrupt:
        typer.echo("JupyterLab has ended; the notebooks stay.")
    return 0
