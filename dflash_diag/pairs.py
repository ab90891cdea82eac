"""Two captures of the same tokens: how their states differ, and what the difference costs.

a is examined, b is what it is held against. The cost is counted in choices of the target, drafts,
and accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dflash_diag.bundle import Capture
from dflash_diag.divergence import Deviation
from dflash_diag.errors import CaptureError
from dflash_diag.hidden_states import EMBEDDING, recorded
from dflash_diag.modules import OUTPUT, Variant, computed_as
from dflash_diag.references import ROUNDING

if TYPE_CHECKING:
    from dflash_diag.scoring import Scores
    from dflash_diag.targets import Target


class Pair(NamedTuple):
    """One prompt that two captures hold."""

    a: int
    """Its index in a."""
    b: int
    """Its index in b."""
    n_tokens: int
    """Leading tokens that are the same; states beyond them are of another text."""
    same: bool
    """Whether all tokens are."""


def shared_prompts(a: Capture, b: Capture) -> list[Pair]:
    """The prompts that both captures hold, by id.

    Continuations may part, as greedy decoding does at a near-tie; prompts may not.

    Raises
    ------
    CaptureError
        They have no prompt in common, or another one under the same id.
    """
    theirs = {p.id: i for i, p in enumerate(b.prompts)}
    found = []
    for i, prompt in enumerate(a.prompts):
        if prompt.id not in theirs:
            continue
        ours, other = a.tokens(i).tolist(), b.tokens(theirs[prompt.id]).tolist()
        both = zip(ours, other, strict=False)
        n = next((t for t, (x, y) in enumerate(both) if x != y), min(len(ours), len(other)))
        if n < prompt.n_prompt_tokens:
            raise CaptureError(
                f"{a.path} and {b.path} hold different tokens for prompt {prompt.id!r} "
                f"(from position {n} on)",
                "captures of the same tokens",
                f"capture one of them again with --like {b.path}",
            )
        found.append(Pair(i, theirs[prompt.id], n, ours == other))
    if not found:
        raise CaptureError(f"{a.path} and {b.path} have no prompt in common", "the same ids")
    return found


def left_out(a: Capture, b: Capture) -> str:
    """What a comparison of two captures covers, in words, where it leaves anything out; else ''."""
    pairs = shared_prompts(a, b)
    ours, theirs = (sum(len(c.rows(i)) for i in range(len(c))) for c in (a, b))
    both = sum(len(_common_rows(a, b, pair)) for pair in pairs)
    lacking = {layer for p in pairs for layer in set(a.layers(p.a)) - set(b.layers(p.b))}
    parts = [
        f"{n} of {' and '.join(dict.fromkeys(map(str, of)))} {what}"
        for n, what, of in (
            (len(pairs), "prompts", (len(a), len(b))),
            (both, "positions", (ours, theirs)),
        )
        if n < max(of)
    ]
    if lacking:
        parts.append(f"layers without {', '.join(map(str, sorted(lacking)))}")
    return ", ".join(parts)


def _common_rows(a: Capture, b: Capture, pair: Pair) -> torch.Tensor:
    """Positions of the same text whose states both hold, ascending."""
    rows = torch.tensor(sorted(set(a.rows(pair.a).tolist()) & set(b.rows(pair.b).tolist())))
    return rows[rows < pair.n_tokens]


def layer_deviations(
    a: Capture, b: Capture, *, each: Callable[[dict[str, Any]], None] = lambda _row: None
) -> list[dict[str, Any]]:
    """Difference of every layer that both captures hold, over the prompts and rows of both.

    Parameters
    ----------
    each
        Told of every prompt and layer: ``prompt``, ``layer``, ``n_tokens``, ``rel_rms``,
        ``token_max`` and the ``token`` that has it.

    Returns
    -------
    list
        In layer order, the numbers of `Deviation` with ``layer``, ``module`` (the layer's output)
        and the largest difference's place as ``max_abs_prompt`` and ``max_abs_token``.
    """
    found: dict[int, Deviation] = {}
    for pair in shared_prompts(a, b):
        rows = _common_rows(a, b, pair)
        if not len(rows):
            continue
        i, j = pair.a, pair.b
        ours, theirs = a.rows(i), b.rows(j)
        in_a, in_b = torch.searchsorted(ours, rows), torch.searchsorted(theirs, rows)
        for layer in sorted(set(a.layers(i)) & set(b.layers(j))):
            part = found.setdefault(layer, Deviation()).add(
                a.states(i, [layer])[in_a, 0],
                b.states(j, [layer])[in_b, 0],
                sequence=i,
                positions=rows,
            )
            each({"prompt": a.prompts[i].id, "layer": layer, "n_tokens": len(rows), **part})
    if not found:
        raise CaptureError(f"{a.path} and {b.path} have no position of one layer in common")
    return [
        _placed({"layer": layer, "module": OUTPUT, **one.to_json()}, a)
        for layer, one in sorted(found.items())
    ]


def _placed(row: dict[str, Any], capture: Capture) -> dict[str, Any]:
    sequence = row.pop("max_abs_sequence")
    return {**row, "max_abs_prompt": None if sequence is None else capture.prompts[sequence].id}


@torch.inference_mode()
def layer_floor(
    target: Target,
    variants: tuple[Variant, Variant],
    sequences: Sequence[Sequence[int]],
    *,
    tick: Callable[[], None] = lambda: None,
) -> dict[tuple[int, str], dict[str, Any]]:
    """The noise floor of every layer: one way of computing a target against another.

    Parameters
    ----------
    variants
        Low precision, and float32 of the same code (`dflash_diag.localization.noise_variants`).
    sequences
        Tokens to measure it on.
    tick
        Called after each forward.

    Returns
    -------
    dict
        ``(layer, module)`` to the numbers of `Deviation`.
    """
    layers = range(EMBEDDING, target.n_layers)
    states: list[list[Mapping[int, torch.Tensor]]] = []
    for variant in variants:
        states.append([])
        with computed_as(target, variant) as live:
            for tokens in sequences:
                with recorded(live.parts, layers) as kept:
                    live.logits(torch.tensor([list(tokens)]), last_only=True)
                states[-1].append({layer: value[0].cpu() for layer, value in kept.items()})
                tick()
    found = {layer: Deviation() for layer in layers}
    for low, high in zip(*states, strict=True):
        for layer, one in found.items():
            one.add(low[layer], high[layer])
    return {(layer, OUTPUT): one.to_json() for layer, one in found.items()}


def target_flips(a: Capture, b: Capture) -> list[dict[str, Any]]:
    """Positions whose most likely next token is another in a than in b.

    Returns
    -------
    list
        One row a compared position of the prompts' last token and the continuations: ``prompt``,
        ``position``, ``flipped``, ``margin_a``, ``margin_b``, ``limit`` [logits] and ``decisive``:
        the smaller of the two margins is more than rounding explains, the limit, which is twice the
        error of one logit in the lower of the two precisions.
    """
    precision = max((_dtype(c) for c in (a, b)), key=lambda name: ROUNDING[name])
    rows = []
    for i, j, n_tokens, _ in shared_prompts(a, b):
        ours, theirs = a.positions(i), b.positions(j)
        both = ours.merge(theirs, on="position", suffixes=("_a", "_b"))
        both = both[both["position"].between(a.prompts[i].n_prompt_tokens - 1, n_tokens - 1)]
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
                    "limit": noise,
                    "decisive": flipped and min(margins) > noise,
                }
            )
    return rows


def _dtype(capture: Capture) -> str:
    return str(capture.target_facts.get("dtype", "bfloat16"))


def capture_variant(capture: Capture) -> Variant:
    """How a capture was computed: its backend and dtype.

    Raises
    ------
    CaptureError
        It does not say, as one made by other code.
    """
    backend = capture.target_facts.get("backend")
    if capture.foreign or backend is None:
        raise CaptureError(f"{capture.path} does not say how its target was computed")
    words = ["torch" if backend["linear"] == "none" else backend["linear"]]
    if backend.get("form", "auto") != "auto":
        words.append(backend["form"])
    if backend["linear"] == "fla":
        kernel = backend["convolution"] == "causal-conv1d"
        words.append("causal-conv1d" if kernel else "torch-conv")
    return Variant.parse(f"{'+'.join(words)}/{_dtype(capture)}")


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
