"""Two runs of the same thing have the same provenance, times apart."""

from __future__ import annotations

import getpass
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone

import pytest

from dflash_diag import paths, provenance
from dflash_diag.errors import BadInput
from dflash_diag.provenance import collect


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"weights")
    return path


def test_the_content_repeats_and_the_times_do_not_enter(weights, monkeypatch):
    moments = [datetime(2026, 1, 2, 3, 4, second, tzinfo=UTC) for second in (5, 6)]
    records = []
    for moment in moments:
        monkeypatch.setattr(provenance, "utc_now", lambda moment=moment: moment)
        records.append(collect(given={"seed": 1}, files={"drafter": weights}, dtype="float32"))
    first, second = records
    assert first["content"] == second["content"]
    assert first["key"] == second["key"]
    assert first["times"] == {"started": None, "finished": "2026-01-02T03:04:05+00:00"}
    assert first["times"] != second["times"]


def test_what_decides_the_numbers_changes_the_key(weights):
    keys = {collect()["key"], collect(seed=0)["key"], collect(seed=1)["key"]}
    keys |= {collect(given={"seed": 1})["key"], collect(defaulted={"seed": 1})["key"]}
    keys.add(collect(files={"drafter": weights})["key"])
    weights.write_bytes(b"other weights")
    keys.add(collect(files={"drafter": weights})["key"])
    assert len(keys) == 7


def test_files_are_named_without_their_folder(weights):
    record = collect(files={"drafter": weights})
    assert record["content"]["files"]["drafter"]["name"] == "model.safetensors"
    assert str(weights.parent) not in json.dumps(record)
    with pytest.raises(BadInput, match="no such file"):
        collect(files={"drafter": weights.parent / "gone"})


def test_nothing_names_the_machine_or_its_user():
    text = json.dumps(provenance.machine())
    assert platform.node() not in text
    assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)


def test_given_and_defaulted_parameters_are_told_apart():
    parameters = collect(given={"seed": 3}, defaulted={"dtype": "auto"})["content"]["parameters"]
    assert parameters == {"given": {"seed": 3}, "defaulted": {"dtype": "auto"}}


def test_times_are_utc():
    started = datetime(2026, 5, 1, 12, 0, 0, 999, tzinfo=timezone(timedelta(hours=2)))
    assert collect(started=started)["times"]["started"] == "2026-05-01T10:00:00+00:00"
    assert provenance.utc_now().utcoffset() == timedelta(0)


def test_versions_are_read_without_importing_anything():
    code = (
        "import sys; from dflash_diag.provenance import collect; v = collect()['content'];"
        "assert v['versions']['torch'] and v['versions']['numpy'], v;"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert provenance.versions()["python"] == platform.python_version()


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-distribution",))
    assert provenance.versions()["no-such-distribution"] is None


def test_cpu_facts():
    facts = provenance.device_facts("cpu")
    assert facts["device"] == "cpu"
    assert facts["threads"] >= 1


def git(root, *arguments):
    who = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", "-C", root, *who, *arguments], check=True, capture_output=True)


def test_the_revision_of_a_checkout(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "checkout", lambda: tmp_path)
    assert provenance.source_revision() is None
    git(tmp_path, "init", "-q")
    assert provenance.source_revision() is None, "no commit yet"
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-q", "-m", "one")
    revision = provenance.source_revision()
    assert revision is not None
    assert re.fullmatch("[0-9a-f]{40}", revision["commit"])
    assert revision["dirty"] is False
    (tmp_path / "stray").write_text("untracked files are somebody's output")
    assert provenance.source_revision() == revision
    (tmp_path / "file").write_text("2")
    assert provenance.source_revision() == revision | {"dirty": True}


def test_an_installed_copy_has_no_revision(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "checkout", lambda: None)
    assert provenance.source_revision() is None


def test_without_git_the_revision_is_unknown(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(provenance, "checkout", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.source_revision() is None


def test_an_installed_copy_says_where_the_data_are(tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "dflash_diag")
    assert paths.checkout() is None
    assert paths.notebooks_dir() == tmp_path / "dflash_diag" / "_notebooks"
    with pytest.raises(BadInput, match="they come with the repository.*run in a checkout"):
        paths.data_dir()
