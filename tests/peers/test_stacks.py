"""Our reading of other stacks' folders against the stacks' own code, where it is installed.

``speculators`` and ``specforge`` pin releases of torch and transformers that exclude ours, so they
are no requirement: ``pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 loguru
pydantic-settings specforge==0.2.0`` brings what these tests use, and without it they are skipped.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config

from dflash_diag.blocks import draft_blocks
from dflash_diag.checkpoints import (
    audit,
    contradictions,
    detect_stack,
    load_drafter,
    read_checkpoint,
    resolve_convention,
)
from dflash_diag.checkpoints.names import clean_name
from dflash_diag.scoring import score
from tests.conftest import ZOO

H, VOCAB, LAYERS, BLOCK, MASK = 32, 60, 3, 5, 7
IDS = [0, 3, 8]
BODY = {
    "hidden_size": H,
    "vocab_size": VOCAB,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-4,
    "max_position_embeddings": 128,
}
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


def randomise(model: torch.nn.Module) -> None:
    """Loud random weights, norms near one; nothing stays at its initial value."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            wide = weight.ndim > 1
            weight.copy_(noise * 1.5 * weight.shape[-1] ** -0.5 if wide else noise * 0.1)
            if name.endswith("norm.weight"):
                weight.add_(1.0)


# --- speculators ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speculators():
    """The package, imported past what other people's imports warn about."""
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in ("dflash", "dflash2", "dspark", "xpress"):
            importlib.import_module(f"speculators.models.{part}")
        return importlib.import_module("speculators")


CASES = {
    "plain": ("dflash", {}, {}),
    "sliding": ("dflash", SLIDING, {}),
    "sliding, not causal": ("dflash", SLIDING, {"sliding_window_non_causal": True}),
    "all sliding": ("dflash", {**SLIDING, "layer_types": ["sliding_attention"] * LAYERS}, {}),
    "sliding without the switch": ("dflash", {**SLIDING, "use_sliding_window": False}, {}),
    "from the anchor": ("dflash", {}, {"sample_from_anchor": True}),
    "a base": ("dflash", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {}),
    "a RoPE for each type": (
        "dflash",
        {
            **SLIDING,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e3},
            },
        },
        {},
    ),
    "a reduced vocabulary": ("dflash", {}, {"draft_vocab_size": 20}),
    "dspark": ("dspark", {}, {"markov_rank": 4}),
    "dspark, gated, bonus anchor": (
        "dspark",
        {},
        {"markov_rank": 4, "markov_head_type": "gated", "sample_from_anchor": False},
    ),
    "dspark, recurrent": ("dspark", {}, {"markov_rank": 4, "markov_head_type": "rnn"}),
    "dspark without its head": (
        "dspark",
        {},
        {"markov_rank": 0, "confidence_head_with_markov": False},
    ),
    "dflash2": ("dflash2", SLIDING, {"selector_rank": 4, "conv_group_size": 8}),
}


def saved(speculators, folder: Path, case: str):
    """A model of theirs, with random weights, and its folder as they write it."""
    kind, body, settings = CASES[case]
    classes = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2"}
    module = importlib.import_module(f"speculators.models.{kind}")
    config_class = getattr(module, f"{classes[kind]}SpeculatorConfig")
    model_class = getattr(module, f"{classes[kind]}DraftModel")
    if "full_attention" in body.get("rope_parameters", {}):
        layer = Qwen3Config(**{**BODY, **body, "rope_parameters": None})
        layer.rope_parameters = body["rope_parameters"]
    else:
        layer = Qwen3Config(**BODY, **body)
    layer._attn_implementation = "eager"
    settings = {"draft_vocab_size": VOCAB, **settings}
    config = config_class(
        transformer_layer_config=layer,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=IDS,
        mask_token_id=MASK,
        **settings,
    )
    model = model_class(config).eval()
    randomise(model)
    if settings["draft_vocab_size"] != VOCAB:
        from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

        frequency = {token: 100 - token for token in range(3, VOCAB, 2)}
        d2t, t2d = build_vocab_mappings_from_distribution(frequency, 20, VOCAB)
        model.load_vocab_mappings(t2d, d2t)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_speculators_saved(case, speculators, tmp_path):
    model = saved(speculators, tmp_path, case)
    config, layer = model.config, model.config.transformer_layer_config
    checkpoint = read_checkpoint(tmp_path)
    assert detect_stack(checkpoint).name == "speculators"
    convention = resolve_convention(checkpoint)
    assert list(convention.layer_ids) == model.target_layer_ids
    assert convention.taps == tuple(i - 1 for i in IDS)
    assert convention.block_size == model.block_size
    assert convention.mask_token_id == model.mask_token_id
    assert convention.label_layout == ("next" if config.sample_from_anchor else "same")
    assert convention.n_proposed == BLOCK - (not config.sample_from_anchor)
    slides = [i in model.sliding_window_indices for i in range(LAYERS)]
    assert convention.window == tuple(model.sliding_window if s else None for s in slides)
    free = config.sliding_window_non_causal or model.sliding_window is None
    assert convention.in_block == tuple(
        "causal" if s and not free else "bidirectional" for s in slides
    )
    rope = model.rotary_emb.config.rope_parameters
    assert convention.rope_theta == rope["rope_theta"]
    assert convention.rotary_width == layer.head_dim
    reduced = model.use_draft_vocab
    assert convention.vocabulary_map == ("offset" if reduced else "none")
    assert (convention.head, convention.embedding) == ("own" if reduced else "target", "target")
    markov, selector = getattr(model, "markov_head", None), hasattr(model, "candidate_selector")
    assert convention.proposal == ("markov" if markov else "selector" if selector else "argmax")
    assert audit(checkpoint) == []
    assert contradictions(checkpoint) == []


def test_offsets_lead_to_the_tokens_that_speculators_kept(speculators, tmp_path):
    model = saved(speculators, tmp_path, "a reduced vocabulary")
    tensors = read_checkpoint(tmp_path).tensors
    ids = torch.arange(20) + tensors["d2t"]
    assert torch.equal(ids, model.t2d.nonzero()[:, 0])
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight)


PLAIN = [n for n, (kind, _, _) in CASES.items() if kind == "dflash" and "reduced" not in n]


@pytest.mark.parametrize("case", PLAIN)
@torch.no_grad()
def test_every_block_is_theirs(case, speculators, tmp_path):
    """Their training forward over all anchors of a text against ours, block by block."""
    model = saved(speculators, tmp_path, case)
    checkpoint = read_checkpoint(tmp_path)
    convention = resolve_convention(checkpoint)
    drafter = load_drafter(checkpoint, convention)
    length, generator = 24, torch.Generator().manual_seed(1)
    states = torch.randn(1, length, len(IDS) * H, generator=generator)
    tokens = torch.randint(0, VOCAB, (1, length), generator=generator)
    anchors = length - BLOCK
    hidden, *_ = model._backbone_forward(
        states,
        tokens,
        torch.ones(1, length),
        torch.randn(1, length, H, generator=generator),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=anchors,
    )
    theirs = hidden.view(anchors, BLOCK, H)[1:, convention.first_slot :]
    features = drafter.features(states[0].unflatten(-1, (len(IDS), H)))
    embedding = model.embed_tokens.weight
    ours = draft_blocks(drafter, embedding, tokens[0], torch.arange(1, anchors), features)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_what_their_converter_makes_of_ours_is_scored_alike(speculators, tmp_path, hybrid_capture):
    """z-lab's folder through their converter: other ids, other keys, the same numbers."""
    from speculators.convert.dflash.converter import DFlashConverter

    healthy, target = ZOO / "hybrid" / "drafters" / "healthy", ZOO / "hybrid" / "target"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        DFlashConverter().convert(healthy, tmp_path, str(target), validate=False)
    found = {}
    for folder in (healthy, tmp_path):
        checkpoint = read_checkpoint(folder)
        assert audit(checkpoint) == []
        convention = resolve_convention(checkpoint)
        drafter = load_drafter(checkpoint, convention, dtype=torch.float32)
        found[folder] = score(hybrid_capture, drafter, silent=True)
    assert detect_stack(read_checkpoint(tmp_path)).name == "speculators"
    assert np.array_equal(found[healthy].proposed, found[tmp_path].proposed)
    assert np.array_equal(found[healthy].label_logprob, found[tmp_path].label_logprob)


def test_xpress_is_refused_by_the_names_that_they_save(speculators, tmp_path):
    from speculators.models.xpress import XPressDraftModel, XPressSpeculatorConfig

    from dflash_diag.errors import CheckpointError

    layer = Qwen3Config(**BODY)
    layer._attn_implementation = "eager"
    model = XPressDraftModel(
        XPressSpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=VOCAB,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=IDS,
            mask_token_id=MASK,
            xpress_rank=4,
        )
    )
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"refiner_head\..*an XPress drafter"):
        resolve_convention(checkpoint)
    checkpoint = dataclasses.replace(checkpoint, config={"hidden_size": H})
    with pytest.raises(CheckpointError, match=r"refiner_head\..*an XPress drafter"):
        resolve_convention(checkpoint)


# --- SpecForge ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def specforge():
    """Its draft models alone: the package around them imports what only training needs."""
    spec = importlib.util.find_spec("specforge")
    if spec is None:
        pytest.skip("specforge is not installed")
    root = Path(spec.submodule_search_locations[0])
    before = set(sys.modules)
    for name in ("specforge", "specforge.modeling", "specforge.modeling.draft"):
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    draft = "specforge.modeling.draft"
    yield types.SimpleNamespace(
        dflash=importlib.import_module(f"{draft}.dflash"),
        dspark=importlib.import_module(f"{draft}.dspark"),
        domino=importlib.import_module(f"{draft}.domino"),
        io=importlib.import_module("specforge.export.checkpoint_io"),
    )
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "specforge":
            del sys.modules[name]


def sf_config(**changes) -> Qwen3Config:
    nested = {"mask_token_id": MASK, "target_layer_ids": IDS} | changes.pop("dflash_config", {})
    config = Qwen3Config(**{**BODY, **changes})
    config.architectures = [changes.pop("architecture", "DFlashDraftModel")]
    config.block_size, config.num_target_layers, config.dflash_config = BLOCK, 12, nested
    return config


def sf_state(folder: Path, model, config: Qwen3Config):
    """What its trainer leaves: no configuration inside, so that one is laid beside it."""
    torch.save(
        {
            "draft_state_dict": model.state_dict(),
            "global_step": 3,
            "epoch": 1,
            "strategy": "dflash",
            "run_id": "run",
            "world_size": 1,
        },
        folder / "training_state.pt",
    )
    torch.save({"rank": 0}, folder / "training_state_rank0.pt")
    config.save_pretrained(folder)
    return read_checkpoint(folder)


@pytest.mark.parametrize("body", [{}, SLIDING, {"rope_theta": 5e5}, {"attention_bias": True}])
def test_a_training_state_of_specforge(body, specforge, tmp_path):
    config = sf_config(**body)
    model = specforge.dflash.DFlashDraftModel(config)
    randomise(model)
    checkpoint = sf_state(tmp_path, model, config)
    assert detect_stack(checkpoint).name == "specforge"
    convention = resolve_convention(checkpoint)
    assert list(convention.layer_ids) == model.target_layer_ids
    assert (convention.block_size, convention.mask_token_id) == (BLOCK, MASK)
    types_, window = specforge.dflash.resolve_dflash_attention_layout(config)
    slides = [t == "sliding_attention" for t in types_]
    assert convention.window == tuple(window if s else None for s in slides)
    assert convention.rope_theta == model.rotary_emb.config.rope_parameters["rope_theta"]
    assert audit(checkpoint) == []
    assert contradictions(checkpoint) == []
    drafter = load_drafter(checkpoint, convention)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_dspark_state_of_specforge(head, specforge, tmp_path):
    nested = {
        "projector_type": "dspark",
        "markov_rank": 4,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    config = sf_config(dflash_config=nested)
    config.architectures = ["DSparkDraftModel"]
    checkpoint = sf_state(tmp_path, specforge.dspark.DSparkDraftModel(config), config)
    convention = resolve_convention(checkpoint)
    assert (convention.proposal, convention.label_layout) == ("markov", "next")
    assert audit(checkpoint) == []


def test_early_names_are_mapped_as_specforge_maps_them(specforge):
    for name in ("prefix_gru.weight_ih_l0", "embed_proj.2.weight", "markov_head.gate_proj.bias",
                 "confidence_head.proj.weight"):  # fmt: skip
        state = {f"logit_head.{name}": torch.zeros(1)}
        specforge.dflash.normalize_draft_head_checkpoint_keys(None, state, "", {}, True, [], [], [])
        assert [clean_name(f"logit_head.{name}")] == list(state)


def test_rope_that_specforge_mirrors_agrees_with_itself(specforge, tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = sf_config(rope_parameters={**scaling, "rope_theta": 5e5})
    randomised = specforge.dflash.DFlashDraftModel(config)
    randomised.save_pretrained(tmp_path)
    assert specforge.io.apply_legacy_rope_scaling(str(tmp_path))
    written = json.loads((tmp_path / "config.json").read_text())
    assert {"rope_scaling", "rope_parameters", "rope_theta"} <= set(written)
    checkpoint = read_checkpoint(tmp_path)
    assert contradictions(checkpoint) == []
    assert resolve_convention(checkpoint).rope_theta == 5e5
    assert load_file(tmp_path / "model.safetensors").keys() == set(checkpoint.tensors)


def test_default_layers_are_those_of_specforge(specforge):
    from dflash_diag.checkpoints.keys import default_layer_ids

    for n_target in range(4, 70, 5):
        for n_draft in (1, 2, 3, 5, 8):
            theirs = specforge.dflash.build_target_layer_ids(n_target, n_draft)
            assert list(default_layer_ids(n_target, n_draft)) == theirs
