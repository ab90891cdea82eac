"""How long ``import dflash_diag`` takes: ``python tests/benchmarks/import_time.py``.

Fresh processes, the interpreter's own start subtracted; the aim is below 0.15 s. A number to read
rather than a test: on a busy machine it would fail for no fault of ours.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from stamp import stamp

RUNS = 9


def seconds(code: str) -> float:
    """Median wall time of a process that runs ``code``."""
    taken = []
    for _ in range(RUNS):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main() -> None:
    print(stamp())
    empty = seconds("pass")
    for module in ("dflash_diag", "dflash_diag.cli"):
        print(f"import {module}: {seconds(f'import {module}') - empty:.3f} s (median of {RUNS})")


if __name__ == "__main__":
    main()
