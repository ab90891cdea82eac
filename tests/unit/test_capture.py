"""A capture: what is in it, that damage shows, that a stopped run goes on, and bad input."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from dflash_diag import capture as capture_module
from dflash_diag import progress
from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.decoding import expect, expect_as_captured, greedy, teacher_forced
from dflash_diag.errors import BadInput, CaptureError, Interrupted, OutputError, PromptError
from dflash_diag.prompts import Prompt
from dflash_diag.strata import texts_of
from dflash_diag.targets import fingerprint, load_target, wrap_target
from dflash_diag.tensorfile import TensorFile

G = 10
ROOT = Path(__file__).parents[2]


def ids_prompts(n=3):
    generator = torch.Generator().manual_seed(1)
    return [
        Prompt(
            id=f"p{i}",
            prompt_ids=tuple(torch.randint(0, 320, (3 + 2 * i,), generator=generator).tolist()),
        )
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def loaded(hybrid_folder):
    return load_target(hybrid_folder)


@pytest.fixture(scope="module")
def made(loaded, tmp_path_factory):
    """One capture, not to be changed."""
    out = tmp_path_factory.mktemp("made") / "capture"
    return make_capture(loaded, ids_prompts(), out, max_new_tokens=G, silent=True)


@pytest.fixture
def copy(made, tmp_path):
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(made.path, tmp_path / "copy"))


def capture(target, out, prompts=None, **changes):
    options = {"max_new_tokens": G, "silent": True, **changes}
    return make_capture(target, prompts or ids_prompts(), out, **options)


def test_tokens_and_continuations(made, loaded):
    assert [p.id for p in made.prompts] == ["p0", "p1", "p2"]
    assert [p.n_prompt_tokens for p in made.prompts] == [3, 5, 7]
    assert [(p.n_generated, p.ended) for p in made.prompts] == [(G, False)] * 3
    for i, prompt in enumerate(ids_prompts()):
        alone = greedy(loaded, [prompt.prompt_ids], G)[0].ids
        assert made.tokens(i).tolist() == [*prompt.prompt_ids, *alone]
        assert made.continuation(i).tolist() == alone
    assert made.tokens(0).dtype == torch.int64
    assert made.index("p2") == 2
    assert max(p.decode_gap for p in made.prompts) == 0
    assert 0 < max(p.logit_noise for p in made.prompts) < 1e-4


def test_states_are_those_of_one_teacher_forced_forward(made, loaded):
    assert made.layer_ids == (-1, 0, 1, 2, 3)
    for i in range(3):
        with torch.inference_mode():
            theirs = loaded.model(
                input_ids=made.tokens(i)[None], use_cache=False, output_hidden_states=True
            ).hidden_states
        states = made.states(i, (2, -1, 0))
        assert states.dtype == torch.float32
        for k, j in enumerate((3, 0, 1)):
            assert torch.equal(states[:, k], theirs[j][0])
        torch.testing.assert_close(made.final_norm(made.states(i, [3])[:, 0]), theirs[4][0])


def test_positions_hold_the_targets_own_choices(made, loaded):
    for i in range(3):
        with torch.inference_mode():
            logits = loaded.logits(made.tokens(i)[None])[0].double()
        logprobs = logits.log_softmax(-1)
        rows = made.positions(i)
        assert rows["position"].tolist() == list(range(len(made.tokens(i))))
        assert rows["token"].tolist() == made.tokens(i).tolist()
        ids, values = made.top_choices(i)
        best = logprobs.topk(8)
        assert np.array_equal(ids, best.indices)
        np.testing.assert_allclose(values, best.values, atol=1e-5)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        np.testing.assert_allclose(rows["entropy"], entropy, atol=1e-5)
        two = logits.topk(2).values
        np.testing.assert_allclose(rows["margin"], two[:, 0] - two[:, 1], atol=1e-5)
        np.testing.assert_allclose(rows["top_logit"], two[:, 0], atol=1e-5)
        n = made.prompts[i].n_prompt_tokens
        assert ids[n - 1 : -1, 0].tolist() == made.continuation(i).tolist()


def test_texts_hold_what_the_target_would_say(made, foreign):
    for i, text in enumerate(texts_of(made)):
        rows = made.positions(i)
        assert (text.id, text.form, text.ended) == (made.prompts[i].id, "prompt_ids", False)
        assert text.tokens.tolist() == made.tokens(i).tolist()
        assert text.tokens[text.start :].tolist() == made.continuation(i).tolist()
        assert text.entropy.tolist() == pytest.approx(rows["entropy"].tolist())
        # A greedy continuation is what the target would say.
        assert text.choice[text.start - 1 : -1].tolist() == made.continuation(i).tolist()
    (bare, *_) = texts_of(Capture.load(foreign))
    assert bare.entropy is bare.choice is bare.form is bare.ended is None


def test_what_is_recorded_of_the_target(made, hybrid_folder, loaded):
    facts = made.target_facts
    assert (facts["hidden_size"], facts["vocab_size"], facts["n_layers"]) == (64, 320, 4)
    assert facts["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert (facts["dtype"], facts["device"]) == ("float32", "cpu")
    assert facts["backend"]["linear"] == "torch"
    assert facts["final_norm"] == {"style": "one_plus", "eps": 1e-6}
    assert facts["files"] == fingerprint(hybrid_folder)
    assert list(facts["files"]["weights"]) == ["model.safetensors"]
    assert facts["files"]["chat_template"] is not None
    assert made.facts["max_new_tokens"] == made.max_new_tokens == G
    assert "versions" in made.facts["provenance"]["content"]
    assert str(hybrid_folder.parent) not in (made.path / "capture.json").read_text()


def test_borrowed_tensors(made, loaded, full_model, tmp_path):
    assert torch.equal(made.embedding, loaded.model.model.embed_tokens.weight)
    assert torch.equal(made.final_norm_weight, loaded.model.model.norm.weight)
    assert made.head is made.embedding
    assert len(list((made.path / "shared").iterdir())) == 2

    untied = capture(wrap_target(full_model), tmp_path / "full")
    assert torch.equal(untied.head, full_model.lm_head.weight)
    assert torch.equal(untied.embedding, full_model.model.embed_tokens.weight)
    assert len(list((untied.path / "shared").iterdir())) == 3


def test_captures_side_by_side_share_them_and_each_stands_alone(loaded, tmp_path):
    first, second = capture(loaded, tmp_path / "a"), capture(loaded, tmp_path / "b", layers="all")
    files = [sorted((c.path / "shared").iterdir()) for c in (first, second)]
    assert [p.name for p in files[0]] == [p.name for p in files[1]]
    assert [p.stat().st_ino for p in files[0]] == [p.stat().st_ino for p in files[1]]
    shutil.rmtree(first.path)
    assert torch.equal(Capture.load(second.path).embedding, second.embedding)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b"]


def test_without_hard_links_a_copy_is_made(loaded, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("not supported")

    capture(loaded, tmp_path / "a")
    monkeypatch.setattr(os, "link", refuse)
    second = capture(loaded, tmp_path / "b", layers="all")
    assert all(p.stat().st_nlink == 1 for p in (second.path / "shared").iterdir())


def test_chosen_layers(loaded, tmp_path):
    made = capture(loaded, tmp_path / "a", layers="taps", taps=(2, 0))
    assert made.layer_ids == (0, 2)
    with pytest.raises(CaptureError, match=r"has no states of layer 1 \(it has 0, 2\)"):
        made.states(0, (0, 1))
    with pytest.raises(BadInput, match="tapped layer 4 of a target with 4 layers"):
        capture(loaded, tmp_path / "b", taps=(4,))


def test_text_and_messages(loaded, tmp_path):
    prompts = [
        Prompt(id="t", text="w5 w6 w7", kind="numbers"),
        Prompt(id="m", messages=({"role": "user", "content": "w9"},)),
    ]
    plain = capture(loaded, tmp_path / "a", prompts)
    assert plain.tokens(0)[:3].tolist() == [5, 6, 7]
    assert plain.tokens(1)[:3].tolist() == [1, 9, 3]
    assert plain.prompts[0].prompt_text == "w5 w6 w7"
    assert [(p.form, p.kind) for p in plain.prompts] == [("text", "numbers"), ("messages", None)]
    again = make_capture(loaded, (), tmp_path / "c", like=plain, silent=True)
    assert [(p.form, p.kind) for p in again.prompts] == [("text", "numbers"), ("messages", None)]
    words = [f"w{i}" if i else "<unk>" for i in plain.continuation(0).tolist()]
    assert plain.prompts[0].continuation_text == " ".join(w for w in words if w != "<unk>")
    assert plain.positions(0)["text"][:3].tolist() == ["w5", "w6", "w7"]
    thinking = capture(loaded, tmp_path / "b", prompts, chat_template_kwargs={"think": True})
    assert thinking.tokens(1)[:4].tolist() == [1, 9, 2, 3]
    assert thinking.facts["chat_template_kwargs"] == {"think": True}


def test_a_continuation_that_ends_by_itself(hybrid_model, tmp_path):
    target = wrap_target(hybrid_model)
    free = [one.ids for one in greedy(target, [p.prompt_ids for p in ids_prompts()], G)]
    target.__dict__["eos_ids"] = frozenset({free[1][4]})
    made = capture(target, tmp_path / "a")
    stop = free[1].index(free[1][4]) + 1
    assert made.continuation(1).tolist() == free[1][:stop]
    assert (made.prompts[1].n_generated, made.prompts[1].ended) == (stop, True)
    assert made.prompts[0].n_prompt_tokens + made.prompts[0].n_generated == len(made.tokens(0))


def test_a_target_that_cannot_take_padding_is_decoded_prompt_by_prompt(
    hybrid_model, tmp_path, monkeypatch
):
    target = wrap_target(hybrid_model)
    sizes = []

    def spoilt(target, prompts, n, **more):
        sizes.append(len(prompts))
        made = greedy(target, prompts, n, **more)
        if len(prompts) > 1:
            made[1].ids[3] = (made[1].ids[3] + 1) % 320
        return made

    monkeypatch.setattr(capture_module, "greedy", spoilt)
    made = capture(target, tmp_path / "a")
    assert sizes == [3, 1]
    expected = greedy(target, [ids_prompts()[1].prompt_ids], G)[0].ids
    assert made.continuation(1).tolist() == expected


def test_where_decoding_alone_is_no_better_it_is_tried_once(hybrid_model, tmp_path, monkeypatch):
    target = wrap_target(hybrid_model)
    sizes = []

    def noisy(target, prompts, n, **more):
        sizes.append(len(prompts))
        made = greedy(target, prompts, n, **more)
        for one in made:
            one.ids[3] = (one.ids[3] + 1) % 320
        return made

    monkeypatch.setattr(capture_module, "greedy", noisy)
    capture(target, tmp_path / "a")
    assert sizes == [3, 1]


def as_bytes(path):
    return [p.read_bytes() for p in sorted((path / "states").iterdir())]


def test_the_files_are_those_of_safetensors(made):
    for i, path in enumerate(made.sequence_files):
        states = {f"layer.{j}": made.states(i, [j])[:, 0].contiguous() for j in made.layer_ids}
        tensors = {"tokens": made.tokens(i), **states}
        assert path.read_bytes() == save(tensors, metadata={"id": made.prompts[i].id})


def test_no_layer_waits_for_the_next_one(loaded, tmp_path, monkeypatch):
    """With every layer kept, host memory holds what the forward itself holds."""
    order = []
    put = TensorFile.put

    def note(self, name, tensor):
        order.append(name)
        put(self, name, tensor)

    monkeypatch.setattr(TensorFile, "put", note)
    running = [
        layer.register_forward_pre_hook(lambda *_, j=j: order.append(j))
        for j, layer in enumerate(loaded.parts.layers)
    ]
    capture(loaded, tmp_path / "a", ids_prompts(1), layers="all")
    for handle in running:
        handle.remove()
    written = order[order.index("tokens") - 1 :]
    expected = [0, "tokens", "layer.-1", "layer.0", 1, "layer.1", 2, "layer.2", 3, "layer.3"]
    assert written[: len(expected)] == expected


@pytest.fixture(scope="module")
def coarse(hybrid_folder):
    return load_target(hybrid_folder, dtype="bfloat16", device="cpu")


def test_a_capture_like_another_holds_the_same_tokens(made, coarse, tmp_path):
    again = make_capture(coarse, (), tmp_path / "a", like=made, layers="all", silent=True)
    for i in range(3):
        assert torch.equal(again.tokens(i), made.tokens(i))
        taken = teacher_forced(coarse, made.tokens(i).tolist(), range(-1, 4)).states
        assert torch.equal(again.states(i, (3, 0)), torch.stack([taken[3], taken[0]], dim=1))
        assert torch.equal(again.continuation(i), made.continuation(i))
    assert again.max_new_tokens == G
    kept = ("id", "n_prompt_tokens", "n_generated", "ended", "prompt_text", "continuation_text")
    for new, old in zip(again.prompts, made.prompts, strict=True):
        assert [getattr(new, k) for k in kept] == [getattr(old, k) for k in kept]
        # Nothing was decoded, so nothing is known of it.
        assert new.logit_noise is None
        assert new.decode_gap is None
    assert again.facts["like"]["source"] == made.target_facts["source"]
    # What this target would say by itself is decoded, not read from another's text.
    assert min(e.noise for e in expect_as_captured(coarse, again)) > 0


def test_like_itself_it_has_the_same_states(made, loaded, tmp_path):
    again = make_capture(loaded, (), tmp_path / "a", like=made, silent=True)
    assert as_bytes(again.path) == as_bytes(made.path)
    assert again.positions(1).equals(made.positions(1))
    assert make_capture(loaded, (), tmp_path / "a", like=made, silent=True).facts == again.facts


def test_what_cannot_be_like(made, foreign, loaded, tmp_path):
    out = tmp_path / "a"
    with pytest.raises(BadInput, match="one of the two"):
        make_capture(loaded, ids_prompts(), out, like=made)
    with pytest.raises(BadInput, match="one of the two"):
        make_capture(loaded, (), out, like=made, max_new_tokens=4)
    tensors = load_file(foreign)
    tensors["tokens"][5] = 4000
    save_file(tensors, tmp_path / "foreign.safetensors")
    with pytest.raises(PromptError, match="token id 4000.*below 320"):
        make_capture(loaded, (), out, like=Capture.load(tmp_path / "foreign.safetensors"))


def test_a_capture_like_one_made_by_other_code(foreign, made, loaded, tmp_path):
    again = make_capture(loaded, (), tmp_path / "a", like=Capture.load(foreign), silent=True)
    assert [p.id for p in again.prompts] == ["first"]
    assert torch.equal(again.tokens(0), made.tokens(0))
    assert torch.equal(again.states(0, (2, 0)), made.states(0, (2, 0)))


@pytest.mark.parametrize(("n", "rows"), [(1, [12]), (4, [2, 5, 8, 12]), (99, list(range(13)))])
def test_a_thinned_capture_keeps_rows_of_the_full_forward(made, loaded, tmp_path, n, rows):
    thin = capture(loaded, tmp_path / "a", keep_rows=n)
    assert thin.rows(0).tolist() == rows
    assert thin.rows(2)[-1] == len(thin.tokens(2)) - 1
    assert thin.thinned
    for i in range(3):
        assert torch.equal(thin.tokens(i), made.tokens(i))
        at = thin.rows(i)
        assert torch.equal(thin.states(i, (3, -1)), made.states(i, (3, -1))[at])
        full = made.positions(i).iloc[at.tolist()].reset_index(drop=True)
        few = thin.positions(i)
        exact = ["position", "token", "text"]
        assert few[exact].equals(full[exact])
        np.testing.assert_allclose(few["margin"], full["margin"], atol=1e-4)
        assert [list(x) for x in few["top_ids"]] == [list(x) for x in full["top_ids"]]


def test_rows_of_a_full_capture_are_all(made):
    assert not made.thinned
    assert made.rows(1).tolist() == list(range(15))


def test_every_layer_of_the_first_prompt_alone(made, loaded, tmp_path):
    mixed = capture(loaded, tmp_path / "a", layers="taps", taps=(2,), all_layers_for=1)
    assert mixed.layer_ids == (2,)
    assert [mixed.layers(i) for i in range(3)] == [(-1, 0, 1, 2, 3), (2,), (2,)]
    assert torch.equal(mixed.states(0, (3,)), made.states(0, (3,)))
    with pytest.raises(CaptureError, match=r"no states of layer 3 \(it has 2\)"):
        mixed.states(1, (3,))
    with pytest.raises(BadInput, match="keep_rows=0; expected at least 1"):
        capture(loaded, tmp_path / "b", keep_rows=0)


FILES = [
    "capture.json",
    "manifest.json",
    "prompts.parquet",
    "positions.parquet",
    "states/00001.safetensors",
    "shared",
]


def path_in(bundle, name):
    return min((bundle / name).iterdir()) if name == "shared" else bundle / name


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_a_flipped_byte_anywhere_is_noticed(copy, name, where):
    path = path_in(copy, name)
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.unlink()
    path.write_bytes(data)
    # A hash flipped in the manifest accuses the file that it belongs to.
    named = None if name == "manifest.json" else path.name
    with pytest.raises(CaptureError, match=named):
        Capture.load(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(copy, name):
    path_in(copy, name).unlink()
    with pytest.raises(CaptureError):
        Capture.load(copy)
    with pytest.raises(CaptureError):
        Capture.load(copy, verify=False)


def test_a_truncated_file_is_noticed(copy):
    path = copy / "states" / "00001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CaptureError, match="00001"):
        Capture.load(copy)
    with pytest.raises(CaptureError, match="00001"):
        Capture.load(copy, verify=False).tokens(1)


def test_a_capture_of_another_target(made, hybrid_folder, new_hybrid, tmp_path):
    assert Capture.load(made.path, target=hybrid_folder).path == made.path
    other = shutil.copytree(hybrid_folder, tmp_path / "other")
    new_hybrid(seed=1).save_pretrained(other)
    with pytest.raises(
        CaptureError, match=r"made of another target: the weights of .*other differ"
    ):
        Capture.load(made.path, target=other)


def test_no_capture_there(tmp_path):
    with pytest.raises(CaptureError, match="no such capture"):
        Capture.load(tmp_path / "nowhere")
    with pytest.raises(CaptureError, match="holds no capture"):
        Capture.load(tmp_path)


def contents(folder):
    """States and choices; the noise that was measured may differ in its last bits."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in [*folder.rglob("*.safetensors"), folder / "positions.parquet"]
    }


def test_a_stopped_run_goes_on_where_it_ended(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(capture_module, "BATCH", 2)
    prompts = ids_prompts(5)
    whole = capture(loaded, tmp_path / "whole", prompts)
    write, written = capture_module._write_part, []

    def stop_at_fourth(part, *rest):
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(part.index)
        return write(part, *rest)

    monkeypatch.setattr(capture_module, "_write_part", stop_at_fourth)
    with pytest.raises(Interrupted, match="stopped after 3 of 5 prompts"):
        capture(loaded, tmp_path / "a", prompts)
    assert not (tmp_path / "a").exists()

    def note(part, *rest):
        written.append(part.index)
        return write(part, *rest)

    monkeypatch.setattr(capture_module, "_write_part", note)
    resumed = capture(loaded, tmp_path / "a", prompts)
    assert written == [0, 1, 2, 3, 4]
    assert contents(resumed.path) == contents(whole.path)
    assert [dataclasses.replace(p, logit_noise=0) for p in resumed.prompts] == [
        dataclasses.replace(p, logit_noise=0) for p in whole.prompts
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "whole"]


def test_a_half_written_prompt_is_done_again(loaded, tmp_path, monkeypatch):
    write = capture_module._write_part

    def die_at_the_end(part, *rest):
        alone = write(part, *rest)
        if part.index == 1:
            part.states.write_bytes(part.states.read_bytes()[:50])
            raise KeyboardInterrupt
        return alone

    monkeypatch.setattr(capture_module, "_write_part", die_at_the_end)
    with pytest.raises(Interrupted):
        capture(loaded, tmp_path / "a")
    done = []

    def note(part, *rest):
        done.append(part.index)
        return write(part, *rest)

    monkeypatch.setattr(capture_module, "_write_part", note)
    capture(loaded, tmp_path / "a")
    assert done == [1, 2]


def test_what_a_killed_run_was_writing_is_not_kept(loaded, tmp_path, monkeypatch, capsys):
    """A file half written under a name of its own: no clean-up runs when a process is killed."""
    whole = capture(loaded, tmp_path / "whole")
    write = capture_module._write_part

    def die_in_the_middle(part, *rest):
        if part.index == 1:
            (part.states.parent / ".00001.safetensors.0a1b2c3d").write_bytes(b"half")
            raise KeyboardInterrupt
        return write(part, *rest)

    monkeypatch.setattr(capture_module, "_write_part", die_in_the_middle)
    with pytest.raises(Interrupted, match="stopped after 1 of 3 prompts"):
        capture(loaded, tmp_path / "a")
    monkeypatch.setattr(capture_module, "_write_part", write)
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "lines")
    resumed = capture(loaded, tmp_path / "a", silent=False)
    assert sorted(p.name for p in resumed.path.rglob("*")) == sorted(
        p.name for p in whole.path.rglob("*")
    )
    assert contents(resumed.path) == contents(whole.path)
    # Only what was left to do counts, so that the time left is right from the start.
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"capture: {2 * G}/{2 * G} token, ")
    assert line.endswith("3 of 3 prompts, done")


def test_progress_counts_tokens_while_a_batch_is_decoded(loaded, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DFLASH_DIAG_PROGRESS", "lines")
    monkeypatch.setattr(progress, "HEARTBEAT_S", 0.0)
    capture(loaded, tmp_path / "a", silent=False)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"capture: 3/{3 * G} token, ")
    assert lines[0].endswith(" s left")


def test_an_unfinished_run_with_other_settings_is_not_mixed_in(loaded, tmp_path, monkeypatch):
    write = capture_module._write_part

    def stop_at_second(part, *rest):
        if part.index == 1:
            raise KeyboardInterrupt
        return write(part, *rest)

    monkeypatch.setattr(capture_module, "_write_part", stop_at_second)
    with pytest.raises(Interrupted):
        capture(loaded, tmp_path / "a")
    monkeypatch.setattr(capture_module, "_write_part", write)
    made = capture(loaded, tmp_path / "a", max_new_tokens=4)
    assert [p.n_generated for p in made.prompts] == [4, 4, 4]


def test_the_same_capture_is_not_made_twice(loaded, tmp_path, monkeypatch):
    first = capture(loaded, tmp_path / "a")
    monkeypatch.setattr(capture_module, "_fill", None)
    assert capture(loaded, tmp_path / "a").prompts == first.prompts
    with pytest.raises(OutputError, match="holds a capture of other prompts"):
        capture(loaded, tmp_path / "a", max_new_tokens=4)


def test_what_is_in_the_way_stays(loaded, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError, match="is a file"):
        capture(loaded, tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="no capture"):
        capture(loaded, tmp_path / "folder")
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    assert len(capture(loaded, tmp_path / "empty")) == 3


def test_a_full_disk_leaves_nothing(loaded, tmp_path, monkeypatch):
    def full(path, content):
        raise OutputError(f"cannot write {path}: the disk is full")

    monkeypatch.setattr(capture_module, "_write_parquet", full)
    with pytest.raises(OutputError, match="the disk is full"):
        capture(loaded, tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("prompts", "changes", "error", "message"),
    [
        ([Prompt(id="x", prompt_ids=(1, 320))], {}, PromptError, "'x' has token id 320.*below 320"),
        (
            [Prompt(id="x", prompt_ids=(1,) * 250)],
            {},
            PromptError,
            "'x' has 250 tokens and 10 are to follow; expected at most 256",
        ),
        ([Prompt(id="x", text="   ")], {}, PromptError, "'x' has no tokens"),
        (None, {"max_new_tokens": 0}, BadInput, "--max-new-tokens 0; expected at least 1"),
        (None, {"layers": "some"}, BadInput, "--layers some"),
        (
            [Prompt(id="x", messages=({"role": "user", "content": "w1"},))],
            {"chat_template_kwargs": {"add_generation_prompt": True}},
            PromptError,
            "the chat template of .* refuses it",
        ),
    ],
)
def test_bad_input(loaded, tmp_path, prompts, changes, error, message):
    with pytest.raises(error, match=message):
        capture(loaded, tmp_path / "a", prompts, **changes)
    assert list(tmp_path.iterdir()) == []


def test_no_prompts(loaded, tmp_path):
    with pytest.raises(PromptError, match="no prompts"):
        make_capture(loaded, [], tmp_path / "a", max_new_tokens=G)


def test_text_needs_a_tokenizer_and_ids_do_not(hybrid_model, tmp_path):
    hybrid_model.save_pretrained(tmp_path / "bare")
    target = load_target(tmp_path / "bare")
    with pytest.raises(PromptError, match="'t' is text and .*bare has no tokenizer.*prompt_ids"):
        capture(target, tmp_path / "a", [Prompt(id="t", text="w1")])
    made = capture(target, tmp_path / "a")
    assert made.prompts[0].prompt_text is made.prompts[0].continuation_text is None
    assert made.positions(0)["text"].isna().all()


def test_messages_need_a_template(hybrid_folder, tmp_path):
    bare = shutil.copytree(hybrid_folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    prompts = [Prompt(id="m", messages=({"role": "user", "content": "w1"},))]
    with pytest.raises(PromptError, match="no chat template; give the prompt as text"):
        capture(load_target(bare), tmp_path / "a", prompts)


def broken_folder(kind, source, folder):
    if kind == "nothing":
        return folder
    if kind == "file":
        folder.write_text("x")
        return folder
    shutil.copytree(source, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if kind == "no config":
        config.unlink()
    elif kind == "unknown kind":
        config.write_text(json.dumps({"model_type": "no_such_model"}))
    elif kind == "no weights":
        weights.unlink()
    elif kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        tensors = load_file(weights)
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, weights, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "no such folder"),
        ("file", "is a file"),
        ("no config", r"has no config\.json"),
        ("unknown kind", "cannot be loaded"),
        ("no weights", "cannot be loaded"),
        ("truncated", "cannot be loaded"),
        ("tensor gone", r"lacks 1 of the model's tensors .*\(model\.layers\.1\.mlp\.up_proj"),
    ],
)
def test_what_is_no_target(hybrid_folder, tmp_path, kind, message):
    folder = broken_folder(kind, hybrid_folder, tmp_path / "target")
    with pytest.raises(BadInput, match=message) as caught:
        load_target(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int8"}, "--dtype int8; expected one of auto, float32"),
        ({"backend": "fla"}, "--backend fla: the target is on the cpu"),
    ],
)
def test_options_that_cannot_be(hybrid_folder, options, message):
    with pytest.raises(BadInput, match=message):
        load_target(hybrid_folder, **options)


def test_types(hybrid_folder, tmp_path):
    assert load_target(hybrid_folder).dtype == torch.float32
    target = load_target(hybrid_folder, dtype="bfloat16", device="cpu")
    made = capture(target, tmp_path / "a")
    assert made.states(0, [1]).dtype == made.embedding.dtype == torch.bfloat16
    assert made.target_facts["dtype"] == "bfloat16"


def test_plain_output_is_taken_from_a_capture_of_the_same_arithmetic(
    made, loaded, hybrid_folder, full_model, monkeypatch
):
    taken = expect_as_captured(loaded, made)
    fresh = expect(loaded, [(p.id, p.prompt_ids) for p in ids_prompts()], G)
    assert [(e.id, e.prompt, e.ids) for e in taken] == [
        (e.id, list(e.prompt), e.ids) for e in fresh
    ]
    coarse = load_target(hybrid_folder, dtype="bfloat16", device="cpu")
    assert max(e.noise for e in expect_as_captured(coarse, made)) > 1e-3
    assert max(e.noise for e in taken) < 1e-3


READ = """
import socket, sys
class Refusing(socket.socket):
    def __init__(self, *args, **kwargs):
        raise OSError("no network")
socket.socket = Refusing
from dflash_diag.bundle import Capture
capture = Capture.load(sys.argv[1])
capture.states(0, capture.layer_ids), capture.tokens(0), capture.positions(0)
capture.embedding, capture.head, capture.final_norm_weight
print(sorted({"transformers", "tokenizers", "huggingface_hub"} & set(sys.modules)))
"""


def test_reading_needs_neither_transformers_nor_the_target_nor_a_network(hybrid_folder, tmp_path):
    folder = shutil.copytree(hybrid_folder, tmp_path / "target")
    made = capture(load_target(folder), tmp_path / "a")
    shutil.rmtree(folder)
    out = subprocess.run(
        [sys.executable, "-c", READ, made.path],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert out.stdout.strip() == "[]"


@pytest.fixture
def foreign(made, tmp_path):
    """The first prompt of a capture as other code would write it."""
    path = tmp_path / "foreign.safetensors"
    save_file(
        {
            "tokens": made.tokens(0),
            "hidden_states": made.states(0, (2, 0)).contiguous(),
            "layer_ids": torch.tensor([2, 0]),
        },
        path,
        metadata={"n_prompt_tokens": "3", "id": "first"},
    )
    return path
