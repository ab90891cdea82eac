"""Which kind of DFlash drafter a checkpoint is: told by the tensors that plain DFlash lacks.

DFlash2 chooses tokens with a learned selector and DSpark with a Markov head. Domino and XPress
correct the logits in ways that are not computed here; without the correction they would score as
something that nobody trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

from dflash_diag.checkpoints.keys import (
    Value,
    architectures,
    declared,
    draft_value,
    first,
    is_int,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.conventions import Source
from dflash_diag.errors import CheckpointError

Name = Literal["plain", "dflash2", "dspark", "domino", "xpress"]
TENSORS: dict[Name, re.Pattern[str]] = {
    "domino": re.compile(r"(prefix_gru|embed_proj)\..+"),
    "xpress": re.compile(
        r"(refiner_head\.)?(token_embed|down_[hg]|in_proj|mix_l|mlp_\w+|readout)(\.weight)?"
    ),
    "dflash2": re.compile(r"candidate_selector\..+|layers\.\d+\.(attention|mlp)_conv\..+"),
    "dspark": re.compile(r"(markov_head|confidence_head)\..+"),
}
"""Tensors, under their canonical names, that only one kind has."""
PLAIN = (None, "dflash", "mlp", "linear")
"""Projector or model types of a drafter without parts of its own."""
_ARCHITECTURES: dict[str, Name] = {
    "DFlash2": "dflash2",
    "Domino": "domino",
    "XPress": "xpress",
    "DSparkDraftModel": "dspark",
}
"""Marks in the names of model classes. DeepSpec calls its own DSpark whatever they are."""
_SELECTOR = "candidate_selector."
_MARKOV = "markov_head."


class Variant(NamedTuple):
    """A kind of drafter, and what says so."""

    name: Name
    sign: str


def variant(checkpoint: Checkpoint) -> Variant:
    """The kind of drafter, by its tensors first and its configuration second."""
    for name, pattern in TENSORS.items():
        found = [one for one in checkpoint.tensors if pattern.fullmatch(one)]
        if found:
            return Variant(name, _named(found))
    kind, key = first(checkpoint.config, "speculators_model_type", "dflash_config.projector_type",
                      "projector_type")  # fmt: skip
    for name in TENSORS:
        if kind == name:
            return Variant(name, key)
    if kind not in PLAIN:
        raise CheckpointError(f"{key} is {kind!r}", f"{', '.join(TENSORS)}, or a plain drafter")
    for one in architectures(checkpoint.config):
        for mark, name in _ARCHITECTURES.items():
            if mark in one:
                return Variant(name, f"the architecture {one}")
    rank, key = draft_value(checkpoint.config, "markov_rank")
    if is_int(rank) and rank > 0:
        return Variant("dspark", key)
    return Variant("plain", "no tensor of another kind")


def _named(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


_REFUSED: dict[str, str] = {
    "domino": "a Domino drafter: its GRU corrects each slot's logits by the tokens before it, and "
    "in training the weight of the uncorrected logits fell to 0",
    "xpress": "an XPress drafter: its refiner corrects each slot's logits by the tokens before it",
}


def refuse_unscorable(checkpoint: Checkpoint) -> None:
    """Refuse a kind whose proposals cannot be computed here.

    Raises
    ------
    CheckpointError
        A Domino or XPress drafter: its plain logits alone are not what it proposes.
    """
    kind = variant(checkpoint)
    if kind.name in _REFUSED:
        raise CheckpointError(
            f"{kind.sign}: {_REFUSED[kind.name]}",
            "a DFlash, DFlash2 or DSpark drafter",
            "scored without it, its numbers would be of a drafter that no server runs",
        )


def proposal(checkpoint: Checkpoint) -> Value:
    """The step from hidden states to tokens that the checkpoint is made for."""
    kind, (rank, key) = variant(checkpoint), markov_rank(checkpoint)
    holds = {prefix: any(n.startswith(prefix) for n in checkpoint.tensors)
             for prefix in (_SELECTOR, _MARKOV)}  # fmt: skip
    if kind.name == "dflash2" and (holds[_SELECTOR] or declares_dflash2(checkpoint)):
        return declared("selector", kind.sign)
    if kind.name == "dspark":
        if holds[_MARKOV] or rank:
            return declared("markov", kind.sign)
        return declared("argmax", key)
    return Value("argmax", Source(kind.sign, "implied"))


def declares_dflash2(checkpoint: Checkpoint) -> bool:
    """Whether the configuration, and not only a tensor, says DFlash2."""
    return (
        any("DFlash2" in name for name in architectures(checkpoint.config))
        or checkpoint.config.get("speculators_model_type") == "dflash2"
        or draft_value(checkpoint.config, "selector_rank")[0] is not None
    )


def markov_rank(checkpoint: Checkpoint) -> tuple[int, str]:
    """Rank of DSpark's Markov head as configured, and the key; 0 is a drafter without one.

    Where no key says so, speculators' class has rank 256, and all others have none.
    """
    rank, key = draft_value(checkpoint.config, "markov_rank")
    if rank is None:
        return (256 if "speculators_model_type" in checkpoint.config else 0), f"no {key}"
    if not is_int(rank) or rank < 0:
        raise CheckpointError(f"{key} is {rank!r}", "a whole number, 0 for no Markov head")
    return rank, key
