"""How long the explorer takes to redraw: ``python tests/benchmarks/explorer.py``.

Random moves of its controls over the embedded example, each timed from the change to the new HTML
in the kernel; the way to the browser and what that does with it are not in it. The limit is 200 ms
for the 95th percentile.
"""

from __future__ import annotations

import argparse
import random
import time

import numpy as np
from stamp import stamp

from dflash_diag.config import RunConfig
from dflash_diag.runs import Run
from dflash_diag.widgets import Explorer
from dflash_diag.widgets.explorer.controls import Controls

LIMIT_MS = 200


def moves(controls: Controls, rng: random.Random, n: int) -> dict[str, list[float]]:
    """Milliseconds of every move, by the control that was moved."""
    taken: dict[str, list[float]] = {}
    while sum(map(len, taken.values())) < n:
        name = rng.choice([*controls.menus, *controls.buttons])
        if name in controls.buttons:
            start = time.perf_counter()
            controls.buttons[name].click()
        else:
            menu = controls.menus[name]
            others = [value for _, value in menu.options if value != menu.value]
            if not others:
                continue
            value = rng.choice(others)
            start = time.perf_counter()
            menu.value = value
        taken.setdefault(name, []).append(1000 * (time.perf_counter() - start))
    return taken


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", default="out/benchmark-explorer")
    options.add_argument("--moves", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    chosen = options.parse_args()
    print(stamp())
    run = Run.open(RunConfig(out=chosen.out))
    for role in run.roles:
        run.scores(role)
    start = time.perf_counter()
    explorer = Explorer(run)
    controls = Controls(explorer)
    first = 1000 * (time.perf_counter() - start)
    taken = moves(controls, random.Random(chosen.seed), chosen.moves)
    every = np.concatenate(list(taken.values()))
    print(f"first view {first:.0f} ms; {len(every)} random moves")
    print("| control | moves | median [ms] | 95 % [ms] | longest [ms] |")
    print("|---|---|---|---|---|")
    for name, found in [*sorted(taken.items()), ("**all**", every)]:
        middle, high = np.percentile(found, [50, 95])
        print(f"| {name} | {len(found)} | {middle:.1f} | {high:.1f} | {np.max(found):.1f} |")
    print(f"limit {LIMIT_MS} ms; HTML of a block {len(controls.shown.value) / 1000:.0f} kB")


if __name__ == "__main__":
    main()
