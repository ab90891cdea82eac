"""How often 95 % intervals cover the truth, on data sets drawn from really scored prompts.

The population are the prompts of the example and the distinct prefixes of its training and
validation texts, continued by the target and scored with two drafters. A data set is 40 prompts
drawn from it with replacement; the truth is the number over the whole population. Per-prompt sums
are kept in ``data/benchmarks/coverage_sums.json``, so that this runs without decoding::

    python tests/benchmarks/coverage.py > data/benchmarks/coverage.txt

With ``--work FOLDER`` the prompts are captured and scored again, and the sums replaced.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from stamp import stamp

from dflash_diag import metrics, storage
from dflash_diag.example import EXAMPLE
from dflash_diag.paths import data_dir
from dflash_diag.progress import progress
from dflash_diag.prompts import Prompt, read_prompts
from dflash_diag.stats import (
    DRAWS,
    Estimate,
    Ratio,
    bca_apart,
    differences,
    estimates,
    ratio,
)

HYBRID = data_dir() / "zoo" / "hybrid"
SUMS = data_dir() / "benchmarks" / "coverage_sums.json"
DRAFTERS = ("healthy", "reference")


def prompts() -> list[Prompt]:
    """Prompts of the example's files, and prefixes of its sequences; none twice."""
    made = [p for name, _ in EXAMPLE.prompts for p in read_prompts(data_dir() / name)]
    seen: set[tuple[int, ...]] = set()
    for split in ("train", "validation"):
        texts = load_file(HYBRID / "sequences" / f"{split}.safetensors")
        for i, (tokens, n) in enumerate(zip(texts["tokens"], texts["prefix"], strict=True)):
            prefix = tuple(tokens[:n].tolist())
            if prefix not in seen:
                seen.add(prefix)
                made.append(Prompt(id=f"{split}-{i:03d}", prompt_ids=prefix))
    return made


def decode(work: Path, limit: int | None) -> None:
    """Capture the population in ``work``, going on where that stopped, and keep what it sums to."""
    import torch

    from dflash_diag.capture import make_capture
    from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
    from dflash_diag.scoring import score

    torch.set_num_threads(1)
    checkpoints = {name: read_checkpoint(HYBRID / "drafters" / name) for name in DRAFTERS}
    how = {name: resolve_convention(one) for name, one in checkpoints.items()}
    capture = make_capture(
        str(HYBRID / "target"),
        prompts()[:limit],
        work / "capture",
        max_new_tokens=EXAMPLE.max_new_tokens,
        layers="taps",
        taps=sorted({tap for one in how.values() for tap in one.taps}),
    )
    kept: dict[str, dict[str, list]] = {}
    for name, checkpoint in checkpoints.items():
        scores = score(capture, load_drafter(checkpoint, how[name], dtype=torch.float32))
        sums = metrics.ratios(scores, trees=False)
        kept[name] = {
            "prompts": metrics.scored_prompts(scores),
            **{
                population: [
                    sums[f"tau_{population}_micro"][i].astype(int).tolist() for i in (0, 1)
                ]
                for population in metrics.POPULATIONS
            },
        }
    storage.write_json(SUMS if limit is None else work / SUMS.name, kept)


Numbers = dict[str, tuple[Ratio, Ratio | None]]
"""By name: one sum a prompt, or two whose difference is meant."""


def numbers() -> Numbers:
    """What is estimated: rows are the prompts that both drafters were scored on."""
    kept = storage.read_json(SUMS)
    if len({tuple(kept[name]["prompts"]) for name in DRAFTERS}) != 1:
        raise SystemExit("the drafters were scored on different prompts")
    ours, other = (
        {p: ratio(*kept[name][p], "tokens") for p in metrics.POPULATIONS} for name in DRAFTERS
    )
    return {
        "micro tau, walked": (ours["walked"], None),
        "micro tau, uniform": (ours["uniform"], None),
        "macro tau, walked": (ours["walked"].macro(), None),
        "paired difference, micro": (other["walked"], ours["walked"]),
        "paired difference, macro": (other["walked"].macro(), ours["walked"].macro()),
        "bar: anchor population": (ours["uniform"], ours["walked"]),
    }


def rows_of(one: Ratio, rows: np.ndarray) -> Ratio:
    """The sums of some prompts."""
    return Ratio(one.numerators[rows], one.denominators[rows], one.unit)


def intervals(known: Numbers, rows: np.ndarray, seed: int, draws: int) -> dict[str, Estimate]:
    """The library's own intervals for a data set."""
    single = {k: rows_of(a, rows) for k, (a, b) in known.items() if b is None}
    pairs = {
        k: (rows_of(a, rows), rows_of(b, rows)) for k, (a, b) in known.items() if b is not None
    }
    return {
        **estimates(single, seed=seed, draws=draws),
        **differences(pairs, seed=seed, draws=draws),
    }


def two_sets(known: Numbers, rows: np.ndarray, first: int, seed: int, draws: int) -> Estimate:
    """Difference of two sets of prompts, each resampled on its own: the truth is 0."""
    walked = known["micro tau, walked"][0]
    sides = [rows_of(walked, rows[:first]), rows_of(walked, rows[first:])]

    def statistic(weights: Sequence[np.ndarray]) -> np.ndarray:
        a, b = (
            (w @ one.numerators) / (w @ one.denominators)
            for w, one in zip(weights, sides, strict=True)
        )
        return (a - b)[:, None]

    sizes = [first, len(rows) - first]
    return Estimate(*bca_apart(statistic, sizes, seed=seed, draws=draws)[0])


def table(known: Numbers, n: int, options: argparse.Namespace) -> None:
    """Print the coverage over data sets of ``n`` prompts."""
    size = len(known["micro tau, walked"][0].numerators)
    everyone = np.arange(size)
    truth = {k: one.value for k, one in intervals(known, everyone, 0, 200).items()}
    first = n * 5 // 12  # 10 of 24, as in the default report
    name = f"two sets of {first} and {n - first}, micro"
    truth[name] = 0.0
    counted = {k: np.zeros(4) for k in truth}
    rng = np.random.default_rng([options.seed, n])
    with progress(options.sets, f"data sets of {n} prompts", unit="data set") as stage:
        for at in range(options.sets):
            rows = rng.integers(0, size, n)
            found = intervals(known, rows, at, options.draws)
            found[name] = two_sets(known, rows, first, at, options.draws)
            for k, one in found.items():
                below, above = truth[k] < one.lo, truth[k] > one.hi
                counted[k] += (not (below or above), below, above, one.hi - one.lo)
            stage.update()
    print(f"\n{options.sets} data sets of {n} prompts, {options.draws} draws, BCa")
    print(f"{'':<30}{'truth':>7}{'covered':>9}{'below':>8}{'above':>8}{'width':>7}")
    for k, total in counted.items():
        covered, below, above, width = total / options.sets
        print(
            f"{k:<30}{truth[k]:>7.3f}{100 * covered:>8.1f}%{100 * below:>7.1f}%"
            f"{100 * above:>7.1f}%{width:>7.3f}"
        )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--work", type=Path, help="capture and score again, in this folder")
    arguments.add_argument("--limit", type=int, help="prompts to score; the sums go to --work")
    arguments.add_argument("--prompts", type=int, nargs="+", default=[40, 24, 10])
    arguments.add_argument("--sets", type=int, default=1000)
    arguments.add_argument("--draws", type=int, default=DRAWS)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    if options.work:
        decode(options.work, options.limit)
    known = numbers()
    size = len(known["micro tau, walked"][0].numerators)
    error = 100 * (0.95 * 0.05 / options.sets) ** 0.5
    print(stamp())
    print(
        f"Population: {size} prompts of the hybrid target, G = {EXAMPLE.max_new_tokens}; drafters "
        f"{DRAFTERS[0]} and, for paired differences, {DRAFTERS[1]} less {DRAFTERS[0]}.\n"
        "Below, above: the share of intervals with the truth below or above them. A share of 95 % "
        f"over {options.sets} data sets has a standard error of {error:.1f} points."
    )
    for n in options.prompts:
        table(known, n, options)


if __name__ == "__main__":
    main()
