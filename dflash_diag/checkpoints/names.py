"""From the names under which trainers store a drafter's tensors to the drafter's own names.

Canonical names, on which everything else relies:

====================================================== ==========================================
name                                                   shape
====================================================== ==========================================
``fc.weight``                                          [H, K*H_t]
``hidden_norm.weight``, ``norm.weight``                [H]
``layers.{i}.…``                                       as transformers' Qwen3 names them
``layers.{i}.attention_conv.base_kernel``              [2, C, H]; so too ``mlp_conv``
``layers.{i}.attention_conv.kernel_projection.weight`` [2*C*H/group, H]; so too ``mlp_conv``
``candidate_selector.predecessor_codebook``            [V, r]
``candidate_selector.successor_codebook``              [V, r]
``candidate_selector.hidden_projection.weight``        [r, H]
``markov_head.markov_w1``                              [V, r]
``markov_head.markov_w2``                              [V_d, r]
``markov_head.gate_proj.weight``                       [r, H + r], gated head; ``.bias`` [r]
``markov_head.joint_proj.weight``                      [3*r, 2*r + H], recurrent; ``.bias`` [3*r]
``confidence_head.proj.weight``                        [1, H] or [1, H + r]; ``.bias`` [1]
``embed_tokens.weight``                                [V, H], an own embedding
``lm_head.weight``                                     [V_d, H], an own head
``d2t``, ``t2d``                                       [V_d], [V], a reduced vocabulary
====================================================== ==========================================

H hidden size, H_t the target's, K tapped layers, V and V_d the target's and the drafter's
vocabulary, r rank, C taps of a convolution. Convolutions and selector are DFlash2's, Markov and
confidence head DSpark's. Codebooks and Markov matrices have no ``.weight``, though most stacks
store them as modules that add one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash_diag.checkpoints.placeholders import Record, TensorRef, as_mapping
from dflash_diag.errors import CheckpointError

WRAPPERS = ("module.", "_orig_mod.", "draft_model.", "dflash_module.", "model.")
"""Prefixes that wrappers and training modules put before a drafter's names, in any order."""
INNER_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""The same in the middle of a name, where single layers were wrapped."""
DRAFTER_WRAPPERS = ("draft_model.", "dflash_module.")
"""Prefixes that tell the drafter's tensors from those of a target saved beside it."""
_SPECIFIC = ("draft_state_dict", "draft_model", "drafter")
"""Keys that say which one is meant, where a file holds a second copy such as a moving average."""
CONTAINERS = (*_SPECIFIC, "model_state_dict", "state_dict", "model", "module")
"""Keys under which trainers nest a state dict, the most specific first."""
LANDMARKS = ("fc.weight", "hidden_norm.weight")
"""Tensors that a DFlash drafter has, and few other models."""


_SPELLINGS = (
    (r"logit_head\.(?=(prefix_gru|embed_proj|markov_head|confidence_head)\.)", ""),
    (r"(?=markov_w[12]\b|(gate|joint)_proj\.)", "markov_head."),
    (r"confidence_proj\.", "confidence_head.proj."),
    (r"(markov_head\.markov_w[12]|candidate_selector\.(predecessor|successor)_codebook)\.weight$",
     r"\1"),
)  # fmt: skip
"""Other spellings of canonical names, by the start of a name and what it becomes: early SpecForge
nested its heads, Model-Optimizer exports DSpark's without their module."""


def clean_name(name: str) -> str:
    """The canonical name: without wrappers, in one spelling."""
    for inner in INNER_WRAPPERS:
        name = name.replace(inner, "")
    changed = True
    while changed:
        changed = False
        for wrapper in WRAPPERS:
            if name.startswith(wrapper):
                name, changed = name[len(wrapper) :], True
    for pattern, canonical in _SPELLINGS:
        if found := re.match(pattern, name):
            name = found.expand(canonical) + name[found.end() :]
    return name


def clean_names(stored: Iterable[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Clean name to stored name, and the stored names that belong to another model.

    Where some names carry a prefix that marks the drafter, the others are the target's or the
    trainer's own.

    Raises
    ------
    CheckpointError
        Two stored names are the same tensor's once cleaned.
    """
    stored = list(stored)
    marked = [n for n in stored if any(w in f".{n}" for w in _dotted(DRAFTER_WRAPPERS))]
    beside = [n for n in stored if n not in set(marked)] if marked else []
    out: dict[str, str] = {}
    for name in marked or stored:
        clean = clean_name(name)
        if clean in out:
            raise CheckpointError(
                f"{where} holds both {out[clean]} and {name}", "one tensor a name"
            )
        out[clean] = name
    return out, beside


def _dotted(prefixes: Iterable[str]) -> Iterator[str]:
    return (f".{p}" for p in prefixes)


def find_state_dict(content: Any, path: str) -> tuple[str, dict[str, TensorRef]]:
    """The drafter's state dict in what a training file holds, and the keys that lead to it.

    Raises
    ------
    CheckpointError
        There is none, or several that could be meant.
    """
    if isinstance(content, Record) and as_mapping(content) is None:
        raise CheckpointError(
            f"{path} holds a whole {content.of} object",
            "a state dict",
            "save model.state_dict() instead",
        )
    candidates = list(_candidates(content, (), set()))
    named = [c for c in candidates if all(key in CONTAINERS for key in c[0])]
    found = named or candidates
    if not found:
        keys = ", ".join(str(k)[:40] for k in list(as_mapping(content) or {})[:8])
        raise CheckpointError(
            f"{path} holds no drafter (its keys: {keys or type(content).__name__})",
            f"a state dict with {LANDMARKS[0]}, plain or under {', '.join(CONTAINERS)}",
        )
    found.sort(key=lambda candidate: [_rank(k) for k in candidate[0]])
    if len(found) > 1 and found[0][0][0] not in _SPECIFIC:
        where = ", ".join("/".join(candidate[0]) for candidate in found)
        raise CheckpointError(
            f"{path} holds several drafters ({where})",
            f"one, or one under {', '.join(_SPECIFIC)}",
        )
    at, values = found[0]
    broken = [n for n, v in values.items() if isinstance(v, Record)]
    if broken:
        raise CheckpointError(
            f"{path}: {broken[0]} is a {values[broken[0]].of}, not a plain tensor",
            "a full state dict",
            "gather sharded or quantised tensors before saving",
        )
    return "/".join(at), {n: v for n, v in values.items() if isinstance(v, TensorRef)}


def _candidates(
    value: Any, keys: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any]]]:
    """Mappings that look like a drafter's state dict, well-known keys first, each one once."""
    mapping = as_mapping(value)
    if mapping is None or len(keys) > 3 or id(mapping) in seen:
        return
    seen.add(id(mapping))
    if any(isinstance(n, str) and _is_landmark(n, v) for n, v in mapping.items()):
        yield keys, {n: v for n, v in mapping.items() if isinstance(n, str)}
        return
    for key in sorted((k for k in mapping if isinstance(k, str)), key=_rank):
        yield from _candidates(mapping[key], (*keys, key), seen)


def _rank(key: str) -> int:
    return CONTAINERS.index(key) if key in CONTAINERS else len(CONTAINERS)


def _is_landmark(name: str, value: Any) -> bool:
    return clean_name(name) in LANDMARKS and isinstance(value, TensorRef | Record)
