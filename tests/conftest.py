"""What holds for every test: no hub, no display, no GPU unless there is one."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
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
def hybrid_capture(tmp_path_factory):
    """The report's 24 prompts on the example's hybrid target, with every layer."""
    return _captured(tmp_path_factory, "hybrid")


@pytest.fixture(scope="session")
def full_capture(tmp_path_factory):
    """The same prompts on the full-attention target."""
    return _captured(tmp_path_factory, "full")


def _captured(tmp_path_factory, name):
    from dflash_diag.capture import make_capture
    from dflash_diag.example import EXAMPLE

    return make_capture(
        str(ZOO / name / "target"),
        EXAMPLE.read_prompts(),
        tmp_path_factory.mktemp(name) / "capture",
        max_new_tokens=EXAMPLE.max_new_tokens,
        layers="all",
        silent=True,
    )
