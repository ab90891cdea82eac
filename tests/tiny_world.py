"""A tiny target and drafters on disk, with random weights: enough to drive every verb."""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 320
BLOCK = 5
MASK = VOCABULARY - 1
PRINTABLE = 94
"""Tokens from 0 on that are printable ASCII."""


def write_target(folder: Path, *, seed: int = 0, ascii_only: bool = False) -> Path:
    """A hybrid target with a tokenizer whose tokens are bytes.

    With ``ascii_only`` it never generates a byte that is no character by itself.
    """
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # as loud as trained weights, so that no choice is a tie
        if ascii_only:
            model.get_input_embeddings().weight[PRINTABLE:] = 0
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 256}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_drafter(folder: Path, *, seed: int = 1, **changes) -> Path:
    """A drafter in the z-lab layout; ``changes`` go into its configuration."""
    import torch
    from safetensors.torch import save_file

    from dflash_diag.conventions import Convention
    from dflash_diag.drafter import Drafter, DrafterShape

    torch.manual_seed(seed)
    shape = DrafterShape(
        hidden_size=32, n_taps=2, n_layers=2, n_heads=2, n_kv_heads=1, head_width=16, mlp_size=64
    )
    reading = Convention(
        block_size=BLOCK,
        layer_ids=(0, 2),
        in_block=("bidirectional",) * 2,
        window=(None, None),
        rope_theta=10_000.0,
        rotary_width=16,
        mask_token_id=MASK,
    )
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: t.contiguous() for name, t in Drafter(shape, reading).state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "vocab_size": VOCABULARY,
        "num_target_layers": 4,
        "block_size": BLOCK,
        "layer_types": ["full_attention"] * 2,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def write_prompts(path: Path, n: int = 3) -> Path:
    lines = [json.dumps({"id": f"p{i}", "text": f"def f{i}(x):\n    return"}) for i in range(n)]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_world(folder: Path) -> Path:
    """``target/``, ``drafter/``, ``reference/`` and ``prompts.jsonl`` in one folder."""
    write_target(folder / "target")
    write_drafter(folder / "drafter")
    write_drafter(folder / "reference", seed=2)
    write_prompts(folder / "prompts.jsonl")
    return folder
