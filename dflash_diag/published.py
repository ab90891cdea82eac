"""Public per-position curves, to be drawn beside a user's own; each carries its source."""

from __future__ import annotations

import csv
from typing import Any

from dflash_diag.paths import checkout

FILE = "published_survival_curves.csv"


def published_curves() -> list[dict[str, Any]]:
    """Survival curves of served drafters; none for an installed copy, whose wheel has no data.

    Returns
    -------
    list of dict
        ``source``, ``what`` (model, data, temperature) and ``survival``, a list of rates.
    """
    root = checkout()
    path = None if root is None else root / "data" / FILE
    if path is None or not path.exists():
        return []
    curves, source = [], ""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            source = source if row["source"] == "same" else row["source"]
            curves.append(
                {
                    "source": source,
                    "what": row["model_data_temperature"],
                    "survival": [float(rate) for rate in row["survival"].split()],
                }
            )
    return curves
