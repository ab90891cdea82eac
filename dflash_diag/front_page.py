"""The front page: verdict, the number that people quote, what to do next, and what every page says.

Everything on it was said by a result; nothing is judged or computed here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup

from dflash_diag import diagnostics, paths, storage
from dflash_diag.diagnostics.reference import doubt
from dflash_diag.next_steps import next_steps
from dflash_diag.pages import Number, number
from dflash_diag.renderings import OFF
from dflash_diag.results import Result, Verdict, worst

if TYPE_CHECKING:
    from dflash_diag.runs import Run

KEY_FIGURES = (
    "acceptance.by_position",
    "acceptance.headline",
    "doctor.causes",
    "gap.decomposition",
    "acceptance.comparison",
    "hidden.divergence",
)
CAPTURED = ("hidden.rows", "hidden.argmax", "hidden.identity")
"""Diagnostics without which no number made from a capture means anything."""
STATES = {
    Verdict.PASS: "noise",
    Verdict.WARN: "harmless",
    Verdict.FAIL: "a cause",
    Verdict.INCONCLUSIVE: "cost unknown",
}
"""Verdicts on hidden states in a word or two."""
LONG = 220
"""Characters of an answer in the list of pages."""
CLAUSE = re.compile(r"[;.] ")
GLOSSARY = (
    ("tau", "tokens that one pass of the target yields: accepted proposals and one token more"),
    ("while decoding", "over the anchors that greedy decoding visits (walked): what a server gets"),
    ("all anchors", "over every position (uniform): what most training dashboards show"),
    ("survival", "share of rounds whose first k proposals are all accepted"),
    ("noise floor", "how far the same code in low precision is from itself in float32"),
    ("95 % interval", "bootstrap over prompts (BCa); blocks of one prompt are not independent"),
    (
        "INCONCLUSIVE",
        "the interval reaches both sides of the threshold; more prompts would settle it",
    ),
)


class Page(NamedTuple):
    """A page of the report, as the front page lists it."""

    file: str
    label: str
    question: str
    verdict: Verdict
    answer: str


def content(run: Run, results: Sequence[Result], notebooks: Mapping[str, str]) -> Mapping[str, Any]:
    """What the front page's template is filled with.

    Parameters
    ----------
    notebooks
        The report's notebooks in order, and what their pages are called.
    """
    by_id = {one.id: one for one in results}
    known = diagnostics.catalogue()
    return {
        "verdict": run.verdict(),
        "headline": by_id["doctor.causes"].params.get("said") or headline(by_id),
        "leads": _leads(by_id),
        "numbers": _numbers(run, by_id),
        "steps": next_steps(results),
        "links": {one.id: f"{known[one.id].page}.html#{one.id}" for one in results},
        "figures": [Markup(one) for one in _figures(by_id)],  # noqa: S704 - escaped there
        "listed": [_page(stem, label, by_id) for stem, label in notebooks.items()],
        "checks": sorted(results, key=_worst_first),
        "glossary": GLOSSARY,
    }


def headline(by_id: Mapping[str, Result]) -> str:
    """The doctor's sentence, or what is accepted where there is none."""
    examined = by_id["doctor.causes"]
    if examined.verdict in (Verdict.SKIPPED, Verdict.ERROR):
        examined = by_id["acceptance.headline"]
    return examined.headline


def _page(stem: str, label: str, by_id: Mapping[str, Result]) -> Page:
    """A notebook's question, the worst verdict on its page, and its answer."""
    cells = storage.read_json(paths.notebooks_dir() / f"{stem}.ipynb")["cells"]
    first, last = ("".join(cells[at]["source"]) for at in (0, -1))
    own = [by_id[id_].verdict for id_, one in diagnostics.catalogue().items() if one.page == stem]
    return Page(
        file=f"{stem}.html",
        label=label,
        question=first.splitlines()[0].removeprefix("# "),
        verdict=worst([one for one in own if one is not Verdict.SKIPPED]),
        answer=brief(by_id[last.split('"')[1]].headline),
    )


def brief(text: str, most: int = LONG) -> str:
    """The first clauses of a sentence, as many as fit; never less than one."""
    if len(text) <= most:
        return text
    ends = [m.end() for m in CLAUSE.finditer(text) if _is_balanced(text[: m.start()])]
    fits = [end for end in ends if end <= most] or ends[:1]
    return f"{text[: fits[-1]].rstrip(' ;')} …" if fits else text


def _is_balanced(text: str) -> bool:
    return text.count("(") == text.count(")")


def _worst_first(result: Result) -> int:
    """Sort key of the front page's table: what was not looked at comes last."""
    return 1 if result.verdict is Verdict.SKIPPED else -result.verdict.severity


def _figures(by_id: Mapping[str, Result]) -> Iterator[str]:
    from dflash_diag import plotting

    for one in (by_id[name] for name in KEY_FIGURES):
        if one.verdict not in (Verdict.SKIPPED, Verdict.ERROR):
            yield plotting.figure_html(one, brief=True)


def _leads(by_id: Mapping[str, Result]) -> list[str]:
    """What has to be known beside the headline: comparison, trust, population."""
    lossless, comparison = by_id["target.lossless"], by_id["acceptance.comparison"]
    text, lines = by_id["target.reference"], []
    if text.verdict in (Verdict.WARN, Verdict.FAIL):
        lines.append(doubt(text))
    if lossless.verdict is Verdict.FAIL:
        lines.append(f"Do not trust this number yet. {lossless.headline}")
    lines += [
        f"The captured states are not what they should be. {by_id[one].headline}"
        for one in CAPTURED
        if by_id[one].verdict is Verdict.FAIL
    ]
    if comparison.verdict is not Verdict.SKIPPED:
        lines.append(comparison.headline)
    if lossless.verdict is not Verdict.FAIL:
        lines.append(lossless.headline)
    template = by_id["data.template"]
    if template.verdict not in (Verdict.SKIPPED, Verdict.ERROR):
        lines.append(template.headline)
    states = by_id["hidden.divergence"]
    if states.verdict not in (Verdict.PASS, Verdict.SKIPPED):
        lines.append(f"Hidden states: {states.params.get('judged', states.headline)}.")
    return lines


def _numbers(run: Run, by_id: Mapping[str, Result]) -> list[Number]:
    found = by_id["acceptance.headline"].estimates
    if not found:
        return []
    numbers = [
        number(f"{run.name('drafter')} while decoding", found["tau_walked"]),
    ]
    if "reference" in run.roles:
        beside = found["reference_tau_walked"]
        numbers.append(number(f"{run.name('reference')} while decoding", beside))
    uniform = number(f"{run.name('drafter')} over all anchors", found["tau_uniform"])
    numbers.append(uniform._replace(detail="what most dashboards show"))
    lossless = by_id["target.lossless"]
    p = lossless.params
    counted = f"{p['n_prompts'] - p['n_state']} of {p['n_prompts']}" if "n_state" in p else "–"  # noqa: RUF001
    words = "prompts decoded exactly" if "n_state" in p else "losslessness was not checked"
    numbers.append(Number("lossless", counted, words))
    numbers += _states(by_id["hidden.divergence"])
    numbers += _template(by_id["data.template"])
    return numbers


def _template(result: Result) -> list[Number]:
    """What leaving the chat template off costs, where it was tried."""
    off = result.estimates.get(f"delta {OFF}")
    if off is None:
        return []
    return [number("price of no chat template", off)._replace(detail="paired, by prompt")]


def _states(result: Result) -> list[Number]:
    """What became of the comparison of hidden states, if there was one."""
    if result.verdict in (Verdict.SKIPPED, Verdict.ERROR):
        return []
    sides = result.params["sides"]
    first = next(iter(sides))
    against = first if len(sides) == 1 else f"{len(sides)} others"
    is_broken = bool(result.params["broken"]) or any(side["n_broken"] for side in sides.values())
    value = "broken" if is_broken else STATES[result.verdict]
    detail = result.params["judged"].removeprefix(f"{first}: " if len(sides) == 1 else "")
    return [Number(f"hidden states against {against}", value, detail.removeprefix("noise, "))]
