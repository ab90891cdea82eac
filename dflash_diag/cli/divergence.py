"""The verb ``divergence``."""

from __future__ import annotations

import typer

from dflash_diag.cli.options import (
    Against,
    Backend,
    CaptureDir,
    Device,
    Drafter,
    Dtype,
    Example,
    FailOn,
    Json,
    Layers,
    NewTokens,
    OnePrompt,
    Out,
    Overrides,
    Prompts,
    Seed,
    Target,
    TemplateKwargs,
    code_of,
    config_of,
)

EPILOG = """
Examples:

  dflash-diag divergence --capture captures/gpu --against captures/cpu --drafter ./step_8000

  dflash-diag divergence --target ./target --prompts p.jsonl --backend fla --against torch/float32

  dflash-diag divergence --capture dump.pt --target ./target
"""


def verb(
    against: Against = "",
    capture: CaptureDir = "",
    example: Example = "",
    target: Target = "",
    prompts: Prompts = "",
    drafter: Drafter = "",
    prompt: OnePrompt = "",
    max_new_tokens: NewTokens = 0,
    overrides: Overrides = [],  # noqa: B006 - typer's way to repeat an option
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
    """Compare hidden states: layer by layer, module by module, and by what it costs.

    The states of --capture (or of --target on --prompts) are held against another capture, or
    against another backend or dtype of the live target. The noise floor is the same code in low
    precision against itself in float32. The verdict is noise, harmless difference or cause; with
    --drafter it rests on the accepted tokens. Captures by other code are audited on the way; with
    --capture and --target alone, the capture is held against the live target in float32.
    """
    from dflash_diag import runs, state_runs, storage, views

    if capture and target and not against:
        against = "auto/float32"  # the live target as exactly as it can be computed here
    config, refused = config_of(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, needs_drafter=False)
    with run.alone():
        found, text = state_runs.divergence_json(run), views.divergence_text(run)
    if json == "-":
        typer.echo(storage.to_json_text(found), nl=False)
    else:
        if json:
            storage.write_json(json, found)
        typer.echo(text)
    return code_of(run.having(refused, only=state_runs.RESULTS))
