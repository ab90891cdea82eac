"""What the parts of a gap mean, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash_diag.gap import (
    BACKEND,
    GREEDY,
    METRIC,
    NOISE,
    PRECISION,
    PROMPTS,
    READING,
    REGION,
    UNEXPLAINED,
    UNSEEN,
    WALK,
    WITHOUT_TEXTS,
)

Record = Mapping[str, Any]

TITLES = {
    UNEXPLAINED: "not explained",
    WITHOUT_TEXTS: "training texts, not explained",
    METRIC: "what is counted",
    REGION: "anchors in prompts",
    WALK: "anchors that decoding visits",
    UNSEEN: "texts never trained on",
    GREEDY: "the target's own text",
    PROMPTS: "your prompts",
    READING: "serving's mask and convention",
    NOISE: "noise in training",
    BACKEND: "hidden-state backend",
    PRECISION: "precision",
}
"""What a part is called in a plot."""


def _metric(record: Record) -> str:
    means = record["means"].rstrip(".")
    return f"Serving counts accepted tokens and the bonus token; training counts: {means.lower()}"


def _reading(record: Record) -> str:
    own, declared = record["reading"], record["declared"]
    trained = ", ".join(f"{k}={_value(v)}" for k, v in own.items()) or "without its context"
    served = ", ".join(f"{k}={_value(v)}" for k, v in declared.items()) or "with its context"
    return f"It was trained with {trained} and is served with {served}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(dict.fromkeys(map(str, value)))
    return str(value)


def _unexplained(record: Record) -> str:
    again = record["replayed"]["value"]
    lo, hi = record["spread"]
    lines = f" (the log's last lines: {lo:.2f} to {hi:.2f})" if lo < hi else ""
    return f"Measured again the training number is {again:.2f}, not {record['claimed']:.2f}{lines}"


def _without_texts(record: Record) -> str:
    again = record["replayed"]["value"]
    return (
        f"Measured on your prompts the training number is {again:.2f}, not "
        f"{record['claimed']:.2f}; what training texts do to it is not known without them"
    )


_SENTENCES: Mapping[str, Callable[[Record], str]] = {
    UNEXPLAINED: _unexplained,
    WITHOUT_TEXTS: _without_texts,
    METRIC: _metric,
    REGION: lambda _: "Training also placed anchors inside the prompt, where decoding never is",
    WALK: lambda _: (
        "Decoding starts a round right after a miss, where the next token is harder than at an "
        "anchor drawn anywhere"
    ),
    UNSEEN: lambda _: "Held-out texts in place of those that it was trained on",
    GREEDY: lambda _: (
        "What the target itself says greedily in place of the stored text, after the same "
        "beginnings"
    ),
    BACKEND: lambda record: (
        f"Training computed the target's states with {record['states']}, here it is "
        f"{record['served_states']}"
    ),
    PRECISION: lambda record: (
        f"Training computed in {record['dtype']}, here it is {record['served_dtype']}"
    ),
    PROMPTS: lambda _: "Your prompts in place of the beginnings of the training texts",
    READING: _reading,
    NOISE: lambda record: (
        f"Training put noise of {record['noise']:g} of their size on the states, serving does not"
    ),
}


def title(factors: Sequence[str]) -> str:
    """What a part is called in a plot."""
    return " and ".join(TITLES[factor] for factor in factors)


def sentence(bar: Record, record: Record) -> str:
    """One part of the gap in a sentence."""
    what = "; ".join(_SENTENCES[factor](record) for factor in bar["factors"])
    return f"{what}: {amount(bar)}."


def amount(bar: Record) -> str:
    """A change with its interval."""
    said = signed(bar["value"])
    if bar["lo"] is None or bar["lo"] == bar["hi"]:
        return said
    return f"{said} ({signed(bar['lo'])} to {signed(bar['hi'])})"


def signed(value: float) -> str:
    """Two decimals with their sign, but never a signed zero."""
    text = f"{value:+.2f}".replace("-", "\u2212")
    return "0.00" if text[1:] == "0.00" else text


def headline(record: Record) -> str:
    """The gap and its largest parts."""
    served, start = record["served"]["value"], record["claimed"]
    where = "Training printed"
    if start is None:
        start = record["replayed"]["value"]
        where = "Measured as in training it is" if record["split"] else "Over all anchors it is"
    ends = f"{where} {start:.2f} ({record['definition']}), serving gets {served:.2f}"
    moved = [bar for bar in record["bars"] if abs(bar["value"]) >= 0.005]
    moved.sort(key=lambda bar: -abs(bar["value"]))
    parts = [f"{signed(bar['value'])} {title(bar['factors'])}" for bar in moved[:3]]
    if not parts:
        return f"{ends}: no gap."
    return f"{ends}. The largest parts of the {signed(served - start)}: {', '.join(parts)}."
