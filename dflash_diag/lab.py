"""Copies of the notebooks for JupyterLab, with a run's parameters filled in.

They lie in ``OUT/lab`` and are a person's to change. A copy that was changed is kept; one that says
what was once written there is written anew, so that other options reach it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dflash_diag import paths, report, storage
from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from dflash_diag.runs import Run

FIRST = f"{next(iter(report.NOTEBOOKS))}.ipynb"
"""The notebook that is opened."""


class Copies(NamedTuple):
    """Where the notebooks lie, and which of them were left as somebody had changed them."""

    folder: Path
    kept: list[str]


def write(run: Run) -> Copies:
    """Copy the suite into ``OUT/lab``; outputs of a copy that says the same stay.

    Raises
    ------
    BadInput
        A file there is called like a notebook and is none.
    """
    import nbformat

    folder, kept = storage.make_dir(run.out / "lab"), []
    for name in report.NOTEBOOKS:
        made = nbformat.read(paths.notebooks_dir() / f"{name}.ipynb", as_version=4)
        _fill(made, run)
        path, own = folder / f"{name}.ipynb", _said(made)
        if path.exists():
            says, wrote = _read(path)
            if says == own:
                continue
            if says != wrote:
                kept.append(path.name)
                continue
        made.metadata.dflash_diag.said = own
        storage.atomic_write(path, nbformat.writes(made))
    return Copies(folder, kept)


def _read(path: Path) -> tuple[str, str | None]:
    """What a copy says, and what it was last written to say; see `_said`."""
    import nbformat

    try:
        if not path.is_file():  # nobody would end a pipe
            raise ValueError(path)
        node = nbformat.reads(storage.read_text(path, "a notebook"), as_version=4)
        return _said(node), node.metadata.get("dflash_diag", {}).get("said")
    except Exception as error:  # nbformat raises whatever odd content leads to
        raise BadInput(f"{path} is not a notebook", do="move it away") from error


def _said(node: NotebookNode) -> str:
    """Hash of what the cells say; outputs, and what JupyterLab adds, do not count."""
    return storage.content_key([[cell.cell_type, cell.source] for cell in node.cells])


def _fill(node: NotebookNode, run: Run) -> None:
    """The run's parameters in place of the defaults."""
    cell = next(cell for cell in node.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source = filled(cell.source, report.notebook_parameters(run, _values(cell.source)))


def filled(source: str, parameters: Mapping[str, Any]) -> str:
    """A parameters cell with other values; types and help stay as they are.

    Raises
    ------
    KeyError
        The cell has no such parameter.
    """
    lines, values = source.encode().splitlines(keepends=True), _values(source)
    for name, value in parameters.items():
        old = values[name]
        line, at = lines[old.lineno - 1], slice(old.col_offset, old.end_col_offset)
        lines[old.lineno - 1] = line[: at.start] + repr(value).encode() + line[at.stop :]
    return b"".join(lines).decode()


def _values(source: str) -> dict[str, ast.expr]:
    """Expressions of a parameters cell by name; a test sees to it that each has its own line."""
    return {
        node.target.id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value
    }
