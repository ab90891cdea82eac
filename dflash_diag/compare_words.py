"""What a comparison says, in words: for the console, for headlines and for notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]


def elided(name: str, width: int = 18) -> str:
    """A name without its middle where it is long: checkpoints differ at their ends."""
    if len(name) <= width:
        return name
    tail = (width - 1) // 2
    return f"{name[: width - 1 - tail]}…{name[-tail:]}"


def question(pair: Json) -> str:
    """``Is step_30k really better than step_20k?``."""
    return f"Is {pair['a']} really better than {pair['b']}?"


def answer(pair: Json) -> str:
    """``Yes``, ``No``, or how many prompts it takes, with why that is the answer."""
    if pair["verdict"] == "yes":
        return "Yes"
    if pair["verdict"] != "no":
        return f"Not settled, it {pair['verdict']}"
    if pair["delta_tau"]["lo"] == pair["delta_tau"]["hi"] == 0:
        return "No, they do the same"
    if pair["better"] == pair["b"]:
        return f"No, {pair['b']} is better"
    return "No, a gain that matters is excluded"


def sentence(pair: Json) -> str:
    """Question, answer, and the difference with its interval, prompts and p-value."""
    return f"{question(pair)} {answer(pair)}: {numbers(pair)}."


def sentences(pairs: Sequence[Json]) -> str:
    """The same of several, what they have in common said once."""
    if len(pairs) == 1:
        return sentence(pairs[0])
    said = [f"{question(one)} {answer(one)}: {signed(one['delta_tau'])}." for one in pairs]
    counts = sorted({one["n_prompts"] for one in pairs})
    n = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{' '.join(said)} Tokens a round, paired over {n} prompts, sign-flip tests after Holm."


def numbers(pair: Json) -> str:
    """The difference with its interval, prompts and p-value."""
    n, holm = pair["n_prompts"], ", after Holm" * (pair["p_adjusted"] != pair["p"])
    return (
        f"{signed(pair['delta_tau'])} tokens a round, paired over {n} prompt{'' if n == 1 else 's'}"
        f" (sign-flip {p_words(pair['p_adjusted'])}{holm})"
    )


def signed(numbers: Json, digits: int = 2) -> str:
    """A difference with its interval: ``+0.31 (95 % interval +0.10 to +0.52)``."""
    value, lo, hi = ends(numbers)
    if value is None:
        return "unknown"
    if lo is None or hi is None:
        return f"{value:+.{digits}f} (no interval)"
    return f"{value:+.{digits}f} (95\u00a0% interval {lo:+.{digits}f} to {hi:+.{digits}f})"


def ends(numbers: Json) -> tuple[float | None, float | None, float | None]:
    """Value and interval in this order, whatever order the file has them in."""
    return numbers["value"], numbers["lo"], numbers["hi"]


def p_words(p: float) -> str:
    """A p-value in words."""
    return f"p = {p:.3f}" if p >= 0.001 else "p < 0.001"


def unlike(differs: Sequence[Json]) -> list[str]:
    """What was not the same for all, one sentence each."""
    return [
        f"Not measured alike: {one['what']} ("
        + ", ".join(f"{name}: {value or 'unknown'}" for name, value in one["values"].items())
        + ")."
        for one in differs
    ]


def first_pairs(found: Json) -> list[Json]:
    """The pairs of the drafter that is asked about."""
    name = found["drafters"][0]["name"]
    return [one for one in found["pairs"] if one["a"] == name]
