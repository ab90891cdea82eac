"""The verb ``audit``."""

from __future__ import annotations

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
    Json,
    Out,
    Prompts,
    Step,
    Target,
    TrainingSequences,
    config_of,
)
from dflash_diag.errors import BadInput

EPILOG = """
Examples:

  dflash-diag audit --step trainer.py:step

  dflash-diag audit --step trainer.py:step --target ./target --training-sequences data/train.jsonl

  dflash-diag audit --step trainer.py:step --capture captures/mine --drafter ./step_8000

The file is run, as its own program would be. step(tokens [T], states [T, K, H], anchors [A],
loss_mask [T], data_seed, noise_seed) returns loss, logits [A, D, V], labels [A, D], weights [A, D]
and target_logits [A, D, V] or None; a sixth value may be a dictionary of reported metrics.
step.layers names the columns of states; the default is the drafter's taps and then the last layer.
"""


def verb(
    step: Step = "",
    example: Example = "",
    target: Target = "",
    training_sequences: TrainingSequences = "",
    capture: CaptureDir = "",
    drafter: Drafter = "",
    prompts: Prompts = "",
    device: Device = "auto",
    dtype: Dtype = "auto",
    backend: Backend = "auto",
    fail_on: FailOn = "none",
    json: Json = "",
    out: Out = "",
) -> int:
    """Say what one training step does, by running and differentiating it; its source is not read.

    Whether noise reaches the target's logits; whether draft logits depend on the last layer, on
    states at or after the anchor, on other blocks, on labels; which loss it is: labels, weights of
    the slots, and the shares of cross-entropy and KL; whether the loss mask holds, the head is the
    target's and frozen, and reported metrics are what they claim.

    The step is tried on one text: of --training-sequences (its states are computed here), or of
    --capture. With nothing but --step it is one of the embedded example's training texts. Always
    runs anew.
    """
    from dflash_diag import runs, storage, views
    from dflash_diag.audit_runs import audit_of
    from dflash_diag.diagnostics.training_audit import summary, verdict

    config, refused = config_of(locals()), runs.fail_on(fail_on)
    run = runs.Run.open(config, strict=False, needs_drafter=False, needs_prompts=False)
    if not run.config.step:
        raise BadInput("no training step", "FILE.py:FUNC", "give --step")
    with run.alone():
        found = audit_of(run, again=True)
    if json == "-":
        typer.echo(storage.to_json_text(found.to_json()), nl=False)
    else:
        if json:
            storage.write_json(json, found.to_json())
        typer.echo(views.audit_text(found))
    judged = verdict(**summary(found))
    if judged.verdict not in refused:
        return DONE
    typer.echo(f"--fail-on met: {judged.verdict.glyph} {judged.verdict}: {judged.reason}", err=True)
    return FAILED
