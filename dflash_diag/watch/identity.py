"""Open a checkpoint, and name what would be measured by its content.

A process of its own does it: weights are read as mapped files, and a trainer that cuts one short
meanwhile kills whoever reads it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dflash_diag import storage
from dflash_diag.config import RunConfig
from dflash_diag.deadlines import end_with_starter
from dflash_diag.executors import Command

ASIDE = {
    "out",
    "drafter",
    "reference",
    "capture",
    "target",
    "prompts",
    "server",
    "server_model",
    "server_timeout",
    "history",
    "beside",
}
"""Parameters that name what is hashed instead, or that decide nothing."""


@dataclass(frozen=True)
class Identity:
    """What a checkpoint, the inputs and the options come to."""

    key: str
    """Of everything that a report depends on."""
    capture: str
    """Of the capture that it needs; empty where one was given."""
    step: int | None
    """Training step."""

    @classmethod
    def read(cls, text: str) -> Self:
        """From what the process wrote."""
        return cls(**json.loads(text))


def identify(config: RunConfig) -> Identity:
    """Read a checkpoint whole and hash it with everything else; nothing is written.

    Raises
    ------
    BadInput
        The checkpoint, or another input, cannot be used.
    """
    from dflash_diag import __version__
    from dflash_diag.checkpoints import training_step
    from dflash_diag.compare_runs import is_run
    from dflash_diag.diagnostics.base import DRAFTER
    from dflash_diag.runs import Run

    run = Run.open(config)
    drafters = []
    for role in (*run.roles, *run.others):
        checkpoint = run.checkpoint(role)
        checkpoint.tensors.verify()
        drafters.append(
            [role, checkpoint.weights_sha256, checkpoint.config, checkpoint.training_args]
        )
    step_file = config.step.rpartition(":")[0]
    capture = "" if config.capture else run.capture_key
    key = storage.content_key(
        "watch/1",
        __version__,
        capture or run.capture_digest,
        bool(config.target),
        drafters,
        run.states.digests,
        [storage.sha256_file(Path(one) / "summary.json") for one in config.beside if is_run(one)],
        # A training log grows with the training, which makes no old checkpoint a new one.
        [storage.sha256_file(step_file)] if step_file else [],
        config.model_dump(mode="json", exclude=ASIDE),
    )
    return Identity(key, capture, training_step(run.checkpoint(DRAFTER)))


def check(config: RunConfig) -> None:
    """Make sure that everything but a checkpoint is as it should be.

    Raises
    ------
    BadInput
        It is not.
    """
    from dflash_diag.runs import Run
    from dflash_diag.targets import existing_files

    Run.open(config, needs_drafter=False)
    if config.target:
        existing_files(config.target)


def command(config: RunConfig, log: Path) -> Command:
    """The process: prints an `Identity`, or nothing where no drafter is named."""
    return Command.python(__name__, given=config.model_dump_json(), log=log)


def main() -> None:
    """What the process does with the configuration on standard input."""
    from dflash_diag.errors import DiagError

    end_with_starter()
    config = RunConfig.model_validate_json(sys.stdin.read())
    try:
        if not config.drafter:
            check(config)
            return
        sys.stdout.write(json.dumps(asdict(identify(config))))
    except DiagError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
