"""Faults planted into hidden states, one at a time, must be found and named; healthy ones not."""

from __future__ import annotations

import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from dflash_diag import diagnostics, localization
from dflash_diag.config import RunConfig
from dflash_diag.divergence import first_above
from dflash_diag.hidden_states import EMBEDDING, find_parts, recorded
from dflash_diag.modules import Variant, computed_as
from dflash_diag.pairs import layer_floor
from dflash_diag.results import Verdict
from dflash_diag.runs import Run
from dflash_diag.state_checks import TargetRunner, check_packing, check_padding, floor_of
from dflash_diag.targets import load_target

LAYERS = list(range(EMBEDDING, 4))
CHECKS = ["hidden.divergence", "hidden.modules", "hidden.rows", "hidden.argmax"]
CHECKS += ["hidden.identity", "hidden.batch", "hidden.padding", "hidden.packing"]
CHECKS += ["hidden.chunks", "hidden.decode"]
FINE = {Verdict.PASS, Verdict.SKIPPED}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, new_hybrid):
    """The tiny target on disk; its weights are exact in bfloat16, as a checkpoint's are."""
    path = tmp_path_factory.mktemp("target")
    new_hybrid().to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(folder):
    return load_target(folder, backend="torch")


TOKENS = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(5))


def true_states(target, layers=LAYERS):
    with torch.inference_mode(), recorded(target.parts, layers) as kept:
        target.logits(TOKENS[None])
    return torch.stack([kept[i][0].clone() for i in layers], dim=1)


def dump(path, states, layers=LAYERS):
    """Somebody's file of states [T, K, H]."""
    tensors = {
        "tokens": TOKENS,
        "hidden_states": states.contiguous(),
        "layer_ids": torch.tensor(layers),
        "n_prompt_tokens": torch.tensor([20]),
    }
    save_file(tensors, path)
    return path


def audit(tmp_path, folder, states, *, against="torch/float32", layers=LAYERS):
    file = dump(tmp_path / "states.safetensors", states, layers)
    config = RunConfig(
        target=str(folder), capture=str(file), against=against, out=str(tmp_path / "run"), draws=200
    )
    run = Run.open(config, needs_drafter=False)
    return {one: run.result(one) for one in CHECKS}


def found(results):
    return {name: r for name, r in results.items() if r.verdict not in FINE}


def shifted(states):
    return torch.cat([states[:1], states[:-1]])


def swapped(states):
    order = [0, 1, 3, 2, 4]
    return states[:, order]


def with_zeros(states):
    states[40:43] = 0
    return states


def rotated(states):
    generator = torch.Generator().manual_seed(3)
    q, _ = torch.linalg.qr(torch.randn(64, 64, generator=generator))
    return states @ q


def hooked_late(states, target):
    """Every layer's states as the next layer's norm, or the final one, puts them out."""
    norms = [layer.input_layernorm for layer in target.parts.layers] + [target.parts.final_norm]
    with torch.inference_mode():
        return torch.stack([n(s) for n, s in zip(norms, states.unbind(1), strict=True)], dim=1)


CAPTURED = {
    "rows one token off": (
        shifted,
        {"hidden.identity": r"layer 0, but row t holds the state of token t-1"},
    ),
    "two layers swapped": (
        swapped,
        {"hidden.identity": r"states kept as layer 1 are the states of layer 2 .*and 1 more"},
    ),
    "rows of zeros": (with_zeros, {"hidden.rows": "3 rows of zeros, the first at 40"}),
    "another basis": (
        rotated,
        {"hidden.identity": r"layer 0 in another basis: an orthogonal rotation"},
    ),
    "integers": (
        lambda states: (200 * states).round().int(),
        {
            "hidden.rows": r"the states are integers \(int32\)",
            "hidden.identity": r"layer 0 are layer 0 times 200",
        },
    ),
    "less their mean": (
        lambda states: states - states.mean(-1, keepdim=True),
        {"hidden.identity": r"less the mean of each row .*and 4 more, of layers 0 to 3\)"},
    ),
    "layers and channels swapped": (
        lambda states: states.transpose(1, 2).reshape(states.shape),
        {"hidden.identity": r"layer -1, but laid out as \[T, H, K\] and read as \[T, K, H\]"},
    ),
    "a constant": (lambda states: states + 0.5, {"hidden.identity": "layer 0 plus 0.5 "}),
}


@pytest.mark.parametrize("fault", CAPTURED)
def test_a_fault_in_captured_states_is_named(fault, tmp_path, folder, target):
    plant, names = CAPTURED[fault]
    results = audit(tmp_path, folder, plant(true_states(target)))
    assert results["hidden.divergence"].verdict is Verdict.FAIL
    assert set(names) <= set(results["hidden.divergence"].params["broken"])
    for name, said in names.items():
        assert results[name].verdict is Verdict.FAIL
        assert _matches(said, results[name].headline + str(results[name].params["problems"]))
    # The target itself is not blamed.
    for name in ("hidden.batch", "hidden.padding", "hidden.chunks", "hidden.decode"):
        assert results[name].verdict is Verdict.PASS


def test_hooks_one_module_late_are_named(tmp_path, folder, target):
    results = audit(tmp_path, folder, hooked_late(true_states(target), target))
    assert results["hidden.identity"].verdict is Verdict.FAIL
    problems = results["hidden.identity"].params["problems"]
    for layer, said in enumerate(problems[1:4]):
        late = f"the next layer's input norm (layer {layer + 1}'s input_layernorm), one module late"
        assert said.startswith(f"the states kept as layer {layer} are layer {layer} after {late} (")
    assert "layer 3 after the final norm" in problems[4]


def test_what_is_only_near_is_called_near_and_its_cost_decides(tmp_path, folder, target):
    states = true_states(target)
    noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    states += 0.04 * noise * states.square().mean(-1, keepdim=True).sqrt()
    results = audit(tmp_path, folder, states)
    found = results["hidden.identity"]
    assert found.verdict is Verdict.WARN
    assert _matches(
        r"kept as layer -1 are layer -1, (3.9|4|4.1)\s% off, no known fault", found.headline
    )
    assert results["hidden.divergence"].verdict is Verdict.INCONCLUSIVE
    assert results["hidden.divergence"].params["broken"] == {}


def test_a_norm_too_many_on_the_last_layer_shows_without_a_live_target(tmp_path, folder):
    """Head and norm alone tell: the choices are the target's only if the norm is left out."""
    uneven = load_target(folder, backend="torch")
    with torch.no_grad():
        uneven.parts.final_norm.weight.normal_(0, 1.5, generator=torch.Generator().manual_seed(0))
    uneven.model.save_pretrained(tmp_path / "uneven")
    raw = true_states(uneven)
    with torch.inference_mode():
        normed = torch.cat([raw[:, :-1], uneven.parts.final_norm(raw[:, -1:])], dim=1)
    for states, verdict in ((raw, Verdict.PASS), (normed, Verdict.FAIL)):
        (tmp_path / verdict.name).mkdir()
        found = audit(tmp_path / verdict.name, tmp_path / "uneven", states)["hidden.argmax"]
        assert found.verdict is verdict
    assert "only if the final norm is left out" in found.headline


def _matches(pattern, text):
    assert re.search(pattern, text), text
    return True


def test_states_from_before_the_residual_sum_are_named(tmp_path, folder, target):
    states = true_states(target)
    kept = {}
    mlp = target.parts.layers[2].mlp
    handle = mlp.register_forward_hook(lambda _m, _a, output: kept.update(own=output[0].clone()))
    with torch.inference_mode():
        target.logits(TOKENS[None])
    handle.remove()
    states[:, 3] = kept["own"]
    results = audit(tmp_path, folder, states)
    said = results["hidden.identity"].headline
    assert "kept as layer 2 are the output of layer 2's mlp" in said
    assert "not the residual sum" in said
    first = results["hidden.divergence"].params["sides"]["torch/float32"]["first_above"]
    assert first["layer"] == 2
    assert first["origin"] == "created"


def test_an_overflow_of_float16_is_named(tmp_path, folder):
    """Massive activations that the final norm hides: the text is fine, the dump is not."""
    loud = load_target(folder, backend="torch")
    with torch.no_grad():
        loud.parts.layers[1].mlp.down_proj.weight.mul_(3e5)
    loud.model.save_pretrained(tmp_path / "loud")
    states = true_states(loud)
    assert 65504 < states.abs().max() < 1e9
    assert bool(torch.isfinite(states).all())
    results = audit(tmp_path, tmp_path / "loud", states.half())
    assert results["hidden.rows"].verdict is Verdict.FAIL
    assert "loat16 overflow (above 65504)" in results["hidden.rows"].headline
    assert "layer 1" in results["hidden.rows"].headline
    assert results["hidden.divergence"].verdict is Verdict.FAIL


class MaskSkippedAlone(TargetRunner):
    """transformers#46773: the padding mask is not applied to a batch of one."""

    def padded(self, ids, mask):
        if len(ids) == 1:
            mask = torch.ones_like(mask)
        return super().padded(ids, mask)


class BoundariesIgnored(TargetRunner):
    """Documents in one row, read as one."""

    def packed(self, documents):
        return self.plain(torch.tensor([[i for d in documents for i in d]]))


class BoundariesKept(TargetRunner):
    """What a backend that packs gives: here, each document by itself."""

    def packed(self, documents):
        each = [self.plain(torch.tensor([d])) for d in documents]
        return {layer: torch.cat([one[layer] for one in each], 1) for layer in each[0]}


@pytest.mark.parametrize(
    ("name", "check", "faulty", "healthy", "said"),
    [
        (
            "hidden.padding",
            check_padding,
            MaskSkippedAlone,
            TargetRunner,
            r"Left padding reaches the states of real tokens \(batch of 1: .* from layer 0 on\)\.",
        ),
        (
            "hidden.packing",
            check_packing,
            BoundariesIgnored,
            BoundariesKept,
            r"Document boundaries are ignored .* \(document 2 of 2: .* from layer 0 on\)\.",
        ),
    ],
    ids=["padding", "packing"],
)
def test_a_fault_of_the_target_is_named(name, check, faulty, healthy, said, target):
    low, high = Variant("torch", "bfloat16"), Variant("torch", "float32")
    floor = floor_of(layer_floor(target, (low, high), [TOKENS.tolist()]))
    ids = TOKENS[:96].tolist()
    bad, good = (
        diagnostics.get(name)(
            SimpleNamespace(
                state_checks=lambda run=run: {name: check(run(target), ids, floor)},
                provenance=dict,
            )
        )
        for run in (faulty, healthy)
    )
    assert bad.verdict is Verdict.FAIL
    assert _matches(said, bad.headline)
    assert good.verdict is Verdict.PASS


HEALTHY = {
    "float32 by hooks": lambda t: true_states(t),
    "states as bfloat16": lambda t: true_states(t).bfloat16(),
    "states as float16": lambda t: true_states(t).half(),
    "transformers' own tuple": lambda t: own_tuple(t),
}


def own_tuple(target):
    """``output_hidden_states``: entry i + 1 is layer i, but for the last, which is normed."""
    with torch.inference_mode():
        kept = target.model(input_ids=TOKENS[None], output_hidden_states=True).hidden_states
    return torch.stack([kept[i + 1][0] for i in LAYERS[:-1]], dim=1)


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_dump_is_not_flagged(kind, tmp_path, folder, target):
    states = HEALTHY[kind](target)
    results = audit(tmp_path, folder, states, layers=LAYERS[: states.shape[1]])
    assert found(results) == {}
    assert results["hidden.identity"].verdict is Verdict.PASS
    # Its modules are not in the file, and the live target's own would say nothing of it.
    assert results["hidden.modules"].verdict is Verdict.SKIPPED
    assert "does not say how it was computed" in results["hidden.modules"].headline


@pytest.mark.parametrize(
    ("dtype", "against"),
    [
        ("float32", "torch+recurrent/float32"),
        ("float32", "torch/bfloat16"),
        ("bfloat16", "torch+recurrent/bfloat16"),
    ],
)
def test_a_healthy_pair_of_computations_is_not_flagged(dtype, against, tmp_path, folder):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"id": "a", "prompt_ids": {TOKENS[:60].tolist()}}}\n')
    config = RunConfig(
        target=str(folder),
        prompts=str(prompts),
        max_new_tokens=12,
        dtype=dtype,
        backend="torch",
        layers="all",
        against=against,
        out=str(tmp_path / "run"),
        draws=200,
    )
    run = Run.open(config, needs_drafter=False)
    results = {one: run.result(one) for one in CHECKS}
    assert found(results) == {}
    assert len(results["hidden.modules"].frame) > 60


def test_a_module_that_computes_something_else_is_the_first_named(folder, monkeypatch):
    """A norm that scales differently in one layer, on one side only."""
    target = load_target(folder, backend="torch")
    norm = find_parts(target.model).layers[2].post_attention_layernorm
    a, b = Variant.parse("torch+recurrent/float32"), Variant.parse("torch/float32")

    @contextmanager
    def faulty(one, variant):
        factor = 1.1 if variant == a else 1.0
        handle = norm.register_forward_hook(lambda _m, _a, output: output * factor)
        with computed_as(one, variant) as live:
            yield live
        handle.remove()

    monkeypatch.setattr(localization, "computed_as", faulty)
    rows = localization.compare_modules(target, a, b, TOKENS.tolist())
    first = first_above(rows)
    assert (first["layer"], first["module"]) == (2, "post_attention_layernorm")
    assert first["origin"] == "created"
    # What follows inherits the error, and its own arithmetic is clean.
    last = next(r for r in rows if (r["layer"], r["module"]) == (3, "output"))
    assert last["rel_rms"] > last["floor"]
    assert last["local_times_floor"] < 1


def test_weights_are_as_they_were_after_another_dtype(folder):
    target = load_target(folder, backend="torch")
    before = {name: p.detach().clone() for name, p in target.model.named_parameters()}
    for variant in ("torch/bfloat16", "torch+recurrent/float16", "torch/float32"):
        with computed_as(target, Variant.parse(variant)) as live:
            assert str(live.dtype) == f"torch.{variant.partition('/')[2]}"
            rotary = live.model.model.rotary_emb.inv_freq
            assert rotary.dtype is torch.float32
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dtype is torch.float32


@pytest.mark.parametrize(
    ("n", "skipped"),
    [
        (8, {"hidden.batch", "hidden.padding", "hidden.packing", "hidden.chunks", "hidden.decode"}),
        (40, {"hidden.packing", "hidden.chunks"}),
    ],
)
def test_a_short_capture_skips_what_it_is_too_short_for(n, skipped, tmp_path, folder, target):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'{{"id": "a", "prompt_ids": {TOKENS[: n - 3].tolist()}}}\n')
    config = RunConfig(
        target=str(folder),
        prompts=str(prompts),
        max_new_tokens=3,
        backend="torch",
        out=str(tmp_path / "run"),
        draws=200,
    )
    run = Run.open(config, needs_drafter=False)
    results = {one: run.result(one) for one in CHECKS if not one.startswith("hidden.div")}
    left_out = {name for name, r in results.items() if r.verdict is Verdict.SKIPPED}
    assert left_out == skipped | {"hidden.modules"}
    assert all(r.verdict in FINE for r in results.values())
