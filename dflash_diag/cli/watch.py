"""The verb ``watch``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dflash_diag.cli.options import (
    DONE,
    FAILED,
    INPUTS,
    MACHINE,
    OUTPUT,
    Against,
    Backend,
    Beside,
    CaptureDir,
    Claims,
    Device,
    Dtype,
    FailOn,
    Json,
    Layers,
    LosslessPrompts,
    NewTokens,
    Out,
    Overrides,
    Prompts,
    Reference,
    Seed,
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
    option,
)
from dflash_diag.errors import BadInput
from dflash_diag.executors import LIMIT_S
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag watch checkpoints --target ./target --prompts mine.jsonl --out reports

  dflash-diag watch "runs/*/step_*" --capture captures/mine --reference ./published \\
      --out reports --once --fail-on fail

  dflash-diag watch checkpoints --capture captures/mine --out reports --every 300 --jobs 2 \\
      --webhook https://hooks.example.org/drafters
"""


def verb(
    where: Annotated[
        str,
        typer.Argument(
            help="Folder of checkpoints, or a pattern in quotes.", metavar="FOLDER_OR_GLOB"
        ),
    ],
    target: Target = "",
    reference: Reference = "",
    prompts: Prompts = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    against: Against = "",
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    claims: Claims = [],  # noqa: B006 - typer's way to repeat an option
    training_log: TrainingLog = "",
    training_sequences: TrainingSequences = "",
    training_rows: TrainingRows = 0,
    trained_states: TrainedStates = "",
    beside: Beside = [],  # noqa: B006 - typer's way to repeat an option
    step: Step = "",
    server: ServerUrl = "",
    server_model: ServerModel = "",
    server_timeout: ServerTimeout = TIMEOUT_S,
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    lossless_prompts: LosslessPrompts = 0,
    seed: Seed = 0,
    once: Annotated[
        bool,
        option("Measure what is there, and end.", "--once", metavar="", panel=MACHINE),
    ] = False,
    every: Annotated[
        float, option("Seconds between two looks.", metavar="S", panel=MACHINE)
    ] = 60.0,
    settle: Annotated[
        float,
        option("Seconds for which a checkpoint must not change.", metavar="S", panel=MACHINE),
    ] = 30.0,
    time_limit: Annotated[
        float,
        option(
            "Seconds after which a report, a capture or the opening of a checkpoint is given up.",
            metavar="S",
            panel=MACHINE,
        ),
    ] = LIMIT_S,
    jobs: Annotated[
        int,
        option(
            "Reports that run at once; 0: one, on a cluster one a node (a GPU with --device cuda).",
            metavar="N",
            panel=MACHINE,
        ),
    ] = 0,
    shards: Annotated[
        int,
        option(
            "Processes that score the prompts of one checkpoint; 0: what a cluster has to spare.",
            metavar="N",
            panel=MACHINE,
        ),
    ] = 0,
    again: Annotated[
        bool,
        option("Measure finished checkpoints again.", "--again", metavar="", panel=MACHINE),
    ] = False,
    executor: Annotated[
        str,
        option("This machine, or a Ray cluster.", metavar="local|ray", panel=MACHINE),
    ] = "local",
    ray_address: Annotated[
        str,
        option(
            "Cluster; the default is RAY_ADDRESS, else the one of this machine. local starts one.",
            metavar="HOST:PORT",
            panel=MACHINE,
        ),
    ] = "",
    against_what: Annotated[
        str,
        option(
            "What a checkpoint must not be worse than.",
            "--regression",
            metavar="previous|best|reference",
            panel=INPUTS,
        ),
    ] = "previous",
    margin: Annotated[
        float,
        option(
            "Tokens a round that may be lost: a regression is certainly more.",
            metavar="TAU",
            panel=INPUTS,
        ),
    ] = 0.05,
    webhook: Annotated[
        str,
        option(
            "POST a JSON object here for every finished checkpoint (or DFLASH_DIAG_WEBHOOK).",
            metavar="URL",
            panel=OUTPUT,
        ),
    ] = "",
    page_url: Annotated[
        str,
        option("Address under which --out is served, for links.", metavar="URL", panel=OUTPUT),
    ] = "",
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Report on every new checkpoint in a folder, and say when one is worse than before.

    A checkpoint is opened when its files have not changed for --settle seconds, and measured once:
    the same files and options are not measured again, a replaced file is a new checkpoint. The
    target is captured once for all of them. OUT/index.html shows all of them with what the newest
    changed, OUT/history.parquet has a row for each, OUT/runs/NAME-HASH its report. A report that
    fails is tried once more; what cannot be read is looked at again when it changes.

    A regression is a walked tau that is certainly lower, by prompt, than that of --regression:
    --fail-on fail ends with 1 if the newest checkpoint lost more than --margin (warn: anything), or
    if --once and a checkpoint could not be read or measured. Without --once the watch goes on until
    it is stopped (exit code 3) or --fail-on is met; the same command resumes.
    """
    from dflash_diag import runs, storage
    from dflash_diag.executors import executor as executor_of
    from dflash_diag.watch.regression import Rule
    from dflash_diag.watch.watching import News, Settings, Watching
    from dflash_diag.watch.webhook import webhook_of

    config, refused = config_of({**locals(), "out": ""}), runs.fail_on(fail_on)
    if not out:
        raise BadInput("no folder for the reports", do="give --out")
    if config.is_example:
        raise BadInput("no target and no capture", do="give --target and --prompts, or --capture")
    config = config.resolved(needs_drafter=False)
    settings = Settings(
        where=where,
        out=Path(out).expanduser().resolve(),
        rule=Rule(against_what, margin, seed),
        settle=settle,
        time_limit=time_limit,
        every=every,
        once=once,
        again=again,
        shards=shards,
        page_url=page_url,
    )
    hook = webhook_of(webhook)
    workers = executor_of(executor, jobs=jobs, gpu=device.startswith("cuda"), address=ray_address)

    def say(one: News) -> None:
        """Finished checkpoints on standard output, where a script reads them."""
        is_result = one.kind == "finished" and json != "-"
        typer.echo(
            one.text if is_result else f"{one.kind}: {one.name}: {one.text}", err=not is_result
        )
        if json not in ("", "-"):
            storage.write_json(json, watching.to_json())

    watching = Watching(config, settings, workers, hook)
    with closing(watching.news()) as news:
        for one in news:
            say(one)
            if not once and watching.is_idle() and watching.alarms(refused):
                watching.stop()
    if json == "-":
        typer.echo(storage.to_json_text(watching.to_json()), nl=False)
    elif json:
        storage.write_json(json, watching.to_json())
    alarms = watching.alarms(refused)
    for alarm in alarms:
        typer.echo(f"--fail-on met: {alarm}", err=True)
    return FAILED if alarms else DONE
