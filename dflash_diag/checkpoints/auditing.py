"""Which tensors are missing, unexpected or of the wrong shape, and the likeliest reason for each.

What is expected follows from the configuration and the kind of drafter; where it is silent about a
size, the tensors decide and only have to agree with one another. Symbols: H hidden size, K tapped
layers, L draft layers, h heads, g key/value heads, d head width, M size of the MLP, V and V_d the
target's and the drafter's vocabulary, r rank, C taps of a convolution.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dflash_diag.checkpoints.facts import TargetFacts
from dflash_diag.checkpoints.keys import (
    declared_target_hidden,
    draft_value,
    first,
    head_width,
    is_int,
    is_on,
    n_draft_layers,
    positive,
)
from dflash_diag.checkpoints.reading import Checkpoint
from dflash_diag.checkpoints.stacks import speculators, vllm, zlab
from dflash_diag.checkpoints.stacks.common import StackName
from dflash_diag.checkpoints.stacks.detecting import Stack, detect_stack
from dflash_diag.checkpoints.variants import TENSORS, declares_dflash2, markov_rank, variant
from dflash_diag.checkpoints.vocabulary import draft_vocabulary
from dflash_diag.conventions import Convention
from dflash_diag.errors import CheckpointError

Shape = tuple[int, ...]
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class TensorProblem:
    """One tensor that is not as the configuration says."""

    name: str
    kind: Literal["missing", "unexpected", "misshapen"]
    found: str | None
    expected: str | None
    reason: str

    def __str__(self) -> str:
        sizes = f" {self.found}, expected {self.expected}" if self.kind == "misshapen" else ""
        return f"{self.name} is {self.kind}{sizes} ({self.reason})"


_COPIES = (r"embed_tokens\.weight", r"lm_head\.weight")
_CARRIED: Mapping[StackName, tuple[str, ...]] = {
    "speculators": (*_COPIES, "[dt]2[dt]", r"verifier_(norm|lm_head)\.weight"),
    "vllm": (*_COPIES, "[dt]2[dt]"),
    "deepspec": _COPIES,
    "speco": _COPIES,
}
"""Tensors that a stack stores beside those that its reading uses."""
_IN_TRAINING_STATES = (*_COPIES, r"(.*\.)?rotary_emb\.(original_)?inv_freq")
"""Copies of the target's embedding and head, and RoPE buffers, in any raw training file."""


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    hidden: int
    target_hidden: int
    n_taps: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head: int
    mlp: int
    bias: bool
    vocabulary: int | None
    draft_vocabulary: int | None


def audit(
    checkpoint: Checkpoint,
    facts: TargetFacts | None = None,
    *,
    convention: Convention | None = None,
) -> list[TensorProblem]:
    """Compare a checkpoint's tensors with what its configuration says.

    Parameters
    ----------
    facts
        The target, if at hand: ``fc`` reads states of its width.
    convention
        The reading, if it overrides the configuration's tapped layers.

    Returns
    -------
    list of TensorProblem
        Empty when every tensor is there, has its shape, and none is left over. Missing and
        misshapen ones come first, in the drafter's order.

    Raises
    ------
    CheckpointError
        The configuration lacks a size without which nothing can be expected.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    stack = detect_stack(checkpoint)
    sizes = _sizes(checkpoint, shapes, facts, _n_taps(checkpoint, stack, convention))
    expected = _expected(sizes) | _expected_beside(checkpoint, stack, shapes, sizes, convention)
    problems = [
        problem
        for name, shape in expected.items()
        if (problem := _judge(name, shape, shapes, checkpoint, sizes)) is not None
    ]
    carried = re.compile("|".join(_carried(checkpoint, stack)) or r"(?!)")
    problems += [
        TensorProblem(name, "unexpected", str(list(shape)), None, _why_unexpected(name, sizes))
        for name, shape in shapes.items()
        if name not in expected and not carried.fullmatch(name)
    ]
    return problems


def _carried(checkpoint: Checkpoint, stack: Stack) -> tuple[str, ...]:
    """Patterns of tensors that may be there and are not used."""
    patterns = _CARRIED.get(stack.name, ())
    if variant(checkpoint).name == "dspark":
        patterns += (r"confidence_head\..+",)  # when to stop drafting, not what to draft
    return patterns + (_IN_TRAINING_STATES if checkpoint.kind == "raw" else ())


def _n_taps(checkpoint: Checkpoint, stack: Stack, convention: Convention | None) -> int:
    if convention:
        return len(convention.layer_ids)
    found = stack.reader.fields["layer_ids"](checkpoint)
    if found is None:
        raise CheckpointError("the configuration lists no tapped layers", "a list of layer numbers")
    return len(found.value)


def _sizes(
    checkpoint: Checkpoint,
    shapes: Mapping[str, Shape],
    facts: TargetFacts | None,
    n_taps: int,
) -> _Sizes:
    config = checkpoint.body
    n_layers = n_draft_layers(checkpoint)
    hidden, head = positive(config, "hidden_size"), head_width(checkpoint)
    heads = positive(config, "num_attention_heads")

    def rows(name: str, unit: int, otherwise: int) -> int:
        shape = shapes.get(f"layers.0.{name}")
        return shape[0] // unit if shape and shape[0] >= unit else otherwise

    stated = draft_vocabulary(checkpoint)
    silent_kv = config.get("num_key_value_heads") is None
    silent_mlp = config.get("intermediate_size") is None
    return _Sizes(
        hidden=hidden,
        target_hidden=facts.hidden_size if facts else declared_target_hidden(checkpoint),
        n_taps=n_taps,
        n_layers=n_layers,
        n_heads=heads,
        n_kv_heads=rows("self_attn.k_proj.weight", head, heads)
        if silent_kv
        else positive(config, "num_key_value_heads"),
        head=head,
        mlp=rows("mlp.gate_proj.weight", 1, 4 * hidden)
        if silent_mlp
        else positive(config, "intermediate_size"),
        bias=is_on(config, "attention_bias"),
        vocabulary=facts.vocab_size if facts else _count(config.get("vocab_size")),
        draft_vocabulary=stated[0] if stated else None,
    )


def _count(value: object) -> int | None:
    return value if is_int(value) and value > 0 else None


def _expected(s: _Sizes) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "fc.weight": (s.hidden, s.n_taps * s.target_hidden),
        "hidden_norm.weight": (s.hidden,),
    }
    q, kv = s.n_heads * s.head, s.n_kv_heads * s.head
    for layer in range(s.n_layers):
        attention = f"layers.{layer}.self_attn."
        outputs = {"q_proj": q, "k_proj": kv, "v_proj": kv, "o_proj": s.hidden}
        for name, rows in outputs.items():
            shapes[f"{attention}{name}.weight"] = (rows, q if name == "o_proj" else s.hidden)
            if s.bias:
                shapes[f"{attention}{name}.bias"] = (rows,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{attention}{name}.weight"] = (s.head,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"layers.{layer}.mlp.{name}.weight"] = (s.mlp, s.hidden)
        shapes[f"layers.{layer}.mlp.down_proj.weight"] = (s.hidden, s.mlp)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{layer}.{name}.weight"] = (s.hidden,)
    shapes["norm.weight"] = (s.hidden,)
    return shapes


def _expected_beside(
    checkpoint: Checkpoint,
    stack: Stack,
    shapes: Mapping[str, Shape],
    s: _Sizes,
    convention: Convention | None,
) -> dict[str, Shape]:
    """Tensors beyond the plain drafter's: an own vocabulary, DFlash2's parts, a Markov head."""
    found: dict[str, Shape] = {}
    reduced = _read(checkpoint, stack, "vocabulary_map", convention) != "none"
    known, mapped, embedded = (
        (shapes.get(name) or (0,))[0] for name in ("lm_head.weight", "d2t", "embed_tokens.weight")
    )
    rows = (s.draft_vocabulary or known or mapped) if reduced else (s.vocabulary or known)
    if reduced:
        found["d2t"] = (rows,)
    if _read(checkpoint, stack, "embedding", convention) == "own":
        found["embed_tokens.weight"] = (s.vocabulary or embedded, s.hidden)
    if reduced or _read(checkpoint, stack, "head", convention) == "own":
        found["lm_head.weight"] = (rows, s.hidden)
    steps = {_read(checkpoint, stack, "proposal", one) for one in (None, convention)}
    kind = variant(checkpoint).name
    if kind == "dflash2" and (declares_dflash2(checkpoint) or any("_conv." in n for n in shapes)):
        found |= _convolutions(checkpoint, shapes, s)
    if "selector" in steps:
        found |= _selector(checkpoint, shapes, s)
    if "markov" in steps:
        found |= _markov(checkpoint, shapes, s, rows)
    return found


def _read(checkpoint: Checkpoint, stack: Stack, name: str, convention: Convention | None) -> str:
    """A field of the convention at hand, else as the stack reads it."""
    if convention is not None:
        return str(getattr(convention, name))
    look = stack.reader.fields.get(name)
    value = look(checkpoint) if look else None
    return str(value.value if value else getattr(Convention, name))


def _size(checkpoint: Checkpoint, key: str, shape: Shape, axis: int, otherwise: int) -> int:
    """A size by its key, else by a tensor's shape, else the default of all stacks."""
    value, path = draft_value(checkpoint.config, key)
    if value is not None:
        return positive({path: value}, path)
    return shape[axis] if len(shape) > axis and shape[axis] else otherwise


def _convolutions(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], s: _Sizes
) -> dict[str, Shape]:
    one = "layers.0.attention_conv."
    taps = _size(checkpoint, "conv_kernel_size", shapes.get(f"{one}base_kernel", ()), 1, 2)
    projected = shapes.get(f"{one}kernel_projection.weight", ())
    by_tensor = 2 * taps * s.hidden // projected[0] if projected and projected[0] else 16
    group = _size(checkpoint, "conv_group_size", (by_tensor,), 0, 16)
    found: dict[str, Shape] = {}
    for layer in range(s.n_layers):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}."
            found[f"{name}base_kernel"] = (2, taps, s.hidden)
            found[f"{name}kernel_projection.weight"] = (2 * taps * s.hidden // group, s.hidden)
    return found


def _selector(checkpoint: Checkpoint, shapes: Mapping[str, Shape], s: _Sizes) -> dict[str, Shape]:
    name = "candidate_selector."
    codes = shapes.get(f"{name}predecessor_codebook", ())
    rank = _size(checkpoint, "selector_rank", codes, 1, 256)
    rows = s.vocabulary or (codes[0] if codes else 0)
    return {
        f"{name}predecessor_codebook": (rows, rank),
        f"{name}successor_codebook": (rows, rank),
        f"{name}hidden_projection.weight": (rank, s.hidden),
    }


def _markov(
    checkpoint: Checkpoint, shapes: Mapping[str, Shape], s: _Sizes, head_rows: int
) -> dict[str, Shape]:
    name = "markov_head."
    before, after = shapes.get(f"{name}markov_w1", ()), shapes.get(f"{name}markov_w2", ())
    rank = markov_rank(checkpoint)[0] or (before[1] if len(before) > 1 else 1)
    rows = s.vocabulary or (before[0] if before else 0)
    found: dict[str, Shape] = {
        f"{name}markov_w1": (rows, rank),
        f"{name}markov_w2": (head_rows or (after[0] if after else rows), rank),
    }
    heads: dict[str, tuple[str, Shape]] = {
        "gated": ("gate_proj", (rank, s.hidden + rank)),
        "rnn": ("joint_proj", (3 * rank, 2 * rank + s.hidden)),
    }
    kind, key = draft_value(checkpoint.config, "markov_head_type")
    if kind not in (None, "vanilla", *heads):
        raise CheckpointError(f"{key} is {kind!r}", f"vanilla, {', '.join(heads)}")
    held = [one for one, (part, _) in heads.items() if f"{name}{part}.weight" in shapes]
    for wanted, (part, shape) in heads.items():
        if wanted in (held or [kind]):
            found[f"{name}{part}.weight"] = shape
            if f"{name}{part}.bias" in shapes:
                found[f"{name}{part}.bias"] = shape[:1]
    return found


def _judge(
    name: str, shape: Shape, shapes: Mapping[str, Shape], checkpoint: Checkpoint, sizes: _Sizes
) -> TensorProblem | None:
    expected = str(list(shape))
    if name not in shapes:
        return TensorProblem(name, "missing", None, expected, _why_missing(name, shapes, sizes))
    found = shapes[name]
    if found != shape:
        reason = _why_misshapen(name, found, shape, shapes, checkpoint, sizes)
        return TensorProblem(name, "misshapen", str(list(found)), expected, reason)
    dtype = checkpoint.tensors[name].dtype
    if dtype not in READABLE and name != "d2t":
        kind = str(dtype).removeprefix("torch.")
        reason = "quantised weights are not read; use the checkpoint from before quantisation"
        return TensorProblem(name, "misshapen", f"{kind} {expected}", expected, reason)
    return None


_LAYER = re.compile(r"layers\.(\d+)\.")


def _n_layers_held(shapes: Mapping[str, Shape]) -> int:
    return 1 + max((int(m[1]) for name in shapes if (m := _LAYER.match(name))), default=-1)


def _why_missing(name: str, shapes: Mapping[str, Shape], sizes: _Sizes) -> str:
    held = _n_layers_held(shapes)
    if (layer := _LAYER.match(name)) and int(layer[1]) >= held:
        return f"the file holds {held} layers, num_hidden_layers is {sizes.n_layers}"
    if name.endswith(".bias"):
        return "attention_bias is true, the file holds no such bias"
    alike = next((n for n in shapes if n.endswith(f".{name}")), None)
    if alike:
        return f"the file holds {alike}, under a prefix that is not known"
    if name == "fc.weight":
        return "not a DFlash drafter, or its projection of the tapped layers was not saved"
    if "norm" in name:
        return "a norm that was not saved, or a drafter trained without it"
    return "not in the file: incomplete save, or a missing shard"


def _why_misshapen(
    name: str,
    found: Shape,
    expected: Shape,
    shapes: Mapping[str, Shape],
    checkpoint: Checkpoint,
    s: _Sizes,
) -> str:
    if len(found) != len(expected):
        return f"it has {len(found)} dimensions"
    hidden = shapes.get("hidden_norm.weight", shapes.get("norm.weight", ()))
    if name == "fc.weight":
        return _why_fc(found, checkpoint, s)
    if len(hidden) == 1 and hidden[0] != s.hidden and hidden[0] in found:
        return f"the tensors' hidden size is {hidden[0]}, hidden_size is {s.hidden}"
    if found == expected[::-1]:
        return "it is transposed"
    part = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if part in ("q_norm", "k_norm"):
        return f"the tensor's head width is {found[0]}, head_dim is {s.head}"
    if part in ("q_proj", "k_proj", "v_proj", "o_proj"):
        rows = found[1] if part == "o_proj" else found[0]
        key, n = (
            ("num_key_value_heads", s.n_kv_heads)
            if part in ("k_proj", "v_proj")
            else ("num_attention_heads", s.n_heads)
        )
        norm = shapes.get(f"{name.rsplit('.', 2)[0]}.q_norm.weight", ())
        width = norm[0] if len(norm) == 1 and norm[0] else s.head
        if rows % width == 0 and (rows // width, width) != (n, s.head):
            return (
                f"the tensor has {rows // width} heads of {width}, "
                f"{key} is {n} and head_dim is {s.head}"
            )
        return f"{rows} is no multiple of the head width {width}"
    if part in ("gate_proj", "up_proj", "down_proj"):
        size = found[1] if part == "down_proj" else found[0]
        return f"the tensor's MLP size is {size}, intermediate_size is {s.mlp}"
    return "made with other sizes than the configuration's"


def _why_fc(found: Shape, checkpoint: Checkpoint, s: _Sizes) -> str:
    """Columns of fc [H, K*H_target] tell how many layers, and of what width, it was trained on."""
    rows, columns = found
    ids, listed = first(checkpoint.config, *vllm.IDS, speculators.IDS, *zlab.IDS)
    says = f"{listed} lists {s.n_taps}"
    if ids is None:
        says = f"no key lists the tapped layers, and the default rule picks {s.n_taps}"
    declared = declared_target_hidden(checkpoint)
    if columns == s.n_taps * declared != s.n_taps * s.target_hidden:
        return (
            f"fc reads taps of width {declared}, the target's hidden size is {s.target_hidden}: "
            "a drafter of another target"
        )
    if columns % s.target_hidden == 0 and columns // s.target_hidden != s.n_taps:
        n = columns // s.target_hidden
        return f"fc expects {n} tap{'s' * (n != 1)}, {says}"
    if rows != s.hidden:
        return f"the tensors' hidden size is {rows}, hidden_size is {s.hidden}"
    if columns % s.n_taps == 0:
        return (
            f"fc reads taps of width {columns // s.n_taps}, the target's hidden size is "
            f"{s.target_hidden}: a drafter of another target"
        )
    return f"{columns} columns are no multiple of the target's hidden size {s.target_hidden}"


_VARIANTS = (
    (r".*\.(attention_conv|mlp_conv)\..*", "DFlash2 convolution"),
    (r"candidate_selector\..*", "DFlash2 candidate selector"),
    (r"(markov_head|confidence_head)\..*", "DSpark head"),
    (TENSORS["domino"].pattern, "Domino GRU head"),
    (TENSORS["xpress"].pattern, "XPress refiner"),
    (r"(.*\.)?(aux_hidden_norms|g_proj)\b.*", "Laguna gate or norm"),
)


def _why_unexpected(name: str, s: _Sizes) -> str:
    if (layer := _LAYER.match(name)) and int(layer[1]) >= s.n_layers:
        return f"num_hidden_layers is {s.n_layers}: the file holds more layers"
    for pattern, what in _VARIANTS:
        if re.fullmatch(pattern, name):
            return f"a {what}: another kind of drafter, which this reading would silently drop"
    if name in ("embed_tokens.weight", "lm_head.weight"):
        return "a copy of the target's embedding or head, or a trained one; the target's is used"
    if name in ("d2t", "t2d"):
        return "the map of a reduced vocabulary, which this layout does not have"
    if name.endswith("inv_freq"):
        return "a RoPE buffer, which is computed from the configuration"
    if "lora_" in name:
        return "a LoRA adapter that was not merged"
    if re.search(r"scale|zero|qweight|absmax|quant|g_idx", name):
        return "part of a quantised weight"
    if name.endswith(".bias"):
        return "attention_bias is false, and no other layer of a drafter has a bias"
    return "no such tensor in a DFlash drafter; it would not be used"
