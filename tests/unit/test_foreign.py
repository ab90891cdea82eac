"""Captures made by other code, in the forms that other code writes."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_diag.bundle import Capture
from dflash_diag.capture import make_capture
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.prompts import Prompt
from dflash_diag.targets import load_target

G = 10


@pytest.fixture(scope="module")
def made(hybrid_folder, tmp_path_factory):
    """A capture of one prompt of three tokens, to be written again as others do."""
    prompts = [Prompt(id="first", prompt_ids=(5, 9, 200))]
    out = tmp_path_factory.mktemp("made") / "capture"
    target = load_target(hybrid_folder)
    return make_capture(target, prompts, out, max_new_tokens=G, silent=True)


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


def test_a_capture_made_by_other_code(made, foreign, hybrid_folder):
    read = Capture.load(foreign, target=hybrid_folder)
    assert read.foreign
    assert read.layer_ids == (2, 0)
    (prompt,) = read.prompts
    assert (prompt.id, prompt.n_prompt_tokens, prompt.n_generated) == ("first", 3, G)
    assert torch.equal(read.tokens(0), made.tokens(0))
    assert torch.equal(read.states(0, (0, 2)), made.states(0, (0, 2)))
    assert torch.equal(read.embedding, made.embedding)
    assert read.head is read.embedding
    states = made.states(0, [3])[:, 0]
    torch.testing.assert_close(read.final_norm(states), made.final_norm(states))
    for fact in ("hidden_size", "vocab_size", "n_layers", "layer_types", "final_norm"):
        assert read.target_facts[fact] == made.target_facts[fact]
    with pytest.raises(CaptureError, match="holds no choices of the target"):
        read.positions(0)


def test_one_alone_says_what_it_lacks(foreign):
    read = Capture.load(foreign)
    assert read.target_facts["hidden_size"] == 64
    with pytest.raises(CaptureError, match="holds no embedding .*--target"):
        _ = read.embedding


def test_a_folder_of_them(foreign, hybrid_folder, made, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("b", "a"):
        tensors = load_file(foreign)
        save_file({**tensors, "n_prompt_tokens": torch.tensor(4)}, folder / f"{name}.safetensors")
    read = Capture.load(folder, target=hybrid_folder)
    assert [(p.id, p.n_prompt_tokens) for p in read.prompts] == [("a", 4), ("b", 4)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": None}, "has no tokens"),
        ({"layer_ids": torch.tensor([1, 2, 3])}, r"expected shapes \[T\], \[T, K, H\] and \[K\]"),
        ({"layer_ids": torch.tensor([2, 2])}, "expected each layer once"),
        ({"layer_ids": torch.tensor([2, 9])}, "layer 9 of a target with 4 layers"),
        ({"n_prompt_tokens": torch.tensor(13)}, "n_prompt_tokens is 13 of 13 tokens"),
        ({"n_prompt_tokens": torch.tensor([4, 5])}, r"n_prompt_tokens is \[4, 5\]"),
        ({"hidden_states": torch.zeros(13, 2, 32)}, "states of width 32; expected 64"),
        ({"tokens": torch.full((13,), 5000)}, "token id 5000; expected ids below 320"),
        ({"tokens": torch.full((13,), -3)}, "token id -3"),
        ({"tokens": torch.zeros(13)}, "tokens are torch.float32"),
    ],
)
def test_one_that_cannot_be_read(foreign, hybrid_folder, tmp_path, change, message):
    tensors = {k: v for k, v in {**load_file(foreign), **change}.items() if v is not None}
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(CaptureError, match=message):
        Capture.load(tmp_path / "bad.safetensors", target=hybrid_folder)


@pytest.mark.parametrize(
    "dtype",
    ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool", "complex64", "uint16", "uint64"],
)
def test_states_of_a_type_that_cannot_be_compared(foreign, tmp_path, dtype):
    tensors = load_file(foreign)
    tensors["hidden_states"] = tensors["hidden_states"].abs().to(getattr(torch, dtype))
    save_file(tensors, tmp_path / "bad.safetensors")
    shapes = rf"tokens \[13\], hidden_states \[13, 2, 64\], 2 layer_ids, in {dtype}; expected "
    with pytest.raises(CaptureError, match=shapes + "states in float32.*; save them in one"):
        Capture.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int8", "uint8", "int32", "int64"])
def test_states_of_every_other_type_are_read(foreign, tmp_path, dtype):
    tensors = load_file(foreign)
    tensors["hidden_states"] = tensors["hidden_states"].to(getattr(torch, dtype))
    save_file(tensors, tmp_path / "a.safetensors")
    states = Capture.load(tmp_path / "a.safetensors").states(0, [0])
    assert states.dtype is getattr(torch, dtype)
    assert torch.equal(states, tensors["hidden_states"][:, 1:])


def test_a_type_that_is_not_known(foreign, tmp_path):
    """A type of another version of the format."""
    raw = foreign.read_bytes()
    assert raw.count(b'"F32"') == 1
    (tmp_path / "bad.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"'))
    with pytest.raises(CaptureError, match=r"bad\.safetensors"):
        Capture.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_states", torch.tensor(1.0), r"hidden_states \[\], 2 layer_ids; expected shapes"),
        ("tokens", torch.tensor(3), r"tokens \[\]; expected shape \[T\]"),
        ("tokens", torch.zeros(0, dtype=torch.long), r"tokens \[0\]; expected shape \[T\]"),
        ("tokens", torch.ones(13, dtype=torch.bool), "tokens are torch.bool; expected integers"),
        ("layer_ids", torch.zeros(0, dtype=torch.long), "layer_ids are empty"),
        ("layer_ids", torch.zeros(2).to(torch.complex64), "layer_ids are torch.complex64"),
        ("hidden_states", torch.zeros(13, 2, 0), r"hidden_states \[13, 2, 0\]"),
        ("n_prompt_tokens", torch.tensor(float("inf")), "n_prompt_tokens is inf"),
        ("n_prompt_tokens", torch.tensor(2.5), "n_prompt_tokens is 2.5; expected one integer"),
        ("n_prompt_tokens", torch.tensor(True), "n_prompt_tokens is True; expected one integer"),
    ],
)
def test_tensors_that_make_no_sense(foreign, tmp_path, name, value, message):
    save_file({**load_file(foreign), name: value}, tmp_path / "bad.safetensors")
    with pytest.raises(CaptureError, match=message):
        Capture.load(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("name", ["layer_ids", "n_prompt_tokens"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, "9" * 10_000, "[1e999]", "{}", "true", '[[1], "a"]']
)
def test_metadata_that_makes_no_sense(foreign, tmp_path, name, text):
    tensors = {k: v for k, v in load_file(foreign).items() if k != name}
    save_file(tensors, tmp_path / "bad.safetensors", {name: text})
    with pytest.raises(CaptureError, match=f"{name} (is|are) ") as caught:
        Capture.load(tmp_path / "bad.safetensors")
    assert len(str(caught.value)) < 500


def test_a_sequence_of_one_token_is_no_batch_of_one(foreign, tmp_path):
    """[1, K, H] are the states of one token; that there is no continuation is what is wrong."""
    tensors = load_file(foreign)
    tensors |= {name: tensors[name][:1] for name in ("tokens", "hidden_states")}
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(CaptureError, match="n_prompt_tokens is 1 of 1 tokens; expected a prompt"):
        Capture.load(tmp_path / "bad.safetensors")


def test_what_is_no_safetensors_file(tmp_path):
    (tmp_path / "bad.safetensors").write_bytes(b"hello")
    with pytest.raises(CaptureError, match="not a safetensors file"):
        Capture.load(tmp_path / "bad.safetensors")


IDS = (2, 0)


def specforge(made):
    """Its offline features: a packed batch of one, with the last layer beside it."""
    states = made.states(0, IDS).flatten(1)[None]
    mask = torch.tensor([0] * 3 + [1] * G)
    return {
        "input_ids": made.tokens(0),
        "loss_mask": mask,
        "hidden_state": made.final_norm(made.states(0, [3])[:, 0])[None],
        "aux_hidden_state": states,
    }


def speculators_list(made):
    states = made.states(0, IDS)
    return {
        "input_ids": made.tokens(0)[None],
        "loss_mask": torch.tensor([[0] * 3 + [1] * G]),
        "hidden_states": [states[:, k].clone() for k in range(2)],
    }


def speculators_stack(made):
    states = made.states(0, IDS)
    return {"token_ids": made.tokens(0), "hidden_states": states}


def batch_of_one(made):
    return {
        "input_ids": made.tokens(0)[None],
        "hidden_states": made.states(0, IDS)[None],
        "prompt_length": 3,
        "config": {"target_layer_ids": list(IDS)},
    }


def named_by_inputs(made):
    """Ids that count a layer's input, as vLLM does: one more than ours."""
    return {
        "input_ids": made.tokens(0).int(),
        "aux_hidden_states": [s[None] for s in made.states(0, IDS).unbind(1)],
        "aux_hidden_state_layer_ids": torch.tensor([j + 1 for j in IDS]),
        "n_prompt_tokens": torch.tensor(3),
    }


FORMS = {
    form.__name__: form
    for form in (specforge, speculators_list, speculators_stack, batch_of_one, named_by_inputs)
}


@pytest.mark.parametrize("suffix", ["pt", "ckpt"])
@pytest.mark.parametrize("form", FORMS)
def test_what_trainers_leave_behind(made, hybrid_folder, tmp_path, form, suffix):
    path = tmp_path / f"data_7.{suffix}"
    content = FORMS[form](made)
    torch.save(content, path)
    says = "layer" in str(content.keys()) or "config" in content
    read = Capture.load(path, target=hybrid_folder, layer_ids=None if says else IDS)
    (prompt,) = read.prompts
    n_prompt = 1 if form == "speculators_stack" else 3
    assert (prompt.id, prompt.n_prompt_tokens) == ("data_7", n_prompt)
    assert prompt.n_prompt_tokens + prompt.n_generated == 3 + G
    assert read.layer_ids == IDS
    assert torch.equal(read.tokens(0), made.tokens(0))
    assert torch.equal(read.states(0, (0, 2)), made.states(0, (0, 2)))
    assert read.rows(0).tolist() == list(range(3 + G))


def test_safetensors_of_a_server_without_layer_ids(made, tmp_path):
    path = tmp_path / "hidden_states" / "hs_4.safetensors"
    path.parent.mkdir()
    save_file(speculators_stack(made), path)
    read = Capture.load(tmp_path, layer_ids=IDS)
    assert read.prompts[0].id == "hidden_states/hs_4"
    assert torch.equal(read.states(0, [2]), made.states(0, [2]))
    with pytest.raises(CaptureError, match="does not say which layers .*or give layer_ids"):
        Capture.load(tmp_path)
    with pytest.raises(CaptureError, match=r"\[13\], hidden_states \[13, 2, 64\], 3 layer_ids"):
        Capture.load(tmp_path, layer_ids=(0, 1, 2))


def test_layers_that_contradict_the_file(made, tmp_path):
    torch.save(named_by_inputs(made), tmp_path / "a.pt")
    assert Capture.load(tmp_path / "a.pt", layer_ids=IDS).layer_ids == IDS
    with pytest.raises(CaptureError, match=r"holds layers \[2, 0\]; expected \[3, 1\], as given"):
        Capture.load(tmp_path / "a.pt", layer_ids=(3, 1))


@pytest.mark.parametrize(
    ("mask", "n_prompt", "n_generated"),
    [
        ([0] * 3 + [1] * 10, 3, 10),
        ([1] * 13, 1, 12),
        ([0] * 2 + [1] * 3 + [0] * 2 + [1] * 4 + [0] * 2, 7, 4),
    ],
)
def test_the_last_run_of_a_loss_mask_is_the_continuation(
    made, tmp_path, mask, n_prompt, n_generated
):
    torch.save(specforge(made) | {"loss_mask": torch.tensor(mask)}, tmp_path / "a.ckpt")
    read = Capture.load(tmp_path / "a.ckpt", layer_ids=IDS)
    assert (read.prompts[0].n_prompt_tokens, read.prompts[0].n_generated) == (n_prompt, n_generated)
    n = n_prompt + n_generated
    assert torch.equal(read.tokens(0), made.tokens(0)[:n])
    assert torch.equal(read.states(0, IDS), made.states(0, IDS)[:n])


class Hostile:
    def __reduce__(self):
        return os.system, ("touch ran",)


@pytest.mark.parametrize("kind", ["zip", "bare"])
def test_a_pickle_that_would_run_code_is_refused_by_name(made, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    content = specforge(made) | {"note": Hostile()}
    if kind == "zip":
        torch.save(content, "a.pt")
    else:
        (tmp_path / "a.pt").write_bytes(pickle.dumps({"note": Hostile()}))
    with pytest.raises(BadInput, match=r"would run code: it names (posix|os|nt)\.system") as caught:
        Capture.load("a.pt", layer_ids=IDS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux_hidden_state": None}, "has no hidden_states"),
        ({"aux_hidden_state": torch.zeros(1, 13, 127)}, r"hidden_states \[1, 13, 127\]"),
        ({"aux_hidden_state": [torch.zeros(13, 64)]}, "a list of 1 states"),
        ({"aux_hidden_state": "gone"}, "hidden_states that are a str"),
        ({"input_ids": "text"}, "tokens are a str; expected numbers"),
        ({"loss_mask": torch.zeros(13)}, "a loss_mask of 13 entries, 0 of them set"),
        ({"loss_mask": torch.ones(9)}, "a loss_mask of 9 entries"),
        ({"hidden_states_scales": torch.ones(13)}, "quantised"),
        ({"layer_ids": "some"}, "layer_ids are a str"),
    ],
)
def test_a_dump_that_cannot_be_read(made, tmp_path, change, message):
    content = {k: v for k, v in (specforge(made) | change).items() if v is not None}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CaptureError, match=message) as caught:
        Capture.load(tmp_path / "a.pt", layer_ids=IDS)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"hello", "is not a checkpoint"), (b"", "is not a checkpoint"), (b"PK\x03\x04 cut", "zip")],
)
def test_what_is_no_dump(tmp_path, content, message):
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CaptureError, match=message):
        Capture.load(tmp_path / "a.pt")
    torch.save([1, 2], tmp_path / "b.pt")
    with pytest.raises(CaptureError, match="holds a list; expected named tensors"):
        Capture.load(tmp_path / "b.pt")
