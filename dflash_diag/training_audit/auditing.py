"""Every probe in order: a step that fails an early one is not asked the later ones."""

from __future__ import annotations

from typing import Any

import torch

from dflash_diag.training_audit.calling import Caller
from dflash_diag.training_audit.head import head_properties
from dflash_diag.training_audit.loss import LOSS_IDS, loss_properties
from dflash_diag.training_audit.material import Material, Step
from dflash_diag.training_audit.metrics import metric_properties
from dflash_diag.training_audit.noise import ID as NOISE
from dflash_diag.training_audit.noise import noise_on_targets
from dflash_diag.training_audit.properties import Audit, Property, untested
from dflash_diag.training_audit.reach import NOT_VISIBLE, REACH_IDS, Reach
from dflash_diag.training_audit.soundness import (
    anchors_used,
    first_call,
    gradient,
    mutation,
    repeats,
    threshold,
)

HEAD_IDS = ("head.tied", "head.frozen", "target.detached", "step.trained")
SOUND_IDS = ("step.deterministic", "step.gradient", "step.anchors")


def audit_step(step: Step, material: Material, name: str = "the step") -> Audit:
    """Say what a training step does.

    Parameters
    ----------
    step
        See `dflash_diag.training_audit`.
    material
        The text that it is tried on.
    name
        What it is called.

    Returns
    -------
    Audit
        Whatever the step does: exceptions that it raises, outputs of the wrong shape and answers
        that vary are findings. Global random state is as it was before.
    """
    devices = [material.states.device] if material.states.is_cuda else []
    with torch.random.fork_rng(devices), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(0)
        return _Auditor(Caller(step, material), name).run()


class _Auditor:
    """One audit under way."""

    def __init__(self, call: Caller, name: str) -> None:
        self.call, self.name = call, name
        self.rows: list[Property] = []
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []

    def run(self) -> Audit:
        m = self.call.material
        output, row = first_call(self.call)
        self.rows.append(row)
        if output is None:
            return self._stopped("the step does not return what was agreed", SOUND_IDS)
        moved, row = repeats(self.call, output)
        self.rows.append(row)
        if row.status == "found":
            return self._stopped("the step is not deterministic", SOUND_IDS[1:])
        still = threshold(moved, output.logits.dtype)
        self.rows.append(gradient(output))
        follows, row = anchors_used(self.call, output, still)
        self.rows.append(row)
        row, by_noise = noise_on_targets(self.call, output, still)
        self.rows.append(row)
        about_loss, facts, loss = loss_properties(output, m)
        if follows:
            shift = (loss and loss.offset) or 0
            reach = Reach(self.call, output, still, by_noise > still, shift)
            self.rows += reach.properties()
            self.notes += reach.notes
            self.facts["influence"] = {**reach.influence, "noise": by_noise, "still": still}
        else:
            why = "its blocks are not at the anchors that it is given"
            self.rows += [untested(one, why) for one in REACH_IDS]
        self.rows += [untested(one, why) for one, why in NOT_VISIBLE.items()]
        self.rows += about_loss
        self.facts |= facts
        self.rows += head_properties(output, m)
        self.rows += metric_properties(self.call, output)
        self.rows.append(mutation(self.call))
        return self._made()

    def _stopped(self, why: str, sound: tuple[str, ...]) -> Audit:
        """Nothing that comes after can be asked."""
        later = (*sound, NOISE, *REACH_IDS, *NOT_VISIBLE, *LOSS_IDS, *HEAD_IDS)
        self.rows += [untested(one, why) for one in later]
        self.rows.append(mutation(self.call))
        return self._made()

    def _made(self) -> Audit:
        m = self.call.material
        self.facts["trial"] = {
            "step": self.name,
            "text": m.text,
            "n_tokens": len(m.tokens),
            "anchors": list(m.anchors),
            "layers": list(m.layer_ids),
            "calls": self.call.calls,
        }
        rows = sorted(self.rows, key=lambda one: one.status != "found")
        return Audit(rows, self.facts, self.notes)
