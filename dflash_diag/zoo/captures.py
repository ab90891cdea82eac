"""Hidden states of the hybrid target as a GPU computes them, small enough to keep.

One capture a backend and dtype: ten coding prompts, few positions of each, every layer of the first
prompt and the tapped layers of the rest. With them go the results of the whole comparison, which
needs all positions and is only possible there: layers, modules, flips and the change of tau.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from dflash_diag import paths, storage
from dflash_diag.capture import make_capture
from dflash_diag.config import RunConfig
from dflash_diag.errors import BadInput
from dflash_diag.example import EXAMPLE, MANIFEST
from dflash_diag.modules import Variant, computed_as
from dflash_diag.prompts import read_prompts
from dflash_diag.results import Result
from dflash_diag.runs import Run
from dflash_diag.state_runs import RESULTS
from dflash_diag.targets import load_target
from dflash_diag.views import divergence_text
from dflash_diag.zoo.export import write_manifest

log = logging.getLogger(__name__)

CAPTURES = "captures"
PROMPTS, N_PROMPTS = "prompts/coding.jsonl", 10
KEEP_ROWS = 4
"""Positions a prompt: all captures together stay below 1.5 MB."""
VARIANTS = (
    "fla/bfloat16",
    "fla/float32",
    "fla+torch-conv/bfloat16",
    "torch/bfloat16",
    "torch/float32",
)
"""Ways of computing; the first, which is what trainers use, is the one whose comparison with the
others is kept as results. ``fla`` takes causal-conv1d where that runs."""
ON_A_CPU = ("torch+recurrent/bfloat16", "torch/bfloat16", "torch/float32")
"""The same for a machine without a GPU, to try the stage."""


def build(work: Path, zoo: Path, *, device: str) -> None:
    """Make ``zoo/captures`` on this machine, replacing what is there, and sum the example up anew.

    Backends that cannot run here are left out, and the log says why.
    """
    folder = zoo / CAPTURES
    shutil.rmtree(work / "captures", ignore_errors=True)
    target = load_target(zoo / "hybrid" / "target", device=device, dtype="float32", backend="torch")
    prompts = read_prompts(paths.data_dir() / PROMPTS)[:N_PROMPTS]
    base = make_capture(
        target, prompts, work / "captures" / "base", max_new_tokens=EXAMPLE.max_new_tokens
    )
    taps = storage.read_json(zoo / "hybrid" / "drafters" / "reference" / "config.json")
    with storage.staged_dir(folder) as stage:
        for variant in _variants(device):
            name = f"{machine(device)}-{str(variant).replace('+', '-').replace('/', '-')}"
            try:
                with computed_as(target, variant) as live:
                    make_capture(
                        live,
                        [],
                        stage / name,
                        like=base,
                        layers="taps",
                        taps=taps["dflash_config"]["target_layer_ids"],
                        all_layers_for=1,
                        keep_rows=KEEP_ROWS,
                    )
            except BadInput as error:
                log.warning("left out %s: %s", name, error)
        _compare(work, zoo, stage, device)
    manifest = storage.read_json(zoo / MANIFEST)
    write_manifest(zoo, manifest["measured"])


def machine(device: str) -> str:
    """A short name of the device: ``h200``, ``cpu``."""
    if not device.startswith("cuda"):
        return "cpu"
    return torch.cuda.get_device_name().split()[-1].lower()


def _variants(device: str) -> list[Variant]:
    return [Variant.parse(v) for v in (VARIANTS if device.startswith("cuda") else ON_A_CPU)]


def _compare(work: Path, zoo: Path, stage: Path, device: str) -> None:
    """The whole comparison on the example's prompts, kept as results."""
    judged, *others = _variants(device)
    prompts = work / "captures" / "prompts.jsonl"
    lines = [json.dumps(p.to_json()) for p in EXAMPLE.read_prompts()]
    prompts.write_text("\n".join(lines) + "\n")
    config = RunConfig(
        target=str(zoo / "hybrid" / "target"),
        drafter=str(zoo / "hybrid" / "drafters" / "reference"),
        prompts=str(prompts),
        max_new_tokens=EXAMPLE.max_new_tokens,
        device=device,
        dtype=judged.dtype,
        backend=judged.backend,
        against=",".join(map(str, others)),
        out=str(work / "captures" / "run"),
    )
    run = Run.open(config)
    for id_ in RESULTS:
        _portable(run.result(id_)).save(stage / "results" / id_)
    log.info("%s", divergence_text(run))


def _portable(result: Result) -> Result:
    """A result without the folders of this machine; hashes say what lay in them."""
    content = dict(result.provenance["content"])
    given = content["parameters"]["given"]
    kept = {k: v for k, v in given.items() if k not in ("target", "drafter", "prompts", "out")}
    content["parameters"] = {**content["parameters"], "given": kept}
    provenance = {**result.provenance, "content": content, "key": storage.content_key(content)}
    return replace(result, provenance=provenance, frame=result.frame)
