"""Other readings of the same weights: every field of a convention that changes the drafter.

A reading is a list of ``field=value`` settings on top of the declared convention. Those of one
cause stand together, since they answer one question. Which stack reads weights in each of these
ways, and what public reports of it looked like, stands beside the values.

Symbols: B block size, K tapped layers, N target layers, H hidden size, d head width, a anchor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_diag.conventions import Convention
from dflash_diag.errors import BadInput

OFFSETS = (-3, -2, -1, 1, 2, 3)
"""Positions of the block that are tried; ports were off by one (ik_llama.cpp 2296)."""
LABELS = (-1, 1)
"""SpecForge 455 and 533, sglang 30852: labels one too late, or the layout misread."""
LAYER_SHIFTS = (-2, -1, 1, 2)
"""vLLM 40727, atlas 394: ids off by one, and by two."""
THETAS = (1e4, 1e5, 1e6, 1e7)
"""Bases that stacks fall back to or copy from targets; Model-Optimizer 1621 was off by 100."""
WIDTHS = (0.25, 0.5, 1.0)
"""Shares of a head that targets rotate (speculators 613: 0.25 copied from the target)."""


@dataclass(frozen=True)
class Alternative:
    """One other reading, and the cause that it would prove."""

    cause: str
    settings: tuple[str, ...]
    states: Literal["zero", "other"] | None = None
    """What stands in place of the prompt's states, if not they themselves."""

    @property
    def name(self) -> str:
        """``field=value``, several joined by commas."""
        return ", ".join(self.settings) or f"context: {self.states}"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What other readings depend on besides the declared one."""

    n_layers: int
    """Decoder layers of the target."""
    captured: Collection[int]
    """Layers that the capture holds, -1 being the embedding output."""
    hidden_size: int
    head_width: int
    longest: int
    """Tokens of the longest prompt with its continuation."""
    vocab_size: int
    special_ids: Sequence[int] = ()
    """Ids that could be the mask token: special tokens, rows that look untrained."""
    thetas: Sequence[float] = ()
    """Bases found anywhere in the files."""
    windows: Sequence[int] = ()
    """Window widths found anywhere in the files, switched on or not."""
    rotary_widths: Sequence[int] = ()
    own_head: bool = False
    """Whether the checkpoint brings a head of its own."""
    default_layers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Taps (as decoder-layer outputs) that default rules would pick, by rule."""


@dataclass(frozen=True)
class Untested:
    """A cause that this capture or these files cannot be asked about."""

    cause: str
    reason: str


def alternatives(how: Convention, around: Surroundings) -> tuple[list[Alternative], list[Untested]]:
    """Readings other than ``how``, one field changed at a time, and what cannot be tried.

    Returns
    -------
    tuple
        No reading twice, none equal to ``how``, and only such as can be computed: a layer that the
        capture lacks or a width above the head's is left out.
    """
    untested: list[Untested] = []
    found = [
        *_layers(how, around, untested),
        *_masks(how, around),
        *_positions(how),
        *_rope(how, around),
        *_rest(how, around),
    ]
    seen: list[Convention] = [how]
    kept = []
    for one in found:
        try:
            reading = how.override(one.settings)
        except BadInput:
            continue
        if reading not in seen:
            seen.append(reading)
            kept.append(one)
    return kept, untested


def _layers(
    how: Convention, around: Surroundings, untested: list[Untested]
) -> Iterator[Alternative]:
    lacking = []
    for shift in LAYER_SHIFTS:
        taps: Sequence[int] = [tap + shift for tap in how.taps]
        if min(taps) < -1 or max(taps) >= around.n_layers:
            continue
        if set(taps) <= set(around.captured):
            yield Alternative("layers.offset", (taps_setting(how, taps),))
        else:
            lacking.append(shift)
    if {-1, 1} & set(lacking):
        reason = "the capture lacks the neighbours of the tapped layers (--layers around)"
        untested.append(Untested("layers.offset", reason))
    for taps in swaps(how.taps):
        yield Alternative("layers.order", (taps_setting(how, taps),))
    for taps in (how.taps[::-1], tuple(sorted(how.taps))):
        yield Alternative("layers.order", (taps_setting(how, taps),))
    for taps in around.default_layers.values():
        if len(taps) == len(how.taps) and set(taps) <= set(around.captured):
            yield Alternative("layers.missing_or_default", (taps_setting(how, taps),))
    if around.n_layers - 1 in how.taps:
        normed = str(not how.last_layer_normed).lower()
        yield Alternative("layers.last_layer_norm", (f"last_layer_normed={normed}",))
    else:
        untested.append(Untested("layers.last_layer_norm", "the last layer is not tapped"))


def swaps(taps: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every exchange of two tapped layers."""
    for i, j in itertools.combinations(range(len(taps)), 2):
        swapped = list(taps)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        yield tuple(swapped)


def beyond(base: Convention, found: Alternative, around: Surroundings) -> list[Alternative]:
    """Where to look next once a reading is found: other exchanges, or one step further on.

    Empty for causes whose readings were all tried.
    """
    now, cause = base.override(found.settings), found.cause
    if cause == "layers.order":
        return [Alternative(cause, (taps_setting(base, taps),)) for taps in swaps(now.taps)]
    if cause == "position.block_offset":
        step = 1 if now.position_offset > base.position_offset else -1
        return [Alternative(cause, (f"position_offset={now.position_offset + step}",))]
    if cause == "layers.offset":
        step = 1 if now.taps[0] > base.taps[0] else -1
        taps = tuple(tap + step for tap in now.taps)
        there = set(taps) <= set(around.captured)
        return [Alternative(cause, (taps_setting(base, taps),))] if there else []
    return []


def taps_setting(how: Convention, taps: Iterable[int]) -> str:
    """The setting under which a convention taps these decoder-layer outputs, in this order."""
    shift = 0 if how.layer_id_rule == "output" else 1
    return "layer_ids=" + ",".join(str(tap + shift) for tap in taps)


def _masks(how: Convention, around: Surroundings) -> Iterator[Alternative]:
    bound = "strict" if how.context_bound == "inclusive" else "inclusive"
    yield Alternative("mask.anchor_included", (f"context_bound={bound}",))
    for others in ("hidden", "later", "all"):
        yield Alternative("mask.cross_block_leak", (f"other_blocks={others}",))
    for kind in ("bidirectional", "causal"):
        yield Alternative("mask.block_causality", (f"in_block={kind}",))
    for window in _windows(around):
        yield Alternative("mask.window", (f"window={'none' if window is None else window}",))
    if any(window is not None for window in how.window):
        rule = "anchor" if how.window_rule == "slot" else "slot"
        yield Alternative("mask.window", (f"window_rule={rule}",))


def _windows(around: Surroundings) -> list[int | None]:
    """No window, and the widths that the files name, where a text is long enough to tell."""
    return [None, *sorted({w for w in around.windows if w < around.longest})]


def _positions(how: Convention) -> Iterator[Alternative]:
    for shift in OFFSETS:
        offset = how.position_offset + shift
        yield Alternative("position.block_offset", (f"position_offset={offset}",))
    for shift in LABELS:
        yield Alternative("label.shift", (f"label_offset={how.label_offset + shift}",))
    layout = "next" if how.label_layout == "same" else "same"
    yield Alternative("label.shift", (f"label_layout={layout}",))


def _rope(how: Convention, around: Surroundings) -> Iterator[Alternative]:
    steps = [how.rope_theta * factor for factor in (0.01, 0.1, 10.0, 100.0)]
    for theta in sorted({*THETAS, *around.thetas, *(t for t in steps if t >= 10)}):
        yield Alternative("rope.theta", (f"rope_theta={theta:g}",))
    widths = {int(around.head_width * share) for share in WIDTHS} | set(around.rotary_widths)
    for width in sorted(widths):
        if 2 <= width <= around.head_width:
            yield Alternative("rope.rotary_width", (f"rotary_width={width}",))
    pairing = str(not how.rope_interleaved).lower()
    yield Alternative("rope.interleaving", (f"rope_interleaved={pairing}",))
    if how.rope_scaling is not None:
        yield Alternative("rope.scaling", ("rope_scaling=none",))


def _rest(how: Convention, around: Surroundings) -> Iterator[Alternative]:
    for token in dict.fromkeys(around.special_ids):
        if 0 <= token < around.vocab_size:
            yield Alternative("mask_token.id", (f"mask_token_id={token}",))
    root = math.sqrt(around.hidden_size)
    for scale in (1.0, root):
        if not math.isclose(scale, how.embedding_scale, rel_tol=1e-6):
            yield Alternative("embedding.scale", (f"embedding_scale={scale:.10g}",))
    if around.own_head:
        head = "target" if how.head == "own" else "own"
        yield Alternative("head.tying_or_vocab", (f"head={head}",))
    if how.vocabulary_map != "none":
        for kind in ("offset", "absolute"):
            yield Alternative("head.tying_or_vocab", (f"vocabulary_map={kind}",))
    for name in ("feature_norm", "final_norm"):
        for often in ("once", "skipped", "twice"):
            yield Alternative("norm.missing_or_doubled", (f"{name}={often}",))
    style = "one_plus" if how.norm_style == "plain" else "plain"
    yield Alternative("norm.missing_or_doubled", (f"norm_style={style}",))
    for width in (how.block_size - 1, how.block_size + 1):
        if width >= 2:
            yield Alternative("block.width", (f"block_size={width}",))


def coupled(how: Convention, around: Surroundings) -> list[Alternative]:
    """Pairs of fields that stacks get wrong together, so that neither alone would help.

    The first setting names the cause.
    """
    kinds = {"bidirectional", "causal"} - set(how.in_block)
    pairs = [
        ("mask.window", f"window={'none' if w is None else w}", f"in_block={kind}")
        for w in _windows(around)
        for kind in kinds
    ]
    layout = "next" if how.label_layout == "same" else "same"
    pairs += [
        ("label.shift", f"label_layout={layout}", f"block_size={width}")
        for width in (how.block_size - 1, how.block_size + 1)
    ]
    pairing = f"rope_interleaved={str(not how.rope_interleaved).lower()}"
    widths = {int(around.head_width * share) for share in WIDTHS} - {how.rotary_width}
    others = [pairing, *(f"rope_theta={theta:g}" for theta in THETAS if theta != how.rope_theta)]
    pairs += [
        ("rope.rotary_width", f"rotary_width={width}", other)
        for width in sorted(widths)
        for other in others
    ]
    pairs += [
        (
            "label.shift",
            f"label_offset={how.label_offset + shift}",
            f"position_offset={how.position_offset + shift}",
        )
        for shift in (-1, 1)
    ]
    normed = f"last_layer_normed={str(not how.last_layer_normed).lower()}"
    for shift in (-1, 1):
        taps = [tap + shift for tap in how.taps]
        if around.n_layers - 1 in taps and set(taps) <= set(around.captured):
            pairs.append(("layers.offset", taps_setting(how, taps), normed))
    found = []
    for cause, *settings in pairs:
        try:
            reading = how.override(settings)
        except BadInput:
            continue
        if reading != how:
            found.append(Alternative(cause, tuple(settings)))
    return found


def numbers_in(config: Any, names: Collection[str]) -> list[float]:
    """Every number under one of some keys, at any depth of a configuration."""
    found: list[float] = []
    if isinstance(config, Mapping):
        for key, value in config.items():
            plain = isinstance(value, int | float) and not isinstance(value, bool)
            if key in names and plain and value > 0:
                found.append(float(value))
            else:
                found += numbers_in(value, names)
    return found
