"""Lower layers do not import higher ones, and light modules load nothing heavy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dflash_diag"

# Lowest first; a module may import its own layer and those above it in this list. A folder stands
# for all that is in it.
LAYERS = [
    {"deadlines", "errors", "machines", "paths", "progress", "results", "shapley", "stats"}
    | {"storage", "weight_files"},
    {
        "bounds",
        "causes",
        "claim_words",
        "claims",
        "compare",
        "compare_words",
        "comparison",
        "conventions",
        "definitions",
        "masks",
        "metric_names",
        "metrics",
        "prompts",
        "provenance",
        "published",
        "readings",
        "training_logs",
        "token_kinds",
        "trees",
    },
    {"example"},
    {
        "adapters",
        "backends",
        "bundle",
        "bundle_checks",
        "caches",
        "capture",
        "chat_process",
        "chat_templates",
        "checkpoints",
        "decoding",
        "divergence",
        "drafter",
    }
    | {
        "foreign",
        "gguf_file",
        "gguf_loading",
        "gguf_tokenizer",
        "hidden_states",
        "identity",
        "influence",
        "influence_trials",
        "judging",
        "localization",
        "modules",
        "pairs",
        "state_checks",
        "renderings",
        "strata",
        "composition",
        "data_causes",
        "proposals",
        "rating",
        "references",
        "alignment",
        "blocks",
        "findings",
        "positions",
        "sweeps",
        "scoring",
        "servers",
        "static_audit",
        "target_config",
        "targets",
        "trend",
        "tensorfile",
        "training_audit",
        "training_sequences",
        "additions",
        "attention",
        "visibility",
        "one_block",
        "outcomes",
        "gap",
        "gap_words",
        "replay",
    },
    {"diagnostics"},
    {
        "ahead",
        "alignment_runs",
        "audit_runs",
        "compare_runs",
        "config",
        "doctor",
        "gap_runs",
        "rendering_runs",
        "history",
        "runs",
        "shards",
        "state_runs",
    },
    {
        "executors",
        "front_page",
        "lab",
        "lab_server",
        "next_steps",
        "pages",
        "plotting",
        "report",
        "views",
        "watch",
        "widgets",
    },
    {"cli"},
]
OUTSIDE = {"__init__", "__main__", "zoo"}
"""No layer: the lazy front door, the command line's entry, the recipes of the example."""
ZOO_IMPORTERS = {"cli", "zoo"}
UPWARD = {("results", "plotting")}
"""The one edge that DESIGN allows: `Result.plot` looks its plot up by id when it is called."""

MODULES = sorted(PACKAGE.rglob("*.py"))
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit(path: Path) -> str:
    """The top-level module or folder of the package to which a file belongs."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_units(path: Path) -> set[str]:
    """Top-level modules of this package that a file imports anywhere, lazily or for types too."""
    found: set[str] = set()
    inside = ("dflash_diag", *path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = [*inside[: -node.level]] if node.level else []
            origin += node.module.split(".") if node.module else []
            names = [[*origin, alias.name] for alias in node.names]
        else:
            continue
        found |= {name[1] for name in names if name[0] == "dflash_diag" and len(name) > 1}
    return found & {unit(module) for module in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_imports_a_higher_layer(path):
    own = unit(path)
    assert own in LEVEL or own in OUTSIDE, f"give {own} a layer"
    for other in imported_units(path) - {own}:
        if other == "zoo":
            assert own in ZOO_IMPORTERS, f"{own} imports zoo"
        elif own in LEVEL:
            assert other in LEVEL, f"{own} imports {other}"
            assert LEVEL[other] <= LEVEL[own] or (own, other) in UPWARD, f"{own} imports {other}"


def test_the_walk_sees_every_kind_of_import(tmp_path, monkeypatch):
    module = sys.modules[__name__]
    for name in ("a", "b", "c", "d"):
        (tmp_path / f"{name}.py").write_text("")
    path = tmp_path / "sub" / "x.py"
    path.parent.mkdir()
    path.write_text(
        "import dflash_diag.a\nfrom dflash_diag import b\nfrom ..c import thing\n"
        "def f():\n    from dflash_diag.d import deep\nimport torch\n"
    )
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    monkeypatch.setattr(module, "MODULES", sorted(tmp_path.rglob("*.py")))
    assert imported_units(path) == {"a", "b", "c", "d"}


HEAVY = ("torch", "transformers", "pandas", "matplotlib", "scipy", "pyarrow")
LIGHT = {
    "dflash_diag": HEAVY,
    "dflash_diag.cli": HEAVY,
    "dflash_diag.conventions": HEAVY,
    "dflash_diag.metrics": ("torch", "transformers", "matplotlib"),
    "dflash_diag.results": ("torch", "transformers", "matplotlib"),
    "dflash_diag.stats": ("torch", "transformers", "matplotlib"),
    "dflash_diag.watch.watching": ("torch", "transformers", "matplotlib"),
    "dflash_diag.trees": ("torch", "transformers", "matplotlib"),
}


@pytest.mark.parametrize("module", LIGHT)
def test_importing_loads_nothing_heavy(module):
    code = (
        f"import sys, {module}; print(*sorted(set({LIGHT[module]!r}) & set(sys.modules)), end='')"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == ""
