"""Opening a training checkpoint of 17 GB: ``python tests/benchmarks/large_checkpoint.py``.

A drafter of the 27B shape (1.73 B parameters) is saved by ``torch.save`` as trainers do, bfloat16
weights beside two float32 moments, and then opened, audited and loaded in a process of its own. Its
anonymous memory is sampled; pages of mapped files are the system's to drop. All tensors are zeros
that were never in memory: what is measured does not depend on values.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from memory import GIB, Resident
from stamp import stamp
from worlds import SHAPE, TAPS, VOCABULARY, checkpoint_config, plain_reading, write_config

from dflash_diag.drafter import Drafter


def write(folder: Path, layers: int) -> tuple[int, int]:
    """The checkpoint in ``folder``; bytes of the drafter and of the file."""
    shape = replace(SHAPE, n_layers=layers)
    how = plain_reading(shape, TAPS)
    with torch.device("meta"):
        drafter = Drafter(shape, how)
    sizes = {name: tuple(one.shape) for name, one in drafter.named_parameters()}
    total = sum(one.numel() for one in drafter.parameters())
    backing = folder / "backing"
    with backing.open("wb") as file:
        file.truncate(4 * total)  # a hole: no disk, no memory

    def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        # A storage of its own for each: torch.save writes whole storages.
        return {
            name: torch.from_file(
                str(backing), shared=True, size=torch.Size(size).numel(), dtype=dtype
            ).view(size)
            for name, size in sizes.items()
        }

    state = {
        "model": tensors(torch.bfloat16),
        "optimizer": {
            "state": {
                i: {"step": 1.0, "exp_avg": a, "exp_avg_sq": b}
                for i, (a, b) in enumerate(
                    zip(
                        tensors(torch.float32).values(),
                        tensors(torch.float32).values(),
                        strict=True,
                    )
                )
            }
        },
        "step": 30_000,
    }
    torch.save(state, folder / "step_30000.pt")
    backing.unlink()
    config = checkpoint_config(shape, how, n_target_layers=64, vocabulary=VOCABULARY)
    write_config(folder, config)
    return 2 * total, (folder / "step_30000.pt").stat().st_size


def measure(path: Path) -> list[tuple[str, float, int]]:
    """Stages with their seconds and the most anonymous memory so far."""
    from dflash_diag import audit, load_drafter, read_checkpoint, resolve_convention

    resident = Resident()
    resident.start()
    time.sleep(0.2)
    rows, started = [("libraries", 0.0, resident.most)], time.perf_counter()

    def done(name: str) -> None:
        nonlocal started
        rows.append((name, time.perf_counter() - started, resident.most))
        started = time.perf_counter()

    checkpoint = read_checkpoint(path)
    done("opened")
    how = resolve_convention(checkpoint)
    problems = audit(checkpoint, convention=how)
    done(f"audited, {len(problems)} problems")
    _ = checkpoint.weights_sha256
    done("hashed")
    drafter = load_drafter(checkpoint, how, dtype=torch.bfloat16)
    _ = sum(float(one.sum()) for one in drafter.parameters())
    done("loaded in bfloat16, every weight read")
    return rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--layers", type=int, default=SHAPE.n_layers)
    options.add_argument("--folder", default="", help="where there is room for the file")
    chosen = options.parse_args()
    sys.stdout.write(f"{stamp()}\n")
    with tempfile.TemporaryDirectory(dir=chosen.folder or None) as folder:
        drafter, file = write(Path(folder), chosen.layers)
        sys.stdout.write(f"file {file / 1e9:.1f} GB, drafter {drafter / GIB:.2f} GiB\n\n")
        fresh = {"max_workers": 1, "mp_context": multiprocessing.get_context("spawn")}
        with ProcessPoolExecutor(**fresh) as process:
            rows = process.submit(measure, Path(folder) / "step_30000.pt").result()
        base = rows[0][2]
        sys.stdout.write(f"{'stage':<44}{'s':>8}{'GiB above the libraries':>26}\n")
        for name, seconds, most in rows:
            sys.stdout.write(f"{name:<44}{seconds:>8.1f}{(most - base) / GIB:>26.2f}\n")


if __name__ == "__main__":
    main()
