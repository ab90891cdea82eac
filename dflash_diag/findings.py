"""From readings that were tried to named causes: found, excluded, or not to be told apart.

Every cause that readings can speak about appears once, worst first, in the doctor's format. A cause
is *found* if its reading is better after correction for all readings tried; *excluded* if the
interval of every gain ends below 0.05 tokens a round; else *not identifiable*, with the number of
prompts that would settle it or the reason why none would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_diag.alignment import CONTEXT, LEVEL, Alignment, Round, Tried
from dflash_diag.causes import CAUSES, HARMLESS, entry
from dflash_diag.conventions import Convention
from dflash_diag.readings import Alternative
from dflash_diag.stats import Estimate, prompts_needed, smallest_p

CAUSES_OF_READINGS = (
    "layers.offset",
    "layers.order",
    "layers.missing_or_default",
    "layers.last_layer_norm",
    "mask.anchor_included",
    "mask.cross_block_leak",
    "mask.block_causality",
    "mask.window",
    "position.block_offset",
    "position.rebased",
    "label.shift",
    "rope.theta",
    "rope.rotary_width",
    "rope.interleaving",
    "rope.scaling",
    "mask_token.id",
    "embedding.scale",
    "head.tying_or_vocab",
    "norm.missing_or_doubled",
    "block.width",
    CONTEXT,
    "checkpoint.wrong_target",
)
"""Causes on which trying other readings can decide."""
IGNORES = 0.1
"""Share of its slot accuracy that a drafter which ignores the context may lose to other states."""
HOPELESS = 1.15
"""Tokens a round: below this under every reading, a drafter is as good as none (1 is the bonus)."""
UNLIKE = (
    "So the weights read this target: the texts are unlike those of training, or it is a near "
    "relative of its target. Texts of training tell (--training-sequences)."
)
_NOTHING_TO_TRY = {
    "layers.missing_or_default": "no default rule picks other layers of the same number",
    "mask.window": "no window is declared, and the files name none that a text here exceeds",
    "rope.scaling": "no scaling is declared",
    "mask_token.id": "no other candidate for a mask token is known",
    "head.tying_or_vocab": "the checkpoint brings no head and no vocabulary of its own",
    "position.rebased": "each text here starts at position 0 and is one document",
}


def findings(found: Alignment) -> list[dict[str, Any]]:
    """One entry a cause, worst first: found ones by delta, then the undecided, then the rest."""
    if found.applied and (found.rounds[-1].tau.value or 0) < HOPELESS:
        # What a broken drafter gains under another reading says nothing about its training.
        found = replace(found, rounds=found.rounds[:1], applied=[], alone=[])
    rows = [_named(found, at) for at in range(len(found.applied))]
    named = {row["cause"] for row in rows}
    if CONTEXT not in named and (row := _ignored(found)) is not None:
        rows.append(row)
        named.add(CONTEXT)
    if not named and _hopeless(found) and not _reads(found):
        rows.append(_wrong_target(found))
        named.add("checkpoint.wrong_target")
    rows.sort(key=lambda row: -(row["delta"]["value"] or 0.0))
    rest = [_open(found, cause) for cause in CAUSES_OF_READINGS if cause not in named]
    order = ("not_identifiable", "not_tested", "excluded")
    rest.sort(key=lambda row: order.index(row["status"]))
    return rows + rest


def alignment_json(found: Alignment) -> dict[str, Any]:
    """Rounds, pairs and findings as plain values."""
    return {
        "n_prompts": found.n_prompts,
        "declared": found.rounds[0].base.to_json(),
        "rounds": [one.to_json() for one in found.rounds],
        "pairs": found.pairs.to_json() if found.pairs else None,
        "shuffled": found.shuffled.to_json() if found.shuffled else None,
        "findings": findings(found),
    }


def servable(how: Convention) -> bool:
    """Whether a server could follow a reading: it asks for nothing that comes later."""
    return how.context_bound == "strict" and how.other_blocks == "hidden" and how.label_offset == 0


def _named(found: Alignment, at: int) -> dict[str, Any]:
    """The cause that the round after ``at`` stands on."""
    one, before, after = found.applied[at], found.rounds[at], found.rounds[at + 1]
    tried = _find(before, one) or (_find(found.pairs, one) if found.pairs else None)
    gain, delta, tau = _effect(before, after, tried)
    about = CAUSES[one.cause]
    kind, recoverable = about.kind, about.recoverable
    follows = servable(after.base) and one.states is None
    if about.kind == "training_fault" and follows:
        kind, recoverable = "reading_fault", True  # the declared reading was the unservable one
    aliases = _aliases(before, after, one)
    text = (
        f"Read with {one.name}: slot accuracy {gain}"
        + (
            f", p = {tried.adjusted:.2g} after Holm over {len(before.tried)} readings"
            if tried
            else ""
        )
        + f"; {_tau_words(tau, delta)}."
    )
    if at:
        text += f" Seen on top of {', '.join(before.settings)}."
        tau, delta = found.alone[at].tau, found.alone[at].delta
    if aliases:
        text += f" On top of it these gain no more: {', '.join(a for a in aliases)}."
    return entry(
        one.cause,
        "found",
        text,
        kind=kind,
        recoverable=recoverable,
        settings=list(one.settings),
        tau_own_reading=tau.to_json(),
        delta=delta.to_json(),
        aliases=aliases,
    )


def _effect(before: Round, after: Round, tried: Tried | None) -> tuple[str, Estimate, Estimate]:
    if tried is not None:
        return _points(tried.gain), tried.delta, tried.tau
    # A permutation that was reached by several exchanges was not tried as one reading.
    from dflash_diag.stats import differences

    (delta,) = differences({0: (after.hits.tau, before.hits.tau)}, seed=0).values()
    own, other = (np.mean([r.mean() for r in one.hits.right]) for one in (after, before))
    return f"{100 * (own - other):+.1f} points", delta, after.tau


def _find(made: Round, one: Alternative) -> Tried | None:
    return next((t for t in made.tried if t.alternative == one), None)


def _aliases(before: Round, after: Round, one: Alternative) -> list[str]:
    """Other causes whose readings gained before, and gain no more."""
    still = {t.alternative.cause for t in after.tried if t.found}
    found = [t.alternative for t in before.tried if _gained(t) and t.alternative.cause != one.cause]
    return list(dict.fromkeys(a.cause for a in found if a.cause not in still))


def _gained(one: Tried) -> bool:
    """Found, or dropped by the screen only because another reading gained more."""
    return one.found or (not one.hits.complete and (one.gain.lo or 0) > 0)


def _open(found: Alignment, cause: str) -> dict[str, Any]:
    """A cause that was not found: by the last round, on top of what was."""
    tried = _of_cause(found, cause)
    if cause == CONTEXT:
        return (
            entry(cause, "excluded", _shuffled_words(found))
            if found.shuffled
            else entry(cause, "not_tested", "not asked for")
        )
    if cause == "checkpoint.wrong_target":
        certain = max(_lows(found), default=0.0)
        text = f"Some reading is accepted {_best(found):.2f} tokens a round"
        if certain < HOPELESS and _reads(found):
            text += f", and its own states count. {_shuffled_words(found)} {UNLIKE}"
            return entry(cause, "not_identifiable", text)
        if certain >= HOPELESS:
            return entry(cause, "excluded", f"{text}, certainly {certain:.2f}.")
        text += f", but none certainly {HOPELESS}: a drafter of this target, or luck."
        return entry(cause, "not_identifiable", text)
    if not tried:
        reason = next((u.reason for u in found.untested if u.cause == cause), None)
        return entry(cause, "not_tested", reason or _NOTHING_TO_TRY.get(cause, "not asked for"))
    if all(one.equal for one in tried):
        names = "; ".join(one.alternative.name for one in tried[:3])
        more = f" and {len(tried) - 3} more" if len(tried) > 3 else ""
        text = f"{names}{more}: the same proposals, so that these texts cannot tell."
        return entry(cause, "not_identifiable", text)
    undecided = [one for one in tried if not one.excluded and not one.equal]
    shown = max(
        undecided or [one for one in tried if not one.equal],
        key=lambda one: one.delta.hi if one.delta.hi is not None else np.inf,
    )
    fields: dict[str, Any] = {"settings": list(shown.alternative.settings)}
    if shown.hits.complete:
        fields["tau_own_reading"] = shown.tau.to_json()
        fields["delta"] = shown.delta.to_json()
    text = f"Best of {len(tried)}: {shown.alternative.name}, {_tau_words(shown.tau, shown.delta)}"
    text += "" if shown.hits.complete else " (on some anchors of every prompt)"
    if shown.found:
        text += (
            f"; but no reading is accepted more than {_best(found):.2f}, so this restores nothing"
        )
        return entry(cause, "not_identifiable", f"{text}.", **fields)
    if not undecided:
        return entry(cause, "excluded", f"{text}.", **fields)
    return entry(cause, "not_identifiable", f"{text}; {_more(shown, found)}.", **fields)


def _of_cause(found: Alignment, cause: str) -> list[Tried]:
    rounds: Sequence[Round | None] = (found.rounds[-1], found.pairs)
    return [t for r in rounds if r is not None for t in r.tried if t.alternative.cause == cause]


def _more(one: Tried, found: Alignment) -> str:
    """How many prompts would settle a reading that is neither better nor excluded."""
    comparisons = len(found.rounds[-1].tried)
    if smallest_p(found.n_prompts) / 2 * comparisons >= LEVEL:
        return (
            f"with {found.n_prompts} prompts no reading among {comparisons} can be told from "
            "chance; 24 or more can"
        )
    # What gains is found by slot accuracy, what does not is excluded by tau.
    gains = (one.gain.value or 0) > 0
    needed = (
        prompts_needed(one.gain, 0.0, comparisons=comparisons)
        if gains
        else prompts_needed(one.delta, HARMLESS)
    )
    if needed is None:
        return "its gain has no spread to plan by"
    return f"about {max(needed, found.n_prompts + 1)} prompts would settle it"


def _ignored(found: Alignment) -> dict[str, Any] | None:
    """The context does not matter, if another prompt's states do as well as the prompt's own."""
    one = found.shuffled
    if one is None or one.gain.lo is None:
        return None
    own = float(np.mean([right.mean() for right in found.rounds[-1].hits.right]))
    if -one.gain.lo >= IGNORES * own:
        return None
    return entry(
        CONTEXT,
        "found",
        _shuffled_words(found),
        tau_own_reading=one.tau.to_json(),
        delta=one.delta.to_json(),
    )


def _shuffled_words(found: Alignment) -> str:
    one = found.shuffled
    if one is None:
        return ""
    return (
        "With another prompt's states in place of the context, slot accuracy changes by "
        f"{_points(one.gain)} and {_tau_words(one.tau, one.delta)}."
    )


def _best(found: Alignment) -> float:
    rounds = [r for r in (*found.rounds, found.pairs) if r is not None]
    return max(
        value
        for r in rounds
        for value in (r.tau.value, *(t.tau.value for t in r.tried if t.hits.complete))
        if value is not None
    )


def _lows(found: Alignment) -> list[float]:
    """Lower ends of tau, of the declared reading and of those that are certainly better."""
    rounds = [one.tau for one in found.rounds]
    return [tau.lo for tau in rounds if tau.lo is not None]


def _hopeless(found: Alignment) -> bool:
    declared = found.rounds[0].tau
    return declared.hi is not None and declared.hi < HOPELESS and _best(found) < HOPELESS


def _reads(found: Alignment) -> bool:
    """Whether another prompt's states certainly cost a drafter a share of what it gets right.

    One of another target finds nothing in either.
    """
    one = found.shuffled
    if one is None or one.gain.hi is None:
        return False
    own = float(np.mean([right.mean() for right in found.rounds[-1].hits.right]))
    return -one.gain.hi > IGNORES * own


def _wrong_target(found: Alignment) -> dict[str, Any]:
    declared = found.rounds[0].tau
    return entry(
        "checkpoint.wrong_target",
        "found",
        f"No reading is accepted more than {_best(found):.2f} tokens a round (1 is the bonus): a "
        "drafter of another target, or one that has hardly been trained.",
        tau_own_reading=declared.to_json(),
        delta=Estimate(0.0, 0.0, 0.0).to_json(),
    )


def _points(one: Estimate) -> str:
    """A difference of shares in percentage points."""
    if one.value is None:
        return "unknown"
    if one.lo is None or one.hi is None:
        return f"{100 * one.value:+.1f} points"
    return f"{100 * one.value:+.1f} [{100 * one.lo:+.1f}, {100 * one.hi:+.1f}] points"


def _tau_words(tau: Estimate, delta: Estimate) -> str:
    if tau.value is None or delta.value is None:
        return "tau unknown"
    interval = "" if delta.lo is None else f" [{delta.lo:+.2f}, {delta.hi:+.2f}]"
    return f"tau {tau.value:.2f} ({delta.value:+.2f}{interval})"
