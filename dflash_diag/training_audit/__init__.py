"""What a training step does, found by running and differentiating it; its source is not read.

A step is a function of a few lines around somebody's trainer::

    step(tokens, states, anchors, loss_mask, data_seed, noise_seed)
        -> loss, logits, labels, weights, target_logits or None[, metrics]

``tokens`` [T] are a text, ``states`` [T, K, H] the target's raw layer outputs there, ``anchors``
[A] the positions at which blocks start and ``loss_mask`` [T] what is trained on; two steps with the
same seeds are to be the same. It returns its loss, the draft logits [A, D, V] from which the loss
was computed, hard labels [A, D], the weights [A, D] of the slots, and, where it has them, the
target's logits [A, D, V]. A sixth value may hold the metrics that it reports, by name.

An attribute ``step.layers`` names the columns of ``states`` (id i is the raw output of decoder
layer i, -1 the embedding); without it they are the drafter's tapped layers and then the last one.
"""

from __future__ import annotations

from dflash_diag.training_audit.auditing import audit_step
from dflash_diag.training_audit.calling import StepError
from dflash_diag.training_audit.loading import load_step
from dflash_diag.training_audit.material import Material, Step
from dflash_diag.training_audit.properties import Audit, Property

__all__ = ["Audit", "Material", "Property", "Step", "StepError", "audit_step", "load_step"]
