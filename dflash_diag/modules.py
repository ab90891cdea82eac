"""What every module inside the decoder layers computes, in the order in which it runs.

Two runs of the same tokens are compared module by module (`dflash_diag.divergence`), so that a
difference is seen where it begins. The convolution and the recurrence of a linear-attention layer
are functions, not modules; they are seen through the backend's binding.

Symbols: T tokens, W the width of a module's output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dflash_diag import backends
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import EMBEDDING, TargetParts
from dflash_diag.targets import DTYPES, Target, wrap_target

OUTPUT = "output"
"""The name under which a whole layer's output stands: the residual stream after it."""


class Place(NamedTuple):
    """One module of one layer; ``layer`` -1 is the embedding."""

    layer: int
    module: str


Trace = dict[Place, Tensor]
"""Output [T, W] of each module, in execution order."""


@contextmanager
def traced(parts: TargetParts, layers: Collection[int]) -> Iterator[Trace]:
    """Keep what every module of some layers puts out during one forward of one sequence.

    The output of the layer before the first one is kept too.

    Experts of a mixture are left out, because their rows are not the sequence's. The tensors stay
    on their device.
    """
    trace: Trace = {}
    running: list[str] = []
    current = [EMBEDDING]
    first = min(layers)

    def enter(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any) -> None:
            running.append(name)

        return hook

    def leave(layer: int, name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            running.pop()
            _keep(trace, Place(layer, name or OUTPUT), output)

        return hook

    def begin(layer: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            current[0] = layer
            if layer == first:  # what enters it, so that every module has its input in the trace
                _keep(trace, Place(layer - 1, OUTPUT), args[0] if args else kwargs["hidden_states"])

        return hook

    def function(name: str, output: Any) -> None:
        if current[0] in layers:
            convolution = "conv" in name
            value = output.transpose(1, 2) if convolution else output
            what = "convolution" if convolution else "recurrence"
            _keep(trace, Place(current[0], f"{running[-1]}.{what}"), value)

    with ExitStack() as stack:
        for layer in range(len(parts.layers)):
            hook = begin(layer)
            add = parts.layers[layer].register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(add.remove)
        for layer in layers:
            for name, module in parts.layers[layer].named_modules():
                if "experts." not in name:
                    stack.callback(module.register_forward_pre_hook(enter(name)).remove)
                    stack.callback(module.register_forward_hook(leave(layer, name)).remove)
        stack.enter_context(backends.observed(parts, function))
        yield trace


def _keep(trace: Trace, place: Place, output: Any) -> None:
    value = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return
    if value.ndim >= 3 and value.shape[0] == 1:
        rows = value[0]
        n_tokens = rows.shape[0]
    elif value.ndim == 2 and trace:
        # A norm over heads sees every head of every token as one row.
        rows, n_tokens = value, next(iter(trace.values())).shape[0]
        if rows.shape[0] % n_tokens:
            return
    else:
        return
    name, again = place.module, 2
    while place in trace:  # an activation that a layer uses twice
        place, again = Place(place.layer, f"{name}#{again}"), again + 1
    trace[place] = rows.reshape(n_tokens, -1)


@contextmanager
def started_from(parts: TargetParts, states: Mapping[int, Tensor]) -> Iterator[None]:
    """Give layers another input than the one that the layer before them made.

    With the inputs of another run, an error found inside a layer was made there.

    Parameters
    ----------
    states
        Layer id to the input [T, H] of that layer.
    """

    def give(value: Tensor) -> Callable[..., Any]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                first = value.to(args[0].device, args[0].dtype)[None]
                return (first, *args[1:]), kwargs
            own = kwargs["hidden_states"]
            return args, {**kwargs, "hidden_states": value.to(own.device, own.dtype)[None]}

        return hook

    with ExitStack() as stack:
        for layer, value in states.items():
            handle = parts.layers[layer].register_forward_pre_hook(
                give(value), with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
        yield


@dataclass(frozen=True)
class Variant:
    """One way of computing a target: a backend (see `dflash_diag.backends.Wish`) and a dtype."""

    backend: str
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``BACKEND/DTYPE``, for example ``torch+recurrent/float32``.

        Raises
        ------
        BadInput
            Not of that form.
        """
        backend, slash, dtype = text.partition("/")
        if not slash or dtype not in DTYPES:
            raise BadInput(f"{text!r}", f"a backend and one of {', '.join(DTYPES)}, joined by /")
        return cls(str(backends.Wish.parse(backend)), dtype)

    def __str__(self) -> str:
        return f"{self.backend}/{self.dtype}"


@contextmanager
def computed_as(target: Target, variant: Variant) -> Iterator[Target]:
    """The same weights under another backend and dtype, while the block lasts.

    Parameters that were loaded in float32 beside a lower main dtype stay in float32, and buffers
    (the rotary frequencies) are never cast.

    Raises
    ------
    BadInput
        The backend cannot be used here, or offloaded weights would have to be cast.
    """
    main, wanted = target.dtype, DTYPES[variant.dtype]
    changed: list[tuple[nn.Parameter, Tensor | None]] = []
    try:
        for parameter in target.model.parameters() if wanted is not main else ():
            if parameter.dtype is not main:
                continue
            if parameter.is_meta:
                raise BadInput(
                    f"{variant} asks to cast weights that are offloaded",
                    f"the dtype in which the target was loaded, {main}",
                )
            # Going up is exact, so nothing needs to be kept for the way back.
            lossless = torch.promote_types(parameter.dtype, wanted) is wanted
            changed.append((parameter, None if lossless else parameter.data))
            parameter.data = parameter.data.to(wanted)
        yield wrap_target(
            target.model, source=target.source, folder=target.folder, backend=variant.backend
        )
    finally:
        for parameter, before in changed:
            parameter.data = parameter.data.to(main) if before is None else before
        wrap_target(target.model, backend=target.backend.requested)
