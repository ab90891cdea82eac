"""What a difference of hidden states costs: choices of the target, drafts, accepted tokens.

Two captures of the same tokens are compared: a and b, the latter being what a is held against.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag.bundle import Capture
from dflash_diag.errors import CaptureError
from dflash_diag.references import ROUNDING

if TYPE_CHECKING:
    from dflash_diag.scoring import Scores


def shared_prompts(a: Capture, b: Capture) -> list[tuple[int, int]]:
    """Indices of the prompts that both captures hold, by id.

    Raises
    ------
    CaptureError
        They have no prompt in common, or hold other tokens for one.
    """
    theirs = {p.id: i for i, p in enumerate(b.prompts)}
    pairs = [(i, theirs[p.id]) for i, p in enumerate(a.prompts) if p.id in theirs]
    if not pairs:
        raise CaptureError(f"{a.path} and {b.path} have no prompt in common", "the same ids")
    for i, j in pairs:
        ours, other = a.tokens(i).tolist(), b.tokens(j).tolist()
        if ours != other:
            at = next(
                (t for t, (x, y) in enumerate(zip(ours, other, strict=False)) if x != y), None
            )
            at = min(len(ours), len(other)) if at is None else at
            raise CaptureError(
                f"{a.path} and {b.path} hold different tokens for prompt {a.prompts[i].id!r} "
                f"(from position {at} on)",
                "captures of the same tokens",
                f"capture one of them again with --like {b.path}",
            )
    return pairs


def target_flips(a: Capture, b: Capture) -> list[dict[str, Any]]:
    """Positions whose most likely next token is another in a than in b.

    Returns
    -------
    list
        One row a compared position of the prompts' last token and the continuations: ``prompt``,
        ``position``, ``flipped``, ``margin_a``, ``margin_b`` [logits] and ``decisive``: the smaller
        of the two margins is more than rounding explains, twice the relative error of one logit in
        the lower of the two precisions.
    """
    precision = max((_dtype(c) for c in (a, b)), key=lambda name: ROUNDING[name])
    rows = []
    for i, j in shared_prompts(a, b):
        ours, theirs = a.positions(i), b.positions(j)
        both = ours.merge(theirs, on="position", suffixes=("_a", "_b"))
        both = both[both["position"] >= a.prompts[i].n_prompt_tokens - 1]
        for row in both.itertuples(index=False):
            flipped = int(row.top_ids_a[0]) != int(row.top_ids_b[0])
            noise = 2 * ROUNDING[precision] * max(abs(row.top_logit_a), abs(row.top_logit_b))
            margins = float(row.margin_a), float(row.margin_b)
            rows.append(
                {
                    "prompt": a.prompts[i].id,
                    "position": int(row.position),
                    "flipped": flipped,
                    "margin_a": margins[0],
                    "margin_b": margins[1],
                    "decisive": flipped and min(margins) > noise,
                }
            )
    return rows


def _dtype(capture: Capture) -> str:
    return str(capture.target_facts.get("dtype", "bfloat16"))


def draft_flips(a: Scores, b: Scores) -> dict[str, int]:
    """Proposed tokens that differ between two scores of one drafter: ``flips`` of ``proposed``."""
    pairs = list(_same_anchors(a, b))
    flips = sum(int((x != y).sum()) for x, y in pairs)
    return {"flips": flips, "proposed": sum(x.size for x, _ in pairs)}


def _same_anchors(a: Scores, b: Scores) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Proposals [anchors, D] of both, prompt by prompt."""
    theirs = {name: i for i, name in enumerate(b.prompt_ids)}
    for i, name in enumerate(a.prompt_ids):
        if name in theirs:
            yield a.proposed[a.prompt == i], b.proposed[b.prompt == theirs[name]]
