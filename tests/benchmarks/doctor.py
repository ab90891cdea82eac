"""Let the doctor loose on planted faults, on pairs of them, and on drafters that are sound.

Prints one row a case (what was planted, what is found, seconds) and the shares that count. Run from
the checkout::

    python tests/benchmarks/doctor.py > data/benchmarks/doctor.txt
    python tests/benchmarks/doctor.py --example smollm2 > data/benchmarks/doctor_smollm2.txt

With ``--work`` it goes on where it stopped; with ``--share`` a reading that several cases try is
scored once, which gives the same answers sooner, in seconds that are no case's own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stamp import stamp

sys.path.insert(0, str(Path(__file__).parents[1]))
import planted
import planted_pair
from planted import FULL, HEALTHY, HYBRID, PAIRS, SINGLE, TRAINED, Case

from dflash_diag import storage
from dflash_diag.capture import make_capture
from dflash_diag.config import RunConfig
from dflash_diag.conventions import Convention
from dflash_diag.doctor import Examination, examine
from dflash_diag.doctor.merging import is_fault
from dflash_diag.example import EXAMPLE, SMOLLM2
from dflash_diag.paths import data_dir
from dflash_diag.prompts import Prompt, read_prompts
from dflash_diag.results import Verdict
from dflash_diag.runs import Run
from dflash_diag.sweeps import Hits, Sweep

GROUPS: dict[str, dict[str, tuple[Case, ...]]] = {
    "hybrid": {"trained": TRAINED, "single": SINGLE, "healthy": HEALTHY, "pairs": PAIRS},
    "smollm2": planted_pair.GROUPS,
}
UNKNOWN = {"value": None, "lo": None, "hi": None}
STEPS = data_dir().parent / "dflash_diag" / "zoo" / "steps.py"


def all_prompts() -> list[Prompt]:
    """The example's 50 prompts."""
    return [p for name, _ in EXAMPLE.prompts for p in read_prompts(data_dir() / name)]


def random_prompts(n: int = 24, length: int = 40) -> list[Prompt]:
    """Prompts of tokens drawn at random."""
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 3072, size=(n, length))
    return [
        Prompt(id=f"random{i:02d}", prompt_ids=tuple(one)) for i, one in enumerate(ids.tolist())
    ]


def captures(folder: Path) -> dict[str, Path]:
    """Every capture that a case asks for; what is there is not made again."""
    usual, g = EXAMPLE.read_prompts(), EXAMPLE.max_new_tokens
    plans: dict[str, tuple[Path, list[Prompt], int]] = {
        "default": (HYBRID, usual, g),
        "others": (HYBRID, all_prompts()[-24:], g),
        "random": (HYBRID, random_prompts(), g),
        "longer": (HYBRID, usual, 96),
        "full": (FULL, usual, g),
    }
    for name, (zoo, prompts, length) in plans.items():
        make_capture(
            str(zoo / "target"),
            prompts,
            folder / name,
            max_new_tokens=length,
            layers="all",
            silent=True,
        )
    moved = folder / "moved" / "capture"
    if not moved.is_dir():
        planted.moved_capture(folder / "default", moved.parent, by=1_000)
    return {name: folder / name for name in plans} | {"moved": moved}


def target_of(example: str, case: Case) -> str:
    """The target whose states a case changes."""
    if example == "smollm2":
        return str(SMOLLM2.part(SMOLLM2.target))
    return str((FULL if case.capture == "full" else HYBRID) / "target")


def share_readings(folder: Path) -> None:
    """Score each reading of the same weights on the same capture once, whoever asks."""
    score, known = Sweep.hits, {}

    def contents(sweep: Sweep) -> str:
        if id(sweep) not in known:
            digest = hashlib.sha256()
            for name, value in sweep.drafter.state_dict().items():
                digest.update(name.encode())
                digest.update(value.contiguous().view(torch.uint8).numpy())
            weights = digest.hexdigest()
            known[id(sweep)] = sweep, storage.content_key(weights, Run.digest_of(sweep.capture))
        return known[id(sweep)][1]

    def hits(self: Sweep, how: Convention, **options: Any) -> Hits:
        values = {k: v["value"] for k, v in how.to_json().items()}
        names = [self.capture.prompts[i].id for i in self.rows]
        file = folder / f"{storage.content_key(contents(self), values, names, options)[:16]}.npz"
        if not file.is_file():
            found = score(self, how, **options)
            part = file.with_suffix(f".{os.getpid()}.npz")
            np.savez_compressed(part, *found.right)
            part.replace(file)
        with np.load(file) as kept:
            right = tuple(kept[f"arr_{i}"] for i in range(len(names)))
        self.tick()
        return Hits(tuple(names), right, complete=options.get("anchors") is None)

    folder.mkdir(parents=True, exist_ok=True)
    Sweep.hits = hits  # type: ignore[method-assign]


def run_case(
    at: tuple[str, str, int], *, made: dict[str, Path], threads: int, shared: Path | None
) -> dict[str, Any]:
    """Examine one case; what it took and what was said."""
    example, group, number = at
    case = GROUPS[example][group][number]
    torch.set_num_threads(threads)
    if shared is not None and Sweep.hits.__module__ != __name__:
        share_readings(shared)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        options = dict(case.options)
        capture = made[case.capture]
        if case.states is not None:
            capture = planted.changed_capture(capture, place, case.states)
            options.setdefault("target", target_of(example, case))
        if "step" in options:
            options["step"] = f"{STEPS}:{options['step']}"
        if "against" in options:
            options["against"] = str(made[options["against"]])
        values = {
            "drafter": str(planted.files_of(case, place)),
            "capture": str(capture),
            "out": str(place / "out"),
            "lossless_prompts": 8,
            **options,
        }
        try:
            found = examine(Run.open(RunConfig.read(values), strict=False))
        except Exception as error:  # noqa: BLE001 - the other cases are to be seen too
            found = Examination(case.name, Verdict.ERROR, repr(error), "", UNKNOWN, UNKNOWN, [], [])
    entries = {one["cause"]: one for one in found.findings}
    return {
        "group": group,
        "case": case.name,
        "planted": [list(one) for one in case.causes],
        "may_abstain": case.may_abstain,
        "found": [one["cause"] for one in found.findings if is_fault(one)],
        "status": {c: entries[c]["status"] for x in case.causes for c in x if c in entries},
        "tau": found.tau_declared["value"],
        "headline": found.headline,
        "seconds": time.perf_counter() - start,
    }


def rank(row: dict[str, Any]) -> int | None:
    """Place of the worst-placed planted cause, from 1; 0 for a supported abstention."""
    places = [
        next((i + 1 for i, cause in enumerate(row["found"]) if cause in choice), None)
        for choice in row["planted"]
    ]
    if any(place is None for place in places):
        abstains = row["may_abstain"] and not row["found"]
        return 0 if abstains and "not_identifiable" in row["status"].values() else None
    return max(place for place in places if place is not None)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    wanted = " + ".join("/".join(one) for one in row["planted"]) or "nothing"
    place = rank(row) if row["planted"] else (None if row["found"] else 0)
    mark = "-" if place is None else "abstains" if place == 0 and row["planted"] else str(place)
    mark = mark if row["planted"] else "false" if row["found"] else "right"
    tau = "" if row["tau"] is None else f"{row['tau']:.2f}"
    said = ", ".join(row["found"]) or ("nothing" if row["tau"] is not None else row["headline"])
    return (
        f"{row['group']:<8}{row['case']:<33}{tau:>5} {mark:>9}{row['seconds']:>7.1f}  "
        f"{wanted}: {said}"
    )


def totals(rows: list[dict[str, Any]]) -> list[str]:
    """The shares that count."""
    one = [rank(r) for r in rows if r["group"] in ("trained", "single")]
    two = [rank(r) for r in rows if r["group"] == "pairs"]
    sound = [r for r in rows if r["group"] == "healthy"]
    first, among = (sum(p is not None and p <= n for p in one) for n in (1, 2))
    both = sum(p is not None and 0 < p <= 3 for p in two)
    clean = sum(not r["found"] for r in sound)
    return [
        f"single faults: first {first} of {len(one)}, among the first two {among} of {len(one)}",
        f"pairs: both among the first three {both} of {len(two)}",
        f"sound: no false cause on {clean} of {len(sound)}",
    ]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--example", default="hybrid", choices=list(GROUPS))
    arguments.add_argument("--groups", nargs="*", help="all by default")
    arguments.add_argument("--only", default="", help="cases whose name contains this")
    arguments.add_argument("--jobs", type=int, default=1, help="cases at once")
    arguments.add_argument("--threads", type=int, default=2, help="of each")
    arguments.add_argument("--work", default="", help="folder for captures and finished rows")
    arguments.add_argument("--share", action="store_true", help="score a reading once for all")
    options = arguments.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(options.threads)
    groups = GROUPS[options.example]
    cases = [
        (options.example, group, at)
        for group in options.groups or groups
        for at, case in enumerate(groups[group])
        if options.only in case.name
    ]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.work or temporary)
        make = captures if options.example == "hybrid" else planted_pair.captures
        made = make(work / "captures")
        sys.stdout.write(f"{stamp()}\n{options.threads} threads a case\n\n")
        sys.stdout.write(
            f"{'group':<8}{'case':<33}{'tau':>5} {'place':>9}{'s':>7}  planted: found\n"
        )
        rows_file = work / "rows.jsonl"
        done = (
            [json.loads(x) for x in rows_file.read_text().splitlines()]
            if rows_file.exists()
            else []
        )
        known = {(one["group"], one["case"]): one for one in done if one["tau"] is not None}
        shared = work / "readings" if options.share else None
        call = partial(run_case, made=made, threads=options.threads, shared=shared)
        context = multiprocessing.get_context("fork" if options.jobs == 1 else "spawn")
        rows = []
        with (
            ProcessPoolExecutor(options.jobs, mp_context=context) as pool,
            rows_file.open("a") as kept,
        ):
            waiting = [c for c in cases if (c[1], groups[c[1]][c[2]].name) not in known]
            for row in chain(known.values(), pool.map(call, waiting)):
                rows.append(row)
                if row not in done:
                    kept.write(json.dumps(row) + "\n")
                    kept.flush()
                sys.stdout.write(f"{line(row)}\n")
                sys.stdout.flush()
        sys.stdout.write("\n" + "\n".join(totals(rows)) + "\n")


if __name__ == "__main__":
    main()
