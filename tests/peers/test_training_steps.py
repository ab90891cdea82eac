"""Other people's training steps, as they are installed, each behind an adapter of a few lines.

ModelOpt installs beside everything else. speculators asks for an older transformers, which its
losses do not need, and is skipped where it is not there.
"""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

from dflash_diag.training_audit import Audit, Material, audit_step

pytestmark = pytest.mark.filterwarnings("ignore")  # their imports warn of much

V, H, T, B, LAYERS, LAST = 120, 32, 256, 8, (0, 2), 4
MASK = V - 1


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qwen3(**changes):
    from transformers import Qwen3Config

    shape = {"vocab_size": V, "hidden_size": H, "intermediate_size": 64, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3Config(**shape, max_position_embeddings=512, tie_word_embeddings=True, **changes)


def material(head: torch.Tensor) -> Material:
    g = generator(2)
    tokens = torch.randint(0, MASK, (T,), generator=g)
    states = torch.randn(T, len(LAYERS) + 1, H, generator=g)
    sure = head[tokens[1:]] / head[tokens[1:]].norm(dim=-1, keepdim=True)
    states[:-1, -1] = 2 * sure + 0.3 * states[:-1, -1]
    return Material(
        tokens=tokens,
        states=states,
        layer_ids=(*LAYERS, LAST),
        anchors=(20, 57, 92, 130, 178, 231),
        loss_mask=torch.arange(T) >= 16,
        last_layer=LAST,
        taps=LAYERS,
        head=head,
    )


def faults(audit: Audit) -> list[str]:
    return [one.id for one in audit.faults]


def sound(audit: Audit) -> None:
    """What is right in all of them, whatever their loss is."""
    for id_ in (
        "step.outputs",
        "step.deterministic",
        "step.mutates_inputs",
        "step.anchors",
        "training.noise_on_target_logits",
        "mask.anchor_included",
        "mask.future_included",
        "mask.cross_block_leak",
        "hidden.ignored_by_drafter",
        "layers.last_layer_in_fc",
        "layers.offset",
        "training.leak",
        "label.shift",
        "head.tied",
        "head.frozen",
    ):
        assert audit[id_].status == "excluded", audit[id_]
    assert audit["loss.label_offset"].found == 0
    assert audit["loss.residual"].found < 1e-3


# --- NVIDIA Model-Optimizer -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def modelopt():
    return pytest.importorskip("modelopt.torch.speculative")


def model_optimizer(mtsp, **settings):
    from transformers import Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    torch.manual_seed(0)
    base = Qwen3ForCausalLM(qwen3()).eval()
    architecture = {"num_hidden_layers": 2, "target_layer_ids": list(LAYERS), "head_dim": 8}
    base.config.num_orig_hidden_layers = LAST + 1
    config = {
        "dflash_offline": True,
        "dflash_block_size": B,
        "dflash_mask_token_id": MASK,
        "dflash_architecture_config": architecture,
        "dflash_use_torch_compile": False,
        **settings,
    }
    model = mtsp.convert(base, [("dflash", config)]).train()
    # It would make this itself, with an argument that newer releases of transformers do not have.
    model.dflash_module.rotary_emb = Qwen3RotaryEmbedding(model.dflash_module._rotary_config)
    return model


def model_optimizer_step(model):
    compute = model._compute_loss

    def step(tokens, states, anchors, loss_mask, data_seed, noise_seed):
        seen = []
        model._sample_anchor_positions = lambda *_: (anchors[None], anchors[None] >= 0)
        model._compute_loss = lambda logits, *rest: (
            seen.append((logits, rest[-1])) or compute(logits, *rest)
        )
        outputs = {"aux_hidden_states": states[None, :, :-1].flatten(2)}
        outputs |= {"base_model_hidden_states": states[None, :, -1], "base_hidden_prenorm": True}
        out = model(
            input_ids=tokens[None], loss_mask=loss_mask[None].float(), base_model_outputs=outputs
        )
        rows = anchors[:, None] + torch.arange(1, B)
        logits, teacher = seen[0]
        target = None if teacher is None else teacher[0, rows - 1].detach()
        logits = logits.unflatten(1, (len(anchors), B))[0, :, 1:]
        reported = {"train_acc": out.train_acc[0][0]}
        return out.loss, logits, tokens[rows], loss_mask[rows].float(), target, reported

    return step


def test_model_optimizer_trains_kl_with_d_pace_by_default(modelopt):
    model = model_optimizer(modelopt)
    audit = audit_step(model_optimizer_step(model), material(model.lm_head.weight.detach()))
    sound(audit)
    assert faults(audit) == ["training.loss_mismatch"]
    assert audit["loss.lambda"].found == pytest.approx(1.0, abs=1e-3)
    assert audit["loss.temperature"].found == 1.0
    assert "D-PACE" in audit["loss.form"].found
    assert "smoothing 0.5" in audit["loss.form"].found
    assert audit["metric.reported.train_acc"].status == "excluded"


def test_model_optimizer_with_hard_labels_and_a_decay_is_the_paper_s_loss(modelopt):
    model = model_optimizer(
        modelopt,
        dflash_self_logit_distillation=False,
        dflash_loss_objective="decay",
        dflash_loss_decay_factor=4.0,
    )
    audit = audit_step(model_optimizer_step(model), material(model.lm_head.weight.detach()))
    sound(audit)
    assert faults(audit) == []
    assert audit["loss.gamma"].found == pytest.approx(4.0, rel=1e-3)
    assert audit["loss.lambda"].status == "not_identifiable"


# --- speculators ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def speculators():
    pytest.importorskip("speculators")
    from speculators.models.dflash import core

    return core


def speculators_model(core):
    torch.manual_seed(0)
    config = core.DFlashSpeculatorConfig(
        transformer_layer_config=qwen3(attn_implementation="eager"),
        draft_vocab_size=V,
        block_size=B,
        aux_hidden_state_layer_ids=[1, 3],
        mask_token_id=MASK,
    )
    model = core.DFlashDraftModel(config)
    with torch.no_grad():
        head = torch.randn(V, H, generator=generator(1)) / 4
        for table in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            table.weight.copy_(head)
        model.norm.weight.fill_(1.5)  # surer of some tokens than of others
    return model


def speculators_step(core, model, loss: str, **settings):
    losses = core.resolve_loss_config(loss, "eager")

    def step(tokens, states, anchors, loss_mask, data_seed, noise_seed):
        core.select_anchors = lambda *_: (anchors, anchors >= 0)
        seen = []
        handles = [m.register_forward_hook(lambda *a: seen.append(a[-1])) for m in
                   (model.verifier_lm_head, model.lm_head)]  # fmt: skip
        _, found, metrics = model(
            states[None, :, :-1].flatten(2), tokens[None], loss_mask[None].float(),
            states[None, :, -1], torch.zeros_like(tokens)[None], loss_config=losses,
            max_anchors=len(anchors), **settings,
        )  # fmt: skip
        for handle in handles:
            handle.remove()
        target, logits = (x.unflatten(1, (len(anchors), B))[0, :, 1:] for x in seen)
        mask = loss_mask[anchors[:, None] + torch.arange(1, B)].float()
        names = ("full_acc", "eal")
        reported = {n: metrics[f"{n}_sum"] / metrics[f"{n}_total"] for n in names}
        return found, logits, target.argmax(-1), mask, target, reported

    return step


SPECULATORS = {
    "ce": ("ce", {"gamma": 4.0}, "cross-entropy; weights: exp(-(k-1)/4)", []),
    "kl_div": ("kl_div", {"gamma": 4.0}, "KL(target, draft); weights: exp(-(k-1)/4)", None),
    "rkl": ("rkl", {"gamma": 5.0}, "KL(draft, target); weights: exp(-(k-1)/5)", None),
    "jsd": ("jsd", {"gamma": 4.0}, "Jensen-Shannon; weights: exp(-(k-1)/4)", None),
    "tv": ("tv", {"gamma": 4.0}, "total variation; weights: exp(-(k-1)/4)", None),
    "nla": ("nla", {"gamma": 4.0}, "over the overlap of draft and target", None),
    "lk_hybrid": ("lk_hybrid", {"gamma": 4.0}, "in shares that vary from slot to slot", None),
    "ce and tv": (
        '{"ce": 0.1, "tv": 0.9}',
        {"gamma": 4.0},
        "0.10 cross-entropy + 0.90 total",
        None,
    ),
    "ce and kl": (
        '{"ce": 0.4, "kl_div": 0.6}',
        {"gamma": 4.0},
        "0.40 cross-entropy + 0.60 KL",
        None,
    ),
    "d-pace": ("ce", {"per_position_loss_weight": "dpace"}, "D-PACE", []),
}


@pytest.mark.parametrize("name", SPECULATORS)
def test_losses_of_speculators_are_named(speculators, name):
    logging.disable(logging.WARNING)
    spec, settings, form, expected = SPECULATORS[name]
    model = speculators_model(speculators)
    step = speculators_step(speculators, model, spec, **settings)
    audit = audit_step(step, material(model.lm_head.weight.detach()))
    sound(audit)
    assert form in audit["loss.form"].found
    assert faults(audit) == (["training.loss_mismatch"] if expected is None else expected)
    for metric in ("full_acc", "eal"):
        assert audit[f"metric.reported.{metric}"].status == "excluded"


@pytest.mark.parametrize("adapter", [model_optimizer_step, speculators_step])
def test_adapters_are_short(adapter):
    source = inspect.getsource(adapter).splitlines()
    first = next(i for i, line in enumerate(source) if line.lstrip().startswith("def step("))
    last = next(i for i, line in enumerate(source) if line.startswith("    return step"))
    assert len([line for line in source[first + 1 : last] if line.strip()]) <= 20
