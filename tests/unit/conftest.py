"""Tiny targets with random weights, loud enough that their choices are not ties."""

from __future__ import annotations

import pytest

VOCABULARY = 320
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def amplified(model):
    """Weights as large as trained ones, so that text varies and a stale state shows."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.eval()


def make_hybrid(seed=0, **changes):
    """Linear attention with every fourth layer full; tied."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(**{**COMMON, **LINEAR, "tie_word_embeddings": True, **changes})
    return amplified(Qwen3_5ForCausalLM(config))


def make_full(seed=0, **changes):
    """Full attention only; untied."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(**{**COMMON, "tie_word_embeddings": False, **changes})
    return amplified(Qwen3ForCausalLM(config))


@pytest.fixture(scope="session")
def new_hybrid():
    """Makes hybrid targets, for tests that bind or change one."""
    return make_hybrid


@pytest.fixture(scope="session")
def hybrid_model():
    return make_hybrid()


@pytest.fixture(scope="session")
def full_model():
    return make_full()


@pytest.fixture(params=["hybrid", "full"])
def model(request):
    """Each of the two kinds of target in turn."""
    return request.getfixturevalue(f"{request.param}_model")


@pytest.fixture
def target(model):
    from dflash_diag.targets import wrap_target

    return wrap_target(model)


@pytest.fixture(scope="session")
def hybrid_folder(hybrid_model, tmp_path_factory):
    """The hybrid target as a folder, with a tokenizer and a chat template."""
    return save_with_tokenizer(hybrid_model, tmp_path_factory.mktemp("hybrid") / "target")


def save_with_tokenizer(model, folder):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = (
        "{% for m in messages %}w1 {{ m['content'] }} {% endfor %}"
        "{% if think %}w2 {% endif %}{% if add_generation_prompt %}w3{% endif %}"
    )
    fast.save_pretrained(folder)
    return folder
