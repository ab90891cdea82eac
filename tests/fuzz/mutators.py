"""What is done to a valid input: changes that know its structure, and changes that know nothing.

Every change is drawn from one `random.Random`, so that a seed names it. Hostile pickles are written
opcode by opcode; executed, each would leave the mark of `fuzz_canary`.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

NAMES = (
    "../escaped", "/tmp/absolute", "..", "", ".", "a" * 5000, "\x00", "a\nb", "\x1b[2J\x1b]0;x\x07",
    "<img src=x onerror=alert(1)>", "\u202etxt.exe", "\ud800", "é", "con", "-rf", "~", "$(id)",
    "__proto__", "%s%n", "{0.__class__}", "model.safetensors", "config.json", "NaN",
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 2**15, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1,
    2**63, -(2**63), 2**64, 10**30, 10**400, -(10**30), 0.5, -0.0, 1e-320, 1e308, -1e308,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
ODDITIES = (None, True, False, [], {}, [[]], [None], {"": None}, [1, "a", None, {}], "", "0", "1e5")


def odd(rng: Random) -> Any:
    """A value that nobody expects."""
    draw = rng.random()
    if draw < 0.45:
        return rng.choice(NUMBERS)
    if draw < 0.7:
        return rng.choice(NAMES)
    if draw < 0.75:
        return str(rng.choice(NUMBERS))
    if draw < 0.8:
        return deep(rng.choice((40, 400)))
    if draw < 0.85:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((1, 3, 2000)))]
    return rng.choice(ODDITIES)


def deep(levels: int) -> Any:
    value: Any = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


# --- bytes ----------------------------------------------------------------------------------------


def change_bytes(rng: Random, data: bytes) -> bytes:
    """A change that knows nothing of what the bytes mean."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(40)))
    at = rng.randrange(len(data))
    match rng.randrange(9):
        case 0:
            return data[:at]
        case 1:
            return data[at:]
        case 2:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 3:
            size = rng.choice((1, 2, 4, 8, 64))
            return data[:at] + bytes(rng.randrange(256) for _ in range(size)) + data[at + size :]
        case 4:
            return (
                data[:at]
                + rng.choice(
                    (
                        b"\xff\xfe",
                        b"\xc3\x28",
                        b"\x00",
                        b"\xed\xa0\x80",
                        b"\xef\xbb\xbf",
                        b"\r",
                        b"\x85",
                        b"\x1b[2J",
                    )
                )
                + data[at:]
            )
        case 5:
            end = rng.randrange(at, min(len(data), at + 4096) + 1)
            return data[:end] + data[at:end] * rng.choice((1, 2, 30)) + data[end:]
        case 6:
            return (
                data[:at]
                + struct.pack("<q", rng.choice((-1, 2**31, 2**40, 2**62, 0)))
                + (data[at + 8 :])
            )
        case 7:
            return data + bytes(rng.randrange(256) for _ in range(rng.choice((1, 8, 4000))))
        case _:
            many = bytearray(data)
            for _ in range(rng.choice((4, 40))):
                many[rng.randrange(len(many))] = rng.randrange(256)
            return bytes(many)


# --- JSON -----------------------------------------------------------------------------------------


def change_tree(rng: Random, value: Any) -> Any:
    """A JSON value with one part of it changed, dropped, renamed, doubled or wrapped."""
    places: list[tuple[Any, Any]] = []

    def collect(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, child in list(items):
            places.append((node, key))
            if isinstance(child, dict | list):
                collect(child)

    if isinstance(value, dict | list):
        collect(value)
    if not places or rng.random() < 0.03:
        return odd(rng)
    node, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del node[key]
        case 1 if isinstance(node, dict):
            node[rng.choice(NAMES)] = node.pop(key)
        case 1 | 2 if isinstance(node, list):
            node.insert(key, rng.choice((node[key], odd(rng))))
        case 3:
            node[key] = rng.choice(([node[key]], {"a": node[key]}, str(node[key])))
        case 4 if isinstance(node[key], int | float):
            node[key] = rng.choice(
                (node[key] + 1, -node[key], node[key] * 2, node[key] * 10**6, str(node[key]), 0)
            )
        case 5 if len(places) > 1:
            other, name = rng.choice(places)
            node[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else odd(rng)
        case _:
            node[key] = odd(rng)
    return value


def _keys(node: Any) -> Any:
    return node if isinstance(node, dict) else range(len(node))


def change_json(rng: Random, data: bytes) -> bytes:
    """JSON text with a change of its value, or one that only text can have."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return change_bytes(rng, data)
    draw = rng.random()
    if draw < 0.75:
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = change_tree(rng, value)
        return json.dumps(value, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    if draw < 0.8:
        return b"[" * rng.choice((500, 100_000)) + data
    if draw < 0.85:
        return data[:-1] + b", " + data.lstrip()[1:]  # every key twice
    if draw < 0.88:
        return json.dumps(value).encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
    if draw < 0.9:
        return b'{"a": ' + b"9" * rng.choice((5000, 100_000)) + b"}"
    return change_bytes(rng, data)


def change_lines(rng: Random, data: bytes) -> bytes:
    """Lines of JSON or of a table, one of them changed, doubled, swapped or left out."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines.insert(at, rng.choice(lines))
        case 1:
            del lines[at]
        case 2:
            lines[at] = change_bytes(rng, lines[at])
        case 3:
            return change_bytes(rng, data)
        case _:
            lines[at] = (
                change_json(rng, lines[at])
                if lines[at][:1] in b"{["
                else change_cell(rng, lines[at])
            )
    return b"\n".join(lines)


def change_cell(rng: Random, line: bytes) -> bytes:
    """A line of a table with another cell in it."""
    cells = line.split(b",")
    at = rng.randrange(len(cells))
    new = str(odd(rng)).encode("utf-8", "surrogatepass")
    cells[at] = rng.choice((new, b'"', b'"' + new + b'"', cells[at] + b"," + new, b"=1+1", b""))
    return b",".join(cells)


# --- chat templates -------------------------------------------------------------------------------

CHATS = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}",
    "{% for m in messages if m.role != 'system' %}{{ m | tojson }}{{ eos_token }}{% endfor %}",
)
"""Templates such as targets have them."""
BOMBS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "{% macro f(x) %}{{ f(x) + f(x) }}{% endmacro %}{{ f(1) }}",
    "{% for a in [messages] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "{% set a = namespace(s='ab') %}{% for i in range(99) %}{% set a.s = a.s + a.s %}{% endfor %}",
    "{% set a = namespace(n=7) %}{% for i in range(99) %}{% set a.n = a.n * a.n %}{% endfor %}",
    "{{ 'x' * N }}", "{{ [messages] * N }}", "{{ 9 ** N }}", "{{ range(N) | list }}",
    "{{ 'x' | center(N) }}", "{{ '%Nd' % 1 }}", "{{ '{:>N}'.format(1) }}", "{{ 'x'.ljust(N) }}",
    "{{ messages | tojson(indent=N) }}", "{{ lipsum(n=N) }}", "{{ messages | batch(N, 1) | list }}",
    "{% set x = [] %}{% for a in range(N) %}{{ x.append(x) }}{% endfor %}{{ x }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os }}",
    "{{ self.__init__.__globals__ }}", "{{ (messages | map(attribute='__class__') | list) }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends messages %}",
    "{{ raise_exception('\x1b[2J') }}", "{{ raise_exception('x' * 99999) }}", "{% generation %}",
    "{{ strftime_now('%9999999d') }}", "{{ '\\ud800' }}", "\ud800", "{{" + "(" * 9999,
    "{{" + "-" * 9999 + "1}}", "{% if x %}" * 300, "{{ 'x' * 262000 }}",
)  # fmt: skip
"""Templates that take all time or memory, or reach for what is not theirs."""
_SIZES = ("9", "99999", "9999999", "999999999", "99999999999999999999")


def chat_template(rng: Random) -> str:
    """A chat template, more often a hostile one."""
    if rng.random() < 0.2:
        return rng.choice(CHATS)
    return rng.choice(BOMBS).replace("N", rng.choice(_SIZES))


def change_chat(rng: Random, data: bytes) -> bytes:
    """Another template, or one with other bytes in it."""
    if rng.random() < 0.3:
        return change_bytes(rng, data)
    return chat_template(rng).encode("utf-8", "surrogatepass")


def change_settings(rng: Random, data: bytes) -> bytes:
    """A tokenizer's settings with another template, or with any other change."""
    settings = json.loads(data)
    if "chat_template" not in settings or rng.random() < 0.4:
        return change_json(rng, data)
    return json.dumps(settings | {"chat_template": chat_template(rng)}).encode()


# --- safetensors ----------------------------------------------------------------------------------


def change_safetensors(rng: Random, data: bytes) -> bytes:
    """Header, its length, a tensor's type, shape or place, or the values."""
    length = int.from_bytes(data[:8], "little")
    draw = rng.random()
    if draw < 0.1:
        new = rng.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1, len(data)))
        return new.to_bytes(8, "little") + data[8:]
    if draw < 0.25:
        return change_bytes(rng, data)
    header, values = json.loads(data[8 : 8 + length]), data[8 + length :]
    if draw < 0.45 and values:
        # Values that no weight and no token should have.
        many = bytearray(values)
        for _ in range(rng.choice((1, 8, 200))):
            at = rng.randrange(0, max(1, len(many) - 8), 4)
            many[at : at + 4] = struct.pack(
                "<f", rng.choice((math.nan, math.inf, -math.inf, 3e38, -1e30, 0.0))
            )
        return data[: 8 + length] + bytes(many[: len(values)])
    names = [name for name in header if name != "__metadata__"]
    if draw < 0.85 and names:
        name = rng.choice(names)
        entry = header[name]
        match rng.randrange(7):
            case 0:
                entry["dtype"] = rng.choice(
                    (
                        "F64",
                        "F32",
                        "F16",
                        "BF16",
                        "F8_E4M3",
                        "F8_E5M2",
                        "I64",
                        "I32",
                        "U8",
                        "BOOL",
                        "U64",
                        "C64",
                        "F4",
                        "",
                        "X",
                    )
                )
            case 1:
                entry["shape"] = rng.choice(
                    (
                        [],
                        [0],
                        [1],
                        [-1],
                        [2**62, 4],
                        [2**63],
                        [0, 2**40],
                        entry["shape"][::-1],
                        [math.prod(entry["shape"])],
                        [1, *entry["shape"]],
                    )
                )
            case 2:
                _retype(rng, entry)
            case 3:
                start, end = entry["data_offsets"]
                entry["data_offsets"] = rng.choice(
                    ([end, start], [start, start], [0, 2**63], [start + 4, end], [start, end + 4])
                )
            case 4:
                header[rng.choice((*NAMES[:-3], *names, "fc.weight", "extra"))] = header.pop(name)
            case 5:
                del header[name]
            case _:
                header[name] = change_tree(rng, entry)
    elif rng.random() < 0.5:
        header = change_tree(rng, header)
    else:
        header["__metadata__"] = {"n_prompt_tokens": str(odd(rng)), "id": rng.choice(NAMES)}
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + values


def _retype(rng: Random, entry: dict[str, Any]) -> None:
    """Another type of the same width, or another shape of the same size: a valid file."""
    same = {"F32": ("I32", "U32"), "I64": ("F64", "U64"), "U8": ("I8", "BOOL", "F8_E4M3")}
    entry["dtype"] = rng.choice(same.get(entry["dtype"], (entry["dtype"],)))
    if rng.random() < 0.5:
        n = math.prod(entry["shape"])
        entry["shape"] = rng.choice(([n], [n, 1], [1, n], [2, n // 2] if n % 2 == 0 else [n]))


# --- GGUF -----------------------------------------------------------------------------------------


def change_gguf(rng: Random, data: bytes) -> bytes:
    """A count, a length, a type or any other bytes, mostly of the header and of its start."""
    end = rng.choice((64, 700, 16_000, len(data)))
    head, rest = data[:end], data[end:]
    if rng.random() < 0.5:
        return change_bytes(rng, head) + rest
    at = rng.randrange(max(1, len(head) - 8))
    kind = rng.choice("IQ")
    limit = 2 ** (8 * struct.calcsize(kind))
    number = rng.choice((0, 1, 7, 255, 2**31, 2**40, 2**62, limit - 1)) % limit
    if rng.random() < 0.5:
        old = struct.unpack_from(f"<{kind}", head.ljust(at + 8, b"\0"), at)[0]
        number = (old + rng.choice((-1, 1, 8))) % limit
    new = struct.pack(f"<{kind}", number)
    return head[:at] + new + head[at + len(new) :] + rest


# --- torch.save -----------------------------------------------------------------------------------


def change_torch(rng: Random, data: bytes) -> bytes:
    """The pickle, the entries of the zip, or its bytes."""
    if rng.random() < 0.15:
        return change_bytes(rng, data)
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except zipfile.BadZipFile:
        return change_bytes(rng, data)
    at = next(i for i, (name, _) in enumerate(entries) if name.endswith("data.pkl"))
    prefix = entries[at][0].removesuffix("data.pkl")
    how = zipfile.ZIP_STORED
    match rng.randrange(10):
        case 0 | 1 | 2:
            entries[at] = entries[at][0], hostile_pickle(rng)
        case 3 | 4 | 5:
            entries[at] = entries[at][0], change_pickle(rng, entries[at][1])
        case 6:
            name = rng.choice(
                (
                    "../../escaped",
                    "/tmp/escaped",
                    f"{prefix}../x",
                    f"{prefix}data/0",
                    entries[at][0],
                    f"{prefix}code/x.py",
                    "a" * 60_000,
                    f"{prefix}\x1b",
                )
            )
            entries.insert(rng.randrange(len(entries) + 1), (name, b"x" * 9))
        case 7:
            del entries[rng.randrange(len(entries))]
        case 8:
            how = rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA))
            entries[at] = entries[at][0], entries[at][1] + b"." * rng.choice((0, 2**22))  # a bomb
        case _:
            i = rng.randrange(len(entries))
            entries[i] = entries[i][0], change_bytes(rng, entries[i][1])
    made = io.BytesIO()
    import warnings

    with warnings.catch_warnings(), zipfile.ZipFile(made, "w", how) as archive:
        warnings.simplefilter("ignore")  # two entries of one name
        for name, content in entries:
            archive.writestr(name, content)
    return made.getvalue()


def change_pickle(rng: Random, data: bytes) -> bytes:
    """A pickle with other numbers, names or opcodes in it."""
    import pickletools

    steps = [(op, arg, pos) for op, arg, pos in pickletools.genops(data)]
    at = rng.randrange(len(steps) - 1)
    _, _, start = steps[at]
    end = steps[at + 1][2]
    numbers = [
        i for i, (op, _, _) in enumerate(steps[:-1]) if op.name in ("BININT1", "BININT", "BININT2")
    ]
    match rng.randrange(5):
        case 0 | 1 if numbers:  # sizes, strides, offsets and counts are such numbers
            at = rng.choice(numbers)
            start, end = steps[at][2], steps[at + 1][2]
            new = rng.choice((0, 1, -1, 2**20, 2**31, 2**40, 2**62, 2**63, 2**70))
            return data[:start] + pickle.dumps(new, 2)[2:-1] + data[end:]
        case 2:
            return data[:start] + data[end:]
        case 3:
            other = rng.choice(pickletools.opcodes).code.encode("latin1")
            return data[:start] + other + data[start:]
        case _:
            return data[:end] + data[start:end] * rng.choice((1, 3, 1000)) + data[end:]


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def _calls(rng: Random) -> tuple[str, str, bytes]:
    """Module, name and arguments of a call that leaves the canary's mark."""
    mark = os.environ["FUZZ_CANARY"]
    shell = b"(" + _text(f"touch {mark}") + b"t"
    source = b"(" + _text(f"open({mark!r}, 'w').close()") + b"t"
    opened = b"(" + _text(mark) + _text("w") + b"t"
    modules = b"(" + _text("fuzz_canary") + b"t"
    return rng.choice(
        (
            ("os", "system", shell), ("posix", "system", shell), ("nt", "system", shell),
            ("subprocess", "getoutput", shell), ("builtins", "exec", source),
            ("builtins", "eval", source), ("__builtin__", "execfile", source),
            ("builtins", "open", opened), ("io", "open", opened), ("codecs", "open", opened),
            ("pathlib", "Path.touch", b"(" + _text(mark) + b"t"),
            ("importlib", "import_module", modules), ("builtins", "__import__", modules),
            ("fuzz_canary", "touch", b")"), ("fuzz_canary", "os.system", shell),
            ("pydoc", "locate", b"(" + _text("fuzz_canary.touch") + b"t"),
            ("pkgutil", "resolve_name", b"(" + _text("fuzz_canary:touch") + b"t"),
            ("torch.hub", "load", modules), ("torch", "load", modules),
            ("logging.config", "_resolve", modules), ("code", "interact", b")"),
            ("runpy", "run_module", modules), ("timeit", "timeit", source),
            ("numpy.testing._private.utils", "runstring", source),
            ("collections", "OrderedDict.__class__.__subclasses__", b")"),
            ("torch._inductor.codecache", "PyCodeCache.load", source),
            ("torch.utils.collect_env", "run", shell),
            ("transformers.utils.import_utils", "importlib.import_module", modules),
        )
    )  # fmt: skip


def hostile_pickle(rng: Random) -> bytes:
    """A pickle that runs code, by one of the opcodes that can, or exhausts who reads it."""
    module, name, arguments = _calls(rng)
    named = f"c{module}\n{name}\n".encode()
    stacked = b"\x80\x04" + _text(module) + _text(name) + b"\x93"
    state = b"(" + _text("__setstate__") + named + b"d"
    made = rng.choice(
        (
            named + arguments + b"R.",  # REDUCE
            stacked + arguments + b"R.",  # STACK_GLOBAL
            stacked + arguments + b"\x81.",  # NEWOBJ
            stacked + arguments + b"}\x92.",  # NEWOBJ_EX
            b"(" + arguments[1:-1] + f"i{module}\n{name}\n".encode() + b".",  # INST
            b"(" + named + arguments[1:-1] + b"o.",  # OBJ
            b"cargparse\nNamespace\n)\x81" + state + b"b" + arguments + b"b.",  # BUILD
            b"(lp0\n" + named + arguments + b"Ra.",  # in a list
            b"}" + _text("fc.weight") + named + arguments + b"Rs.",  # in a dict
            b"cfunctools\npartial\n(" + named + arguments[1:-1] + b"tR)R.",
            b"cfunctools\nreduce\n(" + named + b"]tR.",
            b"cbuiltins\nmap\n(" + named + b"(lp0\n" + arguments + b"atR.",
            b"\x82\x01.", b"\x84\x01\x00\x00\x00.", b"P" + name.encode() + b"\n.",  # EXT, PERSID
            b"(" + _text("storage") + named + _text("0") + _text("cpu") + b"K\x04tQ.",  # BINPERSID
            _rebuilt(rng),
            b"(" * rng.choice((2000, 200_000)) + b".",
            b"]" + b"]q\x00h\x00a" * 5 + b".",
            b"]" * 2000 + b"a" * 1999 + b".",
            b"(lp0\n" + b"(g0\ng0\ng0\ng0\nlp0\n" * 40 + b".",  # every list ten times the last
            b"X" + struct.pack("<I", 2**31 - 1) + b"a.",
            b"\x8d" + struct.pack("<Q", 2**62) + b"a.",
            b"\x8b" + struct.pack("<i", 2**30) + b"a.",
            b"I" + b"9" * 100_000 + b"\n.",
            b"r" + struct.pack("<I", 2**32 - 1) + b".",
            b"F" + b"1e" + b"9" * 400 + b"\n.",
            named[:-1],
        )
    )  # fmt: skip
    return b"\x80\x02" + made if rng.random() < 0.5 else made


def _rebuilt(rng: Random) -> bytes:
    """State dicts whose tensors have sizes, strides and storages of any kind."""
    number = (-1, 0, 1, 3, 32, 64, 2**20, 2**28, 2**31, 2**40, 2**61, 2**62 - 1, 2**63)

    def numbers(n: int) -> bytes:
        drawn = (pickle.dumps(rng.choice(number), 2)[2:-1] for _ in range(n))
        return b"(" + b"".join(drawn) + b"t"

    kind = rng.choice((b"FloatStorage", b"BFloat16Storage", b"ByteStorage", b"QUInt8Storage"))
    count = pickle.dumps(rng.choice((0, 1, 5, 1024, 2**40)), 2)[2:-1]
    n, made = rng.choice((0, 1, 2, 2, 30)), b"}("
    for name in ("fc.weight", "norm.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight"):
        storage = b"(" + _text("storage") + b"ctorch\n" + kind + b"\n" + _text("0")
        storage += _text("cpu") + count + b"tQ"
        size, stride = numbers(n), numbers(rng.choice((n, n, n, 1)))
        made += _text(name) + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage
        made += pickle.dumps(rng.choice((0, 0, 0, 7, 2**62)), 2)[2:-1] + size + stride
        made += b"\x89Ntr\x00\x00\x00\x00R"
    return made + b"u."


# --- parquet and events ---------------------------------------------------------------------------


def change_parquet(rng: Random, data: bytes) -> bytes:
    """A column left out, renamed, of another type or with other values; or the bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.35:
        return change_bytes(rng, data)
    table = pq.read_table(io.BytesIO(data))
    at = rng.randrange(table.num_columns)
    name, column = table.column_names[at], table.column(at)
    match rng.randrange(7):
        case 0:
            table = table.drop_columns([name])
        case 1:
            names = list(table.column_names)
            names[at] = rng.choice((*names, "x"))
            table = table.rename_columns(names)
        case 2:
            table = table.slice(0, rng.choice((0, 1, max(0, table.num_rows - 1))))
        case 3:
            table = pa.concat_tables([table, table])
        case 4:
            table = table.replace_schema_metadata(
                {b"schema": rng.choice((b"", b"\xff", b"dflash_diag.history/2")), b"pandas": b"{"}
            )
        case _:
            values = column.to_pylist()
            for _ in range(rng.choice((1, len(values)))):
                if values:
                    values[rng.randrange(len(values))] = odd(rng)
            table = table.set_column(at, name, _arrow(values, column.type))
    made = io.BytesIO()
    try:
        pq.write_table(table, made)
    except (pa.ArrowException, ValueError, OverflowError):
        return change_bytes(rng, data)
    return made.getvalue()


def _arrow(values: list[Any], kind: Any) -> Any:
    """Some values as a column: of the old type, of the one that they have, or as text."""
    import pyarrow as pa

    for make in (
        lambda: pa.array(values, type=kind),
        lambda: pa.array(values),
        lambda: pa.array([str(v).encode("utf-8", "replace").decode() for v in values]),
    ):
        try:
            return make()
        except (pa.ArrowException, ValueError, TypeError, OverflowError, RecursionError):
            continue
    return pa.nulls(len(values))


# --- files ----------------------------------------------------------------------------------------


def change_file(rng: Random, path: Path) -> None:
    """What stands in a file's place: nothing, a folder, a link, a pipe, or too much."""
    data = path.read_bytes()
    path.unlink()
    match rng.randrange(9):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(path.name)  # to itself
        case 2:
            path.symlink_to("/dev/zero")
        case 3:
            path.symlink_to(rng.choice(("nowhere", "..", "/dev/null", "/proc/self/mem")))
        case 4:
            os.mkfifo(path)
        case 5:
            with path.open("wb") as file:
                file.write(data)
                # Zeros that take no room on the disk; tensors are mapped, and may be as large.
                file.truncate(2**28 if path.suffix in (".safetensors", ".pt") else 2**31)
        case 6:
            path.write_bytes(b"")
        case 7:
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        case _:
            pass


CHANGES: dict[str, Callable[[Random, bytes], bytes]] = {
    ".ipynb": change_json,
    ".jinja": change_chat,
    ".json": change_json,
    ".jsonl": change_lines,
    ".csv": change_lines,
    ".gguf": change_gguf,
    ".safetensors": change_safetensors,
    ".pt": change_torch,
    ".parquet": change_parquet,
    "tokenizer_config.json": change_settings,
}
"""By a file's name, or by how it ends."""


def mutate(rng: Random, files: list[Path], *, alone: bool, spared: frozenset[str]) -> Path:
    """Change one of some files, in place; which one it was.

    Parameters
    ----------
    alone
        Whether the file is all of the input. A user who names a pipe or a device means it.
    spared
        Changes that are not made: ``file`` for those of the whole file.
    """
    path = rng.choice(sorted(files))
    if not alone and "file" not in spared and rng.random() < 0.06:
        change_file(rng, path)
    elif not alone and rng.random() < 0.02:
        other = rng.choice(sorted(files))
        path.write_bytes(other.read_bytes())
    elif not alone and "file" not in spared and rng.random() < 0.02:
        shutil.copy(path, path.with_name(f"{rng.randrange(99):02d}-more{path.suffix}"))
    else:
        change = CHANGES.get(path.name) or CHANGES.get(path.suffix, change_bytes)
        data = path.read_bytes()
        try:
            changed = change(rng, data)
        except Exception:  # noqa: BLE001 - an earlier change left nothing of its structure
            changed = change_bytes(rng, data)
        path.write_bytes(changed)
    return path
