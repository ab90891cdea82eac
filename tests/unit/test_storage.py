"""A file is whole or not there; an output that cannot be written costs one clear line."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_diag import storage
from dflash_diag.errors import BadInput, OutputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writes_text_as_utf8_and_makes_the_folder(tmp_path):
    path = storage.atomic_write(tmp_path / "a" / "b.txt", "τ = 2.7\n")
    assert path.read_bytes() == "τ = 2.7\n".encode()
    assert names(path.parent) == ["b.txt"]


def test_a_new_file_has_the_permissions_of_any_other(tmp_path):
    (tmp_path / "plain").write_text("")
    storage.atomic_write(tmp_path / "ours", "")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_writing_through_a_link_keeps_the_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    storage.atomic_write(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "result.json"
    path.write_text("old")
    monkeypatch.setattr(os if step == "fsync" else Path, step, no_space)
    with pytest.raises(OutputError, match="result.json: the disk is full; free some space"):
        storage.atomic_write(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result.json"]


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_files_that_belong_together_are_all_new_or_all_old(tmp_path, monkeypatch):
    first = {"index.html": "old", "page.html": "old"}
    storage.write_together(tmp_path, first)
    order, replace = [], Path.replace

    def replaced(part, final):
        order.append(final.name)
        return replace(part, final)

    monkeypatch.setattr(Path, "replace", replaced)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limit[1]))
    try:
        with pytest.raises(OutputError, match="page.html: files may not grow that large"):
            storage.write_together(tmp_path, {"index.html": "new", "page.html": "x" * 2**17})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {name: (tmp_path / name).read_text() for name in names(tmp_path)} == first
    assert order == []
    storage.write_together(tmp_path, {"index.html": "new", "page.html": "x" * 2**17})
    assert order == ["page.html", "index.html"]
    assert names(tmp_path) == ["index.html", "page.html"]


def test_a_device_that_is_really_full(monkeypatch):
    monkeypatch.delattr(Path, "replace")  # were it replaced, root would lose the device
    with pytest.raises(OutputError, match="the disk is full"):
        storage.atomic_write("/dev/full", "x")


def test_a_pipe_is_written_in_place(tmp_path):
    code = "from dflash_diag.storage import write_json; write_json('/dev/stdout', {'a': 1})"
    out = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout
    assert json.loads(out) == {"a": 1}


@pytest.mark.parametrize("write", [storage.atomic_write, storage.make_dir, storage.write_json])
def test_a_path_through_a_file(tmp_path, write):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x"
    arguments = [path] if write is storage.make_dir else [path, "content"]
    with pytest.raises(OutputError, match=r"part of the path is a file|a file is in the way"):
        write(*arguments)
    assert names(tmp_path) == ["file"]


def test_a_folder_or_a_file_in_the_way(tmp_path):
    with pytest.raises(OutputError, match="it is a folder; name a file"):
        storage.atomic_write(tmp_path, "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a file is in the way"):
        storage.make_dir(tmp_path / "file")
    with (
        pytest.raises(OutputError, match="a file is in the way"),
        storage.staged_dir(tmp_path / "file"),
    ):
        pass
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(OutputError, match="permission denied"):
        storage.atomic_write(tmp_path / "x", "")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_file_system_where_nothing_can_be_made():
    with pytest.raises(OutputError, match="cannot write /proc/nothing/here"):
        storage.make_dir("/proc/nothing/here")


def test_errors_that_are_not_about_writing_keep_their_type(tmp_path):
    with pytest.raises(BlockingIOError), storage.output_errors(tmp_path):
        raise BlockingIOError(errno.EAGAIN, "busy")


def test_a_full_disk_met_by_safetensors(tmp_path):
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with pytest.raises(SafetensorError) as real:
        save_file({"a": np.zeros(1)}, tmp_path / "no" / "folder.safetensors")
    assert storage._errno(real.value) == errno.ENOENT
    text = str(real.value).replace("(os error 2)", "(os error 28)")
    with pytest.raises(OutputError, match="the disk is full"), storage.output_errors("x"):
        raise SafetensorError(text)
    with pytest.raises(SafetensorError), storage.output_errors("x"):
        raise SafetensorError("Error while deserializing header: header too large")


def test_a_staged_folder_appears_whole(tmp_path):
    final = tmp_path / "deep" / "capture"
    with storage.staged_dir(final) as stage:
        (stage / "a").write_text("1")
        assert not final.exists()
    assert names(final) == ["a"]
    assert names(final.parent) == ["capture"]


def test_a_staged_folder_replaces_the_old_one(tmp_path):
    final = tmp_path / "capture"
    for name in ("old", "new"):
        with storage.staged_dir(final) as stage:
            (stage / name).write_text("")
    assert names(final) == ["new"]
    assert names(tmp_path) == ["capture"]


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (ValueError("x"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (FileNotFoundError(errno.ENOENT, "an input"), FileNotFoundError),
        (OSError(errno.ENOSPC, "full"), OutputError),
    ],
)
def test_a_staged_folder_that_fails_leaves_no_trace(tmp_path, raised, seen):
    final = tmp_path / "capture"
    final.mkdir()
    (final / "old").write_text("")
    with pytest.raises(seen), storage.staged_dir(final) as stage:
        (stage / "half").write_text("")
        raise raised
    assert names(final) == ["old"]
    assert names(tmp_path) == ["capture"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_take_its_place(tmp_path):
    final = tmp_path / "capture"
    final.mkdir()
    (final / "old").write_text("")
    with pytest.raises(OutputError):
        storage.replace_dir(tmp_path / "missing", final)
    assert names(tmp_path) == ["capture"]
    assert names(final) == ["old"]


def test_numbers_that_are_unknown_become_null(tmp_path):
    values = {"nan": float("nan"), "inf": -np.inf, "f4": np.float32("nan"), "none": None}
    path = storage.write_json(tmp_path / "x.json", values)
    assert storage.read_json(path) == dict.fromkeys(values)
    array = storage.write_json(tmp_path / "y.json", np.array([[1.0, np.nan]]))
    assert storage.read_json(array) == [[1.0, None]]


def test_what_json_text_looks_like():
    class Own:
        def to_json(self):
            return {"value": np.float64(0.5), "ids": (np.int64(3), True)}

    value = {"b": Own(), 1: PurePosixPath("a/b"), "ü": []}
    assert storage.to_json_text(value) == (
        '{\n  "b": {\n    "value": 0.5,\n    "ids": [\n      3,\n      true\n    ]\n  },\n'
        '  "1": "a/b",\n  "ü": []\n}\n'
    )


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), {None: 1}, {True: 1}, 1j])
def test_values_without_a_json_form_are_refused(tmp_path, value):
    with pytest.raises(TypeError):
        storage.write_json(tmp_path / "x.json", value)
    assert names(tmp_path) == []


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # A lone surrogate has no UTF-8 form.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(json_values)
def test_json_comes_back_as_it_was(value):
    assert json.loads(storage.to_json_text(value)) == value


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values))
def test_the_content_key_ignores_the_order_of_keys(value):
    backwards = dict(reversed(value.items()))
    assert storage.content_key(value) == storage.content_key(backwards)
    assert storage.content_key(value) != storage.content_key([value])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,}', r"not JSON \(line 1, column \d+"),
        (b"", r"not JSON \(line 1, column 1"),
        (b"\xff\xfe\xfd", "not text"),
        (None, "no such file"),
    ],
)
def test_files_that_are_not_json(tmp_path, content, message):
    if content is not None:
        (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(BadInput, match=message):
        storage.read_json(tmp_path / "x.json")


def test_reading_a_folder_as_json(tmp_path):
    with pytest.raises(BadInput, match="is a folder"):
        storage.read_json(tmp_path)


def test_sha256_of_a_file(tmp_path):
    content = b"abc" * 100_000
    (tmp_path / "x").write_bytes(content)
    assert storage.sha256_file(tmp_path / "x") == hashlib.sha256(content).hexdigest()
    with pytest.raises(BadInput, match="no such file"):
        storage.sha256_file(tmp_path / "y")
