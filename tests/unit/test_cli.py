"""The command line: one clear line for bad input, exit codes, help that answers at once."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world

from dflash_diag import cli, config, runs
from dflash_diag.errors import Interrupted

LONG_ENOUGH = "16"


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> Path:
    return tiny_world.write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def capture(world, tmp_path_factory) -> Path:
    """A capture of the tiny target, made by the verb."""
    out = tmp_path_factory.mktemp("capture") / "made"
    arguments = ["capture", "--target", world / "target", "--prompts", world / "prompts.jsonl"]
    arguments += ["--drafter", world / "drafter", "--max-new-tokens", LONG_ENOUGH, "--out", out]
    assert cli.run([str(one) for one in arguments]) == 0
    return out


@pytest.fixture
def score(world, tmp_path, capsys):
    """Run ``score`` on the tiny world with some options replaced; -> code, stdout, stderr."""

    def run(verb="score", **options):
        given = {
            "target": world / "target",
            "drafter": world / "drafter",
            "prompts": world / "prompts.jsonl",
            "max-new-tokens": LONG_ENOUGH,
            "out": tmp_path / "out",
        } | options
        arguments = [verb]
        for name, value in given.items():
            for one in value if isinstance(value, list) else [value]:
                arguments += [f"--{name}", str(one)] if one is not None else []
        code = cli.run(arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def changed_drafter(world, folder: Path, **changes) -> Path:
    """The drafter's weights beside a configuration with some values replaced."""
    shutil.copytree(world / "drafter", folder)
    content = json.loads((folder / "config.json").read_text())
    nested = changes.pop("dflash_config", {})
    content |= changes
    content["dflash_config"] |= nested
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def folder_for_weights(world, folder: Path) -> Path:
    shutil.copytree(world / "drafter", folder)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    return folder


def prompt_file(folder: Path, *lines) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return path


BAD = {
    "no such drafter": (lambda w, t: {"drafter": t / "nowhere"}, "no such file"),
    "no such target": (lambda w, t: {"target": t / "nowhere"}, "no such folder"),
    "not a checkpoint": (lambda w, t: {"drafter": w / "prompts.jsonl"}, "prompts.jsonl"),
    "nothing to score on": (lambda w, t: {"target": None, "prompts": None}, "--capture"),
    "no prompts": (lambda w, t: {"prompts": None}, "--prompts"),
    "fc of other taps": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", dflash_config={
            "target_layer_ids": [0, 1, 2]})},
        "fc.weight",
    ),
    "layer out of range": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", dflash_config={
            "target_layer_ids": [0, 9]})},
        "out of range",
    ),
    "another vocabulary": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", vocab_size=999)}, "vocab_size=999"
    ),
    "another width": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", hidden_size=48)}, "hidden"
    ),
    "mask outside the embedding": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", dflash_config={
            "mask_token_id": 5000})},
        "mask_token_id 5000",
    ),
    "block of one": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", block_size=1)}, "at least 2"
    ),
    "no block fits": (lambda w, t: {"max-new-tokens": 4}, "--max-new-tokens 4 is too short"),
    "no prompt file": (lambda w, t: {"prompts": t / "none.jsonl"}, "no such file"),
    "empty prompt file": (lambda w, t: {"prompts": prompt_file(t, "\n")}, "no prompt"),
    "malformed prompt": (lambda w, t: {"prompts": prompt_file(t, '{"id": ')}, "line 1"),
    "duplicate id": (
        lambda w, t: {"prompts": prompt_file(t, {"id": "a", "text": "x"}, "\n",
                                             {"id": "a", "text": "y"})},
        "line 2",
    ),
    "token outside the vocabulary": (
        lambda w, t: {"prompts": prompt_file(t, {"id": "a", "prompt_ids": [9999]})}, "9999"
    ),
    "prompt longer than the model": (
        lambda w, t: {"prompts": prompt_file(t, {"id": "a", "prompt_ids": [7] * 300})},
        "300 tokens",
    ),
    "unknown field of the convention": (lambda w, t: {"set": "colour=red"}, "colour=red"),
    "impossible value of the convention": (
        lambda w, t: {"set": "context_bound=loose"}, "context_bound"
    ),
    "a RoPE base of nothing": (lambda w, t: {"set": "rope_theta=nan"}, "rope_theta is nan"),
    "a window of nothing": (lambda w, t: {"set": "window=0"}, "at least 1 token"),
    "a cap of nothing": (lambda w, t: {"set": "softcap=nan"}, "softcap is nan"),
    "a scale without end": (lambda w, t: {"set": "embedding_scale=inf"}, "embedding_scale is inf"),
    "logits times nothing": (lambda w, t: {"set": "logit_scale=0"}, "logit_scale is 0"),
    "an odd rotation": (lambda w, t: {"set": "rotary_width=7"}, "an even number"),
    "a rotation wider than a head": (lambda w, t: {"set": "rotary_width=1000"}, "the head's width"),
    "a scaling that is no object": (lambda w, t: {"set": "rope_scaling=3"}, "an object"),
    "a scaling without its number": (
        lambda w, t: {"set": 'rope_scaling={"rope_type":"linear"}'}, "rope_scaling.factor is None"
    ),
    "another activation": (
        lambda w, t: {"drafter": changed_drafter(w, t / "d", hidden_act="gelu")}, "hidden_act"
    ),
    "weights that are a folder": (lambda w, t: {"drafter": folder_for_weights(w, t / "d")},
                                  "not a file"),
    "a GPU that is not there": (lambda w, t: {"device": "cuda:99"}, "--device cuda:99"),
    "unknown device": (lambda w, t: {"device": "tpu"}, "expected auto, cpu, cuda, cuda:N or split"),
    "unknown type": (lambda w, t: {"dtype": "int3"}, "--dtype int3"),
    "unknown backend": (lambda w, t: {"backend": "magic"}, "--backend magic"),
    "unknown layers": (lambda w, t: {"layers": "most"}, "--layers most"),
    "unknown limit": (lambda w, t: {"fail-on": "maybe"}, "--fail-on maybe"),
    "template that is no JSON": (
        lambda w, t: {"chat-template-kwargs": "{think"}, "--chat-template-kwargs"
    ),
    "negative seed": (lambda w, t: {"seed": -1}, "--seed -1"),
    "a number that is none": (lambda w, t: {"max-new-tokens": "many"}, "integer"),
    "out below a file": (lambda w, t: {"out": w / "prompts.jsonl" / "out"}, "cannot write"),
    "no such capture": (lambda w, t: {"capture": t / "none"}, "no such capture"),
    "no such option": (lambda w, t: {"drafters": "x"}, "--drafters"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gives_one_line_and_leaves_nothing(case, score, world, tmp_path):
    options, expected = BAD[case]
    code, out, err = score(**options(world, tmp_path))
    assert code == 2, err
    assert expected in err
    assert_one_line(err)
    assert out == ""
    assert not (tmp_path / "out").exists()


def assert_one_line(err: str) -> None:
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "Traceback" not in err
    assert err.endswith(f"{said[0]}\n")


def test_a_damaged_drafter(score, world, tmp_path):
    folder = tmp_path / "d"
    shutil.copytree(world / "drafter", folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, _, err = score(drafter=folder)
    assert code == 2
    assert_one_line(err)
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_for_a_capture(score, capture):
    code, out, err = score(capture=capture, target=None, prompts=None, device="cuda:99")
    assert (code, out) == (2, "")
    assert_one_line(err)


def test_a_pickle_that_would_run_code(score, tmp_path):
    import pickle
    import zipfile

    class Evil:
        def __reduce__(self):
            import os

            return os.system, ("touch never",)

    path = tmp_path / "evil.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"model": Evil()}, protocol=2))
        archive.writestr("evil/version", "3\n")
    code, _, err = score(drafter=path)
    assert code == 2
    assert "system" in err
    assert_one_line(err)


def test_a_capture_with_a_flipped_byte(score, capture, tmp_path):
    shutil.copytree(capture, tmp_path / "c")
    path = next((tmp_path / "c" / "states").iterdir())
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    code, _, err = score(capture=tmp_path / "c", target=None, prompts=None)
    assert code == 2
    assert path.name in err
    assert_one_line(err)
    assert not (tmp_path / "out").exists()


def test_a_capture_of_another_target(score, capture, tmp_path):
    other = tiny_world.write_target(tmp_path / "other", seed=5)
    code, _, err = score(capture=capture, target=other, prompts=None)
    assert code == 2
    assert "another target" in err
    assert_one_line(err)


@pytest.mark.parametrize("verb", ["", "explain", "--nope"])
def test_unknown_verbs_are_errors(verb, capsys):
    assert cli.run([verb] if verb else ["score"]) == 2
    assert_one_line(capsys.readouterr().err)


def test_score_needs_no_target_once_captured(score, capture, world, tmp_path):
    code, out, err = score(capture=capture, target=None, prompts=None, json=tmp_path / "s.json")
    assert code == 0, err
    assert "while decoding" in out
    assert "SKIPPED" in out
    written = json.loads((tmp_path / "s.json").read_text())
    assert written["schema"] == "dflash_diag.score/1"
    assert written["lossless"] is None
    assert written["n_prompts"] == 3
    assert [one["id"] for one in written["per_prompt"]] == ["p0", "p1", "p2"]


def test_score_writes_json_alone_to_standard_output(score, capture):
    code, out, _ = score(capture=capture, target=None, prompts=None, json="-")
    assert code == 0
    assert json.loads(out)["block_size"] == tiny_world.BLOCK


def test_score_with_a_target_checks_losslessness_and_is_repeatable(score, tmp_path):
    code, _, err = score(json=tmp_path / "a.json", reference=None)
    assert code == 0, err
    first = json.loads((tmp_path / "a.json").read_text())
    assert first["lossless"] == {"checked": 3, "ok": 3}
    kept = json.loads((tmp_path / "out/results/target.lossless/result.json").read_text())
    assert kept["params"]["n_rounds_agree"] == 3  # the walk is what decoding does
    code, _, err = score(json=tmp_path / "b.json")
    assert code == 0
    assert "capture" not in err  # what is there is read
    second = json.loads((tmp_path / "b.json").read_text())
    assert first == second


def test_a_damaged_capture_of_ones_own_is_noticed_before_it_is_scored(score, tmp_path):
    assert score()[0] == 0
    (path,) = (tmp_path / "out" / "captures").glob("*/states/00001.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert score()[0] == 0  # already scored: nothing is read
    shutil.rmtree(tmp_path / "out" / "scores")
    code, _, err = score()
    assert code == 2
    assert path.name in err
    assert_one_line(err)


def test_overrides_reach_the_score(score, capture, tmp_path):
    assert score(capture=capture, target=None, prompts=None, json=tmp_path / "s.json",
                 set=["context_bound=inclusive", "position_offset=1"])[0] == 0  # fmt: skip
    found = json.loads((tmp_path / "s.json").read_text())["convention"]
    assert found["context_bound"] == {
        "value": "inclusive",
        "source": "--set context_bound",
        "confidence": "override",
    }
    assert found["position_offset"]["value"] == 1


def test_a_server_is_compared_with_the_capture(score, capture, world, tmp_path):
    from dflash_diag.bundle import Capture

    made = Capture.load(capture)
    lines = []
    for i, prompt in enumerate(made.prompts):
        ids = made.continuation(i).tolist()
        if i == 1:
            ids[5] = (ids[5] + 1) % tiny_world.VOCABULARY
        lines.append(json.dumps({"id": prompt.id, "output_ids": ids}))
    served = tmp_path / "served.jsonl"
    served.write_text("\n".join(lines))
    options = {"capture": capture, "target": None, "prompts": None, "served-output": served}
    code, _, err = score(**options, **{"fail-on": "fail"})
    assert code == 1, err
    run = runs.Run.open(
        config.RunConfig(
            capture=str(capture),
            drafter=str(world / "drafter"),
            served_output=str(served),
            max_new_tokens=int(LONG_ENOUGH),
            out=str(tmp_path / "out"),
        )
    )
    found = run.result("target.served")
    assert found.verdict.name == "FAIL"
    assert "p1 from token 6 on" in found.headline


@pytest.mark.allow_hosts("127.0.0.1")
def test_text_from_a_server(score, capture, world, tmp_path):
    """The server differs from the target on the first token of every prompt."""
    from serving import FaultyServer

    from dflash_diag.bundle import Capture

    own = Capture.load(capture)
    texts = {}
    for i, prompt in enumerate(own.prompts):
        tokens = own.tokens(i).tolist()
        p = prompt.n_prompt_tokens
        texts[tuple(tokens[:p])] = [(tokens[p] + 1) % tiny_world.VOCABULARY, *tokens[p + 1 :]]
    with FaultyServer("sglang", lambda prompt, n: texts[tuple(prompt)][:n]) as server:
        named = {"server": server.url.replace("//", "//me:hush@")}
        code, out, err = score(**named, **{"fail-on": "fail"})
    assert code == 1, err
    written = [p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert not [content for content in written if b"hush" in content]
    # The server is gone, and the same command still answers from what is kept.
    assert score(**named)[:2] == (0, out)
    result = json.loads((tmp_path / "out/results/target.reference/result.json").read_text())
    assert (result["verdict"], result["params"]["n_from_start"]) == ("FAIL", 3)
    lossless = json.loads((tmp_path / "out/results/target.lossless/result.json").read_text())
    assert lossless["params"]["n_prompts"] == 3


@pytest.mark.allow_hosts("127.0.0.1")
def test_a_servers_tokens_are_judged_wherever_they_are_used(score, capture, tmp_path):
    """A server whose text is another: capture, score and divergence say so, each in its output."""
    from serving import FaultyServer

    from dflash_diag.bundle import Capture

    own = Capture.load(capture)
    texts = {}
    for i, prompt in enumerate(own.prompts):
        tokens, p = own.tokens(i).tolist(), prompt.n_prompt_tokens
        texts[tuple(tokens[:p])] = [(t + 7) % tiny_world.VOCABULARY for t in tokens[p:]]
    good = {key: own.continuation(i).tolist() for i, key in enumerate(texts)}
    folders = {}
    for name, said in (("own", good), ("other", texts)):
        folders[name] = tmp_path / name
        with FaultyServer("sglang", lambda prompt, n, said=said: said[tuple(prompt)][:n]) as server:
            code, out, err = score("capture", server=server.url, out=folders[name])
        assert (code, out) == (0, f"{folders[name]}\n")
        line = next(one for one in err.splitlines() if one.startswith("server "))
        assert ("PASS target.reference: 100" in line) == (name == "own")
    assert "FAIL target.reference: " in line
    assert "3 of 3 prompts differ from the first token on" in line

    found, options = tmp_path / "found.json", {"prompts": None, "fail-on": "fail"}
    for name, code in (("own", 0), ("other", 1)):
        options |= {"capture": folders[name], "json": found, "out": tmp_path / f"out {name}"}
        got, out, err = score(**options)
        notes = " ".join(json.loads(found.read_text())["notes"])
        assert got == 1  # the drafter's weights are random, which is the other thing that fails
        assert "--fail-on met: ✗ FAIL acceptance.headline: " in err
        assert ("server    ✗ FAIL target.reference" in out) == bool(code)
        assert ("A server wrote the text, and target.reference is FAIL" in notes) == bool(code)
        assert ("--fail-on met: ✗ FAIL target.reference: " in err) == bool(code)
        assert ("not the text that was scored" in out) == bool(code)
        # Another capture of that text knows who wrote it.
        like = tmp_path / f"like {name}"
        bare = {"drafter": None, "prompts": None, "max-new-tokens": None}
        assert score("capture", **bare, like=folders[name], out=like)[0] == 0
        got, out, err = score("divergence", **options | {"capture": like}, against="torch/bfloat16")
        notes = " ".join(json.loads(found.read_text())["notes"])
        assert got == code
        assert f"{'✗ FAIL' if code else '✓ PASS'}         target.reference" in out
        assert ("target.reference is FAIL" in notes) == bool(code)
        assert ("target.reference is FAIL" in out) == bool(code)
        assert ("--fail-on met: ✗ FAIL target.reference: " in err) == bool(code)


def _not_finite(states):
    states[7, 2, 3] = float("nan")
    return states


BAD_STATES = {
    "not finite": (_not_finite, 0, "are not finite", ("hidden.rows", "FAIL")),
    "of other layers": (
        lambda states: states,
        1,
        "lacks layer 0, which the drafter taps",
        ("hidden.identity", "FAIL"),
    ),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_states_that_cannot_be_scored_are_still_audited(kind, score, capture, tmp_path):
    import torch
    from safetensors.torch import save_file

    from dflash_diag.bundle import Capture

    change, shift, why, (check, verdict) = BAD_STATES[kind]
    made, path = Capture.load(capture), tmp_path / "dump.safetensors"
    layers = torch.tensor([0, 1, 2])
    states = change(made.states(0, layers.tolist()))
    p = made.prompts[0].n_prompt_tokens
    tensors = {"tokens": made.tokens(0), "hidden_states": states, "layer_ids": layers + shift}
    save_file(tensors, path, {"n_prompt_tokens": str(p)})
    options = {"capture": path, "prompts": None, "json": tmp_path / "d.json"}
    code, out, err = score("divergence", **options)
    assert code == 0, err
    found = json.loads((tmp_path / "d.json").read_text())
    assert found["checks"][check] == verdict
    assert found["verdict"] == "cause"
    assert found["effect"]["delta_tau"] is None
    assert why in " ".join(found["notes"])
    assert f"note: auto/float32. {'The cost' if shift == 0 else 'dump'}" in out
    assert re.search(rf"{verdict} +{re.escape(check)} ", out)
    assert (
        len(re.findall(r"^. (?:PASS|SKIPPED|FAIL|INCONCLUSIVE) +hidden\.", out, re.MULTILINE)) == 11
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"server": "localhost:8000"}, "--server"),
        ({"server": "http://127.0.0.1:9", "server-timeout": 0}, "--server-timeout 0"),
        ({"server": "http://127.0.0.1:9", "server-timeout": "inf"}, "--server-timeout inf"),
        ({"server": "http://127.0.0.1:9", "target": None}, "--target"),
        ({"server": "http://127.0.0.1:9", "capture": "somewhere"}, "both --capture and --server"),
    ],
)
def test_a_server_that_cannot_be_asked(score, options, said):
    code, _, err = score(**options)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_capture_made_by_other_code(score, capture, world, tmp_path):
    import torch
    from safetensors.torch import save_file

    from dflash_diag.bundle import Capture
    from dflash_diag.views import Transcript

    made, folder = Capture.load(capture), tmp_path / "foreign"
    folder.mkdir()
    for i, prompt in enumerate(made.prompts):
        tensors = {
            "tokens": made.tokens(i),
            "hidden_states": made.states(i, made.layer_ids),
            "layer_ids": torch.tensor(made.layer_ids),
        }
        metadata = {"n_prompt_tokens": str(prompt.n_prompt_tokens)}
        save_file(tensors, folder / f"{prompt.id}.safetensors", metadata)
    options = {"prompts": None, "json": tmp_path / "s.json"}
    code, _, err = score(capture=folder, **options)
    assert code == 0, err
    theirs = json.loads((tmp_path / "s.json").read_text())
    code, _, err = score(capture=capture, **options, out=tmp_path / "ours")
    assert code == 0, err
    ours = json.loads((tmp_path / "s.json").read_text())
    assert theirs["tau"] == ours["tau"]
    assert theirs["lossless"] == ours["lossless"] == {"checked": 3, "ok": 3}
    run = runs.Run.open(
        config.RunConfig(
            capture=str(folder),
            target=str(world / "target"),
            drafter=str(world / "drafter"),
            max_new_tokens=int(LONG_ENOUGH),
            out=str(tmp_path / "out"),
        )
    )
    assert f"[{made.tokens(0)[0]}] " in Transcript(run)._repr_html_()
    assert not [one for one in run.results() if one.verdict.name == "ERROR"]


def run_capture(capsys, **options):
    arguments = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    code = cli.run(["capture", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_capture_like_another(capture, world, tmp_path, capsys):
    from dflash_diag.bundle import Capture

    options = {"target": world / "target", "like": capture, "dtype": "bfloat16", "layers": "all"}
    code, out, err = run_capture(capsys, **options, out=tmp_path / "again")
    assert code == 0, err
    assert out.strip() == str(tmp_path / "again")
    made, again = Capture.load(capture), Capture.load(tmp_path / "again")
    assert [p.id for p in again.prompts] == [p.id for p in made.prompts]
    assert all(again.tokens(i).equal(made.tokens(i)) for i in range(3))
    assert again.target_facts["dtype"] == "bfloat16"
    for wrong, message in [
        ({"prompts": world / "prompts.jsonl"}, "--like and --prompts"),
        ({"max-new-tokens": 9}, "--like and --max-new-tokens"),
    ]:
        code, _, err = run_capture(capsys, **options, **wrong)
        assert code == 2
        assert message in err
    code, _, err = run_capture(capsys, target=world / "target")
    assert (code, "give --prompts, or --like" in err) == (2, True)


def test_a_target_that_accelerate_places(capture, world, tmp_path, capsys):
    options = {"target": world / "target", "like": capture, "out": tmp_path / "split"}
    code, _, err = run_capture(capsys, **options, device="split", drafter=world / "drafter")
    assert code == 0, err
    for name in ("states/00000.safetensors", "states/00002.safetensors"):
        assert (tmp_path / "split" / name).read_bytes() == (capture / name).read_bytes()


def test_two_runs_do_not_share_a_folder(score, capture, world, tmp_path):
    given = config.RunConfig(
        capture=str(capture), drafter=str(world / "drafter"), out=str(tmp_path / "out")
    )
    with runs.Run.open(given).alone():
        code, _, err = score(capture=capture, target=None, prompts=None)
    assert code == 2
    assert "another process is writing" in err
    assert_one_line(err)
    assert score(capture=capture, target=None, prompts=None)[0] == 0


def test_fail_on_sets_the_exit_code(score, capture):
    options = {"capture": capture, "target": None, "prompts": None}
    assert score(**options, **{"fail-on": "fail"})[0] == 1  # a random drafter gets nothing
    assert score(**options)[0] == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped after 2 of 3")])
def test_an_interruption_says_how_to_go_on(error, score, monkeypatch):
    def stop(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(runs.Run, "open", stop)
    code, _, err = score()
    assert code == 3
    assert err.startswith("stopped: ")
    assert len(err.splitlines()) == 1


def test_a_full_disk_is_one_line(score, capture):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    code, _, err = score(capture=capture, target=None, prompts=None, json="/dev/full")
    assert code == 2
    assert "disk is full" in err
    assert_one_line(err)


def test_help_teaches_and_names_the_real_default(capsys):
    assert cli.run(["report", "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "Examples:" in text
    assert "dflash-diag report --target ./target" in text
    assert f"[default: ({config.NEW_TOKENS})]" in text


OWN_OPTIONS = {
    "report": {"open_"},
    "lab": {"port", "no_browser"},
    "watch": {"where", "once", "every", "settle", "jobs", "shards", "again", "executor"}
    | {"ray_address", "against_what", "margin", "webhook", "page_url", "time_limit"},
}
"""What a verb does with the options that are no field of the configuration is tested with it."""


def test_every_option_is_a_field_of_the_configuration():
    import typer

    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        fields = {p.name for p in command.params} - {"json", "fail_on"}
        assert fields - OWN_OPTIONS.get(name, set()) <= set(config.RunConfig.model_fields), name


def test_help_is_fast_and_loads_nothing_heavy():
    code = (
        "import sys; from dflash_diag import cli; cli.run(['--help']); "
        "heavy = {'torch', 'pandas', 'matplotlib', 'pydantic', 'numpy'} & set(sys.modules); "
        "sys.stderr.write(' '.join(sorted(heavy)))"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(cli.__file__).parents[1],
    )  # fmt: skip
    seconds = time.perf_counter() - started
    assert done.stderr == ""
    assert "report" in done.stdout
    assert seconds < 5  # the target is 0.5 s; a busy machine must not fail this


def test_an_interruption_that_became_another_error_is_still_one(score, monkeypatch):
    def read(*_args, **_options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ValueError("could not determine the shape") from error

    monkeypatch.setattr(runs.Run, "open", read)
    code, _, err = score()
    assert code == 3
    assert err == "stopped: interrupted; resume with the same command\n"


def test_other_errors_are_not_taken_for_interruptions(score, monkeypatch):
    def fail(*_args, **_options):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(runs.Run, "open", fail)
    with pytest.raises(ValueError, match="a fault of ours"):
        score()
