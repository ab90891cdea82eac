"""Finding the decoder, and states by hooks against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import (
    ToHost,
    default_taps,
    find_parts,
    norm_facts,
    recorded,
    select_layers,
    stacked,
    tapped,
)

IDS = torch.arange(1, 24)[None]


def test_hooks_equal_transformers_hidden_states_bit_for_bit(model):
    parts = find_parts(model)
    with torch.inference_mode():
        with recorded(parts, range(-1, 4)) as kept:
            model(input_ids=IDS, use_cache=False)
        theirs = model(input_ids=IDS, use_cache=False, output_hidden_states=True).hidden_states
        for layer in range(-1, 3):
            assert torch.equal(kept[layer], theirs[layer + 1])
        # transformers hands out the last layer after the final norm.
        assert not torch.allclose(kept[3], theirs[4])
        assert torch.equal(parts.final_norm(kept[3]), theirs[4])
    assert stacked(kept, (3, -1)).shape == (23, 2, 64)
    assert torch.equal(stacked(kept, (3, -1))[:, 1], theirs[0][0])


def test_nothing_else_is_kept_and_no_hook_stays(model):
    parts = find_parts(model)
    with torch.inference_mode():
        with recorded(parts, (2,)) as kept:
            model(input_ids=IDS, use_cache=False)
        assert list(kept) == [2]
        before = kept[2]
        model(input_ids=IDS + 1, use_cache=False)
        assert kept[2] is before

        with pytest.raises(RuntimeError, match="stop"), recorded(parts, (2,)) as kept:
            raise RuntimeError("stop")
        model(input_ids=IDS, use_cache=False)
        assert kept == {}


def test_a_sink_sees_each_state_while_the_forward_goes_on(model):
    parts, seen = find_parts(model), []
    running = parts.layers[2].register_forward_pre_hook(lambda *_: seen.append("layer 2 begins"))
    with torch.inference_mode(), tapped(parts, (2, 1, -1), lambda j, _: seen.append(j)):
        model(input_ids=IDS, use_cache=False)
    running.remove()
    assert seen == [-1, 1, "layer 2 begins", 2]


def test_chosen_rows_come_to_the_host_and_no_others(model):
    parts, got = find_parts(model), {}
    rows = torch.tensor([3, 22])
    copies = ToHost(got.__setitem__, rows)
    with torch.inference_mode():
        with tapped(parts, (0, 3), copies), recorded(parts, (0, 3)) as kept:
            model(input_ids=IDS, use_cache=False)
        copies.finish()
    for layer in (0, 3):
        assert torch.equal(got[layer], kept[layer][0, rows])


class Layer(nn.Module):
    def forward(self, x):
        return x + 1, "attention weights"


class Decoder(nn.Module):
    def __init__(self, n, layers="layers", norm="norm"):
        super().__init__()
        self.add_module(layers, nn.ModuleList(Layer() for _ in range(n)))
        self.add_module(norm, nn.LayerNorm(8))


class Model(nn.Module):
    """A model whose decoder sits at ``path``."""

    def __init__(self, path, *, n=3, layers="layers", norm="norm", head=True):
        super().__init__()
        self.config = SimpleNamespace(
            get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=n)
        )
        self.embed, self.out = nn.Embedding(5, 8), nn.Linear(8, 5) if head else None
        self.vision_tower = Decoder(n)
        self.mtp = Decoder(n)
        here = self
        *outer, last = path.split(".") if path else ["self"]
        for name in outer:
            here.add_module(name, nn.Module())
            here = here.get_submodule(name)
        if path:
            here.add_module(last, Decoder(n, layers, norm))
        self.decoder_path = path

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.out


@pytest.mark.parametrize(
    ("path", "layers", "norm"),
    [
        ("model", "layers", "norm"),
        ("model.language_model", "layers", "norm"),
        ("language_model.model", "layers", "norm"),
        ("transformer", "h", "ln_f"),
        ("gpt_neox", "layers", "final_layernorm"),
        ("backbone", "layers", "norm_f"),
    ],
)
def test_the_decoder_is_found_wherever_it_lives(path, layers, norm):
    model = Model(path, layers=layers, norm=norm)
    parts = find_parts(model)
    assert parts.path == f"{path}.{layers}"
    assert parts.final_norm is model.get_submodule(f"{path}.{norm}")
    with recorded(parts, (-1, 0, 2)) as kept:
        x = torch.zeros(1, 2, 8)
        for layer in parts.layers:
            x = layer(x)[0]
    assert [float(kept[i].mean()) for i in (-1, 0, 2)] == [0, 1, 3]


def test_a_model_with_a_vision_tower_is_read_as_text():
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config={
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    )
    model = Qwen3_5ForConditionalGeneration(config).eval()
    parts = find_parts(model)
    assert parts.path == "model.language_model.layers"
    with torch.inference_mode(), recorded(parts, (3,)) as kept:
        model(input_ids=IDS, use_cache=False)
    assert kept[3].shape == (1, 23, 32)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(""), "no list of 3 decoder layers"),
        (Model("model", norm="something"), "no final norm"),
        (Model("model", head=False), "no language-model head"),
    ],
)
def test_what_is_no_causal_language_model_is_refused(model, message):
    with pytest.raises(BadInput, match=message):
        find_parts(model)


def test_usual_taps():
    assert default_taps(16) == (1, 4, 7, 10, 13)
    assert default_taps(64) == (1, 16, 31, 46, 61)
    assert default_taps(4) == (1,)
    assert default_taps(36, 1) == (18,)


def test_layers_to_keep():
    assert select_layers("taps", 16, (4, 1)) == (1, 4)
    assert select_layers("around", 16, (4, 13)) == (-1, 3, 4, 5, 12, 13, 14, 15)
    assert select_layers("around", 16, (0, 15)) == (-1, 0, 1, 14, 15)
    assert select_layers("around", 16, (-1,)) == (-1, 0, 15)
    assert select_layers("all", 3, (1,)) == (-1, 0, 1, 2)
    assert select_layers("taps", 16) == (1, 4, 7, 10, 13)


def test_a_layer_that_the_target_lacks_is_refused():
    for tap in (-2, 16):
        with pytest.raises(BadInput, match=rf"tapped layer {tap} of a target with 16 layers"):
            select_layers("taps", 16, (1, tap))
    with pytest.raises(BadInput, match="one of taps, around, all"):
        select_layers("none", 16)


def test_how_a_norm_scales(hybrid_model, full_model):
    assert norm_facts(find_parts(hybrid_model).final_norm) == {"style": "one_plus", "eps": 1e-6}
    assert norm_facts(find_parts(full_model).final_norm) == {"style": "plain", "eps": 1e-6}
    assert norm_facts(nn.RMSNorm(8, eps=1e-5)) == {"style": "plain", "eps": 1e-5}
    assert norm_facts(nn.LayerNorm(8))["style"] == "other"
