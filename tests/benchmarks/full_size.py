"""Scoring a full-size drafter on a GPU: ``python tests/benchmarks/full_size.py``.

The drafter has the 27B shape (5 layers, hidden 5,120, MLP 17,408, 32 and 8 heads of 128, block 16,
vocabulary 248,320) and random weights in bfloat16. First the card's own ceiling is measured, a
product of two 8,192-square matrices; all else is given as a share of it. Work is what has to be
multiplied: fc, context keys and values, all slots of all layers, attention that is visible, and the
head's rows that propose.

The peers run in the same process on the same weights and tokens: the same layers under one dense
mask, and z-lab's own model (PyPI ``dflash``), one call a block.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from stamp import stamp
from torch import Tensor

from dflash_diag.blocks import _apart, draft_blocks
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.masks import rules_of
from dflash_diag.proposals import Argmax, Head

SHAPE = DrafterShape(
    hidden_size=5120,
    n_taps=5,
    n_layers=5,
    n_heads=32,
    n_kv_heads=8,
    head_width=128,
    mlp_size=17408,
)
BLOCK, VOCABULARY = 16, 248_320
HOW = Convention(
    block_size=BLOCK,
    layer_ids=(1, 16, 31, 46, 61),
    in_block=("bidirectional",) * SHAPE.n_layers,
    window=(None,) * SHAPE.n_layers,
    rope_theta=1e7,
    rotary_width=SHAPE.head_width,
    mask_token_id=5,
)
GIB = 2**30


@dataclass(frozen=True)
class Size:
    """One problem."""

    anchors: int = 1024
    context: int = 2048
    vocabulary: int = VOCABULARY

    def flop(self) -> float:
        """Operations that have to be done."""
        h, kv = SHAPE.hidden_size, SHAPE.n_kv_heads * SHAPE.head_width
        wide = SHAPE.n_heads * SHAPE.head_width
        slots, layers = self.anchors * BLOCK, SHAPE.n_layers
        layer = 2 * h * wide + 2 * h * kv + 3 * h * SHAPE.mlp_size
        seen = float(self.positions().sum()) + self.anchors * BLOCK
        products = (
            self.context * SHAPE.n_taps * h * h
            + layers * self.context * 2 * h * kv
            + layers * slots * layer
            + layers * 2 * wide * BLOCK * seen
            + self.anchors * HOW.n_proposed * h * self.vocabulary
        )
        return 2.0 * products

    def positions(self) -> Tensor:
        """Anchors [A], evenly over the second half of the context."""
        first = max(1, self.context - max(self.anchors, self.context // 2))
        return torch.linspace(first, self.context - 1, self.anchors).long()


class World:
    """Weights, tokens and states of the largest problem."""

    def __init__(self, context: int) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            torch.set_default_dtype(torch.bfloat16)
            self.drafter = Drafter(SHAPE, HOW).eval().requires_grad_(False)
            torch.set_default_dtype(torch.float32)
            self.head = torch.empty(VOCABULARY, SHAPE.hidden_size, dtype=torch.bfloat16)
            self.tokens = torch.randint(VOCABULARY, (context + BLOCK,))
            self.states = torch.empty(context, 5, SHAPE.hidden_size, dtype=torch.bfloat16)
        for one in (*self.drafter.parameters(), self.head):
            if one.ndim > 1:
                one.normal_(0, 0.02)
        self.states.normal_()

    def problem(self, size: Size) -> tuple[Tensor, Tensor]:
        """Anchors [A] and labels [A, D]."""
        anchors = size.positions().cuda()
        ahead = torch.arange(1, BLOCK, device="cuda")
        return anchors, self.tokens[anchors[:, None] + ahead] % size.vocabulary


def ours(world: World, size: Size, *, compiled: bool, slice_bytes: int) -> Callable[[], object]:
    """All anchors in one pass, with everything that a score keeps."""
    anchors, labels = world.problem(size)
    proposal = Argmax(Head(world.head[: size.vocabulary], HOW, slice_bytes=slice_bytes))

    def run() -> object:
        features = world.drafter.features(world.states[: size.context])
        hidden = draft_blocks(
            world.drafter, world.head, world.tokens, anchors, features, compiled=compiled
        )
        return proposal.score(hidden, world.tokens[anchors], labels)

    return run


def dense(world: World, size: Size, slice_bytes: int) -> Callable[[], object]:
    """The same layers under one dense mask."""
    anchors, labels = world.problem(size)
    proposal = Argmax(Head(world.head, HOW, slice_bytes=slice_bytes))
    rules = rules_of(HOW)

    def run() -> object:
        features = world.drafter.features(world.states[: size.context])
        mask = rules[0].training(anchors[None], size.context)
        ids = torch.full((size.anchors, BLOCK), HOW.mask_token_id, device="cuda")
        ids[:, 0] = world.tokens[anchors]
        positions = anchors[:, None] + torch.arange(BLOCK, device="cuda")
        at = torch.arange(size.context, device="cuda")
        hidden = world.drafter(
            world.head[ids].flatten(0, 1)[None],
            positions.flatten()[None],
            features[None],
            at[None],
            mask,
        )
        hidden = hidden[0].unflatten(0, (size.anchors, BLOCK))[:, 1:]
        return proposal.score(hidden, world.tokens[anchors], labels)

    return run


def one_at_a_time(world: World, size: Size, blocks: int) -> Callable[[], object]:
    """z-lab's model, one call a block over its own context, with nothing but an argmax behind."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.mlp_size,
        num_hidden_layers=SHAPE.n_layers,
        num_attention_heads=SHAPE.n_heads,
        num_key_value_heads=SHAPE.n_kv_heads,
        head_dim=SHAPE.head_width,
        max_position_embeddings=65_536,
        rope_parameters={"rope_type": "default", "rope_theta": HOW.rope_theta},
        dtype="bfloat16",
        attn_implementation="sdpa",
    )
    config.block_size = BLOCK
    config.num_target_layers = 64
    config.dflash_config = {
        "mask_token_id": HOW.mask_token_id,
        "target_layer_ids": list(HOW.layer_ids),
    }
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    model = model.to_empty(device="cuda").to(torch.bfloat16).eval()
    state = world.drafter.state_dict()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(state[name])
        for name, value in model.named_buffers():
            if name.endswith("inv_freq"):
                value.copy_(world.drafter.rotary.inv_freq)
    anchors = world.problem(size)[0]
    some = anchors[:: max(1, len(anchors) // blocks)][:blocks].tolist()
    states = world.states.flatten(1)[None]

    def run() -> object:
        accepted = []
        for anchor in some:
            ids = torch.full((1, BLOCK), HOW.mask_token_id, device="cuda")
            ids[0, 0] = world.tokens[anchor]
            hidden = model(
                target_hidden=states[:, :anchor],
                noise_embedding=world.head[ids],
                position_ids=torch.arange(anchor + BLOCK, device="cuda")[None],
            )[:, 1:]
            made = (hidden @ world.head.T).argmax(-1)
            wanted = world.tokens[anchor + 1 : anchor + BLOCK]
            accepted.append((made[0] == wanted).int().cumprod(0).sum())
        return torch.stack(accepted)

    return run


def timed(run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds, and GiB above what was allocated before."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), (torch.cuda.max_memory_allocated() - before) / GIB


def ceiling() -> tuple[float, float]:
    """Operations a second of a plain product in bfloat16: at first, and after a second of them.

    Under a lasting load the card lowers its clock.
    """
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    first = 2 * 8192**3 / timed(lambda: a @ b, 30)[0]
    for _ in range(700):
        a @ b
    return first, 2 * 8192**3 / timed(lambda: a @ b, 30)[0]


def agreement(world: World, blocks: int = 64) -> str:
    """Proposals against the eager path in float32, on labels that the latter proposes itself."""
    size = Size()
    anchors = world.problem(size)[0][:: size.anchors // blocks]
    features = world.drafter.features(world.states[: size.context])
    made = draft_blocks(world.drafter, world.head, world.tokens, anchors, features)
    exact = Drafter(SHAPE, HOW).cuda().eval().requires_grad_(False)
    exact.load_state_dict({k: v.float() for k, v in world.drafter.state_dict().items()})
    wide = exact.features(world.states[: size.context].float())
    context = exact.context(wide, torch.arange(size.context, device="cuda"))
    head = world.head.float()
    true = _apart(exact, head, world.tokens, anchors, context)
    logits = true @ head.T
    best = logits.topk(2, dim=-1)
    found = (made @ world.head.T).float()
    noise = float((found - logits).square().mean().sqrt())
    ids = Argmax(Head(world.head, HOW)).ids(made, world.tokens[anchors])
    right = ids == best.indices[..., 0]
    accepted = right.int().cumprod(1).sum(1)
    first = accepted.clamp(max=HOW.n_proposed - 1)[:, None]
    margin = (best.values[..., 0] - best.values[..., 1]).gather(1, first)[:, 0]
    short = accepted < HOW.n_proposed
    ties = int((margin[short] < 6 * noise).sum())
    spread = float(logits.std())
    return (
        f"against the eager path in float32: root mean square error of a logit {noise:.3g} (their "
        f"spread is {spread:.3g}); {float(right.float().mean()):.1%} of proposals equal; accepted "
        f"lengths differ in {int(short.sum())} of {len(anchors)} blocks, in {ties} of them at a "
        f"margin below six such errors"
    )


@torch.inference_mode()
def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--context", type=int, nargs="*", default=[2048, 16384])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--slice-gib", type=float, default=1.0)
    chosen = options.parse_args()
    sys.stdout.write(f"{stamp()}\n{torch.cuda.get_device_name()}\n")
    top, lasting = ceiling()
    sys.stdout.write(
        f"ceiling: {top / 1e12:.0f} TFLOP/s (8,192-square bfloat16 product); {lasting / 1e12:.0f} "
        "after a second of them\n\n"
    )
    world = World(max(chosen.context))
    slice_bytes = int(chosen.slice_gib * GIB)
    head = (
        f"{'':<34}{'anchors':>8}{'context':>9}{'words':>9}{'ms':>9}{'blocks/s':>10}{'TFLOP/s':>9}"
    )
    sys.stdout.write(f"{head}{'ceiling':>9}{'GiB':>6}\n")

    def row(name: str, size: Size, run: Callable[[], object], blocks: int | None = None) -> float:
        done = blocks or size.anchors
        try:
            seconds, memory = timed(run, chosen.repeats)
        except torch.OutOfMemoryError:
            sys.stdout.write(f"{name:<34}{size.anchors:>8}{size.context:>9}  does not fit\n")
            torch.cuda.empty_cache()
            return 0.0
        rate, flop = done / seconds, size.flop() / size.anchors * done / seconds
        sys.stdout.write(
            f"{name:<34}{done:>8}{size.context:>9}{size.vocabulary:>9}{seconds * 1e3:>9.1f}"
            f"{rate:>10.0f}{flop / 1e12:>9.0f}{flop / top:>9.2f}{memory:>6.2f}\n"
        )
        sys.stdout.flush()
        return rate

    size = Size()
    made = {"compiled": True, "slice_bytes": slice_bytes}
    best = row("all anchors, compiled", size, ours(world, size, **made))
    row("all anchors", size, ours(world, size, compiled=False, slice_bytes=slice_bytes))
    row("one dense mask", size, dense(world, size, slice_bytes))
    try:
        alone = row("one block at a time (z-lab)", size, one_at_a_time(world, size, 32), 32)
        sys.stdout.write(f"{best / alone:.0f} times the blocks a second of one at a time\n")
    except ImportError as error:
        sys.stdout.write(f"one block at a time: {error}\n")
    for anchors in (128, 256, 512):
        row("fewer anchors", one := replace(size, anchors=anchors), ours(world, one, **made))
    for words in (62_080, 124_160):
        row("smaller vocabulary", one := replace(size, vocabulary=words), ours(world, one, **made))
    for context in chosen.context[1:]:
        row("longer context", one := replace(size, context=context), ours(world, one, **made))
        one = replace(size, context=context, anchors=4096)
        row("longer context, more anchors", one, ours(world, one, **made))
    sys.stdout.write(f"\n{agreement(world)}\n")


if __name__ == "__main__":
    main()
