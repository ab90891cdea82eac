"""Can the numbers be trusted: decoding is lossless, and the states are those of their tokens.

These come first because they can fake all the rest: a loop that keeps rejected drafts accepts too
much, and states that are shifted by a row look like weights trained for another position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dflash_diag import storage
from dflash_diag.causes import Status, entry
from dflash_diag.diagnostics.base import DRAFTER
from dflash_diag.errors import DiagError
from dflash_diag.results import Result, Verdict

if TYPE_CHECKING:
    from dflash_diag.doctor.merging import Entry
    from dflash_diag.runs import Run
    from dflash_diag.stats import Estimate

OPEN: dict[Verdict, Status] = {
    Verdict.ERROR: "not_tested",
    Verdict.INCONCLUSIVE: "not_identifiable",
    Verdict.WARN: "not_identifiable",
    Verdict.PASS: "excluded",
}
"""Status of a cause by the verdict of the check that looks for it, unless it was found."""


def by_verdict(cause: str, results: Sequence[Result], **fields: Any) -> Entry:
    """A cause that some checks decide: found if one fails, else open or excluded by the worst."""
    said = {verdict: [r for r in results if r.verdict is verdict] for verdict in Verdict}
    if said[Verdict.FAIL]:
        text = " ".join(one.headline for one in said[Verdict.FAIL])
        return entry(cause, "found", text, **fields)
    for verdict, status in OPEN.items():
        if said[verdict]:
            return entry(cause, status, said[verdict][0].headline)
    why = "; ".join(one.headline for one in results[:1])
    return entry(cause, "not_tested", why or "nothing looks for it")


def decoding(run: Run) -> list[Entry]:
    """Whether speculative output, ours or a server's, is the target's own."""
    checks = [run.result("target.lossless"), run.result("target.served")]
    return [by_verdict("target.not_lossless", checks)]


def padding(run: Run) -> list[Entry]:
    """Whether padding and neighbours reach the states of real tokens."""
    return [
        by_verdict("target.padding", [run.result("hidden.padding"), run.result("hidden.batch")])
    ]


def states(run: Run) -> list[Entry]:
    """Whether the captured states that the drafter reads are what they claim to be."""
    rows, identity = run.result("hidden.rows"), run.result("hidden.identity")
    wrong = sorted(_wrong_layers(rows) | _wrong_layers(identity))
    if wrong and DRAFTER in run.roles and not set(wrong) & set(run.convention(DRAFTER).taps):
        text = f"{_said(rows, identity)} The drafter taps none of these layers."
        return [entry("hidden.rows", "excluded", text)]
    if identity.verdict is Verdict.SKIPPED:
        # Without the target, the last layer's states alone can say whether rows are in place.
        return [by_verdict("hidden.rows", [rows, run.result("hidden.argmax")])]
    return [by_verdict("hidden.rows", [rows, identity])]


def _said(*results: Result) -> str:
    return " ".join(one.headline for one in results if one.verdict is Verdict.FAIL)


def _wrong_layers(result: Result) -> set[int]:
    """Layers whose states a failed check complains about."""
    if result.verdict is not Verdict.FAIL or "layer" not in result.frame:
        return set()
    frame = result.frame
    if "kind" in frame:
        return set(frame["layer"][~frame["kind"].isin(("right", "near"))])
    bad = (frame["n_rows"] != frame["n_tokens"]) | (frame["zero_rows"] > 0)
    bad |= (frame["nan_rows"] > 0) | (frame["inf_rows"] > 0) | frame["dtype"].str.contains("int")
    return set(frame["layer"][bad])


def on_fresh_states(run: Run) -> Run | None:
    """The same run on states that the live target computes now; None where it is not at hand."""
    from dflash_diag.capture import make_capture
    from dflash_diag.runs import Run

    if not run.config.target:
        return None
    folder = run.out / "captures" / storage.content_key("fresh/1", run.capture_digest)[:12]
    if not (folder / "manifest.json").is_file():
        taps = {tap for role in run.roles for tap in run.convention(role).taps}
        make_capture(
            run.target,
            [],
            folder,
            like=run.capture,
            layers="around",
            taps=sorted(taps),
        )
    config = run.config.model_copy(update={"capture": str(folder), "prompts": ""})
    fresh = Run(config, [], run.given)
    fresh.__dict__["target"] = run.target  # loaded once
    return fresh


def with_effect(found: Entry, run: Run, fresh: Run) -> Entry:
    """An entry on broken states, with what the drafter gets on fresh ones."""
    from dflash_diag import metrics, stats

    key = "tau_walked_micro"
    try:
        ours, theirs = metrics.paired(fresh.scores(DRAFTER), run.scores(DRAFTER), trees=False)[key]
    except DiagError as error:
        return {**found, "evidence": f"{found['evidence']} They cannot be scored: {error}."}
    tau: dict[str, Estimate] = stats.estimates({key: ours}, seed=run.seed, draws=run.draws)
    delta = stats.differences({key: (ours, theirs)}, seed=run.seed, draws=run.draws)
    return {
        **found,
        "recoverable": True,
        "tau_own_reading": tau[key].to_json(),
        "delta": delta[key].to_json(),
    }
