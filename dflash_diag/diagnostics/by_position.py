"""Where in the block proposals stop being accepted."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Threshold, diagnostic, estimate, percent
from dflash_diag.published import published_curves

FIRST = Threshold(
    estimate="survival_1",
    at_least=0.65,
    what="the share of rounds whose first proposal is accepted",
    source=(
        "usable published DFlash-family drafters accept the first proposal in 0.65 to 0.89 of "
        "rounds, a checkpoint called weak in 0.48 (data/published_survival_curves.csv)"
    ),
)
RATES = ("marginal", "survival", "conditional")


@diagnostic(
    id="acceptance.by_position",
    question="Where in the block do proposals stop being accepted?",
    page="02_acceptance",
    thresholds=[FIRST],
)
def by_position(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Marginal m_k, survival S_k and conditional c_k = S_k / S_(k-1), walked and uniform.

    Returns
    -------
    tuple
        Frame columns: role, drafter, population, k, n (rounds or anchors), n_before (of them,
        those with the first k-1 right), and for each rate [share] its value, ``_lo``, ``_hi``.
    """
    import pandas as pd

    rows = []
    for role in inputs.roles:
        found = inputs.metrics(role)
        for population, key in (("walked", "by_position_walked"), ("uniform", "by_position")):
            before = found[key][0]["n"]
            for one in found[key]:
                row = {
                    "role": role,
                    "drafter": inputs.name(role),
                    "population": population,
                    "k": one["k"],
                    "n": one["n"],
                    "n_before": before,
                }
                for rate in RATES:
                    ends = "" if rate == "survival" else f"{rate}_"
                    row |= {rate: one[rate], f"{rate}_lo": one[f"{ends}lo"]}
                    row[f"{rate}_hi"] = one[f"{ends}hi"]
                rows.append(row)
                before = round(one["survival"] * one["n"])
    frame = pd.DataFrame(rows)
    rates = [f"{rate}{end}" for rate in RATES for end in ("", "_lo", "_hi")]
    frame[rates] = frame[rates].astype(float)
    found = inputs.metrics(inputs.roles[0])
    n, name = found["n_prompts"], inputs.name(inputs.roles[0])
    curve = found["by_position_walked"]
    first = {"value": curve[0]["survival"], "lo": curve[0]["lo"], "hi": curve[0]["hi"]}
    estimates = {"survival_1": estimate(first, n, "share")}
    ours = frame[(frame["role"] == inputs.roles[0]) & (frame["population"] == "walked")]
    weakest = _weakest(ours)
    said = (
        f"{name}: the first proposal is accepted in {percent(curve[0]['survival'])} of rounds, "
        f"the whole block of {found['n_proposed']} in {percent(curve[-1]['survival'])}"
    )
    published, notes = published_curves(), []
    if published:
        notes.append(
            f"Grey: {len(published)} published curves of served drafters, other models and data."
        )
    if weakest is not None:
        k, share = weakest
        notes.append(
            f"The weakest link is position {k}: given that all before it were right, it is right "
            f"in {percent(share)} of rounds."
        )
    return (
        f"{said}.",
        frame,
        {
            "estimates": estimates,
            "params": {
                "n_prompts": n,
                "published": published,
                "finding": f"{name}: first proposal accepted in {percent(curve[0]['survival'])}, "
                f"second in {percent(curve[1]['survival']) if len(curve) > 1 else 'none'}",
            },
            "notes": notes,
        },
    )


def _weakest(frame: Any, least: int = 30) -> tuple[int, float] | None:
    """Position with the lowest conditional rate among those that ``least`` rounds reached."""
    reached = frame[(frame["n_before"] >= least) & frame["conditional"].notna()]
    if not len(reached):
        return None
    row = reached.loc[reached["conditional"].idxmin()]
    return int(row["k"]), float(row["conditional"])
