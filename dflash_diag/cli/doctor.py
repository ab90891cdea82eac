"""The verb ``doctor``."""

from __future__ import annotations

import typer

from dflash_diag.cli.options import (
    Against,
    Backend,
    CaptureDir,
    Claims,
    Device,
    Drafter,
    Dtype,
    Example,
    FailOn,
    Json,
    Layers,
    LosslessPrompts,
    NewTokens,
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
    TrainingLog,
    TrainingRows,
    TrainingSequences,
    code_of,
    config_of,
)
from dflash_diag.servers import TIMEOUT_S

EPILOG = """
Examples:

  dflash-diag doctor

  dflash-diag doctor --target ./target --drafter ./step_8000 --prompts mine.jsonl

  dflash-diag doctor --capture captures/mine --drafter ./step_8000 --step trainer.py:step

  dflash-diag doctor --capture captures/mine --drafter ./step_8000 --claim dds8=3.58 --json d.json
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
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
    served_output: ServedOutput = "",
    claims: Claims = [],  # noqa: B006 - typer's way to repeat an option
    training_log: TrainingLog = "",
    training_sequences: TrainingSequences = "",
    training_rows: TrainingRows = 0,
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
    lossless_prompts: LosslessPrompts = 6,
    seed: Seed = 0,
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Name what is wrong with a drafter, by how much each cause counts, and what to do.

    With no options: the embedded example (but for its training texts, which the report measures
    again). What can fake everything else is checked first (lossless decoding, the captured states),
    then the files, every other reading of the weights, and, where they are given, other captures, a
    training step, and the numbers that a dashboard showed. A
    cause is found, excluded, not identifiable (with what would settle it) or not tested (with the
    reason). Unlike the verb score, it reports checkpoints that cannot be loaded as they are.
    """
    from dflash_diag import runs, storage, views
    from dflash_diag.ahead import ahead

    config, refused = config_of(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, strict=False, brief=True)
    with run.alone(), ahead(run):
        found = run.doctor()
        result = run.result("doctor.causes") if refused else None
    if json == "-":
        typer.echo(storage.to_json_text(found), nl=False)
    else:
        if json:
            storage.write_json(json, found)
        typer.echo(views.doctor_text(found))
    return code_of([result] if result is not None and result.verdict in refused else [])
