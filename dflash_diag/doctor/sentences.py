"""The doctor's one sentence: what the drafter gets, why, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dflash_diag.causes import CAUSES
from dflash_diag.doctor.merging import FIRST, Entry, is_fault, value_of


def said(name: str, findings: Sequence[Entry], declared: Mapping[str, Any]) -> str:
    """What the drafter gets, and why.

    Parameters
    ----------
    findings
        Ranked, the worst first.
    declared
        Walked tau as the drafter is read.
    """
    found = [one for one in findings if is_fault(one)]
    text = f"{name} is accepted {tau_words(declared)} tokens a round"
    if value_of(declared) is None:
        text = f"{name} cannot be scored"
    if not found:
        return f"{text}; {_nothing(findings)}"
    return f"{text}; {CAUSES[found[0]['cause']].means}{_worth(found[0])}."


def to_do(findings: Sequence[Entry]) -> str:
    """What to do about the worst cause, and which others there are; empty where none was found."""
    found = [one for one in findings if is_fault(one)]
    if not found:
        return ""
    others = ", ".join(one["cause"] for one in found[1:])
    return found[0]["remedy"] + (f" Also found: {others}." if others else "")


def tau_words(tau: Mapping[str, Any]) -> str:
    """``1.64 [1.53, 1.78]``."""
    if tau["value"] is None:
        return "an unknown number of"
    if tau["lo"] is None or tau["hi"] is None:
        return f"{tau['value']:.2f}"
    return f"{tau['value']:.2f} [{tau['lo']:.2f}, {tau['hi']:.2f}]"


def _worth(one: Entry) -> str:
    """What the right reading would get, and whether serving could have it."""
    own, delta = value_of(one["tau_own_reading"]), value_of(one["delta"])
    if own is None or delta is None:
        return ""
    if one["cause"] in FIRST:
        return f": on states computed anew it gets {own:.2f}"
    if one["recoverable"]:
        return f": read that way it gets {own:.2f}"
    if delta > 0:
        return f": read that way it would get {own:.2f}, which serving cannot give it"
    return ""


def _nothing(findings: Sequence[Entry]) -> str:
    """What no found cause means: how many were excluded, and what stays open."""
    count = {
        status: [one["cause"] for one in findings if one["status"] == status]
        for status in ("excluded", "not_identifiable", "not_tested")
    }
    text = f"no cause was found, {len(count['excluded'])} are excluded"
    if count["not_identifiable"]:
        text += f", {len(count['not_identifiable'])} cannot be told here"
    if count["not_tested"]:
        text += f", {len(count['not_tested'])} were not tested"
    return f"{text}."
