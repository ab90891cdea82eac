"""What holds for every test: no hub, no display, one thread, no GPU unless there is one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what tests share: tiny_world, browsing ...

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    # Tests run side by side, each on a core of its own; read when torch is first imported.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Two shared cores make single examples slow now and then; the suite as a whole stays fast.
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("long", deadline=None, max_examples=2000)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default")
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


ZOO = Path(__file__).parents[1] / "data" / "zoo"


@pytest.fixture(scope="session")
def hybrid_capture(shared_folder):
    """The report's 24 prompts on the example's hybrid target, with every layer."""
    from dflash_diag.example import EXAMPLE

    return captured("hybrid", EXAMPLE.read_prompts(), shared_folder / "hybrid")


@pytest.fixture(scope="session")
def wide_capture(shared_folder):
    """All 50 prompts on the hybrid target: what costs a few per cent is not seen with 24."""
    from dflash_diag.example import EXAMPLE
    from dflash_diag.prompts import read_prompts

    files = [ZOO.parent / name for name, _ in EXAMPLE.prompts]
    prompts = [prompt for file in files for prompt in read_prompts(file)]
    return captured("hybrid", prompts, shared_folder / "wide")


@pytest.fixture(scope="session")
def full_capture(shared_folder):
    """The same prompts on the full-attention target."""
    from dflash_diag.example import EXAMPLE

    return captured("full", EXAMPLE.read_prompts(), shared_folder / "full")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory, worker_id):
    """A folder for what is made once for all processes of a test run."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def hostile_config(shared_folder):
    """The tiny world under names, prompts, files and a server that would like to be markup."""
    import tiny_world
    from filelock import FileLock
    from hostile import HOSTILE, capture_from_a_server

    from dflash_diag.config import RunConfig

    folder = shared_folder / "hostile"
    drafter = folder / 'a<b>&c" onload="alert(4)'
    prompts = [
        {"id": HOSTILE, "text": "</pre><script>alert(2)</script>", "kind": "<b onclick=alert(3)>"},
        {"id": "p1", "text": "def f(x):", "kind": "code"},
        {"id": "p2", "prompt_ids": [1, 2, 3], "kind": "code"},
    ]
    with FileLock(f"{folder}.lock"):
        if not drafter.exists():
            tiny_world.write_world(folder)
            (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
            capture_from_a_server(folder)
            (folder / "drafter").rename(drafter)
    return RunConfig(
        target=str(folder / "target"),
        drafter=str(drafter),
        reference=str(folder / "reference"),
        capture=str(folder / "captured"),
        against="torch/bfloat16",
        draws=400,
        out=str(folder / "out"),
    )


@pytest.fixture(scope="session")
def hostile_site(hostile_config):
    """The report on it; made if no process has made it yet."""
    from filelock import FileLock

    from dflash_diag import report
    from dflash_diag.runs import Run

    out = Path(hostile_config.out)
    with FileLock(f"{out}.lock"):
        if not (out / "index.html").exists():
            report.build(Run.open(hostile_config))
    return out


def captured(name, prompts, folder):
    """A capture of an example's target, with every layer; made if no process has made it yet."""
    from filelock import FileLock

    from dflash_diag.bundle import Capture
    from dflash_diag.capture import make_capture
    from dflash_diag.example import EXAMPLE

    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return Capture.load(folder)
        return make_capture(
            str(ZOO / name / "target"),
            prompts,
            folder,
            max_new_tokens=EXAMPLE.max_new_tokens,
            layers="all",
            silent=True,
        )
