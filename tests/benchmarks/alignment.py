"""Try every reading of every drafter of the example, and of sound ones that are read wrongly.

Prints one row a case: what was planted, what is found, what the right reading gains, seconds. Run
from the checkout::

    python tests/benchmarks/alignment.py > data/benchmarks/alignment.txt
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from stamp import stamp

from dflash_diag.alignment import align, surroundings
from dflash_diag.capture import make_capture
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.example import EXAMPLE
from dflash_diag.findings import findings
from dflash_diag.paths import data_dir
from dflash_diag.prompts import read_prompts
from dflash_diag.sweeps import Sweep

HYBRID = data_dir() / "zoo" / "hybrid"
DRAFTERS = (
    "healthy",
    "reference",
    "anchor_included",
    "cross_block_leak",
    "block_causal",
    "position_plus_one",
    "label_shift",
    "layer_offset",
    "last_layer_in_fc",
    "noise_on_target_logits",
    "soft_kl_loss",
    "ignored_context",
)
READ_WRONGLY = (
    "position_offset=-1",
    "layer_ids=0,3,6,9,12",
    "layer_ids=2,5,8,11,14",
    "layer_ids=4,10,1,7,13",
    "rotary_width=8",
    "rope_theta=1000000",
    "rope_theta=100",
    "rope_interleaved=true",
    "mask_token_id=0",
    "final_norm=skipped",
    "feature_norm=skipped",
    "norm_style=one_plus",
    "in_block=causal",
    "window=16",
)
"""Settings under which ``healthy`` is read."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--prompts", type=int, default=24, help="24, or 50 for all")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--cases", choices=("drafters", "readings", "all"), default="all")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    prompts = EXAMPLE.read_prompts()
    if options.prompts > len(prompts):
        prompts = [p for name, _ in EXAMPLE.prompts for p in read_prompts(data_dir() / name)]
    with tempfile.TemporaryDirectory() as folder:
        capture = make_capture(
            str(HYBRID / "target"),
            prompts[: options.prompts],
            Path(folder) / "capture",
            max_new_tokens=EXAMPLE.max_new_tokens,
            layers="all",
            silent=True,
        )
        sys.stdout.write(f"{stamp()}\n")
        sys.stdout.write(f"{len(capture.prompts)} prompts, {options.threads} threads\n\n")
        sys.stdout.write(f"{'drafter':<24}{'read with':<24}{'tau':>6}{'own':>7}{'s':>7}  found\n")
        if options.cases != "readings":
            for name in DRAFTERS:
                row(capture, name, ())
        if options.cases != "drafters":
            for setting in READ_WRONGLY:
                row(capture, "healthy", (setting,))


def row(capture, name: str, settings: tuple[str, ...]) -> None:
    """Align one drafter and print what is found."""
    start = time.perf_counter()
    checkpoint = read_checkpoint(HYBRID / "drafters" / name)
    convention = resolve_convention(checkpoint, settings=settings)
    drafter = load_drafter(checkpoint, convention, dtype=torch.float32)
    around = surroundings(capture, checkpoint, drafter, special_ids=[0, 1])
    found = align(Sweep(capture, drafter), around, seed=0, draws=20_000)
    entries = [e for e in findings(found) if e["status"] == "found"]
    own = entries[0]["tau_own_reading"]["value"] if entries else None
    words = "; ".join(
        f"{e['cause']} ({', '.join(e['settings']) or 'context of zeros'})" for e in entries
    )
    seconds = time.perf_counter() - start
    sys.stdout.write(
        f"{name:<24}{', '.join(settings) or 'its files':<24}{found.rounds[0].tau.value:>6.2f}"
        f"{'' if own is None else f'{own:.2f}':>7}{seconds:>7.1f}  {words or 'nothing'}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
