"""Scoring all anchors at once against one block at a time: ``python tests/benchmarks/scoring.py``.

The peer is z-lab's own model (PyPI ``dflash``), one call a block over the whole context, as a plain
evaluation script would call it. It is timed twice: with nothing but an argmax behind it, and with
everything that `dflash_diag.scoring.score` keeps (rank and log-probability of the label, top 64).
All run in one process after another on the same capture, weights and threads; accepted lengths must
be equal. Peak memory is each process's resident size, sampled while it scores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from stamp import stamp

from dflash_diag import Capture, load_drafter, make_capture, read_checkpoint, resolve_convention
from dflash_diag.example import EXAMPLE
from dflash_diag.proposals import make_proposal
from dflash_diag.scoring import score

ZOO = Path(__file__).parents[2] / "data" / "zoo"


def batched(capture, folder):
    """Ours: accepted lengths of every anchor."""
    checkpoint = read_checkpoint(folder)
    drafter = load_drafter(checkpoint, resolve_convention(checkpoint), dtype=torch.float32)
    return lambda: score(capture, drafter, silent=True).accepted.tolist()


def one_block_at_a_time(capture, folder, *, everything):
    """z-lab's model, one call a block."""
    from dflash.model import DFlashDraftModel

    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    how = resolve_convention(read_checkpoint(folder))
    size, embedding = how.block_size, capture.embedding
    proposal = make_proposal(how, capture.head)

    @torch.inference_mode()
    def run():
        accepted = []
        for i, prompt in enumerate(capture.prompts):
            tokens = capture.tokens(i)
            states = capture.states(i, how.taps).flatten(1)[None]
            first = prompt.n_prompt_tokens
            for anchor in range(first, first + prompt.n_generated - how.n_proposed):
                ids = torch.full((1, size), how.mask_token_id)
                ids[0, 0] = tokens[anchor]
                hidden = model(
                    target_hidden=states[:, :anchor],
                    noise_embedding=embedding[ids],
                    position_ids=torch.arange(anchor + size)[None],
                )[:, 1:]
                labels = tokens[None, anchor + 1 : anchor + size]
                if everything:
                    made = proposal.score(hidden, tokens[anchor : anchor + 1], labels).ids
                else:
                    made = (hidden @ capture.head.T).argmax(-1)
                accepted.append(int((made == labels).int().cumprod(-1).sum()))
        return accepted

    return run


WAYS = {
    "batched": batched,
    "one block at a time, argmax only": lambda c, f: one_block_at_a_time(c, f, everything=False),
    "one block at a time, all that is kept": lambda c, f: one_block_at_a_time(
        c, f, everything=True
    ),
}


class Resident(threading.Thread):
    """Samples this process's resident memory in MiB, every 5 ms, until stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.done = 0.0, threading.Event()

    def run(self):
        while not self.done.wait(0.005):
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            self.most = max(self.most, pages * resource.getpagesize() / 2**20)


def measure(way, capture, folder, threads, repeats):
    """Seconds (median), peak MiB, accepted lengths."""
    torch.set_num_threads(threads)
    loaded = Capture.load(capture, verify=False)
    run = WAYS[way](loaded, folder)
    _ = loaded.head, loaded.embedding
    memory = Resident()
    memory.start()
    taken, accepted = [], []
    for _ in range(repeats + 1):  # the first warms up
        started = time.perf_counter()
        accepted = run()
        taken.append(time.perf_counter() - started)
    memory.done.set()
    return statistics.median(taken[1:]), memory.most, accepted


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--drafter", default=str(ZOO / "hybrid" / "drafters" / "reference"))
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--repeats", type=int, default=3)
    chosen = options.parse_args()
    print(stamp())
    fresh = {"max_workers": 1, "mp_context": multiprocessing.get_context("spawn")}
    with tempfile.TemporaryDirectory() as folder:
        capture = Path(folder) / "capture"
        make_capture(
            str(ZOO / "hybrid" / "target"),
            EXAMPLE.read_prompts(),
            capture,
            max_new_tokens=EXAMPLE.max_new_tokens,
            layers="all",
        )
        rows = {}
        for way in WAYS:
            with ProcessPoolExecutor(**fresh) as process:  # whose peak is this way's alone
                rows[way] = process.submit(
                    measure, way, capture, chosen.drafter, chosen.threads, chosen.repeats
                ).result()
    ours, _, accepted = rows["batched"]
    print(f"{len(accepted)} anchors, {chosen.threads} threads, torch {torch.__version__}")
    for way, (seconds, memory, lengths) in rows.items():
        same = "equal" if lengths == accepted else "DIFFERENT"
        rate = len(lengths) / seconds
        print(
            f"{way:40s} {seconds:7.2f} s {rate:8.0f} blocks/s {seconds / ours:5.1f}x "
            f"peak {memory:5.0f} MiB  accepted lengths {same}"
        )


if __name__ == "__main__":
    main()
