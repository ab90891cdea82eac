"""What extraction costs beside a plain forward: ``python tests/benchmarks/extraction.py``.

A Qwen3.5-style text target of the 27B shape with random weights, built on the GPU without a
download. Plain: one forward, logits of the last position only. Extraction: the same with five
tapped layers taken to host memory. Choices: the target's best words at every position after that,
the head applied by rows. Memory is counted above the weights: the peak during a call, and what
stays on the GPU while its result is held. ``--tiny`` runs the same on a CPU in seconds, where
memory is not counted.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from stamp import stamp

from dflash_diag.capture import make_capture
from dflash_diag.decoding import teacher_forced
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import default_taps, select_layers
from dflash_diag.prompts import Prompt
from dflash_diag.targets import wrap_target

GIB = 2**30
SHAPE_27B = {
    "vocab_size": 248_320,
    "hidden_size": 5120,
    "intermediate_size": 17_408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def build(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> Any:
    """A target with random weights, never in host memory."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(**shape, tie_word_embeddings=False, eos_token_id=None)
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config).to(dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    # What a layer adds is made small, as trained targets begin: else rounding grows with depth.
    added = 0.02 / (2 * shape["num_hidden_layers"]) ** 0.5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                last = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, added if last else 0.02, generator=generator)
            else:  # norms multiply by 1 + w, but for the gated one
                parameter.fill_(1.0 if name.endswith("linear_attn.norm.weight") else 0.0)
    # Buffers that are computed from the configuration came out empty.
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=config).to(device)
    return model.eval().requires_grad_(requires_grad=False)


class Meter:
    """Seconds, and GiB above what was allocated when it was made, of calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.gpu = device, device.type == "cuda"
        self.base = self._allocated()

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def _allocated(self) -> int:
        gc.collect()
        self._wait()
        return torch.cuda.memory_allocated(self.device) if self.gpu else 0

    def seconds(self, call: Callable[[], Any]) -> float:
        """Wall time until the device is idle and the result is there; the result is dropped."""
        self._wait()
        started = time.perf_counter()
        result = call()
        self._wait()
        taken = time.perf_counter() - started
        del result
        return taken

    def memory(self, call: Callable[[], Any]) -> tuple[str, str]:
        """Peak during the call, and what its result keeps, in GiB above the weights."""
        if not self.gpu:
            return "-", "-"
        self._allocated()
        torch.cuda.reset_peak_memory_stats(self.device)
        result = call()
        self._wait()
        peak = torch.cuda.max_memory_allocated(self.device) - self.base
        kept = self._allocated() - self.base
        del result
        return f"{peak / GIB:.2f}", f"{kept / GIB:.2f}"


@torch.inference_mode()
def choices(target: Any, tokens: list[int], taps: tuple[int, ...]) -> list[Any]:
    """What a capture makes of the head's rows, as far as it costs anything."""
    best = []
    for logits in teacher_forced(target, tokens, taps).logits():
        scores = logits.float()
        norm = scores.logsumexp(-1, keepdim=True)
        top = scores.topk(8)
        logprobs = scores.sub_(norm)
        best.append((top, torch.linalg.vecdot(logprobs.exp(), logprobs)))
    return best


def measure(model: Any, backend: str, n_tokens: int, repeats: int) -> None:
    """Rows of the table for one backend."""
    try:
        target = wrap_target(model, backend=backend)
    except BadInput as error:
        print(f"| {backend} | not here: {error.found} | | | | |")
        return
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, target.vocab_size, (1, n_tokens), generator=generator)
    tokens, taps = ids[0].tolist(), default_taps(target.n_layers)

    def plain() -> Any:
        with torch.inference_mode():
            return target.logits(ids, last_only=True)

    ways = {
        "plain forward": plain,
        f"extraction, {len(taps)} taps": lambda: teacher_forced(target, tokens, taps),
        "extraction and choices": lambda: choices(target, tokens, taps),
    }
    for call in ways.values():  # kernels are compiled and tuned, pinned memory is there
        call()
        call()
    meter = Meter(target.device)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, call in ways.items():
            taken[name].append(meter.seconds(call))
    used = f"{target.backend.linear}, convolution {target.backend.convolution}"
    for name, call in ways.items():
        middle = statistics.median(taken[name])
        # Each beside the plain forward of its own round: the clock drifts, the rounds do not.
        pairs = zip(taken[name], taken["plain forward"], strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        peak, kept = meter.memory(call)
        print(f"| {used} | {name} | {middle:.4f} | {ratio:.3f} | {peak} | {kept} |")


def disk(model: Any, n_tokens: int) -> None:
    """Bytes of states a capture takes, as written and as its format says."""
    target = wrap_target(model, backend="torch")
    hidden = target.facts()["hidden_size"]
    prompt = Prompt(id="a", prompt_ids=tuple(i % target.vocab_size for i in range(n_tokens - 1)))
    for mode in ("taps", "around", "all"):
        layers = len(select_layers(mode, target.n_layers))
        rule = layers * hidden * target.dtype.itemsize * 1000
        with tempfile.TemporaryDirectory() as folder:
            made = make_capture(
                target, [prompt], Path(folder) / "c", max_new_tokens=1, layers=mode, silent=True
            )
            written = made.sequence_files[0].stat().st_size / n_tokens * 1000
        print(f"| {mode} | {layers} | {rule / 2**20:.1f} | {written / 2**20:.1f} |")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a small shape, in float32 on a CPU")
    options.add_argument("--tokens", type=int, help="T; 2,048, or 128 with --tiny")
    options.add_argument("--layers", type=int, help="layers in place of the shape's")
    options.add_argument("--hidden", type=int, help="hidden size in place of the shape's")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--backends", default="fla,torch", help="with commas")
    options.add_argument("--no-disk", action="store_true", help="write no capture")
    chosen = options.parse_args()
    shape = dict(TINY if chosen.tiny else SHAPE_27B)
    shape |= {"num_hidden_layers": chosen.layers} if chosen.layers else {}
    shape |= {"hidden_size": chosen.hidden} if chosen.hidden else {}
    device = torch.device("cpu" if chosen.tiny else "cuda")
    dtype = torch.float32 if chosen.tiny else torch.bfloat16
    n_tokens = chosen.tokens or (128 if chosen.tiny else 2048)
    print(stamp())
    if device.type == "cuda":
        print(f"{torch.cuda.get_device_name(device)}, {torch.version.cuda}")
    model = build(shape, device, dtype)
    n_bytes = sum(p.nbytes for p in model.parameters())
    print(
        f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, vocabulary "
        f"{shape['vocab_size']}, {dtype}: weights {n_bytes / GIB:.2f} GiB; T = {n_tokens}; "
        f"median of {chosen.repeats} rounds; GiB above the weights"
    )
    print("| backend | way | seconds | ratio to plain | peak GiB | kept GiB |")
    print("|---|---|---|---|---|---|")
    for backend in chosen.backends.split(","):
        measure(model, backend, n_tokens, chosen.repeats)
    if not chosen.no_disk:
        print("| --layers | layers kept | MiB per 1,000 tokens, by the format | as written |")
        print("|---|---|---|---|")
        disk(model, n_tokens)


if __name__ == "__main__":
    main()
