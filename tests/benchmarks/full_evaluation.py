"""A whole evaluation at full size, stage by stage: ``python tests/benchmarks/full_evaluation.py``.

A Qwen3.5-style target of the 27B shape and a drafter for it, both with random weights, are built on
the GPU. The target continues ten prompts by 512 tokens and is captured; the drafter is written as a
checkpoint, scored, read in every other way that it could be, and every diagnostic is computed.
Seconds, peaks of GPU memory and of this process's own (anonymous) host memory, and what is on the
disk afterwards. ``--tiny`` runs the same on a CPU in a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from extraction import SHAPE_27B, TINY, build
from safetensors.torch import save_file
from stamp import stamp

from dflash_diag.capture import make_capture
from dflash_diag.config import RunConfig
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.hidden_states import default_taps
from dflash_diag.prompts import Prompt
from dflash_diag.runs import Run
from dflash_diag.targets import wrap_target

GIB = 2**30


class Resident(threading.Thread):
    """The most anonymous memory that this process has had, in bytes; sampled every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        status = Path("/proc/self/status")
        while True:
            line = next(x for x in status.read_text().splitlines() if x.startswith("RssAnon"))
            self.most = max(self.most, int(line.split()[1]) * 1024)
            time.sleep(0.02)


def write_drafter(folder: Path, target: dict[str, int], taps: tuple[int, ...], block: int) -> None:
    """A checkpoint in z-lab's form, with random weights in bfloat16."""
    h, width = target["hidden_size"], 128 if target["hidden_size"] > 1024 else 16
    heads, kv = (32, 8) if h > 1024 else (4, 2)
    layers = 5 if h > 1024 else 2
    shape = DrafterShape(
        hidden_size=h,
        n_taps=len(taps),
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv,
        head_width=width,
        mlp_size=target["intermediate_size"],
    )
    how = Convention(
        block_size=block,
        layer_ids=taps,
        in_block=("bidirectional",) * layers,
        window=(None,) * layers,
        rope_theta=1e7,
        rotary_width=width,
        mask_token_id=3,
    )
    with torch.device("meta"):
        drafter = Drafter(shape, how).to(torch.bfloat16)
    tensors = {
        name: torch.randn(one.shape, dtype=torch.bfloat16) * 0.02
        if one.ndim > 1
        else torch.ones(one.shape, dtype=torch.bfloat16)
        for name, one in drafter.named_parameters()
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": block,
        "hidden_size": h,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": width,
        "num_target_layers": target["num_hidden_layers"],
        "vocab_size": target["vocab_size"],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": how.rope_theta,
        "max_position_embeddings": 32_768,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": list(taps)},
    }
    (folder / "config.json").write_text(json.dumps(config))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a small shape on a CPU")
    options.add_argument("--prompts", type=int, default=10)
    options.add_argument("--tokens", type=int, default=512, help="generated for each prompt")
    options.add_argument("--compile", action="store_true")
    chosen = options.parse_args()
    shape, device = (TINY, "cpu") if chosen.tiny else (SHAPE_27B, "cuda")
    gpu, block = device == "cuda", 8 if chosen.tiny else 16
    resident = Resident()
    resident.start()
    place = Path(tempfile.mkdtemp(prefix="full-"))
    sys.stdout.write(f"{stamp()}\n")
    if gpu:
        sys.stdout.write(f"{torch.cuda.get_device_name()}\n")
    sys.stdout.write(f"\n{'stage':<44}{'s':>8}{'GPU GiB':>9}{'host GiB':>10}{'disk GiB':>10}\n")

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        gc.collect()
        resident.most = 0
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        yield
        if gpu:
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
        peak = f"{torch.cuda.max_memory_allocated() / GIB:.2f}" if gpu else "-"
        size = sum(f.stat().st_size for f in place.rglob("*") if f.is_file()) / GIB
        sys.stdout.write(
            f"{name:<44}{taken:>8.1f}{peak:>9}{resident.most / GIB:>10.2f}{size:>10.2f}\n"
        )
        sys.stdout.flush()

    try:
        with stage("drafter written"):
            taps = default_taps(shape["num_hidden_layers"])
            write_drafter(place / "drafter", shape, taps, block)
        with stage("target built"):
            dtype = torch.float32 if chosen.tiny else torch.bfloat16
            target = wrap_target(build(shape, torch.device(device), dtype))
        with stage(f"capture, {chosen.prompts} prompts of {chosen.tokens} tokens"):
            generator = torch.Generator().manual_seed(2)
            prompts = [
                Prompt(
                    id=f"p{i:02d}",
                    prompt_ids=tuple(
                        torch.randint(4, shape["vocab_size"], (64,), generator=generator).tolist()
                    ),
                )
                for i in range(chosen.prompts)
            ]
            made = make_capture(
                target, prompts, place / "capture", max_new_tokens=chosen.tokens, layers="around"
            )
        del target
        config = RunConfig(
            capture=str(made.path),
            drafter=str(place / "drafter"),
            device=device,
            compiled=chosen.compile,
            out=str(place / "out"),
        )
        with stage("run opened, capture hashed"):
            run = Run.open(config)
        with stage("scored"):
            scores = run.scores("drafter")
        sys.stdout.write(f"{len(scores.anchor)} anchors\n")
        with stage("numbers with intervals"):
            run.metrics("drafter")
        with stage("every other reading tried"):
            found = run.alignment()
        tried = sum(len(one["tried"]) for one in found["rounds"])
        sys.stdout.write(f"{tried} readings\n")
        with stage("every diagnostic"):
            results = run.compute()
        wrong = [one.id for one in results if one.verdict.name == "ERROR"]
        sys.stdout.write(f"{len(results)} results, errors: {', '.join(wrong) or 'none'}\n")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
