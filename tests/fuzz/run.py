"""Mutated inputs of every kind, read under limits: a table of what became of them.

``python tests/fuzz/run.py --inputs 10000 --seed 0`` prints it, and ends with 1 if any input did
anything but be accepted or refused with one line. Those inputs are kept; ``--replay FILE`` reads
one of them again. The same seed makes the same inputs.
"""

from __future__ import annotations

import argparse
import collections
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "benchmarks")]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import sandbox
from corpus import KINDS, Kind, write_world
from sandbox import Outcome
from stamp import stamp

COLUMNS = ("tried", "accepted", "refused", "crashed", "slowest")


def table(outcomes: list[Outcome]) -> str:
    """One line a kind."""
    width = max(map(len, KINDS))
    lines = [f"{'kind of input':{width}}" + "".join(f"{name:>10}" for name in COLUMNS)]
    rows = [(name, [one for one in outcomes if one.kind == name]) for name in KINDS]
    for name, of in [*rows, ("all", outcomes)]:
        if of:
            counts = collections.Counter(one.verdict for one in of)
            cells = [len(of), *(counts[verdict] for verdict in COLUMNS[1:4])]
            slowest = max(one.seconds for one in of)
            lines.append(
                f"{name:{width}}" + "".join(f"{n:>10}" for n in cells) + f"{slowest:>8.2f} s"
            )
    return "\n".join(lines)


def causes(outcomes: list[Outcome]) -> str:
    """What crashed, by the last line of each traceback."""
    last = [
        (one.said.strip().splitlines() or ["?"])[-1][:110]
        for one in outcomes
        if one.verdict == "crashed"
    ]
    return "\n".join(f"{n:>6} x {line}" for line, n in collections.Counter(last).most_common(30))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="index of each kind's first input")
    parser.add_argument("--kind", choices=list(KINDS), action="append", help="only these kinds")
    parser.add_argument("--keep", type=Path, default=Path("out/fuzz"), help="for what crashes")
    parser.add_argument("--replay", type=Path, help="a .tar file that was kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz-world-") as folder:
        world = write_world(Path(folder))
        if given.replay:
            return _replay(given.replay, sandbox.kind_of(given.replay), world)
        shutil.rmtree(given.keep, ignore_errors=True)
        counts = sandbox.shares(given.inputs)
        if given.kind:
            counts = {name: given.inputs // len(given.kind) for name in given.kind}
        began = time.monotonic()
        outcomes = sandbox.fuzz(counts, given.seed, world, given.keep.resolve(), given.start)
    crashed = [one for one in outcomes if one.verdict == "crashed"]
    print(stamp().replace("tests/benchmarks", "tests/fuzz"))
    print(
        f"{len(outcomes)} inputs in {time.monotonic() - began:.0f} s; each has {sandbox.SECONDS} s "
        f"and {sandbox.RESIDENT // 2**20} MiB"
    )
    print(table(outcomes))
    if crashed:
        print(f"\nkept in {given.keep}:\n{causes(outcomes)}")
    return 1 if crashed else 0


def _replay(kept: Path, kind: Kind, world: Path) -> int:
    sandbox.warm(kind, world)
    outcome = sandbox.replay(kind, kept.resolve(), world)
    print(f"{outcome.kind}: {outcome.verdict} after {outcome.seconds:.2f} s\n{outcome.said}")
    return 1 if outcome.verdict == "crashed" else 0


if __name__ == "__main__":
    sys.exit(main())
