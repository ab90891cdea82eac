"""Which code computes a target's linear-attention layers: chosen explicitly, proved, recorded.

transformers (5.15 and later) decides when it imports a modelling module: functions such as
``torch_chunk_gated_delta_rule`` or ``causal_conv1d_fn`` become *switches*, wrappers around a kernel
of another package where that imports, and around plain torch code (``__wrapped__``) elsewhere. With
Triton installed and no GPU it thus picks kernels that cannot run. Here the choice is ours: hooks on
the target's own decoder layers put the chosen functions in place while a layer runs, so two targets
in one process can use different backends, and every call is counted.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dflash_diag import provenance
from dflash_diag.caches import CacheAdapter
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import TargetParts, input_device, text_config

LINEAR = ("auto", "fla", "torch")
FORMS = ("chunked", "recurrent")
CONVOLUTIONS = ("causal-conv1d", "torch-conv")


class Package(NamedTuple):
    """Where a kernel lives, and how to get it."""

    module: str
    function: str
    install: str


_FLA = "fla.ops.gated_delta_rule"
_INSTALL_FLA = "pip install flash-linear-attention"
_INSTALL_CONV = "pip install --no-build-isolation causal-conv1d (see requirements-gpu.txt)"
KERNELS = {
    "torch_chunk_gated_delta_rule": Package(_FLA, "chunk_gated_delta_rule", _INSTALL_FLA),
    "torch_recurrent_gated_delta_rule": Package(
        _FLA, "fused_recurrent_gated_delta_rule", _INSTALL_FLA
    ),
    "causal_conv1d_fn": Package("causal_conv1d", "causal_conv1d_fn", _INSTALL_CONV),
    "causal_conv1d_update": Package("causal_conv1d", "causal_conv1d_update", _INSTALL_CONV),
}
"""Kernels by the name of the switch, for where transformers picked none when it was imported."""


@dataclass(frozen=True)
class Wish:
    """What is asked for: ``auto``, ``fla``, ``torch+recurrent``, ``fla+torch-conv`` and so on.

    ``form`` None leaves transformers' own rule: chunked for several tokens, recurrent for one that
    continues a sequence. ``convolution`` None takes causal-conv1d with ``fla`` where it runs.
    """

    linear: str = "auto"
    form: str | None = None
    convolution: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read words joined by ``+``.

        Raises
        ------
        BadInput
            An unknown word, or two that answer the same question.
        """
        kinds = {"linear": LINEAR, "form": FORMS, "convolution": CONVOLUTIONS}
        found: dict[str, str] = {}
        for word in text.split("+"):
            kind = next((k for k, words in kinds.items() if word in words), None)
            if kind is None or kind in found:
                raise BadInput(
                    f"--backend {text}",
                    "auto, fla or torch; then, joined by +, chunked or recurrent, and "
                    "causal-conv1d or torch-conv",
                    "for example fla, torch+recurrent or fla+torch-conv",
                )
            found[kind] = word
        return cls(**found)

    def __str__(self) -> str:
        return "+".join(filter(None, (self.linear, self.form, self.convolution)))


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
    def is_convolution(self) -> bool:
        """Whether it is the short causal convolution, not the recurrence."""
        return "conv" in self.name

    @property
    def form(self) -> str | None:
        """``chunked`` or ``recurrent``; None for a convolution."""
        if self.is_convolution:
            return None
        return "recurrent" if "recurrent" in self.name else "chunked"

    def kernel(self) -> Callable[..., Any]:
        """The kernel, whatever transformers picked.

        Raises
        ------
        ImportError
            Its package is missing, or cannot be imported on this machine.
        """
        if self.picked is not self.reference:
            return self.picked
        package = KERNELS.get(self.name)
        if package is None:
            raise ImportError(f"no kernel of {self.name} is known")
        return getattr(importlib.import_module(package.module), package.function)


class Counted:
    """A function in the place of a switch: calls its code as transformers would, and counts."""

    def __init__(self, switch: Switch, code: Callable[..., Any], *, packs: bool) -> None:
        self.switch, self.code, self.packs = switch, code, packs
        self.calls = 0
        self.observe: Callable[[str, Any], None] | None = None
        """Told the switch's name and output of each call."""
        self._names = frozenset(inspect.signature(code).parameters)

    @property
    def path(self) -> str:
        """Where the code is: ``module.function``."""
        return f"{self.code.__module__}.{self.code.__qualname__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.packs and any(kwargs.get(name) is not None for name in _PACKED):
            # It would read several packed documents as one, silently.
            raise ValueError(f"{self.switch.name} cannot keep packed sequences apart")
        self.calls += 1
        output = self.code(*args, **{k: v for k, v in kwargs.items() if k in self._names})
        if self.observe is not None:
            self.observe(self.switch.name, output)
        return output


_PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")
"""Arguments by which a caller says that a row holds several documents."""


@dataclass(frozen=True)
class Backend:
    """The choice that was made, and what ran when it was tried.

    ``linear`` is ``fla``, ``torch``, or ``none`` for a target without linear attention; ``form`` is
    ``auto``, ``chunked`` or ``recurrent``; ``convolution`` is ``causal-conv1d``, ``torch`` or
    ``none``.
    """

    requested: str
    linear: str
    convolution: str
    reason: str
    versions: Mapping[str, str | None]
    form: str = "auto"
    ran: Mapping[str, int] = field(default_factory=dict)
    """Calls of each function, by its full name, while eight tokens and then one were run."""

    def __str__(self) -> str:
        words = [self.linear, "" if self.form == "auto" else self.form]
        words.append("causal-conv1d" if self.convolution == "causal-conv1d" else "")
        return "+".join(filter(None, words))

    @property
    def wish(self) -> str:
        """Words that ask for the same again."""
        return "torch" if self.linear == "none" else str(self)

    def to_json(self) -> dict[str, Any]:
        """As recorded in captures."""
        return {
            "requested": self.requested,
            "linear": self.linear,
            "form": self.form,
            "convolution": self.convolution,
            "reason": self.reason,
            "ran": dict(self.ran),
            "versions": dict(self.versions),
        }


def choose_backend(model: nn.Module, parts: TargetParts, requested: str = "auto") -> Backend:
    """Bind a model to a backend, run it, and prove that the chosen functions were called.

    ``auto`` takes the kernels on a GPU where they run, and plain torch code anywhere else. The
    binding lasts until the same model is bound again.

    Parameters
    ----------
    requested
        See `Wish`.

    Raises
    ------
    BadInput
        What was asked for cannot run here (the message says why and what to install), or this
        transformers release hides the torch code of a linear-attention target.
    """
    wish = Wish.parse(requested)
    switches = find_switches(parts)
    versions = _versions()
    if not has_linear_attention(model):
        if wish.linear == "fla" or wish.convolution == "causal-conv1d":
            raise BadInput(f"--backend {wish}, but the target has no linear-attention layer")
        return Backend(str(wish), "none", "none", "no linear-attention layer", versions)
    if all(s.is_convolution for s in switches):
        raise BadInput(
            f"transformers {versions['transformers']} hides the code of "
            f"{type(model).__name__}'s linear-attention layers",
            "transformers 5.15 or later, with kernels chosen at import",
            "pip install 'transformers>=5.15'",
        )
    obstacle, install = "", _INSTALL_FLA
    for linear, convolution in _candidates(wish):
        try:
            functions = _functions(switches, linear, convolution, wish.form, input_device(model))
        except _Unavailable as error:
            obstacle, install = str(error), error.install
            continue
        unbind = bind(parts, functions)
        problem = probe(model) or _not_called(model, functions)
        if problem is None:
            reason = "it runs" if linear == "fla" else obstacle or "asked for"
            plain = convolution.removesuffix("-conv")
            form = wish.form or "auto"
            return Backend(str(wish), linear, plain, reason, versions, form, calls(parts))
        # The last candidate asks for the least, so its obstacle is the one that counts.
        obstacle = problem
        unbind()
    if wish.linear == "torch" and wish.convolution != "causal-conv1d":
        raise BadInput(f"the target does not run on the torch backend: {obstacle}")
    do = f"{install} on a machine with a GPU, or use --backend torch"
    raise BadInput(f"--backend {wish}: {obstacle}", "kernels that run", do)


def has_linear_attention(model: nn.Module) -> bool:
    """Whether some layer carries a recurrent state."""
    return count_linear_layers(model) > 0


def count_linear_layers(model: nn.Module) -> int:
    """Layers that carry a recurrent state."""
    kinds = getattr(text_config(model), "layer_types", None) or ()
    return sum(kind not in ("full_attention", "sliding_attention") for kind in kinds)


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


def _candidates(wish: Wish) -> list[tuple[str, str]]:
    """Pairs of recurrence and convolution that would fulfil a wish, best first."""
    kernels_first = [("fla", "causal-conv1d"), ("fla", "torch-conv"), ("torch", "torch-conv")]
    # Plain torch with the convolution's kernel is odd, but it tells the two apart.
    every = [*kernels_first, ("torch", "causal-conv1d")]
    return [
        (linear, convolution)
        for linear, convolution in every
        if wish.linear in ("auto", linear)
        and (wish.convolution or convolution) == convolution
        and not (wish.convolution is None and (linear, convolution) == every[-1])
    ]


class _Unavailable(Exception):
    """A kernel that cannot be used here; its text is the reason."""

    def __init__(self, reason: str, install: str) -> None:
        super().__init__(reason)
        self.install = install


def _functions(
    switches: list[Switch],
    linear: str,
    convolution: str,
    form: str | None,
    device: torch.device,
) -> list[Counted]:
    """What to put in the place of each switch."""
    by_form = {s.form: s for s in switches if s.form}
    made = []
    for switch in sorted(switches, key=lambda s: s.is_convolution):
        # A form that was asked for serves every length: both switches take the same arguments.
        source = switch if switch.is_convolution or form is None else by_form[form]
        fast = (convolution if switch.is_convolution else linear) in ("fla", "causal-conv1d")
        package = KERNELS.get(source.name)
        install = package.install if package else _INSTALL_FLA
        if fast and not _runs_kernels(device):
            where = f"the target is on the {device.type}, where Triton kernels cannot run"
            raise _Unavailable(where, install)
        try:
            code = source.kernel() if fast else source.reference
        except Exception as error:  # a package may fail in any way when it is imported
            name = package.module if package else "the kernel"
            raise _Unavailable(f"{name} cannot be imported ({error})", install) from error
        made.append(Counted(switch, code, packs=fast))
    return made


def _runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda"


def bind(parts: TargetParts, functions: list[Counted]) -> Callable[[], None]:
    """Make the decoder layers use ``functions``.

    Returns
    -------
    Callable
        Removes the binding.
    """

    def enter(_layer: nn.Module, _args: Any) -> None:
        for function in functions:
            setattr(function.switch.module, function.switch.name, function)

    def leave(_layer: nn.Module, _args: Any, _output: Any) -> None:
        for function in functions:
            setattr(function.switch.module, function.switch.name, function.switch.current)

    earlier = _BOUND.pop(parts.layers, None)
    if earlier is not None:
        earlier.undo()
    handles: list[Any] = []
    for layer in parts.layers:
        handles.append(layer.register_forward_pre_hook(enter))
        handles.append(layer.register_forward_hook(leave, always_call=True))

    def undo() -> None:
        for handle in handles:
            handle.remove()
        _BOUND.pop(parts.layers, None)

    _BOUND[parts.layers] = _Binding(functions, undo)
    return undo


@dataclass(frozen=True)
class _Binding:
    functions: list[Counted]
    undo: Callable[[], None]


_BOUND: WeakKeyDictionary[nn.ModuleList, _Binding] = WeakKeyDictionary()
"""The functions that a model's layers are bound to."""


def calls(parts: TargetParts) -> dict[str, int]:
    """How often each function of the binding was called so far, by its full name."""
    bound = _BOUND.get(parts.layers)
    made: Counter[str] = Counter()
    for function in bound.functions if bound else ():
        made[function.path] += function.calls
    return dict(made)


@contextmanager
def observed(parts: TargetParts, observe: Callable[[str, Any], None]) -> Iterator[None]:
    """Tell ``observe`` the name and output of every bound function that is called inside."""
    bound = _BOUND.get(parts.layers)
    functions = bound.functions if bound else []
    for function in functions:
        function.observe = observe
    try:
        yield
    finally:
        for function in functions:
            function.observe = None


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


def _not_called(model: nn.Module, functions: list[Counted]) -> str | None:
    """Whether some layer got round the functions that were put in place for the two steps."""
    expected = 2 * count_linear_layers(model)
    for kind in (True, False):
        made = sum(f.calls for f in functions if f.switch.is_convolution is kind)
        offered = any(f.switch.is_convolution is kind for f in functions)
        if offered and made < expected:
            what = "convolution" if kind else "recurrence"
            return f"the chosen {what} ran {made} times instead of {expected}"
    return None


def _versions() -> dict[str, str | None]:
    names = ("torch", "transformers", "triton", "flash-linear-attention", "causal-conv1d")
    found = provenance.versions()
    return {name: found[name] for name in names}
