"""Drafters side by side: who is better, at which slots, on which prompts, and what else differs.

Everything comes from the rounds of decoding (accepted + 1 of each, by prompt), which a finished run
keeps in its summary: neither weights nor captures are needed to compare what was scored.

Symbols: N prompts, M drafters, D proposed tokens, k a slot 1..D.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_diag import stats
from dflash_diag.compare import MARGIN, Pair, Side, common_prompts, pairs, shared
from dflash_diag.stats import DRAWS, Floats, Ratio, few_prompts_note, ratio

SCHEMA = "dflash_diag.compare/1"


@dataclass(frozen=True, eq=False)
class Member:
    """One drafter of a comparison."""

    side: Side
    jumps: Mapping[str, Sequence[int]]
    """Accepted + 1 of each of its rounds, by prompt."""
    n_proposed: int
    """D."""
    facts: Mapping[str, str]
    """Under what it was measured: versions, precision, backend, reading."""
    line: str = ""
    """The training that its step belongs to."""
    is_reference: bool = False
    weights: str = ""
    """Hash of the checkpoint's files."""
    folder: str = ""
    """The run that it was read from, if it is not of this one."""

    def digest(self) -> list[Any]:
        """What a comparison with it depends on, as JSON."""
        side = self.side
        rounds = [[one, list(self.jumps[one])] for one in side.ids]
        facts = [dict(self.facts), self.line, self.is_reference]
        return [side.name, side.step, side.capture, self.n_proposed, rounds, *facts]


def compared(
    members: Sequence[Member],
    *,
    seed: int,
    draws: int = DRAWS,
    beside: Sequence[Member] = (),
) -> dict[str, Any]:
    """What ``compare --json`` writes, but for the trend.

    Parameters
    ----------
    members
        M drafters under different names; the first is the one that is asked about.
    beside
        Others that are shown on the same axes and take part in no pair.

    Raises
    ------
    BadInput
        Fewer than two, or two that were scored on different text.
    """
    made = pairs([one.side for one in members], seed=seed, draws=draws)
    shown = [*members, *beside]
    ids = shared(one.side for one in shown)
    first, others = members[0], members[1:]
    ours = made[: len(others)]  # combinations begin with those of the first
    return {
        "schema": SCHEMA,
        "margin": MARGIN,
        "differs": differing(shown),
        "drafters": [_drafter(one, ids, seed=seed, draws=draws) for one in shown],
        "pairs": [one.to_json() for one in made],
        "slots": [row for other in others for row in slots(first, other, seed=seed, draws=draws)],
        "prompts": [
            prompts(first.side, other.side, one) for other, one in zip(others, ours, strict=True)
        ],
        "notes": _notes(shown, ids, min(one.n_prompts for one in made)),
    }


def _drafter(member: Member, ids: Sequence[str], *, seed: int, draws: int) -> dict[str, Any]:
    side = member.side
    tau = stats.estimates({"tau": side.at(ids or side.ids)}, seed=seed, draws=draws)["tau"]
    return {
        "name": side.name,
        "step": side.step,
        "reference": member.is_reference,
        "n_proposed": member.n_proposed,
        "tau": tau.to_json(),
        "n_prompts": tau.n,
        "n_scored": len(side.ids),
    }


def differing(members: Sequence[Member]) -> list[dict[str, Any]]:
    """Facts that are not the same for all: what, and its value by drafter (None: unknown)."""
    keys = dict.fromkeys(key for one in members for key in one.facts)
    rows = []
    for key in keys:
        values = {one.side.name: one.facts.get(key) for one in members}
        if len(set(values.values())) > 1:
            rows.append({"what": key, "values": values})
    return rows


def slots(a: Member, b: Member, *, seed: int, draws: int = DRAWS) -> list[dict[str, Any]]:
    """Differences of survival and of conditional rates, slot by slot, over walked rounds.

    Slots that only one of them has are left out. P-values are those of sign flips of per-prompt
    conditional rates, after Holm over the slots of this pair.
    """
    ids = common_prompts(a.side, b.side)
    last = min(a.n_proposed, b.n_proposed)
    left, right = ([_reached(one.jumps[i], last) for i in ids] for one in (a, b))
    before, after = np.array(left), np.array(right)  # [N, 1 + last]
    both: dict[tuple[str, int], tuple[Ratio, Ratio]] = {}
    for k in range(1, last + 1):
        for kind, since in (("survival", 0), ("conditional", k - 1)):
            both[kind, k] = _share(before, k, since), _share(after, k, since)
    found = stats.differences(both, seed=seed, draws=draws)
    p = stats.holm([_sign_flip(*both["conditional", k], seed, draws) for k in range(1, last + 1)])
    rows = []
    for k in range(1, last + 1):
        row: dict[str, Any] = {"a": a.side.name, "b": b.side.name, "k": k}
        for kind in ("survival", "conditional"):
            x, y = both[kind, k]
            row[f"{kind}_a"], row[f"{kind}_b"] = _value(x), _value(y)
            row[f"{kind}_delta"] = found[kind, k].to_json()
        row["n_before"] = [int(one[:, k - 1].sum()) for one in (before, after)]
        rows.append(row | {"p_adjusted": p[k - 1]})
    return rows


def _reached(jumps: Sequence[int], last: int) -> list[int]:
    """Rounds of one prompt whose first k proposals were accepted, for k = 0..last."""
    accepted = np.asarray(jumps) - 1
    return [int((accepted >= k).sum()) for k in range(last + 1)]


def _share(counts: Any, k: int, since: int) -> Ratio:
    return ratio(counts[:, k], counts[:, since], "share")


def _value(one: Ratio) -> float | None:
    total = one.denominators.sum()
    return float(one.numerators.sum() / total) if total else None


def _sign_flip(a: Ratio, b: Ratio, seed: int, draws: int) -> float:
    """P-value of per-prompt differences, of the prompts that got so far on both sides."""
    apart: Floats = a.per_prompt() - b.per_prompt()
    apart = apart[~np.isnan(apart)]
    return stats.sign_flip(apart, seed=seed, draws=draws) if len(apart) else 1.0


def prompts(a: Side, b: Side, pair: Pair) -> dict[str, Any]:
    """Both taus of each prompt, how many prompts each wins, and on how many the lead hangs."""
    ids = sorted(pair.delta, key=lambda one: -pair.delta[one])
    left, right = a.at(ids), b.at(ids)
    return {
        "a": a.name,
        "b": b.name,
        "n_better": sum(pair.delta[one] > 0 for one in ids),
        "n_worse": sum(pair.delta[one] < 0 for one in ids),
        "n_hangs": hangs_on(left, right),
        "rows": [
            {"id": one, "tau_a": x, "tau_b": y, "delta": pair.delta[one]}
            for one, x, y in zip(
                ids, left.per_prompt().tolist(), right.per_prompt().tolist(), strict=True
            )
        ],
    }


def hangs_on(a: Ratio, b: Ratio) -> int | None:
    """Number of prompts without which the sign of the pooled difference is gone.

    The prompt that carries most of what is left is taken out, again and again, which is all but the
    smallest such number. 0 where there is no
    difference; None where it has the same sign to the last prompt.
    """
    sums = np.stack([a.numerators, a.denominators, b.numerators, b.denominators])  # [4, N]
    sign = np.sign(_pooled(sums.sum(axis=1)))
    if sign == 0:
        return 0
    for count in range(1, sums.shape[1]):
        without = _pooled(sums.sum(axis=1, keepdims=True) - sums)
        worst = int(np.argmin(sign * without))
        if sign * without[worst] <= 0:
            return count
        sums = np.delete(sums, worst, axis=1)
    return None


def _pooled(sums: Any) -> Any:
    """Difference of two ratios of sums [4, ...]."""
    return sums[0] / sums[1] - sums[2] / sums[3]


def _notes(members: Sequence[Member], ids: Sequence[str], n_least: int) -> list[str]:
    notes = [few_prompts_note(n_least)]
    widths = {one.n_proposed for one in members}
    if len(widths) > 1:
        listed = ", ".join(f"{one.side.name} {one.n_proposed}" for one in members)
        notes.append(
            f"Proposed tokens a round: {listed}. A walk ends with the last whole block, so that a "
            "prompt's rounds do not all end at the same token."
        )
    more = [one.side.name for one in members if len(one.side.ids) > len(ids)]
    if more and ids:
        notes.append(f"Taus are over the {len(ids)} prompts that all have.")
    return [note for note in notes if note]
