"""Read a pickle without executing it.

A pickle is a program for a small stack machine. This is such a machine with no instruction that
calls anything: where a pickle asks for a call (REDUCE, INST, OBJ, NEWOBJ, NEWOBJ_EX) or for an
object's state to be set (BUILD), it makes an inert `Record` instead. The few constructors that
checkpoints are made of (ordered dicts, tensors, parameters, sizes) are recognised by name and built
by the functions of this module. No class of any other module is ever looked up.

Opcodes and their arguments are decoded by the standard library's `pickletools`.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable
from typing import IO, Any

from dflash_diag.checkpoints.placeholders import Global, Record, StorageRef, TensorRef
from dflash_diag.checkpoints.unsafe_names import is_unsafe
from dflash_diag.errors import CheckpointError


class UnsafePickle(CheckpointError):
    """The pickle names something that runs code. Nothing was executed."""

    def __init__(self, path: str, name: str) -> None:
        super().__init__(
            f"{path} is a pickle that would run code: it names {name}",
            "tensors and plain values only",
            "nothing was executed; do not open it with torch.load either",
        )
        self.name = name


class MalformedPickle(Exception):
    """The bytes are no complete pickle, or no pickle at all."""


def read_pickle(stream: bytes | IO[bytes], path: str) -> Any:
    """What one pickle describes, in plain containers and inert placeholders.

    Parameters
    ----------
    stream
        The pickle's bytes, or a file positioned at its start (left just behind its end).
    path
        Where it came from, for messages.

    Raises
    ------
    UnsafePickle
        It names a callable that runs code.
    MalformedPickle
        It is incomplete, or does what no pickle of a checkpoint does.
    """
    machine = _Machine(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # stray escapes in damaged text
            for opcode, argument, _ in pickletools.genops(stream):
                if opcode.name == "STOP":
                    return machine.pop()
                machine.step(opcode.name, argument)
    except _FAULTS as error:
        raise MalformedPickle(f"{error}" or type(error).__name__) from error
    raise MalformedPickle("no STOP")


_FAULTS = (
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    RecursionError,
    struct.error,
)
_NUMBERS = {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
_TEXTS = {"STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"}
_UNICODES = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_PUSHES_ITS_ARGUMENT = frozenset(_NUMBERS | _TEXTS | _UNICODES | _BYTES)
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The stack, the marks on it, and the memo."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.protocol = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, StorageRef] = {}

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError("stack underflow")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        push = self.stack.append
        if name in _PUSHES_ITS_ARGUMENT:
            push(argument)
        elif name in _CONSTANTS:
            push(_CONSTANTS[name])
        elif name in _EMPTY:
            push(_EMPTY[name]())
        elif name in _TUPLES:
            push(tuple(reversed([self.pop() for _ in range(_TUPLES[name])])))
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            push(self.memo[int(argument)])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[int(argument)] = self.top()
        else:
            self._step_rest(name, argument)

    def _step_rest(self, name: str, argument: Any) -> None:
        push = self.stack.append
        match name:
            case "PROTO":
                self.protocol = argument
            case "FRAME":
                pass
            case "MARK":
                self.marks.append(len(self.stack))
            case "MEMOIZE":
                self.memo[len(self.memo)] = self.top()
            case "POP":
                if self.marks and self.marks[-1] == len(self.stack):
                    self.marks.pop()
                else:
                    self.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case "DUP":
                push(self.top())
            case "LIST":
                push(self.pop_to_mark())
            case "TUPLE":
                push(tuple(self.pop_to_mark()))
            case "DICT":
                push(_pairs(self.pop_to_mark()))
            case "FROZENSET":
                push(frozenset(_key(v) for v in self.pop_to_mark()))
            case "APPEND":
                values = [self.pop()]
                _extend(self.top(), values)
            case "APPENDS":
                values = self.pop_to_mark()
                _extend(self.top(), values)
            case "SETITEM":
                value, key = self.pop(), self.pop()
                _update(self.top(), {_key(key): value})
            case "SETITEMS":
                pairs = _pairs(self.pop_to_mark())
                _update(self.top(), pairs)
            case "ADDITEMS":
                values = self.pop_to_mark()
                _add(self.top(), values)
            case "GLOBAL":
                push(self.find(*argument.split(" ", 1)))
            case "STACK_GLOBAL":
                attribute, module = self.pop(), self.pop()
                push(self.find(module, attribute))
            case "INST":
                of = self.find(*argument.split(" ", 1))
                push(_make(of, tuple(self.pop_to_mark())))
            case "OBJ":
                of, *args = self.pop_to_mark()
                push(_make(of, tuple(args)))
            case "REDUCE" | "NEWOBJ":
                args, of = self.pop(), self.pop()
                push(_make(of, args))
            case "NEWOBJ_EX":
                kwargs, args, of = self.pop(), self.pop(), self.pop()
                push(Record(of, _tuple(args), dict(kwargs)))
            case "BUILD":
                state = self.pop()
                _set_state(self.top(), state)
            case "BINPERSID":
                push(self.storage(self.pop()))
            case _:  # EXT1, EXT2, EXT4 (copyreg's registry), PERSID, NEXT_BUFFER, READONLY_BUFFER
                raise ValueError(f"opcode {name} has no place in a checkpoint")

    def find(self, module: Any, name: Any) -> Global:
        """The only way in which a pickle can name anything outside itself."""
        if not (isinstance(module, str) and isinstance(name, str)):
            raise UnsafePickle(self.path, "a callable whose name it computes")
        # Low protocols, torch.save's own among them, spell names as Python 2 did (subprocess as
        # ``commands``); Python's unpickler translates them by this table.
        if self.protocol < 3:
            module, name = NAME_MAPPING.get(
                (module, name), (IMPORT_MAPPING.get(module, module), name)
            )
        if is_unsafe(module, name):
            raise UnsafePickle(self.path, f"{module}.{name}")
        return Global(module, name)

    def storage(self, reference: Any) -> StorageRef:
        """``("storage", type, key, location, numel)``, as torch.save writes it."""
        match reference:
            case ("storage", Global() as kind, str(key), str(), int(numel), *_) if (
                0 <= numel < 2**62
            ):
                known = self.storages.setdefault(key, StorageRef(key, _storage_dtype(kind), numel))
                if known.numel != numel:
                    raise ValueError(f"storage {key} is described twice, differently")
                return known
        raise ValueError("a persistent id that is no torch storage")


def _make(of: Any, args: Any) -> Any:
    """What ``of(*args)`` stands for; only functions of this module ever run."""
    args = _tuple(args)
    maker = _MAKERS.get(str(of)) if isinstance(of, Global) else None
    return maker(*args) if maker else Record(of, args)


def _tuple(args: Any) -> tuple[Any, ...]:
    if not isinstance(args, tuple):
        raise TypeError("arguments are no tuple")
    return args


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, Record):
        value.states.append(state)
    elif not isinstance(value, dict | TensorRef):  # a dict's attributes: ``_metadata``, unused
        raise TypeError(f"state for a {type(value).__name__}")


def _extend(target: Any, values: list[Any]) -> None:
    if isinstance(target, Record):
        target.items.extend(values)
    elif isinstance(target, list):
        target.extend(values)
    else:
        raise TypeError(f"items for a {type(target).__name__}")


def _update(target: Any, pairs: dict[Any, Any]) -> None:
    if isinstance(target, Record):
        target.pairs.update(pairs)
    elif isinstance(target, dict):
        target.update(pairs)
    else:
        raise TypeError(f"keys for a {type(target).__name__}")


def _add(target: Any, values: list[Any]) -> None:
    if isinstance(target, Record):
        target.items.extend(values)
    elif isinstance(target, set):
        target.update(_key(v) for v in values)
    else:
        raise TypeError(f"members for a {type(target).__name__}")


def _pairs(items: list[Any]) -> dict[Any, Any]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return {_key(k): v for k, v in zip(items[::2], items[1::2], strict=True)}


def _key(value: Any, depth: int = 0) -> Any:
    """``value`` if it may be a key: hashing a deeply nested tuple takes forever, or crashes."""
    if isinstance(value, tuple) and depth < 4 and len(value) < 64:
        return tuple(_key(v, depth + 1) for v in value)
    if isinstance(value, tuple | list | dict | set | frozenset | bytearray):
        raise TypeError(f"a {type(value).__name__} as a key")
    return value


_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "uint8",
}


def _storage_dtype(kind: Global) -> str:
    known = kind.module.split(".")[0] == "torch" and kind.name in _DTYPES
    return _DTYPES[kind.name] if known else str(kind)


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(n) is int and 0 <= n < 2**62 for n in value):
        raise TypeError("a tensor's sizes are no counts")
    return value


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> TensorRef:
    """``torch._utils._rebuild_tensor_v2(storage, offset, size, stride, …)``."""
    return _typed_tensor(storage, offset, size, stride, getattr(storage, "dtype", ""))


def _tensor_v3(
    storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorRef:
    """``torch._utils._rebuild_tensor_v3(…, dtype, metadata)``: an untyped storage."""
    if not isinstance(dtype, Global):
        raise TypeError("a tensor's type is no name")
    return _typed_tensor(storage, offset, size, stride, dtype.name)


def _typed_tensor(storage: Any, offset: Any, size: Any, stride: Any, dtype: str) -> TensorRef:
    if not isinstance(storage, StorageRef):
        raise TypeError("a tensor without a storage")
    (offset,), size, stride = _sizes((offset,)), _sizes(size), _sizes(stride)
    if len(size) != len(stride):
        raise ValueError("a tensor with unequal numbers of sizes and strides")
    return TensorRef(storage, dtype, offset, size, stride)


def _first(value: Any, *_: Any) -> Any:
    """A parameter is its tensor: ``torch._utils._rebuild_parameter(data, …)``."""
    return value


def _subclass(function: Any, _kind: Any, args: Any, *_: Any) -> Any:
    """``torch._tensor._rebuild_from_type_v2(function, type, args, state)``."""
    return _make(function, args)


def _dict(*args: Any) -> Any:
    """``collections.OrderedDict()``, with its pairs if it was pickled the old way."""
    return _pairs([v for pair in args[0] for v in pair]) if args else {}


def _defaultdict(*_: Any) -> dict[Any, Any]:
    return {}


def _collect(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    def make(items: Any = ()) -> Any:
        if not isinstance(items, list | tuple | set | frozenset):
            raise TypeError(f"a {kind.__name__} of a {type(items).__name__}")
        hashed = kind in (set, frozenset)
        return kind(_key(v) for v in items) if hashed else kind(items)

    return make


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """``_codecs.encode(text, "latin1")``: how protocol 2 writes bytes."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str):
        raise TypeError("an encoding other than latin1")
    return text.encode("latin1")


def _reconstructor(of: Any, _base: Any, state: Any) -> Record:
    """``copyreg._reconstructor(class, base, state)``: how protocol 0 and 1 make objects."""
    return Record(of, () if state is None else (state,))


def _newobj(of: Any, *args: Any) -> Record:
    return Record(of, args)


_MAKERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": _defaultdict,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch.Size": _collect(tuple),
    "_codecs.encode": _encode,
    "copyreg._reconstructor": _reconstructor,
    "copyreg.__newobj__": _newobj,
    **{f"builtins.{kind.__name__}": _collect(kind) for kind in (list, tuple, set, frozenset)},
}
