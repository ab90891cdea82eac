"""A bar on a terminal, whole lines elsewhere, silence on request."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from dflash_diag import progress as module
from dflash_diag.errors import BadInput
from dflash_diag.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    return standard_error(monkeypatch, Terminal())


@pytest.fixture
def log(monkeypatch):
    return standard_error(monkeypatch, io.StringIO())


def standard_error(monkeypatch, stream):
    """Give the module another standard error; pytest puts its own back into `sys`."""
    monkeypatch.delenv("DFLASH_DIAG_PROGRESS", raising=False)
    monkeypatch.setattr(module, "sys", SimpleNamespace(stderr=stream))
    return stream


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves by hand."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_items_pass_through_unchanged(log):
    assert list(progress("abc", "letters")) == ["a", "b", "c"]
    assert list(progress(iter([1, 2]), "unknown length")) == [1, 2]
    assert list(progress([], "nothing")) == []


def test_one_line_a_stage_in_a_log(log, clock):
    for _ in progress([1, 2, 3, 4], "scoring", unit="prompt"):
        clock[0] += 0.5
    assert log.getvalue() == "scoring: 4/4 prompt, 2.0 s, 2 prompt/s, done\n"


def test_a_long_stage_shows_that_it_goes_on(log, clock):
    with progress(10, "training", unit="step") as stage:
        stage.update(2)
        clock[0] += module.HEARTBEAT_S
        stage.update(2, note="loss 2.1")
        stage.update(1)
        clock[0] += 10
        stage.update(5)
    assert log.getvalue().splitlines() == [
        "training: 4/10 step, 30.0 s, 0.133 step/s, 45 s left, loss 2.1",
        "training: 10/10 step, 40.0 s, 0.25 step/s, loss 2.1, done",
    ]


def test_a_stage_that_fails_says_how_far_it_came(log, clock):
    with pytest.raises(ZeroDivisionError):
        for item in progress([1, 0], "dividing"):
            assert 1 / item
    assert log.getvalue() == "dividing: 1/2 it, 0.0 s, stopped\n"


def test_leaving_a_loop_early_ends_the_stage(log, clock):
    for item in progress(range(5), "looking"):
        if item == 2:
            break
    assert log.getvalue().startswith("looking: 2/5 it")


def test_a_terminal_gets_a_bar_with_rate_and_time_left(terminal):
    with progress(4, "scoring", unit="prompt") as stage:
        stage.update(4, note="tau 2.7")
    last = terminal.getvalue().split("\r")[-1]
    assert re.search(
        r"scoring: 100%\|.*\| 4/4 \[00:00<00:00, .* prompt/s, tau 2.7\]\n", terminal.getvalue()
    ), last


def test_an_inner_bar_goes_away_and_the_outer_one_stays(terminal):
    for _ in progress([1], "outer"):
        for _ in progress([1], "inner"):
            pass
    shown = terminal.getvalue()
    assert "inner" in shown
    assert "inner" not in shown[shown.rindex("outer") :]
    assert shown.endswith("\n")


def test_stages_nest_in_a_log(log, clock):
    for _ in progress([1], "outer"):
        list(progress([1], "inner"))
    assert [line.split(":")[0] for line in log.getvalue().splitlines()] == ["inner", "outer"]


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_silence(terminal, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "silent")
    assert list(progress([1, 2], "quiet", silent=how == "argument")) == [1, 2]
    assert terminal.getvalue() == ""


def test_the_environment_decides_against_the_stream(terminal, monkeypatch):
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "lines")
    list(progress([1], "stage"))
    assert "\r" not in terminal.getvalue()
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "loud")
    with pytest.raises(BadInput, match="expected one of auto, bar, lines, silent"):
        progress([1], "stage")


def test_a_counted_stage_cannot_be_iterated(log):
    with pytest.raises(TypeError, match="call update"):
        list(progress(3, "steps"))
