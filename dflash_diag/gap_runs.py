"""What a run measures about the gap between training and serving, kept in the run's folder.

::

    OUT/captures/KEY/      the target on training texts, and on its own text after their beginnings
    OUT/gap/KEY.json       the training measurement again, and the gap taken apart

See `replay` and `gap` for the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dflash_diag import definitions, storage
from dflash_diag.alignment import CONTEXT
from dflash_diag.claims import LOGGED, Fit, judge
from dflash_diag.definitions import DEFINITIONS, Definition
from dflash_diag.diagnostics.base import DRAFTER, Skip
from dflash_diag.gap import (
    BACKEND,
    DRAFTED,
    GREEDY,
    NOISE,
    PRECISION,
    PROMPTS,
    READING,
    UNSEEN,
    Gap,
    Level,
    World,
    decompose,
)
from dflash_diag.prompts import Prompt
from dflash_diag.replay import Context, Passage, Replayed, replay
from dflash_diag.shapley import State
from dflash_diag.stats import Estimate
from dflash_diag.training_logs import LAST, read_training_log
from dflash_diag.training_sequences import (
    TRAIN,
    VALIDATION,
    AnchorRule,
    Split,
    Texts,
    TrainingText,
    draw_anchors,
    read_training_sequences,
    rule_of,
    sampled,
)

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.conventions import Convention
    from dflash_diag.drafter import Drafter
    from dflash_diag.modules import Variant
    from dflash_diag.runs import Run
    from dflash_diag.scoring import Scores
    from dflash_diag.strata import Blocks

VERSION, TEXTS_VERSION = "gap/3", "training texts/1"
ROWS = 32
"""Rows of each split that are measured again, unless another number is asked for."""
CONTINUED = 12
"""Rows whose beginnings the target continues."""
BESIDE = "text like that of training"
ROUNDING = 0.1
"""Nats below the target's best choice at which a token still counts as its own: bfloat16 rounds
differently from one machine to the next."""
PREFERRED = ("streak uniform", "tau uniform", "tau walked", "streak walked", "tau walked macro")
"""Definitions to start from where several numbers are claimed, best first."""


def replay_of(run: Run) -> dict[str, Any]:
    """What the trainer's dashboard would show, measured again, beside what was claimed; kept.

    Raises
    ------
    Skip
        There is no target, or there are no texts.
    """
    needed = {"target": "--target", "training_sequences": "--training-sequences"}
    lacking = [option for name, option in needed.items() if not getattr(run.config, name)]
    if lacking:
        raise Skip(
            "Measuring the training number again takes the texts that it was measured on and the "
            f"target to run over them (give {' and '.join(lacking)})."
        )
    found = _kept(run, "replay", lambda of: of.measured())
    fits = judge(run.claimed(), n_proposed=run.convention(DRAFTER).n_proposed)
    return {**found, "claims": [claimed(run, fit, found["splits"]) for fit in fits]}


def gap_of(run: Run) -> Mapping[str, Any]:
    """The gap between a training number and the serving tau, taken apart; kept."""
    claim = start_of(fits_of(run))
    said = claim.to_json() if claim else None
    return _kept(run, "gap", lambda of: of.decomposed(claim), said)


def fits_of(run: Run) -> list[Fit]:
    """Claimed numbers with the definitions that can have printed them, measured where possible."""
    try:
        splits = replay_of(run)["splits"]
    except Skip:
        splits = {}
    measured = {
        split: {
            name: Estimate(numbers["value"], numbers["lo"], numbers["hi"], found["n_texts"])
            for name, numbers in found["numbers"].items()
        }
        for split, found in splits.items()
    }
    n_proposed = run.convention(DRAFTER).n_proposed
    return judge(run.claimed(), n_proposed=n_proposed, training=measured)


def claimed(run: Run, fit: Fit, splits: Collection[str]) -> dict[str, Any]:
    """A claim with the split that it was printed for, and how far a log's last lines spread."""
    return {
        **fit.to_json(),
        "step": fit.line.step,
        "split": split_of(fit, splits),
        "spread": spread_of(run, fit),
    }


def spread_of(run: Run, fit: Fit) -> tuple[float, float]:
    """Smallest and largest value in the last lines of the log; the claim itself if typed in."""
    if fit.line.source != LOGGED:
        return fit.claim.value, fit.claim.value
    table = read_training_log(run.config.training_log).table(fit.line.group)
    last = table[fit.claim.name].dropna().tail(LAST)
    return float(last.min()), float(last.max())


def _kept(
    run: Run, what: str, make: Callable[[GapRun], dict[str, Any]], *more: Any
) -> Mapping[str, Any]:
    if DRAFTER not in run.roles:
        raise Skip("No drafter was given, so nothing was trained (--drafter).")
    if run.capture.thinned:
        raise Skip("A capture that keeps only some positions cannot be scored.")
    key = storage.content_key(
        VERSION,
        what,
        run.config.training_rows or ROWS,
        CONTINUED,
        run.training_key,
        run.seed,
        run.draws,
        *more,
    )
    path = run.out / "gap" / f"{key[:12]}.json"
    found: Mapping[str, Any] = storage.kept_json(path, lambda: make(run.training))
    return found


class GapRun:
    """The training measurement of a run's drafter, and its way to the serving tau."""

    def __init__(self, run: Run) -> None:
        self.run, self.drafter = run, run.drafter(DRAFTER)
        self.arguments = run.checkpoint(DRAFTER).training_args or {}
        self.noise = float(self.arguments.get("hidden_noise") or 0)
        self._on_texts: dict[tuple[str, State], Replayed] = {}
        self.reading, self.context = own_reading(self.drafter.convention, run.alignment())

    def measured(self) -> dict[str, Any]:
        """Every definition on each split, under the trainer's own reading."""
        splits = {}
        for name in self.splits:
            scores = self.on_texts(name, frozenset()).scores
            found = definitions.measure(scores, seed=self.run.seed, draws=self.run.draws)
            splits[name] = {
                "n_texts": len(scores.prompt_ids),
                "n_anchors": len(scores.anchor),
                "numbers": {key: one.to_json() for key, one in found.items()},
            }
        return {"splits": splits, **self.how()}

    def how(self) -> dict[str, Any]:
        """In what way the trainer's side is measured."""
        declared, own = (one.to_json() for one in (self.drafter.convention, self.reading))
        texts = [text for split in self.splits.values() for text in split]
        return {
            "reading": {k: own[k]["value"] for k in own if own[k]["value"] != declared[k]["value"]},
            "declared": {
                k: declared[k]["value"] for k in own if own[k]["value"] != declared[k]["value"]
            },
            "context": self.context,
            "noise": self.noise,
            "labels": self.rule.labels,
            "anchors": "stored" if any(t.anchors is not None for t in texts) else "drawn",
            "dtype": _dtype(self.trainer),
            "served_dtype": _dtype(self.drafter),
            "states": str(self.trained_states or self.run.states.own_name),
            "served_states": self.run.states.own_name,
        }

    def decomposed(self, claim: Fit | None) -> dict[str, Any]:
        """The way from a claimed number, or from the replayed one, to serving's."""
        definition = definition_of(claim)
        split = split_of(claim, self.splits) if claim else None
        split = split or next(iter(self.splits), None)
        world = World(
            levels := self.levels(split),
            sizes={one.population: 1 + max(one.member.values()) for one in levels},
            definition=definition,
            prompt_too=self.prompt_too,
            readings=self.context != "own" or self.reading != self.drafter.convention,
            noise=self.noise > 0,
            precision=_dtype(self.trainer) != _dtype(self.drafter),
            backend=bool(self.splits) and self.trained_states is not None,
        )
        value = claim.claim.value if claim else None
        found = decompose(world, value, seed=self.run.seed, draws=self.run.draws)
        return {
            "claim": claim.to_json() if claim else None,
            "step": claim.line.step if claim else None,
            "spread": spread_of(self.run, claim) if claim else None,
            "definition": definition.name,
            "means": definition.means,
            "split": split,
            "sizes": dict(world.sizes),
            **gap_json(found),
            **self.how(),
            "not_measured": self.not_measured(),
        }

    def not_measured(self) -> list[dict[str, str]]:
        """Factors whose two sides are not both at hand, each with the reason."""
        rows = []
        if not self.splits:
            lacking = "without them (--training-sequences) and the target (--target)"
            rows.append({"factor": "training texts", "reason": f"They are not known {lacking}."})
        if self.trained_states is not None:
            return rows
        reason = (
            f"The states were computed here ({self.run.states.own_name}), not where it was trained "
            "(say how it was there with --trained-states)."
        )
        for name in self.run.sides():
            try:
                own, other = self.run.side_scores(name)
            except Skip:
                continue
            change = _tau(other) - _tau(own)
            reason += f" On your prompts those of {name} move tau by {change:+.2f}."
        rows.append({"factor": "hidden-state backend", "reason": reason})
        return rows

    @cached_property
    def trainer(self) -> Drafter:
        """The drafter in the precision of its checkpoint, which is taken for that of training."""
        from dflash_diag.targets import DTYPES

        dtype = DTYPES.get(str(self.run.checkpoint(DRAFTER).body.get("dtype")))
        if dtype in (None, self.drafter.fc.weight.dtype):
            return self.drafter
        return self.run.drafter(DRAFTER, dtype=dtype)

    @cached_property
    def trained_states(self) -> Variant | None:
        """How training computed the target's states; None where nobody said, or as here."""
        from dflash_diag.modules import Variant

        said = self.run.config.trained_states
        made = Variant.parse(said) if said else None
        return None if made == self.run.states.variant() else made

    # --- texts ------------------------------------------------------------------------------------

    @cached_property
    def splits(self) -> Mapping[str, Split]:
        """Some rows of each split; none where there is no target to run over them."""
        if not (self.run.config.target and self.run.config.training_sequences):
            return {}
        whole = read_training_sequences(self.run.config.training_sequences)
        rows = self.run.config.training_rows or ROWS
        return {name: sampled(split, rows) for name, split in whole.items()}

    @cached_property
    def rule(self) -> AnchorRule:
        """How the trainer draws anchors."""
        from dflash_diag.checkpoints import detect_stack

        count = self.arguments.get("num_anchors")
        stack = detect_stack(self.run.checkpoint(DRAFTER)).name
        return rule_of(stack, self.reading.block_size, int(count) if count else None)

    def passages(self, name: str, how: Variant | None = None) -> list[Passage]:
        """The texts of one split with the anchors of a training step.

        ``how`` the target computes their states, if not as on the prompts.
        """
        split = self.splits[name]
        capture = self.captured(name, [(t.id, t.tokens.tolist(), given(t)) for t in split], how)
        drawn = draw_anchors(split, self.rule, self.reading.block_size, self.run.seed)
        pairs = enumerate(zip(split, drawn, strict=True))
        return [Passage(capture, i, t.learned, t.written, a) for i, (t, a) in pairs]

    def continued(self, name: str) -> list[Passage]:
        """What the target itself says after the beginnings of some texts of a split.

        A stored text that is the target's own up to rounding is taken as it is.
        """
        made, rest = [], []
        chosen = {text.id for text in sampled(self.splits[name], CONTINUED)}
        for passage, text in zip(self.passages(name), self.splits[name], strict=True):
            length = given(text) + self.run.capture.max_new_tokens
            if text.id in chosen and is_own(passage, length):
                made.append(
                    Passage.generated(
                        passage.capture, passage.index, length=length, prompt_too=self.prompt_too
                    )
                )
            elif text.id in chosen:
                rest.append(
                    Prompt(id=text.id, prompt_ids=tuple(text.tokens[: given(text)].tolist()))
                )
        if rest:
            capture = self.captured(f"{name}, continued", rest)
            made += self.generated(capture)
        return made

    @cached_property
    def beside(self) -> tuple[str, Blocks] | None:
        """What the target says after the beginnings of training texts, drafted as it is served.

        Texts that were held out, where there are some; None where none can be scored.
        """
        from dflash_diag.strata import Blocks, texts_of

        split = VALIDATION if VALIDATION in self.splits else next(iter(self.splits), None)
        passages = self.continued(split) if split else []
        if not passages:
            return None
        made = self.replayed(passages, DRAFTED).rows(walk=False, prompt_too=False)
        texts = {one.capture.path: texts_of(one.capture) for one in passages}
        return BESIDE, Blocks.of(made, [texts[one.capture.path][one.index] for one in passages])

    def generated(self, capture: Capture) -> list[Passage]:
        """Prompts that hold a block under either reading."""
        needed = max(
            how.n_proposed + max(0, how.label_offset)
            for how in (self.reading, self.drafter.convention)
        )
        return [
            Passage.generated(capture, i, prompt_too=self.prompt_too)
            for i, prompt in enumerate(capture.prompts)
            if prompt.n_generated > needed
        ]

    def captured(self, name: str, texts: Sequence[Any], how: Variant | None = None) -> Capture:
        """The target on given texts (id, tokens, prefix), or on prompts that it continues."""
        from dflash_diag.bundle import Capture
        from dflash_diag.capture import make_capture
        from dflash_diag.modules import computed_as

        run, given = self.run, not isinstance(texts[0], Prompt)
        taps = sorted({*self.reading.taps, *self.drafter.convention.taps})
        content = texts if given else [one.to_json() for one in texts]
        key = storage.content_key(
            TEXTS_VERSION, run.capture_digest, name, content, taps, str(how or "")
        )
        folder = run.out / "captures" / key[:12]

        def make() -> None:
            with computed_as(run.target, how) if how else nullcontext(run.target) as target:
                make_capture(
                    target,
                    [] if given else texts,
                    folder,
                    max_new_tokens=None if given else run.capture.max_new_tokens,
                    like=Texts.of(texts, "training text") if given else None,
                    layers="taps",
                    taps=taps,
                )

        storage.made_once(folder / "manifest.json", make)
        return Capture.load(folder, verify=False)

    @cached_property
    def prompt_too(self) -> bool:
        """Whether the trainer's anchors lie in prompts as well."""
        texts = [text for split in self.splits.values() for text in split]
        return any(
            not text.written[at].all()
            for text in texts
            if len(at := np.flatnonzero(text.learned) if text.anchors is None else text.anchors)
        )

    # --- blocks -----------------------------------------------------------------------------------

    def levels(self, split: str | None) -> list[Level]:
        """From the texts that were trained on to the user's prompts."""
        found = []
        if split is not None:
            found.append(self._level("", split, self.passages(split), generated=False))
            if split == TRAIN and VALIDATION in self.splits:
                split = VALIDATION
                texts = self.passages(split)
                found.append(self._level(UNSEEN, split, texts, generated=False))
            found.append(self._level(GREEDY, split, self.continued(split), generated=True))
        factor = PROMPTS if found else ""
        prompts = self.generated(self.run.capture)
        return [*found, self._level(factor, "your prompts", prompts, generated=True)]

    def _level(
        self, factor: str, population: str, passages: Sequence[Passage], *, generated: bool
    ) -> Level:
        if population in self.splits:
            rows = sorted({text.row for text in self.splits[population]})
            member = {text.id: rows.index(text.row) for text in self.splits[population]}
        else:
            member = {passage.prompt.id: i for i, passage in enumerate(passages)}

        @cache
        def replayed(served: State) -> Replayed:
            return (
                self.replayed(passages, served) if generated else self.on_texts(population, served)
            )

        return Level(factor, population, member, generated, replayed)

    def on_texts(self, name: str, served: State) -> Replayed:
        """The texts of one split, at drawn anchors; replayed once."""
        if (name, served) not in self._on_texts:
            how = None if BACKEND in served else self.trained_states
            self._on_texts[name, served] = self.replayed(self.passages(name, how), served)
        return self._on_texts[name, served]

    def replayed(self, passages: Sequence[Passage], served: State) -> Replayed:
        """The drafter on some texts, as it was trained but for what is ``served``."""
        drawn = [len(one.anchors) for one in passages if one.anchors is not None]
        drafter = self.drafter if PRECISION in served else self.trainer
        return replay(
            drafter if READING in served else drafter.under(self.reading),
            passages,
            labels=self.rule.labels if drawn else "tokens",
            noise=0.0 if NOISE in served else self.noise,
            context="own" if READING in served else self.context,
            together=self.rule.count,
            seed=self.run.seed,
        )


def _dtype(drafter: Drafter) -> str:
    return str(drafter.fc.weight.dtype).removeprefix("torch.")


def _tau(scores: Scores) -> float:
    (value,) = DEFINITIONS["tau walked"].measure(scores).value()
    return float(value)


def start_of(fits: Sequence[Fit]) -> Fit | None:
    """The claim to start from: of a training line if there is one, an accepted length if any.

    A number that a server can have said is the last choice: the way leads there.
    """

    def rank(fit: Fit) -> tuple[bool, bool, int]:
        usual = [PREFERRED.index(name) for name in fit.fits if name in PREFERRED]
        served = any(" walked" in name for name in fit.fits)
        return fit.line.split is None, served, min(usual, default=len(PREFERRED))

    lengths = [
        fit
        for fit in fits
        if any(name in DEFINITIONS and DEFINITIONS[name].unit == "tokens" for name in fit.fits)
    ]
    return min(lengths, key=rank, default=None)


def definition_of(claim: Fit | None) -> Definition:
    """The definition that a number starts from: of those that fit, the most usual one."""
    named = [DEFINITIONS[name] for name in (claim.fits if claim else ()) if name in DEFINITIONS]
    fits = [one.name for one in named if one.unit == "tokens"]
    usual = [name for name in PREFERRED if name in fits]
    return DEFINITIONS[(usual or fits or PREFERRED)[0]]


def split_of(claim: Fit, splits: Collection[str]) -> str | None:
    """The split that a number was printed for; None where there are no such texts."""
    line = claim.line
    own = line.split if line.group else TRAIN
    return own if own in splits else None


def gap_json(gap: Gap) -> dict[str, Any]:
    """As plain values."""
    return {
        "claimed": gap.claimed,
        "replayed": gap.replayed.to_json(),
        "served": gap.served.to_json(),
        "n_orders": gap.n_orders,
        "bars": [
            {"factors": list(one.factors), **one.change.to_json()}
            | {"lo_order": one.lo_order, "hi_order": one.hi_order}
            for one in gap.bars
        ],
    }


def own_reading(declared: Convention, alignment: Mapping[str, Any]) -> tuple[Convention, Context]:
    """The reading under which the weights were trained, as far as it was found, and its context.

    Returns
    -------
    tuple
        The best reading that trying all of them found, whether or not serving could follow it;
        ``zero`` where zeros in place of the context did better.
    """
    found = [one for one in alignment["findings"] if one["status"] == "found"]
    if not found:
        return declared, "own"
    rounds = alignment["rounds"]
    named = [one for one in found if one["settings"]]
    # A round that stands on no setting stands on the context of zeros.
    zero = CONTEXT in {one["cause"] for one in found} and len(rounds) - 1 > len(named)
    return declared.override(rounds[-1]["settings"]), "zero" if zero else "own"


def given(text: TrainingText) -> int:
    """Tokens that the target is given of a text: its prefix, or one where it has none."""
    return max(1, text.prefix)


def is_own(passage: Passage, length: int) -> bool:
    """Whether the text up to ``length`` is what the target says greedily, up to rounding."""
    tokens = passage.capture.tokens(passage.index).numpy()
    if len(tokens) < length:
        return False
    said = np.arange(passage.prompt.n_prompt_tokens, length)
    ids, logprobs = (one[said - 1] for one in passage.capture.top_choices(passage.index))
    near = (ids == tokens[said, None]) & (logprobs >= logprobs[:, :1] - ROUNDING)
    return bool(near.any(axis=1).all())
