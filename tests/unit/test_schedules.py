"""The cron line and the systemd units of the README, as a reader would paste them."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer

from dflash_diag import cli

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```(cron|ini)\n(.*?)```", README, re.DOTALL)
UNITS = ("dflash-watch.service", "dflash-once.service", "dflash-once.timer")
TEXTS = dict(zip(UNITS, [text for kind, text in BLOCKS if kind == "ini"], strict=True))
FIELDS = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 7))
"""Minute, hour, day of the month, month, day of the week."""
KNOWN = {
    "Unit": {"Description", "OnFailure"},
    "Service": {
        "Type", "WorkingDirectory", "EnvironmentFile", "ExecStart", "SuccessExitStatus",
        "TimeoutStopSec", "Restart", "RestartSec",
    },
    "Timer": {"OnCalendar", "Persistent"},
    "Install": {"WantedBy"},
}  # fmt: skip


def values(field: str, low: int, high: int) -> set[int]:
    """Numbers that a field of a crontab stands for."""
    found = set()
    for part in field.split(","):
        span, _, step = part.partition("/")
        first, _, last = span.partition("-")
        start = low if span == "*" else int(first)
        end = high if span == "*" or (step and not last) else int(last or first)
        assert low <= start <= end <= high, field
        found |= set(range(start, end + 1, int(step or 1)))
    return found


def options(command: list[str]) -> dict:
    """What the verb of a command line is given; fails where it does not take it."""
    at = command.index("-m")
    assert command[at + 1 : at + 3] == ["dflash_diag", "watch"]
    verb = typer.main.get_command(cli.app).commands["watch"]
    return verb.make_context("watch", command[at + 3 :]).params


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str
    parser.read_string(TEXTS[name])
    return parser


def test_the_cron_line():
    ((_, text),) = [block for block in BLOCKS if block[0] == "cron"]
    (line,) = text.splitlines()
    *times, command = line.split(maxsplit=5)
    (minutes, hours, *days) = (
        values(field, *limits) for field, limits in zip(times, FIELDS, strict=True)
    )
    assert (minutes, hours) == (set(range(0, 60, 10)), set(range(24)))
    assert all(days)
    assert "%" not in command  # cron would end the command there
    words = shlex.split(command.replace(">> watch.log 2>&1", ""))
    given = options(words)
    assert (given["once"], given["fail_on"], given["where"]) == (True, "fail", "checkpoints")
    subprocess.run(["sh", "-n", "-c", command], check=True)


@pytest.mark.parametrize("name", UNITS)
def test_units_hold_what_systemd_knows(name):
    found = unit(name)
    for section in found.sections():
        assert set(found[section]) <= KNOWN[section]
    if name.endswith(".timer"):
        assert UNITS[1].removesuffix(".service") == name.removesuffix(".timer")
        return
    service = found["Service"]
    assert service["SuccessExitStatus"] == str(cli.INTERRUPTED)
    command = shlex.split(service["ExecStart"])
    assert command[0].startswith("/")
    assert options(command)["once"] == (service.get("Type") == "oneshot")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_units(tmp_path):
    python = tmp_path / "python"  # it checks that the program is there
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    for name, text in TEXTS.items():
        text = text.replace("/srv/drafter/.venv/bin/python", str(python))
        (tmp_path / name).write_text(text.replace("/srv/drafter", str(tmp_path)))
    (tmp_path / "dflash-alert.service").write_text(f"[Service]\nExecStart={python}\n")
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in TEXTS)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    about_ours = [line for line in verified.stderr.splitlines() if str(tmp_path) in line]
    assert (verified.returncode, about_ours) == (0, []), verified.stderr
    subprocess.run(["systemd-analyze", "calendar", "hourly"], check=True, capture_output=True)
