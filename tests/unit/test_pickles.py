"""Pickles are read, never executed: real payloads, written every way a pickle can write them."""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import pathlib
import pickle
import pickletools
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_diag.checkpoints import UnsafePickle, read_checkpoint
from dflash_diag.checkpoints.pickles import MalformedPickle, read_pickle
from dflash_diag.checkpoints.placeholders import CUT, Global, Record, TensorRef, to_plain
from dflash_diag.checkpoints.unsafe_names import is_unsafe
from dflash_diag.errors import CheckpointError


def text(value: str) -> bytes:
    """Opcodes that push a string."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


class Exploit:
    """Pickles itself as a call: what every tutorial shows."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def payloads(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Name to (pickle, the name it must be refused for). Executed, each creates ``marker``."""
    import builtins
    import os
    import posix
    import runpy
    import shutil
    import subprocess

    shell = f"touch {marker}"
    code = f"open({str(marker)!r}, 'w').close()"
    argument = text(shell)
    script = marker.with_suffix(".py")
    script.write_text(code)
    source = marker.with_suffix(".src")
    source.write_text("")

    def dumps(function, *args, protocol=2):
        return pickle.dumps({"fc.weight": Exploit(function, *args)}, protocol)

    nested = dumps(os.system, shell)
    built_name = b"c_codecs\nencode\n" + text("posix") + text("latin1") + b"\x86R"
    return {
        "os.system": (dumps(os.system, shell), "posix.system"),
        "os.system by its own name": (b"cos\nsystem\n" + argument + b"\x85R.", "os.system"),
        "posix.system": (dumps(posix.system, shell), "posix.system"),
        "protocol 0": (dumps(os.system, shell, protocol=0), "posix.system"),
        "protocol 4": (dumps(os.system, shell, protocol=4), "posix.system"),
        "protocol 5": (dumps(os.system, shell, protocol=5), "posix.system"),
        "Popen": (dumps(subprocess.Popen, ["touch", str(marker)]), "subprocess.Popen"),
        "check_output": (dumps(subprocess.check_output, ["touch", str(marker)]),
                         "subprocess.check_output"),
        "eval": (dumps(builtins.eval, f"__import__('os').system({shell!r})"), "builtins.eval"),
        "exec": (dumps(builtins.exec, code, protocol=4), "builtins.exec"),
        "open": (dumps(builtins.open, str(marker), "w", protocol=4), "io.open"),
        "builtins.open": (b"cbuiltins\nopen\n" + text(str(marker)) + text("w") + b"\x86R.",
                          "builtins.open"),
        "compile": (dumps(builtins.compile, code, "x", "exec", protocol=4), "builtins.compile"),
        "__import__": (b"cbuiltins\n__import__\n" + text("os") + b"\x85R.",
                       "builtins.__import__"),
        "getattr": (
            b"cbuiltins\ngetattr\nctorch\nTensor\n" + text("x") + b"\x86R" + argument + b"\x85R.",
            "builtins.getattr",
        ),
        "runpy": (dumps(runpy.run_path, str(script)), "runpy.run_path"),
        "shutil": (dumps(shutil.copy, str(source), str(marker)), "shutil.copy"),
        "importlib": (b"cimportlib\nimport_module\n" + text("this") + b"\x85R.",
                      "importlib.import_module"),
        "sys.modules": (b"csys\nmodules\n.", "sys.modules"),
        "pty": (b"cpty\nspawn\n" + argument + b"\x85R.", "pty.spawn"),
        "socket": (b"csocket\ncreate_connection\n)R.", "socket.create_connection"),
        "nt": (b"cnt\nsystem\n" + argument + b"\x85R.", "nt.system"),
        "STACK_GLOBAL": (
            b"\x80\x04\x8c\x05posix\x8c\x06system\x93" + argument + b"\x85R.", "posix.system"
        ),
        "STACK_GLOBAL from the memo": (
            b"\x80\x04\x8c\x06system\x94\x8c\x05posix\x94\x8c\x04tidy\x94000h\x01h\x00\x93"
            + argument + b"\x85R.",
            "posix.system",
        ),
        "STACK_GLOBAL with a computed name": (
            built_name + text("system") + b"\x93" + argument + b"\x85R.",
            "a callable whose name it computes",
        ),
        "a dotted name": (
            b"\x80\x04" + text("torch.serialization") + text("os.system") + b"\x93" + argument
            + b"\x85R.",
            "torch.serialization.os.system",
        ),
        "a module's import of os": (
            b"ctorch.serialization.os\nsystem\n" + argument + b"\x85R.",
            "torch.serialization.os.system",
        ),
        "dunders": (
            b"\x80\x04" + text("collections") + text("OrderedDict.__init__.__globals__")
            + b"\x93.",
            "collections.OrderedDict.__init__.__globals__",
        ),
        "INST": (b"(" + argument + b"iposix\nsystem\n.", "posix.system"),
        "OBJ": (b"(cposix\nsystem\n" + argument + b"o.", "posix.system"),
        "NEWOBJ": (b"csubprocess\nPopen\n" + argument + b"\x85\x81.", "subprocess.Popen"),
        "NEWOBJ_EX": (
            b"\x80\x04csubprocess\nPopen\n]" + text("touch") + b"a" + text(str(marker))
            + b"a\x85}\x92.",
            "subprocess.Popen",
        ),
        "BUILD that plants a reducer": (
            b"cargparse\nNamespace\n)\x81}" + text("__setstate__") + b"cposix\nsystem\nsb"
            + argument + b"b.",
            "posix.system",
        ),
        "a pickle in bytes": (dumps(pickle.loads, nested), "pickle.loads"),
        "torch's loader of bytes": (
            b"ctorch.storage\n_load_from_bytes\nB" + struct.pack("<I", len(nested)) + nested
            + b"\x85R.",
            "torch.storage._load_from_bytes",
        ),
        "torch.load": (b"ctorch\nload\n" + text(str(marker)) + b"\x85R.", "torch.load"),
        "Python 2 spelling": (b"c__builtin__\neval\n" + text(code) + b"\x85R.",
                              "builtins.eval"),
    }  # fmt: skip


def _names() -> list[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return list(payloads(Path(folder) / "marker"))


@pytest.mark.parametrize("name", _names())
def test_a_hostile_pickle_is_refused_by_name_and_never_runs(name, tmp_path):
    marker = tmp_path / "marker"
    payload, named = payloads(marker)[name]
    with pytest.raises(UnsafePickle) as caught:
        read_pickle(payload, "x.pt")
    assert caught.value.name == named
    for path in (_in_a_zip(tmp_path, payload), _bare(tmp_path, payload)):
        with pytest.raises(CheckpointError, match="would run code") as caught:
            read_checkpoint(path)
        assert named in str(caught.value)
        assert "\n" not in str(caught.value)
        assert path.name in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    "name",
    ["os.system", "Popen", "exec", "a pickle in bytes", "STACK_GLOBAL from the memo", "runpy"],
)
def test_the_payloads_are_real(name, tmp_path):
    """Python's own unpickler does run them: the tests above refuse something that works."""
    marker = tmp_path / "marker"
    process = pickle.loads(payloads(marker)[name][0])
    process = process.get("fc.weight") if isinstance(process, dict) else process
    if hasattr(process, "wait"):
        process.wait()
    assert marker.exists()


def _in_a_zip(folder: Path, payload: bytes) -> Path:
    path = folder / "hostile.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hostile/data.pkl", payload)
        archive.writestr("hostile/version", "3\n")
    return path


def _bare(folder: Path, payload: bytes) -> Path:
    path = folder / "bare.pt"
    path.write_bytes(payload)
    return path


class Recorder:
    """Its state must never reach it."""

    def __setstate__(self, state):
        raise AssertionError("executed")


def test_unknown_objects_become_inert(tmp_path):
    """Calls, state and items of any class are recorded; the class is not even looked up."""
    value = Recorder()
    value.answer = 42
    read = read_pickle(pickle.dumps([value, Recorder]), "x")
    record, kind = read
    assert isinstance(record, Record)
    assert isinstance(kind, Global)
    assert record.attributes() == {"answer": 42}
    assert to_plain(record) == {"answer": 42}


def test_a_call_of_something_harmless_is_not_made(monkeypatch):
    called = []
    module = types.ModuleType("harmless_module")
    module.function = lambda *a: called.append(a)
    monkeypatch.setitem(sys.modules, "harmless_module", module)
    read = read_pickle(b"charmless_module\nfunction\nK\x01\x85R.", "x")
    assert isinstance(read, Record)
    assert read.args == (1,)
    assert called == []
    pickle.loads(b"charmless_module\nfunction\nK\x01\x85R.")
    assert called == [(1,)]


@pytest.mark.parametrize(
    "stream",
    [
        b"cdflash_diag.checkpoints.pickles\nread_pickle\n}X\x01\x00\x00\x00xK\x01sb.",  # function
        b"cargparse\nNamespace\n}X\x07\x00\x00\x00__new__K\x01sb.",  # class
        b"]}X\x01\x00\x00\x00xK\x01sb.",  # list
    ],
)
def test_state_is_refused_where_it_would_change_something_real(stream):
    with pytest.raises(MalformedPickle):
        read_pickle(stream, "x")
    assert "x" not in vars(read_pickle)
    assert argparse.Namespace.__new__ is object.__new__


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_survive_every_protocol(protocol):
    value = {
        "int": [0, 1, -1, 255, 65536, 2**31, -(2**80)],
        "float": 0.1,
        "text": "naïve ✓",
        "bytes": b"\x00\xff",
        "set": {1, 2},
        "frozen": frozenset({3}),
        "tuple": (1, (2, (3, ()))),
        "none": [None, True, False],
        "ordered": collections.OrderedDict(a=1, b=2),
        "default": collections.defaultdict(list, a=[1]),
        ("tuple", 1): "key",
    }
    assert read_pickle(pickle.dumps(value, protocol), "x") == value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_training_arguments_come_back_as_plain_values(protocol):
    args = argparse.Namespace(
        lr=np.float64(1e-3),
        seed=np.int64(7),
        flag=np.bool_(True),
        out=pathlib.PurePosixPath("/data/run/1"),
        here=pathlib.Path("relative/run"),
        betas=(0.9, 0.95),
        nested=argparse.Namespace(x=1),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        weird=float("inf"),
    )
    plain = to_plain(read_pickle(pickle.dumps(args, protocol), "x"))
    assert plain["lr"] == 1e-3
    assert plain["seed"] == 7
    assert plain["flag"] is True
    assert plain["out"] == "/data/run/1"
    assert plain["here"] == "relative/run"
    assert plain["betas"] == [0.9, 0.95]
    assert plain["nested"] == {"x": 1}
    assert plain["device"] == "torch.device(cpu)" or "cpu" in plain["device"]
    assert plain["weird"] is None
    assert isinstance(plain["dtype"], str)


def test_shared_and_recursive_structures():
    value: list = [1]
    value.append(value)
    read = read_pickle(pickle.dumps(value), "x")
    assert read[1] is read
    assert CUT in str(to_plain(read))


def test_a_few_bytes_cannot_grow_without_bound():
    """Each level of a list holds the one below ten times over: 10**30 leaves in 700 bytes."""
    stream = b"]q\x00" + b"".join(
        b"](" + b"h" + bytes([i]) + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1])
        for i in range(30)
    )
    read = read_pickle(stream + b".", "x")
    assert len(str(to_plain(read))) < 10**7
    deep = b"]" + b"]" * 200_000 + b"a" * 200_000 + b"."
    assert CUT in str(to_plain(read_pickle(deep, "x")))


def test_a_deep_key_cannot_crash_the_hash():
    nested = b")" + b"\x85" * 100_000
    with pytest.raises(MalformedPickle):
        read_pickle(b"}" + nested + b"K\x01s.", "x")
    with pytest.raises(MalformedPickle):
        read_pickle(b"(" + nested + b"\x91.", "x")


def test_nested_rebuilders_cannot_exhaust_the_stack():
    """One rebuilder whose function is again a rebuilder, ten thousand deep."""
    one = b"ctorch._tensor\n_rebuild_from_type_v2\nq\x00"
    n = 10_000
    # (rebuild, None, (rebuild, None, (…), None), None): open n frames, then close them.
    stream = one + b"0" + b"h\x00(" + b"h\x00N(" * n + b"N" + b"tN" * n + b"tR."
    with pytest.raises(MalformedPickle):
        read_pickle(stream, "x")


@pytest.mark.parametrize(
    "stream",
    [
        b"",
        b".",
        b"N",
        b"R.",
        b"h\x05.",  # memo that was never filled
        b"(.",
        b"\x80\x04\x82\x01.",  # EXT1: the extension registry
        b"\x83\x01\x00.",
        b"\x84\x01\x00\x00\x00.",
        b"Psome id\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
        b"NQ.",  # a persistent id that is no storage
        b"K\x01K\x02b.",
        b"K\x01K\x02a.",
        b"K\x01K\x02K\x03s.",
        b"(K\x01d.",
        b"\xff.",
        b"L" + b"9" * 5000 + b"L\n.",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # bytes of an impossible length
        b"ccollections\nOrderedDict\nK\x01R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00))tR.",
    ],
)
def test_nonsense_is_named_malformed(stream):
    with pytest.raises(MalformedPickle):
        read_pickle(stream, "x")


def test_every_truncation_of_a_real_pickle_is_named_malformed():
    stream = _pickle_of_a_checkpoint()
    read_pickle(stream, "x")
    for length in range(len(stream)):
        with pytest.raises(MalformedPickle):
            read_pickle(stream[:length], "x")


def test_any_flipped_byte_gives_a_value_or_one_of_two_errors():
    stream = _pickle_of_a_checkpoint()
    generator = np.random.default_rng(0)
    for _ in range(2_000):
        damaged = bytearray(stream)
        for _ in range(int(generator.integers(1, 4))):
            damaged[generator.integers(len(damaged))] = generator.integers(256)
        with contextlib.suppress(MalformedPickle, UnsafePickle):
            to_plain(read_pickle(bytes(damaged), "x"))


def _pickle_of_a_checkpoint() -> bytes:
    file = io.BytesIO()
    args = argparse.Namespace(lr=np.float64(1e-3), out=pathlib.Path("/x"))
    torch.save({"model": {"fc.weight": torch.zeros(2, 3)}, "step": 7, "args": args}, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read("archive/data.pkl")


def test_tensors_are_described_not_made():
    read = read_pickle(_pickle_of_a_checkpoint(), "x")
    ref = read["model"]["fc.weight"]
    assert isinstance(ref, TensorRef)
    assert (ref.dtype, ref.size, ref.stride, ref.offset) == ("float32", (2, 3), (3, 1), 0)
    assert (ref.storage.key, ref.storage.numel) == ("0", 6)


def test_every_opcode_of_pickle_is_handled():
    """A new Python may add opcodes; each must be either understood or refused, not ignored."""
    source = Path(read_pickle.__code__.co_filename).read_text()
    refused = {"EXT1", "EXT2", "EXT4", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER", "STOP"}
    for opcode in pickletools.opcodes:
        assert f'"{opcode.name}"' in source or opcode.name in refused, opcode.name


@pytest.mark.parametrize(
    "name",
    [
        "argparse.Namespace",
        "pathlib.PosixPath",
        "numpy.core.multiarray.scalar",
        "numpy.dtype",
        "torch._utils._rebuild_tensor_v2",
        "torch.FloatStorage",
        "collections.OrderedDict",
        "builtins.set",
        "builtins.complex",
        "mypackage.code.Arguments",
        "transformers.training_args.TrainingArguments",
        "omegaconf.dictconfig.DictConfig",
        "torch.optim.lr_scheduler.LambdaLR",
        "copyreg.__newobj__",
    ],
)
def test_names_that_checkpoints_do_hold_are_let_through(name):
    assert not is_unsafe(*name.rsplit(".", 1))


@pytest.mark.parametrize(
    "module",
    ["os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "shutil", "socket", "pty"],
)
def test_every_listed_module_is_refused(module):
    for name in ("system", "anything", "a.b"):
        assert is_unsafe(module, name)
    assert is_unsafe(f"{module}.part", "f")
    assert is_unsafe(f"package.{module}", "f")
    assert is_unsafe("package", f"{module}.f")


@pytest.mark.parametrize("name", ["eval", "exec", "compile", "open", "__import__", "getattr"])
def test_every_listed_builtin_is_refused(name):
    for module in ("builtins", "__builtin__"):
        assert is_unsafe(module, name)
    assert is_unsafe("package", f"__builtins__.{name}")
