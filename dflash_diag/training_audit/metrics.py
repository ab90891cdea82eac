"""Whether a number that the step reports is what its name says, computed anew from its outputs.

The step is called with many anchors, so that numbers are told apart, and with a label of every
third block left out of the loss mask, so that the ways to count such a slot differ.

Symbols: A anchors, D proposed tokens, k slot from 1, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from dflash_diag.training_audit.calling import Caller, Output, StepError
from dflash_diag.training_audit.properties import Property, fact, fault, fine, untested

CLOSE = (1e-5, 6e-5, 6e-4)
"""Differences up to which a reported number is a computed one: exact, or rounded to four or three
digits. The closest that fits anything decides."""
MANY = 24
"""Blocks in the call that is looked at."""
SHOWN = 3
"""Definitions named at most."""
TOP = (2, 4, 8)
Kind = Literal["length", "share", "loss"]
WORDS: Mapping[Kind, tuple[str, ...]] = {
    "loss": ("loss", "nll", "ce", "kl"),
    "share": ("acc", "rate", "correct", "hit"),
    "length": ("streak", "len", "tau", "eal", "accept", "dds", "topk", "tokens", "al"),
}
"""Parts of names by what they promise."""


class Definition(str):
    """Words for one way to compute a number; `counts_zero` where it counts slots without weight."""

    __slots__ = ("counts_zero", "kind")
    kind: Kind
    counts_zero: bool

    @classmethod
    def of(cls, words: str, kind: Kind, *, counts_zero: bool = False) -> Definition:
        made = cls(words)
        made.kind, made.counts_zero = kind, counts_zero
        return made


def metric_properties(call: Caller, first: Output) -> Iterator[Property]:
    """One property for each reported number."""
    if not first.metrics:
        yield untested("metric.reported", "the step reports none (a sixth value: a dictionary)")
        return
    m, d = call.material, first.logits.shape[1]
    gap, span = m.anchors[0], m.anchors[-1] - m.anchors[0]
    n = min(MANY, span // 3)
    places = tuple(sorted({*m.anchors, *(gap + i * span // n for i in range(n))}))
    mask = m.loss_mask.clone()
    used = {a + i for a in places for i in (0, 1)}
    holes = [a + d // 2 for a in places[::3]]
    mask[[at for at in holes if at not in used]] = False
    try:
        output = call(anchors=places, loss_mask=mask)
    except StepError as error:
        yield untested("metric.reported", f"with more anchors and a hole in the mask, {error}")
        return
    known = definitions(output)
    for name, value in output.metrics.items():
        if value is None or not math.isfinite(value):
            yield untested(f"metric.reported.{name}", "it is not one finite number")
        else:
            yield _reported(name, value, known)


def _reported(name: str, value: float, known: Mapping[Definition, float]) -> Property:
    id_, promised = f"metric.reported.{name}", _promised(name)
    by_distance = (
        [one for one, x in known.items() if abs(x - value) <= close * max(1.0, abs(x))]
        for close in CLOSE
    )
    fits = next(filter(None, by_distance), [])
    expected = {"share": "a share of slots", "length": "a number of tokens", "loss": "the loss"}
    wanted = expected.get(promised or "", "a known definition")
    if not fits:
        if promised is None:
            return fact(id_, value, "Its name promises nothing that is known here, and it is none.")
        return fault(
            id_,
            value,
            wanted,
            f"{value:.4g} is none of {len(known)} numbers that the step's logits, labels and "
            "weights give.",
            "Look at what it counts: other labels, summed over ranks twice, another batch.",
        )
    numbers = set(re.findall(r"\d+", name))
    fits.sort(key=lambda one: (one.counts_zero, not numbers & set(re.findall(r"\d+", one))))
    more = f"; and {len(fits) - SHOWN} more" if len(fits) > SHOWN else ""
    said = "; ".join(fits[:SHOWN]) + more
    if all(one.counts_zero for one in fits):
        return fault(
            id_,
            fits[0],
            wanted,
            f"{value:.4g} is {said}: slots without weight are counted.",
            "Count the slots that have weight, and no others.",
        )
    ours = [one for one in fits if not one.counts_zero]
    if promised is not None and all(one.kind != promised for one in ours):
        return fault(id_, ours[0], wanted, f"{value:.4g} is {said}.", "Call it what it is.")
    return fine(id_, ours[0], wanted, f"{value:.4g} is {said}.")


def _promised(name: str) -> Kind | None:
    """What a name says: the length of a run, a share, a loss; None where it says nothing."""
    low = name.lower()
    parts = low.replace("-", "_").replace("/", "_").replace("@", "_").split("_")
    if any(word in low for word in WORDS["loss"][:1]) or parts[-1] in WORDS["loss"]:
        return "loss"
    if "len" in low or any(p in WORDS["length"] for p in parts) or low.startswith(("dds", "topk")):
        return "length"
    return "share" if any(word in low for word in WORDS["share"]) else None


def definitions(output: Output) -> dict[Definition, float]:
    """Every number that logits, labels and weights give, by what it is."""
    logits, labels = output.logits.detach(), output.labels
    valid, everything = output.weights > 0, torch.ones_like(output.weights, dtype=torch.bool)
    right = logits.argmax(-1) == labels
    found: dict[Definition, float] = {}

    def add(words: str, kind: Kind, value: Tensor | float, *, zero: bool = False) -> None:
        found[Definition.of(words, kind, counts_zero=zero)] = float(value)

    add("the loss", "loss", output.loss.detach())
    add("share of the slots that are right", "share", _mean(right, valid))
    add("share of all slots that are right", "share", _mean(right, everything), zero=True)
    add("right slots over all slots", "share", (right & valid).double().mean(), zero=True)
    whole = valid.all(-1)
    if bool(whole.any()):
        only = right[whole].double().mean()
        add("share of the slots that are right, in whole blocks", "share", only)
    weighted = (right * output.weights).sum() / output.weights.sum().clamp(min=1e-12)
    add("weighted share of the slots that are right", "share", weighted)
    for k in range(labels.shape[1]):
        add(f"share of slot {k + 1} that is right", "share", _mean(right[:, k], valid[:, k]))
    for name, hit in _hits(logits, labels, right):
        _lengths(add, name, hit, valid)
    rates = [_mean(right[:, k], valid[:, k]) for k in range(labels.shape[1])]
    product = torch.stack(rates).cumprod(0).sum()
    add("sum of products of the slots' accuracies", "length", product)
    add("sum of products of the slots' accuracies, and the bonus token", "length", product + 1)
    return found


def _hits(logits: Tensor, labels: Tensor, right: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield "right slots", right
    for k in TOP:
        top = logits.topk(min(k, logits.shape[-1]), dim=-1).indices
        yield f"slots with the label among the top {k}", (top == labels[..., None]).any(-1)


def _lengths(add: object, name: str, hit: Tensor, valid: Tensor) -> None:
    assert callable(add)  # noqa: S101 - a function of the caller's
    ways = (
        ("", (hit & valid).cumprod(-1), False),
        (", slots without weight passed over", (hit | ~valid).cumprod(-1) * valid, False),
        (", slots without weight counted as right", (hit | ~valid).cumprod(-1), True),
        (", slots without weight counted", hit.cumprod(-1), True),
    )
    for words, run, zero in ways:
        length = run.sum(-1).double().mean()
        add(f"mean run of {name}{words}", "length", length, zero=zero)
        add(f"mean run of {name}{words}, and the bonus token", "length", length + 1, zero=zero)
    whole = valid.all(-1)
    if bool(whole.any()):
        length = hit[whole].cumprod(-1).sum(-1).double().mean()
        add(f"mean run of {name}, in whole blocks", "length", length)
        add(f"mean run of {name}, in whole blocks, and the bonus token", "length", length + 1)


def _mean(hit: Tensor, valid: Tensor) -> Tensor:
    return (hit & valid).double().sum() / valid.double().sum().clamp(min=1e-12)
