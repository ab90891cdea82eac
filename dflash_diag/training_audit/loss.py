"""Which loss a step trains: labels, weights and mixture, from its gradient alone.

Symbols: A anchors, D proposed tokens, k slot from 1, V vocabulary, N slots with a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_diag.training_audit.calling import Output
from dflash_diag.training_audit.divergences import FORWARD_KL, OTHERS, SMOOTHING, overlap
from dflash_diag.training_audit.graph import loss_gradient
from dflash_diag.training_audit.material import Material
from dflash_diag.training_audit.mixture import Mixture, Slots, recover, without_square
from dflash_diag.training_audit.properties import (
    Property,
    fact,
    fault,
    fine,
    unknown,
    untested,
)
from dflash_diag.training_audit.weighting import Weighting, as_json, weighting

OFFSETS = (0, 1, -1, 2, -2, 3, -3)
"""Shifts of the labels that are tried, likely ones first."""
HARD = 0.02
"""Share of a soft loss up to which a loss counts as hard, and of a hard one up to which as soft."""
CLEAR = 0.1
"""By how much one shift must agree with the labels better than any other."""
DEPLOYED = "cross-entropy with the target's greedy token, early slots weighted more"
RETURNED, GREEDY = "the labels that it returns", "the highest of its target logits"
NOT_IN_GRAPH = (
    "the logits that it returns are not in the graph of its loss: return the tensor that the loss "
    "is computed from (or a view of it), not detached"
)


@dataclass(frozen=True, eq=False)
class Recovered:
    """A loss that was recovered."""

    mixture: Mixture
    explained: bool
    """Whether it explains the gradient."""
    weights: Weighting
    labels: Tensor
    """[A, D] hard labels; -1 where they are not known."""
    scale: Tensor
    """[A, D] weight of each slot; 0 where it has no gradient."""
    live: Tensor
    """[A, D] bool: has a gradient."""
    offset: int | None
    """Of the labels against a+k; None where no shift stands out."""
    agreement: float
    """Share of the labels that are the text's token at that shift."""
    residual: float
    """Part of the gradient that the recovered loss, differentiated anew in float64, leaves over."""
    total: float
    """Sum of all weights: 1 where the loss is a weighted mean."""
    softness: float
    """Median distance of the draft's probabilities from the label, which the fit rests on."""


def recover_loss(output: Output, material: Material, gradient: Tensor) -> Recovered | None:
    """Recover the loss from its gradient [A, D, V]; None where no slot has one.

    Raises
    ------
    BadInput
        Never: whatever has no known form comes back as such.
    """
    v = gradient.shape[-1]
    size = gradient.norm(dim=-1)
    live = size > 1e-7 * size.max()
    if not bool(size.max() > 0):
        return None
    draft = output.logits.detach().double()
    target = _clipped(output.target_logits)
    candidates = _candidates(output, material, v)
    slots = Slots(
        gradient[live],
        draft[live],
        None if target is None else target[live],
        {name: one[live] for name, one in candidates.items()},
        float(torch.finfo(output.logits.dtype).eps),
    )
    mixture, explained = recover(slots)
    is_soft = mixture.share is None or mixture.share > 1 - HARD
    labels = candidates[GREEDY if is_soft and target is not None else mixture.labels]
    p = draft.softmax(-1)
    right = p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    assert mixture.scale is not None  # noqa: S101 - every fit has it
    scale = _spread(mixture.scale, live)
    direction = _spread(
        (slots.gradient.square().sum(-1) / mixture.scale.square().clamp(min=1e-300)), live
    )
    weights = weighting(
        scale.cpu().numpy(),
        direction.cpu().numpy(),
        right.cpu().numpy(),
        None if target is None else overlap(draft, target).cpu().numpy(),
        rounding=slots.rounding,
    )
    off = (p.square().sum(-1) - 2 * right + 1).clamp(min=0).sqrt()[live]
    offset, agreement = _offset(labels, live, material)
    found = Recovered(
        mixture=mixture,
        explained=explained,
        weights=weights,
        labels=labels,
        scale=scale,
        live=live,
        offset=offset,
        agreement=agreement,
        residual=mixture.residual,
        total=float(scale.sum()),
        softness=float(off.median()),
    )
    return _verified(found, gradient, draft, target) if explained else found


def _clipped(target: Tensor | None) -> Tensor | None:
    """Target logits in float64, tokens that are ruled out as very unlikely ones."""
    return None if target is None else target.detach().double().clamp(min=-1e30, max=1e30)


def _candidates(output: Output, material: Material, v: int) -> dict[str, Tensor]:
    """[A, D] labels that the loss may use, the likeliest first; -1 where there is no such token."""
    given = output.labels
    found = {RETURNED: torch.where((given >= 0) & (given < v), given, -1)}
    if output.target_logits is not None:
        found[GREEDY] = output.target_logits.detach().argmax(-1)
    for shift in OFFSETS:
        tokens = text_tokens(material, given.shape[1], shift)
        found[f"the text's tokens at a+k{shift:+d}"] = torch.where(tokens < v, tokens, -1)
    return found


def text_tokens(material: Material, d: int, shift: int = 0) -> Tensor:
    """[A, D] the text's token at a+k+shift; -1 beyond its end."""
    tokens = material.tokens
    anchors = torch.tensor(material.anchors, device=tokens.device)
    at = anchors[:, None] + torch.arange(1, d + 1, device=tokens.device) + shift
    inside = (at >= 0) & (at < len(tokens))
    return torch.where(inside, tokens[at.clamp(0, len(tokens) - 1)], -1)


def _spread(values: Tensor, live: Tensor) -> Tensor:
    """[N] values at the slots [A, D] that have one, 0 elsewhere."""
    return values.new_zeros(live.shape).masked_scatter(live, values)


def _offset(labels: Tensor, live: Tensor, material: Material) -> tuple[int | None, float]:
    """The shift at which most labels are the text's tokens, if it stands out."""
    shares = {}
    for shift in OFFSETS:
        tokens = text_tokens(material, labels.shape[1], shift)
        shares[shift] = float((tokens == labels)[live].double().mean())
    best = max(shares, key=shares.__getitem__)
    rest = max(share for shift, share in shares.items() if shift != best)
    return (best if shares[best] - rest > CLEAR else None), shares[best]


def _verified(
    found: Recovered, gradient: Tensor, draft: Tensor, target: Tensor | None
) -> Recovered:
    """Build the recovered loss, weights by its formula, and differentiate it in float64."""
    z = draft.clone().requires_grad_()
    live, mixture = found.live, found.mixture
    each = z.new_zeros(int(live.sum()))
    share = mixture.share
    if share is None:
        return found  # nothing is left to verify: its shares are free
    if share != 1:
        each = each + (1 - share) * torch.nn.functional.cross_entropy(
            z[live], found.labels[live].clamp(min=0), reduction="none"
        )
    for soft in (FORWARD_KL, *OTHERS, SMOOTHING):
        if soft.name == mixture.soft:
            other = z if target is None else target
            each = each + share * soft.value(z[live], other[live], mixture.temperature)
    (again,) = torch.autograd.grad((each * _weights(found)[live]).sum(), z)
    left = float((again - gradient).norm() / gradient.norm())
    return replace(found, residual=left)


def _weights(found: Recovered) -> Tensor:
    """[A, D] the formula's weights in the scale of the loss; the recovered ones where none fits."""
    model = found.weights.fitted()
    if found.weights.by_anchor or not found.weights.is_fixed or None in model:
        return found.scale
    shape = torch.tensor(model, dtype=torch.float64, device=found.scale.device)
    shape = shape.expand_as(found.scale) * found.live
    return shape * (found.scale * shape).sum() / shape.square().sum()


# --- as properties -------------------------------------------------------------------------------

LOSS_IDS = (
    "label.shift",
    "training.loss_mismatch",
    "loss.form",
    "loss.label_offset",
    "loss.lambda",
    "loss.lambda_without_T2",
    "loss.temperature",
    "loss.weights",
    "loss.gamma",
    "loss.residual",
    "labels.returned",
    "labels.greedy",
    "target.offset",
    "weights.returned",
)


def loss_properties(
    output: Output, material: Material
) -> tuple[list[Property], dict[str, Any], Recovered | None]:
    """Everything about the loss, what the plot shows of it, and the loss itself."""
    try:
        gradient = loss_gradient(output.loss, output.logits)
        why = NOT_IN_GRAPH
    except RuntimeError as error:  # such as a reentrant checkpoint in the step
        gradient, why = None, f"its loss cannot be differentiated: {' '.join(str(error).split())}"
    if gradient is None:
        return [untested(one, why) for one in LOSS_IDS], {}, None
    if not bool(gradient.isfinite().all()):
        return (
            [untested(one, "the gradient of its loss is not finite") for one in LOSS_IDS],
            {},
            None,
        )
    found = recover_loss(output, material, gradient)
    if found is None:
        return [untested(one, "no slot has a gradient") for one in LOSS_IDS], {}, None
    rows = [*_shift(found), _mismatch(found, output), *_facts(found, output)]
    rows += [*_returned(found, output), _alignment(found, output, material)]
    return rows, {"weights": as_json(found.weights)}, found


def loss_in_words(found: Recovered) -> str:
    """The recovered loss as a formula."""
    one, weights = found.mixture, found.weights.words
    if not found.explained:
        return "of no known form"
    if one.share is None:
        return f"{one.soft}; weights: {weights}"
    at = "" if one.temperature == 1 else f" at temperature {one.temperature:.3g}"
    if not one.soft or one.share <= 1e-4:
        said = "cross-entropy"
    elif one.share >= 1 - 1e-4:
        said = f"{one.soft}{at}"
    else:
        square = "" if one.temperature == 1 else "T² "
        said = f"{1 - one.share:.2f} cross-entropy + {one.share:.2f} {square}{one.soft}{at}"
    return f"{said}; weights: {weights}"


def _is_soft(found: Recovered) -> bool:
    """Whether there are no hard labels in it."""
    share = found.mixture.share
    return found.explained and (share is None or share > 1 - HARD)


def _is_hard(found: Recovered) -> bool:
    share = found.mixture.share
    return found.explained and share is not None and share <= HARD


def _shift(found: Recovered) -> Iterator[Property]:
    expected = "the token at a+k for slot k"
    if found.offset is None:
        yield unknown(
            "label.shift",
            f"the labels agree with the text at no shift better than elsewhere (at most "
            f"{found.agreement:.0%})",
            expected=expected,
        )
        return
    what = "target's highest tokens" if _is_soft(found) else "labels that the gradient shows"
    share = f"{found.agreement:.0%} of the {what} are the text's own tokens"
    if found.offset == 0:
        yield fine("label.shift", "the token at a+k", expected, f"{share} there.")
        return
    place = f"the token at a+k{found.offset:+d}"
    yield fault(
        "label.shift",
        place,
        expected,
        f"{share} there: slot k is taught {place}.",
        "Take labels at a+k for slot k, or declare the layout in which these labels are right.",
    )


def _mismatch(found: Recovered, output: Output) -> Property:
    said = loss_in_words(found)
    left = f"The gradient is explained to {found.residual:.1g}."
    why = []
    if not found.explained:
        lacking = "" if output.target_logits is not None else " (no target logits were returned)"
        left = f"The nearest known form leaves {found.residual:.1%} of the gradient{lacking}."
        why.append("it is of no known form")
    elif not _is_hard(found):
        why.append(
            "a part of it rewards the target's whole distribution, of which greedy decoding uses "
            "the highest token alone"
        )
    if found.explained and not found.weights.decays:
        why.append("late slots count as much as early ones, without which they are never accepted")
    if not why:
        return fine("training.loss_mismatch", said, DEPLOYED, left)
    reason = "; ".join(why)
    return fault(
        "training.loss_mismatch",
        said,
        DEPLOYED,
        f"{reason[:1].upper()}{reason[1:]}. {left}",
        "Train cross-entropy with the target's own tokens, weighted by exp(-(k-1)/gamma) "
        "(gamma 4, 5, 7 for blocks of 8, 10, 16) or by what is accepted; or measure that this loss "
        "gains accepted tokens.",
    )


def _facts(found: Recovered, output: Output) -> Iterator[Property]:
    weights = found.weights
    yield fact(
        "loss.form",
        loss_in_words(found),
        f"Median distance of the draft's probabilities from the labels: {found.softness:.2f}.",
    )
    if found.offset is None:
        yield unknown("loss.label_offset", "no shift stands out", expected=0)
    else:
        yield fact(
            "loss.label_offset",
            found.offset,
            f"Against a+k; {found.agreement:.0%} of them are the text's tokens there.",
            0,
        )
    yield from _shares(found, output)
    yield fact("loss.weights", list(weights.curve), f"By slot, the first being 1: {weights.words}.")
    if weights.gamma is not None:
        yield fact("loss.gamma", weights.gamma, "Of exp(-(k-1)/gamma).")
    else:
        yield unknown("loss.gamma", f"the weights are no such curve ({weights.words})")
    yield fact(
        "loss.residual",
        found.residual,
        "Part of the gradient that the recovered loss, differentiated anew in float64, leaves "
        f"over; its weights add up to {found.total:.3g}.",
    )


def _shares(found: Recovered, output: Output) -> Iterator[Property]:
    one = found.mixture
    names = ("loss.lambda", "loss.lambda_without_T2", "loss.temperature")
    if output.target_logits is None:
        alone = (
            f"; cross-entropy alone explains the gradient to {found.residual:.1g}"
            if _is_hard(found)
            else ""
        )
        why = f"without target logits no share of a soft loss can be fitted{alone}"
        yield from (unknown(name, why) for name in names)
        return
    if not found.explained or one.share is None:
        why = "the loss is no mixture of cross-entropy and one soft loss in one share"
        yield from (unknown(name, why) for name in names)
        return
    soft = one.soft or FORWARD_KL.name
    form = f"s w_k [(1-λ) CE + λ T² {soft} at T]"
    yield fact("loss.lambda", float(one.share), f"In the form {form}.", 0.0)
    yield fact(
        "loss.lambda_without_T2",
        without_square(one.share, one.temperature),
        "The same gradient without the factor T²: two ways to write one loss.",
    )
    if one.share > HARD:
        yield fact("loss.temperature", one.temperature, "T of the soft part.")
    else:
        yield unknown("loss.temperature", "the loss has no soft part")


def _returned(found: Recovered, output: Output) -> Iterator[Property]:
    """Whether the labels and weights that the step returns are those of its loss."""
    if _is_soft(found) or not found.explained:
        yield untested("labels.returned", "the gradient shows no hard labels to compare with")
    elif found.mixture.labels == RETURNED:
        yield fine("labels.returned", RETURNED, RETURNED)
    else:
        yield fault(
            "labels.returned",
            found.mixture.labels,
            RETURNED,
            "The gradient is that of other labels than those returned, so that every metric made "
            "from them is about something else.",
            "Return the labels that the loss uses.",
        )
    greedy = output.target_logits
    if greedy is not None:
        same = (greedy.detach().argmax(-1) == output.labels)[found.live].double().mean()
        yield fact(
            "labels.greedy",
            float(same),
            "Share of the labels that are the highest of the target logits: what is not, greedy "
            "decoding will not accept.",
        )
    else:
        yield untested("labels.greedy", "no target logits were returned")
    yield _weights_returned(found, output)


def _alignment(found: Recovered, output: Output, material: Material) -> Property:
    """Whether target logits are about the same tokens as the labels."""
    id_, expected = "target.offset", "target logits about the token that is the label"
    if output.target_logits is None:
        return untested(id_, "no target logits were returned", expected=expected)
    highest = output.target_logits.detach().argmax(-1)
    offset, agreement = _offset(highest, torch.ones_like(found.live), material)
    if offset is None or found.offset is None:
        why = (
            f"they agree with the text at no shift better than elsewhere (at most {agreement:.0%})"
        )
        return unknown(id_, why, expected=expected)
    share = f"{agreement:.0%} of their highest tokens are the text's own there."
    if offset == found.offset:
        return fine(id_, f"about the token at a+k{offset:+d}", expected, share)
    return fault(
        id_,
        f"about the token at a+k{offset:+d}",
        expected,
        f"{share} The labels are those at a+k{found.offset:+d}: the soft and the hard part of the "
        "loss teach different tokens.",
        "Take the target's logits one position before each label: row p says what comes at p+1.",
    )


def _weights_returned(found: Recovered, output: Output) -> Property:
    if not found.explained:
        return untested("weights.returned", "the loss is of no known form")
    ours, theirs = found.scale.cpu().numpy(), output.weights.cpu().numpy()
    live = found.live.cpu().numpy()
    expected = "weights proportional to those of the loss"
    s = (ours * theirs).sum() / max((theirs**2).sum(), 1e-300)
    off = float(np.sqrt(((ours - s * theirs) ** 2).sum() / (ours**2).sum()))
    if off <= max(0.02, 4 * float(torch.finfo(output.logits.dtype).eps)):
        return fine("weights.returned", "proportional", expected, f"They differ by {off:.1g}.")
    beyond = live & (theirs == 0)
    if bool((live == (theirs > 0)).all()) or not (found.weights.is_fixed or beyond.any()):
        words = "they say which slots count, and not how much"
        return fact("weights.returned", "a mask", f"Of the slots that have a gradient: {words}.")
    return fault(
        "weights.returned",
        f"they differ by {off:.0%}",
        expected,
        "Slots that count in the loss have no weight, or the other way round: "
        f"{int(beyond.sum())} and {int((~live & (theirs > 0)).sum())}.",
        "Return the weights that the loss uses.",
    )
