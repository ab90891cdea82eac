"""Where the notebooks and the embedded example are: in a checkout, or beside an installed copy."""

from __future__ import annotations

from pathlib import Path

from dflash_diag.errors import BadInput

_PACKAGE = Path(__file__).resolve().parent


def checkout() -> Path | None:
    """Root of the checkout that this package runs from, or None for an installed copy."""
    root = _PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def notebooks_dir() -> Path:
    """Folder of the notebooks; an installed copy carries its own."""
    root = checkout()
    return _PACKAGE / "_notebooks" if root is None else root / "notebooks"


def data_dir() -> Path:
    """Folder of the embedded example's data.

    Raises
    ------
    BadInput
        This is an installed copy: the data come with the repository only.
    """
    root = checkout()
    if root is None or not (root / "data").is_dir():
        raise BadInput(
            "the embedded example's data are not here: they come with the repository, "
            "not with the installed package",
            do="run in a checkout, or name your own --target, --drafter and --prompts",
        )
    return root / "data"
