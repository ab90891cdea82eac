"""Scoring all anchors at once, and otherwise: ``python tests/benchmarks/scoring.py``.

On a GPU with a drafter of the 27B shape (5 layers, hidden 5,120, MLP 17,408, 32 and 8 heads of 128,
block 16, vocabulary 248,320) and random weights in bfloat16; on a CPU with the embedded example in
float32; ``--on tiny`` tries the former out in seconds. One process, the same weights and tokens:

- the ceiling, a product of two large square matrices, is measured first, and all else is given as a
  share of it. Work is what has to be multiplied: fc, context keys and values, all slots of all
  layers, attention that is visible, and the head's rows that propose;
- ours, with everything that a score keeps (rank and log-probability of the label, top 64); on a
  CPU also as the verb runs it, from a capture's files;
- the same layers under one dense mask, as a training step runs them;
- z-lab's own model (PyPI ``dflash``), one call a block over its whole context, an argmax behind it;
- z-lab's own loop, ``dflash_generate``. Its target answers from the text that is scored, at no cost
  to speak of: what is counted is the loop's own drafting, which keeps the context's keys and values
  from round to round, and what it does around a verification. *Of it drafting* is the time between
  the drafter's calls and the logits of what it drafted;
- ours again as anchors, context and vocabulary grow.

On a CPU the matrix products of our pass are also timed alone: each with its own shapes and strides,
one after another, in the same number of threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from memory import GIB, Resident, anonymous
from peers import Loop, one_at_a_time, ours
from products import products_of
from stamp import stamp
from torch import Tensor
from worlds import SHAPE, TINY, VOCABULARY, Problem, World, example, full

from dflash_diag import score
from dflash_diag.blocks import _apart, draft_blocks
from dflash_diag.drafter import Drafter

COLUMNS = ("blocks", "context", "words", "ms", "blocks/s", "TFLOP/s", "ceiling", "GiB")
WIDTHS = (8, 9, 9, 10, 10, 9, 9, 7)


class Table:
    """Rows as they are measured, each beside the ceiling.

    Parameters
    ----------
    seconds
        After so many no further row is begun, but those without which there is no comparison.
    """

    def __init__(self, place: torch.device, repeats: int, seconds: float) -> None:
        self.gpu, self.repeats = place.type == "cuda", repeats
        self.until = time.monotonic() + seconds
        self.ceiling = 0.0
        self.resident = Resident()
        self.resident.start()

    def begin(self) -> None:
        heads = zip(COLUMNS, WIDTHS, strict=True)
        print(f"\n{'':<38}" + "".join(f"{name:>{width}}" for name, width in heads))

    def row(
        self,
        name: str,
        problem: Problem,
        run: Callable[[], Any],
        blocks: int | None = None,
        needed: bool = False,
    ) -> tuple[float, Any]:
        """Blocks a second, and what the run gave; 0 and None where it was not measured."""
        if time.monotonic() > self.until and not needed:
            print(f"{name:<38}  not measured: out of time")
            return 0.0, None
        try:
            seconds, memory, found = self.timed(run)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            print(f"{name:<38}  does not fit")
            return 0.0, None
        done = problem.n_blocks if blocks is None else blocks
        self.line(name, problem, done, seconds, memory)
        return done / seconds, found

    def line(
        self, name: str, problem: Problem, blocks: int, seconds: float, memory: float | None
    ) -> None:
        speed = problem.flop() / problem.n_blocks * blocks / seconds
        values = (
            f"{blocks}",
            f"{problem.context + 1}",
            f"{len(problem.head)}",
            f"{seconds * 1e3:.1f}",
            f"{blocks / seconds:.0f}",
            f"{speed / 1e12:.3g}",
            f"{speed / self.ceiling:.2f}",
            "" if memory is None else f"{memory:.2f}",
        )
        cells = zip(values, WIDTHS, strict=True)
        print(f"{name:<38}" + "".join(f"{value:>{width}}" for value, width in cells), flush=True)

    def timed(self, run: Callable[[], Any]) -> tuple[float, float, Any]:
        """Median seconds, GiB above what was held before, and the result."""
        found = run()
        self._wait()
        before = torch.cuda.memory_allocated() if self.gpu else anonymous()
        self.resident.most = 0
        if self.gpu:
            torch.cuda.reset_peak_memory_stats()
        taken = []
        for _ in range(self.repeats):
            started = time.perf_counter()
            found = run()
            self._wait()
            taken.append(time.perf_counter() - started)
        most = torch.cuda.max_memory_allocated() if self.gpu else self.resident.most
        return statistics.median(taken), max(0, most - before) / GIB, found

    def _wait(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def measure_ceiling(self) -> None:
        """Operations a second of a plain product: at first, and on a GPU after a second of them.

        Under a lasting load the card lowers its clock.
        """
        n, dtype = (8192, torch.bfloat16) if self.gpu else (1024, torch.float32)
        place = "cuda" if self.gpu else "cpu"
        a, b = (torch.randn(n, n, device=place, dtype=dtype) for _ in range(2))

        def speed() -> float:
            taken = [self.timed(lambda: a @ b)[0] for _ in range(30 // self.repeats)]
            return 2 * n**3 / statistics.median(taken)

        self.ceiling = speed()
        kind = str(dtype).removeprefix("torch.")
        text = f"ceiling: {self.ceiling / 1e12:.3g} TFLOP/s ({n:,}-square {kind} product)"
        if self.gpu:
            for _ in range(700):
                a @ b
            text += f"; {speed() / 1e12:.3g} after a second of them"
        print(text)


def compare(
    table: Table, world: World, alone: int | None, best: tuple[float, Any] = (0.0, None)
) -> bool:
    """Ours and the others on one problem; whether all blocks' accepted lengths are equal.

    Parameters
    ----------
    alone
        Blocks that z-lab's model is asked for, one at a time; all if None.
    best
        Blocks a second of ours, and accepted lengths, where they were measured already.
    """
    whole = world.whole
    for name, compiled in (("ours, compiled", True), ("ours", False)):
        if table.gpu or not compiled:
            made = ours(whole, compiled=compiled)
            best = max(best, table.row(name, whole, made, needed=True), key=lambda one: one[0])
    rate, accepted = best
    dense, lengths = table.row("one dense mask", whole, ours(whole, dense=True), needed=True)
    same = [torch.equal(a, b) for a, b in zip(accepted, lengths, strict=True)]
    blocks = sum(min(len(text.anchors), alone or 10**9) for text in whole.texts)
    try:
        run = one_at_a_time(whole, alone)
        once, lengths = table.row(
            "z-lab's model, one block at a time", whole, run, blocks, needed=True
        )
        if alone is None:
            same += [torch.equal(a, b) for a, b in zip(accepted, lengths, strict=True)]
        loop = Loop(whole, None if alone is None else 2 * alone)
        loop()
        rounds, walked = table.row("z-lab's loop", whole, loop, loop.rounds, needed=True)
        table.line("  of it drafting", whole, loop.rounds, loop.drafting, None)
        for text, ours_of_it, (at, lengths) in zip(whole.texts, accepted, walked, strict=True):
            here = torch.isin(text.anchors, at)
            same.append(alone is not None or torch.equal(ours_of_it[here], lengths))
        print(
            f"blocks a second, ours over theirs: {rate / dense:.1f} the dense mask, "
            f"{rate / once:.1f} one at a time, {rate / rounds:.1f} the loop, "
            f"{rate / (loop.rounds / loop.drafting):.1f} its drafting alone"
        )
    except ImportError as error:
        print(f"z-lab's model and loop: {error}")
    return all(same)


def grow(table: Table, world: World) -> None:
    """Ours as the problem grows in one direction after another."""
    whole = world.whole
    text, words = whole.texts[0], len(whole.head)
    anchors, context = len(text.anchors), text.last + 1
    if len(whole.texts) > 1:  # many short texts; growth is shown on one long text
        context = world.longest // 4
        anchors = context // 2
    made = {"compiled": table.gpu}

    def row(name: str, *size: int) -> None:
        problem = world.problem(*size)
        table.row(name, problem, ours(problem, **made))

    for part in (4, 2, 1):
        row("anchors", anchors // part, context, words)
    for part in (4, 2):
        row("words", anchors, context, words // part)
    row("context", anchors, world.longest, words)
    row("context and anchors", 4 * anchors, world.longest, words)


def agreement(world: World, blocks: int = 64) -> str:
    """Proposals against the eager path in float32, on labels that the latter proposes itself."""
    problem = world.whole
    text, how = problem.texts[0], problem.drafter.convention
    anchors = text.anchors[:: max(1, len(text.anchors) // blocks)]
    states = text.states[: text.last]
    features = problem.drafter.features(states)
    given = (problem.embedding, text.tokens, anchors)
    made = draft_blocks(problem.drafter, *given, features)
    with torch.device("meta"):
        exact = Drafter(problem.drafter.shape, how).eval()
    wide = {name: value.float() for name, value in problem.drafter.state_dict().items()}
    exact.load_state_dict(wide, assign=True)
    context = exact.context(
        exact.features(states.float()), torch.arange(text.last, device=anchors.device)
    )
    head = problem.head.float()
    logits = _apart(exact, head, text.tokens, anchors, context) @ head.T
    best = logits.topk(2, dim=-1)
    found = (made @ problem.head.T).float()
    noise = float((found - logits).square().mean().sqrt())
    right = found.argmax(-1) == best.indices[..., 0]
    accepted = right.int().cumprod(1).sum(1)
    first = accepted.clamp(max=how.n_proposed - 1)[:, None]
    margin = (best.values[..., 0] - best.values[..., 1]).gather(1, first)[:, 0]
    short = accepted < how.n_proposed
    ties = int((margin[short] < 6 * noise).sum())
    return (
        f"against the eager path in float32: root mean square error of a logit {noise:.3g} (their "
        f"spread is {float(logits.std()):.3g}); {float(right.float().mean()):.1%} of proposals "
        f"equal; accepted lengths differ in {int(short.sum())} of {len(anchors)} blocks, in {ties} "
        "of them at a margin below six such errors"
    )


@torch.inference_mode()
def main() -> None:
    gpu = torch.cuda.is_available()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--on",
        choices=("full", "example", "tiny"),
        default="full" if gpu else "example",
        help="full on a GPU, else the embedded example",
    )
    options.add_argument("--longest", type=int, default=16_384, help="context of the last rows")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--threads", type=int, default=2, help="on a CPU")
    options.add_argument("--capture", default="", help="of the example; made if it is not there")
    options.add_argument("--seconds", type=float, default=150, help="then no further row is begun")
    chosen = options.parse_args()
    place = torch.device("cuda" if chosen.on == "full" else "cpu")
    torch.set_num_threads(chosen.threads)
    started = time.monotonic()
    print(stamp())
    print(torch.cuda.get_device_name() if place.type == "cuda" else f"{chosen.threads} threads")
    table = Table(place, chosen.repeats, chosen.seconds)
    table.measure_ceiling()
    if chosen.on == "example":
        with tempfile.TemporaryDirectory() as folder:
            on_example(table, Path(chosen.capture or f"{folder}/capture"))
    else:
        real = chosen.on == "full"
        shape, words, anchors = (SHAPE, VOCABULARY, 1024) if real else (TINY, 512, 64)
        longest = chosen.longest if real else 8 * anchors
        world = full(shape, place, vocabulary=words, anchors=anchors, longest=longest)
        table.begin()
        compare(table, world, alone=anchors // 32)
        grow(table, world)
        print(f"\n{agreement(world)}")
    print(f"{time.monotonic() - started:.0f} s in all")


def on_example(table: Table, folder: Path) -> None:
    """The table for the embedded example, and how far ours is from its matrix products."""
    world, capture = example(folder)
    whole = world.whole
    table.begin()

    def scored() -> list[Tensor]:
        found = score(capture, whole.drafter, silent=True)
        return torch.from_numpy(found.accepted).split([len(text.anchors) for text in whole.texts])

    best = table.row("score, from the capture's files", whole, scored, needed=True)
    same = compare(table, world, alone=None, best=best)
    grow(table, world)
    alone, n = products_of(ours(whole))
    products = table.timed(alone)[0]
    taken = whole.n_blocks / best[0]
    print(f"\naccepted lengths are {'the same in all ways' if same else 'DIFFERENT'}")
    print(
        f"the {n} matrix products alone take {products * 1e3:.0f} ms; score takes "
        f"{taken / products:.2f} times that"
    )


if __name__ == "__main__":
    main()
