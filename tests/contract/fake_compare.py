"""Simulated drafters side by side, compared as a run compares them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from dflash_diag import metrics, storage
from dflash_diag.compare import Side
from dflash_diag.comparison import Member, compared
from dflash_diag.training_logs import TrainingLog
from dflash_diag.trend import Point, trend

LINE = "/runs/<b>mine</b>"
FACTS = {"target's dtype": "float32", "version of torch": "2.9"}


def member(scores: SimpleNamespace, name: str, step: int | None = None, **more) -> Member:
    jumps = {row["id"]: row["rounds"] for row in metrics.per_prompt(scores)}
    side = Side.of(jumps, name=name, capture="text", step=step)
    return Member(side, jumps, scores.labels.shape[1], **({"facts": FACTS, "line": LINE} | more))


def log() -> TrainingLog:
    steps = range(0, 8001, 100)
    rows = [
        {"step": step, "phase": phase, "group": phase, "metric": "streak",
         "value": high * step / (step + 2000), "known": True}
        for phase, high in (("train", 3.2), ("validation", 2.1)) for step in steps
    ]  # fmt: skip
    return TrainingLog(Path("log.csv"), "csv", pd.DataFrame(rows))


def comparison(members: list[Member], *, draws: int) -> dict:
    """Members of which the first has a step, with what came before it."""
    points = [
        Point(one.side, one.side.tau(seed=0, draws=draws), one.line)
        for one in members
        if not one.is_reference
    ]
    found = compared(members, seed=0, draws=draws)
    line = trend(points[1:], points[0], log=log(), seed=0, draws=draws)
    made = found | (
        {"trend": None, "no_trend": line} if isinstance(line, str)
        else {"trend": line, "no_trend": None}
    )  # fmt: skip
    return storage.plain(made)
