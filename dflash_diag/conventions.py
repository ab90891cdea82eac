"""One resolved answer to every question on which DFlash stacks disagree.

A drafter's weights mean something only together with a reading: which target layers feed ``fc``,
which context rows a block may see, where the block sits, which token a slot predicts. `Convention`
holds that reading; the drafter, the scorer and every probe obey it, and ``--set field=value``
overrides any part of it.

Symbols: B block size, D proposed tokens, T tokens, a anchor position, k slot (0 holds the anchor).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, NoReturn

from dflash_diag.errors import BadInput

Confidence = Literal["declared", "implied", "default", "override"]


class Source(NamedTuple):
    """Where one value came from: the key in the files, and how sure that makes it."""

    key: str
    confidence: Confidence


def _allow(*values: str) -> dict[str, Any]:
    return {"allowed": values}


@dataclass(frozen=True, kw_only=True)
class Convention:
    """How a drafter's weights are to be read.

    Per-layer fields (`in_block`, `window`) have one entry a draft layer.
    """

    block_size: int
    """B: slots in a block, the anchor's included."""
    layer_ids: tuple[int, ...]
    """Tapped layers as the checkpoint lists them, in the order in which ``fc`` reads them."""
    layer_id_rule: Literal["output", "input"] = field(
        default="output", metadata=_allow("output", "input")
    )
    """``output``: id i is the raw output of decoder layer i. ``input``: id i is its input."""
    last_layer_normed: bool = False
    """Whether the last decoder layer is read after the target's final norm."""
    context_bound: Literal["strict", "inclusive"] = field(
        default="strict", metadata=_allow("strict", "inclusive")
    )
    """``strict``: context rows p < a, the serving rule. ``inclusive``: p <= a."""
    in_block: tuple[str, ...] = field(metadata=_allow("bidirectional", "causal"))
    """Which slots of its own block a slot sees, for each draft layer."""
    other_blocks: Literal["hidden", "later", "all"] = field(
        default="hidden", metadata=_allow("hidden", "later", "all")
    )
    """Slots of other blocks of the same pass that a slot sees: none; those of blocks whose anchor
    comes later; or every one. Serving has one block a pass, so anything but ``hidden`` is a leak;
    it is scored with all anchors of a prompt in one pass."""
    window: tuple[int | None, ...]
    """Sliding window in tokens for each draft layer; None is full attention."""
    window_rule: Literal["slot", "anchor"] = field(
        default="slot", metadata=_allow("slot", "anchor")
    )
    """``slot``: row p is visible to slot k while (a+k) - p < W, and a slot of the block likewise.
    ``anchor``: row p while p >= a - W, and the block whole."""
    label_layout: Literal["same", "next"] = field(default="same", metadata=_allow("same", "next"))
    """``same``: slots 1..B-1 predict a+k. ``next``: slots 0..B-1 predict a+k+1."""
    label_offset: int = 0
    """Added to the position that each slot predicts. Only a training fault makes it other than 0:
    serving has no use for a slot that predicts another token than its layout says."""
    position_offset: int = 0
    """Added to the positions a+k of the block's slots; 0 puts slot 0 at the anchor."""
    rope_theta: float
    rotary_width: int
    """Dimensions of each head that are rotated; the head's width unless stated otherwise."""
    rope_interleaved: bool = False
    """False: the two halves of a head are paired. True: neighbouring dimensions are paired."""
    rope_scaling: str | None = None
    """RoPE scaling parameters as canonical JSON, or None."""
    mask_token_id: int
    feature_norm: Literal["once", "skipped", "twice"] = field(
        default="once", metadata=_allow("once", "skipped", "twice")
    )
    """How often ``hidden_norm`` follows ``fc``."""
    final_norm: Literal["once", "skipped", "twice"] = field(
        default="once", metadata=_allow("once", "skipped", "twice")
    )
    """How often ``norm`` precedes the head."""
    norm_style: Literal["plain", "one_plus"] = field(
        default="plain", metadata=_allow("plain", "one_plus")
    )
    """RMSNorm scales by w (``plain``) or by 1 + w (``one_plus``)."""
    embedding_scale: float = 1.0
    """Factor on the embeddings of the block's tokens."""
    embedding: Literal["target", "own"] = field(default="target", metadata=_allow("target", "own"))
    head: Literal["target", "own"] = field(default="target", metadata=_allow("target", "own"))
    logit_scale: float = 1.0
    softcap: float | None = None
    """Final logits become c * tanh(logits / c); None leaves them alone."""
    vocabulary_map: Literal["none", "offset", "absolute"] = field(
        default="none", metadata=_allow("none", "offset", "absolute")
    )
    """How ``d2t`` turns draft ids into target ids, where the drafter's vocabulary is reduced."""
    proposal: str = "argmax"
    """Name of the step from hidden states to proposed ids (see `dflash_diag.proposals`)."""
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise BadInput(f"block_size is {self.block_size}", "at least 2 (an anchor and a slot)")
        if not self.layer_ids:
            raise BadInput("layer_ids is empty", "at least one tapped layer")
        if twice := next((i for i in self.layer_ids if self.layer_ids.count(i) > 1), None):
            raise BadInput(f"layer_ids lists {twice} twice", "each tapped layer once")
        _check_numbers(self)
        if abs(self.label_offset) >= self.block_size:
            raise BadInput(
                f"label_offset is {self.label_offset}",
                f"less than the {self.block_size} slots of a block, either way",
            )
        for spec in dataclasses.fields(self):
            allowed: tuple[str, ...] = spec.metadata.get("allowed", ())
            value = getattr(self, spec.name)
            for one in value if isinstance(value, tuple) else (value,):
                if allowed and one not in allowed:
                    raise BadInput(f"{spec.name}={one}", f"one of {', '.join(allowed)}")

    @property
    def n_proposed(self) -> int:
        """D: tokens that a block proposes; B-1, or B in the next-token layout."""
        return self.block_size - 1 if self.label_layout == "same" else self.block_size

    @property
    def first_slot(self) -> int:
        """The first slot whose output is a proposal."""
        return 1 if self.label_layout == "same" else 0

    @property
    def taps(self) -> tuple[int, ...]:
        """Tapped layers as decoder-layer outputs, -1 being the embedding output."""
        shift = 0 if self.layer_id_rule == "output" else 1
        return tuple(i - shift for i in self.layer_ids)

    def override(self, assignments: Iterable[str]) -> Convention:
        """Apply ``field=value`` strings, as given to ``--set``.

        A single value given for a per-layer field applies to every layer.

        Raises
        ------
        BadInput
            An unknown field, or a value that the field cannot take.
        """
        specs = {s.name: s for s in dataclasses.fields(self) if s.name != "sources"}
        changes: dict[str, Any] = {}
        for assignment in assignments:
            name, equals, text = assignment.partition("=")
            name = name.strip()
            if not equals or name not in specs:
                raise BadInput(
                    f"--set {assignment}", f"field=value with a field of {', '.join(specs)}"
                )
            changes[name] = _parse(name, text.strip(), getattr(self, name))
        sources = dict(self.sources) | {n: Source(f"--set {n}", "override") for n in changes}
        return dataclasses.replace(self, **changes, sources=sources)

    def to_json(self) -> dict[str, Any]:
        """Every field as ``{"value", "source", "confidence"}``."""
        out = {}
        for spec in dataclasses.fields(self):
            if spec.name == "sources":
                continue
            value = getattr(self, spec.name)
            key, confidence = self.sources.get(spec.name, Source("", "default"))
            out[spec.name] = {
                "value": list(value) if isinstance(value, tuple) else value,
                "source": key or None,
                "confidence": confidence,
            }
        return out


SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""Kinds of RoPE scaling whose frequencies do not depend on the length of the text, and the numbers
that each needs."""


def check_scaling(name: str, parameters: Any) -> None:
    """Refuse RoPE scaling ``parameters``, found under ``name``, that nothing can compute.

    Raises
    ------
    BadInput
        No object, an unknown kind, or a number that is missing or not above 0.
    """
    if not isinstance(parameters, Mapping):
        raise BadInput(f"{name} is {parameters!r}", "an object")
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind == "default":
        return
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise BadInput(
            f"{name} has rope_type {kind!r}", f"default, {', '.join(SCALINGS)} (fixed frequencies)"
        )
    for key in SCALINGS[kind]:
        number = parameters.get(key)
        if isinstance(number, bool) or not isinstance(number, int | float) or not number > 0:
            raise BadInput(f"{name}.{key} is {number!r}", "a number above 0")


def _check_numbers(convention: Convention) -> None:
    """Refuse values under which no drafter can be computed, wherever they came from."""

    def refuse(name: str, expected: str) -> NoReturn:
        raise BadInput(f"{name} is {getattr(convention, name)}", expected)

    if not 0 < convention.rope_theta < math.inf:
        refuse("rope_theta", "a number above 0")
    if convention.rotary_width < 2 or convention.rotary_width % 2:
        refuse("rotary_width", "an even number above 0")
    if any(width is not None and width < 1 for width in convention.window):
        refuse("window", "at least 1 token, or none")
    for name in ("embedding_scale", "logit_scale"):
        if not math.isfinite(getattr(convention, name)) or not getattr(convention, name):
            refuse(name, "a finite number other than 0")
    if convention.softcap is not None and not 0 < convention.softcap < math.inf:
        refuse("softcap", "a number above 0, or none")
    if convention.rope_scaling is not None:
        check_scaling("rope_scaling", json.loads(convention.rope_scaling))


_PER_LAYER = ("in_block", "window")
_WORDS = {"true": "once", "false": "skipped"}
"""What an answer of yes or no means for a norm."""


def _parse(name: str, text: str, old: Any) -> Any:
    """Read ``text`` as the type that field ``name`` has."""
    kind = Convention.__dataclass_fields__[name].type
    try:
        if name in _PER_LAYER:
            parts = [p.strip() for p in text.strip("[]()").split(",")]
            read = (lambda p: p) if name == "in_block" else _int_or_none
            values = tuple(read(p) for p in parts)
            return values * len(old) if len(values) == 1 else _same_length(name, values, old)
        if name == "layer_ids":
            return tuple(int(p) for p in text.strip("[]()").split(","))
        if name == "rope_scaling":
            return None if _is_none(text) else json.dumps(json.loads(text), sort_keys=True)
        if name in ("feature_norm", "final_norm"):
            return _WORDS.get(text.lower(), text)
        if str(kind) == "bool":
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if str(kind) == "int":
            return int(text)
        if str(kind).startswith("float"):
            return None if _is_none(text) and "None" in str(kind) else float(text)
    except (ValueError, KeyError) as error:
        raise BadInput(f"--set {name}={text}", f"a value of type {kind}") from error
    return text


def _same_length(name: str, values: tuple[Any, ...], old: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(values) != len(old):
        raise BadInput(f"--set {name} has {len(values)} values", f"1 or {len(old)} (draft layers)")
    return values


def _is_none(text: str) -> bool:
    return text.lower() in {"none", "null", ""}


def _int_or_none(text: str) -> int | None:
    return None if _is_none(text) else int(text)
