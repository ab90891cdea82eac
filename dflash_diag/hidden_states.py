"""Where a target keeps its decoder, and its hidden states by hooks that keep only what is wanted.

A hook hands each state on as soon as it exists, so that no layer stays on the GPU longer than its
copy to host memory takes.

Layer id j is the raw output of decoder layer j (0-based); -1 is what enters layer 0, the embedding
output. transformers' own ``hidden_states`` tuple would keep every layer, and returns the last one
after the final norm.

Shapes use T tokens, H hidden size, K layers kept.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dflash_diag.errors import BadInput

LayerMode = Literal["taps", "around", "all"]
LAYER_MODES = ("taps", "around", "all")

EMBEDDING = -1
"""The layer id of the embedding output."""
IN_FLIGHT = 4
"""Copies from a GPU that are under way at one time."""

_LAYER_LISTS = ("layers", "h", "blocks", "block")
_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f", "final_norm")
_NOT_TEXT = re.compile(r"visual|vision|image|audio|speech|encoder|mtp", re.IGNORECASE)


Sink = Callable[[int, Tensor], None]
"""Takes a layer id and that layer's states."""


@dataclass(frozen=True, eq=False)
class TargetParts:
    """The pieces of a causal language model that a drafter reads or borrows."""

    layers: nn.ModuleList
    path: str
    """Where the layers live: ``model.layers``, ``model.language_model.layers``, …"""
    embedding: nn.Embedding
    final_norm: Any
    head: nn.Linear
    tied: bool
    """Whether embedding and head are one tensor."""


def find_parts(model: Any) -> TargetParts:
    """Find the text decoder of a transformers model, under whatever names.

    The decoder layers are the list with as many entries as the text config has layers, outside
    vision, audio and multi-token-prediction parts.

    Raises
    ------
    BadInput
        No such list, or no embedding, final norm or head beside it.
    """
    n_layers = text_config(model).num_hidden_layers
    found = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == n_layers
        and path.rpartition(".")[2] in _LAYER_LISTS
        and not _NOT_TEXT.search(path)
    ]
    name = type(model).__name__
    if not found:
        raise BadInput(f"no list of {n_layers} decoder layers in {name}", "a causal language model")
    path = min(found, key=lambda p: p.count("."))
    decoder = model.get_submodule(path.rpartition(".")[0])
    norms = [getattr(decoder, n) for n in _FINAL_NORMS if hasattr(decoder, n)]
    if not norms:
        raise BadInput(
            f"no final norm beside {path} in {name}", f"one of {', '.join(_FINAL_NORMS)}"
        )
    head = model.get_output_embeddings()
    if head is None:
        raise BadInput(f"{name} has no language-model head", "a causal language model")
    embedding = model.get_input_embeddings()
    tied = embedding.weight is head.weight
    if "meta" in (embedding.weight.device.type, head.weight.device.type):
        # Offloaded weights are stood in for by tensors of their own, also where they are one.
        tied = any(getattr(c, "tie_word_embeddings", False) for c in configs(model))
    return TargetParts(
        layers=model.get_submodule(path),
        path=path,
        embedding=embedding,
        final_norm=norms[0],
        head=head,
        tied=tied,
    )


def text_config(model: Any) -> Any:
    """The configuration of the text decoder, also where a model has several."""
    return model.config.get_text_config(decoder=True)


def configs(model: Any) -> list[Any]:
    """The model's configuration and that of its text decoder, which may be the same."""
    return [model.config, text_config(model)]


def input_device(model: Any) -> torch.device:
    """Where a model's input goes: the device of its embedding, or of the hook that moves it there.

    A model that accelerate spread over devices keeps offloaded weights on the meta device.
    """
    embedding = model.get_input_embeddings()
    device = embedding.weight.device
    if device.type == "meta":
        device = torch.device(embedding._hf_hook.execution_device)  # noqa: SLF001
    return device


def weight_of(module: Any) -> Tensor:
    """The weight of a module, fetched from where it is offloaded to if it is."""
    weight: Tensor = module.weight
    if weight.device.type == "meta":
        from accelerate.utils import align_module_device

        with align_module_device(module, torch.device("cpu")):
            weight = module.weight
    return weight.detach()


@contextmanager
def tapped(parts: TargetParts, layer_ids: Iterable[int], sink: Sink) -> Iterator[None]:
    """Hand the states of ``layer_ids`` to ``sink`` during every forward inside the block.

    States are [N, T, H], in the order in which the forward makes them.
    """
    handles = []
    try:
        for layer_id in layer_ids:
            if layer_id == EMBEDDING:
                handles.append(
                    parts.layers[0].register_forward_pre_hook(_tap_input(sink), with_kwargs=True)
                )
            else:
                hook = _tap_output(sink, layer_id)
                handles.append(parts.layers[layer_id].register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def recorded(parts: TargetParts, layer_ids: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Keep the states of ``layer_ids`` of every forward inside the block, where they were made.

    Yields
    ------
    dict
        Layer id to states [N, T, H], replaced by each forward.
    """
    kept: dict[int, Tensor] = {}
    with tapped(parts, layer_ids, kept.__setitem__):
        yield kept


def stacked(kept: dict[int, Tensor], layer_ids: Iterable[int]) -> Tensor:
    """States [T, K, H] of the first sequence of a recorded forward, on the first layer's device."""
    states = [kept[i][0] for i in layer_ids]
    return torch.stack([one.to(states[0].device) for one in states], dim=1)


def _tap_output(sink: Sink, layer_id: int) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        sink(layer_id, output[0] if isinstance(output, tuple) else output)

    return hook


def _tap_input(sink: Sink) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sink(EMBEDDING, args[0] if args else kwargs["hidden_states"])

    return hook


class ToHost:
    """A sink that passes states of one sequence on to another sink, in host memory.

    From a GPU they are copied into pinned memory on a stream of their own, beside the forward. The
    GPU's memory is free again when the copy is done, whoever else holds on to the states; the next
    sink sees them only then.

    Parameters
    ----------
    take
        Gets a layer id and states [R, H], which it may keep.
    rows
        Positions to keep, [R]; all of them if None.

    Notes
    -----
    At most four copies are under way: a sink that writes to a slow disk holds the forward up
    instead of filling the memory.
    """

    def __init__(self, take: Sink, rows: Tensor | None = None) -> None:
        self._take, self._rows = take, rows
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()

    def __call__(self, layer_id: int, states: Tensor) -> None:
        """Take the states [1, T, H] of one layer."""
        states = states[0] if self._rows is None else states[0, self._rows.to(states.device)]
        if states.device.type != "cuda":
            self._take(layer_id, states.cpu())
            return
        if states.device not in self._streams:
            self._streams[states.device] = torch.cuda.Stream(states.device)
        stream = self._streams[states.device]
        states = states.contiguous()
        stream.wait_stream(torch.cuda.current_stream(states.device))
        host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(states, non_blocking=True)
            done = stream.record_event()
        # The allocator must not hand this memory out again while the copy still reads it.
        states.record_stream(stream)
        self._pending.append((layer_id, host, done))
        if len(self._pending) > IN_FLIGHT:
            self._pass_on()

    def finish(self) -> None:
        """Wait for the copies that are still under way and pass them on."""
        while self._pending:
            self._pass_on()

    def _pass_on(self) -> None:
        layer_id, host, done = self._pending.popleft()
        done.synchronize()
        self._take(layer_id, host)


def default_taps(n_layers: int, n_taps: int = 5) -> tuple[int, ...]:
    """Layers that z-lab's ``build_target_layer_ids`` taps: evenly from 1 to ``n_layers`` - 3."""
    if n_taps == 1:
        return (n_layers // 2,)
    first, last = 1, max(n_layers - 3, 1)
    ids = (round(first + i * (last - first) / (n_taps - 1)) for i in range(n_taps))
    return tuple(sorted({min(i, n_layers - 1) for i in ids}))


def select_layers(
    mode: LayerMode, n_layers: int, taps: Iterable[int] | None = None
) -> tuple[int, ...]:
    """Layer ids to keep, ascending.

    Parameters
    ----------
    mode
        ``taps``: the tapped layers. ``around``: these, their neighbours, the embedding output and
        the last layer, so that a layer shift can be tried later. ``all``: everything.
    taps
        Tapped layers; those of `default_taps` where no drafter says otherwise.

    Raises
    ------
    BadInput
        An unknown mode, or a tap that the target does not have.
    """
    taps = default_taps(n_layers) if taps is None else tuple(taps)
    for tap in taps:
        if not EMBEDDING <= tap < n_layers:
            raise BadInput(
                f"tapped layer {tap} of a target with {n_layers} layers",
                f"a layer from {EMBEDDING} (the embedding output) to {n_layers - 1}",
                "check target_layer_ids; was this drafter trained against another target?",
            )
    if mode == "taps":
        kept = set(taps)
    elif mode == "around":
        near = {tap + step for tap in taps for step in (-1, 0, 1)}
        kept = {i for i in near if EMBEDDING <= i < n_layers} | {EMBEDDING, n_layers - 1}
    elif mode == "all":
        kept = set(range(EMBEDDING, n_layers))
    else:
        raise BadInput(f"--layers {mode}", f"one of {', '.join(LAYER_MODES)}")
    return tuple(sorted(kept))


def norm_facts(norm: Any) -> dict[str, Any]:
    """How a norm scales: ``{"style": "plain" | "one_plus" | "other", "eps"}``.

    The style is found by applying the norm, since ``weight`` alone does not tell whether it
    multiplies by w or by 1 + w; eps is the module's own.
    """
    names = ("eps", "variance_epsilon", "epsilon")
    eps = next((float(getattr(norm, n)) for n in names if hasattr(norm, n)), 0.0)
    weight = weight_of(norm)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.numel(), generator=generator).to(weight)
    with torch.no_grad():
        y = norm(x).to(weight.device).float()
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    errors = {
        "plain": (unit * weight.float() - y).abs().max(),
        "one_plus": (unit * (1 + weight.float()) - y).abs().max(),
    }
    style = min(errors, key=lambda s: float(errors[s]))
    close = float(errors[style]) <= 0.02 * float(y.abs().max())
    return {"style": style if close else "other", "eps": eps}
