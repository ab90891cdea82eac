"""Notebooks for JupyterLab: parameters filled in, a person's changes kept."""

from __future__ import annotations

import ast
import json
import os
import sys

import nbformat
import pytest
import tiny_world
import typer

from dflash_diag import cli, lab, lab_server, paths, report
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput, DiagError
from dflash_diag.runs import Run

CELL = """target: str = ""  # é: folder
n: int = 0  # how many
options: dict = {}  # such as {"a": 1}"""


def test_values_are_filled_in_and_help_stays():
    values = {"target": "/a 'b' \"c\"\\\n", "options": {"draws": 400, "claims": ["x=1"]}}
    made = lab.filled(CELL, values)
    assert [line.partition("  # ")[2] for line in made.splitlines()] == [
        "é: folder",
        "how many",
        'such as {"a": 1}',
    ]
    found = {node.target.id: ast.literal_eval(node.value) for node in ast.parse(made).body}
    assert found == {**values, "n": 0}
    with pytest.raises(KeyError):
        lab.filled(CELL, {"colour": "red"})


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world.write_world(tmp_path_factory.mktemp("world"))


def run_on(world, out, **more) -> Run:
    given = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl"}
    files = {name: str(world / file) for name, file in given.items()}
    return Run.open(RunConfig(**files, max_new_tokens=12, out=str(out), **more))


def configuration(path) -> RunConfig:
    """What a notebook's first code cell configures."""
    cells = json.loads(path.read_text())["cells"]
    source = "".join(next(c for c in cells if c["cell_type"] == "code")["source"])
    names = {node.target.id: ast.literal_eval(node.value) for node in ast.parse(source).body}
    return RunConfig.from_notebook(names)


def test_every_notebook_is_given_the_run(world, tmp_path):
    run = run_on(world, tmp_path / "out", draws=400)
    stored = {path: path.read_bytes() for path in paths.notebooks_dir().glob("*.ipynb")}
    copies = lab.write(run)
    assert copies == (tmp_path / "out" / "lab", [])
    assert sorted(path.stem for path in copies.folder.iterdir()) == list(report.NOTEBOOKS)
    for path in copies.folder.iterdir():
        assert configuration(path) == run.config
        nbformat.validate(nbformat.read(path, as_version=4))
    assert {path: path.read_bytes() for path in stored} == stored


def test_what_a_person_changed_is_kept_and_the_rest_follows_the_options(world, tmp_path):
    out = tmp_path / "out"
    folder = lab.write(run_on(world, out, seed=1)).folder
    changed, executed = folder / "02_acceptance.ipynb", folder / "00_overview.ipynb"
    node = nbformat.read(changed, as_version=4)
    node.cells[-1].source += "  # mine"
    nbformat.write(node, changed)
    node = nbformat.read(executed, as_version=4)
    node.cells[1].outputs = [nbformat.v4.new_output("stream", text="42")]
    nbformat.write(node, executed)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    assert lab.write(run_on(world, out, seed=1)).kept == [changed.name]
    assert {path: path.read_bytes() for path in folder.iterdir()} == before

    assert lab.write(run_on(world, out, seed=2)).kept == [changed.name]
    assert changed.read_bytes() == before[changed]
    assert configuration(executed).seed == 2
    assert configuration(folder / "05_attention_mask.ipynb").seed == 2


def test_what_is_no_notebook_is_said(world, tmp_path):
    run = run_on(world, tmp_path / "out")
    path = lab.write(run).folder / "03_hidden_state_divergence.ipynb"
    path.write_text("not JSON")
    with pytest.raises(BadInput, match=r"03_hidden_state_divergence.ipynb is not a notebook"):
        lab.write(run)


def test_the_verb_takes_what_report_takes():
    commands = typer.main.get_command(cli.app).commands
    report_, lab_ = ({p.name for p in commands[name].params} for name in ("report", "lab"))
    assert report_ - lab_ == {"fail_on", "open_"}
    assert lab_ - report_ == {"port", "no_browser"}


def test_without_jupyterlab_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_server, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="pip install jupyterlab"), lab_server.serving(tmp_path, "x"):
        pass


@pytest.mark.allow_hosts("127.0.0.1")
def test_a_port_that_is_taken_is_said(tmp_path):
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        for taken in (port, 70_000):
            with (
                pytest.raises(BadInput, match=f"port {taken} cannot be used; expected a free one"),
                lab_server.serving(tmp_path, "x", port=taken),
            ):
                pass


@pytest.mark.allow_hosts("127.0.0.1")
def test_a_server_that_does_not_start_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        pytest.raises(DiagError, match="ended with code 1 before it answered"),
        lab_server.serving(tmp_path, "x"),
    ):
        pass


COPY = "00_overview.ipynb"


@pytest.mark.parametrize(
    "content",
    ["", "[", "{}", '{"cells": 1}', '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}']
    + [
        json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": meta, "cells": [cell]})
        for cell in (1, {}, {"cell_type": "code"}, {"cell_type": "code", "source": [1]})
        for meta in ({}, {"dflash_diag": 1})
    ],
)
def test_a_copy_of_a_notebook_that_is_none(tmp_path, content):
    run = Run(RunConfig(out=str(tmp_path)), [], RunConfig())
    lab.write(run)
    path = tmp_path / "lab" / COPY
    path.write_text(content)
    with pytest.raises(BadInput, match=COPY):
        lab.write(run)


def test_what_stands_in_the_place_of_a_copy(tmp_path):
    run = Run(RunConfig(out=str(tmp_path)), [], RunConfig())
    (tmp_path / "lab").mkdir()
    path = tmp_path / "lab" / COPY
    path.symlink_to(path.name)
    lab.write(run)
    assert path.is_file()  # a link that leads nowhere is replaced
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadInput, match=COPY):
        lab.write(run)
