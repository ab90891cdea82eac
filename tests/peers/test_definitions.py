"""Our definitions against the metrics of speculators and SpecForge, run on the same hits."""

from __future__ import annotations

import ast
import importlib.util
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dflash_diag.definitions import definitions

A, D = 40, 6


def file_of(package: str, path: str) -> Path:
    try:
        return Path(str(metadata.distribution(package).locate_file(f"{package}/{path}")))
    except metadata.PackageNotFoundError:
        pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="module")
def speculators():
    """The file of its metrics alone: importing the package takes all of it."""
    spec = importlib.util.spec_from_file_location(
        "speculators_metrics", file_of("speculators", "models/metrics.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def specforge():
    """Its accepted length, taken out of a file whose imports take 20 seconds."""
    tree = ast.parse(file_of("specforge", "algorithms/common/dflash_family_model.py").read_text())
    tree.body = [one for one in tree.body if getattr(one, "name", "") == "compute_accept_len"]
    names = {"torch": torch}
    exec(compile(tree, "specforge", "exec"), names)
    return names["compute_accept_len"]


@pytest.fixture(params=["every slot has a label", "some have none", "some blocks have none"])
def scores(request):
    rng = np.random.default_rng(1)
    labels = rng.integers(0, 3, (A, D))
    proposed = np.where(rng.random((A, D)) < 0.6, labels, labels + 1)
    valid = rng.random((A, D)) < (1.0 if request.param.startswith("every") else 0.7)
    if request.param.startswith("some blocks"):
        valid[::5] = False
    return SimpleNamespace(
        prompt=np.repeat(np.arange(4), A // 4),
        anchor=np.tile(np.arange(A // 4), 4),
        labels=labels,
        proposed=proposed,
        rank=np.where(labels == proposed, 0, 1),
        valid=valid,
    )


def ours(name: str, scores) -> float:
    return float(definitions(D)[name].measure(scores).value()[0])


def test_speculators_accepted_length(speculators, scores):
    correct, valid = torch.tensor(scores.proposed == scores.labels), torch.tensor(scores.valid)
    total, blocks = speculators.compute_accepted_length_counts(correct, valid)
    assert ours("tau uniform", scores) == pytest.approx(float(total / blocks), rel=1e-6)


def test_speculators_accuracies_and_their_product(speculators, scores):
    right, seen = speculators.compute_accuracy_multi_step(
        torch.tensor(scores.proposed).reshape(1, -1),
        torch.tensor(scores.labels).reshape(1, -1),
        torch.tensor(scores.valid).reshape(1, -1),
        torch.arange(A * D).reshape(1, -1) % D,
        D,
    )
    assert ours("accuracy uniform", scores) == pytest.approx(float(right.sum() / seen.sum()))
    by_slot = right / seen
    for k in range(1, D + 1):
        assert ours(f"marginal@{k} uniform", scores) == pytest.approx(float(by_slot[k - 1]))
    product = float(by_slot.cumprod(0).sum())
    assert ours("eal_product uniform", scores) == pytest.approx(product, rel=1e-6)


def test_specforges_accepted_length_passes_slots_without_a_label(specforge, scores):
    blocks = [torch.tensor(x)[None] for x in (scores.proposed, scores.labels, scores.valid)]
    lengths = specforge(*blocks)[0].numpy()
    mean = lengths[scores.valid.any(axis=1)].mean()
    assert ours("streak_passing uniform", scores) == pytest.approx(float(mean))
    assert ours("tau_passing uniform", scores) == pytest.approx(float(mean) + 1)
