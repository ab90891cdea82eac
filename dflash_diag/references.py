"""Somebody's served output, compared with the target's own greedy choices.

Output comes with the capture, where a server wrote its continuations, or in a file. A line of the
file is ``{"id", "output_ids": [...]}`` or ``{"id", "text"}``; the ids are those of
the prompts. A server computes in another order, and mostly in bfloat16, so its rounding is allowed
for at that precision.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dflash_diag.bundle import Capture
from dflash_diag.decoding import Lossless, Mismatch
from dflash_diag.errors import BadInput, CaptureError
from dflash_diag.storage import StrPath, read_text

ROUNDING = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Relative error of one logit, by the precision in which a server computes."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer to compare text."""

    def decode(self, ids: Any, *, skip_special_tokens: bool = ...) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class ServedOutput:
    """What a server answered to one prompt; exactly one of ``ids`` and ``text`` is set."""

    id: str
    ids: tuple[int, ...] | None = None
    text: str | None = None


def read_served(path: StrPath) -> list[ServedOutput]:
    """Read a file of served outputs; blank lines are skipped.

    Raises
    ------
    BadInput
        No such file, no output in it, a malformed line, or an id used twice; the message names the
        line.
    """
    path = Path(path)
    expected = 'one JSON object a line: {"id", "output_ids"} or {"id", "text"}'
    lines = read_text(path, expected).split("\n")
    found: dict[str, ServedOutput] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            output = _parse(json.loads(line))
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not JSON ({error.msg})", expected) from error
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{where}: {error}", expected) from error
        if output.id in found:
            raise BadInput(f"{where}: id {output.id!r} again", "each prompt once")
        found[output.id] = output
    if not found:
        raise BadInput(f"{path} holds no output", expected)
    return list(found.values())


def _parse(value: Any) -> ServedOutput:
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        raise ValueError("no id")
    ids, text = value.get("output_ids"), value.get("text")
    if (ids is None) == (text is None):
        raise ValueError(f"prompt {value['id']!r} has {'no output' if ids is None else 'both'}")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"the text of prompt {value['id']!r} is {type(text).__name__}")
    if ids is None:
        return ServedOutput(value["id"], text=text)
    good = isinstance(ids, list) and all(
        isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids
    )
    if not good or not ids:
        raise ValueError(f"output_ids of prompt {value['id']!r} is no list of token ids")
    return ServedOutput(value["id"], ids=tuple(ids))


def check_served(
    capture: Capture,
    outputs: Sequence[ServedOutput],
    *,
    tokenizer: Tokenizer | None = None,
    precision: str = "bfloat16",
) -> Lossless:
    """Compare served outputs with the capture's greedy continuations, token for token.

    Only the tokens that both have are compared: a server may stop earlier or later. Outputs that
    are text are compared as text, because encoding text again need not give the tokens that were
    generated; the token named is then the one at which the text departs.

    Parameters
    ----------
    tokenizer
        The target's; needed for outputs that are text.
    precision
        What the server computes in. Its first two choices may swap where their margin is below
        twice the error of one logit, or below the capture's own noise floor.

    Raises
    ------
    BadInput
        An id that is no prompt of the capture, a token id outside the vocabulary, text without a
        tokenizer, or a capture whose continuations are a server's.
    """
    if capture.reference is not None:
        raise BadInput(
            f"{capture.path} holds what the server {capture.reference['url']} wrote",
            "a capture of the target's own text to compare served output with",
            "capture without --server",
        )
    if precision not in ROUNDING:
        raise BadInput(f"precision {precision}", f"one of {', '.join(ROUNDING)}")
    known = {p.id: i for i, p in enumerate(capture.prompts)}
    floor = 2 * max((p.logit_noise or 0.0 for p in capture.prompts), default=0.0)
    mismatches = []
    for output in outputs:
        if output.id not in known:
            raise BadInput(f"served output for {output.id!r}", "the id of a prompt of the capture")
        index = known[output.id]
        expected = capture.continuation(index).tolist()
        at: int | None
        got: int | str | None
        if output.ids is not None:
            at, got = _differing_token(output.ids, expected, capture, output.id)
        else:
            at, got = _differing_text(output, expected, tokenizer)
        if at is None:
            continue
        position = capture.prompts[index].n_prompt_tokens + at
        rows = capture.positions(index).set_index("position")
        if position - 1 not in rows.index:
            raise CaptureError(
                f"{capture.path} holds no choices at position {position - 1} (keep_rows)",
                do="capture again without keep_rows",
            )
        row = rows.loc[position - 1]
        allowed = max(floor, 2 * ROUNDING[precision] * abs(float(row["top_logit"])))
        mismatches.append(
            Mismatch(
                prompt=output.id,
                position=position,
                expected=expected[at],
                got=got,
                margin=float(row["margin"]),
                kind="rounding" if float(row["margin"]) <= allowed else "state_fault",
            )
        )
    faulty = sum(m.kind == "state_fault" for m in mismatches)
    return Lossless(
        checked=len(outputs),
        ok=len(outputs) - faulty,
        exact=len(outputs) - len(mismatches),
        noise_floor=floor,
        how=(
            f"the larger of the capture's own floor and twice {ROUNDING[precision]:g} of the "
            f"highest logit, the rounding of a server in {precision}"
        ),
        mismatches=mismatches,
    )


def check_reference(capture: Capture) -> dict[str, Any] | None:
    """Compare a server's continuations with the target's choices after the same tokens.

    Teacher-forced, so that one difference does not make all that follows differ. A token that is
    not the target's choice is ``rounding`` where it lies below it by no more than twice the error
    of one logit, in the coarser of the two precisions; the server's is bfloat16 unless it tells.

    Returns
    -------
    dict or None
        ``server`` (what the capture records), ``notes`` and ``rows``, one a prompt: ``id``,
        ``n_tokens``, ``n_equal``, ``n_rounding``, ``n_differ``, ``first_differ`` (index of the
        first token that differs by more than rounding, or None), ``margin`` (the target's first
        logit less its second, at the first token that is not its choice), ``gap`` (how far the
        furthest token lies below the target's choice [logits]; at least, where it is not among the
        best eight), ``kind`` (``""``, ``rounding``, ``scattered`` or ``from_start``),
        ``stopped_early`` (fewer tokens than asked for, and no end of the sequence), ``how`` and
        ``finish_reason``.
        None for a capture of the target's own text.
    """
    server = capture.reference
    if server is None:
        return None
    stated = [p for p in str(server["precision"]).split(", ") if p in ROUNDING]
    precisions = [*(stated or ["bfloat16"]), str(capture.target_facts["dtype"])]
    error = max(ROUNDING[name] for name in precisions)
    rows = []
    for index, prompt in enumerate(capture.prompts):
        first = prompt.n_prompt_tokens - 1
        choices = capture.positions(index)
        choices = choices[choices["position"].between(first, first + prompt.n_generated - 1)]
        at = choices["position"].to_numpy() - first
        gaps = _below_choice(choices, capture.continuation(index).numpy()[at])
        allowed = 2 * error * choices["top_logit"].abs().to_numpy()
        differ = gaps > allowed
        margin = choices["margin"].to_numpy()[gaps > 0]
        n_differ, n_rounding = int(differ.sum()), int(((gaps > 0) & ~differ).sum())
        kind = "rounding" if n_rounding else ""
        if n_differ:
            kind = "from_start" if differ[0] and at[0] == 0 else "scattered"
        rows.append(
            {
                "id": prompt.id,
                "n_tokens": len(at),
                "n_equal": int((gaps == 0).sum()),
                "n_rounding": n_rounding,
                "n_differ": n_differ,
                "first_differ": int(at[differ.argmax()]) if n_differ else None,
                "margin": float(margin[0]) if len(margin) else None,
                "gap": float(gaps.max(initial=0.0)),
                "kind": kind,
                "stopped_early": not prompt.ended and prompt.n_generated < capture.max_new_tokens,
                "how": prompt.origin,
                "finish_reason": prompt.finish_reason,
            }
        )
    note = f"Rounding: up to {2 * error:g} of the highest logit ({' and '.join(precisions)})."
    return {"server": dict(server), "rows": rows, "notes": [note]}


def _below_choice(choices: Any, tokens: np.ndarray) -> np.ndarray:
    """How far each token [G] lies below the target's choice there [logits]; 0 is the choice."""
    ids, logprobs = (
        np.stack(choices["top_ids"].to_list()),
        np.stack(choices["top_logprobs"].to_list()),
    )
    here = ids == tokens[:, None]
    rank = np.where(here.any(1), here.argmax(1), ids.shape[1] - 1)
    gaps: np.ndarray = logprobs[:, 0] - np.take_along_axis(logprobs, rank[:, None], 1)[:, 0]
    # Not among the best eight: at least the eighth's gap, and never the choice.
    return np.where(here.any(1), gaps, np.maximum(gaps, np.finfo(np.float32).tiny))


def _differing_token(
    got: Sequence[int], expected: Sequence[int], capture: Capture, name: str
) -> tuple[int | None, int | None]:
    size = int(capture.target_facts["vocab_size"])
    wrong = next((i for i in got if i >= size), None)
    if wrong is not None:
        raise BadInput(
            f"served output for {name!r} has token id {wrong}",
            f"ids below {size}, the target's vocabulary",
        )
    for at, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return at, b
    return None, None


def _differing_text(
    output: ServedOutput, expected: Sequence[int], tokenizer: Tokenizer | None
) -> tuple[int | None, str | None]:
    if tokenizer is None:
        raise BadInput(
            f"served output for {output.id!r} is text and no tokenizer is at hand",
            "output_ids",
            "or name a target with a tokenizer (--target)",
        )
    served = output.text or ""
    for at in range(len(expected)):
        # The text of a prefix may end inside a character, which decodes to U+FFFD for now.
        text = tokenizer.decode(expected[: at + 1], skip_special_tokens=True).rstrip("\ufffd")
        both = min(len(text), len(served))
        if text[:both] != served[:both]:
            same = next(i for i in range(both) if text[i] != served[i])
            return at, served[same : same + 20]
    return None, None
