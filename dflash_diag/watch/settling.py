"""Whether somebody is still writing to a checkpoint.

A signature is taken of its files; when it has not changed for some seconds, the checkpoint has
settled. The files' own times are not believed as such: copies keep old ones, and clocks differ.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from dflash_diag.storage import content_key

SETTINGS = ("config.json", "training_args.json", "trainer_state.json")
"""Files beside a file of weights that are read with it."""


def signature(path: Path) -> str | None:
    """Hash of the names, sizes, inodes and times of a checkpoint's files; None if it is gone.

    Of a folder all files in it count, of a file also those beside it that are read with it.
    """
    facts = []
    for file in _files(path):
        try:
            stat = file.stat()
        except OSError:  # gone since it was listed; the next look sees the rest
            continue
        times = [stat.st_mtime_ns, stat.st_ctime_ns]
        facts.append([file.name, stat.st_size, stat.st_ino, *times])
    return content_key(facts) if facts else None


def written(path: Path) -> datetime | None:
    """When the last of a checkpoint's own files was written (UTC); None if it is gone."""
    own = [path] if path.is_file() else _files(path)
    try:
        times = [file.stat().st_mtime for file in own]
    except OSError:
        return None
    return datetime.fromtimestamp(max(times), UTC) if times else None


def _files(path: Path) -> list[Path]:
    """Files of a checkpoint, in order; none if it is gone."""
    try:
        if path.is_dir():
            return sorted(one for one in path.iterdir() if one.is_file())
        if path.is_file():
            return [path, *(one for name in SETTINGS if (one := path.parent / name).is_file())]
    except OSError:
        pass
    return []
