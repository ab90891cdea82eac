"""What a drafter's proposals depend on, found by changing one thing at a time as it runs.

Which context rows and which slots move a slot's logits is measured from perturbations, which need
nothing but the adapter's five functions, and from gradients where the adapter keeps the graph. The
matrix is then held against a rule. Every difference says what the *code* does; what the weights
were trained for is another question.

Symbols: a anchor, p position of a row, k slot, A anchors, B block size, D proposed tokens, T rows,
K tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_diag.adapters import AdapterError, DraftAdapter, Refused
from dflash_diag.adapters.bench import Bench
from dflash_diag.adapters.checking import CONTRACT, OPTIONAL
from dflash_diag.adapters.checks import Check, run_checks
from dflash_diag.conventions import Convention
from dflash_diag.errors import BadInput
from dflash_diag.influence_trials import Finding, Trials
from dflash_diag.visibility import Rule

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "dflash_diag.influence/1"
CAUSES: dict[str, str] = {
    "mask.anchor_included": "the state of the anchor itself is read",
    "mask.future_included": "states of positions after the anchor are read",
    "mask.cross_block_leak": "a block depends on other blocks of its pass",
    "mask.block_causality": "the slots of a block see one another otherwise than the rule says",
    "mask.window": "old rows end elsewhere than the rule says",
    "mask.rows_hidden": "rows are not read although the rule shows them",
    "hidden.ignored_by_drafter": "the context has no influence",
    "layers.missing_or_default": "a tapped layer has no influence",
    "layers.order": "the order of the tapped layers has no influence",
    "position.rebased": "positions are not passed on as they are",
    "mask_token.id": "the mask token is proposed",
    "label.shift": "slots are labelled with other tokens than their own",
    "serving.state": "the context that is kept is not the context that was given",
}
"""Causes that are looked for, in order."""


@dataclass(frozen=True, eq=False)
class Influence:
    """What was found. `frame` has one row a slot and thing that was changed."""

    cells: list[dict[str, Any]]
    causes: list[dict[str, Any]]
    """``cause``, ``status`` (``found``, ``excluded``, ``not_tested``) and ``evidence``."""
    checks: list[dict[str, Any]]
    """Fields of `dflash_diag.adapters.checks.Check`."""
    facts: Mapping[str, Any]
    """Of the drafter and the trial: sizes, noise, the oldest row by slot, influence of each tap."""
    notes: list[str] = field(default_factory=list)

    @property
    def found(self) -> list[dict[str, Any]]:
        """The causes that were found."""
        return [one for one in self.causes if one["status"] == "found"]

    @property
    def differing(self) -> list[dict[str, Any]]:
        """The checks that differ."""
        return [one for one in self.checks if one["status"] == "differs"]

    @property
    def clean(self) -> bool:
        """Whether nothing was found that differs from the rule or from serving."""
        return not self.found and not self.differing

    @property
    def frame(self) -> pd.DataFrame:
        """The cells as a table.

        ``kind`` says what was changed: ``row`` context rows at offsets ``first`` .. ``last`` from
        ``anchor``, ``slot`` the block's own slot ``first``; in a pass of many blocks ``train_row``
        a context row, ``block`` the anchor's token of the block that lies ``first`` tokens further.
        ``influence`` is the relative change of the logits of slot ``slot``, ``gradient`` the same
        to first order where there is one; ``seen`` whether there is any, ``expected`` whether the
        rule allows it, ``served`` whether a server could.
        """
        import pandas as pd

        return pd.DataFrame(self.cells).astype({"influence": float, "gradient": float})

    def matrix(self, kind: str, column: str = "influence") -> pd.DataFrame:
        """A column of `frame` as slots x offsets, the largest over the anchors.

        Offsets are single ones; groups of old rows are named by their newest.
        """
        rows = self.frame[lambda f: f["kind"] == kind]
        return rows.pivot_table(column, "slot", "last", aggfunc="max", observed=True)

    def to_json(self) -> dict[str, Any]:
        """Everything, in JSON's own types but for infinities."""
        return {
            "schema": SCHEMA,
            "cells": self.cells,
            "causes": self.causes,
            "checks": self.checks,
            "facts": dict(self.facts),
            "notes": self.notes,
        }

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Influence:
        """What `to_json` gave.

        Raises
        ------
        BadInput
            Of another schema.
        """
        if kept.get("schema") != SCHEMA:
            raise BadInput(f"influence of schema {kept.get('schema')!r}", repr(SCHEMA))
        parts = ("cells", "causes", "checks", "facts", "notes")
        return cls(**{name: kept[name] for name in parts})


@torch.no_grad()
def probe(
    adapter: DraftAdapter,
    features: Tensor,
    tokens: Tensor,
    anchors: Sequence[int],
    rule: Convention | Rule | None = None,
    *,
    seed: int = 0,
) -> Influence:
    """Find what a drafter depends on, hold it against a rule, and check its states.

    Parameters
    ----------
    adapter
        See `dflash_diag.adapters`.
    features
        [T, K, H] tapped states of one text, in the order of the adapter's ``layer_ids``.
    tokens
        [T] its tokens.
    anchors
        Positions to draft at, each with two tokens before it.
    rule
        What is expected: a convention, or by default the serving rule with full, bidirectional
        layers.
    seed
        Of the perturbations.

    Raises
    ------
    BadInput
        Inputs that do not fit, a rule for another drafter, or an adapter that breaks its contract.

    Notes
    -----
    Of a drafter that does not give the same answer to the same call, nothing else is said.
    """
    try:
        return _probe(Bench.of(adapter, features, tokens, anchors, seed), rule)
    except Refused as refused:
        raise AdapterError(
            f"{type(adapter).__name__}.{refused.function}() refuses what every drafter has to do: "
            f"{refused}",
            CONTRACT.get(refused.function) or OPTIONAL[refused.function],
        ) from refused


def _probe(bench: Bench, rule: Convention | Rule | None) -> Influence:
    spec = bench.drafter.spec
    if rule is None:
        rule = Rule.serving(spec)
    elif isinstance(rule, Convention):
        rule = Rule.of(rule)
    elif not isinstance(rule, Rule):
        raise BadInput(f"a rule as {type(rule).__name__}", "a Convention, a Rule, or None")
    ours = (spec.block_size, spec.first_slot, spec.n_proposed)
    theirs = (rule.block_size, rule.first_slot, rule.n_proposed)
    if ours != theirs:
        raise BadInput(
            f"a rule with block_size, first slot and proposals {theirs}", f"the adapter's {ours}"
        )
    noise = bench.repeated  # of the very first proposals, before other calls leave a trace
    trials = Trials(bench, rule)
    parts = (trials.alone, trials.reach, trials.together, trials.taps)
    findings = [one for part in parts for one in part()]
    agreement = trials.gradients.agreement(trials.cells)
    checks = [*run_checks(bench), agreement]
    findings += [
        Finding(one.cause, one.reason) for one in checks if one.cause and one.status == "differs"
    ]
    findings += [Finding(*one) for one in rule.not_servable()]
    untested = trials.untested | _untested(checks)
    unsteady = [one for one in checks if one.check == "deterministic" and one.status == "differs"]
    if unsteady:
        why = f"not deterministic: {unsteady[0].reason}"
        checks = [
            one
            if one in unsteady
            else replace(one, status="not testable", reason=why, number=None, tolerance=None)
            for one in checks
        ]
        findings, untested = [], dict.fromkeys(CAUSES, why)
        trials.notes.append("Influences are not told from what varies from call to call.")
    return Influence(
        cells=trials.cells,
        causes=_causes(findings, untested),
        checks=[one.to_json() for one in checks],
        facts={
            "adapter": bench.drafter.name,
            "block_size": spec.block_size,
            "first_slot": spec.first_slot,
            "n_proposed": spec.n_proposed,
            "layer_ids": list(spec.layer_ids),
            "dtype": str(spec.dtype).removeprefix("torch."),
            "anchors": list(bench.anchors),
            "repeated": noise,
            "rounding": bench.rounding,
            **trials.facts,
        },
        notes=trials.notes,
    )


def _untested(checks: Sequence[Check]) -> dict[str, str]:
    """Causes of which no check could be made, with the reason."""
    tested = {one.cause for one in checks if one.status != "not testable"}
    return {one.cause: one.reason for one in checks if one.cause and one.cause not in tested}


def _causes(findings: list[Finding], untested: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every cause once, with what was seen of it."""
    rows = []
    for cause, what in CAUSES.items():
        seen = [one.evidence for one in findings if one.cause == cause]
        status = "found" if seen else "not_tested" if cause in untested else "excluded"
        evidence = "; ".join(dict.fromkeys(seen)) or untested.get(cause, "")
        rows.append({"cause": cause, "what": what, "status": status, "evidence": evidence})
    return rows
