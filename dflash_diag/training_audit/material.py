"""One text on which a training step is tried: tokens, the target's states, anchors.

Symbols: T tokens, K layers, H hidden size, A anchors, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_diag.errors import BadInput

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.targets import Target

MOST_ANCHORS = 6
AHEAD = 20
"""Positions that are kept free behind the last anchor, where nobody says how many are proposed."""
SPARE = 4
"""Positions behind the last label, so that shifted labels exist."""
LONGEST = 1024
"""Tokens of the text that are used."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Material:
    """What is handed to a step, and what is known of the target beside it."""

    tokens: Tensor
    """[T] int64."""
    states: Tensor
    """[T, K, H] raw outputs of `layer_ids`."""
    layer_ids: tuple[int, ...]
    anchors: tuple[int, ...]
    """Ascending; every block has all its labels, and room behind them."""
    loss_mask: Tensor
    """[T] bool: what is trained on."""
    last_layer: int
    """Id of the target's last layer, whose states make its logits."""
    taps: tuple[int, ...] | None = None
    """Layers that the drafter declares to read; None where there is no drafter."""
    head: Tensor | None = None
    """[V, H] of the target."""
    text: str = "a text"
    """Where it is from, as part of a sentence."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.states.ndim != 3 or self.states.shape[:2] != (n, len(self.layer_ids)):
            raise BadInput(
                f"states {[*self.states.shape]}",
                f"[T, K, H] with T = {n} and the K = {len(self.layer_ids)} layers "
                f"{[*self.layer_ids]}",
            )
        if self.loss_mask.shape != (n,):
            raise BadInput(f"a loss mask {[*self.loss_mask.shape]}", f"[{n}], one for each token")
        if len(self.anchors) < 2 or sorted(set(self.anchors)) != list(self.anchors):
            raise BadInput(f"anchors {[*self.anchors]}", "two or more ascending positions")
        if self.anchors[0] < 4 or self.anchors[-1] >= n - 2:
            raise BadInput(
                f"anchors {self.anchors[0]} to {self.anchors[-1]}", f"positions from 4 to {n - 3}"
            )

    @property
    def is_last(self) -> list[int]:
        """Columns of `states` that hold the last layer."""
        return [i for i, layer in enumerate(self.layer_ids) if layer == self.last_layer]

    @classmethod
    def of_text(
        cls, tokens: Tensor, prefix: int, *, ahead: int | None = None, **more: Any
    ) -> Material:
        """Material of one text whose first ``prefix`` tokens are not trained on.

        Parameters
        ----------
        ahead
            D, where it is known.

        Raises
        ------
        BadInput
            The text is too short.
        """
        mask = torch.arange(len(tokens), device=tokens.device) >= prefix
        return cls(
            tokens=tokens.long(),
            loss_mask=mask,
            anchors=spread_anchors(prefix, len(tokens), ahead),
            **more,
        )

    @classmethod
    def of_capture(
        cls,
        capture: Capture,
        layer_ids: Sequence[int] | None,
        taps: Sequence[int] | None,
        ahead: int | None = None,
    ) -> Material:
        """The longest text of a capture.

        Parameters
        ----------
        layer_ids
            Columns of the states; by default ``taps`` and the last layer.

        Raises
        ------
        BadInput
            It keeps only some positions or not these layers, or its texts are too short.
        """
        if capture.thinned:
            raise BadInput(
                f"{capture.path} keeps only some positions",
                "a capture with the states of whole texts",
            )
        last = int(capture.target_facts["n_layers"]) - 1
        lengths = [len(capture.tokens(i)) for i in range(len(capture))]
        index = lengths.index(max(lengths))
        columns = columns_of(layer_ids, taps, last)
        tokens = capture.tokens(index)[:LONGEST]
        return cls.of_text(
            tokens,
            capture.prompts[index].n_prompt_tokens,
            ahead=ahead,
            states=capture.states(index, columns)[: len(tokens)],
            layer_ids=columns,
            last_layer=last,
            taps=None if taps is None else tuple(taps),
            head=None if capture.foreign else capture.head,
            text=f"prompt {capture.prompts[index].id} of the capture",
        )

    @classmethod
    def of_target(
        cls,
        target: Target,
        tokens: Tensor,
        prefix: int,
        layer_ids: Sequence[int] | None,
        taps: Sequence[int] | None,
        *,
        ahead: int | None = None,
        text: str = "a training text",
    ) -> Material:
        """One text, whose states the target computes here.

        Raises
        ------
        BadInput
            Tokens that the target does not have, or too few of them.
        """
        from dflash_diag.hidden_states import recorded, stacked, weight_of

        tokens = tokens.long()[:LONGEST]
        target.check_ids(text, tokens.tolist())
        last = target.n_layers - 1
        columns = columns_of(layer_ids, taps, last)
        with torch.no_grad(), recorded(target.parts, set(columns)) as kept:
            target.model(input_ids=tokens[None].to(target.device), use_cache=False)
        return cls.of_text(
            tokens.to(target.device),
            prefix,
            ahead=ahead,
            states=stacked(kept, columns),
            layer_ids=columns,
            last_layer=last,
            taps=None if taps is None else tuple(taps),
            head=weight_of(target.parts.head),
            text=text,
        )


def columns_of(
    layer_ids: Sequence[int] | None, taps: Sequence[int] | None, last: int
) -> tuple[int, ...]:
    """Layers of the states that are handed in: those named, or the taps and then the last one.

    Raises
    ------
    BadInput
        Neither was given, or layers that the target does not have.
    """
    if layer_ids is None and taps is None:
        raise BadInput(
            "nothing says which layers the step is to be given",
            "an attribute step.layers, or a drafter that names its taps",
        )
    columns = tuple(layer_ids) if layer_ids is not None else (*(taps or ()), last)
    if not all(isinstance(i, int) and -1 <= i <= last for i in columns):
        raise BadInput(
            f"step.layers {[*columns]}", f"ids of decoder layers, -1 (the embedding) to {last}"
        )
    return columns


def spread_anchors(prefix: int, length: int, ahead: int | None = None) -> tuple[int, ...]:
    """Anchors evenly spread behind ``prefix``, each with its labels and some room behind it.

    Raises
    ------
    BadInput
        There is no room for two.
    """
    first = max(prefix, 4)
    last = length - 1 - (AHEAD if ahead is None else ahead + SPARE)
    if last <= first:
        raise BadInput(
            f"a text of {length} tokens, {prefix} of them not trained on",
            f"room for two blocks: {first + 2 + length - last} tokens or more",
        )
    n = min(MOST_ANCHORS, last - first + 1)
    return tuple(sorted({first + round(i * (last - first) / (n - 1)) for i in range(n)}))


Step = Callable[..., Any]
"""``step(tokens, states, anchors, loss_mask, data_seed, noise_seed)``."""
