"""The fuzzer in a short form, and proof that it would notice."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import corpus
import sandbox

from dflash_diag.errors import BadInput, DiagError

INPUTS = 600


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return corpus.write_world(tmp_path_factory.mktemp("world"))


@pytest.mark.enable_socket
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks while threads of pyarrow wait
def test_no_mutated_input_does_more_than_be_refused(world, tmp_path):
    outcomes = sandbox.fuzz(sandbox.shares(INPUTS), 0, world, tmp_path / "kept")
    crashed = [one for one in outcomes if one.verdict == "crashed"]
    assert not crashed, "\n\n".join(f"{one.kind} {one.index}: {one.said}" for one in crashed[:5])
    assert {one.kind for one in outcomes} == set(corpus.KINDS)
    assert len(outcomes) >= INPUTS
    verdicts = [one.verdict for one in outcomes]
    # A mutator that ruins every input, or none, would find nothing.
    assert 0.1 < verdicts.count("accepted") / len(verdicts) < 0.7


def test_inputs_follow_from_the_seed(world, tmp_path, monkeypatch):
    monkeypatch.setenv("FUZZ_CANARY", "canary")

    def made(name, seed):
        kind = corpus.KINDS["checkpoint folder"]
        folder = tmp_path / name
        folder.mkdir()
        path = sandbox.make(kind, 5, seed, world, folder)
        files = sorted(p for p in path.rglob("*") if p.is_file() and not p.is_symlink())
        return [(p.relative_to(folder), p.read_bytes()) for p in files]

    assert made("a", 1) == made("b", 1)
    assert made("c", 2) != made("d", 3)


def hang(path: Path, world: Path, out: Path) -> None:
    while True:
        time.sleep(0.1)


def swallow(path: Path, world: Path, out: Path) -> None:
    with contextlib.suppress(Exception):
        hang(path, world, out)


def die(path: Path, world: Path, out: Path) -> None:
    os._exit(7)


def hoard(path: Path, world: Path, out: Path) -> None:
    bytearray(b"x") * (sandbox.RESIDENT + 2**27)


def exhaust(path: Path, world: Path, out: Path) -> None:
    bytearray(2 * sandbox.MEMORY)


def unpickle(path: Path, world: Path, out: Path) -> None:
    pickle.loads(b"cfuzz_canary\ntouch\n)R.")


def shell(path: Path, world: Path, out: Path) -> None:
    os.system("true")


def connect(path: Path, world: Path, out: Path) -> None:
    import socket

    with socket.socket() as one:
        one.settimeout(0.01)
        one.connect_ex(("192.0.2.1", 80))


def write_beside(path: Path, world: Path, out: Path) -> None:
    (world / "beside").write_text("x")


def remove_beside(path: Path, world: Path, out: Path) -> None:
    (world / "never there").unlink(missing_ok=True)


def fail(path: Path, world: Path, out: Path) -> None:
    raise ValueError("no DiagError")


def steer(path: Path, world: Path, out: Path) -> None:
    error = DiagError()
    error.args = ("\x1b[2J",)  # made any other way, it would be spelled out
    raise error


FAULTS = {
    hang: "more than 1 s",
    swallow: "more than 1 s",
    die: "the worker died",
    hoard: "MiB more memory",
    exhaust: "MemoryError",
    unpickle: "canary",
    shell: "os.system",
    connect: "socket.connect",
    write_beside: "for writing",
    remove_beside: "os.remove",
    fail: "ValueError: no DiagError",
    steer: "no line of printable text",
}


@pytest.mark.enable_socket
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("read", FAULTS, ids=lambda read: read.__name__)
def test_every_fault_is_seen(world, tmp_path, monkeypatch, read):
    if read in (hang, swallow):
        monkeypatch.setattr(sandbox, "SECONDS", 1)
    kind = corpus.Kind("prompts", 1, corpus.KINDS["prompts"].write, read)
    first, second = sandbox.run(kind, range(2), 0, world, tmp_path / "kept")
    assert first.verdict == "crashed"
    assert FAULTS[read] in first.said
    # One fault does not hide the next, but memory that was held once counts no more.
    assert second.verdict == ("accepted" if read is hoard else "crashed")
    assert sorted((tmp_path / "kept").glob("prompts.0.*"))


def test_what_is_refused_in_one_line_is_no_fault(world):
    def refuse(path, world, out):
        raise BadInput(f"{path} is odd\x1b", "something else")

    kind = corpus.Kind("prompts", 1, corpus.KINDS["prompts"].write, refuse)
    (outcome,) = sandbox.run(kind, range(1), 0, world, None)
    assert outcome.verdict == "refused"


def test_an_input_that_was_kept_can_be_read_again(world, tmp_path):
    kind = corpus.Kind("prompts", 1, corpus.KINDS["prompts"].write, fail)
    list(sandbox.run(kind, range(1), 0, world, tmp_path))
    kept = tmp_path / "prompts.0.tar"
    assert sandbox.kind_of(kept).name == "prompts"
    assert sandbox.replay(kind, kept, world).said.endswith("no DiagError\n")
