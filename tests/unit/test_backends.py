"""Which code runs the linear-attention layers, with kernels that work and kernels that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import wraps
from pathlib import Path

import pytest
import torch

from dflash_diag import backends
from dflash_diag.backends import Counted, bind, calls, choose_backend, find_switches, probe
from dflash_diag.errors import BadInput
from dflash_diag.hidden_states import find_parts
from dflash_diag.targets import wrap_target

IDS = torch.arange(1, 20)[None]
NO_DRIVER = "0 active drivers ([]). There should only be one."


@pytest.fixture
def module():
    import transformers.models.qwen3_5.modeling_qwen3_5 as module

    return module


@pytest.fixture
def plant(module, monkeypatch):
    """Make transformers' module look as if it had picked other kernels when it was imported."""

    def plant(**kernels):
        for name, kernel in kernels.items():
            wrapper = getattr(module, name)
            monkeypatch.setattr(module, name, rewrapped(wrapper.__wrapped__, kernel))

    return plant


def rewrapped(torch_function, implementation):
    """The closure that `use_kernel_func_from_hub_with_fallback` returns."""

    def wrapped(*args, **kwargs):
        return implementation(*args, **kwargs)

    wrapped.__wrapped__ = torch_function
    return wrapped


def broken(*args, **kwargs):
    raise RuntimeError(NO_DRIVER)


ALL_BROKEN = {
    "torch_chunk_gated_delta_rule": broken,
    "torch_recurrent_gated_delta_rule": broken,
    "causal_conv1d_fn": broken,
    "causal_conv1d_update": broken,
}


@pytest.fixture
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backends, "_runs_kernels", lambda device: True)


def run(target):
    return target.logits(IDS)


def test_every_switch_is_found(hybrid_model, full_model):
    switches = find_switches(find_parts(hybrid_model))
    assert {s.name for s in switches} == set(ALL_BROKEN)
    assert [s.name for s in switches if s.is_convolution] == [
        "causal_conv1d_update",
        "causal_conv1d_fn",
    ]
    assert {s.form for s in switches} == {None, "chunked", "recurrent"}
    assert find_switches(find_parts(full_model)) == []


def test_on_a_cpu_the_kernels_that_transformers_picked_are_not_used(module, plant, new_hybrid):
    expected = run(wrap_target(new_hybrid()))
    plant(**ALL_BROKEN)
    model = new_hybrid()
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model(input_ids=IDS)
    target = wrap_target(model)
    assert (target.backend.linear, target.backend.convolution) == ("torch", "torch")
    assert "cpu" in target.backend.reason
    assert torch.equal(run(target), expected)
    # Generation, one token a step, uses the other two functions.
    cache = target.caches.new()
    target.logits(IDS[:, :-1], cache=cache)
    torch.testing.assert_close(target.logits(IDS[:, -1:], cache=cache)[0, 0], expected[0, -1])
    # Whoever uses the same module elsewhere finds it as it was.
    with pytest.raises(RuntimeError, match="0 active drivers"):
        module.torch_chunk_gated_delta_rule()


def test_kernels_that_fail_when_run_are_given_up(plant, as_if_on_a_gpu, new_hybrid):
    plant(**ALL_BROKEN)
    backend = wrap_target(new_hybrid()).backend
    assert (backend.linear, backend.convolution) == ("torch", "torch")
    assert backend.reason == f"RuntimeError: {NO_DRIVER}"
    with pytest.raises(
        BadInput, match=r"--backend fla: RuntimeError: 0 active drivers.*pip install"
    ):
        wrap_target(new_hybrid(), backend="fla")


def counting(function, calls):
    @wraps(function)
    def kernel(*args, **kwargs):
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return kernel


def test_kernels_that_run_are_used_and_torch_can_still_be_asked_for(
    module, plant, as_if_on_a_gpu, new_hybrid
):
    calls = []
    plant(
        **{name: counting(getattr(module, name).__wrapped__, calls) for name in ALL_BROKEN},
    )
    fast, slow = (
        wrap_target(new_hybrid(), backend="fla"),
        wrap_target(new_hybrid(), backend="torch"),
    )
    assert (fast.backend.linear, fast.backend.convolution) == ("fla", "causal-conv1d")
    assert (slow.backend.linear, slow.backend.convolution) == ("torch", "torch")
    assert slow.backend.reason == "asked for"
    # Both live in one process, each with its own code.
    calls.clear()
    expected = run(slow)
    assert calls == []
    assert torch.equal(run(fast), expected)
    assert calls == ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"] * 3


def test_a_broken_convolution_does_not_cost_the_recurrence(
    module, plant, as_if_on_a_gpu, new_hybrid
):
    names = [n for n in ALL_BROKEN if "conv" not in n]
    plant(**{n: counting(getattr(module, n).__wrapped__, []) for n in names})
    plant(causal_conv1d_fn=broken, causal_conv1d_update=broken)
    backend = wrap_target(new_hybrid()).backend
    assert (backend.linear, backend.convolution) == ("fla", "torch")


def test_the_switches_are_put_back_when_a_layer_raises(hybrid_model, module):
    parts = find_parts(hybrid_model)
    switches = find_switches(parts)
    before = module.torch_chunk_gated_delta_rule
    unbind = bind(parts, [Counted(s, broken, packs=True) for s in switches])
    with pytest.raises(RuntimeError, match="0 active drivers"):
        hybrid_model(input_ids=IDS)
    assert module.torch_chunk_gated_delta_rule is before
    assert probe(hybrid_model) == f"RuntimeError: {NO_DRIVER}"
    unbind()
    assert probe(hybrid_model) is None


def test_one_model_can_be_bound_again(module, plant, new_hybrid, as_if_on_a_gpu):
    calls = []
    plant(**{name: counting(getattr(module, name).__wrapped__, calls) for name in ALL_BROKEN})
    model = new_hybrid()
    for backend, uses_kernels in (("fla", True), ("torch", False), ("fla", True)):
        target = wrap_target(model, backend=backend)
        calls.clear()
        run(target)
        assert bool(calls) == uses_kernels
    assert len(target.parts.layers[0]._forward_pre_hooks) == 1


def test_fla_where_it_cannot_be(hybrid_model, full_model):
    with pytest.raises(
        BadInput, match="on the cpu, where Triton kernels cannot run.*--backend torch"
    ):
        wrap_target(hybrid_model, backend="fla")
    with pytest.raises(BadInput, match="no linear-attention layer"):
        wrap_target(full_model, backend="fla")
    with pytest.raises(BadInput, match="--backend triton; expected auto, fla or torch; then"):
        wrap_target(hybrid_model, backend="triton")
    assert wrap_target(full_model).backend.linear == "none"


@pytest.mark.parametrize("wish", ["fla", "fla+chunked", "torch+causal-conv1d"])
def test_a_missing_package_is_named_with_how_to_get_it(
    wish, hybrid_model, as_if_on_a_gpu, monkeypatch
):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(backends.importlib, "import_module", missing)
    module, install = {
        "t": ("causal_conv1d", "pip install --no-build-isolation causal-conv1d")
    }.get(wish[0], ("fla", "pip install flash-linear-attention"))
    with pytest.raises(BadInput) as caught:
        wrap_target(hybrid_model, backend=wish)
    assert f"No module named '{module}" in str(caught.value)
    assert install in str(caught.value)


@pytest.mark.parametrize(
    ("wish", "prefill", "decode"),
    [
        ("torch", "torch_chunk", "torch_recurrent"),
        ("torch+chunked", "torch_chunk", "torch_chunk"),
        ("torch+recurrent", "torch_recurrent", "torch_recurrent"),
        ("torch+torch-conv+recurrent", "torch_recurrent", "torch_recurrent"),
    ],
)
def test_the_form_of_the_recurrence_is_a_choice(wish, prefill, decode, new_hybrid):
    target, plain = wrap_target(new_hybrid(), backend=wish), wrap_target(new_hybrid())
    cache = target.caches.new()

    def ran(ids):
        before = calls(target.parts)
        found = target.logits(ids, cache=cache)
        after = calls(target.parts)
        rules = {k.rpartition(".")[2]: n - before[k] for k, n in after.items() if "rule" in k}
        return found, {k: n for k, n in rules.items() if n}

    expected = run(plain)
    first, used = ran(IDS[:, :-1])
    assert used == {f"{prefill}_gated_delta_rule": 3}
    last, used = ran(IDS[:, -1:])
    assert used == {f"{decode}_gated_delta_rule": 3}
    torch.testing.assert_close(torch.cat([first, last], 1), expected, atol=2e-4, rtol=1e-4)


def test_a_wish_is_read_in_any_order_and_only_once_a_kind():
    assert backends.Wish.parse("recurrent+torch") == backends.Wish("torch", "recurrent")
    assert str(backends.Wish.parse("torch-conv+fla")) == "fla+torch-conv"
    for text in ("", "fla+torch", "chunked+recurrent", "torch+", "FLA"):
        with pytest.raises(BadInput, match="--backend"):
            backends.Wish.parse(text)


def test_layers_that_get_round_the_chosen_functions_are_noticed(new_hybrid, monkeypatch):
    """As a kernel for the whole layer would, which no switch reaches."""
    model = new_hybrid()
    layer = model.model.layers[0].linear_attn
    monkeypatch.setattr(layer, "forward", lambda hidden_states, **_: hidden_states)
    with pytest.raises(BadInput, match="the chosen convolution ran 4 times instead of 6"):
        wrap_target(model)


def test_packed_sequences_are_refused(new_hybrid):
    target = wrap_target(new_hybrid())
    with pytest.raises(ValueError, match="cannot keep packed sequences apart"):
        target.model(input_ids=IDS, cu_seq_lens_q=torch.tensor([0, 5, 19], dtype=torch.int32))


def test_a_release_that_hides_its_code_is_refused(hybrid_model, monkeypatch):
    monkeypatch.setattr(backends, "find_switches", lambda parts: [])
    with pytest.raises(BadInput, match=r"hides the code .* pip install 'transformers>=5\.15'"):
        choose_backend(hybrid_model, find_parts(hybrid_model))


def test_what_is_recorded(hybrid_model):
    record = wrap_target(hybrid_model, backend="torch").backend.to_json()
    assert record["requested"] == record["linear"] == record["convolution"] == "torch"
    assert record["form"] == "auto"
    ran = {path.rpartition(".")[2]: n for path, n in record["ran"].items()}
    assert ran == {
        "torch_chunk_gated_delta_rule": 3,
        "torch_recurrent_gated_delta_rule": 3,
        "causal_conv1d_fn": 3,
        "causal_conv1d_update": 3,
    }
    assert record["versions"]["torch"] == torch.__version__
    assert set(record["versions"]) >= {"transformers", "flash-linear-attention", "causal-conv1d"}


SCRIPT = """
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from dflash_diag.targets import wrap_target
from dflash_diag.decoding import greedy
model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
    num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_num_key_heads=1,
    linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)).eval()
try:
    model(input_ids=torch.arange(5)[None])
except RuntimeError as error:
    print(error)
target = wrap_target(model)
print(len(greedy(target, [[1, 2, 3]], 4)[0].ids), target.backend.linear)
"""


def test_an_installed_fla_without_a_gpu(tmp_path):
    """The real path: transformers imports a package named fla, whose kernels then cannot run."""
    rule = tmp_path / "fla" / "ops" / "gated_delta_rule"
    rule.mkdir(parents=True)
    for folder in (rule, rule.parent, rule.parent.parent):
        (folder / "__init__.py").write_text("")
    (rule / "__init__.py").write_text(
        "def chunk_gated_delta_rule(q, k, v, g, beta, **kwargs):\n"
        f"    raise RuntimeError({NO_DRIVER!r})\n"
        "fused_recurrent_gated_delta_rule = chunk_gated_delta_rule\n"
    )
    root = str(Path(backends.__file__).parents[1])
    path = os.pathsep.join([str(tmp_path), root, os.environ.get("PYTHONPATH", "")])
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout.splitlines() == [NO_DRIVER, "4 torch"], out.stderr
