"""A whole evaluation at full size, stage by stage: ``python tests/benchmarks/full_evaluation.py``.

A Qwen3.5-style target of the 27B shape and a drafter for it, both with random weights, are made on
the GPU. The target continues ten prompts by 512 tokens and is captured; the drafter, written as a
checkpoint, is scored on that, swept over twenty readings, examined in every other way, and a report
is made of it: notebooks and pages. Each stage has its seconds, its peaks of GPU memory (of this
process, and in use on the card) and of anonymous host memory (this process and those that it
started), and what is on the disk afterwards. The target is not, so that what needs it again is
skipped: whether decoding is lossless, and the audit of its states.

A stage that has not ended when its time is over is stopped and says so; what does not need it goes
on. With ``--folder`` everything is kept there, and the same command goes on from where it was:
finished stages are not run again. ``--tiny`` runs the same on a CPU in a minute or two.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from extraction import SHAPE_27B, build
from extraction import TINY as TINY_TARGET
from memory import GIB, Resident
from safetensors.torch import save_file
from stamp import stamp
from worlds import SHAPE, TINY, checkpoint_config, plain_reading, write_config

from dflash_diag import diagnostics, report
from dflash_diag.alignment import surroundings
from dflash_diag.capture import make_capture
from dflash_diag.config import RunConfig
from dflash_diag.diagnostics.base import DRAFTER
from dflash_diag.drafter import Drafter
from dflash_diag.errors import Interrupted
from dflash_diag.hidden_states import default_taps
from dflash_diag.prompts import Prompt
from dflash_diag.readings import alternatives
from dflash_diag.runs import Run, spread
from dflash_diag.sweeps import Sweep
from dflash_diag.targets import wrap_target

READINGS, PROMPT_TOKENS = 20, 64
WIDTHS = (9, 9, 10, 10, 10)


class OutOfTime(KeyboardInterrupt):
    """A stage's time is over: to what is running, as if somebody had stopped it."""


class Stages:
    """Rows of the table, kept in a folder.

    Parameters
    ----------
    seconds
        For all of them; each may take what those before it have left.
    """

    def __init__(self, place: Path, seconds: float) -> None:
        self.place, self.file = place, place / "stages.json"
        self.until = time.monotonic() + seconds
        self.rows: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.gpu = torch.cuda.is_available()
        self.resident = Resident(everyone=True)
        self.resident.start()
        signal.signal(signal.SIGALRM, self._over)
        names = ("s", "GPU GiB", "card GiB", "host GiB", "disk GiB")
        heads = zip(names, WIDTHS, strict=True)
        print(f"\n{'stage':<44}" + "".join(f"{name:>{width}}" for name, width in heads))

    def _over(self, *_: Any) -> None:
        raise OutOfTime

    def done(self, name: str) -> bool:
        """Whether an earlier run of the same command ended it; its row is shown again."""
        if name in self.rows:
            self._print(name, self.rows[name], "  (earlier)")
        return name in self.rows

    @contextmanager
    def stage(self, name: str, most: float, *, always: bool = False) -> Iterator[None]:
        """Run the body for at most so many seconds, and show what it took.

        Parameters
        ----------
        always
            Whether each process has to do it for itself, so that it is never done for good.
        """
        gc.collect()
        self.resident.most = self.resident.on_card = 0
        if self.gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        most = min(most, self.until - time.monotonic())
        started, note = time.perf_counter(), ""
        try:
            if most <= 0:
                raise OutOfTime
            # More than once: what is raised while something is being deleted gets lost.
            signal.setitimer(signal.ITIMER_REAL, most, 1.0)
            yield
            if self.gpu:
                torch.cuda.synchronize()
        except (OutOfTime, Interrupted):
            note = "  out of time: not ended"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        size = sum(f.stat().st_size for f in self.place.rglob("*") if f.is_file())
        row = [
            time.perf_counter() - started,
            torch.cuda.max_memory_allocated() / GIB if self.gpu else None,
            self.resident.on_card / GIB if self.gpu else None,
            self.resident.most / GIB,
            size / GIB,
        ]
        self._print(name, row, note)
        if not (note or always):
            self.rows[name] = row
            self.file.write_text(json.dumps(self.rows))

    def _print(self, name: str, row: list[float | None], note: str) -> None:
        cells = [
            "-" if value is None else f"{value:.{1 if at == 0 else 2}f}"
            for at, value in enumerate(row)
        ]
        texts = zip(cells, WIDTHS, strict=True)
        print(
            f"{name:<44}" + "".join(f"{text:>{width}}" for text, width in texts) + note, flush=True
        )


def write_drafter(folder: Path, tiny: bool) -> None:
    """A checkpoint in z-lab's form, with random weights in bfloat16 that are made on the GPU."""
    target = TINY_TARGET if tiny else SHAPE_27B
    taps = default_taps(target["num_hidden_layers"])
    shape = replace(TINY if tiny else SHAPE, n_taps=len(taps))
    how = plain_reading(shape, taps, block=8 if tiny else 16)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        drafter = Drafter(shape, how)
    tensors = {
        name: torch.empty(one.shape, dtype=torch.bfloat16, device=place).normal_(0, 0.02).cpu()
        if one.ndim > 1
        else torch.ones(one.shape, dtype=torch.bfloat16)
        for name, one in drafter.named_parameters()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = checkpoint_config(
        shape,
        how,
        n_target_layers=target["num_hidden_layers"],
        vocabulary=target["vocab_size"],
    )
    write_config(folder, config)


def random_prompts(n: int, vocabulary: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, vocabulary, (n, PROMPT_TOKENS), generator=generator)
    return [Prompt(id=f"p{i:02d}", prompt_ids=tuple(row)) for i, row in enumerate(ids.tolist())]


def captured(stages: Stages, chosen: argparse.Namespace) -> bool:
    """Make the capture; whether it is there."""
    name = f"capture, {chosen.prompts} prompts of {chosen.tokens} tokens"
    if stages.done(name):
        return True
    shape = TINY_TARGET if chosen.tiny else SHAPE_27B
    place = torch.device("cpu" if chosen.tiny else "cuda")
    model = target = None
    with stages.stage("target built", 120, always=True):
        model = build(shape, place, torch.float32 if chosen.tiny else torch.bfloat16)
    with stages.stage("its backend proved", 120, always=True):
        target = wrap_target(model, backend=chosen.backend)
    if target is None:
        return False
    forwards: list[int] = []
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    with stages.stage(name, 240):
        make_capture(
            target,
            random_prompts(chosen.prompts, shape["vocab_size"]),
            stages.place / "capture",
            max_new_tokens=chosen.tokens,
            layers="around",
        )
    print(f"    {target.backend.linear} kernels, {len(forwards)} forward passes")
    return name in stages.rows


def examined(stages: Stages, chosen: argparse.Namespace) -> None:
    """Everything that a capture and a drafter are enough for."""
    config = RunConfig(
        capture=str(stages.place / "capture"),
        drafter=str(stages.place / "drafter"),
        device="cpu" if chosen.tiny else "cuda",
        compiled=chosen.compile,
        out=str(stages.place / "out"),
    )
    run = None
    with stages.stage("run opened, capture hashed", 60, always=True):
        run = Run.open(config)
    if run is None:
        return

    def stage(name: str, most: float, body: Callable[[], str]) -> bool:
        if not stages.done(name):
            said = ""
            with stages.stage(name, most):
                said = body()
            if said:
                print(f"    {said}")
        return name in stages.rows

    def swept() -> str:
        drafter = run.drafter(DRAFTER)
        around = surroundings(run.capture, run.checkpoint(DRAFTER), drafter)
        known = alternatives(drafter.convention, around)[0]
        sweep = Sweep(run.capture, drafter)
        tried = spread(known, READINGS)
        taus = [sweep.hits(drafter.convention.override(one.settings)).value for one in tried]
        return f"{len(taus)} readings, tau {min(taus):.3f} to {max(taus):.3f}"

    def diagnosed() -> str:
        taken, wrong = {}, []
        for one in diagnostics.catalogue():
            started = time.perf_counter()
            if run.result(one).verdict.name == "ERROR":
                wrong.append(one)
            taken[one] = time.perf_counter() - started
        slow = sorted(taken, key=taken.__getitem__, reverse=True)[:5]
        slowest = ", ".join(f"{one} {taken[one]:.1f} s" for one in slow)
        return f"{len(taken)} diagnostics, errors: {', '.join(wrong) or 'none'}; slowest: {slowest}"

    def numbers() -> str:
        walked = run.metrics(DRAFTER)["tau"]["walked_micro"]
        return f"tau {walked['value']:.3f} [{walked['lo']:.3f}, {walked['hi']:.3f}]"

    def tried() -> str:
        return f"{sum(len(one['tried']) for one in run.alignment()['rounds'])} readings"

    def reported() -> str:
        pages = list(report.build(run).parent.glob("*.html"))
        return f"{len(pages)} pages, {sum(page.stat().st_size for page in pages) / 2**20:.1f} MiB"

    stage("scored", 60, lambda: f"{len(run.scores(DRAFTER).anchor)} anchors")
    stage("numbers with intervals", 30, numbers)
    stage(f"{READINGS} readings swept", 120, swept)
    if stage("every other reading tried", 240, tried) and stage("every diagnostic", 120, diagnosed):
        stage("report: notebooks and pages", 150, reported)
    else:
        print("the report needs every diagnostic, and those every other reading")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tiny", action="store_true", help="a small shape on a CPU")
    options.add_argument("--prompts", type=int, default=10)
    options.add_argument("--tokens", type=int, default=512, help="generated for each prompt")
    options.add_argument("--backend", default="auto", help="of the target")
    options.add_argument("--compile", action="store_true", help="the drafter's layers")
    options.add_argument("--folder", default="", help="kept, and gone on from")
    options.add_argument("--seconds", type=float, default=560, help="for all stages together")
    chosen = options.parse_args()
    print(stamp())
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name())
    place = Path(chosen.folder or tempfile.mkdtemp(prefix="full-"))
    place.mkdir(parents=True, exist_ok=True)
    try:
        stages = Stages(place, chosen.seconds)
        if not stages.done("drafter written"):
            with stages.stage("drafter written", 120):
                write_drafter(place / "drafter", chosen.tiny)
        if captured(stages, chosen):
            examined(stages, chosen)
        total = sum(row[0] for row in stages.rows.values())
        print(f"{total:.0f} s in the stages that each are done once")
    finally:
        if not chosen.folder:
            shutil.rmtree(place)


if __name__ == "__main__":
    sys.exit(main())
