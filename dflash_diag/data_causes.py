"""Whether the kind of text, or the chat template, explains an acceptance: two causes of the doctor.

Both are explanations: they say why two numbers differ, not that a drafter is at fault. They are
*found* where sets of prompts certainly differ in walked tau, corrected for the number of sets, and
then name the sets; *excluded* where every difference is certainly below 0.05 tokens a round. How
much of a difference the target's own entropy accounts for is part of the evidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_diag.causes import HARMLESS, entry
from dflash_diag.composition import ENOUGH, Split, split
from dflash_diag.stats import LEVEL, Estimate, Floats, bca_apart, prompts_needed
from dflash_diag.strata import Blocks, excludes_zero, forms_of, kinds_of

DOMAIN, TEMPLATE = "data.domain", "data.template"

Named = tuple[str, Blocks]


class Contrast(NamedTuple):
    """Tau of two sets of prompts, each resampled on its own."""

    a: str
    b: str
    n_a: int
    n_b: int
    tau_a: Estimate
    tau_b: Estimate
    difference: Estimate
    """a less b."""
    certain: bool
    """Whether the sets differ after correction for all contrasts that were looked at."""
    split: Split
    """How much of it the target's entropy accounts for."""

    @property
    def nothing(self) -> bool:
        """Whether the difference is certainly next to nothing."""
        lo, hi = self.difference.lo, self.difference.hi
        return lo is not None and hi is not None and max(-lo, hi) < HARMLESS

    def sentence(self) -> str:
        """The two numbers, in words."""
        where = "" if self.split.number == "tau_walked" else " (all anchors)"
        return (
            f"{self.a} gets {self.tau_a} a round ({self.n_a} prompts), {self.b} {self.tau_b} "
            f"({self.n_b} prompts){where}. {self.split.sentence()}"
        )


def contrast(a: Named, b: Named, *, comparisons: int = 1, seed: int, draws: int) -> Contrast:
    """Compare two sets by walked tau, or by uniform tau where one of them has no walk.

    ``comparisons`` is the number of contrasts that are looked at together.
    """
    walk = all(one.visited.any() for _, one in (a, b))
    number = "tau_walked" if walk else "tau_uniform"
    sums = [one.sums()[number] for _, one in (a, b)]
    sizes = [len(one.numerators) for one in sums]

    def statistic(weights: Sequence[Floats]) -> Floats:
        first, second = (
            (side @ one.numerators) / (side @ one.denominators)
            for side, one in zip(weights, sums, strict=True)
        )
        return np.stack([first, second, first - second], axis=1)

    def measured(level: float) -> list[Estimate]:
        found = bca_apart(statistic, sizes, seed=seed, draws=draws, level=level)
        counts = (*sizes, sum(sizes))
        return [Estimate(*one, n, "tokens") for one, n in zip(found, counts, strict=True)]

    tau_a, tau_b, difference = measured(LEVEL)
    return Contrast(
        a=a[0],
        b=b[0],
        n_a=sizes[0],
        n_b=sizes[1],
        tau_a=tau_a,
        tau_b=tau_b,
        difference=difference,
        certain=excludes_zero(measured(1 - (1 - LEVEL) / comparisons)[2]),
        split=split(a, b, number, seed=seed, draws=draws),
    )


def sets_by(blocks: Blocks, labels: Sequence[str]) -> list[tuple[Named, Named]]:
    """Pairs of sets of prompts to compare: each label against all others; two make one pair."""
    names = list(dict.fromkeys(labels))
    pairs = []
    for name in names[:1] if len(names) == 2 else names:
        inside = [i for i, label in enumerate(labels) if label == name]
        outside = [i for i, label in enumerate(labels) if label != name]
        rest = names[1] if len(names) == 2 else "all other prompts"
        pairs.append(((name, blocks.of_prompts(inside)), (rest, blocks.of_prompts(outside))))
    return pairs


def findings(
    blocks: Blocks, *, beside: Named | None = None, seed: int, draws: int
) -> list[dict[str, Any]]:
    """What `DOMAIN` and `TEMPLATE` are: one entry each, in the doctor's format.

    Parameters
    ----------
    beside
        Another set of texts, under its name, that the prompts are compared with too: those of
        training, for instance.
    """
    kinds, forms = kinds_of(blocks.texts), forms_of(blocks.texts)
    domains = kinds if isinstance(kinds, str) else sets_by(blocks, kinds[0])
    if beside is not None:
        domains = [*([] if isinstance(domains, str) else domains), (beside, ("prompts", blocks))]
    templates = forms if isinstance(forms, str) else sets_by(blocks, forms)
    return [_entry(DOMAIN, domains, seed, draws), _entry(TEMPLATE, templates, seed, draws)]


def _entry(
    cause: str, given: Sequence[tuple[Named, Named]] | str, seed: int, draws: int
) -> dict[str, Any]:
    if isinstance(given, str):
        return entry(cause, "not_tested", f"Not tested: {given}.")
    pairs = [pair for pair in given if min(len(one.texts) for _, one in pair) >= ENOUGH]
    if not pairs:
        sizes = ", ".join(f"{a[0]} {len(a[1].texts)}, {b[0]} {len(b[1].texts)}" for a, b in given)
        text = f"Not tested: sets of {ENOUGH} or more prompts are needed ({sizes})."
        return entry(cause, "not_tested", text)
    made = [contrast(*pair, comparisons=len(pairs), seed=seed, draws=draws) for pair in pairs]
    made.sort(key=lambda one: -abs(one.difference.value or 0.0))
    certain = [one for one in made if one.certain]
    if certain:
        text = f"{certain[0].sentence()} This explains numbers, and is no fault."
        return entry(cause, "found", text)
    first = made[0]
    if all(one.nothing for one in made):
        return entry(cause, "excluded", first.sentence())
    needed = prompts_needed(first.difference, 0.0, comparisons=len(made))
    more = max(needed or 0, first.n_a + first.n_b + 1)
    settled = "" if needed is None else f" About {more} prompts would settle it."
    return entry(cause, "not_identifiable", first.sentence() + settled)
