"""What a training step does, seen from outside: each planted fault by name, and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

import toy_trainer as toy
from toy_trainer import D, Trainer, V, generator, material

from dflash_diag.errors import BadInput
from dflash_diag.training_audit import Audit, Material, audit_step, load_step
from dflash_diag.training_audit.calling import Caller
from dflash_diag.training_audit.graph import loss_gradient
from dflash_diag.training_audit.loss import recover_loss
from dflash_diag.training_audit.mixture import without_square


def audited(**faults) -> Audit:
    return audit_step(Trainer(**faults), material())


def faults(audit: Audit) -> list[str]:
    return [one.id for one in audit.faults]


# --- the loss -------------------------------------------------------------------------------------


def random_loss(seed: int):
    """A loss with everything drawn, and the truth about it."""
    g = generator(seed)

    def draw(low, high):
        return low + (high - low) * float(torch.rand((), generator=g))

    truth = {"lambda": draw(0, 1), "T": draw(0.5, 4), "gamma": draw(2, 12), "scale": draw(0.1, 9)}
    truth["offset"] = int(torch.randint(-1, 3, (), generator=g))
    a, d, v = 6, int(torch.randint(4, 16, (), generator=g)), 300
    tokens = torch.randint(0, v, (160,), generator=g)
    on = Material(
        tokens=tokens,
        states=torch.zeros(160, 1, 4),
        layer_ids=(3,),
        anchors=(20, 41, 66, 90, 108, 125),
        loss_mask=torch.ones(160, dtype=torch.bool),
        last_layer=3,
    )
    rows = torch.tensor(on.anchors)[:, None] + torch.arange(1, d + 1) + truth["offset"]
    labels = tokens[rows]
    z = draw(1, 3) * torch.randn(a, d, v, generator=g)
    z.scatter_add_(-1, labels[..., None], draw(2, 7) * torch.ones(a, d, 1))  # it has learned
    t = draw(1, 3) * torch.randn(a, d, v, generator=g)
    t.scatter_add_(-1, labels[..., None], draw(2, 8) * torch.ones(a, d, 1))
    weights = torch.exp(-torch.arange(d) / truth["gamma"]).expand(a, d)

    def step(*_):
        x = z.clone().requires_grad_()
        trainer = Trainer(share=truth["lambda"], temperature=truth["T"])
        return truth["scale"] * trainer.mixture(x, t, labels, weights), x, labels, weights, t

    return step, on, truth


@pytest.mark.parametrize("seed", range(20))
def test_random_losses_are_recovered(seed):
    step, on, truth = random_loss(seed)
    output = Caller(step, on)()
    found = recover_loss(output, on, loss_gradient(output.loss, output.logits))
    assert found.softness >= 0.1  # what the figures are promised for
    assert abs(found.mixture.share - truth["lambda"]) <= 1e-3
    assert abs(found.weights.gamma / truth["gamma"] - 1) <= 1e-3
    assert found.offset == truth["offset"]
    assert found.residual < 1e-5


def test_with_and_without_the_square_is_one_gradient():
    """The loss written without T², in the share that the audit gives for it."""
    share, temperature = 0.6, 2.5
    plain = without_square(share, temperature)

    def without(z, t, labels, weights):
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        logs = [(x / temperature).log_softmax(-1) for x in (z, t)]
        kl = F.kl_div(*logs, reduction="none", log_target=True).sum(-1)
        return (((1 - plain) * ce + plain * kl) * weights).sum()

    one, two = audited(share=share, temperature=temperature), audited(loss=without)
    for audit in (one, two):
        assert audit["loss.lambda"].found == pytest.approx(share, abs=1e-3)
        assert audit["loss.lambda_without_T2"].found == pytest.approx(plain, abs=1e-3)
        assert audit["loss.temperature"].found == pytest.approx(temperature, abs=1e-3)
        assert faults(audit) == ["training.loss_mismatch"]


def test_without_target_logits_lambda_is_not_identifiable():
    for share, wrong in ((0.0, []), (0.5, ["training.loss_mismatch"])):
        audit = audited(share=share, gives_target=False)
        assert audit["loss.lambda"].status == "not_identifiable"
        assert audit["loss.lambda"].found is None
        assert faults(audit) == wrong


def soft(name: str):
    def loss(z, t, labels, weights):
        p, q = z.softmax(-1), t.softmax(-1)
        log_p, log_q = z.log_softmax(-1), t.log_softmax(-1)
        overlap = torch.minimum(p, q).sum(-1)
        kl, tv = (q * (log_q - log_p)).sum(-1), 1 - overlap
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        middle = torch.log((p + q) / 2)
        each = {
            "reverse": (p * (log_p - log_q)).sum(-1),
            "tv": tv,
            "jsd": 0.5 * ((p * (log_p - middle)) + (q * (log_q - middle))).sum(-1),
            "mse": (z - t).square().mean(-1),
            "minus log overlap": -overlap.log(),
            "hybrid": torch.exp(-3 * overlap.detach()) * kl
            + (1 - torch.exp(-3 * overlap.detach())) * tv,
            "smoothed": 0.9 * ce - 0.1 * log_p.mean(-1),
            "ce and tv": 0.1 * ce + 0.9 * tv,
            "unknown": log_p.square().mean(-1) + 2 * p.square().sum(-1),
        }[name]
        return (each * weights).sum() / weights.sum()

    return loss


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("reverse", "KL(draft, target)"),
        ("tv", "total variation"),
        ("jsd", "Jensen-Shannon"),
        ("mse", "squared difference of logits"),
        ("minus log overlap", "exp(-(k-1)/4), over the overlap"),
        ("hybrid", "KL(target, draft) and total variation in shares that vary"),
        ("smoothed", "0.90 cross-entropy + 0.10 label smoothing"),
        ("ce and tv", "0.10 cross-entropy + 0.90 total variation"),
        ("unknown", "of no known form"),
    ],
)
def test_other_losses_are_named_or_said_to_be_unknown(name, form):
    audit = audited(loss=soft(name))
    assert form in audit["loss.form"].found
    assert faults(audit) == ["training.loss_mismatch"]
    assert (audit["loss.residual"].found > 0.05) == (name == "unknown")


def dpace(alpha: float, kind: str):
    def loss(z, t, labels, weights):
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        with torch.no_grad():
            mask = (weights > 0).float()
            s = torch.where(mask > 0, (1 - alpha) * torch.exp(-ce) + alpha, 1.0)
            prefix = s.cumprod(-1)
            suffix = (prefix * mask).flip(-1).cumsum(-1).flip(-1)
            w = {"": suffix, "confidence": prefix, "continuation": suffix / prefix}[kind] * mask
        return (ce * w).sum()

    return loss


@pytest.mark.parametrize("alpha", [0.2, 0.5])
@pytest.mark.parametrize("kind", ["", "confidence", "continuation"])
def test_weights_of_d_pace_are_named_with_their_smoothing(kind, alpha):
    audit = audited(loss=dpace(alpha, kind), gamma=None)
    form = audit["loss.form"].found
    half = {"": "weights: D-PACE:", "confidence": "first half", "continuation": "second half"}
    assert half[kind] in form
    assert f"smoothing {alpha:g}" in form
    assert audit["loss.gamma"].status == "not_identifiable"
    assert faults(audit) == []  # early slots count more, by what is accepted


def test_data_dependent_weights_of_no_known_formula_are_called_that():
    def loss(z, t, labels, weights):
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (ce * (1 + ce.detach().sin()) * weights).sum()

    assert "by no known formula" in audited(loss=loss)["loss.form"].found


def test_blocks_that_count_differently_keep_their_curve():
    def loss(z, t, labels, weights):
        ce = F.cross_entropy(z.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return (ce * weights * torch.arange(1, len(ce) + 1)[:, None]).sum()

    audit = audited(loss=loss)
    assert "blocks count differently" in audit["loss.form"].found
    assert audit["loss.gamma"].found == pytest.approx(4, rel=1e-3)


def test_a_flat_loss_does_not_train_what_is_deployed():
    audit = audited(gamma=None)
    assert faults(audit) == ["training.loss_mismatch"]
    assert audit["loss.weights"].found == pytest.approx([1.0] * D, abs=1e-3)


def test_in_half_precision_the_loss_is_still_recovered():
    audit = audited(dtype=torch.bfloat16, share=0.4, gamma=3.0)
    assert audit["loss.lambda"].found == pytest.approx(0.4, abs=0.02)
    assert audit["loss.gamma"].found == pytest.approx(3.0, rel=0.05)
    assert faults(audit) == ["training.loss_mismatch"]


@pytest.mark.parametrize(
    "view",
    [
        lambda z: z.flatten(0, 1).view(1, -1, V)[0].view(z.shape),
        lambda z: z.float() if z.dtype != torch.float32 else z.double(),
        lambda z: (
            torch.cat([z, z], 0)[: len(z)] if False else z[:, :].transpose(0, 1).transpose(0, 1)
        ),
    ],
)
def test_a_view_of_the_logits_is_as_good_as_the_logits(view):
    class Adapted(Trainer):
        def __call__(self, *given):
            loss, z, *rest = super().__call__(*given)
            return loss, view(z), *rest

    audit = audit_step(Adapted(share=0.3), material())
    assert audit["loss.lambda"].found == pytest.approx(0.3, abs=1e-3)


def test_a_slice_of_wider_logits_has_its_own_gradient():
    """Trainers compute the anchor's slot too, and give it no weight."""

    def step(tokens, states, anchors, loss_mask, *_):
        wide = torch.randn(1, len(anchors) * (D + 1), V, generator=generator(3)).requires_grad_()
        z = wide.view(len(anchors), D + 1, V)[:, 1:]
        rows = anchors[:, None] + torch.arange(0, D + 1)
        weights = torch.exp(-torch.arange(-1, D) / 4) * (torch.arange(D + 1) > 0)
        ce = F.cross_entropy(wide[0], tokens[rows].flatten(), reduction="none").view(rows.shape)
        mask = loss_mask[rows]
        return (ce * weights * mask).sum(), z, tokens[rows][:, 1:], (weights * mask)[:, 1:], None

    on = material()
    output = Caller(step, on)()
    found = recover_loss(output, on, loss_gradient(output.loss, output.logits))
    assert found.weights.gamma == pytest.approx(4, rel=1e-4)
    assert found.residual < 1e-5


@pytest.mark.parametrize(
    "lost", [lambda z: z.detach(), lambda z: 2 * z, lambda z: z.clone().detach()]
)
def test_logits_outside_the_graph_are_asked_for_not_guessed(lost):
    class Adapted(Trainer):
        def __call__(self, *given):
            loss, z, *rest = super().__call__(*given)
            return loss, lost(z), *rest

    audit = audit_step(Adapted(), material())
    assert audit["training.loss_mismatch"].status == "not_tested"
    assert "not in the graph" in audit["training.loss_mismatch"].evidence
    assert faults(audit) == []


def test_other_labels_than_those_returned_are_noticed():
    def loss(z, t, labels, weights):
        greedy = t.argmax(-1)
        ce = F.cross_entropy(z.flatten(0, 1), greedy.flatten(), reduction="none")
        return (ce.view(labels.shape) * weights).sum()

    class Adapted(Trainer):
        def target(self, states, rows, noise_seed):
            return super().target(states, rows, noise_seed).roll(1, -1)

    audit = audit_step(Adapted(loss=loss), material())
    assert audit["labels.returned"].status == "found"
    assert audit["labels.returned"].found == "the highest of its target logits"


# --- what the logits depend on --------------------------------------------------------------------

PLANTED = {
    "nothing": ({}, []),
    "clean noise on the drafter's input": ({"noise": 0.3}, []),
    "noise on the target": ({"noise_on_target": 2.0}, ["training.noise_on_target_logits"]),
    "noise on the target, labels only": (
        {"noise_on_target": 2.0, "gives_target": False},
        ["training.noise_on_target_logits"],
    ),
    "last layer": ({"taps": (0, 1, 2, 3)}, ["layers.last_layer_in_fc"]),
    "a layer left out": ({"taps": (0, 2)}, ["layers.missing_or_default"]),
    "target logits one row late": ({"target_offset": 1}, ["target.offset"]),
    "anchor": ({"bound": 1}, ["mask.anchor_included"]),
    "anchor, detached": ({"bound": 1, "detached": True}, ["mask.anchor_included"]),
    "anchor, without positions": ({"bound": 1, "positions": False}, ["mask.anchor_included"]),
    "nothing, without positions": ({"positions": False}, []),
    "anchor under noise": ({"bound": 1, "noise": 0.3}, ["mask.anchor_included"]),
    "last layer under noise": ({"taps": (0, 1, 2, 3), "noise": 0.3}, ["layers.last_layer_in_fc"]),
    "future": ({"bound": 3}, ["mask.anchor_included", "mask.future_included"]),
    "everything": ({"bound": 9}, ["mask.anchor_included", "mask.future_included"]),
    "later blocks": ({"later_blocks": True}, ["mask.cross_block_leak"]),
    "labels as inputs": ({"labels_as_input": True}, ["training.leak"]),
    "mask as input": ({"mask_as_input": True}, ["training.leak"]),
    "mask ignored": ({"ignores_mask": True}, ["training.leak"]),
    "mask one early": ({"mask_offset": -1}, ["training.leak"]),
    "labels late": ({"label_offset": 1}, ["label.shift"]),
    "labels early": ({"label_offset": -1}, ["label.shift"]),
    "head trained": ({"trains_head": True}, ["head.frozen"]),
    "own head": ({"own_head": True}, ["head.tied"]),
}


@pytest.mark.parametrize("name", PLANTED)
def test_exactly_the_planted_fault_is_named(name):
    planted, expected = PLANTED[name]
    taps = planted.get("taps", (0, 1, 2))
    declared = toy.LAYERS[:-1] if taps != (0, 1, 2, 3) else toy.LAYERS
    audit = audit_step(Trainer(**planted), replace(material(), taps=declared))
    found = faults(audit)
    assert found == expected, [(one.id, one.evidence) for one in audit.faults]
    for one in audit.faults:
        assert one.evidence
        assert one.remedy
        assert one.expected


def test_a_detach_hides_a_leak_from_the_gradient_and_not_from_the_audit():
    open_, hidden = audited(bound=1), audited(bound=1, detached=True)
    assert "gradient there is not zero" in open_["mask.anchor_included"].evidence
    assert "gradient there is not zero" not in hidden["mask.anchor_included"].evidence


def test_a_noise_level_taken_over_the_whole_text_is_no_leak():
    """Exchanged rows leave the statistics of the text as they are."""

    class Scaled(Trainer):
        def features(self, states, anchors, noise_seed):
            drawn = torch.randn(states.shape, generator=generator(noise_seed))
            return super().features(states + 0.3 * states.std() * drawn, anchors, noise_seed)

    assert faults(audit_step(Scaled(), material())) == []


def test_states_that_are_not_used_are_noticed():
    class Blind(Trainer):
        def features(self, states, anchors, noise_seed):
            return super().features(torch.zeros_like(states), anchors, noise_seed)

    assert faults(audit_step(Blind(), material())) == ["hidden.ignored_by_drafter"]


def test_where_the_mask_is_read_is_told():
    said = audited(mask_offset=-1)["training.leak"].evidence
    assert "is left out in its place" in said


def test_a_target_that_can_be_trained_is_noticed():
    class Attached(Trainer):
        def target(self, states, rows, noise_seed):
            self.scale = torch.ones((), requires_grad=True)
            return super().target(states, rows, noise_seed) * self.scale

    assert "target.detached" in faults(audit_step(Attached(share=0.5), material()))


# --- steps that cannot be audited -----------------------------------------------------------------


def broken(change):
    class Broken(Trainer):
        def __call__(self, *given):
            return change(list(super().__call__(*given)), given)

    return audit_step(Broken(), material())


def put(index, value):
    def change(out, given):
        out[index] = value(out[index])
        return tuple(out)

    return change


BAD = {
    "no tuple": (lambda out, given: out[0], "a Tensor"),
    "too few": (lambda out, given: tuple(out[:3]), "a tuple of 3"),
    "vector loss": (put(0, lambda x: torch.ones(3)), "its loss is [3] of float32"),
    "loss is a number": (put(0, lambda x: 1.0), "its loss is a float"),
    "flat logits": (put(1, lambda z: z.flatten(0, 1)), "not [A, D, V] with A = 6"),
    "whole logits": (put(1, lambda z: z.detach().long()), "not floating-point"),
    "infinite logits": (put(1, lambda z: z * float("inf")), "its logits are not finite"),
    "loss is nan": (put(0, lambda x: x * float("nan")), "its loss is not"),
    "labels of floats": (put(2, torch.Tensor.float), "its labels are of torch.float32"),
    "labels of another shape": (put(2, lambda y: y[:, :-1]), "its labels are [6, 4]"),
    "no weights": (put(3, lambda w: None), "its weights are None"),
    "negative weights": (put(3, lambda w: -w), "negative"),
    "other targets": (put(4, lambda t: t[..., :-1]), "its target logits are [6, 5, 39]"),
    "metrics that are no dictionary": (lambda out, given: (*out, [1]), "metrics are a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_outputs_are_a_verdict(name):
    change, said = BAD[name]
    audit = broken(change)
    assert faults(audit) == ["step.outputs"]
    assert said in audit["step.outputs"].found
    rest = [one for one in audit if one.id not in ("step.outputs", "step.mutates_inputs")]
    assert {one.status for one in rest} == {"not_tested"}


@pytest.mark.parametrize(
    "error",
    [ValueError("two\nlines"), KeyError("x"), SystemExit(3), AssertionError(), MemoryError()],
)
def test_what_a_step_raises_is_named_with_its_place(error):
    def step(*_):
        raise error

    (found,) = audit_step(step, material()).faults
    assert type(error).__name__ in found.found
    assert "test_training_audit.py, line" in found.found
    assert "\n" not in found.found


def test_an_interrupt_stays_an_interrupt():
    def step(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_step(step, material())


def test_a_random_step_is_called_that_and_nothing_else_is_claimed():
    class Random(Trainer):
        def features(self, states, anchors, noise_seed):
            return F.dropout(super().features(states, anchors, noise_seed))

    audit = audit_step(Random(bound=1), material())
    assert faults(audit) == ["step.deterministic"]
    assert audit["mask.anchor_included"].status == "not_tested"


def test_a_step_that_updates_its_weights_is_not_the_same_twice():
    class Updating(Trainer):
        def __call__(self, *given):
            out = super().__call__(*given)
            with torch.no_grad():
                self.parameters["fc"].mul_(0.9)
            return out

    assert faults(audit_step(Updating(), material())) == ["step.deterministic"]


def test_a_step_that_fails_now_and_then():
    class Failing(Trainer):
        calls = 0

        def __call__(self, *given):
            self.calls += 1
            if self.calls > 3:
                raise RuntimeError("out of memory")
            return super().__call__(*given)

    audit = audit_step(Failing(), material())
    assert audit["step.deterministic"].status == "excluded"
    assert "out of memory" in audit["mask.anchor_included"].evidence
    assert faults(audit) == []


def test_inputs_changed_in_place_are_noticed_and_do_no_harm():
    class Mutating(Trainer):
        def __call__(self, tokens, states, *rest):
            out = super().__call__(tokens, states, *rest)
            states[:, -1] = 0
            tokens[3] = 0
            return out

    on = material()
    before = on.states.clone()
    audit = audit_step(Mutating(), on)
    assert faults(audit) == ["step.mutates_inputs"]
    assert audit["step.mutates_inputs"].found == "states, tokens"
    assert torch.equal(on.states, before)


def test_a_loss_without_a_gradient():
    class Detached(Trainer):
        def __call__(self, *given):
            loss, z, *rest = super().__call__(*given)
            return loss.detach(), z.detach(), *rest

    audit = audit_step(Detached(bound=1), material())
    assert faults(audit) == ["step.gradient", "mask.anchor_included"]  # finite changes still work
    assert audit["loss.lambda"].status == "not_tested"


def test_anchors_of_its_own():
    class Drawing(Trainer):
        def __call__(self, tokens, states, anchors, loss_mask, data_seed, noise_seed):
            drawn = 20 + torch.randperm(60, generator=generator(data_seed))[: len(anchors)]
            return super().__call__(tokens, states, drawn.sort().values, loss_mask, data_seed, 0)

    audit = audit_step(Drawing(), material())
    assert "step.anchors" in faults(audit)
    assert audit["mask.anchor_included"].status == "not_tested"


def test_the_audit_leaves_random_numbers_as_they_were():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    audited()
    assert torch.equal(torch.rand(3), expected)


def test_prints_go_to_standard_error(capsys):
    class Loud(Trainer):
        def __call__(self, *given):
            print("step 1")  # noqa: T201
            return super().__call__(*given)

    audit_step(Loud(), material())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 1" in captured.err


def test_inference_mode_of_the_caller_does_not_matter():
    with torch.inference_mode():
        on = material()
    with torch.no_grad():
        assert faults(audit_step(Trainer(), on)) == []


# --- metrics --------------------------------------------------------------------------------------


def reported(name: str, value) -> Audit:
    class Reporting(Trainer):
        def __call__(self, *given):
            out = super().__call__(*given)
            return *out, {name: value(*out)}

    return audit_step(Reporting(), material())


def right(z, y):
    return z.argmax(-1) == y


METRICS = {
    "accuracy": (
        lambda loss, z, y, w, t: (right(z, y) & (w > 0)).sum() / (w > 0).sum(),
        True,
        "share of",
    ),
    "train_loss": (lambda loss, z, y, w, t: loss.item(), True, "the loss"),
    "accept_len": (
        lambda loss, z, y, w, t: 1 + (right(z, y) & (w > 0)).cumprod(-1).sum(-1).float().mean(),
        True,
        "and the bonus token",
    ),
    "acc": (lambda loss, z, y, w, t: right(z, y).float().mean(), False, "without weight"),
    "streak": (
        lambda loss, z, y, w, t: (right(z, y) | (w == 0)).cumprod(-1).sum(-1).float().mean(),
        False,
        "without weight are counted",
    ),
    "full_acc": (lambda loss, z, y, w, t: 1.42, False, "is none of"),
}


@pytest.mark.parametrize("name", METRICS)
def test_reported_metrics_are_computed_anew(name):
    # A head that knows the text, so that runs have lengths.
    value, is_right, said = METRICS[name]

    class Knowing(Trainer):
        def __call__(self, tokens, states, anchors, loss_mask, *seeds):
            loss, z, y, w, t = super().__call__(tokens, states, anchors, loss_mask, *seeds)
            easy = ((anchors[:, None] * 7 + torch.arange(D) * 3) % 5 > 0).float()[..., None]
            z = z + 30 * easy * F.one_hot(y, V)
            loss = self.mixture(z, t, y, w)
            return loss, z, y, w, t, {name: value(loss, z, y, w, t)}

    audit = audit_step(Knowing(), material())
    one = audit[f"metric.reported.{name}"]
    assert (one.status == "excluded") == is_right, one
    assert said in one.evidence
    assert [m.id for m in audit.misreported] == [] if is_right else [one.id]


def test_what_is_no_number_is_left_out():
    audit = reported("by_slot", lambda *out: [0.1, 0.2])
    assert audit["metric.reported.by_slot"].status == "not_tested"
    assert faults(audit) == []


# --- as a whole ----------------------------------------------------------------------------------


def test_it_is_json_of_the_agreed_form_and_comes_back():
    audit = audited(share=0.5)
    text = json.dumps(audit.to_json(), allow_nan=False)
    parsed = json.loads(text)
    assert set(parsed) == {"schema", "properties"}
    keys = {"id", "status", "found", "expected", "evidence", "remedy"}
    assert all(set(one) == keys for one in parsed["properties"])
    ids = [one["id"] for one in parsed["properties"]]
    assert len(ids) == len(set(ids))
    again = Audit.from_json(json.loads(json.dumps(audit.kept())))
    assert again.to_json() == audit.to_json()
    assert list(again.frame["property"]) == ids
    with pytest.raises(BadInput, match="schema"):
        Audit.from_json({"schema": "x"})


def test_every_property_is_there_whatever_the_step_does():
    whole = {one.id for one in audited()}
    for audit in (broken(lambda out, given: None), audited(gives_target=False, share=0.5)):
        assert {one.id for one in audit} >= whole - {"metric.reported"}


def test_material_refuses_what_does_not_fit():
    on = material()
    for changes, said in (
        ({"states": on.states[:-1]}, "states"),
        ({"loss_mask": on.loss_mask[:-1]}, "loss mask"),
        ({"anchors": (20,)}, "anchors"),
        ({"anchors": (1, 20)}, "anchors 1 to 20"),
    ):
        with pytest.raises(BadInput, match=said):
            replace(on, **changes)
    with pytest.raises(BadInput, match="room for two"):
        Material.of_text(
            torch.arange(30), 20, states=torch.zeros(30, 1, 4), layer_ids=(1,), last_layer=1
        )


# --- loading -------------------------------------------------------------------------------------


def test_a_step_is_loaded_with_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("NUMBER = 3\n")
    file = tmp_path / "trainer.py"
    file.write_text(
        "import beside_it\ndef step(*given):\n    return beside_it.NUMBER\nstep.layers = [1, 2]\n"
    )
    step = load_step(f"{file}:step")
    assert step() == 3
    assert step.layers == [1, 2]
    sys.path.remove(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "function", "said"),
    [
        ("import torch_that_is_not_there\n", "step", "ModuleNotFoundError"),
        ("def step(:\n", "step", "SyntaxError"),
        ("raise SystemExit('usage: train.py')\n", "step", "usage: train.py"),
        ("def other(): pass\n", "step", "no function step"),
        ("step = 3\n", "step", "no function step"),
        ("def step(): pass\nstep.layers = 'all'\n", "step", "layers is 'all'"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path, text, function, said):
    file = tmp_path / "trainer.py"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        load_step(f"{file}:{function}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
