"""Extraction on a GPU: copies beside the forward, and targets spread over devices."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

VOCABULARY, WIDTH, LAYERS, T = 60_000, 512, 8, 1024


def make_model(**changes):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 1024,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "tie_word_embeddings": False,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(sizes | changes))).eval()


def ids():
    return torch.randint(0, VOCABULARY, (T,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def target():
    from dflash_diag.targets import wrap_target

    return wrap_target(make_model().to("cuda", torch.bfloat16), backend="torch")


def test_copies_beside_the_forward_are_the_states(target):
    from dflash_diag.decoding import teacher_forced
    from dflash_diag.hidden_states import recorded

    tokens = ids()
    for _ in range(5):  # a race would not show every time
        forced = teacher_forced(target, tokens, range(-1, LAYERS))
        with torch.inference_mode(), recorded(target.parts, range(-1, LAYERS)) as kept:
            target.logits(torch.tensor([tokens]), last_only=True)
        for layer, states in forced.states.items():
            assert states.device.type == "cpu"
            assert torch.equal(states, kept[layer][0].cpu())
        rows = torch.tensor([0, 77, T - 1])
        few = teacher_forced(target, tokens, (2, 5), rows=rows)
        assert torch.equal(few.states[5], forced.states[5][rows])


def test_logits_by_rows_are_the_models_own_and_never_whole(target, monkeypatch):
    from dflash_diag import decoding
    from dflash_diag.decoding import teacher_forced

    monkeypatch.setattr(decoding, "LOGIT_BYTES", 2**24)
    slice_bytes = 2**24 // 2
    tokens = ids()
    with torch.inference_mode():
        whole = target.model(input_ids=torch.tensor([tokens], device="cuda")).logits[0]
    expected = whole.float().cpu()
    n_bytes = whole.nbytes
    del whole
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    forced = teacher_forced(target, tokens, (1, 3))
    at = 0
    torch.cuda.reset_peak_memory_stats()
    for rows in forced.logits():
        own = expected[at : at + len(rows)]
        error = (rows.cpu().float() - own).abs().max()
        assert float(error) <= 2**-6 * float(own.abs().max())
        at += len(rows)
    assert at == T
    peak = torch.cuda.max_memory_allocated() - before
    kept = T * WIDTH * 2
    # Two slices at most: the one in use and the next.
    assert kept <= peak <= kept + 2 * slice_bytes + 2**20 < n_bytes
    del forced, rows
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("big") / "target"
    make_model().to(torch.bfloat16).save_pretrained(path)
    return path


def spread(folder, max_memory):
    from dflash_diag.targets import load_target

    whole = load_target(folder, device="cuda", backend="torch")
    split = load_target(folder, device="split", backend="torch", max_memory=max_memory)
    return whole, split


def sizes(folder):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
        nbytes = {name: file.get_tensor(name).nbytes for name in names}
    layer = max(
        sum(n for name, n in nbytes.items() if f"layers.{j}." in name) for j in range(LAYERS)
    )
    return sum(nbytes.values()), layer


def compare(whole, split):
    from dflash_diag.decoding import greedy, teacher_forced

    tokens = [i % whole.facts()["vocab_size"] for i in ids()]
    ours, theirs = (teacher_forced(t, tokens, range(-1, LAYERS)) for t in (whole, split))
    for layer in range(-1, LAYERS):
        assert torch.equal(ours.states[layer], theirs.states[layer])
    for a, b in zip(ours.logits(), theirs.logits(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
    prompts = [tokens[:9], tokens[20:33]]
    assert [m.ids for m in greedy(whole, prompts, 8)] == [m.ids for m in greedy(split, prompts, 8)]
    assert split.facts() | {"files": 0} == whole.facts() | {"files": 0}


def test_layers_in_host_memory_run_on_the_gpu(folder):
    total, layer = sizes(folder)
    whole, split = spread(folder, {0: total - 3 * layer, "cpu": total})
    assert {"cpu", 0} <= set(split.model.hf_device_map.values())
    assert split.device.type == "cuda"
    compare(whole, split)


def test_two_gpus(tmp_path):
    """Spread evenly; the vocabulary is small, or one table would outweigh the rest."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    make_model(vocab_size=4096).to(torch.bfloat16).save_pretrained(tmp_path)
    whole, split = spread(tmp_path, None)
    assert set(split.model.hf_device_map.values()) == {0, 1}
    compare(whole, split)
