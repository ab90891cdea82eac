"""How the reader of a stack is put together, and the look-ups that stacks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dflash_diag.checkpoints import rope
from dflash_diag.checkpoints.keys import (
    Value,
    at,
    declared,
    draft_value,
    first,
    flag,
    is_int,
    n_draft_layers,
    number,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.variants import proposal, variant
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

Look = Callable[[Checkpoint], Value | None]
"""Finds one field in a checkpoint. None: the files are silent and the stack has no default."""
StackName = Literal[
    "zlab", "specforge", "speculators", "deepspec", "automodel", "modelopt", "speco", "vllm"
]


@dataclass(frozen=True)
class Reader:
    """What one stack's configuration means, field by field.

    A field without a look-up keeps the convention's own value, which the stack's code fixes.
    """

    name: StackName
    title: str
    fields: Mapping[str, Look]
    rope_of: str = ""
    """Layer type whose RoPE counts for all layers, where a configuration has one for each."""

    @property
    def code(self) -> Source:
        """Where values come from that no key states."""
        return Source(f"{self.title}'s code", "implied")


def always(value: Any, why: str) -> Look:
    """The same whatever the configuration says."""
    return lambda _: Value(value, Source(why, "implied"))


def nowhere(checkpoint: Checkpoint) -> None:
    """No default: what the files do not say has to be given."""
    del checkpoint


def bidirectional(who: str) -> Callable[[Checkpoint], Value]:
    """Every slot sees its whole block, in every layer."""

    def look(checkpoint: Checkpoint) -> Value:
        kinds = ("bidirectional",) * n_draft_layers(checkpoint)
        return Value(kinds, Source(f"{who}'s code", "implied"))

    return look


def full_attention(who: str) -> Look:
    """No window in any layer, whatever the layer types say."""

    def look(checkpoint: Checkpoint) -> Value:
        windows = (None,) * n_draft_layers(checkpoint)
        return Value(windows, Source(f"{who}'s code", "implied"))

    return look


def block_size(default: int, who: str, *paths: str) -> Look:
    """B, from the first of ``paths`` that holds it."""

    def look(checkpoint: Checkpoint) -> Value:
        value, key = first(checkpoint.config, *paths)
        if value is None:
            return Value(default, Source(f"{who}'s default", "default"))
        if not is_int(value) or value < 2:
            raise CheckpointError(f"{key} is {value!r}", "at least 2 (an anchor and a slot)")
        return declared(value, key)

    return look


def mask_token(*paths: str) -> Look:
    """The mask token's id, from the first of ``paths`` that holds it."""

    def look(checkpoint: Checkpoint) -> Value | None:
        value, key = first(checkpoint.config, *paths)
        if value is None:
            return None
        if not is_int(value) or value < 0:
            raise CheckpointError(
                f"{key} is {value!r}",
                "the id of the mask token",
                "give it with --set mask_token_id=…",
            )
        return declared(value, key)

    return look


def layer_ids(*paths: str, lowest: int, otherwise: Look) -> Look:
    """Tapped layers in the order in which ``fc`` reads them.

    Parameters
    ----------
    lowest
        The smallest id that means something: -1 where that is the embedding output, else 0.
    otherwise
        What the stack taps where none are listed.
    """

    def look(checkpoint: Checkpoint) -> Value | None:
        value, key = first(checkpoint.config, *paths)
        if value is None:
            return otherwise(checkpoint)
        return declared(checked_ids(value, key, lowest), key)

    return look


def checked_ids(value: Any, key: str, lowest: int) -> tuple[int, ...]:
    """A list of distinct layer numbers."""
    if not isinstance(value, list | tuple) or not value or not all(map(is_int, value)):
        raise CheckpointError(f"{key} is {value!r}", "a list of layer numbers")
    below = [i for i in value if i < lowest]
    if below:
        embedding = " (the embedding output)" if lowest < 0 else ""
        raise CheckpointError(f"{key} lists {below[0]}", f"layers from {lowest}{embedding} on")
    twice = [i for n, i in enumerate(value) if i in value[:n]]
    if twice:
        raise CheckpointError(f"{key} lists layer {twice[0]} twice", "each tapped layer once")
    return tuple(value)


def label_layout(by_code: Mapping[str, str], who: str, *, is_default: bool = False) -> Look:
    """Whether slots predict their own position or the next one.

    Parameters
    ----------
    by_code
        What the stack trains where no key says so, by kind of drafter; ``same`` for kinds that
        are not listed.
    is_default
        Whether that is a mere default, which other readers of the same files do not share.
    """

    def look(checkpoint: Checkpoint) -> Value:
        claims = layout_claims(checkpoint)
        if claims:
            key, layout = next(iter(claims.items()))
            return declared(layout, key)
        kind = variant(checkpoint).name
        layout = by_code.get(kind, "same")
        if is_default and kind == "dspark":
            return Value(layout, Source(f"{who}'s default", "default"))
        return Value(layout, Source(f"{who}'s code", "implied"))

    return look


def layout_claims(checkpoint: Checkpoint) -> dict[str, str]:
    """Every key that states the layout, the one in force first."""
    claims = {}
    for name, of_next in (
        ("sample_from_anchor", True),
        ("dspark_bonus_anchor", False),
        ("shift_label", True),
    ):
        for path in (f"dflash_config.{name}", name):
            value = at(checkpoint.config, path)
            if value is not None:
                claims[path] = "next" if flag(value, path) is of_next else "same"
    return claims


def scale(name: str) -> Look:
    """A factor that is 1 where no key states it."""

    def look(checkpoint: Checkpoint) -> Value:
        value, key = draft_value(checkpoint.config, name)
        return (
            Value(1.0, Source("", "default"))
            if value is None
            else declared(number(value, key), key)
        )

    return look


def softcap(checkpoint: Checkpoint) -> Value:
    """``final_logit_softcapping``, where 0 is none."""
    value, key = draft_value(checkpoint.config, "final_logit_softcapping")
    if value is None:
        return Value(None, Source("", "default"))
    cap = number(value, key)
    return declared(cap if cap > 0 else None, key)


def norm_style(checkpoint: Checkpoint) -> Value | None:
    """``use_gemma_norm``, which SGLang reads."""
    value = checkpoint.config.get("use_gemma_norm")
    if value is None:
        return None
    return declared("one_plus" if flag(value, "use_gemma_norm") else "plain", "use_gemma_norm")


def last_layer_normed(checkpoint: Checkpoint) -> Value:
    """False, as hooks capture it; whoever reads through transformers has it after the norm."""
    del checkpoint
    return Value(False, Source("", "default"))


SHARED: Mapping[str, Look] = {
    "last_layer_normed": last_layer_normed,
    "rope_theta": rope.theta,
    "rope_scaling": rope.scaling,
    "rotary_width": rope.width,
    "rope_interleaved": rope.interleaved,
    "norm_style": norm_style,
    "embedding_scale": scale("input_embedding_scale"),
    "logit_scale": scale("output_multiplier"),
    "softcap": softcap,
    "proposal": proposal,
}
"""Look-ups that are the same in every stack unless it says otherwise."""
