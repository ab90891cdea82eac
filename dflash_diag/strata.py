"""Acceptance by stratum: on which text a drafter is good, and on which it is not.

A stratum is a part of the blocks that were scored: those of one kind of prompt, deep in the
context, where the target is sure, inside repeated text and so on. Strata describe; that two of them
differ does not say why. Every interval is clustered by prompt, and says from how many prompts it
comes, since a stratum of three prompts is an anecdote.

Symbols: N prompts, A anchors, D proposed tokens, P prompt tokens, T tokens, k a proposal 1..D.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash_diag import metrics
from dflash_diag.stats import FEW_PROMPTS, LEVEL, Estimate, Floats, Ratio, bca, estimates, ratio

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.metrics import Scored

Mask = NDArray[np.bool_]
Parts = list[tuple[str, Mask]]

WINDOW = 16
"""Tokens that have to recur for a stretch to count as repeated: about a line of code."""
MAX_KINDS = 8
"""Kinds of prompts told apart at most; the rest are one more."""
FORM_WORDS = {"messages": "chat template", "text": "plain text", "prompt_ids": "token ids"}


@dataclass(frozen=True, eq=False)
class Text:
    """One prompt with its continuation, and what the target itself would say along it."""

    id: str
    start: int
    """P: position of the first generated token."""
    tokens: NDArray[np.int64]
    """[T] prompt and continuation."""
    ended: bool | None
    """Whether the continuation ended by itself; None if nobody knows."""
    form: str | None = None
    """How the prompt was given: ``text``, ``messages``, ``prompt_ids``; None if nobody knows."""
    kind: str | None = None
    """What sort of prompt it is, if its file says so."""
    entropy: Floats | None = None
    """[T] of the target's distribution of the token *after* each position, in nats."""
    choice: NDArray[np.int64] | None = None
    """[T] its most probable token after each position."""


def texts_of(capture: Capture) -> list[Text]:
    """The texts of a capture; without entropies where it holds no choices of the target."""
    made = []
    for i, prompt in enumerate(capture.prompts):
        text = Text(
            id=prompt.id,
            start=prompt.n_prompt_tokens,
            tokens=capture.tokens(i).numpy(),
            ended=None if capture.foreign else prompt.ended,
            form=prompt.form,
            kind=prompt.kind,
        )
        if not (capture.foreign or capture.thinned):
            rows = capture.positions(i)
            text = replace(
                text,
                entropy=rows["entropy"].to_numpy(np.float64),
                choice=np.array([ids[0] for ids in rows["top_ids"]], dtype=np.int64),
            )
        made.append(text)
    return made


def repeated(ids: Sequence[int], window: int = WINDOW) -> Mask:
    """Tokens [G] that lie in a stretch of ``window`` tokens that occurred before in ``ids``."""
    seen: set[tuple[int, ...]] = set()
    inside = np.zeros(len(ids), dtype=bool)
    for start in range(len(ids) - window + 1):
        stretch = tuple(ids[start : start + window])
        if stretch in seen:
            inside[start : start + window] = True
        seen.add(stretch)
    return inside


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one drafter beside the text that they draft: one row an anchor."""

    texts: Sequence[Text]
    """The N prompts that have anchors."""
    prompt: NDArray[np.int64]
    """[A] index into ``texts``."""
    anchor: NDArray[np.int64]
    """[A] position."""
    right: Mask
    """[A, D] proposal k is the label."""
    judged: Mask
    """[A, D] whether proposal k counts: the loss mask of training text leaves some out."""
    visited: Mask
    """[A] whether decoding visits the anchor; nowhere where anchors were drawn at random."""
    offset: int = 0
    """Proposal k of anchor a is judged by the token at a + k + offset."""

    @classmethod
    def of(cls, scores: Scored, texts: Sequence[Text]) -> Blocks:
        """Scores beside their texts, matched by id."""
        by_id = {text.id: text for text in texts}
        valid: Mask | None = getattr(scores, "valid", None)
        judged = np.ones(scores.labels.shape, dtype=bool) if valid is None else valid
        right = np.equal(scores.proposed, scores.labels) & judged
        kept = judged.any(axis=1)
        anchor = np.asarray(scores.anchor, dtype=np.int64)
        steps = np.diff(anchor)[np.diff(scores.prompt) == 0]
        visited = np.zeros(len(anchor), dtype=bool)
        if (steps == 1).all():
            visited = metrics.walked(scores.prompt, anchor, metrics.leading(right) + 1)
        scored, prompt = np.unique(scores.prompt[kept], return_inverse=True)
        stated = scores.convention.get("label_offset", {"value": 0})
        return cls(
            texts=[by_id[scores.prompt_ids[i]] for i in scored],
            prompt=prompt,
            anchor=anchor[kept],
            right=right[kept],
            judged=judged[kept],
            visited=visited[kept],
            offset=int(stated["value"]),
        )

    def of_prompts(self, chosen: Sequence[int]) -> Blocks:
        """The blocks of some prompts, by their index."""
        rows = np.isin(self.prompt, chosen)
        return replace(
            self,
            texts=[self.texts[i] for i in chosen],
            prompt=np.searchsorted(chosen, self.prompt[rows]),
            anchor=self.anchor[rows],
            right=self.right[rows],
            judged=self.judged[rows],
            visited=self.visited[rows],
        )

    @cached_property
    def jumps(self) -> NDArray[np.int64]:
        """[A] tokens that a round at the anchor commits: accepted + 1."""
        return metrics.leading(self.right) + 1

    @cached_property
    def entropy(self) -> Floats | None:
        """[A, D] the target's entropy at each predicted position, in nats."""
        return self._ahead([text.entropy for text in self.texts], -1)

    @cached_property
    def hardness(self) -> Floats | None:
        """[A] mean entropy of the positions that a block predicts, in nats."""
        if self.entropy is None:
            return None
        mean: Floats = (self.entropy * self.judged).sum(axis=1) / self.judged.sum(axis=1)
        return mean

    @cached_property
    def own(self) -> Mask | None:
        """[A, D] whether each label is the target's own most probable token there."""
        labels = self._ahead([text.tokens for text in self.texts], 0)
        choice = self._ahead([text.choice for text in self.texts], -1)
        return None if choice is None or labels is None else np.equal(labels, choice)

    @cached_property
    def repeats(self) -> Mask:
        """[A] whether the token after the anchor repeats an earlier part of its continuation.

        Anchors inside the prompt do not.
        """
        inside = np.zeros(len(self.prompt), dtype=bool)
        for i, text in enumerate(self.texts):
            rows = np.flatnonzero((self.prompt == i) & (self.anchor + 1 >= text.start))
            mask = repeated(text.tokens[text.start :].tolist())
            inside[rows] = mask[self.anchor[rows] + 1 - text.start]
        return inside

    def _ahead(self, values: Sequence[NDArray[Any] | None], shift: int) -> NDArray[Any] | None:
        """Values [A, D] at the positions of the labels, moved by ``shift``; None where unknown."""
        if any(one is None for one in values):
            return None
        longest = max(len(one) for one in values if one is not None)
        table = np.stack(
            [np.pad(one, (0, longest - len(one))) for one in values if one is not None]
        )
        ahead = np.arange(1, self.right.shape[1] + 1) + self.offset + shift
        # Slots behind the end of a training text have no label, and are not judged.
        at = np.minimum(self.anchor[:, None] + ahead, longest - 1)
        return table[self.prompt[:, None], at]

    def sums(self, rows: Mask | None = None) -> dict[str, Ratio]:
        """``tau_walked``, ``tau_uniform`` and slot ``accuracy`` (uniform) of some anchors [A]."""
        every = np.ones(len(self.prompt), dtype=bool) if rows is None else rows

        def total(values: NDArray[Any]) -> Floats:
            summed = np.bincount(self.prompt, weights=values, minlength=len(self.texts))
            return summed.astype(np.float64)

        walked = every & self.visited
        return {
            "tau_walked": ratio(total(self.jumps * walked), total(walked), "tokens"),
            "tau_uniform": ratio(total(self.jumps * every), total(every), "tokens"),
            "accuracy": ratio(
                total(self.right.sum(axis=1) * every),
                total(self.judged.sum(axis=1) * every),
                "share",
            ),
        }


NUMBERS = ("tau_walked", "tau_uniform", "accuracy")


class Stratum(NamedTuple):
    """Some of the blocks, and what the drafter does on them."""

    dimension: str
    name: str
    n_anchors: int
    n_rounds: int
    n_prompts: int
    """Prompts that have anchors in it."""
    numbers: Mapping[str, Estimate]
    """By `NUMBERS`."""
    versus_rest: Estimate
    """Its walked tau, less that of the dimension's other strata together."""
    differs: bool
    """Whether that is certain after correction for all strata looked at."""

    @property
    def few(self) -> bool:
        """Whether its intervals run short."""
        return self.n_prompts < FEW_PROMPTS


class Strata(NamedTuple):
    """Every stratum, and why some dimensions have none."""

    found: list[Stratum]
    not_tested: dict[str, str]


def stratify(blocks: Blocks, *, seed: int, draws: int) -> Strata:
    """Acceptance in every stratum of every dimension that these texts can be divided by."""
    parts, why = divide(blocks)
    named = [(dimension, *part) for dimension, made in parts.items() for part in made]
    sums = [blocks.sums(rows) for _, _, rows in named]
    measured = estimates(
        {(i, number): one[number] for i, one in enumerate(sums) for number in NUMBERS},
        seed=seed,
        draws=draws,
    )
    others = [blocks.sums(_others(made, at)) for made in parts.values() for at in range(len(made))]
    pairs = list(zip(sums, others, strict=True))
    versus = _versus(pairs, seed=seed, draws=draws, level=LEVEL)
    strict = _versus(pairs, seed=seed, draws=draws, level=1 - (1 - LEVEL) / max(1, len(pairs)))
    found = [
        Stratum(
            dimension=dimension,
            name=name,
            n_anchors=int(rows.sum()),
            n_rounds=int((rows & blocks.visited).sum()),
            n_prompts=len(np.unique(blocks.prompt[rows])),
            numbers={number: measured[i, number] for number in NUMBERS},
            versus_rest=versus[i],
            differs=excludes_zero(strict[i]),
        )
        for i, (dimension, name, rows) in enumerate(named)
    ]
    return Strata(found, why)


def excludes_zero(one: Estimate) -> bool:
    """Whether an interval lies on one side of zero."""
    return one.lo is not None and one.hi is not None and (one.lo > 0 or one.hi < 0)


def _others(parts: Parts, at: int) -> Mask:
    """Anchors of all strata of a dimension but one; two may be called the same."""
    rest: Mask = np.any([rows for i, (_, rows) in enumerate(parts) if i != at], axis=0)
    return rest


def _versus(
    pairs: Sequence[tuple[Mapping[str, Ratio], Mapping[str, Ratio]]],
    *,
    seed: int,
    draws: int,
    level: float,
) -> list[Estimate]:
    """Walked tau in some anchors less that in others; a draw takes whole prompts, with both."""
    if not pairs:
        return []
    sides = [[pair[side]["tau_walked"] for pair in pairs] for side in (0, 1)]
    tops = [np.stack([one.numerators for one in side], axis=1) for side in sides]
    bottoms = [np.stack([one.denominators for one in side], axis=1) for side in sides]

    def statistic(weights: Floats) -> Floats:
        with np.errstate(invalid="ignore", divide="ignore"):
            inside, outside = (
                (weights @ top) / (weights @ bottom)
                for top, bottom in zip(tops, bottoms, strict=True)
            )
        return inside - outside

    counted = np.minimum(*[(bottom > 0).sum(axis=0) for bottom in bottoms])
    found = bca(statistic, len(tops[0]), counted, seed=seed, draws=draws, level=level)
    return [Estimate(*one, n, "tokens") for one, n in zip(found, counted, strict=True)]


# --- dimensions -----------------------------------------------------------------------------------


def divide(blocks: Blocks) -> tuple[dict[str, Parts], dict[str, str]]:
    """Strata of each dimension, and the reason for each that these texts cannot be divided by."""
    parts, why = {}, {}
    for name, by in DIMENSIONS.items():
        made = by(blocks)
        if isinstance(made, str):
            why[name] = made
            continue
        parts[name] = [(stratum, rows) for stratum, rows in made if rows.any()]
        if len(parts[name]) < 2:
            only = parts.pop(name)[0][0]
            why[name] = f"every block is of one stratum ({only})"
    return parts, why


def kinds_of(texts: Sequence[Text]) -> tuple[list[str], str] | str:
    """The kind of each prompt and where it is taken from; or why there are none to tell apart.

    What the prompt file says comes first. Else the part of each id before the first separator is
    taken (``coding`` of ``coding-trie``), provided that it repeats.
    """
    stated = [text.kind for text in texts]
    if any(stated):
        kinds, source = [one or "no kind stated" for one in stated], "the prompt file's kind"
    else:
        kinds = [re.split(r"[-_/:. ]", text.id)[0] or text.id for text in texts]
        kinds = [one.rstrip("0123456789") or "numbers" for one in kinds]
        source = "the start of each prompt's id"
        if len(set(kinds)) > len(texts) / 2:
            return 'the prompts have no kind (add "kind" to their lines)'
    counts = Counter(kinds)
    if len(counts) < 2:
        return f'all prompts are of one kind, {kinds[0]!r} (add "kind" to their lines)'
    kept = [kind for kind, _ in counts.most_common(MAX_KINDS)]
    return [one if one in kept else "other kinds" for one in kinds], source


def forms_of(texts: Sequence[Text]) -> list[str] | str:
    """Whether each prompt went through the chat template; or why that cannot be compared."""
    again = "give the same prompts both as messages and as text"
    forms = [text.form for text in texts]
    if None in forms:
        return f"the capture does not say how its prompts were given ({again})"
    if len(set(forms)) < 2 or "messages" not in forms:
        words = " or ".join(sorted({FORM_WORDS[one] for one in forms if one}))
        return f"all prompts were given as {words} ({again})"
    return [FORM_WORDS[one] for one in forms if one]


def _of_prompts(blocks: Blocks, labels: Sequence[str]) -> Parts:
    each = np.asarray(labels, dtype=object)[blocks.prompt]
    return [(label, each == label) for label in dict.fromkeys(labels)]


def _by_kind(blocks: Blocks) -> Parts | str:
    found = kinds_of(blocks.texts)
    return found if isinstance(found, str) else _of_prompts(blocks, found[0])


def _by_form(blocks: Blocks) -> Parts | str:
    found = forms_of(blocks.texts)
    return found if isinstance(found, str) else _of_prompts(blocks, found)


def _quarters(values: NDArray[Any], words: Callable[[Any, Any], str]) -> Parts:
    """Anchors by the quarter of their value, equal values together."""
    cuts = np.unique(np.quantile(values, [0.25, 0.5, 0.75], method="higher"))
    which = np.searchsorted(cuts, values, side="right")
    made = []
    for quarter in np.unique(which):
        rows = which == quarter
        made.append((words(values[rows].min(), values[rows].max()), rows))
    return made


def _by_depth(blocks: Blocks) -> Parts:
    return _quarters(blocks.anchor, lambda low, high: f"positions {low} to {high}")


def _by_end(blocks: Blocks) -> Parts | str:
    if any(text.ended is None for text in blocks.texts):
        return "the capture does not say which continuations ended by themselves"
    ended = np.array([bool(text.ended) for text in blocks.texts])
    if not ended.any():
        return (
            "no continuation ended by itself, so that the distance to its end is unknown (raise "
            "--max-new-tokens)"
        )
    length = np.array([len(text.tokens) for text in blocks.texts])
    near = length[blocks.prompt] - blocks.anchor <= 2 * blocks.right.shape[1]
    known = ended[blocks.prompt]
    d = 2 * blocks.right.shape[1]
    return [
        (f"ends within {d} tokens", known & near),
        ("ends later", known & ~near),
        ("cut off before its end", ~known),
    ]


def _by_entropy(blocks: Blocks) -> Parts | str:
    if blocks.hardness is None:
        return NO_ENTROPY
    return _quarters(blocks.hardness, lambda low, high: f"{low:.2f} to {high:.2f} nats")


NO_ENTROPY = "the capture holds no choices of the target (make one with the verb capture)"


def _by_repeat(blocks: Blocks) -> Parts:
    return [("new text", ~blocks.repeats), ("repeats earlier text", blocks.repeats)]


def _by_policy(blocks: Blocks) -> Parts | str:
    if blocks.own is None:
        return NO_ENTROPY
    own = np.asarray((blocks.own | ~blocks.judged).all(axis=1))
    if own.all():
        return "every label is the target's own choice"
    return [("the target's own choices", own), ("other text", ~own)]


DIMENSIONS: dict[str, Callable[[Blocks], Parts | str]] = {
    "prompt kind": _by_kind,
    "chat template": _by_form,
    "context depth": _by_depth,
    "distance to the end": _by_end,
    "target entropy": _by_entropy,
    "repeated text": _by_repeat,
    "on-policy": _by_policy,
}
"""How blocks are divided: by the name of each dimension, its strata or why there are none."""
