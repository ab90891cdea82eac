"""How far apart two computations of the same tensor are, and whether that is more than rounding.

Every pair is described by several numbers, because each hides something: relative RMS a few bad
tokens, the cosine a wrong scale, and both what happens outside the few channels with massive
activations. An error is judged against the *noise floor*: the same code in low precision against
itself in float32. It counts as a difference above twice that (the rule of FlashAttention's tests).

Symbols: T tokens, W the width of a tensor, x the tensor that is examined, y the one it is compared
with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

FACTOR = 2.0
"""An error above this many noise floors is no rounding."""
ASSUMED_FLOOR = 0.02 / FACTOR
"""Relative RMS of a deep residual stream in bfloat16 where no floor was measured: fla's own tests
allow errors of 0.005 to 0.02."""
TRIMMED = 0.001
"""Share of channels, those with the largest activations, that the trimmed number leaves out."""

JUDGED = ("rel_rms", "rel_rms_trimmed", "token_p99")
"""Numbers that are compared with the floor."""


@dataclass
class Deviation:
    """Difference of x from y over any number of sequences; rows that are not finite count apart.

    ``rel_rms`` is ``|x - y| / |y|``, ``one_minus_cos`` is ``1 - <x, y> / (|x| |y|)``, both over all
    entries, in float64; ``token_*`` are quantiles of the relative RMS of single rows.
    """

    squared: float = 0.0
    reference: float = 0.0
    examined: float = 0.0
    product: float = 0.0
    max_abs: float = 0.0
    at: tuple[int, int, int] | None = None
    """Sequence, token and channel of the largest difference."""
    rows: list[Tensor] = field(default_factory=list)
    channels: tuple[Tensor, Tensor] | None = None
    nan_rows: int = 0
    inf_rows: int = 0
    zero_rows: int = 0
    n_tokens: int = 0

    def add(
        self, x: Tensor, y: Tensor, *, sequence: int = 0, positions: Tensor | None = None
    ) -> dict[str, Any]:
        """Take in x and y, [T, W] each.

        Parameters
        ----------
        sequence, positions
            Names of the sequence and of its rows [T], for the place of the largest difference.

        Returns
        -------
        dict
            Of these rows alone: ``rel_rms``, ``token_max``, and ``token``, the row that has it;
            None where nothing is finite.
        """
        y = y.to(x.device)
        nan, inf = x.isnan().any(-1), x.isinf().any(-1)
        self.nan_rows += int(nan.sum())
        self.inf_rows += int((inf & ~nan).sum())
        self.zero_rows += int(((x == 0).all(-1) & ~(y == 0).all(-1)).sum())
        self.n_tokens += len(x)
        good = torch.isfinite(x).all(-1) & torch.isfinite(y).all(-1)
        if not bool(good.any()):
            return {"rel_rms": None, "token_max": None, "token": None}
        numbers = torch.arange(len(x)) if positions is None else positions
        kept = numbers.to(x.device)[good]
        x, y = x[good].double(), y[good].double()
        d = x - y
        d2, y2 = d.square(), y.square()
        self.squared += float(d2.sum())
        self.reference += float(y2.sum())
        self.examined += float(x.square().sum())
        self.product += float((x * y).sum())
        per_row = (d2.sum(-1) / y2.sum(-1).clamp(min=torch.finfo(y.dtype).tiny)).sqrt()
        self.rows.append(per_row.cpu())
        sums = (d2.sum(0).cpu(), y2.sum(0).cpu())
        before = self.channels
        self.channels = sums if before is None else (before[0] + sums[0], before[1] + sums[1])
        row, channel = divmod(int(d2.argmax()), d.shape[1])
        largest = float(d[row, channel].abs())
        if largest > self.max_abs or self.at is None:
            self.max_abs, self.at = largest, (sequence, int(kept[row]), channel)
        return {
            "rel_rms": _ratio(float(d2.sum()), float(y2.sum())),
            "token_max": float(per_row.max()),
            "token": int(kept[int(per_row.argmax())]),
        }

    def to_json(self) -> dict[str, Any]:
        """The numbers by name; None where nothing finite was seen."""
        sequence, token, channel = self.at or (None, None, None)
        rows = torch.cat(self.rows) if self.rows else None
        quantiles = (
            [None, None, None]
            if rows is None
            else [float(rows.quantile(q)) for q in (0.5, 0.99)] + [float(rows.max())]
        )
        return {
            "n_tokens": self.n_tokens,
            "rel_rms": None if rows is None else _ratio(self.squared, self.reference),
            "rel_rms_trimmed": self._trimmed(),
            "one_minus_cos": self._one_minus_cos(),
            "token_p50": quantiles[0],
            "token_p99": quantiles[1],
            "token_max": quantiles[2],
            "max_abs": None if self.at is None else self.max_abs,
            "max_abs_sequence": sequence,
            "max_abs_token": token,
            "max_abs_channel": channel,
            "nan_rows": self.nan_rows,
            "inf_rows": self.inf_rows,
            "zero_rows": self.zero_rows,
        }

    def _trimmed(self) -> float | None:
        """Relative RMS without the channels of the largest activations."""
        if self.channels is None:
            return None
        squared, reference = self.channels
        n_left_out = max(1, round(TRIMMED * len(reference))) if len(reference) > 1 else 0
        kept = reference.argsort(descending=True)[n_left_out:]
        return _ratio(float(squared[kept].sum()), float(reference[kept].sum()))

    def _one_minus_cos(self) -> float | None:
        norm = (self.examined * self.reference) ** 0.5
        return None if norm == 0 else max(0.0, 1 - self.product / norm)


def _ratio(squared: float, reference: float) -> float | None:
    if reference == 0:
        return 0.0 if squared == 0 else None
    return float((squared / reference) ** 0.5)


def deviation(x: Tensor, y: Tensor) -> dict[str, Any]:
    """The numbers of one pair of tensors [T, W]; see `Deviation`."""
    made = Deviation()
    made.add(x, y)
    return made.to_json()


def with_floor(
    rows: Iterable[Mapping[str, Any]], floor: Mapping[Any, Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Rows of differences, each with its floor and whether it is above.

    Parameters
    ----------
    rows
        In execution order, with ``layer`` and ``module``.
    floor
        ``(layer, module)`` to the numbers of low precision against float32; None assumes
        `ASSUMED_FLOOR` for every one.
    """
    found = []
    for row in rows:
        noise = None if floor is None else floor.get((row["layer"], row["module"]))
        limits = {name: ASSUMED_FLOOR if noise is None else noise[name] or 0.0 for name in JUDGED}
        if noise is None:
            # No rule for single tokens is known, so without a measured floor none is applied.
            limits["token_p99"] = float("inf")
        times = [times_floor(row[name], limits[name]) for name in JUDGED]
        broken = row["nan_rows"] + row["inf_rows"] + row["zero_rows"] > 0
        found.append(
            {
                **row,
                "floor": limits["rel_rms"],
                "floor_measured": noise is not None,
                "times_floor": max(times),
                "above": broken or max(times) > FACTOR,
            }
        )
    return found


def times_floor(value: float | None, limit: float | None) -> float:
    """How many noise floors a difference is; infinite where it is not a number."""
    if value is None:
        return float("inf")
    if value == 0:
        return 0.0
    return value / limit if limit else float("inf")


def first_above(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first row above its floor, in execution order, and where its error comes from.

    Returns
    -------
    dict
        ``layer``, ``module``, ``rel_rms``, ``floor``, the ``input`` (layer, module and rel_rms of
        the row before) and the ``origin``: ``created`` there; ``inherited`` from modules whose
        error is each within the noise but adds up; ``unknown`` where layers in between are missing.
        None if no row is above.
    """
    index = next((i for i, row in enumerate(rows) if row["above"]), None)
    if index is None:
        return None
    row = rows[index]
    before = rows[index - 1] if index else None
    local = row.get("local_times_floor")
    if local is not None:
        origin = "created" if local > FACTOR else "inherited"
    elif before is None:
        origin = "created" if row["layer"] == -1 else "unknown"
    else:
        origin = "created" if row["layer"] - before["layer"] <= 1 else "unknown"
    return {
        "layer": row["layer"],
        "module": row["module"],
        "rel_rms": row["rel_rms"],
        "floor": row["floor"],
        "times_floor": row["times_floor"],
        "input": before and {k: before[k] for k in ("layer", "module", "rel_rms")},
        "origin": origin,
    }
