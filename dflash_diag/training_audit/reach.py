"""What the draft logits depend on: rows of the states, layers, other blocks, tokens, the mask.

Every question is asked by a finite change, which no ``detach`` hides, and by a gradient where the
graph reaches the states. Rows change places with other rows of the text, so that statistics taken
over the whole of it (a noise level, say) stay what they are.

Symbols: T tokens, K layers, H hidden size, D proposed tokens, a anchor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from dflash_diag.adapters.bench import change
from dflash_diag.training_audit.calling import Caller, Output, StepError
from dflash_diag.training_audit.graph import loss_gradient
from dflash_diag.training_audit.material import Material
from dflash_diag.training_audit.properties import Property, fault, fine, untested
from dflash_diag.training_audit.soundness import largest

REACH_IDS = (
    "mask.anchor_included",
    "mask.future_included",
    "mask.cross_block_leak",
    "hidden.ignored_by_drafter",
    "layers.last_layer_in_fc",
    "layers.offset",
    "layers.missing_or_default",
    "training.leak",
)
NOT_VISIBLE = {
    "mask.block_causality": "the slots behind the anchor hold the mask token, and nothing that is "
    "handed to a step changes them: the weights say what they were trained for",
    "position.block_offset": "positions are made inside the step, and a step has no other that it "
    "could be compared with: the weights say what they were trained for",
}
"""Causes that no step shows from outside, with the reason."""


@dataclass(eq=False)
class Reach:
    """All trials on the draft logits of one step."""

    call: Caller
    first: Output
    still: float
    """Relative change up to which logits have not moved."""
    noisy: bool = False
    """Whether noise_seed moves them."""
    offset: int = 0
    """Of the labels against a+k: where the loss mask has to be read."""
    influence: dict[str, Any] = field(default_factory=dict)
    """What the plot shows: relative changes by what was changed."""
    leaks: list[str] = field(default_factory=list)
    """Leaks that are no mask."""
    notes: list[str] = field(default_factory=list)

    def properties(self) -> Iterator[Property]:
        """Every property, in the order of `REACH_IDS`."""
        why, made = "", set()
        try:
            alone, anchor = self._alone()
            slopes = self._slopes(anchor)
            for row in chain(
                self._rows(alone, anchor, slopes),
                self._blocks(),
                self._layers(alone, anchor, slopes),
                self._inputs(alone, anchor),
            ):
                made.add(row.id)
                yield row
        except StepError as error:
            why = f"with other inputs than at first, {error}"
        yield from (untested(one, why) for one in REACH_IDS if one not in made)

    # --- one block by itself ----------------------------------------------------------------------

    def _alone(self) -> tuple[Output, int]:
        """The step with one anchor, so that whatever a block sees, it is no other block."""
        anchors = self.call.material.anchors
        anchor = anchors[len(anchors) // 2]
        return self.call(anchors=(anchor,)), anchor

    def _moved(self, before: Output, anchor: int, **given: Any) -> float:
        """Largest relative change of the block's slots."""
        return largest(change(before.logits, self.call(anchors=(anchor,), **given).logits))

    def _slopes(self, anchor: int) -> Tensor | None:
        """[T, K] size of the gradient of the block's logits by row and layer; None without one."""
        x = self.call.material.states.detach().clone().requires_grad_()
        if not x.is_floating_point():
            return None
        try:
            logits = self.call(anchors=(anchor,), states=x).logits
            generator = torch.Generator().manual_seed(0)
            drawn = torch.randn(logits.shape, generator=generator).to(logits)
            if not logits.requires_grad:
                return None
            (found,) = torch.autograd.grad((logits * drawn).sum(), x, allow_unused=True)
        except (StepError, RuntimeError) as error:
            self.notes.append(f"No gradient by the states: {' '.join(str(error).split())[:160]}.")
            return None
        return None if found is None else found.detach().double().norm(dim=-1).cpu()

    def _rows(self, alone: Output, anchor: int, slopes: Tensor | None) -> Iterator[Property]:
        later = self._tried(alone, anchor, slice(anchor + 1, None))
        own = self._own_row(alone, anchor, later)
        self.influence |= {"anchor row": own, "later rows": later}
        for id_, name, moved, part in (
            ("mask.anchor_included", "the anchor's own state", own, slice(anchor, anchor + 1)),
            ("mask.future_included", "later states", later, slice(anchor + 1, None)),
        ):
            steep = None if slopes is None else float(slopes[part].max())
            yield self._judged(id_, moved, steep, name)

    def _tried(self, alone: Output, anchor: int, rows: slice, column: Any = slice(None)) -> float:
        """Influence of some rows: they change places, and where that moves nothing, their signs.

        One exchange may bring like to like, in a text that repeats itself, so that several are
        tried; and a drafter without positions notices none. With noise on, signs are left alone: a
        noise level that is taken over the whole text would notice those.
        """
        states = self.call.material.states
        part, x, moved = states[rows, column], states.clone(), 0.0
        n = len(part)
        exchanged = [part.roll(max(1, n // 2), 0), part.flip(0), part.roll(max(1, n // 3), 0)]
        for other in [*exchanged, *([] if self.noisy else [-part])]:
            x[rows, column] = other
            moved = max(moved, self._moved(alone, anchor, states=x))
            if moved > self.still:
                break
        return moved

    def _own_row(self, alone: Output, anchor: int, later: float) -> float:
        """Influence of the anchor's own row: it changes places with the later row least like it.

        Where later rows have an influence of their own, it is replaced by the least like of all.
        """
        states = self.call.material.states
        x, first = states.clone(), 0 if later > self.still else anchor + 1
        apart = (states[first:] - states[anchor]).flatten(1).norm(dim=-1)
        other = first + int(apart.argmax())
        x[anchor] = states[other]
        if other > anchor and later <= self.still:
            x[other] = states[anchor]
        return self._moved(alone, anchor, states=x)

    def _judged(self, id_: str, moved: float, steep: float | None, name: str) -> Property:
        expected = f"no dependence on {name}"
        by_slope = "" if steep is None else f" The gradient there is {'not ' * (steep > 0)}zero."
        by_slope_alone = (steep or 0) > 0 and not self.noisy
        if moved <= self.still and not by_slope_alone:
            return fine(id_, "logits do not move", expected, by_slope.strip())
        cut = ""
        if steep == 0:
            cut = " A detach hides it from the gradient, not from training."
        evidence = f"Changing {name} moves the block's logits by {moved:.1%}.{by_slope}{cut}"
        return fault(id_, f"logits move by {moved:.1%}", expected, evidence)

    # --- other blocks -----------------------------------------------------------------------------

    def _blocks(self) -> Iterator[Property]:
        """Move the anchors behind (or before) a block: it must not notice."""
        id_, expected = "mask.cross_block_leak", "no dependence on other blocks of the pass"
        anchors = self.call.material.anchors
        middle = len(anchors) // 2
        before, moves = self.first.logits, {}
        # The other anchors move by one; the blocks looked at stay where they are.
        for name, moved, kept in (
            ("later blocks", range(middle, len(anchors)), slice(0, middle)),
            ("earlier blocks", range(middle), slice(middle, len(anchors))),
        ):
            places = tuple(a + (i in moved) * 2 for i, a in enumerate(anchors))
            if sorted(set(places)) != list(places):
                places = tuple(a + (i in moved) for i, a in enumerate(anchors))
            if sorted(set(places)) != list(places):
                continue
            after = self.call(anchors=places).logits
            moves[name] = largest(change(before[kept], after[kept]))
        self.influence |= moves
        seen = [f"{name} by {x:.1%}" for name, x in moves.items() if x > self.still]
        if not moves:
            yield untested(id_, "the anchors leave no room to be moved", expected=expected)
        elif seen:
            yield fault(
                id_,
                f"logits move with {' and '.join(seen)}",
                expected,
                f"Moving the anchors of other blocks moves a block's logits: {' and '.join(seen)}. "
                "Their anchors' tokens are its labels.",
            )
        else:
            yield fine(id_, "logits do not move", expected, f"When {' or '.join(moves)} move.")

    # --- layers -----------------------------------------------------------------------------------

    def _layers(self, alone: Output, anchor: int, slopes: Tensor | None) -> Iterator[Property]:
        """Change one layer of the rows below the anchor at a time."""
        m = self.call.material
        moves: dict[int, float] = {}
        for column, layer in enumerate(m.layer_ids):
            moved = self._tried(alone, anchor, slice(anchor), column)
            moves[layer] = max(moves.get(layer, 0.0), moved)
        self.influence["layers"] = {str(layer): moved for layer, moved in moves.items()}
        seen = set() if slopes is None or self.noisy else _seen(slopes[:anchor], m.layer_ids)
        read = [layer for layer, moved in moves.items() if moved > self.still or layer in seen]
        steep = "" if slopes is None else _steep(slopes[:anchor], m.layer_ids)
        said = f"layers {_names(read)}"
        expected = "dependence on the tapped layers' states"
        if read:
            yield fine("hidden.ignored_by_drafter", said, expected, steep)
        else:
            yield fault(
                "hidden.ignored_by_drafter",
                "no layer has an influence",
                expected,
                f"No state below the anchor moves the logits. {steep}",
                "Pass the states on: as it is, the drafter learns from the anchor's token alone.",
            )
        yield self._last(moves, read, steep)
        yield from self._declared(read)

    def _last(self, moves: dict[int, float], read: list[int], steep: str) -> Property:
        id_, expected = "layers.last_layer_in_fc", "draft logits without the last layer"
        m = self.call.material
        if not m.is_last:
            return untested(id_, "the last layer is not among the states", expected=expected)
        moved = moves[m.last_layer]
        if m.last_layer not in read:
            return fine(id_, "logits do not move", expected, steep)
        return fault(
            id_,
            f"logits move by {moved:.1%}",
            expected,
            f"Layer {m.last_layer} is among the inputs of fc. Its states are one norm and the head "
            f"away from the next token, and some servers cannot capture it. {steep}",
        )

    def _declared(self, read: list[int]) -> Iterator[Property]:
        """Whether the layers that are read are those that the drafter declares.

        The last layer is left out: it is a finding of its own.
        """
        ids = ("layers.offset", "layers.missing_or_default")
        m = self.call.material
        if m.taps is None or not read:
            why = (
                "no layer has an influence"
                if m.taps
                else "no drafter says what it taps (--drafter)"
            )
            yield from (untested(one, why) for one in ids)
            return
        expected = f"layers {_names(m.taps)}, as the drafter declares"
        missing = sorted(set(m.taps) - set(m.layer_ids))
        if missing:
            why = f"layers {_names(missing)} are not among the states"
            yield from (untested(one, why, expected=expected) for one in ids)
            return
        found, declared = (sorted({*some} - {m.last_layer}) for some in (read, m.taps))
        said = f"layers {_names(read)}"
        evidence = "Changing these layers moves the logits, and changing others does not."
        apart = {i - j for i, j in zip(found, declared, strict=False)}
        wrong = None
        if found != declared:
            wrong = ids[0] if len(found) == len(declared) and len(apart) == 1 else ids[1]
        for one in ids:
            if one == wrong:
                remedy = "Tap the layers that are declared, or declare those that are tapped."
                yield fault(one, said, expected, evidence, remedy)
            else:
                yield fine(one, said, expected)

    # --- tokens and the mask ----------------------------------------------------------------------

    def _inputs(self, alone: Output, anchor: int) -> Iterator[Property]:
        """Tokens behind the anchor are labels; neither they nor the loss mask are inputs."""
        id_, expected = "training.leak", "no dependence on labels or on the loss mask"
        m = self.call.material
        tokens = m.tokens.clone()
        tokens[anchor + 1 :] = m.tokens[anchor + 1 :].flip(0)
        by_token = self._moved(alone, anchor, tokens=tokens)
        self.influence["later tokens"] = by_token
        if by_token > self.still:
            self.leaks.append(f"tokens behind the anchor move the logits by {by_token:.1%}")
        hole = hole_of(m, alone.logits.shape[1], self.offset)
        if hole is not None:
            self._through_the_mask(*hole)
        if self.leaks:
            said = "; ".join(self.leaks)
            yield fault(
                id_,
                said,
                expected,
                f"{said[:1].upper()}{said[1:]}.",
                "Give the drafter no token but the anchor's, and train no slot whose label the "
                "loss mask leaves out.",
            )
        else:
            evidence = "Later tokens and a hole in the loss mask move nothing."
            yield fine(id_, "none", expected, evidence)

    def _through_the_mask(self, block: int, slot: int) -> None:
        """Leave one label out of the loss mask: its slot must not be trained on."""
        m = self.call.material
        at = m.anchors[block] + slot + self.offset
        mask, tokens = m.loss_mask.clone(), m.tokens.clone()
        mask[at] = False
        holed = self.call(loss_mask=mask)
        tokens[at] = m.tokens[int((m.tokens != m.tokens[at]).int().argmax())]
        moved = largest(change(self.first.logits, holed.logits))
        if moved > self.still:
            self.leaks.append(f"the loss mask moves the draft logits by {moved:.1%}")
        gradient = loss_gradient(holed.loss, holed.logits)
        size = None if gradient is None else gradient.norm(dim=-1)[block]
        if size is not None and bool(size[slot - 1] > 1e-7 * size.max()):
            zero = (size <= 1e-7 * size.max()).nonzero().flatten().tolist()
            instead = f", and slot {zero[0] + 1} is left out in its place" if zero else ""
            self.leaks.append(
                f"slot {slot} is trained on although the loss mask leaves its label out{instead}"
            )
            return
        again = self.call(loss_mask=mask, tokens=tokens)
        off = abs(float(again.loss.detach()) - float(holed.loss.detach()))
        if off > max(self.still, 1e-6) * abs(float(holed.loss.detach())):
            self.leaks.append("a token that the loss mask leaves out moves the loss")


def hole_of(m: Material, d: int, offset: int) -> tuple[int, int] | None:
    """A block and a slot from 1 whose label is at no anchor and not right behind one."""
    used = {a + i for a in m.anchors for i in (0, 1)}
    for block in range(len(m.anchors) // 2, len(m.anchors)):
        for slot in range(2, d):
            if m.anchors[block] + slot + offset not in used:
                return block, slot
    return None


def _names(layers: Iterable[int]) -> str:
    return ", ".join(map(str, layers))


def _steep(slopes: Tensor, layer_ids: tuple[int, ...]) -> str:
    """Which layers have a gradient below the anchor."""
    return f"By gradient: {_names(sorted(_seen(slopes, layer_ids))) or 'no layer'}."


def _seen(slopes: Tensor, layer_ids: tuple[int, ...]) -> set[int]:
    """Layers of slopes [T, K] with a gradient somewhere."""
    sizes = slopes.norm(dim=0).tolist()
    return {layer for layer, size in zip(layer_ids, sizes, strict=True) if size > 0}
