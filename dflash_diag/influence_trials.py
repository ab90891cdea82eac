"""Trials on one adapter: change one thing, see which slots move, hold that against a rule.

Symbols: a anchor, p position of a row, k slot, A anchors, B block size, D proposed tokens, T rows,
K tapped layers, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dflash_diag.adapters.bench import FACTOR, Bench, change, repeated
from dflash_diag.adapters.slopes import Gradients
from dflash_diag.visibility import Rule, dependence

NEAR = 8
"""Rows before the anchor that are tried one by one; older ones in groups that double."""
LONGEST = 8192
"""Rows of the longest context that is made up to find the end of a window."""


class Finding(NamedTuple):
    """One cause with what was seen of it."""

    cause: str
    evidence: str


class Trials:
    """All trials of one adapter under one rule; fills `cells`, `facts`, `notes` and `untested`."""

    def __init__(self, bench: Bench, rule: Rule) -> None:
        self.bench, self.rule = bench, rule
        self.gradients = Gradients(bench)
        self.cells: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.untested: dict[str, str] = {}
        """Reasons by cause."""
        self.slots = range(rule.first_slot, rule.first_slot + rule.n_proposed)
        """Slots that propose."""

    # --- one block ------------------------------------------------------------------------------

    def alone(self) -> Iterator[Finding]:
        """Rows around each anchor, and the block's own slots."""
        bench = self.bench
        if bench.refusal is not None:
            self.notes.append(f"Rows at the anchor and beyond are refused: {bench.refusal}.")
        for anchor in bench.anchors:
            rows = bench.rows(anchor)
            before = bench.keep(partial(bench.logits, anchor, rows=rows))
            slopes = self.gradients.of(anchor, rows)
            on_rows, on_slots = self._expected(torch.tensor([anchor]), rows)
            for first, last in _groups(anchor, rows):
                x = bench.features.clone()
                x[first : last + 1] = bench.others[first : last + 1]
                self._note(
                    "row",
                    anchor,
                    (first - anchor, last - anchor),
                    change(before, bench.logits(anchor, x, rows=rows)),
                    None if slopes is None else slopes.rows[:, first : last + 1].amax(-1),
                    on_rows[:, 0, :, first : last + 1].any(-1),
                )
            for slot, moved in self._own_slots(anchor, before, rows):
                slope = None if slopes is None or slopes.slots is None else slopes.slots[:, slot]
                self._note("slot", anchor, (slot, slot), moved, slope, on_slots[:, 0, :, 0, slot])
        yield from self._unlike_the_rule("row", "")
        yield from self._own_block()

    def _own_slots(self, anchor: int, before: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
        """Slots of the block with what changing each does: [D]."""
        bench, drafter, token = self.bench, self.bench.drafter, self.bench.token(anchor)
        if not drafter.has("block", "propose_block"):
            other = bench.logits(anchor, rows=rows, token=bench.other_token(token))
            self.untested["mask.block_causality"] = (
                "the adapter has no block and propose_block, so only the anchor's slot can change"
            )
            yield 0, change(before, other)
            return
        state, block = bench.context(rows), drafter.block(token)
        same = bench.keep(lambda: drafter.propose_block(bench.context(rows), block, anchor))
        if float(change(before, same).max()) > bench.rounding:
            self.notes.append("propose_block(block(id)) differs from propose(id).")
        for slot in range(self.rule.block_size):
            moved = drafter.propose_block(state, bench.moved_slot(block, slot), anchor)
            yield slot, change(same, moved)

    def _own_block(self) -> Iterator[Finding]:
        cells = [one for one in self.cells if one["kind"] == "slot"]
        for later, where in ((True, "later"), (False, "earlier")):
            part = [one for one in cells if (one["first"] > one["slot"]) == later]
            extra = [one for one in part if one["seen"] and not one["expected"]]
            wanted = [one for one in part if one["expected"] and one["first"] != one["slot"]]
            missing = [one for one in wanted if not one["seen"]]
            if extra:
                yield Finding(
                    "mask.block_causality",
                    f"slot {extra[0]['slot']} sees the {where} slot {extra[0]['first']} "
                    f"({len(extra)} such cells), which the rule hides",
                )
            if missing and len(missing) == len(wanted):
                yield Finding("mask.block_causality", f"no slot sees the {where} ones")
            elif missing:
                self.notes.append(
                    f"{len(missing)} of {len(wanted)} {where} slots that the rule shows have no "
                    "influence."
                )

    # --- old rows -------------------------------------------------------------------------------

    def reach(self) -> Iterator[Finding]:
        """The oldest row that each slot depends on, against the rule's."""
        bench, rule = self.bench, self.rule
        x, anchor = bench.features, bench.anchors[-1]
        window = rule.oldest_window()
        if window is not None and window + rule.block_size >= anchor:
            anchor = window + 2 * rule.block_size
            longest, spec = LONGEST, bench.drafter.spec
            if spec.max_context is not None:
                longest = min(longest, spec.max_context - spec.block_size)
            if anchor > longest:
                self.untested["mask.window"] = (
                    f"a window of {window} tokens needs a context of {anchor}, and {longest} is "
                    "the longest that is tried here"
                )
                return
            x = repeated(x, anchor)
        found, expected = self._oldest(anchor, x), self._oldest_expected(anchor)
        back = [None if row is None else anchor - row for row in found]
        rule_back = [None if row is None else anchor - row for row in expected]
        self.facts |= {"reach": back, "reach_expected": rule_back, "reach_of": anchor}
        if all(row is None for row in found):
            self.untested["mask.window"] = "no row has any influence"
            return
        if window is None:
            self.notes.append(f"A window above the {anchor} tokens of this context would not show.")
        unlike = [k for k, (one, two) in enumerate(zip(back, rule_back, strict=True)) if one != two]
        if unlike:
            k = unlike[0]
            yield Finding(
                "mask.window",
                f"slot {self.slots[k]} reads {_back(back[k])}, and the rule shows it "
                f"{_back(rule_back[k])} ({len(unlike)} of {len(found)} slots differ)"
                f"{self._window_like(anchor, found)}",
            )

    def _oldest(self, anchor: int, x: Tensor) -> list[int | None]:
        """The oldest row that moves each slot; None where no row does."""
        others = repeated(self.bench.others, len(x))
        before = self.bench.logits(anchor, x)
        known: dict[int, list[bool]] = {0: [False] * len(self.slots)}

        def moves(count: int) -> list[bool]:
            """Whether changing the first ``count`` rows moves each slot."""
            if count not in known:
                changed = torch.cat([others[:count], x[count:]])
                moved = change(before, self.bench.logits(anchor, changed))
                known[count] = (moved > self.bench.still).tolist()
            return known[count]

        oldest: list[int | None] = []
        for k in range(len(self.slots)):
            low, high = 0, anchor
            if not moves(high)[k]:
                oldest.append(None)
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if moves(middle)[k] else (middle, high)
            oldest.append(low)
        slopes = self.gradients.of(anchor, anchor, x)
        if slopes is None:
            return oldest
        # A slope is not lost in the sum over all rows, as a small change may be.
        first = [(row > 0).nonzero()[:1].flatten().tolist() for row in slopes.rows]
        return [
            min([*by_slope, *([] if row is None else [row])], default=None)
            for row, by_slope in zip(oldest, first, strict=True)
        ]

    def _window_like(self, anchor: int, found: list[int | None]) -> str:
        """Which window in every layer reaches as far as was seen, in words."""
        layers = len(self.rule.window)
        size = anchor - min(row for row in found if row is not None) + 1
        for window, kind in ((size, "slot"), (size - 1, "anchor")):
            like = replace(self.rule, window=(window,) * layers, window_rule=kind)
            if window and size <= anchor and self._oldest_expected(anchor, like) == found:
                return f": as with a window of {window} tokens before the {kind}"
        return ""

    def _oldest_expected(self, anchor: int, rule: Rule | None = None) -> list[int | None]:
        rows, _ = dependence(rule or self.rule, torch.tensor([anchor]), anchor)
        return [int(row.int().argmax()) if bool(row.any()) else None for row in rows[0]]

    # --- many blocks ----------------------------------------------------------------------------

    def together(self) -> Iterator[Finding]:
        """Other blocks of the pass, and rows, where several blocks are drafted at once."""
        bench, rule = self.bench, self.rule
        if not bench.drafter.has("forward_train"):
            self.untested["mask.cross_block_leak"] = "the adapter has no forward_train"
            return
        b, n = rule.block_size, len(bench.tokens)
        # Blocks that overlap, that touch, and one far off.
        first = min(bench.anchors[0], max(2, n - 3 * b))
        places = sorted({a for a in (first, first + 2, first + b, first + 2 * b) if a < n})
        anchors = torch.tensor(places, device=bench.tokens.device)
        rows = min(n, places[-1] + b)
        at, ids = torch.arange(rows, device=anchors.device), bench.tokens[anchors]

        def draft(x: Tensor, ids: Tensor) -> Tensor:
            return bench.drafter.forward_train(x[:rows], at, anchors, ids)

        before = bench.keep(lambda: draft(bench.features, ids))
        moved_by: list[Tensor] = []
        for j in range(len(places)):
            other = ids.clone()
            other[j] = bench.other_token(int(ids[j]))
            moved_by.append(change(before, draft(bench.features, other)))
        by_row = []
        tried = range(max(0, places[0] - NEAR), rows)
        for row in tried:
            x = bench.features.clone()
            x[row] = bench.others[row]
            by_row.append(change(before, draft(x, ids)))
        shown = self._shown_blocks(moved_by, anchors)
        on_rows, _ = self._expected(anchors, rows, shown)
        _, on_slots = self._expected(anchors, rows)
        for i, anchor in enumerate(places):
            for j, other_anchor in enumerate(places):
                offset = other_anchor - anchor
                self._note(
                    "block", anchor, (offset, offset), moved_by[j][i], None, on_slots[:, i, :, j, 0]
                )
            for row, moved in zip(tried, by_row, strict=True):
                offset = row - anchor
                if -NEAR <= offset < b:
                    self._note(
                        "train_row", anchor, (offset, offset), moved[i], None, on_rows[:, i, :, row]
                    )
        yield from self._other_blocks()
        yield from self._unlike_the_rule("train_row", "with several blocks in one pass, ")

    def _shown_blocks(self, moved_by: list[Tensor], anchors: Tensor) -> Rule:
        """The rule with the blocks shown that are seen to be, so that rows are judged apart.

        Through another block also the rows that it sees have an influence.
        """
        seen = torch.stack([(moved > self.bench.still).any(-1) for moved in moved_by], dim=1)

        def unlike(rule: Rule) -> int:
            expected = dependence(rule, anchors, 0)[1][..., 0].any(1)
            return int((expected != seen).sum())

        kinds = (self.rule.other_blocks, "hidden", "later", "all")
        return min((replace(self.rule, other_blocks=kind) for kind in kinds), key=unlike)

    def _other_blocks(self) -> Iterator[Finding]:
        cells = [one for one in self.cells if one["kind"] == "block"]
        extra = [one for one in cells if one["seen"] and not one["expected"]]
        if extra:
            worst = max(extra, key=lambda one: one["influence"])
            blocks = {(one["anchor"], one["first"]) for one in extra}
            later = all(one["first"] > 0 for one in extra)
            yield Finding(
                "mask.cross_block_leak",
                f"the token at anchor a{worst['first']:+d} changes slot {worst['slot']} of the "
                f"block at a by {worst['influence']:.2g} ({len(blocks)} pairs of blocks"
                f"{', all of them a later block that is seen' if later else ''})",
            )
        own = [one for one in cells if one["first"] != 0 and one["expected"]]
        if own and not any(one["seen"] for one in own):
            yield Finding("mask.cross_block_leak", "the rule shows other blocks and none is seen")

    # --- tapped layers --------------------------------------------------------------------------

    def taps(self) -> Iterator[Finding]:
        """Each tapped layer left out, two swapped, and the whole context exchanged."""
        bench, ids = self.bench, self.bench.drafter.spec.layer_ids
        anchor = bench.anchors[-1]
        before = bench.logits(anchor)

        def moved(x: Tensor) -> float:
            return float(change(before, bench.logits(anchor, x)).max())

        whole = moved(bench.others)
        self.facts["context_influence"] = whole
        causes = ("hidden.ignored_by_drafter", "layers.missing_or_default", "layers.order")
        if whole <= bench.still:
            yield Finding(causes[0], "exchanging all rows of the context changes nothing")
            self.untested |= dict.fromkeys(causes[1:], "the context has no influence at all")
            return
        left_out: dict[int, float | None] = {}
        for i, layer in enumerate(ids):
            x = bench.features.clone()
            x[:, i] = 0
            left_out[layer] = None if torch.equal(x, bench.features) else moved(x)
        self.facts["tap_influence"] = [[layer, number] for layer, number in left_out.items()]
        dead = [i for i, number in left_out.items() if number is not None]
        dead = [layer for layer in dead if (left_out[layer] or 0.0) <= bench.still]
        if dead:
            yield Finding(causes[1], f"leaving out layer {_listed(dead)} changes nothing")
        empty = [layer for layer, number in left_out.items() if number is None]
        if empty:
            self.notes.append(
                f"The states of layer {_listed(empty)} are zero: nothing to leave out."
            )
        pairs = [(i, i + 1) for i in range(len(ids) - 1) if not {ids[i], ids[i + 1]} <= {*dead}]
        if not pairs:
            self.untested[causes[2]] = "there are no two tapped layers with an influence to swap"
        for i, j in pairs:
            x = bench.features.clone()
            x[:, [i, j]] = x[:, [j, i]]
            # Equal columns still add up in another order.
            same = FACTOR * max(bench.rounded_once, bench.repeated)
            if not torch.equal(x, bench.features) and moved(x) <= same:
                yield Finding(causes[2], f"swapping layers {ids[i]} and {ids[j]} changes nothing")

    # --- shared ---------------------------------------------------------------------------------

    def _expected(
        self, anchors: Tensor, rows: int, rule: Rule | None = None
    ) -> tuple[Tensor, Tensor]:
        """`dependence` by the rule and in serving: [2, A, D, T] and [2, A, D, A, B]."""
        one, two = (
            dependence(each, anchors, rows) for each in (rule or self.rule, self.rule.served())
        )
        return torch.stack([one[0], two[0]]), torch.stack([one[1], two[1]])

    def _note(
        self,
        kind: str,
        anchor: int,
        offsets: tuple[int, int],
        moved: Tensor,
        slope: Tensor | None,
        expected: Tensor,
    ) -> None:
        """Keep one cell for each slot; ``expected`` [2, D] is by the rule and in serving."""
        for k, slot in enumerate(self.slots):
            influence = float(moved[k])
            gradient = None if slope is None else float(slope[k])
            self.cells.append(
                {
                    "kind": kind,
                    "anchor": anchor,
                    "slot": slot,
                    "first": offsets[0],
                    "last": offsets[1],
                    "influence": influence,
                    "gradient": gradient,
                    "seen": influence > self.bench.still or bool(gradient),
                    "expected": bool(expected[0, k]),
                    "served": bool(expected[1, k]),
                }
            )

    def _unlike_the_rule(self, kind: str, where: str) -> Iterator[Finding]:
        """Rows at the anchor, beyond it, and shortly before it that the rule says otherwise of."""
        cells = [one for one in self.cells if one["kind"] == kind]
        wrong = [one for one in cells if one["seen"] != one["expected"]]
        at = [one for one in wrong if one["first"] == 0]
        for cause, part, which in (
            ("mask.anchor_included", at, "the anchor's own row"),
            ("mask.future_included", [one for one in wrong if one["first"] > 0], "a later row"),
        ):
            extra = [one for one in part if one["seen"]]
            if extra:
                worst = max(extra, key=lambda one: one["influence"])
                yield Finding(
                    cause,
                    f"{where}{which} (a{worst['first']:+d}) changes slot {worst['slot']} by "
                    f"{worst['influence']:.2g}, and the rule hides it",
                )
        if at and not any(one["seen"] for one in at):
            yield Finding(
                "mask.anchor_included",
                f"{where}the rule shows the anchor's own row and it is not read",
            )
        if not any(one["seen"] for one in cells):
            return
        # Rows just before the anchor are inside any window.
        newest = [one for one in cells if one["first"] == one["last"] == -1]
        if newest and not any(one["seen"] for one in newest if one["expected"]):
            yield Finding(
                "mask.rows_hidden", f"{where}the row just before the anchor (a-1) is not read"
            )


def _groups(anchor: int, rows: int) -> Iterator[tuple[int, int]]:
    """First and last of the rows that are changed together: single ones near the anchor."""
    last, size = anchor - NEAR - 1, NEAR
    old = []
    while last >= 0:
        old.append((max(0, last - size + 1), last))
        last, size = last - size, 2 * size
    yield from reversed(old)
    yield from ((row, row) for row in range(max(0, anchor - NEAR), rows))


def _back(distance: int | None) -> str:
    return "no row" if distance is None else f"back to a-{distance}"


def _listed(layers: list[int]) -> str:
    return ", ".join(map(str, layers))
