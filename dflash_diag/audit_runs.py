"""The audit of a run's training step, kept in the run's folder.

::

    OUT/audit/KEY.json    properties, and what the plots show

The text that the step is tried on is one that was trained on, where such texts and the target are
at hand; else the longest of the capture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_diag import storage
from dflash_diag.diagnostics.base import DRAFTER
from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    from dflash_diag.runs import Run
    from dflash_diag.training_audit import Audit, Material

VERSION = "audit/1"


def audit_of(run: Run, *, again: bool = False) -> Audit:
    """The audit of a run's step, made if it is not there.

    Parameters
    ----------
    again
        Make it even if it is there: its key knows the step's file, not what that imports.

    Raises
    ------
    BadInput
        The step cannot be loaded, or no text can be used.
    """
    from dflash_diag.training_audit import Audit, audit_step

    path = run.out / "audit" / f"{step_key(run)[:12]}.json"
    if again or not path.is_file():
        found = audit_step(run.step, material_of(run), name_of(run.config.step))
        storage.write_json(path, storage.plain(found.kept()))
    return Audit.from_json(storage.read_json(path))


def name_of(spec: str) -> str:
    """``FILE.py:FUNC`` without the folder."""
    file, _, function = spec.rpartition(":")
    return f"{Path(file).name}:{function}"


def step_key(run: Run) -> str:
    """What the audit depends on, as far as files show it."""
    file, _, function = run.config.step.rpartition(":")
    texts = _sequences(run)
    return storage.content_key(
        VERSION,
        storage.sha256_file(file),
        function,
        run.config.target,
        _content(texts) if texts else run.capture_digest,
        _taps(run),
        run.config.device,
        run.config.dtype,
    )


def material_of(run: Run) -> Material:
    """The text, its states and its anchors.

    Raises
    ------
    BadInput
        Nothing says which layers the step wants, or no text is long enough.
    """
    import numpy as np
    import torch

    from dflash_diag.training_audit import Material

    layers, taps = getattr(run.step, "layers", None), _taps(run)
    ahead = run.convention(DRAFTER).n_proposed if DRAFTER in run.roles else None
    texts = _sequences(run)
    if not texts:
        return Material.of_capture(run.capture, layers, taps, ahead)
    from dflash_diag.training_sequences import read_training_sequences

    split, found = next(iter(read_training_sequences(texts).items()))
    longest = max(found, key=lambda one: len(one.tokens))
    is_own = run.given.is_example and not run.given.training_sequences
    whose = "the embedded example's " * is_own
    return Material.of_target(
        run.target,
        torch.from_numpy(np.asarray(longest.tokens)),
        longest.prefix,
        layers,
        taps,
        ahead=ahead,
        text=f"{longest.id} of {whose}{split} sequences",
    )


def _taps(run: Run) -> tuple[int, ...] | None:
    return tuple(run.convention(DRAFTER).taps) if DRAFTER in run.roles else None


def _sequences(run: Run) -> str:
    """Where training texts are, if the target is at hand too; empty where the capture is used."""
    return run.config.training_sequences if run.config.target else ""


def _content(texts: str) -> list[str]:
    path = Path(texts)
    files = [path] if path.is_file() else sorted(one for one in path.iterdir() if one.is_file())
    if not files:
        raise BadInput(f"--training-sequences {texts} is empty", "a file, or a folder with some")
    return [storage.sha256_file(one) for one in files]
