"""A second process measures ahead: the same numbers, and nobody's business if it cannot."""

from __future__ import annotations

import subprocess
import time

import pytest
import torch

from dflash_diag import ahead as module
from dflash_diag import storage
from dflash_diag.ahead import ahead
from dflash_diag.alignment_runs import alignment_path
from dflash_diag.config import RunConfig
from dflash_diag.diagnostics.base import DRAFTER
from dflash_diag.runs import Run
from tests import tiny_world


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return tiny_world.write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def run(world, tmp_path):
    return Run.open(
        RunConfig(
            target=str(world / "target"),
            drafter=str(world / "drafter"),
            prompts=str(world / "prompts.jsonl"),
            max_new_tokens=12,
            draws=200,
            out=str(tmp_path / "out"),
        )
    )


@pytest.fixture
def started(monkeypatch):
    """Processes that were started; every run is worth one."""
    found = []
    start = subprocess.Popen

    def started_too(command, **options):
        process = start(command, **options)
        process.environment = options.get("env")
        if module.__name__ in command:
            found.append(process)
        return process

    monkeypatch.setattr(module, "WORTH", 1)
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.subprocess, "Popen", started_too)
    return found


@pytest.fixture
def threads():
    """As many as leave one for each of the processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def test_it_measures_what_this_process_would(run, started, threads):
    path = alignment_path(run, DRAFTER)
    with ahead(run):
        (process,) = started
        assert process.environment["OMP_NUM_THREADS"] == "1"
        assert torch.get_num_threads() == 1
        assert process.wait(timeout=120) == 0
    made = path.read_bytes()
    assert torch.get_num_threads() == threads
    path.unlink()
    torch.set_num_threads(1)
    run.alignment()
    assert path.read_bytes() == made


def test_a_run_that_goes_on_adds_up_as_one_from_the_beginning(run, started, threads):
    """What is there needs no process; but the number of threads decides how sums are rounded."""
    storage.write_json(alignment_path(run, DRAFTER), {})
    with ahead(run):
        assert started == []
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads


def test_it_ends_with_the_body_and_what_it_lacks_is_measured_here(run, started):
    threads, before = torch.get_num_threads(), time.monotonic()
    with pytest.raises(KeyboardInterrupt), ahead(run):
        raise KeyboardInterrupt
    assert time.monotonic() - before < 5
    assert started[0].returncode != 0
    assert torch.get_num_threads() == threads
    assert not alignment_path(run, DRAFTER).exists()
    assert run.alignment()["findings"]


def test_one_that_cannot_start_is_no_error(run, started, monkeypatch):
    monkeypatch.setattr(module.sys, "executable", "/bin/false")
    with ahead(run):
        pass
    assert started[0].returncode != 0


def test_little_work_and_other_devices_get_none(run, started, monkeypatch):
    for name, value in {"WORTH": 10**6, "cpu_count": lambda: 1}.items():
        with monkeypatch.context() as patch:
            patch.setattr(module if name == "WORTH" else module.os, name, value)
            with ahead(run):
                assert started == []
