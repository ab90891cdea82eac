"""Notebooks hold prose, parameters, calls and nothing else."""

from __future__ import annotations

import ast
import json
from itertools import pairwise

import pytest

from dflash_diag import diagnostics, paths, report
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput

FOLDER = paths.notebooks_dir()
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
FORBIDDEN = (ast.FunctionDef, ast.ClassDef, ast.For, ast.While, ast.Try, ast.With, ast.Lambda)


@pytest.fixture(params=NAMES)
def notebook(request) -> dict:
    return json.loads((FOLDER / f"{request.param}.ipynb").read_text())


def code(notebook) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def source(cell) -> str:
    return "".join(cell["source"])


def test_the_report_shows_every_notebook():
    assert list(report.NOTEBOOKS) == NAMES


def test_it_is_thin(notebook):
    cells = code(notebook)
    assert len(cells) <= 12
    for cell in cells:
        assert len(source(cell).splitlines()) <= 8, source(cell)
        assert not source(cell).lstrip().startswith(("%", "!"))
        tree = ast.parse(source(cell))
        assert not [node for node in ast.walk(tree) if isinstance(node, FORBIDDEN)]


def test_its_title_asks_and_its_last_cell_answers(notebook):
    first, last = notebook["cells"][0], code(notebook)[-1]
    title = source(first).splitlines()[0]
    assert title.startswith("# ")
    assert title.endswith("?")
    assert source(last).startswith("run.answer(")
    assert notebook["cells"][-1]["cell_type"] == "code"


def test_headings_descend_one_level_at_a_time(notebook):
    texts = [source(c) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    marks = [line.split(" ")[0] for t in texts for line in t.splitlines() if line.startswith("#")]
    levels = [len(mark) for mark in marks]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_parameters_are_typed_literals_with_help_and_names_of_the_configuration(notebook):
    (cell,) = [c for c in code(notebook) if "parameters" in c["metadata"].get("tags", [])]
    assert cell is code(notebook)[0]
    names = set()
    for node, line in zip(ast.parse(source(cell)).body, source(cell).splitlines(), strict=True):
        assert isinstance(node, ast.AnnAssign)
        ast.literal_eval(node.value)
        assert "  # " in line
        names.add(node.target.id)
    assert names - {"options"} <= set(RunConfig.model_fields)
    values = {n.target.id: ast.literal_eval(n.value) for n in ast.parse(source(cell)).body}
    assert RunConfig.from_notebook(values) == RunConfig()


def test_a_parameter_has_one_type_and_default_in_all_notebooks():
    declared: dict[str, set[str]] = {}
    for name in NAMES:
        cell = code(json.loads((FOLDER / f"{name}.ipynb").read_text()))[0]
        for line in source(cell).splitlines():
            declaration = line.partition("  # ")[0]
            declared.setdefault(declaration.partition(":")[0], set()).add(declaration)
    assert all(len(found) == 1 for found in declared.values()), declared
    assert {"target", "drafter", "options"} <= set(declared)


def test_every_diagnostic_is_shown_on_the_page_that_it_names():
    for name in NAMES:
        text = (FOLDER / f"{name}.ipynb").read_text()
        for id_, one in diagnostics.catalogue().items():
            assert (f'run.result(\\"{id_}\\")' in text) == (one.page == name), id_


def test_it_has_a_budget(notebook):
    budget = notebook["metadata"]["dflash_diag"]["budget_s"]
    assert budget["loaded"] <= budget["computed"] <= 240


def test_a_parameter_that_there_is_not_stops_the_notebook():
    """papermill itself only logs it, and would go on with another drafter."""
    injected = "# Parameters\nout = 'here'\ndrafterr = '/nowhere'\noptions = {'seed': 3}\n"
    mine = "drafters = 3  # a cell of somebody's own"
    names = {"In": ["", "out = ''", mine, injected], "out": "here", "options": {"seed": 3}}
    with pytest.raises(BadInput, match="unknown parameter drafterr;"):
        RunConfig.from_notebook(names)
    names["In"][3] = injected.replace("drafterr = '/nowhere'", "server_timeout = float('inf')")
    names["In"].append("# Parameters\n%matplotlib inline")
    assert RunConfig.from_notebook(names).seed == 3
