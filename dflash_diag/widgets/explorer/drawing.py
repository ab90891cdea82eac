"""One block as HTML, token by token: what is said in colour is said in marks and words as well."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import exp, inf

from dflash_diag.outcomes import Visit
from dflash_diag.plotting.pieces import short
from dflash_diag.widgets.explorer import tree
from dflash_diag.widgets.explorer.blocks import Block, Blocks
from dflash_diag.widgets.shared import Cell, table
from dflash_diag.widgets.words import Words

CANDIDATES = 5
"""Tokens of each slot whose probabilities are shown."""
BEFORE = 48
"""Context tokens that are shown before the anchor."""
AROUND = 2
"""Rounds of decoding that are shown before and after."""
BLANKS = str.maketrans({"\n": "↵", "\r": "↵", "\t": "⇥"})
CLASSES = {"accepted": "got", "first miss": "miss", "after the miss": "rest"}


def headline(prompt: str, where: str, blocks: Sequence[Block], words: Words) -> str:
    """Which block it is and what became of it, drafter by drafter."""
    said = "".join(f"<li>{_became(one, words)}</li>" for one in blocks)
    return f"<p>Prompt <strong>{escape(prompt)}</strong>, {escape(where)}</p><ul>{said}</ul>"


def _became(block: Block, words: Words) -> str:
    d, k = len(block.labels), block.accepted + 1
    said = f"<strong>{escape(block.name)}</strong>: {block.accepted} of {d} accepted"
    if k <= d:
        label = int(block.labels[k - 1])
        said += f", first miss at k = {k} ({escape(words.quoted(label))}, {words.kind(label)})"
    return f"{said}. It expected {block.expected:.1f}; surprise {block.surprise:.2f} nats."


def context(pieces: Sequence[str], anchor: int, token: int, words: Words) -> str:
    """The text before the block; its last token, the anchor, is boxed.

    Parameters
    ----------
    pieces
        Every token as HTML.
    token
        The anchor's.
    """
    start = max(0, anchor - BEFORE)
    before = f"{'…' if start else ''}{''.join(pieces[start:anchor])}"
    return (
        '<p class="soft">Context, up to the anchor in its box</p>'
        f'<pre>{before}<span class="anchor">{_shown(words, token)}</span></pre>'
    )


def lines(blocks: Sequence[Block], words: Words) -> str:
    """The target's tokens behind the anchor, and each drafter's, one box a token."""
    labels = {
        one.position(k): token for one in blocks for k, token in enumerate(one.labels.tolist(), 1)
    }
    ahead = [_shown(words, labels[position]) for position in sorted(labels)]
    target = "".join(f'<span class="token">{text}</span>' for text in ahead)
    parts = [_line("the target says", target)]
    for one in blocks:
        tokens = "".join(
            f'<span class="token {CLASSES[one.outcome(k)]}"><b>{_sign(one, k)}</b>'
            f"{_shown(words, token)}</span>"
            for k, token in enumerate(one.proposed.tolist(), start=1)
        )
        parts.append(_line(f"{one.name} drafts", tokens))
    return (
        f'<div class="lines">{"".join(parts)}</div><p class="key">'
        '<span class="token got"><b>✓</b>accepted</span> '
        '<span class="token miss"><b>✗</b>first miss</span> '
        '<span class="token rest">after the miss</span>: not looked at, ✓ where it is the '
        "target's token all the same.</p>"
    )


def _line(name: str, tokens: str) -> str:
    return f'<span class="who">{escape(name)}</span><span>{tokens}</span>'


def _sign(block: Block, k: int) -> str:
    return "✓" if block.right(k) else "✗"


def _shown(words: Words, token: int) -> str:
    """A token in its box: line ends as arrows, blanks alone as their own sign."""
    text = words.text(token)
    if text is None:
        return f"[{token}]"
    visible = text.translate(BLANKS)
    return escape(visible if visible.strip() else visible.replace(" ", "␣"))


def slots(blocks: Sequence[Block], words: Words) -> str:
    """Proposals slot by slot, drafters side by side where there are several."""
    head = ["k", "target"]
    for one in blocks:
        head += [short(one.name, 16), "outcome", "p", "rank"]
    places = [{one.position(k): k for k in range(1, len(one.labels) + 1)} for one in blocks]
    rows = []
    for position in sorted(set().union(*places)):
        cells: list[str | Cell] = []
        for one, at in zip(blocks, places, strict=True):
            if position in at:
                label = int(one.labels[at[position] - 1])
                cells += _proposal(one, at[position], words)
            else:
                cells += ["—"] * 4
        k = position - blocks[0].anchor - blocks[0].offset
        rows.append((str(k), words.quoted(label), *cells))
    said = (
        "<em>p</em> is the probability of the drafter's proposal, <em>rank</em> how many tokens it "
        "likes better than the target's."
    )
    names = " beside ".join(one.name for one in blocks)
    caption = f"{blocks[0].where}: {names}, proposal by proposal"
    return f"<p>{said}</p>{table(caption, head, rows)}"


def _proposal(block: Block, k: int, words: Words) -> list[str | Cell]:
    outcome = block.outcome(k)
    kind = f' class="{CLASSES[outcome]}"'
    never = block.label_logprob[k - 1] == -inf
    return [
        Cell(escape(words.quoted(int(block.proposed[k - 1]))), kind),
        Cell(f"{_sign(block, k)} {outcome}", kind),
        tree.probability(float(block.topk_logprobs[k - 1, 0])),
        "never" if never else str(block.rank[k - 1]),
    ]


def candidates(block: Block, words: Words) -> str:
    """Each slot's most probable tokens; the target's is named where it is among them."""
    width = min(CANDIDATES, block.topk_ids.shape[1])
    head = ["k", *(f"rank {r}" for r in range(width)), "target's token"]
    rows: list[tuple[str | Cell, ...]] = []
    for k in range(1, len(block.labels) + 1):
        rank = int(block.rank[k - 1])
        there = f"rank {rank}" if rank < width else _elsewhere(block, k, words)
        cells = [_candidate(block, k, r, words, is_target=r == rank) for r in range(width)]
        rows.append((str(k), *cells, there))
    caption = f"{block.where}: the {width} tokens of each slot that {block.name} likes best"
    return table(caption, head, rows)


def _candidate(block: Block, k: int, rank: int, words: Words, *, is_target: bool) -> Cell:
    logprob = float(block.topk_logprobs[k - 1, rank])
    said = f"{escape(words.quoted(int(block.topk_ids[k - 1, rank])))} {tree.probability(logprob)}"
    bar = f' style="--p:{100 * min(1.0, exp(logprob)):.0f}%"'
    if is_target:
        return Cell(f"<strong>{said}</strong> <small>target</small>", f' class="bar hit"{bar}')
    return Cell(said, f' class="bar"{bar}')


def _elsewhere(block: Block, k: int, words: Words) -> str:
    """Where the target's token is, if not among the candidates that are shown."""
    word = words.quoted(int(block.labels[k - 1]))
    if block.label_logprob[k - 1] == -inf:
        return f"{word}: never"
    p = tree.probability(float(block.label_logprob[k - 1]))
    return f"{word} {p}, rank {block.rank[k - 1]}"


def ddtree(block: Block, nodes: int, words: Words, anchor: int) -> str:
    """The draft tree of a number of nodes."""
    drawn = tree.grow(block, nodes)
    said = tree.said(block, drawn, words.quoted)
    return (
        f'<p>Tree of {escape(block.name)}, {escape(said)} <span class="soft">Top row: the plain '
        "draft. ✓ and thick lines: the target's own tokens.</span></p>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(block.where)}: tree of '
        f'{escape(block.name)}">{tree.draw(block, drawn, words.quoted, anchor)}</div>'
    )


def walk(blocks: Blocks, row: int, visit: Visit, words: Words) -> str:
    """What decoding does around an anchor."""
    found, scores = blocks.outcomes, blocks.scores
    here, start = int(scores.anchor[row]), int(visit.rounds[visit.at])
    if visit.starts:
        said = f"Decoding starts round {visit.at + 1} of {len(visit.rounds)} at this anchor"
    else:
        proposal = here - int(scores.anchor[start])
        said = (
            f"Decoding jumps over this anchor: it is proposal {proposal} of the "
            f"{found.accepted[start]} that round {visit.at + 1} accepts"
        )
    first = max(0, visit.at - AROUND)
    shown = visit.rounds[first : visit.at + AROUND + 1].tolist()
    rows = [
        [
            "▶" if one == start else "",
            str(number),
            str(scores.anchor[one]),
            f"{found.accepted[one]} of {blocks.n_proposed}",
            "".join(
                words.text(int(token)) or f"[{token}]"
                for token in scores.labels[one][: found.accepted[one] + 1]
            ).translate(BLANKS),
        ]
        for number, one in enumerate(shown, start=first + 1)
    ]
    head = ["here", "round", "anchor", "accepted", "commits"]
    caption = f"{blocks.block(row).where}: rounds of {blocks.name} around it"
    return f"<p>{said}.</p>{table(caption, head, rows)}"


STYLE = """<style>
.explorer { --got: var(--jp-brand-color1, #1a6fd4); --missed: var(--jp-warn-color0, #c4590a);
  --line: color-mix(in srgb, currentColor 35%, transparent); }
.explorer p, .explorer ul { margin: 0.5em 0; max-width: 46rem; }
.explorer .soft, .explorer .who { opacity: 0.8; }
.explorer pre { margin: 0.2em 0 0.6em; font-size: 0.93em; }
.explorer .anchor { font-weight: bold; border: 1.5px solid; border-radius: 3px; padding: 0 2px; }
.explorer .lines { display: grid; grid-template-columns: max-content 1fr; gap: 0.3em 0.9em;
  margin: 0.6em 0; align-items: baseline; }
.explorer .who { max-width: 11em; overflow-wrap: anywhere; }
.explorer .token, .explorer svg { font-family: var(--jp-code-font-family, ui-monospace,
  SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace); }
.explorer .token { display: inline-block; white-space: pre-wrap; overflow-wrap: anywhere;
  border: 1.5px solid var(--line); border-radius: 4px; padding: 0 0.35em; margin: 0 0.2em 0.2em 0;
  font-size: 0.93em; }
.explorer .token b { display: inline-block; font-weight: normal; margin-right: 0.3em; }
.explorer .token.got { background: color-mix(in srgb, var(--got) 22%, transparent);
  border-color: var(--got); }
.explorer .token.miss { border: 2px solid var(--missed); font-weight: bold;
  text-decoration: underline double; }
.explorer .token.rest { border-style: dashed; opacity: 0.8; }
.explorer .key { font-size: 0.93em; }
.explorer td { white-space: pre; }
.explorer td, .explorer th { padding: 0.12em 0.8em 0.12em 0; vertical-align: top; }
.explorer td.miss { font-weight: bold; }
.explorer td.rest { opacity: 0.8; }
.explorer td.bar { padding: 0.12em 0.6em;
  background: linear-gradient(to right, color-mix(in srgb, currentColor 15%, transparent)
  var(--p), transparent 0) no-repeat; }
.explorer td.hit { box-shadow: inset 3px 0 var(--got); }
.explorer .pair { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 38rem), 1fr)); }
.explorer .pair > div { min-width: 0; }
.explorer svg { display: block; font-size: 12px; fill: currentColor; }
.explorer svg text { white-space: pre; }
.explorer svg path { fill: none; stroke: currentColor; opacity: 0.45; }
.explorer svg circle { fill: none; stroke: currentColor; stroke-width: 1.3; }
.explorer svg .head { opacity: 0.8; }
.explorer svg path.got { stroke: var(--got); stroke-width: 3; opacity: 1; }
.explorer svg circle.got { fill: var(--got); stroke: var(--got); }
.explorer svg text.got { font-weight: bold; }
</style>"""
