"""Which checkpoints lie in a folder, or match a pattern."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dflash_diag.errors import BadInput
from dflash_diag.weight_files import MAKE_A_FOLDER, SUFFIXES, is_other_state


@dataclass(frozen=True)
class Candidate:
    """Something that is, or becomes, a checkpoint."""

    path: Path
    """A folder with weights, or a file of weights; absolute."""
    name: str
    """Its path below the folder that is watched, without the suffix of a file."""


def find(where: str) -> list[Candidate]:
    """Checkpoints below a folder, or those that match a pattern, oldest name first.

    Of a folder: the files of weights in it, the folders in it that hold weights, and the folder
    itself if it is an exported checkpoint. Names that start with a dot are being written.

    Raises
    ------
    BadInput
        A folder that is not there, or a pattern below one.
    """
    if glob.has_magic(where):
        root = _fixed_part(where)
        if not root.is_dir():
            raise BadInput(f"{where}: no folder {root}", "a pattern below a folder that is there")
        # A pattern may be absolute, which Path.glob does not take.
        matches = glob.glob(where, recursive=True)  # noqa: PTH207
        paths = [Path(one).absolute() for one in matches]
        found = [one for one in paths if _is_weights(one) or _holds_weights(one)]
    else:
        root = Path(where).absolute()
        if not root.is_dir():
            raise BadInput(f"{where} is no folder", "a folder of checkpoints, or a pattern")
        found = list(_below(root))
    named = [Candidate(path, _name(path, root)) for path in found]
    return sorted(named, key=lambda one: natural(one.name))


def natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``step_900`` before ``step_1000``."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _below(root: Path) -> Iterator[Path]:
    exported = any(name in MAKE_A_FOLDER for name in _entries(root))
    if exported:
        yield root
    for name in _entries(root):
        path = root / name
        if (not exported and _is_weights(path)) or _holds_weights(path):
            yield path


def _is_weights(path: Path) -> bool:
    name = path.name
    usual = path.suffix in SUFFIXES and not name.startswith(".") and not is_other_state(path)
    return usual and path.is_file()


def _holds_weights(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    return any(_is_weights(path / name) or name in MAKE_A_FOLDER for name in _entries(path))


def _entries(folder: Path) -> list[str]:
    """Names in a folder; none in one that is gone by now or cannot be read."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []


def _fixed_part(pattern: str) -> Path:
    """The folder up to which a pattern has no wildcard."""
    fixed = Path(pattern).absolute()
    while glob.has_magic(str(fixed)):
        fixed = fixed.parent
    return fixed


def _name(path: Path, root: Path) -> str:
    if path == root:
        return _printable(path.name)
    below = path.relative_to(root)
    return _printable(str(below.with_suffix("") if path.suffix in SUFFIXES else below))


def _printable(name: str) -> str:
    """With control characters spelt out: a name is told of on one line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in name)
