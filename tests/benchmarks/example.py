"""Every drafter of the example, as served and as trained: ``python tests/benchmarks/example.py``.

The table in the README. One capture of the report's 24 prompts; each drafter is scored under its
declared convention, and under the one in which its trainer read it where `--set` can say that.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from stamp import stamp

from dflash_diag import Capture, load_drafter, make_capture, read_checkpoint, resolve_convention
from dflash_diag.diagnostics.repetition import repeated, repeated_lines
from dflash_diag.example import EXAMPLE
from dflash_diag.metrics import measure
from dflash_diag.scoring import score

ZOO = Path(__file__).parents[2] / "data" / "zoo"
OWN = {
    "anchor_included": "context_bound=inclusive",
    "block_causal": "in_block=causal",
    "position_plus_one": "position_offset=1",
    "layer_offset": "layer_ids=0,3,6,9,12",
}


def numbers(capture, folder, *settings):
    """Scores and estimates of one drafter under one reading."""
    checkpoint = read_checkpoint(folder)
    convention = resolve_convention(checkpoint, settings=settings)
    scores = score(capture, load_drafter(checkpoint, convention, dtype=torch.float32), silent=True)
    return scores, measure(scores, seed=0, draws=20_000)


def loops(capture, scores):
    """Uniform tau without the anchors inside recurring stretches, and the share of the others."""
    inside = []
    for i in range(len(capture.prompts)):
        own = repeated(capture.continuation(i).tolist())
        inside.append(own[: (scores.prompt == i).sum()])
    outside = ~np.concatenate(inside)
    return float((scores.accepted[outside] + 1).mean()), float(outside.mean())


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--capture", default="out/benchmark-capture")
    chosen = options.parse_args()
    print(stamp())
    target = ZOO / "hybrid" / "target"
    if not (Path(chosen.capture) / "manifest.json").is_file():
        make_capture(
            str(target),
            EXAMPLE.read_prompts(),
            chosen.capture,
            max_new_tokens=EXAMPLE.max_new_tokens,
            layers="all",
        )
    capture = Capture.load(chosen.capture)
    shares = [np.divide(*repeated_lines(p.continuation_text)) for p in capture.prompts]
    print(f"repeated lines: median {np.median(shares):.0%} of {len(shares)} completions")
    without, share = [], 0.0
    print("| drafter | tau walked | uniform | slot 1 | training streak | own reading: tau walked |")
    print("|---|---|---|---|---|---|")
    for folder in sorted((ZOO / "hybrid" / "drafters").iterdir()):
        name = folder.name
        scores, found = numbers(capture, folder)
        tau, uniform = found["tau_walked_micro"], found["tau_uniform_micro"]
        first = float((scores.rank[:, 0] == 0).mean())
        log = json.loads((folder / "training_log.jsonl").read_text().splitlines()[-1])
        own = ""
        if name in OWN:
            better = numbers(capture, folder, OWN[name])[1]["tau_walked_micro"]
            own = f"{better.value:.2f} (`--set {OWN[name]}`)"
        print(
            f"| `{name}` | {tau.value:.2f} [{tau.lo:.2f}, {tau.hi:.2f}] | {uniform.value:.2f} "
            f"| {first:.2f} | {log['streak']:.2f} | {own} |"
        )
        outside, share = loops(capture, scores)
        without.append(f"`{name}` {outside:.2f}")
    print(f"uniform tau of the {share:.0%} of anchors outside loops: {', '.join(without)}")


if __name__ == "__main__":
    main()
