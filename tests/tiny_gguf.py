"""A tiny llama as a GGUF file, and as the model that the file's blocks are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 320
LAYERS, HEADS, KV_HEADS, WIDTH = 4, 2, 1, 16
HIDDEN, MLP = 32, 64
THETA, EPS = 12_345.0, 1e-3
"""Neither is anybody's default."""
START, END = 256, 257
PRINTABLE = 94
"""Tokens from 0 on that are printable ASCII."""
MERGES = ["Ġ Ġ", "d e", "de f", "Ġ 1"]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% elif m['role'] in ('user', 'assistant') %}"
    "<|im_start|>{{ m['role'] + '\\n' + m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_llama(*, seed: int = 0, tied: bool = True, ascii_only: bool = False) -> Any:
    """A model with random weights.

    With ``ascii_only`` it never generates a byte that is no character by itself.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH,
        max_position_embeddings=256,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        tie_word_embeddings=tied,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(requires_grad=False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        else:
            parameter.mul_(4)  # as loud as trained weights, so that no choice is a tie
    if ascii_only:
        model.get_input_embeddings().weight[PRINTABLE:] = 0
    return model


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, model: Any, kind: str = "Q4_1", **changes: Any) -> Path:
    """Write a model in llama.cpp's layout, and leave in it what the file's blocks are worth.

    ``changes`` are metadata to change, or to leave out (None).
    """
    import gguf
    import torch

    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, changes.pop("architecture", "llama"))
    for name, value in (metadata() | changes).items():
        if value is not None:
            writer.add_key_value(name, *_typed(value))
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = _interleaved(name, tensor.numpy())
        of = gguf.GGMLQuantizationType.F32 if values.ndim == 1 else quantised
        data = gguf.quantize(values, of)
        worth = gguf.dequantize(data, of).reshape(values.shape)
        tensor.copy_(torch.from_numpy(_interleaved(name, worth, back=True)))
        writer.add_tensor(_in_gguf(name), data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def metadata() -> dict[str, Any]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "<|im_start|>", "<|im_end|>", *(m.replace(" ", "") for m in MERGES)]
    kinds = [1] * 256 + [3, 3] + [1] * len(MERGES)
    unused = VOCABULARY - len(tokens)
    return {
        "llama.block_count": LAYERS,
        "llama.context_length": 256,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "llama.rope.freq_base": THETA,
        "llama.rope.dimension_count": WIDTH,
        "llama.vocab_size": VOCABULARY,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{i}]" for i in range(unused))],
        "tokenizer.ggml.token_type": [*kinds, *[5] * unused],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def without_tokenizer() -> dict[str, None]:
    """Changes that leave the tokenizer out."""
    return {name: None for name in metadata() if name.startswith("tokenizer.")}


def _typed(value: Any) -> tuple[Any, ...]:
    from gguf import GGUFValueType as Kind

    kinds = {bool: Kind.BOOL, int: Kind.UINT32, float: Kind.FLOAT32, str: Kind.STRING}
    if isinstance(value, list):
        return value, Kind.ARRAY, Kind.INT32 if isinstance(value[0], int) else Kind.STRING
    return value, kinds[type(value)]


def _in_gguf(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{end}"
    return f"{NAMES[stem]}.{end}"


def _interleaved(name: str, rows: np.ndarray, *, back: bool = False) -> np.ndarray:
    """Rows of queries and keys in llama.cpp's order: the halves of a head's width alternate."""
    if ".q_proj" not in name and ".k_proj" not in name:
        return rows
    halves = (-1, WIDTH // 2, 2) if back else (-1, 2, WIDTH // 2)
    return np.ascontiguousarray(
        rows.reshape(*halves, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)
    )
