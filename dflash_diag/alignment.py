"""Find the convention that weights were trained for, and what the declared one costs.

Method. Every other reading of the weights (`readings.alternatives`) is scored on the same anchors
as the declared one, each slot against the label that the reading itself assigns.

1. A screen over some anchors of every prompt drops the readings that are clearly worse: slot
   accuracy below the declared one's by more than two standard errors, and a gain in tau whose
   interval ends below `HARMLESS`. Where one reading is clearly better, it also drops those that are
   clearly behind that one: they are aliases at most, and are tried again on top of it.
2. The others are scored on every anchor. Whether one is better is decided by one statistic, slot
   accuracy by prompt over uniform anchors, with sign-flip tests and Holm's correction over *all*
   readings tried; how much better is walked tau, paired by prompt.
3. The best one is applied and the rest are tried again on top of it. What gained before and gains
   no more was an alias of it; what now gains `HARMLESS` at least is a second cause.
4. What zeros in place of the target's states do is tried like a reading: weights that never learned
   to read the context may do better without it.
5. Where nothing gains, pairs of fields that stacks get wrong together are tried.

Slot accuracy is the statistic because it uses every slot of every anchor: on the embedded example a
layer offset of one is seen with 24 to 50 prompts, for which walked tau would need hundreds.

Symbols: N prompts, D proposed tokens, a anchor, k slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dflash_diag.bundle import Capture
from dflash_diag.causes import HARMLESS
from dflash_diag.checkpoints import Checkpoint
from dflash_diag.checkpoints.keys import default_layer_ids
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.readings import (
    Alternative,
    Surroundings,
    Untested,
    alternatives,
    beyond,
    coupled,
    numbers_in,
)
from dflash_diag.stats import (
    Estimate,
    differences,
    estimates,
    holm,
    sign_flip,
)
from dflash_diag.sweeps import Hits, States, Sweep, accuracies

LEVEL = 0.05
"""Chance of naming any cause where there is none, over all readings tried."""
SCREENED = 10
"""Anchors a prompt on which a reading is tried first."""
ALWAYS_WHOLE = frozenset({"position.block_offset"})
"""Causes whose readings are scored on every anchor, because their curve is shown."""
FURTHEST = 16
"""Steps that are taken on from a reading that was found."""
SECOND_LOOKS = 3
"""Causes that are looked for on top of one another."""
CONTEXT = "hidden.ignored_by_drafter"
NO_CONTEXT = Alternative(CONTEXT, (), "zero")


@dataclass(frozen=True, eq=False)
class Tried:
    """One reading beside the one that it was tried against."""

    alternative: Alternative
    hits: Hits
    gain: Estimate
    """Slot accuracy less the other's, mean over prompts; share of slots."""
    p: float
    """One-sided sign-flip; 1 where the screen dropped the reading."""
    tau: Estimate
    """Its own tau: walked, or over the screen's anchors."""
    delta: Estimate
    """Paired difference of that tau."""
    equal: bool
    """Whether every proposal is right or wrong in the same places."""
    adjusted: float = 1.0
    """`p` after Holm's correction."""

    @property
    def found(self) -> bool:
        """Better by the statistic, and not worse in tau."""
        worse = self.delta.hi is not None and self.delta.hi < 0
        return self.adjusted < LEVEL and (self.gain.value or 0) > 0 and not worse

    @property
    def excluded(self) -> bool:
        """Whether its gain in tau is certainly negligible."""
        return not self.found and self.delta.hi is not None and self.delta.hi < HARMLESS

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.alternative.cause,
            "settings": list(self.alternative.settings),
            "whole": self.hits.complete,
            "equal": self.equal,
            "gain": self.gain.to_json(),
            "p": self.p,
            "p_adjusted": self.adjusted,
            "tau": self.tau.to_json(),
            "delta": self.delta.to_json(),
            "found": self.found,
            "excluded": self.excluded,
        }


@dataclass(eq=False)
class Round:
    """All readings tried against one base."""

    base: Convention
    states: States
    settings: tuple[str, ...]
    """What the base changes of the declared reading."""
    hits: Hits
    tau: Estimate
    tried: list[Tried] = field(default_factory=list)

    @property
    def best(self) -> Tried | None:
        """The found reading with the largest gain in tau; on top of others, if it is `HARMLESS`.

        Of several of its cause that gain as much, to within `HARMLESS`, the first: a norm once
        rather than twice.
        """
        least = HARMLESS if self.settings or self.states != "own" else -np.inf
        found = [one for one in self.tried if one.found and (one.delta.value or 0) >= least]
        if not found:
            return None
        top = max(found, key=lambda one: (one.delta.value or 0, one.gain.value or 0))
        close = (top.delta.value or 0) - HARMLESS
        same = [one for one in found if one.alternative.cause == top.alternative.cause]
        return next(one for one in same if (one.delta.value or 0) >= close)

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": list(self.settings),
            "tau": self.tau.to_json(),
            "accuracy": float(np.mean([right.mean() for right in self.hits.right])),
            "tried": [one.to_json() for one in self.tried],
        }


class Aligner:
    """The procedure over one `Sweep`.

    Parameters
    ----------
    seed, draws
        Of the bootstrap and the sign flips.
    """

    def __init__(self, sweep: Sweep, around: Surroundings, *, seed: int, draws: int) -> None:
        self.sweep, self.around, self.seed, self.draws = sweep, around, seed, draws
        self.declared = sweep.drafter.convention
        self.n_prompts = len(sweep.rows)

    def round(
        self,
        base: Convention,
        settings: tuple[str, ...],
        tries: Sequence[Alternative],
        states: States = "own",
    ) -> Round:
        """Screen some readings against a base, and score those that could be better."""

        def score(one: Alternative, anchors: int | None = None) -> Hits:
            how = base.override(one.settings)
            return self.sweep.hits(how, anchors=anchors, states=one.states or states)

        hits = self.sweep.hits(base, states=states)
        made = Round(base, states, settings, hits, self._tau({"base": hits})["base"])
        screen = self.sweep.hits(base, anchors=SCREENED, states=states)
        whole_anyway = frozenset() if settings else ALWAYS_WHOLE
        screened = {one: score(one, SCREENED) for one in tries if one.cause not in whole_anyway}
        worse = self._clearly_worse(screened, screen)
        worse |= self._clearly_behind(screened, screen)
        dropped = {one: screened[one] for one in worse}
        kept = [one for one in tries if one not in worse]
        whole = {one: score(one) for one in kept}
        tried = self._compared(dropped, screen, tested=False)
        tried += self._compared(whole, hits, tested=True)
        order = {one: at for at, one in enumerate(tries)}
        tried.sort(key=lambda one: order[one.alternative])
        adjusted = holm([one.p for one in tried])
        made.tried = [replace(one, adjusted=p) for one, p in zip(tried, adjusted, strict=True)]
        return made

    def _clearly_worse(
        self, screened: Mapping[Alternative, Hits], screen: Hits
    ) -> set[Alternative]:
        worse = set()
        for one, delta in self._deltas(screened, screen).items():
            own, other = accuracies(screened[one], screen)
            if _clearly_positive(other - own) and delta.hi is not None and delta.hi < HARMLESS:
                worse.add(one)
        return worse

    def _clearly_behind(
        self, screened: Mapping[Alternative, Hits], screen: Hits
    ) -> set[Alternative]:
        """Readings that lose to one that is itself clearly better than the base."""
        gains = {one: np.subtract(*accuracies(hits, screen)) for one, hits in screened.items()}
        best = max(gains, key=lambda one: float(gains[one].mean()), default=None)
        if best is None or not _clearly_positive(gains[best]):
            return set()
        return {one for one in gains if _clearly_positive(gains[best] - gains[one])}

    def _compared(
        self, found: Mapping[Alternative, Hits], base: Hits, *, tested: bool
    ) -> list[Tried]:
        taus, deltas = self._tau(found), self._deltas(found, base)
        rows = []
        for one, hits in found.items():
            own, other = accuracies(hits, base)
            gain = own - other
            equal = all(np.array_equal(a, b) for a, b in zip(hits.right, base.right, strict=True))
            p = sign_flip(gain, seed=self.seed, draws=self.draws, alternative="greater")
            rows.append(
                Tried(
                    one,
                    hits,
                    _mean(gain),
                    p if tested and not equal else 1.0,
                    taus[one],
                    deltas[one],
                    equal,
                )
            )
        return rows

    def _tau(self, found: Mapping[Any, Hits]) -> dict[Any, Estimate]:
        ratios = {key: hits.tau for key, hits in found.items()}
        return estimates(ratios, seed=self.seed, draws=self.draws)

    def _deltas(self, found: Mapping[Alternative, Hits], base: Hits) -> dict[Alternative, Estimate]:
        pairs = {one: (hits.tau, base.tau) for one, hits in found.items()}
        return differences(pairs, seed=self.seed, draws=self.draws)

    def climb(self, base: Convention, first: Alternative) -> Alternative:
        """Go on from a reading while that helps.

        Any permutation is some exchanges, and a shift may be larger than those tried at first.
        """
        best = first
        current = self.sweep.hits(base.override(best.settings), anchors=SCREENED)
        for _ in range(FURTHEST):
            tries = beyond(base, best, self.around)
            hits = [self.sweep.hits(base.override(t.settings), anchors=SCREENED) for t in tries]
            gains = [float(np.mean(np.subtract(*accuracies(h, current)))) for h in hits]
            if not gains or max(gains) <= 0:
                break
            at = int(np.argmax(gains))
            best, current = tries[at], hits[at]
        return best

    def alone(self, base: Round, one: Alternative) -> Tried:
        """One reading on every anchor against a base, whatever a screen said of it."""
        hits = self.sweep.hits(base.base.override(one.settings), states=one.states or base.states)
        (found,) = self._compared({one: hits}, base.hits, tested=True)
        return found

    def without_context(self, base: Round) -> Tried:
        """What another prompt's states in the context's place do to a base."""
        other = Alternative(CONTEXT, (), "other")
        hits = self.sweep.hits(base.base, states="other")
        (found,) = self._compared({other: hits}, base.hits, tested=True)
        return found


def _clearly_positive(differences_by_prompt: Any) -> bool:
    """Whether a mean over prompts is above 0 by more than two standard errors."""
    one = _mean(differences_by_prompt)
    return one.lo is not None and one.lo > 0


def _mean(values: Any) -> Estimate:
    """Mean over prompts with a normal 95 % interval: a description, not the test."""
    n = len(values)
    value = float(values.mean())
    if n < 2:
        return Estimate(value, n=n)
    half = 1.96 * float(values.std(ddof=1)) / n**0.5
    return Estimate(value, value - half, value + half, n)


@dataclass(frozen=True, eq=False)
class Alignment:
    """What trying every reading found."""

    rounds: list[Round]
    """The declared reading's round first, then each on top of the best reading so far."""
    applied: list[Alternative]
    """The reading that each round but the first stands on."""
    alone: list[Tried]
    """The same readings, each by itself against the declared one."""
    pairs: Round | None
    """Readings that change two fields, where no single one was better."""
    shuffled: Tried | None
    """Another prompt's states in place of the context, against the last round's base."""
    untested: list[Untested]
    n_prompts: int


def surroundings(
    capture: Capture, checkpoint: Checkpoint, drafter: Drafter, *, special_ids: Sequence[int] = ()
) -> Surroundings:
    """What decides which other readings of a checkpoint can be tried on a capture.

    Parameters
    ----------
    special_ids
        Special tokens of the target's tokenizer, where one is at hand and the capture has none.
    """
    config, facts = checkpoint.config, capture.target_facts
    n_layers = int(facts.get("n_layers") or max(capture.layer_ids) + 1)
    n_draft, vocab = drafter.shape.n_layers, len(capture.embedding)
    ends = [*range(4), *range(vocab - 4, vocab)]
    small = capture.embedding.float().norm(dim=-1).argsort()[:4].tolist()
    known = [*facts.get("eos_token_ids", ()), *facts.get("special_token_ids", ())]
    shares = numbers_in(config, ("partial_rotary_factor",))
    return Surroundings(
        n_layers=n_layers,
        captured=frozenset(capture.layer_ids),
        hidden_size=drafter.shape.hidden_size,
        head_width=drafter.shape.head_width,
        longest=max(p.n_prompt_tokens + p.n_generated for p in capture.prompts),
        vocab_size=vocab,
        special_ids=[*special_ids, *known, *ends, *small],
        thetas=numbers_in(config, ("rope_theta",)),
        windows=[int(w) for w in numbers_in(config, ("sliding_window", "swa_window_size"))],
        rotary_widths=[int(share * drafter.shape.head_width) for share in shares],
        own_head=bool(drafter.shape.head_rows),
        default_layers={
            "z-lab's rule": default_layer_ids(n_layers, n_draft),
            "vLLM's and speculators' rule": tuple(i - 1 for i in (2, n_layers // 2, n_layers - 3)),
        },
    )


def align(
    sweep: Sweep,
    around: Surroundings,
    *,
    seed: int,
    draws: int,
    causes: Iterable[str] | None = None,
) -> Alignment:
    """Try every reading of the drafter in ``sweep``; see the module for the method.

    Parameters
    ----------
    causes
        Look for these only; all by default.
    """
    wanted = None if causes is None else frozenset(causes)
    aligner = Aligner(sweep, around, seed=seed, draws=draws)
    declared = sweep.drafter.convention

    def asked(found: Iterable[Alternative]) -> list[Alternative]:
        return [one for one in found if wanted is None or one.cause in wanted]

    singles, untested = alternatives(declared, around)
    rounds = [aligner.round(declared, (), asked([*singles, NO_CONTEXT]))]
    pairs = None
    if rounds[0].best is None and (double := asked(coupled(declared, around))):
        pairs = aligner.round(declared, (), double)
    applied: list[Alternative] = []
    while len(applied) < SECOND_LOOKS:
        last = rounds[-1]
        if last.base.other_blocks != "hidden":
            break  # labels are in sight there: what else gains a little says nothing
        best = last.best or (pairs.best if pairs and not applied else None)
        if best is None:
            break
        one = best.alternative
        if one.states is None:
            one = aligner.climb(last.base, one)
        applied.append(one)
        settings = tuple(text for a in applied for text in a.settings)
        base = declared.override(settings)
        used = {a.cause for a in applied}
        again = [t for t in asked(alternatives(base, around)[0]) if t.cause not in used]
        rounds.append(aligner.round(base, settings, again, one.states or last.states))
    asks_context = wanted is None or CONTEXT in wanted
    return Alignment(
        rounds=rounds,
        applied=applied,
        alone=[aligner.alone(rounds[0], one) for one in applied],
        pairs=pairs,
        shuffled=aligner.without_context(rounds[-1]) if asks_context else None,
        untested=[one for one in untested if wanted is None or one.cause in wanted],
        n_prompts=aligner.n_prompts,
    )
