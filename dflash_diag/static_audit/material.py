"""What a static check reads, and what it says.

Symbols: H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor

from dflash_diag.checkpoints import Checkpoint, TensorProblem
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter
from dflash_diag.static_audit.ablation import Sample

Severity = Literal["fail", "warn", "note"]


@dataclass(frozen=True)
class StaticFinding:
    """One thing found."""

    cause: str
    """Its id in the catalogue of causes."""
    severity: Severity
    """``fail``: the reading is broken. ``warn``: some stack loses by it. ``note``: no fault."""
    text: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Checked:
    """What one check has to say."""

    check: str
    found: str
    """What there is, in words."""
    expected: str
    findings: Sequence[StaticFinding] = ()
    untested: Sequence[str] = ()
    """Parts that could not be looked at, and why."""
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """What is known of a target's tokenizer."""

    size: int
    """One more than its highest id."""
    special: Mapping[str, int]
    """Ids of ``eos``, ``bos``, ``pad``, ``unk`` and ``mask``, as far as it has them."""

    @classmethod
    def of(cls, tokenizer: Any) -> TokenizerFacts:
        """The facts of a transformers tokenizer."""
        ids = {name: getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
        return cls(
            size=max(tokenizer.get_vocab().values()) + 1,
            special={name: int(i) for name, i in ids.items() if i is not None},
        )


TABLES = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that a drafter usually borrows from its target."""
_SPECIAL = ("eos", "bos", "pad", "unk", "mask")


@dataclass(frozen=True, kw_only=True, eq=False)
class Material:
    """What is at hand. Everything but the checkpoint and its reading may be missing."""

    checkpoint: Checkpoint
    convention: Convention
    problems: Sequence[TensorProblem] = ()
    """What the audit of names and shapes found."""
    drafter: Drafter | None = None
    unloadable: str = "it was not loaded"
    """Why there is no drafter."""
    sample: Sample | None = None
    """Blocks on which tensors are silenced; random ones by default."""
    target: Mapping[str, Any] = field(default_factory=dict)
    """``hidden_size``, ``n_layers``, ``vocab_size``, ``max_positions``, ``eos_token_ids``."""
    embedding: Tensor | None = None
    """[V, H] the target's."""
    head: Tensor | None = None
    """[V, H] the target's."""
    tokenizer: TokenizerFacts | None = None
    texts: Sequence[Tensor] = ()
    """Token ids of the run's prompts and continuations."""

    @property
    def body(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the drafter's transformer."""
        nested = self.checkpoint.config.get("transformer_layer_config")
        return nested if isinstance(nested, Mapping) else self.checkpoint.config

    def declared(self, *names: str) -> dict[str, Any]:
        """Values of some keys, wherever in the configuration they are, by their full name."""
        config = self.checkpoint.config
        places: dict[str, Any] = {"": config}
        places |= {f"{k}.": config.get(k) for k in _NESTED}
        return {
            f"{place}{name}": values[name]
            for place, values in places.items()
            if isinstance(values, Mapping)
            for name in names
            if values.get(name) is not None
        }

    def stated(self, name: str) -> bool:
        """Whether the files state a field of the reading, rather than leave it to a default."""
        source = self.convention.sources.get(name)
        return source is not None and source.confidence != "default"

    def overridden(self, name: str) -> bool:
        """Whether a field of the reading was set by hand."""
        source = self.convention.sources.get(name)
        return source is not None and source.confidence == "override"

    @property
    def n_layers(self) -> int | None:
        """Layers of the target, by itself or as the checkpoint declares them."""
        declared = self.declared("num_target_layers", "target_num_hidden_layers").values()
        value = self.target.get("n_layers") or next(iter(declared), None)
        return value if isinstance(value, int) else None


_NESTED = ("dflash_config", "eagle_config", "transformer_layer_config")


def listed(items: Iterable[Any], most: int = 8) -> str:
    """Some things in words, at most so many by name."""
    names = [str(one) for one in items]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
