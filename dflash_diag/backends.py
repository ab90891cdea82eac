"""Which code computes a target's linear-attention layers, chosen explicitly and recorded.

transformers (5.15 and later) decides when it imports a modelling module: functions such as
``torch_chunk_gated_delta_rule`` or ``causal_conv1d_fn`` become *switches*, wrappers around a kernel
of another package where that imports, and around plain torch code (``__wrapped__``) elsewhere. With
Triton installed and no GPU it thus picks kernels that cannot run. Here the choice is ours: hooks on
the target's own decoder layers put the chosen functions in place while a layer runs, so two targets
in one process can use different backends.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dflash_diag import provenance
from dflash_diag.caches import CacheAdapter
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import TargetParts, input_device, text_config

BackendName = Literal["auto", "fla", "torch"]
BACKENDS = ("auto", "fla", "torch")

_BOUND: WeakKeyDictionary[nn.ModuleList, Callable[[], None]] = WeakKeyDictionary()
"""How to undo the binding of a model's layers."""

_INSTALL_FLA = "pip install flash-linear-attention on a machine with a GPU, or use --backend torch"


@dataclass(frozen=True)
class Switch:
    """One function of a modelling module that transformers may have bound to a kernel."""

    module: ModuleType = field(repr=False)
    name: str
    current: Any = field(repr=False)
    """What the modelling module calls: a wrapper around ``picked``."""
    reference: Callable[..., Any] = field(repr=False)
    """The plain torch code."""
    picked: Callable[..., Any] = field(repr=False)
    """What transformers picked at import."""

    @property
    def has_kernel(self) -> bool:
        """Whether transformers found a kernel for it."""
        return self.picked is not self.reference

    @property
    def is_convolution(self) -> bool:
        """Whether it is the short causal convolution, not the recurrence."""
        return "conv" in self.name


@dataclass(frozen=True)
class Backend:
    """The choice that was made.

    ``linear`` is ``fla``, ``torch``, or ``none`` for a target without linear attention;
    ``convolution`` is ``causal-conv1d``, ``torch`` or ``none``.
    """

    requested: str
    linear: str
    convolution: str
    reason: str
    versions: dict[str, str | None]

    def to_json(self) -> dict[str, Any]:
        """As recorded in captures."""
        return {
            "requested": self.requested,
            "linear": self.linear,
            "convolution": self.convolution,
            "reason": self.reason,
            "versions": self.versions,
        }


def choose_backend(
    model: nn.Module, parts: TargetParts, requested: BackendName = "auto"
) -> Backend:
    """Bind a model to a backend, and prove that it runs.

    ``auto`` takes the kernels on a GPU where they run, and plain torch code anywhere else. The
    binding lasts until the same model is bound again.

    Raises
    ------
    BadInput
        ``fla`` was asked for and cannot run here, or this transformers release hides the torch
        code of a linear-attention target.
    """
    if requested not in BACKENDS:
        raise BadInput(f"--backend {requested}", f"one of {', '.join(BACKENDS)}")
    switches = find_switches(parts)
    recurrences = [s for s in switches if not s.is_convolution]
    linear = has_linear_attention(model)
    versions = _versions()
    if not linear:
        if requested == "fla":
            raise BadInput("--backend fla, but the target has no linear-attention layer")
        reason = "no linear-attention layer"
        return Backend(requested, "none", "none", reason, versions)
    if not recurrences:
        raise BadInput(
            f"transformers {versions['transformers']} hides the code of "
            f"{type(model).__name__}'s linear-attention layers",
            "transformers 5.15 or later, with kernels chosen at import",
            "pip install 'transformers>=5.15'",
        )
    device = input_device(model)
    obstacle = None if requested == "torch" else _obstacle(recurrences, device)
    if requested != "torch" and obstacle is None:
        # causal-conv1d has no wheel, so a machine may well have only one of the two packages.
        for use_convolution in (True, False):
            functions = {s: s.current for s in switches if use_convolution or not s.is_convolution}
            unbind = bind(parts, switches, functions)
            obstacle = probe(model)
            if obstacle is None:
                kernel = use_convolution and any(s.has_kernel for s in switches if s.is_convolution)
                convolution = "causal-conv1d" if kernel else "torch"
                return Backend(requested, "fla", convolution, "kernels run here", versions)
            unbind()
    if requested == "fla":
        raise BadInput(f"--backend fla: {obstacle}", "kernels that run", _INSTALL_FLA)
    bind(parts, switches, {})
    problem = probe(model)
    if problem is not None:
        raise BadInput(f"the target does not run on the torch backend: {problem}")
    return Backend(requested, "torch", "torch", obstacle or "asked for", versions)


def has_linear_attention(model: nn.Module) -> bool:
    """Whether some layer carries a recurrent state."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return any(kind not in ("full_attention", "sliding_attention") for kind in kinds)


def find_switches(parts: TargetParts) -> list[Switch]:
    """The switches of every modelling module that the decoder layers come from."""
    names = {type(m).__module__ for layer in parts.layers for m in layer.modules()}
    found = []
    for module_name in sorted(names):
        module = sys.modules[module_name]
        for name, value in vars(module).items():
            function = _as_function(value)
            freevars = function.__code__.co_freevars if function else ()
            if "implementation" in freevars and hasattr(function, "__wrapped__"):
                picked = inspect.getclosurevars(function).nonlocals["implementation"]
                found.append(Switch(module, name, value, function.__wrapped__, picked))
    return found


def _as_function(value: Any) -> Any:
    """The wrapper function itself; the package ``kernels`` turns it into a module."""
    if isinstance(value, nn.Module):
        value = inspect.getclosurevars(type(value).forward).nonlocals.get("func")
    return value if inspect.isfunction(value) else None


def bind(
    parts: TargetParts, switches: list[Switch], functions: dict[Any, Any]
) -> Callable[[], None]:
    """Make the decoder layers use ``functions``, and the plain torch code of every other switch.

    Returns
    -------
    Callable
        Removes the binding.
    """
    chosen = [(s, functions.get(s) or _plain(s)) for s in switches]

    def enter(_layer: nn.Module, _args: Any) -> None:
        for switch, function in chosen:
            setattr(switch.module, switch.name, function)

    def leave(_layer: nn.Module, _args: Any, _output: Any) -> None:
        for switch, _ in chosen:
            setattr(switch.module, switch.name, switch.current)

    earlier = _BOUND.pop(parts.layers, None)
    if earlier is not None:
        earlier()
    handles: list[Any] = []
    for layer in parts.layers:
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))

    def unbind() -> None:
        for handle in handles:
            handle.remove()

    _BOUND[parts.layers] = unbind
    return unbind


def _plain(switch: Switch) -> Callable[..., Any]:
    """The torch code of a switch, called as transformers' own wrapper would."""
    names = frozenset(inspect.signature(switch.reference).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            # It would read several packed documents as one, silently.
            raise ValueError(f"{switch.name} cannot keep packed sequences apart")
        return switch.reference(*args, **{k: v for k, v in kwargs.items() if k in names})

    return call


def _obstacle(recurrences: list[Switch], device: torch.device) -> str | None:
    """Why the kernels cannot be used, as far as can be seen without running them."""
    if device.type != "cuda":
        return f"the target is on the {device.type}, where Triton kernels cannot run"
    missing = [s.name for s in recurrences if not s.has_kernel]
    if not missing:
        return None
    try:
        importlib.import_module("fla")
    except ImportError as error:
        return f"flash-linear-attention cannot be imported ({error})"
    return f"transformers found no kernel for {', '.join(missing)}"


@torch.inference_mode()
def probe(model: nn.Module) -> str | None:
    """Run eight tokens and then one more, and say what went wrong (None: nothing).

    The two steps use different kernels: chunked, and recurrent.
    """
    device = input_device(model)
    ids = torch.arange(9, device=device)[None] % text_config(model).vocab_size
    adapter = CacheAdapter(model)
    cache = adapter.new()
    try:
        for step in (ids[:, :8], ids[:, 8:]):
            logits = model(input_ids=step, **adapter.arguments(cache)).logits
            if not bool(torch.isfinite(logits).all()):
                return "the logits are not finite"
    except Exception as error:  # noqa: BLE001  a foreign kernel may fail in any way
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else 'no message'}"
    return None


def _versions() -> dict[str, str | None]:
    names = ("torch", "transformers", "triton", "flash-linear-attention", "causal-conv1d")
    found = provenance.versions()
    return {name: found[name] for name in names}
