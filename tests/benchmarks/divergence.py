"""fla against torch at full size: ``python tests/benchmarks/divergence.py``.

A Qwen3.5-style text target of the 27B shape with random weights, built on the GPU without a
download, on 2,048 tokens. Every layer and every module as fla computes it against transformers'
torch code, both in bfloat16, beside the noise floor: the torch code in bfloat16 against itself in
float32. Random weights amplify an error more than trained ones, so that the numbers are an upper
bound. ``--tiny`` runs the same on a CPU in seconds, with the recurrent form in fla's place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from extraction import SHAPE_27B, TINY, build
from stamp import stamp

from dflash_diag.decoding import teacher_forced
from dflash_diag.divergence import first_above
from dflash_diag.hidden_states import default_taps
from dflash_diag.localization import compare_modules
from dflash_diag.modules import Variant, computed_as
from dflash_diag.progress import progress
from dflash_diag.targets import Target, wrap_target


@torch.inference_mode()
def choices(target: Target, variant: Variant, tokens: Sequence[int]) -> tuple[Any, Any]:
    """Best word and its margin at every position."""
    with computed_as(target, variant) as live:
        top = [rows.float().topk(2) for rows in teacher_forced(live, tokens).logits()]
    values = torch.cat([t.values for t in top])
    return torch.cat([t.indices[:, 0] for t in top]), values[:, 0] - values[:, 1]


def flips(a: tuple[Any, Any], b: tuple[Any, Any]) -> str:
    """Share of positions whose best word differs, and the median margin there and overall."""
    differ = a[0] != b[0]
    n = int(differ.sum())
    there = f"{float(a[1][differ].median()):.3g}" if n else "-"
    share = f"{100 * n / len(differ):.2f} %"
    return f"{share} of {len(differ)}, median margin {there} against {float(a[1].median()):.3g}"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--tokens", type=int, default=2048)
    arguments.add_argument("--tiny", action="store_true", help="a tiny target, on any device")
    arguments.add_argument("--csv", type=Path, help="write every module's numbers here")
    options = arguments.parse_args()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    shape = TINY if options.tiny else SHAPE_27B
    n_tokens = min(options.tokens, 128) if options.tiny else options.tokens
    print(stamp(), torch.cuda.get_device_name() if gpu else "", sep=" · ")
    target = wrap_target(build(shape, device, torch.bfloat16), backend="torch")
    fast = Variant("fla" if gpu else "torch+recurrent", "bfloat16")
    plain, exact = Variant("torch", "bfloat16"), Variant("torch", "float32")
    with computed_as(target, fast) as live:
        print(f"{fast}: {', '.join(f'{path} x {n}' for path, n in live.backend.ran.items())}")
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, target.vocab_size, (n_tokens,), generator=generator).tolist()
    started = time.perf_counter()
    with progress(target.n_layers, "modules", unit="layer") as stage:
        rows = compare_modules(target, fast, plain, tokens, tick=stage.update)
    print(f"{len(rows)} modules compared in {time.perf_counter() - started:.0f} s")
    taps = default_taps(target.n_layers)
    print("| layer | relative RMS | floor | 1 - cosine | made in this layer | its floor |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        if row["module"] == "output" and (row["layer"] in taps or row["layer"] % 8 == 7):
            local = "|".join(
                "-" if row.get(k) is None else f" {100 * row[k]:.2f} % "
                for k in ("local_rel_rms", "local_floor")
            )
            print(
                f"| {row['layer']}{' (tapped)' * (row['layer'] in taps)} "
                f"| {100 * row['rel_rms']:.2f} % | {100 * row['floor']:.2f} % "
                f"| {row['one_minus_cos']:.1e} |{local}|"
            )
    print(f"first module above twice its floor: {first_above(rows)}")
    loudest = sorted(rows, key=lambda r: -(r.get("local_times_floor") or 0.0))[:5]
    print("largest errors made in one layer, in noise floors:")
    for row in loudest:
        print(f"  layer {row['layer']} {row['module']}: {row['local_times_floor']:.2f}")
    if options.csv:
        import pandas as pd

        pd.DataFrame(rows).to_csv(options.csv, index=False)
    ours, theirs, truth = (choices(target, one, tokens) for one in (fast, plain, exact))
    print(f"choices of the target that flip, {fast} against {plain}: {flips(ours, theirs)}")
    print(f"  {fast} against {exact}: {flips(ours, truth)}")
    print(f"  {plain} against {exact}: {flips(theirs, truth)}")


if __name__ == "__main__":
    main()
