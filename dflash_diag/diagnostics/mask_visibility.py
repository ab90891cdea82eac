"""What one real block sees as the weights are read, beside what a server can show it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.base import Continuation, Inputs, diagnostic
from dflash_diag.results import Judgement, Result, Verdict

if TYPE_CHECKING:
    from dflash_diag.conventions import Convention

READ_BY_ALL = {"in_block": ("is_causal",), "window": ("layer_types", "use_sliding_window")}
"""Keys that z-lab's package, SGLang and vLLM obey; vLLM alone also ``dflash_config.causal`` and
``use_swa``. Public cases of each misread: sglang 34524, vLLM 43445 and 47745."""


def judge(result: Result) -> Judgement:
    """What serving cannot have fails; what servers may do otherwise is a warning."""
    impossible, differs = result.params["impossible"], result.params["differs"]
    if impossible:
        return Judgement(Verdict.FAIL, f"slots see {impossible[0]}, which no server has")
    if differs:
        return Judgement(Verdict.WARN, differs[0])
    return Judgement(Verdict.PASS, "all that a slot sees is there when a server drafts the block")


@diagnostic(
    id="mask.visibility",
    question="Does the mask these weights are read with show a slot only what a server can show?",
    page="05_attention_mask",
    judge=judge,
)
def visibility(inputs: Inputs) -> tuple[str, Any, dict[str, Any]]:
    """The block with the most context, among two others of its pass, under both rules.

    The server's rule is the reading's own, with rows below the anchor, one block a pass, and a
    window counted from the slot, as engines count it.

    Returns
    -------
    tuple
        Frame columns: those of `dflash_diag.masks.visibility_frame`, ``training`` being what the
        reading shows and ``serving`` what a server shows.
    """
    from dflash_diag.masks import rules_of, visibility_frame

    role = inputs.roles[0]
    reading, scores, name = inputs.convention(role), inputs.scores(role), inputs.name(role)
    deepest = int(scores.anchor.argmax())
    anchor, prompt = int(scores.anchor[deepest]), scores.prompt_ids[scores.prompt[deepest]]
    text = next(one for one in inputs.continuations() if one.id == prompt)
    apart = reading.block_size // 2
    anchors = [a for a in (anchor - apart, anchor, anchor + apart) if a >= text.start]
    rules = rules_of(reading)
    frame = visibility_frame(
        rules,
        [replace(rule.served, window_rule="slot") for rule in rules],
        anchors,
        text.start + len(text.ids),
        blocks=[anchors.index(anchor)],
    )
    impossible, differs = _leaks(frame), [*_edges(frame), *_read_apart(reading)]
    if impossible:
        said, finding = f"slots see {' and '.join(impossible)}", "Slots see what no server has"
        said += "; no server has that"
    elif differs:
        said, finding = differs[0], "Servers may show slots something else"
    else:
        said = f"the {reading.block_size} slots of a block see target states below their anchor "
        said += "and their own block only, as a server shows them"
        finding = "Slots see what a server can show them"
    block = f"The block is the one with the most context, at position {anchor} of prompt {prompt}"
    notes = [
        f"{block}; other blocks of its pass are drawn beside it.",
        "This is what the reading shows the weights; what they rely on is another question.",
    ]
    params = {
        "prompt": prompt,
        "anchor": anchor,
        "block_size": reading.block_size,
        "labels": _labels(text),
        "impossible": impossible,
        "differs": differs,
        "finding": finding,
    }
    return f"{name}: {said}.", frame, {"params": params, "notes": notes}


def _leaks(frame: Any) -> list[str]:
    """What slots see and no server has, in words."""
    seen = frame[frame["training"] & ~frame["serving"]]
    found = []
    if ((seen["kind"] == "context") & (seen["key"] >= seen["anchor"])).any():
        found.append("the target state of their own anchor")
    others = seen[seen["kind"] == "other"]["key_anchor"]
    if len(others):
        place = "later blocks" if (others > seen["anchor"].iloc[0]).all() else "other blocks"
        found.append(f"slots of {place} of the same pass")
    return found


def _edges(frame: Any) -> list[str]:
    """What slots see at a window's end, and a server whose window moves with the slot hides."""
    seen = frame[frame["training"] & ~frame["serving"] & (frame["kind"] != "other")]
    seen = seen[(seen["kind"] == "own") | (seen["key"] < seen["anchor"])]
    if seen.empty:
        return []
    most = int(seen.groupby(["layers", "slot"]).size().max())
    ends = f"at the window's end slots see up to {most} rows that an engine hides"
    return [f"{ends}: there the window moves on with the slot"]


def _read_apart(reading: Convention) -> list[str]:
    """Parts of the mask that these files say in a way that not every server reads."""
    keys = {field: reading.sources[field].key for field in READ_BY_ALL if field in reading.sources}
    told = {
        field: any(one in keys.get(field, "") for one in known)
        for field, known in READ_BY_ALL.items()
    }
    usual = tuple("bidirectional" if w is None else "causal" for w in reading.window)
    found = []
    if reading.in_block != usual and not told["in_block"]:
        key = keys.get("in_block", "no file")
        found.append(
            f"which slots of its block a slot sees comes from {key}: servers that go by is_causal "
            "alone take sliding layers for causal and full ones for bidirectional"
        )
    if any(reading.window) and not told["window"]:
        key = keys.get("window", "no file")
        found.append(
            f"the window comes from {key}: servers that go by layer_types show all of the context"
        )
    return found


def _labels(text: Continuation) -> dict[str, str]:
    """Text, or else id, of the generated tokens by position."""
    pieces = text.pieces or [str(token) for token in text.ids]
    return {str(text.start + i): piece for i, piece in enumerate(pieces)}
