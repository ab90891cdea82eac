"""How results look: decoding token by token, notebooks' HTML made readable, a console table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from dflash_diag.diagnostics.base import JUDGED
from dflash_diag.errors import DiagError, printable
from dflash_diag.results import Result, Verdict

if TYPE_CHECKING:
    from dflash_diag.bundle import Capture
    from dflash_diag.runs import Run
    from dflash_diag.training_audit import Audit

FOLDED_ROWS = 6
"""Tables with more rows are folded."""
NUMBER = re.compile(r"^[-+]?[\d.,]+(e[-+]?\d+)?%?$")


def polish(body: str) -> str:
    """HTML whose tables scroll by themselves, numbers right-aligned, verdicts marked."""
    from bs4 import BeautifulSoup

    soup = BeautifulSoup(body, "html.parser")
    for table in soup.find_all("table"):
        caption = table.caption.get_text(" ", strip=True) if table.caption else "Table"
        rows = table.tbody.find_all("tr") if table.tbody else []
        _align(rows, table)
        for head in table.find_all("th"):  # pandas leaves corners that head nothing
            if not head.get_text(strip=True):
                head.name = "td"
        box = soup.new_tag("div", attrs={"class": "scroll", "tabindex": "0", "role": "group"})
        box["aria-label"] = caption
        table.wrap(box)
        if len(rows) > FOLDED_ROWS and box.find_parent("section"):
            fold, label = soup.new_tag("details"), soup.new_tag("summary")
            label.string = f"Table: {caption} ({len(rows)} rows)"
            box.wrap(fold)
            fold.insert(0, label)
    for section in soup.select("section.dflash-diag"):
        first = section.find("p")
        if first and first.strong:
            verdict = first.strong.get_text(strip=True)
            mark = soup.new_tag("span", attrs={"class": f"verdict {verdict}"})
            glyph = soup.new_tag("span", attrs={"class": "glyph", "aria-hidden": "true"})
            glyph.string = Verdict[verdict].glyph
            mark.append(glyph)
            mark.append(f" {verdict}")
            first.contents[0].extract()
            first.strong.replace_with(mark)
            first["class"] = "headline"
    return str(soup)


def _align(rows: Sequence[Any], table: Any) -> None:
    columns = list(zip(*[row.find_all("td") for row in rows], strict=False))
    heads = table.thead.find_all("th") if table.thead else []
    for index, cells in enumerate(columns):
        texts = [cell.get_text(strip=True) for cell in cells]
        if all(text == "—" or NUMBER.match(text) for text in texts):
            for cell in [*cells, *heads[index : index + 1]]:
                cell["class"] = "num"


# --- offline --------------------------------------------------------------------------------------


class _Assets(HTMLParser):
    """Collects what a browser would fetch or run while it shows a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        if tag in ("script", "iframe", "object", "embed"):
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            value = value or ""
            followed = tag == "a" and name == "href"
            if name in _FETCHED and not followed and _ELSEWHERE.match(value):
                self.found.append(f'<{tag} {name}="{value[:60]}">')
            if name == "srcset" or (name == "style" and _CSS_ELSEWHERE.search(value)):
                self.found.append(f"<{tag} {name}>")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002 - the base class's signature
        self._in_style = False

    def handle_data(self, data: str) -> None:
        if self._in_style and _CSS_ELSEWHERE.search(data):
            self.found.append("<style> with an address")


_FETCHED = {"src", "href", "xlink:href", "poster", "background", "data", "action", "formaction"}
_ELSEWHERE = re.compile(r"\s*([a-z][a-z0-9+.-]*:)?//|\s*file:", re.IGNORECASE)
_CSS_ELSEWHERE = re.compile(r"@import|url\(\s*['\"]?\s*([a-z]+:)?//", re.IGNORECASE)


def check_offline(html: str, name: str) -> None:
    """Fail where a page would fetch anything or run a script.

    Raises
    ------
    DiagError
        Naming the first such element.
    """
    assets = _Assets()
    assets.feed(html)
    if assets.found:
        raise DiagError(f"{name} would not work offline: it holds {assets.found[0]}")


PAGE_BYTES = 3_000_000
"""A page that is larger opens slowly, and cannot be mailed."""


def check_size(html: str, name: str) -> None:
    """Fail where a page is larger than `PAGE_BYTES`.

    Raises
    ------
    DiagError
        With its size, and what on it is largest.
    """
    size = len(html.encode())
    if size <= PAGE_BYTES:
        return
    pictures = sum(map(len, _PICTURE.findall(html)))
    raise DiagError(
        f"{name} is {size / 1e6:.1f} MB, {pictures / 1e6:.1f} MB of it pictures; a page may have "
        f"{PAGE_BYTES / 1e6:.0f} MB: ask for less with --max-new-tokens, or for fewer --against"
    )


_PICTURE = re.compile(r'src="data:[^"]*"')


# --- token by token -------------------------------------------------------------------------------


class Transcript:
    """What decoding does with a drafter, on a few prompts from the easiest to the hardest.

    Parameters
    ----------
    role
        ``"drafter"`` or ``"reference"``.
    n
        How many prompts, evenly spread over those that were scored, sorted by tau.
    """

    def __init__(self, run: Run, role: str = "drafter", n: int = 5) -> None:
        self.run, self.role = run, role
        rows = sorted(run.metrics(role)["per_prompt"], key=lambda row: -row["tau_walked"])
        n = min(n, len(rows))
        self.rows = [rows[round(i * (len(rows) - 1) / max(n - 1, 1))] for i in range(n)]

    def static_html(self) -> str:
        """Each prompt folded; accepted proposals shaded, the target's own tokens underlined."""
        name = escape(self.run.name(self.role))
        legend = (
            f'<p>{name}, round by round: <span class="got">accepted proposals</span> are shaded, '
            '<span class="own">the token that the target adds</span> is underlined, '
            '<span class="rest">what is not scored</span> is grey.</p>'
        )
        shown = "\n".join(self._prompt(row, is_open=i == 0) for i, row in enumerate(self.rows))
        inside = f"{_STYLE}{legend}{shown}"
        return f'<section class="transcript" aria-label="Transcript">{inside}</section>'

    def _prompt(self, row: Mapping[str, Any], *, is_open: bool) -> str:
        capture, rounds = self.run.capture, row["rounds"]
        index = capture.index(row["id"])
        start = capture.prompts[index].n_prompt_tokens
        pieces = token_pieces(capture, index)
        at, said = start + 1, [f'<span class="own">{pieces[start]}</span>']
        for number, jump in enumerate(rounds, start=1):
            got, own = "".join(pieces[at : at + jump - 1]), pieces[at + jump - 1]
            accepted = f'<span class="got">{got}</span>' if got else ""
            tip = f"round {number}: {jump - 1} accepted"
            said.append(f'<span title="{tip}">{accepted}<span class="own">{own}</span></span>')
            at += jump
        rest = f'<span class="rest">{"".join(pieces[at:])}</span>' if at < len(pieces) else ""
        head = (
            f"{escape(row['id'])}: {row['tau_walked']:.2f} tokens a round in {len(rounds)} rounds"
        )
        prompt = f'<span class="rest">{"".join(pieces[:start])}</span>'
        return (
            f"<details{' open' if is_open else ''}><summary>{head}</summary>"
            f"<pre>{prompt}{''.join(said)}{rest}</pre></details>"
        )

    def __repr__(self) -> str:
        return "\n".join(f"{row['id']}: {row['rounds']}" for row in self.rows)

    def _repr_html_(self) -> str:
        return self.static_html()


def token_pieces(capture: Capture, index: int) -> list[str]:
    """Every token of a prompt and its continuation as HTML: its text, or its id if that is all."""
    ids = capture.tokens(index).tolist()
    texts = [None] * len(ids) if capture.foreign else capture.positions(index)["text"]
    return [
        escape(text) if isinstance(text, str) else f"[{token}] "
        for token, text in zip(ids, texts, strict=True)
    ]


_STYLE = """<style>
.transcript pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.transcript .got { background: rgba(24, 69, 251, 0.17); border-radius: 2px; }
.transcript .own { text-decoration: underline; text-decoration-thickness: 2px;
  text-underline-offset: 3px; text-decoration-color: #d94801; }
.transcript .rest { opacity: 0.75; }
</style>"""


# --- console --------------------------------------------------------------------------------------


def verdict_line(one: Result) -> str:
    """A result on one line: verdict, id, what was found and why that is its verdict."""
    why = one.params.get("judged")
    said = one.headline if why is None else f"{one.headline} {why[0].upper()}{why[1:]}."
    return f"{one.verdict.glyph} {one.verdict.name} {one.id}: {said}"


def score_text(run: Run) -> str:
    """One drafter's score for a terminal."""
    found = run.metrics("drafter")
    verdict, server = run.result("target.lossless"), run.result("target.reference")
    subject = (
        f"{run.name('drafter')} on {run.target_name}: block {found['block_size']}, "
        f"{found['n_prompts']} prompts, {found['n_rounds']} rounds, {found['n_anchors']} anchors"
    )
    lines = [
        subject,
        f"lossless  {verdict.verdict.glyph} {verdict.verdict.name}  {verdict.headline}",
        *([] if server.verdict is Verdict.SKIPPED else [f"server    {verdict_line(server)}"]),
        "",
        f"{'tokens a round (tau)':<31}{'pooled':>8}  {'95 %':<14}{'by prompt':>10}  95 %",
    ]
    for population, words in (("walked", "while decoding"), ("uniform", "over all anchors")):
        pooled, mean = (found["tau"][f"{population}_{how}"] for how in ("micro", "macro"))
        lines.append(
            f"  {words:<29}{_two(pooled['value']):>8}  {_range(pooled):<14}"
            f"{_two(mean['value']):>10}  {_range(mean)}"
        )
    for n, tree in found["ddtree_tau"].items():
        if n in ("4", "16"):
            words = f"tree of {n} nodes, all anchors"
            lines.append(f"  {words:<29}{_two(tree['value']):>8}  {_range(tree)}")
    lines += ["", *_positions(found)]
    if "reference" in run.roles:
        lines += ["", run.result("acceptance.comparison").headline]
    lines += [f"not scored: {one['id']} ({one['reason']})" for one in found["unscored"]]
    lines += [f"note: {note}" for note in found.get("notes", [])]
    return printable("\n".join(lines))


def audit_text(found: Audit) -> str:
    """An audit of a training step for a terminal: what is wrong, then everything that was asked."""
    from dflash_diag.training_audit.properties import words

    trial = found.facts["trial"]
    layers = ", ".join(map(str, trial["layers"]))
    size = f"{trial['n_tokens']} tokens, {len(trial['anchors'])} blocks, layers {layers}"
    lines = [f"{trial['step']} on {trial['text']}: {size}", ""]
    wrong = [*found.faults, *found.misreported]
    for one in wrong:
        lines += [f"✗ {one.id}: {words(one.found)}", f"    {one.evidence}"]
        lines += [f"    {one.remedy}"] * bool(one.remedy)
    if not wrong:
        lines.append("✓ nothing is wrong")
    lines.append("")
    width = max(len(one.id) for one in found) + 2
    for one in found:
        if one.status == "found":
            continue
        said = words(one.found) or one.evidence
        lines.append(f"{STATUS_MARKS[one.status]} {one.id:<{width}}{said}")
    lines += [f"note: {note}" for note in found.notes]
    return printable("\n".join(lines))


STATUS_MARKS = {"excluded": "✓", "measured": "=", "not_identifiable": "?", "not_tested": "–"}  # noqa: RUF001
"""What stands before a property that is not wrong."""


def divergence_text(run: Run) -> str:
    """One comparison of hidden states for a terminal."""
    from dflash_diag.state_runs import STATE_CHECKS

    name = run.sides()[0]
    found = run.divergence(name)
    lines = [f"{run.states.own_name} against {name}", found["floor_note"], ""]
    lines.append(f"{'layer':>6}{'rel. RMS':>10}{'floor':>10}{'1 - cos':>10}{'largest':>10}  at")
    for row in found["layers"]:
        prompt, token, channel = (row[f"max_abs_{k}"] for k in ("prompt", "token", "channel"))
        numbers = "".join(
            f"{'–' if row[k] is None else format(row[k], '.2g'):>10}"  # noqa: RUF001
            for k in ("rel_rms", "floor", "one_minus_cos", "max_abs")
        )
        at = f"{prompt}, token {token}, channel {channel}"
        lines.append(f"{row['layer']:>6}{numbers}  {at}{'  above the noise' * row['above']}")
    lines.append("")
    ids = ["hidden.divergence", "hidden.modules", "hidden.effect", *STATE_CHECKS]
    if run.capture.reference is not None:
        ids.append("target.reference")
    width = max(map(len, ids)) + 2
    for id_ in ids:
        one = run.result(id_)
        lines.append(f"{one.verdict.glyph} {one.verdict.name:<13}{id_:<{width}}{one.headline}")
    notes = run.result("hidden.effect").notes
    lines += [f"note: {note}" for note in notes if not note.startswith(JUDGED)]
    return printable("\n".join(lines))


def doctor_text(found: Mapping[str, Any]) -> str:
    """Ranked causes for a terminal: what was found in full, the others by name."""
    glyph = Verdict[found["verdict"]].glyph
    lines = [f"{glyph} {found['verdict']}  {found['headline']}", ""]
    for one in found["findings"]:
        if one["status"] != "found":
            continue
        delta = one["delta"]
        gain = "" if delta is None else f", {delta['value']:+.2f} tokens a round {_range(delta)}"
        lines += [f"{one['cause']} ({one['kind'].replace('_', ' ')}{gain.rstrip()})"]
        lines += [f"  {one['evidence']}", f"  To do: {one['remedy']}", ""]
    for status, words in OPEN_CAUSES.items():
        named = [one for one in found["findings"] if one["status"] == status]
        if named:
            lines.append(f"{words}: {', '.join(one['cause'] for one in named)}")
    for one in found["findings"]:
        if one["status"] == "not_identifiable":
            lines.append(f"  {one['cause']}: {one['evidence']}")
    lines += [f"note: {one}" for one in found["cautions"]]
    return printable("\n".join(lines))


def compare_text(found: Mapping[str, Any]) -> str:
    """Drafters side by side for a terminal: what is unlike, then numbers, then answers."""
    from dflash_diag.compare_words import first_pairs, sentence, unlike

    lines = [*unlike(found["differs"])]
    lines += [""] * bool(lines)
    width = max(29, *(len(one["name"]) + 3 for one in found["drafters"]))
    lines.append(f"{'tokens a round while decoding':<{width}}{'tau':>8}  {'95 %':<14}prompts")
    for one in found["drafters"]:
        mark = "  (reference)" * one["reference"]
        numbers = f"{_two(one['tau']['value']):>8}  {_range(one['tau']):<14}{one['n_prompts']}"
        lines.append(f"  {one['name']:<{width - 2}}{numbers}{mark}")
    lines += ["", *map(sentence, found["pairs"]), ""]
    for other in first_pairs(found):
        rows = [one for one in found["slots"] if one["b"] == other["b"]][:16]
        lines.append(f"{other['a']} less {other['b']}, percentage points by position")
        table = {"position": [str(one["k"]) for one in rows]}
        for rate in ("survival", "conditional"):
            table[rate] = [_points(one[f"{rate}_delta"]["value"]) for one in rows]
        lines += [
            f"  {name:<20}{''.join(f'{c:>6}' for c in cells)}" for name, cells in table.items()
        ]
    line = found["trend"]
    if line is not None:
        lines += ["", f"{'step':<22}{'tau':>8}  95 %"]
        lines += [
            f"{one['step']:<22}{_two(one['tau']['value']):>8}  {_range(one['tau'])}"
            for one in line["points"]
            if one["line"] == line["line"]
        ]
    lines += [f"note: {note}" for note in found["notes"]]
    return printable("\n".join(lines))


def _points(share: float | None) -> str:
    return "–" if share is None else f"{round(100 * share):+d}"  # noqa: RUF001 - unknown


OPEN_CAUSES = {
    "excluded": "Excluded",
    "not_tested": "Not tested",
    "not_identifiable": "Cannot be told here",
}
"""What the doctor calls causes that were not found."""


def _positions(found: Mapping[str, Any], most: int = 16) -> list[str]:
    walked, uniform = found["by_position_walked"][:most], found["by_position"][:most]
    rows = {
        "position": [str(row["k"]) for row in walked],
        "survival, decoding": [_two(row["survival"]) for row in walked],
        "right, all anchors": [_two(row["marginal"]) for row in uniform],
    }
    return [f"{name:<20}{''.join(f'{cell:>6}' for cell in cells)}" for name, cells in rows.items()]


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"  # noqa: RUF001 - a dash for what is unknown


def _range(numbers: Mapping[str, Any]) -> str:
    if numbers["lo"] is None or numbers["hi"] is None:
        return "no interval"
    return f"{numbers['lo']:.2f} to {numbers['hi']:.2f}"
