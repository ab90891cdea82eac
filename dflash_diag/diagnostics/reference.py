"""Whether a server's continuations are what the target itself would say, and if not, how so."""

from __future__ import annotations

from typing import Any

from dflash_diag.diagnostics.base import Inputs, Skip, Threshold, diagnostic, percent
from dflash_diag.results import Judgement, Result, Verdict
from dflash_diag.stats import estimates, ratio

COLUMNS = [
    "id", "n_tokens", "n_equal", "n_rounding", "n_differ", "first_differ", "margin", "gap", "kind",
    "stopped_early", "how", "finish_reason",
]  # fmt: skip
FROM_START = Threshold(
    estimate="share_from_start",
    at_most=0.5,
    what="the share of prompts that differ from their first token on",
    source="lower precision moves single tokens; another prompt, template or model moves the first",
)
SCATTERED = Threshold(
    estimate="share_differ",
    at_most=0.10,
    what="the share of tokens that differ by more than rounding",
    source="weights in 4 bits move 4 % of the tokens of the example's target, in 3 bits 13 %",
)


def judge(result: Result) -> Judgement:
    """Equal up to rounding passes; scattered differences warn; another prompt or model fails."""
    p = result.params
    if FROM_START.judge(result).verdict is Verdict.FAIL:
        why = (
            f"{p['n_from_start']} of {p['n_prompts']} prompts differ from the first token on: "
            "another prompt, chat template or model than this target's"
        )
        return Judgement(Verdict.FAIL, why)
    if p["n_differ"]:
        verdict, why = SCATTERED.judge(result)
        if verdict is not Verdict.PASS:
            return Judgement(verdict, why)
        why = (
            f"{p['n_differ']} tokens differ by more than rounding: "
            "a quantised server, or another precision"
        )
        return Judgement(Verdict.WARN, why)
    if p["n_stopped"]:
        return Judgement(Verdict.WARN, f"{p['n_stopped']} continuations stopped early")
    if p["n_unusable"]:
        return Judgement(Verdict.WARN, f"{p['n_unusable']} prompts are left out")
    return Judgement(Verdict.PASS, f"all {p['n_prompts']} prompts agree up to rounding")


@diagnostic(
    id="target.reference",
    question="Is the reference text the target's own greedy text?",
    page="00_overview",
    judge=judge,
    thresholds=[FROM_START, SCATTERED],
)
def reference(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """A server's tokens against the target's choices after the same tokens, teacher-forced.

    Returns
    -------
    tuple
        Frame columns: those of `check_reference`, one row a prompt.
    """
    import pandas as pd

    check = inputs.reference()
    if check is None:
        raise Skip("The text is the target's own; no server wrote it (--server).")
    frame = pd.DataFrame(check["rows"], columns=COLUMNS)
    frame = frame.astype({"first_differ": "Int64", "margin": float})
    n, tokens = len(frame), frame["n_tokens"].to_numpy()
    start, stopped = frame["kind"] == "from_start", frame["stopped_early"]
    found = estimates(
        {
            "share_equal": ratio(frame["n_equal"] / tokens, 1, "share"),
            "share_differ": ratio(frame["n_differ"] / tokens, 1, "share"),
            "share_from_start": ratio(start.astype(float), 1, "share"),
        },
        seed=inputs.seed,
        draws=inputs.draws,
    )
    differ, rounding = int(frame["n_differ"].sum()), int(frame["n_rounding"].sum())
    server, left_out = check["server"], check["server"]["unusable"]
    said = f"{percent(found['share_equal'].value)} of the server's tokens are the target's choices"
    if rounding:
        said += f"; {rounding} are near-ties, which rounding explains"
    if differ:
        worst = frame.sort_values(["n_differ", "id"]).iloc[-1]
        said += (
            f"; {differ} differ by more than that, most of them on {worst['id']} "
            f"(from token {int(worst['first_differ']) + 1}, up to {worst['gap']:.2g} logits)"
        )
    if stopped.any():
        said += f"; {int(stopped.sum())} of {n} continuations stop early"
    who = (
        f"Server: {server['url']}, {server['model']}, {server['dialect']}, "
        f"version {server['version'] or 'unknown'}, precision {server['precision'] or 'unknown'}; "
        f"tokens by {' and '.join(server['tokens_by'])}."
    )
    notes = [
        who,
        *check["notes"],
        *(f"{one['id']} is left out: {one['reason']}." for one in left_out),
    ]
    params = {
        "n_prompts": n,
        "n_differ": differ,
        "n_rounding": rounding,
        "n_from_start": int(start.sum()),
        "n_stopped": int(stopped.sum()),
        "n_unusable": len(left_out),
        "finding": f"{percent(found['share_equal'].value)} of the server's tokens are the target's",
    }
    return f"{said}.", frame, {"estimates": found, "params": params, "notes": notes}


def doubted(inputs: Inputs) -> Result | None:
    """The verdict on a server's text, where other answers have to mention it; None where not.

    Decoding and states can be right for tokens that the target would never have chosen.
    """
    found = reference(inputs)
    return None if found.verdict in (Verdict.PASS, Verdict.SKIPPED) else found


def doubt(found: Result) -> str:
    """That verdict in a sentence."""
    why = found.params.get("judged", found.headline.removesuffix("."))
    return f"A server wrote the text, and {found.id} is {found.verdict.name}: {why}."
