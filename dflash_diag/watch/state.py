"""What a watch remembers of each path between two looks, in ``OUT/watch.json``."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from dflash_diag import storage
from dflash_diag.errors import BadInput

SCHEMA = "dflash_diag.watch_state/1"
FILE = "watch.json"
Stage = Literal["settling", "opening", "waiting", "running", "done", "unreadable", "failed"]
ENDED = ("done", "unreadable", "failed")
"""Stages in which nothing happens until the files change."""


def log_file(folder: Path, name: str) -> Path:
    """Where the processes of a checkpoint write what they have to say."""
    return folder / "logs" / f"{name.replace(os.sep, '-')}.log"


@dataclass
class Seen:
    """One path that is, or becomes, a checkpoint."""

    name: str
    signature: str
    """Of its files, see `dflash_diag.watch.settling`."""
    since: datetime
    """UTC; when it was first seen like this."""
    stage: Stage = "settling"
    run_id: str = ""
    capture: str = ""
    """Key of the capture that it is scored on; empty where one was given."""
    step: int | None = None
    """Training step."""
    attempts: int = 0
    """Times that its report was tried."""
    error: str = ""
    """What went wrong, in a line."""


@dataclass
class State:
    """All paths, and a hash of what they are measured with."""

    inputs: str
    seen: dict[str, Seen] = field(default_factory=dict)
    known: bool = False
    """Whether an earlier watch had the same inputs, and so has checked them."""

    @classmethod
    def read(cls, folder: Path, inputs: str) -> State:
        """What the last watch left; other inputs, or none, start anew.

        What was under way is taken up as if it had only just been seen to have settled.

        Raises
        ------
        BadInput
            The file is damaged.
        """
        path = folder / FILE
        if not path.exists():
            return cls(inputs)
        content = storage.read_json(path)
        try:
            if content["schema"] != SCHEMA:
                raise BadInput(f"{path} has schema {content['schema']}", SCHEMA, "remove it")
            seen = {name: _seen(value) for name, value in content["seen"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path} is damaged", "what a watch wrote", "remove it") from error
        same = content["inputs"] == inputs
        for one in seen.values():
            if not same or one.stage not in ENDED:
                one.stage, one.attempts = "settling", 0
        return cls(inputs, seen, known=same)

    def write(self, folder: Path) -> None:
        """Keep it for the next watch."""
        seen = {
            path: asdict(one) | {"since": one.since.isoformat()} for path, one in self.seen.items()
        }
        content = {"schema": SCHEMA, "inputs": self.inputs, "seen": seen}
        storage.write_json(folder / FILE, content)


def _seen(value: dict[str, Any]) -> Seen:
    since = datetime.fromisoformat(value["since"]).astimezone(UTC)
    return Seen(**value | {"since": since})
