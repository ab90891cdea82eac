"""What is declared is what is there: public names, packages, pins."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import dflash_diag

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirement(line: str) -> str:
    """Normalised name of the package that a requirement is about."""
    return re.split(r"[\s\[<>=!~;#]", line.strip(), maxsplit=1)[0].lower().replace("_", "-")


def pins(path: Path) -> dict[str, str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    pinned = [line for line in lines if line and not line.startswith("-")]
    assert all("==" in line for line in pinned), f"{path.name} pins exactly"
    return {requirement(line): line.partition("==")[2] for line in pinned}


@pytest.mark.parametrize("name", dflash_diag.__all__)
def test_every_public_name_is_there(name):
    assert getattr(dflash_diag, name).__name__ == name
    assert name in dir(dflash_diag)


def test_types_and_names_agree():
    """What type checkers see is what runs."""
    tree = ast.parse(Path(dflash_diag.__file__).read_text())
    typed = {
        alias.name: node.module
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If)
        for node in branch.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == {name: f"dflash_diag.{home}" for name, home in dflash_diag._HOME.items()}
    assert list(dflash_diag._HOME) == sorted(typed)
    assert dflash_diag.__all__ == sorted(typed)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'tau'"):
        _ = dflash_diag.tau


def test_the_version_is_that_of_pyproject_and_of_the_changelog():
    version = PYPROJECT["project"]["version"]
    assert dflash_diag.__version__ == version
    changelog = (ROOT / "dflash_diag" / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\S+)", changelog, re.MULTILINE)[1] == version


def test_every_package_is_installed():
    listed = set(PYPROJECT["tool"]["setuptools"]["packages"]) - {"dflash_diag._notebooks"}
    folders = {path.parent for path in (ROOT / "dflash_diag").rglob("*.py")}
    assert listed == {".".join(folder.relative_to(ROOT).parts) for folder in folders}


def test_every_file_of_the_package_is_installed():
    """Files other than modules reach the wheel only when package-data names them."""
    patterns = PYPROJECT["tool"]["setuptools"]["package-data"]["dflash_diag"]
    others = {
        path
        for path in (ROOT / "dflash_diag").rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"} and path.name != "CHANGELOG.md"
    }
    named = {path for pattern in patterns for path in (ROOT / "dflash_diag").glob(pattern)}
    assert others <= named


def test_requirements_pin_exactly_the_dependencies():
    declared = {requirement(line) for line in PYPROJECT["project"]["dependencies"]}
    assert set(pins(ROOT / "requirements.txt")) == declared
    assert "-e ." in (ROOT / "requirements.txt").read_text().splitlines()


def test_pins_satisfy_what_the_oracle_asks_for():
    """z-lab's package pins exactly; the two requirement files are installed together."""
    ours = pins(ROOT / "requirements.txt") | pins(ROOT / "tests" / "requirements.txt")
    theirs = [line for line in metadata.requires("dflash") or [] if "extra ==" not in line]
    asked = {requirement(line): line.partition("==")[2] for line in theirs}
    assert {name: ours[name] for name in asked if name in ours} == {
        name: version for name, version in asked.items() if name in ours
    }


def test_the_console_script_is_the_module():
    module, _, function = PYPROJECT["project"]["scripts"]["dflash-diag"].partition(":")
    entry = (ROOT / "dflash_diag" / "__main__.py").read_text()
    assert f"from {module} import {function}" in entry
