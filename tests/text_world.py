"""Texts and a drafter that is right where the target is sure; nothing that needs torch."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from dflash_diag.strata import Text

P, G, D = 5, 40, 4


def world(n: int = 30, seed: int = 0, *, offset: int = 0, **facts) -> tuple[SimpleNamespace, list]:
    """Scores whose proposals are right where the target is sure, and their texts."""
    rng = np.random.default_rng(seed)
    per = G - D - offset
    texts, rows = [], []
    for i in range(n):
        tokens = rng.integers(0, 50, P + G)
        entropy = rng.gamma(2.0, 0.6, P + G)
        text = Text(
            id=f"{'code' if i % 3 else 'chat'}-{i:02d}",
            start=P,
            tokens=tokens,
            ended=i % 2 == 0,
            form="text",
            entropy=entropy,
            choice=np.append(tokens[1:], 0),
        )
        texts.append(replace(text, **{k: v(i) for k, v in facts.items()}))
        for a in range(P, P + per):
            at = a + np.arange(1, D + 1) + offset
            right = rng.random(D) < 0.95 * np.exp(-0.5 * entropy[at - 1])
            rows.append((i, a, tokens[at], np.where(right, tokens[at], -1)))
    prompt, anchor, labels, proposed = (np.array(column) for column in zip(*rows, strict=True))
    scores = SimpleNamespace(
        prompt_ids=[text.id for text in texts],
        unscored=[],
        prompt=prompt,
        anchor=anchor,
        labels=labels,
        proposed=proposed,
        convention={"label_offset": {"value": offset}} if offset else {},
    )
    return scores, texts
