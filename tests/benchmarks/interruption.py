"""Kill capture, score, report and watch at random moments; do reruns end with the same numbers?

    python tests/benchmarks/interruption.py --kills 30 --seed 0

Every kill is a real signal to a real process at work on the tiny world: SIGKILL, SIGTERM or
SIGINT, at a moment drawn evenly over the time of an undisturbed run. The same command is then run
again. Its exit code has to be 0, and all that it leaves has to be equal to what the undisturbed run
left: tables byte by byte, JSON in all but times. The report runs one of its notebooks, and
a watch starts reports that take no time.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import killing
from killing import Spawner, Stage
from stamp import stamp

SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
TURNS = (*("capture", "score", "watch") * 2, "report", "capture", "score", "watch")
ROW = "{:>4}  {:8} {:>7} {:>12}  {:8} {:>9} {:>11} {:>11}  {}"


def undisturbed(stage: Stage, spawner: Spawner) -> tuple[float, dict, list[str]]:
    """Seconds of a run, and what it leaves."""
    shutil.rmtree(stage.out, ignore_errors=True)
    start = time.monotonic()
    code = stage.start(spawner).wait()
    seconds = time.monotonic() - start
    if code:
        sys.exit(f"{stage.name} ended with {code}: {stage.said()}")
    return seconds, killing.kept(stage), killing.pages(stage)


def interrupted(stage: Stage, spawner: Spawner, number: int, moment: float) -> int:
    """Exit code of a run that is sent a signal after so many seconds."""
    shutil.rmtree(stage.out, ignore_errors=True)
    running = stage.start(spawner)
    time.sleep(moment)
    ended = running.ended()
    if ended is not None:
        return ended
    running.kill(number)
    return running.wait()


def table(kills: int, seed: int, folder: Path, only: list[str]) -> bool:
    """Print a row for every kill, and whether all were made good."""
    draw, good = random.Random(seed), 0
    stages = killing.stages(killing.write_world(folder / "world"), folder)
    turns = [name for name in TURNS if name in only]
    print(stamp())
    print(ROW.format("kill", "stage", "full s", "moment", "signal", "exit code", "resumed s",
                     "exit code", "equal?"), flush=True)  # fmt: skip
    with Spawner() as spawner:
        undisturbed(stages["capture"], spawner)  # what is slow once
        known = {name: undisturbed(stages[name], spawner) for name in dict.fromkeys(turns)}
        for kill in range(kills):
            stage, number = stages[turns[kill % len(turns)]], SIGNALS[kill % len(SIGNALS)]
            seconds, numbers, pages = known[stage.name]
            share, code = draw.random(), 0
            while code == 0:  # over before it was met: this machine was faster than at first
                code = interrupted(stage, spawner, number, share * seconds)
                share *= 0.7
            start = time.monotonic()
            again = stage.start(spawner).wait()
            resumed = time.monotonic() - start
            wrong = killing.differences(killing.kept(stage), numbers)
            same = not wrong and killing.pages(stage) == pages
            sys.stderr.write("".join(f"{one}\n" for one in wrong))
            good += same and again == 0
            print(ROW.format(kill + 1, stage.name, f"{seconds:.1f}", f"at {share / 0.7:.0%}",
                             number.name, code, f"{resumed:.1f}", again,
                             "yes" if same else "NO"), flush=True)  # fmt: skip
    print(f"{good} of {kills} reruns ended with the numbers of an undisturbed run")
    return good == kills


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    asked.add_argument("--kills", type=int, default=30)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--stages", nargs="+", default=list(dict.fromkeys(TURNS)))
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not table(given.kills, given.seed, Path(folder), given.stages))


if __name__ == "__main__":
    main()
