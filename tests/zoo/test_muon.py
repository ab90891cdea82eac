"""Stepping many Muon optimizers together is stepping each of them as torch does."""

from __future__ import annotations

import copy
from itertools import chain

import pytest
import torch

from dflash_diag.zoo import muon

SHAPES = ((24, 40), (40, 24), (24, 24), (24, 40))


def optimizers(parameters, rates):
    return [
        torch.optim.Muon(own, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for own, rate in zip(parameters, rates, strict=True)
    ]


@pytest.mark.parametrize("rates", [(0.01, 0.01), (0.01, 0.002)])
def test_steps_and_state_are_torchs_own(rates):
    torch.manual_seed(0)
    ours = [[torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES] for _ in rates]
    theirs = copy.deepcopy(ours)
    together, apart = optimizers(ours, rates), optimizers(theirs, rates)
    for _ in range(3):
        for mine, other in zip(chain(*ours), chain(*theirs), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        muon.step_together(together)
        for optimizer in apart:
            optimizer.step()
    for mine, other in zip(together, apart, strict=True):
        state, expected = mine.state_dict(), other.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        for index in expected["state"]:
            torch.testing.assert_close(
                state["state"][index]["momentum_buffer"],
                expected["state"][index]["momentum_buffer"],
            )
    for mine, other, rate in zip(ours, theirs, rates, strict=True):
        for left, right in zip(mine, other, strict=True):
            # torch iterates in bfloat16; a step moves an entry by about 0.2 * rate.
            torch.testing.assert_close(left, right, rtol=0, atol=0.05 * rate)


def test_another_rule_is_refused():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    with pytest.raises(ValueError, match="match_rms_adamw"):
        muon.step_together([torch.optim.Muon([parameter], lr=0.1)])


def test_a_parameter_without_a_gradient_stays():
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    before = parameter.detach().clone()
    muon.step_together(optimizers([[parameter]], [0.1]))
    assert parameter.equal(before)
