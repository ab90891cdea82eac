"""What a run measures about the convention of its drafter, kept in the run's folder.

::

    OUT/alignment/KEY.json    readings that were tried, findings, positions, density

Nothing here decides anything; see `alignment` for the method and `findings` for the causes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dflash_diag import storage
from dflash_diag.alignment import align, surroundings
from dflash_diag.blocks import context_rows
from dflash_diag.findings import alignment_json
from dflash_diag.metrics import leading
from dflash_diag.positions import BLOCKS, Block, pair_energies, phase_errors, shift_checks
from dflash_diag.progress import progress
from dflash_diag.readings import OFFSETS
from dflash_diag.scoring import Borrowed, tapped_states
from dflash_diag.sweeps import Sweep

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.drafter import Drafter
    from dflash_diag.runs import Run

VERSION = "alignment/1"
DENSITIES = (4, 8, 16, 32)
"""Anchors in one pass; trainers draw 24 to 512 a sequence."""
DENSITY_PROMPTS = 12


def alignment_of(run: Run, role: str) -> Mapping[str, Any]:
    """Everything about one drafter's convention, computed if it is not there."""
    found: Mapping[str, Any] = storage.kept_json(
        alignment_path(run, role), lambda: _measure(run, role)
    )
    return found


def alignment_path(run: Run, role: str) -> Path:
    """Where it is kept."""
    key = storage.content_key(VERSION, run.score_key(role), run.seed, run.draws)
    return run.out / "alignment" / f"{key[:12]}.json"


def _measure(run: Run, role: str) -> dict[str, Any]:
    drafter = run.drafter(role)
    with progress(itertools.count(), f"readings of {run.name(role)}", unit="reading") as stage:
        sweep = Sweep(run.capture, drafter, tick=stage.update)
        around = surroundings(
            run.capture, run.checkpoint(role), drafter, special_ids=_special_ids(run.config.target)
        )
        found = align(sweep, around, seed=run.seed, draws=run.draws)
        made = alignment_json(found)
        made["positions"] = positions(sweep)
        made["density"] = density(sweep)
    return made


def _special_ids(target: str) -> list[int]:
    """Special tokens of the target's tokenizer, where its files are at hand."""
    from dflash_diag.targets import load_tokenizer, special_ids

    return special_ids(load_tokenizer(target)) if target and Path(target).exists() else []


def positions(sweep: Sweep) -> dict[str, Any]:
    """Phase error of each slot by offset, and the shifts that must change nothing."""
    drafter = sweep.drafter
    blocks = real_blocks(sweep.capture, drafter, sweep.rows)
    offsets = sorted({0, *OFFSETS})
    errors = phase_errors(drafter, pair_energies(drafter, blocks), offsets)
    return {
        "offsets": offsets,
        "phase_degrees": [[round(float(x), 3) for x in row] for row in errors],
        "shifts": shift_checks(drafter, blocks),
    }


@torch.inference_mode()
def real_blocks(capture: Capture, drafter: Drafter, prompts: Sequence[int]) -> list[Block]:
    """Blocks in the middle of the first prompts' continuations; ``prompts`` have complete ones."""
    how, weight = drafter.convention, drafter.fc.weight
    embedding = Borrowed.of(capture, drafter).embedding
    made = []
    for index in prompts[:BLOCKS]:
        prompt, tokens = capture.prompts[index], capture.tokens(index)
        anchor = prompt.n_prompt_tokens + (prompt.n_generated - how.n_proposed) // 2
        ids = torch.full((how.block_size,), how.mask_token_id)
        ids[0] = tokens[anchor]
        states = tapped_states(capture, index, how)[: context_rows(how.context_bound, anchor)]
        features = drafter.features(states.to(weight.device, weight.dtype))
        noise = embedding[ids.to(embedding.device)] * how.embedding_scale
        made.append(Block(anchor, noise, features))
    return made


def density(sweep: Sweep) -> list[dict[str, Any]]:
    """Slot accuracy when blocks of one pass see one another, by the number of anchors in a pass.

    Serving has one block a pass. Weights that learned to look at other blocks gain with every
    further one; others lose, or do not care.
    """
    names = [sweep.capture.prompts[i].id for i in sweep.rows[:DENSITY_PROMPTS]]
    few = Sweep(sweep.capture, sweep.drafter, prompts=names, tick=sweep.tick)
    rows = []
    for others in ("hidden", "later", "all"):
        how = few.drafter.convention.override([f"other_blocks={others}"])
        for together in DENSITIES if others != "hidden" else (None,):
            right = few.hits(how, together=together).right
            rows.append(
                {
                    "other_blocks": others,
                    "anchors": together or 1,
                    "accuracy": float(np.mean([one.mean() for one in right])),
                    "tau_uniform": float(
                        np.concatenate([leading(one) + 1 for one in right]).mean()
                    ),
                    "n_prompts": len(right),
                }
            )
    return rows
