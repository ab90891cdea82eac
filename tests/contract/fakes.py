"""Hand-made inputs for diagnostics: scores of simulated drafters, nothing that needs torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_diag import metrics
from dflash_diag.diagnostics.base import Skip

VOCAB = 300


def simulated_scores(
    *,
    skill: float,
    seed: int = 0,
    n_prompts: int = 6,
    generated: int = 48,
    proposed: int = 7,
    unscored: tuple[dict[str, str], ...] = (),
) -> SimpleNamespace:
    """Scores of a drafter whose first proposal is right with probability about ``skill``."""
    rng = np.random.default_rng(seed)
    hardness = np.random.default_rng(99).normal(0, 0.12, n_prompts)
    width, per = 64, generated - proposed
    prompt = np.repeat(np.arange(n_prompts), per)
    anchor = np.tile(np.arange(20, 20 + per), n_prompts)
    a = len(prompt)
    text = np.random.default_rng(7).integers(0, VOCAB, (n_prompts, generated + 40))
    after = (anchor - 20)[:, None] + np.arange(1, proposed + 1)
    labels = text[prompt[:, None], after]
    chance = np.clip(skill - hardness[prompt], 0.02, 0.98)[:, None]
    fade = 0.93 ** np.arange(proposed)
    hit = rng.random((a, proposed)) < chance * fade
    rank = np.where(hit, 0, rng.geometric(0.25, (a, proposed))).clip(0, VOCAB - 1)
    logits = -np.sort(rng.gamma(1.0, 2.0, (a, proposed, width)), axis=-1)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - 0.02
    ids = np.argsort(rng.random((a, proposed, VOCAB)), axis=-1)[..., :width]
    for k in range(width):
        ids[..., k] = np.where(rank == k, labels, np.where(ids[..., k] == labels, 0, ids[..., k]))
    return SimpleNamespace(
        prompt_ids=[f"p{i:02d}" for i in range(n_prompts)],
        n_prompt_tokens=np.full(n_prompts, 20),
        n_generated=np.full(n_prompts, generated),
        unscored=list(unscored),
        prompt=prompt.astype(np.int32),
        anchor=anchor.astype(np.int32),
        labels=labels.astype(np.int64),
        proposed=np.where(rank == 0, labels, (labels + 1) % VOCAB).astype(np.int64),
        rank=rank.astype(np.int32),
        label_logprob=np.full((a, proposed), -1.0, np.float32),
        topk_ids=ids.astype(np.int32),
        topk_logprobs=logprobs.astype(np.float32),
        block_size=proposed + 1,
        convention={},
        provenance={},
        valid=None,
    )


@dataclass
class FakeInputs:
    """`Inputs` held in memory."""

    by_role: dict[str, SimpleNamespace]
    names: dict[str, str]
    checkpoints: dict[str, Any] = field(default_factory=dict)
    conventions: dict[str, Any] = field(default_factory=dict)
    found_problems: dict[str, list[Any]] = field(default_factory=dict)
    static_checks: list[dict[str, Any]] = field(default_factory=list)
    lossless_check: dict[str, Any] | None = None
    served_check: dict[str, Any] | None = None
    reference_check: dict[str, Any] | None = None
    probed: Any = None
    made_texts: list[Any] = field(default_factory=list)
    audited: Any = None
    made_continuations: list[Any] = field(default_factory=list)
    comparisons: dict[str, dict[str, Any]] = field(default_factory=dict)
    scored_sides: dict[str, SimpleNamespace] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    aligned: dict[str, Any] = field(default_factory=dict)
    examined: dict[str, Any] = field(default_factory=dict)
    claimed_lines: list[Any] = field(default_factory=list)
    replayed: dict[str, Any] = field(default_factory=dict)
    gaps: dict[str, Any] = field(default_factory=dict)
    rendered: dict[str, Any] | None = None
    side_by_side: dict[str, Any] | None = None
    seed: int = 0
    draws: int = 400

    @property
    def roles(self) -> list[str]:
        return list(self.by_role)

    def name(self, role: str) -> str:
        return self.names[role]

    def checkpoint(self, role: str) -> Any:
        return self.checkpoints[role]

    def problems(self, role: str) -> list[Any]:
        return self.found_problems.get(role, [])

    def convention(self, role: str) -> Any:
        return self.conventions[role]

    def static(self, role: str) -> list[dict[str, Any]]:
        return self.static_checks

    def scores(self, role: str) -> SimpleNamespace:
        return self.by_role[role]

    def metrics(self, role: str) -> dict[str, Any]:
        return metrics.score_json(self.by_role[role], seed=self.seed, draws=self.draws)

    def continuations(self) -> list[Any]:
        return self.made_continuations

    def texts(self) -> list[Any]:
        return self.made_texts

    def lossless(self) -> dict[str, Any]:
        if self.lossless_check is None:
            raise Skip("No target was at hand.")
        return self.lossless_check

    def served(self) -> dict[str, Any] | None:
        return self.served_check

    def sides(self) -> list[str]:
        return list(self.comparisons)

    def divergence(self, side: str) -> dict[str, Any]:
        return self.comparisons[side]

    def side_scores(self, side: str) -> tuple[SimpleNamespace, SimpleNamespace]:
        if side not in self.scored_sides:
            raise Skip("A capture that keeps only some positions cannot be scored.")
        return self.by_role["drafter"], self.scored_sides[side]

    def state_checks(self) -> dict[str, Any]:
        return self.checks

    def alignment(self) -> dict[str, Any]:
        return self.aligned

    def doctor(self) -> dict[str, Any]:
        return self.examined

    def renderings(self) -> dict[str, Any]:
        if self.rendered is None:
            raise Skip("No other rendering was asked for.")
        return self.rendered

    def replay(self) -> dict[str, Any]:
        return self.replayed

    def gap(self) -> dict[str, Any]:
        return self.gaps

    def compared(self) -> dict[str, Any]:
        if self.side_by_side is None:
            raise Skip("Nothing was given to compare the drafter with.")
        return self.side_by_side

    def claimed(self) -> list[Any]:
        return self.claimed_lines

    def reference(self) -> dict[str, Any] | None:
        return self.reference_check

    def influence(self, role: str) -> Any:
        if self.probed is None:
            raise Skip("A capture that keeps only some positions cannot be drafted on.")
        return self.probed

    def audit(self) -> Any:
        if self.audited is None:
            raise Skip("No training step was given.")
        return self.audited

    def provenance(self) -> dict[str, Any]:
        return {"made_by": "tests"}
