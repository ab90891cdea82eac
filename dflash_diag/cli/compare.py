"""The verb ``compare``."""

from __future__ import annotations

from typing import Annotated

import typer

from dflash_diag.cli.options import (
    DONE,
    FAILED,
    Backend,
    CaptureDir,
    Device,
    Drafter,
    Dtype,
    Example,
    FailOn,
    History,
    Json,
    Layers,
    NewTokens,
    Out,
    Prompts,
    Reference,
    Seed,
    Target,
    TemplateKwargs,
    TrainingLog,
    config_of,
)

EPILOG = """
Examples:

  dflash-diag compare ./step_30000 ./step_20000 --target ./target --prompts mine.jsonl

  dflash-diag compare ./step_30000 ./step_20000 --capture captures/mine --reference ./published

  dflash-diag compare reports/step_30000 reports/step_20000 --training-log log.csv --json c.json

Checkpoints are read as they declare. To compare other readings, make a report of each (report
--set) and give their folders.
"""


def verb(
    beside: Annotated[
        list[str],
        typer.Argument(
            help="Drafters, or folders that the verb report has written; the first is asked about.",
            metavar="A B",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer's way to take several
    drafter: Drafter = "",
    reference: Reference = "",
    example: Example = "",
    target: Target = "",
    prompts: Prompts = "",
    max_new_tokens: NewTokens = 0,
    capture: CaptureDir = "",
    training_log: TrainingLog = "",
    history: History = "",
    layers: Layers = "around",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    chat_template_kwargs: TemplateKwargs = "",
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Say whether one drafter is really better than another: yes, no, or so many more prompts.

    Takes checkpoints, which are scored on one capture (--capture, or --target and --prompts, or the
    capture of the first run), and folders of finished reports, which need no model any more.
    Differences of tau while decoding are paired by prompt; with no options, the embedded example's
    drafter and reference. FAIL (for --fail-on) is another that is better by more than 0.05 tokens a
    round.
    """
    from dflash_diag import compare_runs, runs, storage, views
    from dflash_diag.compare_words import first_pairs
    from dflash_diag.diagnostics.compare_pairs import verdict_of

    config, refused = config_of(locals()), runs.fail_on(fail_on)
    found = compare_runs.compare(config)
    if json == "-":
        typer.echo(storage.to_json_text(found), nl=False)
    else:
        if json:
            storage.write_json(json, found)
        typer.echo(views.compare_text(found))
    verdict = verdict_of(first_pairs(found))
    if verdict not in refused:
        return DONE
    typer.echo(f"--fail-on met: {verdict.glyph} {verdict.name} compare.pairs", err=True)
    return FAILED
