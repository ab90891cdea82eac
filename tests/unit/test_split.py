"""A target spread by accelerate over host memory and disk, against the same one undivided."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from dflash_diag import targets
from dflash_diag.capture import make_capture
from dflash_diag.decoding import (
    check_lossless,
    expect,
    greedy,
    teacher_forced,
)
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import recorded, weight_of
from dflash_diag.prompts import Prompt
from dflash_diag.targets import load_target

G = 10
PROMPTS = [Prompt(id="a", prompt_ids=(5, 9, 200, 31)), Prompt(id="b", prompt_ids=(7,) * 9)]


@pytest.fixture(scope="module", params=["hybrid", "full"])
def folder(request, tmp_path_factory):
    """A tied hybrid target, and an untied one with full attention."""
    model = request.getfixturevalue(f"{request.param}_model")
    path = tmp_path_factory.mktemp(request.param) / "target"
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole(folder):
    return load_target(folder)


@pytest.fixture(scope="module")
def split(folder, whole):
    """The same with half of its layers on the disk."""
    layer = max(sum(p.nbytes for p in one.parameters()) for one in whole.parts.layers)
    outer = 2 * whole.parts.embedding.weight.nbytes
    return load_target(folder, device="split", max_memory={"cpu": outer + 3 * layer})


def weights_of_layer(target, j):
    return {p.device.type for p in target.parts.layers[j].parameters()}


def test_some_layers_are_on_the_disk_and_some_are_not(split):
    assert {"cpu", "disk"} <= set(split.model.hf_device_map.values())
    assert weights_of_layer(split, 0) == {"cpu"}
    assert weights_of_layer(split, 3) == {"meta"}


def test_it_says_the_same_of_itself(split, whole):
    theirs, ours = split.facts(), whole.facts()
    assert theirs == ours
    assert split.device == torch.device("cpu")
    for name in ("embedding", "head", "final_norm"):
        found = weight_of(getattr(split.parts, name))
        assert torch.equal(found, weight_of(getattr(whole.parts, name)))
        assert found.device.type == "cpu"


def test_tokens_states_and_choices_are_those_of_the_undivided_target(split, whole):
    prompts = [list(p.prompt_ids) for p in PROMPTS]
    for ours, theirs in zip(greedy(whole, prompts, G), greedy(split, prompts, G), strict=True):
        assert ours.ids == theirs.ids
        assert torch.equal(ours.top_logits, theirs.top_logits)
    tokens = prompts[1] + theirs.ids
    ours, theirs = (teacher_forced(t, tokens, range(-1, 4)) for t in (whole, split))
    assert list(theirs.states) == list(range(-1, 4))
    assert all(torch.equal(ours.states[j], theirs.states[j]) for j in range(-1, 4))
    assert torch.equal(torch.cat(list(ours.logits())), torch.cat(list(theirs.logits())))


def test_a_capture_has_the_same_bytes(split, whole, tmp_path):
    options = {"max_new_tokens": G, "layers": "all", "silent": True}
    ours = make_capture(whole, PROMPTS, tmp_path / "whole", **options)
    theirs = make_capture(split, PROMPTS, tmp_path / "split", **options)
    names = sorted(p.relative_to(ours.path) for p in ours.path.rglob("*.safetensors"))
    assert names == sorted(p.relative_to(theirs.path) for p in theirs.path.rglob("*.safetensors"))
    for name in [*names, "positions.parquet"]:
        assert (ours.path / name).read_bytes() == (theirs.path / name).read_bytes()


class Wrong:
    """Drafts that are rejected, so that every round goes back to the cache's copy."""

    taps = (0, 3)

    def begin(self):
        self.seen = []

    def observe(self, states):
        self.seen.append(states)

    def propose(self, token, position):
        return [(token * 7 + position + k) % 320 for k in range(5)]


def test_drafting_is_lossless(split):
    expected = expect(split, [(p.id, p.prompt_ids) for p in PROMPTS], G)
    found = check_lossless(split, Wrong(), expected, G)
    assert (found.checked, found.exact) == (2, 2)


def test_the_backend_is_called_in_every_layer_also_in_those_on_the_disk(split, monkeypatch):
    if split.backend.linear == "none":
        pytest.skip("no linear-attention layer")
    import transformers.models.qwen3_5.modeling_qwen3_5 as module

    from dflash_diag.backends import calls

    before = sum(calls(split.parts).values())
    original = module.torch_chunk_gated_delta_rule
    with torch.inference_mode(), recorded(split.parts, range(4)) as kept:
        split.logits(torch.arange(1, 12)[None])
    assert sorted(kept) == [0, 1, 2, 3]
    # Three linear layers, a recurrence and a convolution each.
    assert sum(calls(split.parts).values()) - before == 6
    assert module.torch_chunk_gated_delta_rule is original


def test_a_target_that_cannot_be_loaded_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_target(tmp_path / "target", device="split")
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_without_accelerate_it_is_said_what_to_install(hybrid_folder, monkeypatch):
    find = importlib.util.find_spec

    def without(name, *rest):
        return None if name == "accelerate" else find(name, *rest)

    monkeypatch.setattr(targets.importlib.util, "find_spec", without)
    with pytest.raises(BadInput, match=r"accelerate.*pip install 'dflash-diag\[big\]'"):
        load_target(hybrid_folder, device="split")
