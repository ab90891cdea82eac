"""Files on disk: whole or not there at all, and readable without this package.

A file is written beside its destination, synced and renamed; a folder is filled under a temporary
name and then takes its place. A reader therefore never meets half a result, and a full disk or a
read-only folder costs one clear line (`OutputError`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from safetensors import SafetensorError

from dflash_diag import machines
from dflash_diag.errors import BadInput, OutputError

if TYPE_CHECKING:
    import pandas as pd
    from filelock import BaseFileLock

StrPath = str | os.PathLike[str]

_CANNOT_WRITE = {
    errno.ENOSPC: ("the disk is full", "free some space, or write elsewhere with --out"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or write elsewhere with --out"),
    errno.EFBIG: ("files may not grow that large", "raise the limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "write elsewhere with --out"),
    errno.EACCES: ("permission denied", "change its permissions, or write elsewhere with --out"),
    errno.EPERM: ("not permitted", "change its permissions, or write elsewhere with --out"),
    errno.ENOTDIR: ("part of the path is a file", "name a path that leads through folders"),
    errno.ENOENT: ("no folder can be made there", "write elsewhere with --out"),
    errno.EEXIST: ("a file is in the way", "remove it, or write elsewhere with --out"),
    errno.EISDIR: ("it is a folder", "name a file"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter one"),
}
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
WAIT_S = 60.0
"""Seconds to wait for another process that has something short to write."""
WAIT_S = 3600.0
"""Seconds that another process may take to make something; then it is made here as well."""
_LEFT_S = 86400.0
"""Age at which something half-written belongs to nobody any more."""
_HALF = re.compile(r"\..+\.[0-9a-f]{8}")
"""Names that `_beside` makes."""


@contextmanager
def output_errors(path: StrPath) -> Iterator[None]:
    """Turn the ways in which writing to ``path`` fails into `OutputError`.

    Put it around writes only: a failed *read* inside would be reported as an unwritable output.
    Any other error passes through unchanged.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        code = _errno(error)
        if code not in _CANNOT_WRITE:
            raise
        why, do = _CANNOT_WRITE[code]
        raise OutputError(f"cannot write {path}: {why}", do=do) from error


def make_dir(path: StrPath) -> Path:
    """The folder ``path``, created with its parents if it is not there.

    Raises
    ------
    OutputError
        It cannot be created, or is a file.
    """
    with output_errors(path):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def atomic_write(path: StrPath, content: bytes | str) -> Path:
    """Write a whole file, creating its folder; text is UTF-8, what is no character spelled out.

    A device or pipe (``/dev/stdout``) cannot be replaced, so it is written in place.

    Raises
    ------
    OutputError
        The folder is read-only or no folder, or the disk is full. What was there is unchanged.
    """
    path = Path(path)
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    with output_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return path
        with atomic_file(path) as file:
            file.write(data)
    return path


@contextmanager
def atomic_file(path: StrPath) -> Iterator[BinaryIO]:
    """A new file to write into, which becomes ``path`` when the body succeeds.

    When the body raises, what was there is unchanged. A full disk met in the body becomes
    `OutputError`; every other error keeps its type.
    """
    final = Path(os.path.realpath(path))  # a link to itself is replaced, `resolve` would raise
    part = _beside(final)
    with output_errors(path):
        final.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("xb")
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        with output_errors(path):
            part.replace(final)
    except OSError as error:
        if _errno(error) in _FULL:
            with output_errors(path):
                raise
        raise
    finally:
        part.unlink(missing_ok=True)


def write_together(folder: StrPath, files: Mapping[str, str]) -> None:
    """Write texts that belong together: none takes its place before all are whole, the first last.

    Parameters
    ----------
    files
        Content by name.

    Raises
    ------
    OutputError
        One cannot be written. What was there is unchanged.
    """
    with ExitStack() as whole:
        for name, text in files.items():
            file = whole.enter_context(atomic_file(Path(folder) / name))
            file.write(text.encode("utf-8", "backslashreplace"))
            file.flush()


@contextmanager
def staged_dir(final: StrPath) -> Iterator[Path]:
    """A new empty folder beside ``final`` that becomes ``final`` when the body succeeds.

    When the body raises, the staged folder is removed and ``final`` stays as it was. A full disk
    met in the body becomes `OutputError`; every other error keeps its type.
    """
    final = Path(final)
    with output_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        stage = _beside(final)
        stage.mkdir()
    try:
        yield stage
        replace_dir(stage, final)
    except (OSError, SafetensorError) as error:
        if _errno(error) in _FULL:
            with output_errors(final):
                raise
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def replace_dir(tmp: StrPath, final: StrPath) -> None:
    """Move folder ``tmp`` to ``final`` on the same file system, replacing a folder there.

    The old folder is moved aside first and comes back if the new one cannot take its place.
    """
    tmp, final = Path(tmp), Path(final)
    with output_errors(final):
        if not final.exists():
            tmp.rename(final)
            return
        if not final.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        old = _beside(final)
        final.rename(old)
        try:
            tmp.rename(final)
        except OSError:
            old.rename(final)
            raise
        shutil.rmtree(old, ignore_errors=True)


def alone(path: StrPath, *, timeout: float) -> BaseFileLock:
    """To be entered: keeps other processes of this machine out of whatever ``path`` stands for.

    The lock is no file beside it: ``path`` need not be there, and shared file systems often cannot
    lock. It ends with the process that holds it, however that ends.

    Parameters
    ----------
    timeout
        Seconds to wait before `filelock.Timeout`.
    """
    from filelock import FileLock

    name = f"dflash_diag-{os.getuid() if hasattr(os, 'getuid') else 0}"
    key = content_key(str(Path(path).resolve()))[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"{name}-{key}.lock", timeout=timeout)


def made_once(path: Path, make: Callable[[], Any]) -> None:
    """Call ``make``, which writes ``path``, unless it is there.

    Another process of this machine that is making it is waited for, but not one that hangs.
    """
    from filelock import Timeout

    if path.is_file():
        return
    with ExitStack() as stack:
        with suppress(Timeout):
            stack.enter_context(alone(path, timeout=WAIT_S))
        if not path.is_file():
            make()


def kept_json(path: Path, make: Callable[[], Any]) -> Any:
    """What ``make`` returns, as JSON has it; made by whichever process asks first."""
    made_once(path, lambda: write_json(path, plain(make())))
    return read_json(path)


@contextmanager
def kept_alone(out: StrPath, other: str = "another process is writing to") -> Iterator[None]:
    """Keep other processes out of an output folder, which need not be there yet.

    What a process that was killed left half-written there is removed, see `sweep`.

    Parameters
    ----------
    other
        Begins the sentence about another process of this machine.

    Raises
    ------
    OutputError
        Another process is at work in it, here or on another machine (see `machines`).
    """
    from filelock import Timeout

    try:
        with alone(out, timeout=0), machines.kept_off(Path(out).resolve()):
            sweep(Path(out))
            yield
    except Timeout as error:
        raise OutputError(f"{other} {out}", do="wait for it, or give another --out") from error


def sweep(out: Path) -> None:
    """Remove from ``out``, and from the folders in it, what a killed process left half-written.

    Only what is a day old: until then it may belong to a process that does not ask who else is
    there, a notebook say.
    """
    old = time.time() - _LEFT_S
    for path in [*out.glob(".*"), *out.glob("*/.*")]:
        with suppress(OSError):  # whoever else removes it, or keeps it from us
            if _HALF.fullmatch(path.name) and path.lstat().st_mtime < old:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: numbers that are not finite become None.

    Understands mappings, sequences, paths, numpy scalars and arrays, and anything with
    ``to_json()``.

    Raises
    ------
    TypeError
        A value of another type: better loud here than a string nobody can parse later.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for method in ("to_json", "tolist"):
        if hasattr(value, method):
            return plain(getattr(value, method)())
    raise TypeError(f"{type(value).__name__} has no JSON form")


def to_json_text(value: Any) -> str:
    """``value`` as indented JSON text, keys in their own order, ending in a newline.

    Lone surrogates, which other people's JSON may hold, stay escaped as in ASCII.
    """
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()


def write_json(path: StrPath, value: Any) -> Path:
    """Write ``value`` as JSON, atomically; see `plain` for what it may contain."""
    return atomic_write(path, to_json_text(value))


def read_json(path: StrPath) -> Any:
    """Read a JSON file.

    Raises
    ------
    BadInput
        No such file, or not JSON (with line and column).
    """
    with input_errors(path, "a JSON file"):
        if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
            raise BadInput(f"{path} is a pipe or a device", "a JSON file")
        content = _read_bytes(Path(path), MAX_JSON)
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadInput(f"{path} is not JSON ({where}: {error.msg})", "a JSON file") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not text", "a JSON file in UTF-8") from error
    except (ValueError, RecursionError) as error:  # a number or a nesting without end
        raise BadInput(f"{path} cannot be read ({error})", "a JSON file") from error


def read_text(path: StrPath, expected: str) -> str:
    """The text of a file that somebody named, or of a pipe.

    Parameters
    ----------
    expected
        What the file should be, for the error.

    Raises
    ------
    BadInput
        No such file, a folder, not UTF-8, or more than `MAX_TEXT` bytes.
    """
    with input_errors(path, expected):
        return _read_bytes(Path(path), MAX_TEXT).decode("utf-8-sig")


def read_parquet(path: StrPath, columns: Iterable[str] = ()) -> pd.DataFrame:
    """A parquet file as a table.

    Parameters
    ----------
    columns
        Names that it must have.

    Raises
    ------
    BadInput
        No such file, not a parquet file, damaged, or without one of the columns.
    """
    import pandas as pd

    with input_errors(path, "a parquet file"):
        if not Path(path).is_file():
            raise BadInput(f"no such file: {path}")
        try:
            table = pd.read_parquet(path)
            for name in table.select_dtypes("string"):
                table[name].to_numpy()  # its text is decoded only now
        except OSError:
            raise
        except Exception as error:  # pandas raises whatever odd metadata leads to
            raise BadInput(f"{path} is damaged ({error})", "a parquet file") from error
    lacking = [name for name in columns if name not in table.columns]
    if lacking or not table.columns.is_unique:
        why = f"no column {lacking[0]}" if lacking else "two columns of one name"
        raise BadInput(f"{path} has {why}", "a table of this package")
    return table


@contextmanager
def input_errors(path: StrPath, expected: str) -> Iterator[None]:
    """Turn the ways in which reading ``path`` fails into `BadInput`."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise BadInput(f"no such file: {path}", expected) from error
    except IsADirectoryError as error:
        raise BadInput(f"{path} is a folder", expected) from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start})", expected) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"{path} cannot be read ({why})", expected) from error


MAX_JSON = 2**26
"""Bytes of a JSON file; the largest index of shards has a few million."""
MAX_TEXT = 2**28
"""Bytes of a file of prompts, a log and the like."""


def _read_bytes(path: Path, most: int) -> bytes:
    """All of a file, which may be a pipe, or a device without end."""
    content = bytearray()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            content += piece
            if len(content) > most:
                raise BadInput(f"{path} has more than {most // 2**20} MiB", "a smaller file")
    return bytes(content)


def sha256_file(path: StrPath) -> str:
    """Hexadecimal sha256 of a file's bytes, read in pieces.

    Raises
    ------
    BadInput
        No such file.
    """
    with input_errors(path, "a file"):
        if not Path(path).is_file():
            raise BadInput(f"no such file: {path}")
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def content_key(*parts: Any) -> str:
    """Hexadecimal sha256 of JSON-able values: equal content, equal key, whatever the key order."""
    text = json.dumps(plain(parts), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _errno(error: Exception) -> int | None:
    """The system's error number; safetensors, written in Rust, gives it only in its text."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _beside(path: Path) -> Path:
    """A hidden name in the same folder that nothing uses yet."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"


def _key(key: Any) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise TypeError(f"a JSON key cannot be {type(key).__name__}")
