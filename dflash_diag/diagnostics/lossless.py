"""Whether speculative output equals plain greedy output: before that, no number can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_diag.diagnostics.base import DRAFTER, Inputs, Skip, diagnostic
from dflash_diag.diagnostics.reference import doubted
from dflash_diag.results import Judgement, Result, Verdict

COLUMNS = ["id", "n_tokens", "n_same", "cause", "margin"]


def judge(result: Result) -> Judgement:
    """Any difference that rounding does not explain fails."""
    p = result.params
    if not p["n_prompts"]:
        return Judgement(Verdict.INCONCLUSIVE, "no prompt could be checked")
    if p["n_state"]:
        why = f"{p['n_state']} of {p['n_prompts']} prompts differ by more than rounding"
        return Judgement(Verdict.FAIL, why)
    return Judgement(Verdict.PASS, f"all {p['n_prompts']} prompts agree up to rounding")


@diagnostic(
    id="target.lossless",
    question="Does drafting and verifying give exactly the target's own greedy text?",
    page="00_overview",
    judge=judge,
)
def lossless(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """Real draft-and-verify decoding against plain greedy decoding, token by token.

    Returns
    -------
    tuple
        Frame columns: id, n_tokens, n_same [tokens], cause ("" where they agree, ``rounding`` or
        ``state_fault``), margin (first logit less second, at the first difference).
    """
    check = inputs.lossless()
    headline, frame, fields = compared(check, "speculative and plain greedy decoding")
    walked = {one["id"]: one["rounds"] for one in inputs.metrics(DRAFTER)["per_prompt"]}
    decoded = {id_: rounds for id_, rounds in check.get("rounds", {}).items() if id_ in walked}
    if decoded:
        agree = sum(rounds == walked[id_] for id_, rounds in decoded.items())
        fields["params"]["n_rounds_agree"] = agree
        fields["notes"].append(
            f"Decoding accepted the same lengths, round by round, as the walk over scored anchors "
            f"on {agree} of {len(decoded)} prompts."
        )
    text = doubted(inputs)
    if text is not None:
        headline += (
            " Both are the target's own text, which is not the text that was scored: that is a "
            f"server's, and {text.id} is {text.verdict.name}."
        )
    return headline, frame, fields


@diagnostic(
    id="target.served",
    question="Does the server give the target's own greedy text?",
    page="00_overview",
    judge=judge,
)
def served(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The same comparison for somebody's server (``--served-output``)."""
    rows = inputs.served()
    if rows is None:
        raise Skip("No server's output was given (--served-output).")
    return compared(rows, "the server and plain greedy decoding")


def compared(check: Mapping[str, Any], who: str) -> tuple[str, Any, dict[str, Any]]:
    """Headline, table and counts of one comparison with plain greedy decoding."""
    import pandas as pd

    frame = pd.DataFrame(check["rows"], columns=COLUMNS).astype({"margin": float})
    n, same = len(frame), int((frame["cause"] == "").sum())
    rounding = int((frame["cause"] == "rounding").sum())
    state = int((frame["cause"] == "state_fault").sum())
    said = f"{who[0].upper()}{who[1:]} give the same tokens on {same} of {n} prompts"
    if rounding:
        said += f"; {rounding} part at a near-tie, which rounding explains"
    if state:
        first = frame[frame["cause"] == "state_fault"].sort_values("n_same").iloc[0]
        said += (
            f"; {state} differ by more than that, {first['id']} from token "
            f"{int(first['n_same']) + 1} on, so acceptance counted by that decoder is wrong"
        )
    return (
        f"{said}.",
        frame,
        {
            "params": {
                "n_prompts": n,
                "n_same": same,
                "n_rounding": rounding,
                "n_state": state,
                "finding": f"{same} of {n} prompts give the same tokens",
            },
            "notes": list(check.get("notes", [])),
        },
    )
