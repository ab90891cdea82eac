"""What a hostile pickle of the corpus calls: whoever imports this has executed it."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "FUZZ_CANARY"
"""Environment variable with the file that is there once something was executed."""


def touch(*_: object) -> None:
    """Leave a mark."""
    Path(os.environ[MARK]).touch()


touch()
