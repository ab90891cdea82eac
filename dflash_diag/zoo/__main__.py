"""``python -m dflash_diag.zoo``: rebuild the embedded example, stage by stage.

Stages that are finished are skipped; one that was cut off resumes from its checkpoint.
"""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from dflash_diag import paths
from dflash_diag.prompts import read_prompts
from dflash_diag.zoo import (
    captures,
    chats,
    corpus,
    drafters,
    export,
    public,
    recipe,
    sequences,
    targets,
)

SIZES = {"full": recipe.Recipe, "tiny": recipe.tiny}
TARGETS = (*recipe.TARGETS, *recipe.PUBLIC_TARGETS)


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
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Only these targets: {', '.join(TARGETS)}; the other parts stay."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Fit each target's training to so much time.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "",
) -> None:
    """Rebuild the embedded example from public packages: targets, drafters, logs, sequences."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    plan = SIZES[size]()
    if only:
        if unknown := set(only) - set(TARGETS):
            raise typer.BadParameter(f"no target {', '.join(sorted(unknown))}", param_hint="--only")
        plan = plan.restricted(only)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Captures of a CPU would replace those of a GPU, which are what they are kept for.
    wanted = stage or [s for s in Stage if s is not Stage.CAPTURES or device.startswith("cuda")]
    work.mkdir(parents=True, exist_ok=True)
    if Stage.CORPUS in wanted:
        if plan.targets and not (work / "corpus.json").exists():
            corpus.build(work, _prompt_texts())
        for name, chat in plan.chats.items():
            chats.build_questions(work, name, chat, _prompt_texts())
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
    for name, published in plan.public_targets.items():
        if Stage.TARGETS in wanted:
            public.build(work, name, published)
        if Stage.SEQUENCES in wanted:
            chats.build(work, name, plan.chats[name], device=device)
        if Stage.DRAFTERS in wanted:
            drafters.build(
                work,
                plan.drafters,
                name,
                plan.chats[name],
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
    prompts = [prompt for file in files for prompt in read_prompts(file)]
    said = [message["content"] for one in prompts for message in one.messages or ()]
    return [prompt.text for prompt in prompts if prompt.text is not None] + said


if __name__ == "__main__":
    typer.run(main)
