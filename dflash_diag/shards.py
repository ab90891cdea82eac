"""Score the prompts of a run in several processes, and put the parts together.

Scoring one prompt does not depend on another, so the merged table is, on machines that compute
alike, byte for byte that of one process. The parts are files in the run's folder.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from dflash_diag import storage
from dflash_diag.config import RunConfig
from dflash_diag.deadlines import end_with_starter
from dflash_diag.runs import Run
from dflash_diag.scoring import Scores, merged, score, shards


def score_part(run: Run, part: int, of: int) -> None:
    """Score the prompts of one part for every drafter of a run; what is there is kept."""
    for role, folder, ranges in _missing(run, of):
        if part < len(ranges):
            path = _part(folder, part, of)
            if not path.is_dir():
                with storage.staged_dir(path) as stage:
                    score(run.capture, run.drafter(role), only=ranges[part]).save(stage)


def merge(run: Run, of: int) -> None:
    """Make the scores of the run from its parts, which go away.

    Raises
    ------
    BadInput
        A part is lacking.
    """
    for _, folder, ranges in _missing(run, of):
        parts = [_part(folder, part, of) for part in range(len(ranges))]
        with storage.staged_dir(folder) as stage:
            merged([Scores.load(one) for one in parts]).save(stage)
        for one in parts:
            shutil.rmtree(one)


def _missing(run: Run, of: int) -> Iterator[tuple[str, Path, list[range]]]:
    """Drafters that have no scores yet: role, folder of the scores, and the parts' prompts."""
    for role in run.roles:
        folder = run.scores_folder(role)
        if not folder.is_dir():
            yield role, folder, shards(run.capture, run.convention(role), of)


def _part(folder: Path, part: int, of: int) -> Path:
    return folder.with_name(f"{folder.name}.{part + 1}-of-{of}")


def main() -> None:
    """``PART OF`` or ``merge OF``, with the run's configuration on standard input."""
    from dflash_diag.errors import DiagError

    end_with_starter()
    what, of = sys.argv[1], int(sys.argv[2])
    try:
        run = Run.open(RunConfig.model_validate_json(sys.stdin.read()))
        if what == "merge":
            merge(run, of)
        else:
            score_part(run, int(what), of)
    except DiagError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
