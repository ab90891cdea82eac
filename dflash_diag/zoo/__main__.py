"""``python -m dflash_diag.zoo``: rebuild the embedded example, stage by stage.

Stages that are finished are skipped; one that was cut off resumes from its checkpoint.
"""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from dflash_diag import paths
from dflash_diag.zoo import captures, corpus, drafters, export, recipe, sequences, targets

SIZES = {"full": recipe.Recipe, "tiny": recipe.tiny}


class Stage(StrEnum):
    """What can be built, in this order."""

    CORPUS = "corpus"
    TARGETS = "targets"
    SEQUENCES = "sequences"
    DRAFTERS = "drafters"
    EXPORT = "export"
    CAPTURES = "captures"


def main(
    work: Annotated[Path, typer.Option(help="Where stages keep what they made.")] = Path("out/zoo"),
    out: Annotated[Path | None, typer.Option(help="Where it goes; data/zoo by default.")] = None,
    stage: Annotated[
        list[Stage] | None,
        typer.Option(help="Only these; all by default, captures only on a GPU."),
    ] = None,
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = "full",
    seconds: Annotated[
        float | None, typer.Option(help="Fit each target's training to so much time.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "",
) -> None:
    """Rebuild the embedded example from public packages: targets, drafters, logs, sequences."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    plan = SIZES[size]()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Captures of a CPU would replace those of a GPU, which are what they are kept for.
    wanted = stage or [s for s in Stage if s is not Stage.CAPTURES or device.startswith("cuda")]
    work.mkdir(parents=True, exist_ok=True)
    if Stage.CORPUS in wanted and not (work / "corpus.json").exists():
        corpus.build(work, _prompt_texts())
    for name, target in plan.targets.items():
        if Stage.TARGETS in wanted:
            targets.build(
                work, name, target, device=device, seconds=seconds, compiled=size == "full"
            )
        if Stage.SEQUENCES in wanted:
            sequences.build(work, name, plan.sequences[name], device=device)
        if Stage.DRAFTERS in wanted:
            drafters.build(
                work,
                plan.drafters,
                name,
                plan.sequences[name],
                device=device,
                compiled=size == "full",
            )
    zoo = out or paths.data_dir() / "zoo"
    if Stage.EXPORT in wanted:
        export.build(work, zoo, plan)
    if Stage.CAPTURES in wanted:
        captures.build(work, zoo, device=device)


def _prompt_texts() -> list[str]:
    """The evaluation's prompts, which must not occur in the training text."""
    files = sorted((paths.data_dir() / "prompts").glob("*.jsonl"))
    lines = [line for file in files for line in file.read_text().splitlines() if line]
    return [json.loads(line).get("text", "") for line in lines]


if __name__ == "__main__":
    typer.run(main)
