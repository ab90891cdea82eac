"""DFlash2 and DSpark as their authors' packages compute them: PyPI ``dflash`` and ``speculators``.

``speculators`` 0.9.0 cannot be installed beside the transformers of requirements.txt, since it pins
an older one, though it runs with it: ``pip install --no-deps speculators==0.9.0
hs-connectors==0.9.0``. Where it is absent its tests are skipped.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from dflash.model import DFlash2DraftModel
from torch import Tensor
from transformers import Qwen3Config

from dflash_diag.additions import ConvolutionShape, MarkovShape, SelectorShape
from dflash_diag.blocks import draft_blocks
from dflash_diag.checkpoints import load_drafter, read_checkpoint, resolve_convention
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.proposals import make_proposal

HIDDEN, VOCAB, MASK, TAPS = 48, 97, 5, (1, 3, 4)
BODY = {
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "num_target_layers": 8,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
SHAPE = {
    "hidden_size": HIDDEN,
    "n_taps": len(TAPS),
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_width": 16,
    "mlp_size": 80,
    "norm_eps": 1e-5,
}
READING = {
    "layer_ids": TAPS,
    "window": (None, 6, None),
    "rope_theta": 10_000.0,
    "rotary_width": 16,
    "mask_token_id": MASK,
}
WITHOUT_WEIGHT = re.compile(r"(codebook|markov_w[12])\.weight$")
"""Tables that are stored as an embedding's or a linear map's weight, or bare."""


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights of realistic size, norms and the convolutions' own taps included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3
            if "codebook" in name or "markov_w" in name or "embed_tokens" in name:
                scale = 1.0
            elif weight.ndim == 2:
                # Computed taps multiply up from layer to layer, and rounding with them.
                scale = (0.5 if "kernel_projection" in name else 1.5) * weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
            if name.endswith("norm.weight"):
                weight.add_(1.0)


def with_weights_of(model: torch.nn.Module, shape: DrafterShape, how: Convention) -> Drafter:
    """Our drafter with another's weights; what ours does not have is left."""
    drafter = Drafter(shape, how)
    theirs = {WITHOUT_WEIGHT.sub(r"\1", k): v for k, v in model.state_dict().items()}
    drafter.load_state_dict({name: theirs[name] for name in drafter.state_dict()})
    return drafter.eval()


def sequence(length: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [T], states [T, K, H] and an embedding [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randint(VOCAB, (length,), generator=generator),
        torch.randn(length, len(TAPS), HIDDEN, generator=generator),
        torch.randn(VOCAB, HIDDEN, generator=generator),
    )


METHOD = {
    "mask_token_id": MASK,
    "target_layer_ids": list(TAPS),
    "block_size": 8,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 12,
    "selector_top_k": 10,
}
Z_LAB = {
    "as published": {"is_causal": False},
    "sliding layers causal": {},
    "three taps, wide groups": {"conv_kernel_size": 3, "conv_group_size": 24},
    "one tap": {"conv_kernel_size": 1},
    "more taps than slots": {"conv_kernel_size": 5, "block_size": 4},
    "many candidates": {"selector_top_k": 64},
    "one candidate": {"selector_top_k": 1},
    "scaled and capped logits": {"output_multiplier": 0.4, "final_logit_softcapping": 2.0},
}


@pytest.mark.parametrize("name", Z_LAB)
@torch.inference_mode()
def test_z_lab_s_dflash2_proposes_the_same(name, tmp_path):
    method = METHOD | Z_LAB[name]
    causal = method.pop("is_causal", None)
    config = Qwen3Config(**BODY, dflash_config=method)
    if causal is not None:
        config.is_causal = causal
    model = DFlash2DraftModel(config).eval()
    randomise(model, seed=0)
    how = Convention(
        **READING,
        block_size=method["block_size"],
        in_block=tuple(
            "causal" if layer.self_attn.is_causal else "bidirectional" for layer in model.layers
        ),
        logit_scale=method.get("output_multiplier", 1.0),
        softcap=method.get("final_logit_softcapping"),
        proposal="selector",
    )
    convolution = ConvolutionShape(method["conv_kernel_size"], HIDDEN // method["conv_group_size"])
    shape = DrafterShape(
        **SHAPE,
        convolution=convolution,
        selector=SelectorShape(VOCAB, method["selector_rank"], method["selector_top_k"]),
    )
    model.save_pretrained(tmp_path)
    checkpoint = read_checkpoint(tmp_path)
    assert resolve_convention(checkpoint) == how
    drafter = load_drafter(checkpoint, how)
    assert drafter.shape == shape

    tokens, states, embedding = sequence(60)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([1, 2, 5, 6, 7, 17, 30, 59])
    ours = draft_blocks(drafter, embedding, tokens, anchors, drafter.features(states))
    proposal = make_proposal(how, head.weight, drafter)
    proposed = proposal.ids(ours, tokens[anchors])
    rated = proposal.score(ours, tokens[anchors], torch.zeros_like(proposed))
    for row, anchor in enumerate(anchors.tolist()):
        block = torch.full((how.block_size,), MASK)
        block[0] = tokens[anchor]
        theirs = model(
            target_hidden=states[:anchor].flatten(1)[None],
            noise_embedding=embedding[block][None],
            position_ids=torch.arange(anchor + how.block_size)[None],
        )[:, 1:]
        torch.testing.assert_close(ours[row], theirs[0], rtol=1e-4, atol=1e-4)
        ids, candidates, _ = model.propose(theirs, tokens[anchor : anchor + 1], head, 0.0)
        assert torch.equal(proposed[row], ids[0])
        assert torch.equal(rated.ids[row], ids[0])
        kept = rated.topk_ids[row].long().sort(-1).values
        assert torch.equal(kept, candidates[0].sort(-1).values)


@torch.inference_mode()
def test_the_selector_s_distribution_is_z_lab_s():
    """Theirs at temperature 1, for the first slot, which any path starts from alike."""
    model = DFlash2DraftModel(Qwen3Config(**BODY, dflash_config=METHOD)).eval()
    randomise(model, seed=3)
    how = Convention(**READING, block_size=2, in_block=("causal",) * 3, proposal="selector")
    shape = DrafterShape(
        **SHAPE, convolution=ConvolutionShape(2, 3), selector=SelectorShape(VOCAB, 12, 10)
    )
    drafter = with_weights_of(model, shape, how)
    generator = torch.Generator().manual_seed(4)
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    torch.nn.init.normal_(head.weight, generator=generator)
    hidden = torch.randn(6, 1, HIDDEN, generator=generator)
    anchors = torch.randint(VOCAB, (6,), generator=generator)
    _, candidates, probabilities = model.propose(hidden, anchors, head, 1.0)
    for row in range(6):
        for token, chance in zip(candidates[row, 0], probabilities[row, 0], strict=True):
            made = make_proposal(how, head.weight, drafter).score(
                hidden[row : row + 1], anchors[row : row + 1], token.view(1, 1)
            )
            torch.testing.assert_close(made.label_logprob[0, 0].exp(), chance)


@pytest.fixture
def speculators():
    return pytest.importorskip("speculators", exc_type=ImportError)


def speculators_model(algorithm: str, *, draft_vocabulary: int = VOCAB, **settings):
    """One of their models with random weights, and its reduced vocabulary's map."""
    import speculators

    body = Qwen3Config(**BODY)
    body._attn_implementation = "eager"
    config_class = getattr(speculators, f"{algorithm}SpeculatorConfig")
    config = config_class(
        transformer_layer_config=body,
        draft_vocab_size=draft_vocabulary,
        aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK,
        **settings,
    )
    model = getattr(speculators, f"{algorithm}DraftModel")(config).eval()
    randomise(model, seed=5)
    if draft_vocabulary != VOCAB:
        kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:draft_vocabulary]
        kept = kept.sort().values
        to_draft = torch.zeros(VOCAB, dtype=torch.bool)
        to_draft[kept] = True
        model.load_vocab_mappings(to_draft, kept - torch.arange(draft_vocabulary))
    return model


def speculators_reading(model, proposal: str) -> Convention:
    config = model.config
    causal = "bidirectional" if config.sliding_window_non_causal else "causal"
    reduced = config.draft_vocab_size != VOCAB
    return Convention(
        **READING,
        block_size=config.block_size,
        layer_id_rule="input",
        window_rule="anchor",
        in_block=("bidirectional", causal, "bidirectional"),
        label_layout="next" if config.sample_from_anchor else "same",
        proposal=proposal,
        head="own",
        embedding="own",
        vocabulary_map="offset" if reduced else "none",
    )


def as_loaded(drafter: Drafter, model, folder: Path) -> None:
    """The folder that they save gives the same drafter, but for what it leaves to the target."""
    model.save_pretrained(folder)
    checkpoint = read_checkpoint(folder)
    how = resolve_convention(checkpoint)
    own = {name: getattr(how, name) for name in ("head", "embedding")}
    assert dataclasses.replace(drafter.convention, **own) == how
    weights = load_drafter(checkpoint, how).state_dict()
    left = set(drafter.state_dict()) - set(weights)
    assert left == {"embed_tokens.weight", *(("lm_head.weight",) if drafter.d2t is None else ())}
    for name, tensor in weights.items():
        assert torch.equal(tensor, drafter.state_dict()[name]), name


def their_blocks(model, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every anchor: position [A], what the head reads [A, B, H] and logits [A, B, V_d]."""
    length, size = len(tokens), model.block_size
    hidden, logits, _, _, indices = model._backbone_forward(
        states.flatten(1)[None],
        tokens[None],
        torch.ones(1, length),
        torch.randn(1, length, HIDDEN),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=length - size,
    )
    anchors = indices.view(-1, size)[:, 0]
    return anchors, hidden.view(len(anchors), size, -1), logits.view(len(anchors), size, -1)


@pytest.mark.usefixtures("speculators")
@pytest.mark.parametrize("layout", ["same", "next"])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("draft_vocabulary", [VOCAB, 40])
@torch.inference_mode()
def test_dspark_of_speculators(layout, kind, draft_vocabulary, tmp_path):
    model = speculators_model(
        "DSpark",
        draft_vocabulary=draft_vocabulary,
        block_size=5,
        sample_from_anchor=layout == "next",
        markov_rank=7,
        markov_head_type=kind,
    )
    how = speculators_reading(model, "markov")
    shape = DrafterShape(
        **SHAPE,
        markov=MarkovShape(VOCAB, draft_vocabulary, 7, kind),
        embedding_rows=VOCAB,
        head_rows=draft_vocabulary,
        has_map=draft_vocabulary < VOCAB,
    )
    drafter = with_weights_of(model, shape, how)
    as_loaded(drafter, model, tmp_path)
    tokens, states, _ = sequence(40)
    anchors, hidden, logits = their_blocks(model, tokens, states)
    own = drafter.embed_tokens.weight
    ours = draft_blocks(drafter, own, tokens, anchors, drafter.features(states))
    hidden, logits = hidden[:, how.first_slot :], logits[:, how.first_slot :]
    torch.testing.assert_close(ours, hidden, rtol=1e-4, atol=1e-4)

    # What their head makes of our proposals, all slots at once, must lead to these proposals.
    labels = torch.randint(VOCAB, ours.shape[:2], generator=torch.Generator().manual_seed(7))
    made = make_proposal(how, torch.empty(VOCAB, HIDDEN), drafter).score(
        ours, tokens[anchors], labels
    )
    before = torch.cat([tokens[anchors][:, None], made.ids[:, :-1]], dim=1)
    bias = model.markov_head.block_bias(prev_token_ids=before, hidden_states=hidden)
    assert (bias.argmax(-1) != (logits + bias).argmax(-1)).any()
    assert (logits.argmax(-1) != (logits + bias).argmax(-1)).any()
    logprobs = (logits + bias).log_softmax(-1)
    names = torch.arange(draft_vocabulary)
    names = names if model.d2t is None else names + model.d2t
    assert torch.equal(made.ids, names[logprobs.argmax(-1)])
    full = torch.full((*labels.shape, VOCAB), -torch.inf).index_copy(-1, names, logprobs)
    own = full.gather(-1, labels[..., None])
    torch.testing.assert_close(made.label_logprob, own[..., 0], rtol=1e-4, atol=1e-4)
    outside = own[..., 0].isneginf()
    assert bool(outside.any()) == (draft_vocabulary < VOCAB)
    assert (made.rank[outside] == VOCAB).all()
    fewest, most = ((full > own + by).sum(-1)[~outside] for by in (1e-4, -1e-4))
    assert ((fewest <= made.rank[~outside]) & (made.rank[~outside] < most)).all()


@pytest.mark.usefixtures("speculators")
@pytest.mark.parametrize("layout", ["same", "next"])
@torch.inference_mode()
def test_dflash2_of_speculators(layout, tmp_path):
    model = speculators_model(
        "DFlash2",
        block_size=6,
        sample_from_anchor=layout == "next",
        conv_kernel_size=3,
        conv_group_size=12,
        selector_rank=9,
        selector_top_k=11,
    )
    how = speculators_reading(model, "selector")
    shape = DrafterShape(
        **SHAPE,
        convolution=ConvolutionShape(3, 4),
        selector=SelectorShape(VOCAB, 9, 11),
        embedding_rows=VOCAB,
        head_rows=VOCAB,
    )
    drafter = with_weights_of(model, shape, how)
    as_loaded(drafter, model, tmp_path)
    tokens, states, _ = sequence(40)
    anchors, hidden, logits = their_blocks(model, tokens, states)
    own = drafter.embed_tokens.weight
    ours = draft_blocks(drafter, own, tokens, anchors, drafter.features(states))
    hidden, logits = hidden[:, how.first_slot :], logits[:, how.first_slot :]
    torch.testing.assert_close(ours, hidden, rtol=1e-4, atol=1e-4)

    labels = torch.randint(VOCAB, ours.shape[:2], generator=torch.Generator().manual_seed(7))
    made = make_proposal(how, torch.empty(VOCAB, HIDDEN), drafter).score(
        ours, tokens[anchors], labels
    )
    before = torch.cat([tokens[anchors][:, None], made.ids[:, :-1]], dim=1)
    candidates, scores = model.candidate_selector.select(logits, hidden, before)
    best = scores.argmax(-1, keepdim=True)
    assert torch.equal(made.ids, candidates.gather(-1, best)[..., 0])
    assert (made.ids != logits.argmax(-1)).any()
    ordered = scores.log_softmax(-1).sort(-1, descending=True)
    torch.testing.assert_close(made.topk_logprobs, ordered.values, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.topk_ids.long(), candidates.gather(-1, ordered.indices))
    there = (candidates == labels[..., None]).any(-1)
    assert torch.equal(made.label_logprob.isfinite(), there)
    assert torch.equal(made.rank == VOCAB, ~there)
