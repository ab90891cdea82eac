"""Walked tau over training steps, what the last step changed, and what training logged meanwhile.

Checkpoints of one training make a line. The last of them is compared with the one before it and
with the first, paired by prompt like any two drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_diag.compare import Pair, Side, pair
from dflash_diag.metric_names import LENGTHS, read_name
from dflash_diag.stats import DRAWS, Estimate, holm
from dflash_diag.training_logs import TrainingLog

LOGGED = 2
"""Logged numbers that are shown: of the training, and of one validation."""
POINTS = 200
"""Steps of a log that are kept; more are thinned out evenly."""
LENGTH = frozenset(one.kind for one in LENGTHS) | {"topk_oracle", "ddtree_tau", "chain_tau"}


@dataclass(frozen=True, eq=False)
class Point:
    """One checkpoint of a training."""

    side: Side
    tau: Estimate
    line: str
    """Which training it is of."""


def line_of(path: str) -> str:
    """Folder in which the checkpoints of one training lie, judged by where the step stands."""
    from dflash_diag.checkpoints.training_step import step_in_name

    own = Path(path)
    named_above = step_in_name(Path("/") / own.name) is None and step_in_name(own) is not None
    return str(own.parent.parent if named_above else own.parent)


def trend(
    points: Sequence[Point],
    own: Point,
    *,
    log: TrainingLog | None = None,
    seed: int,
    draws: int = DRAWS,
) -> dict[str, Any] | str:
    """The line of one checkpoint, and those of other trainings measured on the same text.

    Parameters
    ----------
    points
        Checkpoints so far in the order in which they were measured; of two of the same training
        and step the later counts.
    own
        The checkpoint that is asked about, which counts before all of them.

    Returns
    -------
    dict or str
        The reason where there are fewer than two steps to compare.
    """
    if own.side.step is None:
        return f"Neither the files of {own.side.name} nor its name tell its training step."
    usable = [one for one in points if one.side.step is not None]
    same = [one for one in usable if one.side.capture == own.side.capture]
    latest = {(one.line, one.side.step): one for one in [*same, own]}
    lines: dict[str, list[Point]] = {}
    for one in sorted(latest.values(), key=lambda one: one.side.step or 0):
        lines.setdefault(one.line, []).append(one)
    line = lines.pop(own.line)
    left_out = _left_out(len(points) - len(usable), len(usable) - len(same))
    if len(line) < 2:
        return " ".join([f"Step {own.side.step} is the only one of its training.", *left_out])
    others = [one for rest in lines.values() if len(rest) > 1 for one in rest]
    return {
        "line": own.line,
        "points": [_point(one) for one in [*line, *others]],
        "changes": _changes([one.side for one in line], seed=seed, draws=draws),
        "log": None if log is None else logged(log),
        "left_out": left_out,
    }


def _left_out(stepless: int, other: int) -> list[str]:
    said = []
    for n, why in ((stepless, "without a step"), (other, "measured on other text")):
        if n:
            said.append(f"Left out: {n} checkpoint{'' if n == 1 else 's'} {why}.")
    return said


def _point(one: Point) -> dict[str, Any]:
    return {
        "name": one.side.name,
        "line": one.line,
        "step": one.side.step,
        "tau": one.tau.to_json(),
        "n_prompts": len(one.side.ids),
    }


def _changes(line: Sequence[Side], *, seed: int, draws: int) -> list[dict[str, Any]]:
    """The last step less the one before it, and less the first, with what Holm makes of both."""
    earlier = {"before": line[-2]} | ({"first": line[0]} if len(line) > 2 else {})
    found = {what: pair(line[-1], one, seed=seed, draws=draws) for what, one in earlier.items()}
    return [
        {"since": what, "steps": [earlier[what].step, line[-1].step], **one.to_json()}
        for what, one in zip(found, _adjusted(list(found.values())), strict=True)
    ]


def _adjusted(found: Sequence[Pair]) -> list[Pair]:
    adjusted = holm([one.p for one in found])
    return [
        replace(one, p_adjusted=p, comparisons=len(found))
        for one, p in zip(found, adjusted, strict=True)
    ]


def logged(log: TrainingLog) -> dict[str, Any]:
    """Acceptance numbers of a log that are worth a line.

    The first length of its training and of a validation, or the first share where no length was
    logged.
    """
    tables = {group: log.table(group) for group in log.groups()}
    for unit in ("tokens", "share"):
        lines = []
        for group, table in tables.items():
            name = next((one for one in table if _unit(str(one)) == unit), None)
            if name is None:
                continue
            values = table[name].dropna()
            step = -(-len(values) // POINTS)
            kept = values.iloc[(len(values) - 1) % step :: step]  # with the last one
            lines.append(
                {
                    "name": f"{group} {name}",
                    "steps": [int(one) for one in kept.index],
                    "values": [float(one) for one in kept],
                }
            )
        if lines:
            return {"unit": unit, "lines": lines[:LOGGED], "file": log.path.name}
    return {"unit": "tokens", "lines": [], "file": log.path.name}


def _unit(name: str) -> str:
    """Whether a logged number counts tokens or is a share."""
    read: Mapping[str, Any] = {one.kind: one for one in read_name(name).readings}
    return "tokens" if any(kind in LENGTH for kind in read) else "share"
