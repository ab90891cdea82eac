"""Drafters and finished runs in one comparison, on the tiny world."""

from __future__ import annotations

import json
import shutil
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import cli, compare_runs, storage
from dflash_diag.compare_runs import SUMMARY_SCHEMA, member_of_folder, members_of
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.history import Row, append
from dflash_diag.results import Verdict
from dflash_diag.runs import Run

G = 16


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """The tiny world, with a drafter of a shorter block and one that is called like another."""
    folder = tiny_world.write_world(tmp_path_factory.mktemp("world"))
    tiny_world.write_drafter(folder / "narrow", seed=3, block_size=4)
    tiny_world.write_drafter(folder / "other" / "drafter", seed=4)
    tiny_world.write_drafter(folder / "training" / "step_200", seed=5)
    return folder


@pytest.fixture(scope="module")
def config(world, tmp_path_factory) -> RunConfig:
    return RunConfig(
        target=str(world / "target"),
        drafter=str(world / "drafter"),
        reference=str(world / "reference"),
        prompts=str(world / "prompts.jsonl"),
        max_new_tokens=G,
        draws=400,
        out=str(tmp_path_factory.mktemp("run")),
    )


@pytest.fixture(scope="module")
def run(config) -> Run:
    made = Run.open(config)
    _ = made.capture
    return made


def finish(run: Run, folder: Path, **changes) -> Path:
    """A folder as a finished report leaves it, as far as comparing reads it."""
    storage.write_json(folder / "run.json", run.config.model_dump(mode="json"))
    summary = {
        "schema": SUMMARY_SCHEMA,
        "drafters": {role: run.name(role) for role in run.roles},
        "steps": {role: run.step_of(role) for role in run.roles},
        "capture": str(run.capture.path),
        "scores": {role: run.metrics(role) for role in run.roles},
        "config": run.config.model_dump(mode="json"),
        "provenance": run.provenance(),
    }
    summary = json.loads(storage.to_json_text(storage.plain(summary)))
    for path, value in changes.items():
        *parents, last = path.split("__")
        at = summary
        for name in parents:
            at = at[name]
        at[last] = value
    storage.write_json(folder / "summary.json", summary)
    return folder


def better_rounds(run: Run, by: int = 1) -> list[dict]:
    """The drafter's rounds, each of them ``by`` tokens longer."""
    rows = run.metrics("drafter")["per_prompt"]
    return [{**row, "rounds": [one + by for one in row["rounds"]]} for row in rows]


@pytest.fixture
def compare(world, run, tmp_path, capsys):
    """Run the verb on paths; -> code, JSON or stdout, stderr."""

    def go(*paths, **options):
        options = {"seed": 0, "json": "-"} | options
        arguments = ["compare", *map(str, paths)]
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}", str(value)] if value is not None else []
        code = cli.run(arguments)
        said = capsys.readouterr()
        out = json.loads(said.out) if options["json"] == "-" and code != 2 else said.out
        return code, out, said.err

    return go


@pytest.fixture
def here(run, tmp_path):
    """Options that name the capture that is there, and a folder for what is new."""
    return {"capture": run.capture.path, "out": tmp_path / "out"}


# --- drafters -------------------------------------------------------------------------------------


def test_the_contract_of_its_json(compare, world, here):
    code, found, _ = compare(world / "drafter", world / "reference", **here)
    assert code == 0
    assert found["schema"] == "dflash_diag.compare/1"
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"], pair["n_prompts"]) == ("drafter", "reference", 3)
    assert set(pair["delta_tau"]) == {"value", "lo", "hi"}
    assert pair["verdict"] in ("yes", "no") or pair["verdict"].startswith("needs ")


def test_it_captures_once_for_all_and_computes_nothing_twice(compare, world, tmp_path):
    options = {"target": world / "target", "prompts": world / "prompts.jsonl"}
    options |= {"max_new_tokens": G, "out": tmp_path / "out"}
    paths = [world / "drafter", world / "narrow", world / "reference"]
    _, first, _ = compare(*paths, **options)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")}
    assert len(list((tmp_path / "out" / "captures").glob("[!.]*"))) == 1
    assert len(list((tmp_path / "out" / "scores").iterdir())) == 3
    assert len(list((tmp_path / "out" / "compare").iterdir())) == 1
    _, second, _ = compare(*paths, **options)
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.*")} == files


def test_a_drafter_beside_itself_is_no_better(compare, world, here):
    _, found, _ = compare(world / "drafter", world / "drafter", **here)
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"]) == ("drafter", "drafter (2)")
    assert pair["delta_tau"] == {"value": 0, "lo": 0, "hi": 0}
    assert (pair["verdict"], pair["p"], pair["better"]) == ("no", 1, None)


def test_blocks_of_different_sizes_compare(compare, world, here):
    _, found, _ = compare(world / "drafter", world / "narrow", **here)
    assert [one["n_proposed"] for one in found["drafters"]] == [4, 3]
    assert found["pairs"][0]["n_prompts"] == 3
    assert [one["k"] for one in found["slots"]] == [1, 2, 3]


def test_two_of_one_name_get_the_folders_that_they_lie_in(compare, world, here):
    _, found, _ = compare(world / "drafter", world / "other" / "drafter", **here)
    names = [one["name"] for one in found["drafters"]]
    assert names == [f"{world.name}/drafter", "other/drafter"]


def test_the_drafter_comes_first_and_the_reference_last(compare, world, here):
    _, found, _ = compare(
        world / "narrow", drafter=world / "drafter", reference=world / "reference", **here
    )
    assert [one["name"] for one in found["drafters"]] == ["drafter", "narrow", "reference"]
    assert [one["reference"] for one in found["drafters"]] == [False, False, True]
    assert len(found["pairs"]) == 3


# --- finished runs --------------------------------------------------------------------------------


def test_a_finished_run_is_the_same_as_its_drafter(run, tmp_path):
    folder = finish(run, tmp_path / "done")
    for role, member in zip(("drafter", "reference"), members_of(run), strict=True):
        read = member_of_folder(folder, role)
        assert read.jumps == member.jumps
        assert read.facts == member.facts
        assert (read.line, read.n_proposed) == (member.line, member.n_proposed)
        for name in ("name", "step", "capture", "ids"):
            assert getattr(read.side, name) == getattr(member.side, name)
        assert (read.side.tokens == member.side.tokens).all()


def test_another_reading_is_said(compare, run, tmp_path):
    a = finish(run, tmp_path / "a", config__overrides=["context_bound=inclusive"])
    b = finish(run, tmp_path / "b")
    _, found, _ = compare(a, b)
    (unlike,) = found["differs"]
    assert unlike["what"] == "read"
    first, *others = unlike["values"].values()
    assert (first, set(others)) == ("context_bound=inclusive", {"as declared"})


def test_runs_need_no_model_any_more(compare, run, tmp_path):
    old = finish(run, tmp_path / "old", config__drafter="/gone/drafter", config__target="/gone")
    new = finish(run, tmp_path / "new", scores__drafter__per_prompt=better_rounds(run))
    code, found, _ = compare(new, old)
    assert code == 0
    assert [one["name"] for one in found["drafters"]] == [
        "drafter in new", "drafter in old", "reference"
    ]  # fmt: skip
    (pair,) = found["pairs"]  # the runs' own reference is on the axes, in no pair
    assert pair["delta_tau"]["value"] == pytest.approx(1)
    assert pair["verdict"] == "needs 3 more prompts"  # three signs decide nothing


def test_a_run_and_a_checkpoint_meet_on_the_runs_capture(compare, run, world, tmp_path):
    done = finish(run, tmp_path / "done")
    code, found, err = compare(done, world / "narrow", out=tmp_path / "out")
    assert code == 0, err
    assert [one["name"] for one in found["drafters"]] == ["drafter", "narrow"]
    _, turned, _ = compare(world / "narrow", done, out=tmp_path / "out")
    ends = [turned["pairs"][0]["delta_tau"][key] for key in ("value", "lo", "hi")]
    expected = [-found["pairs"][0]["delta_tau"][key] for key in ("value", "hi", "lo")]
    assert ends == pytest.approx(expected)


def test_what_was_not_alike_is_said_before_any_number(compare, run, tmp_path):
    one = finish(run, tmp_path / "one")
    two = finish(
        run,
        tmp_path / "two",
        provenance__content__target__dtype="bfloat16",
        provenance__content__versions={"torch": "1.0"},
    )
    _, out, _ = compare(one, two, json=None)
    lines = out.splitlines()
    said = [line for line in lines if line.startswith("Not measured alike: ")]
    assert lines[: len(said)] == said
    assert (
        "Not measured alike: target's dtype (drafter in one: float32, drafter in two: bfloat16"
        in out
    )
    assert "version of torch" in out
    assert "Is drafter in one really better than drafter in two? No, they do the same" in out


def test_the_exit_code_of_a_regression(compare, run, tmp_path):
    rows = [{"id": f"p{i}", "rounds": [2, 2, 2, 2 + i % 2]} for i in range(9)]
    worse = finish(run, tmp_path / "worse", scores__drafter__per_prompt=rows)
    rows = [{**row, "rounds": [one + 2 for one in row["rounds"]]} for row in rows]
    better = finish(run, tmp_path / "better", scores__drafter__per_prompt=rows)
    assert compare(better, worse, fail_on="fail")[0] == 0
    code, found, err = compare(worse, better, fail_on="fail")
    assert code == 1
    assert "--fail-on met: ✗ FAIL" in err
    assert found["pairs"][0]["better"] == "drafter in better"
    assert compare(better, worse)[1]["pairs"][0]["verdict"] == "yes"


# --- what is refused ------------------------------------------------------------------------------


def unfinished(folder: Path) -> Path:
    storage.write_json(folder / "run.json", {})
    return folder


REFUSED = {
    "only one": (lambda w, r, t: [w / "drafter"], {}, "two drafters or finished runs"),
    "a run that is not finished": (
        lambda w, r, t: [unfinished(t / "a"), w / "drafter"], {}, "no finished report"
    ),
    "a run of another version": (
        lambda w, r, t: [finish(r, t / "a", schema="x/9"), w / "drafter"], {}, "schema x/9"
    ),
    "a run without rounds": (
        lambda w, r, t: [finish(r, t / "a", scores__drafter__per_prompt=[{"id": "p"}]),
                         w / "drafter"],
        {},
        "does not tell what was decoded",
    ),
    "other text": (
        lambda w, r, t: [finish(r, t / "a"), finish(r, t / "b", provenance__content__text="x")],
        {},
        "a and drafter in b were scored on different text; expected the same prompts",
    ),
    "no such path": (lambda w, r, t: [t / "nowhere", w / "drafter"], {}, "no such file"),
    "nothing to score on": (lambda w, r, t: [w / "drafter", w / "reference"], {}, "--capture"),
    "no history": (
        lambda w, r, t: [finish(r, t / "a"), finish(r, t / "b")], {"history": "none.parquet"},
        "no such file: none.parquet",
    ),
    "a history that is none": (
        lambda w, r, t: [finish(r, t / "a"), finish(r, t / "b")], {"history": __file__},
        "is not a history",
    ),
    "an unknown limit": (lambda w, r, t: [w / "drafter"], {"fail_on": "maybe"}, "--fail-on maybe"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_gives_one_line(case, compare, world, run, tmp_path):
    paths, options, expected = REFUSED[case]
    code, out, err = compare(*paths(world, run, tmp_path), out=tmp_path / "out", **options)
    assert code == 2
    assert expected in err
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) == 1
    assert out == ""
    assert not (tmp_path / "out").exists()


def test_a_capture_that_was_moved_away_is_asked_for(compare, run, world, tmp_path):
    done = finish(run, tmp_path / "done", capture="captures/gone")
    code, _, err = compare(done, world / "narrow", out=tmp_path / "out")
    assert code == 2
    assert "give --capture, or --target and --prompts" in err


# --- in a report's run ----------------------------------------------------------------------------


def test_results_are_kept_and_others_do_not_mind_what_stands_beside(run, config, world):
    alone = run.result("compare.pairs")
    more = Run.open(config.model_copy(update={"beside": (str(world / "narrow"),)}))
    assert more.capture_digest == run.capture_digest
    found = more.result("compare.pairs")
    assert [one["name"] for one in found.params["drafters"]] == ["drafter", "narrow", "reference"]
    assert len(found.frame) == 3
    assert len(alone.frame) == 1
    key = "_result_key"
    assert getattr(more, key)("acceptance.headline") == getattr(run, key)("acceptance.headline")
    stored = run.out / "results" / "compare.pairs" / "result.json"
    before = stored.stat().st_mtime_ns
    again = Run.open(config.model_copy(update={"beside": (str(world / "narrow"),)}))
    assert again.result("compare.pairs").headline == found.headline
    assert stored.stat().st_mtime_ns == before


def test_a_drafter_alone_is_skipped_with_the_reason(config):
    alone = Run.open(config.model_copy(update={"reference": ""}))
    for part in ("pairs", "slots", "prompts", "trend"):
        found = alone.result(f"compare.{part}")
        assert found.verdict is Verdict.SKIPPED
        assert "--beside" in found.headline


def test_layers_that_a_drafter_beside_reads_are_captured_too(world, config, tmp_path):
    nested = {"mask_token_id": tiny_world.MASK, "target_layer_ids": [1, 3]}
    tiny_world.write_drafter(tmp_path / "taps", dflash_config=nested)
    update = {"beside": (str(tmp_path / "taps"),), "layers": "taps", "out": str(tmp_path / "out")}
    made = Run.open(config.model_copy(update=update))
    assert set(made.capture.layer_ids) >= {0, 1, 2, 3}
    assert len(made.compared()["drafters"]) == 3


def row(run: Run, step: int, tokens: int, **changes) -> Row:
    ids = tuple(run.scores("drafter").prompt_ids)
    finished = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=step)
    checkpoint = str(Path(run.config.drafter).parent / f"step_{step}")
    fields = {
        "run_id": f"r{step}", "name": f"step_{step}", "checkpoint": checkpoint, "step": step,
        "written": finished, "finished": finished, "verdict": "PASS", "cause": "",
        "tau_walked": tokens / 4, "tau_walked_lo": None, "tau_walked_hi": None,
        "tau_uniform": 1.0, "n_prompts": len(ids),
        "capture": run.text_digest, "out": "x", "ids": ids, "tokens": (tokens,) * len(ids),
        "rounds": (4,) * len(ids),
    }  # fmt: skip
    return Row(**fields | changes)


def test_the_trend_takes_the_history_in(config, world, run, tmp_path):
    history = tmp_path / "history.parquet"
    drafter = world / "training" / "step_200"
    update = {"drafter": str(drafter), "history": str(history)}
    for step, tokens in ((50, 4), (100, 8)):
        append(history, row(run, step, tokens, checkpoint=str(drafter.parent / f"step_{step}")))
    append(history, row(run, 150, 9, checkpoint=str(drafter.parent / "step_150"), capture="other"))
    made = Run.open(config.model_copy(update=update))
    found = made.result("compare.trend")
    points = found.frame[found.frame["kind"] == "checkpoint"]
    assert points["step"].tolist() == [50, 100, 200]
    assert points["value"].tolist()[:2] == [1, 2]
    assert found.estimates["since the step before"].value == pytest.approx(
        points["value"].iloc[-1] - 2
    )
    assert (found.frame["kind"] == "reference").sum() == 1
    assert "Left out: 1 checkpoint measured on other text." in found.notes
    # A history that grew is another trend.
    append(history, row(run, 150, 9, checkpoint=str(drafter.parent / "step_150")))
    grown = Run.open(config.model_copy(update=update)).result("compare.trend")
    assert grown.frame["step"].dropna().tolist() == [50, 100, 150, 200]


def test_a_run_beside_that_saw_other_text_stops_before_the_rest(config, run, tmp_path):
    other = finish(run, tmp_path / "b", provenance__content__text="x" * 64)
    update = {"beside": (str(other),), "out": str(tmp_path / "out")}
    made = Run.open(config.model_copy(update=update))
    with pytest.raises(BadInput, match="scored on different text"):
        made.compute()
    assert not (tmp_path / "out" / "lossless").exists()


def test_a_checkpoint_is_no_run_even_where_somebody_kept_a_run_json(world, tmp_path):
    folder = shutil.copytree(world / "drafter", tmp_path / "d")
    storage.write_json(folder / "run.json", {})
    assert not compare_runs.is_run(folder)
