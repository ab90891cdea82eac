"""The hidden-state audit: a capture is what it claims, and its target computes one thing.

Some checks look at a capture alone, some compare it with the live target, and some ask whether the
target's states depend on what they must not depend on: the batch, padding, packing, the length of
a chunk, whether tokens came at once or one by one. Each returns rows that a diagnostic judges.

Symbols: N sequences, T tokens, R captured rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_diag.bundle import Capture
from dflash_diag.divergence import ASSUMED_FLOOR, FACTOR, deviation
from dflash_diag.errors import CaptureError
from dflash_diag.hidden_states import EMBEDDING, recorded
from dflash_diag.identity import Identity, identify, layer_trace
from dflash_diag.modules import OUTPUT, Place, traced
from dflash_diag.references import ROUNDING
from dflash_diag.targets import Target

FLOAT16_MAX = 65504.0
ENOUGH = 4
"""Prompts with wrong states after which a capture is known to be wrong."""
PADS = 4
"""Padding tokens: as many as the convolution of a linear-attention layer reaches back."""
CHUNK_LENGTHS = (63, 64, 65)
"""Around the 64 tokens that the chunked recurrence takes at a time."""
CHECK_TOKENS = 96
"""Length of the sequence on which the target is examined: a chunk and a half."""
FEWEST_TOKENS = 3 * PADS
"""Shorter sequences leave nothing of a third, or of what padding is taken from."""

Rows = list[dict[str, Any]]
States = dict[int, Tensor]
"""Layer id to states [N, T, H]."""


class Unsupported(Exception):
    """What a check asks for cannot be computed here; its text is the reason."""


class Runner(Protocol):
    """Computes a target's states in all the ways that must agree."""

    def plain(self, ids: Tensor) -> States:
        """Sequences [N, T] of one length, in one forward."""

    def padded(self, ids: Tensor, mask: Tensor) -> States:
        """Sequences [N, T] padded on the left; ``mask`` is 1 at real tokens."""

    def packed(self, documents: Sequence[Sequence[int]]) -> States:
        """Several documents in one row, kept apart: [1, sum of lengths, H]."""

    def decoded(self, ids: Tensor, n_prefill: int) -> States:
        """One sequence [1, T]: ``n_prefill`` tokens at once, the others one by one, by a cache."""


@dataclass(frozen=True, eq=False)
class TargetRunner:
    """`Runner` of a loaded target, for all its layers and the embedding."""

    target: Target

    @property
    def layers(self) -> range:
        return range(EMBEDDING, self.target.n_layers)

    def plain(self, ids: Tensor) -> States:
        return self._run(ids)

    def padded(self, ids: Tensor, mask: Tensor) -> States:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        device = self.target.device
        return self._run(ids, attention_mask=mask.to(device), position_ids=positions.to(device))

    def packed(self, documents: Sequence[Sequence[int]]) -> States:
        lengths = [len(d) for d in documents]
        ends = torch.tensor([0, *lengths]).cumsum(0).int().to(self.target.device)
        ids = torch.tensor([[i for d in documents for i in d]])
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.target.device)
        order = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        try:
            return self._run(
                ids,
                position_ids=positions,
                cu_seq_lens_q=ends,
                cu_seq_lens_k=ends,
                max_length_q=max(lengths),
                max_length_k=max(lengths),
                seq_idx=order.int()[None].to(self.target.device),
            )
        except ValueError as error:
            raise Unsupported(f"the {self.target.backend} backend: {error}") from error

    def decoded(self, ids: Tensor, n_prefill: int) -> States:
        cache = self.target.caches.new()
        arguments = self.target.caches.arguments(cache)
        parts = [self._run(ids[:, :n_prefill], **arguments)]
        parts += [self._run(ids[:, [t]], **arguments) for t in range(n_prefill, ids.shape[1])]
        return {layer: torch.cat([p[layer] for p in parts], dim=1) for layer in parts[0]}

    @torch.inference_mode()
    def _run(self, ids: Tensor, **arguments: Any) -> States:
        arguments = {"use_cache": False, **arguments}
        with recorded(self.target.parts, self.layers) as kept:
            self.target.model(input_ids=ids.to(self.target.device), logits_to_keep=1, **arguments)
        return dict(kept)


Floor = Callable[[int], float]
"""Relative RMS of a layer's states that rounding alone explains."""


def floor_of(numbers: Mapping[tuple[int, str], Mapping[str, Any]] | None) -> Floor:
    """The measured floors of layers as a function; None assumes `ASSUMED_FLOOR` for each."""

    def floor(layer: int) -> float:
        if numbers is None or (layer, OUTPUT) not in numbers:
            return ASSUMED_FLOOR
        # An embedding is looked up, not computed: its floor would be nothing at all.
        return max(numbers[layer, OUTPUT]["rel_rms"] or 0.0, 1e-6)

    return floor


# --- the target -----------------------------------------------------------------------------------


def check_batch(runner: Runner, ids: Sequence[int], floor: Floor) -> Rows:
    """Three sequences of one length together, and each alone."""
    third = len(ids) // 3
    rows = torch.tensor([list(ids[i * third : (i + 1) * third]) for i in range(3)])
    together = runner.plain(rows)
    found: Rows = []
    for n in range(len(rows)):
        alone = runner.plain(rows[[n]])
        found += _compared(f"sequence {n + 1} of 3", _row(together, n), _row(alone, 0), floor)
    return found


def check_padding(runner: Runner, ids: Sequence[int], floor: Floor) -> Rows:
    """Padded on the left, alone and beside a longer sequence, against the same without padding."""
    short = list(ids[: len(ids) - PADS])
    expected = _row(runner.plain(torch.tensor([short])), 0)
    padded = [0] * PADS + short
    found: Rows = []
    for n, batch in ((1, [padded]), (2, [padded, list(ids)])):
        mask = torch.ones(n, len(ids), dtype=torch.long)
        mask[0, :PADS] = 0
        states = _row(runner.padded(torch.tensor(batch), mask), 0)
        real = {layer: value[PADS:] for layer, value in states.items()}
        found += _compared(f"batch of {n}", real, expected, floor)
    return found


def check_packing(runner: Runner, ids: Sequence[int], floor: Floor) -> Rows:
    """Two documents in one row against each alone.

    Raises
    ------
    Unsupported
        This backend cannot keep documents apart.
    """
    middle = len(ids) // 2 - 3
    documents = [ids[:middle], ids[middle:]]
    packed = _row(runner.packed(documents), 0)
    found: Rows = []
    start = 0
    for n, document in enumerate(documents):
        alone = _row(runner.plain(torch.tensor([list(document)])), 0)
        own = {k: v[start : start + len(document)] for k, v in packed.items()}
        found += _compared(f"document {n + 1} of 2", own, alone, floor)
        start += len(document)
    return found


def check_chunks(runner: Runner, ids: Sequence[int], floor: Floor) -> Rows:
    """Sequences of 63, 64 and 65 tokens against the same tokens inside a longer one.

    Raises
    ------
    Unsupported
        There are not that many tokens.
    """
    whole = _row(runner.plain(torch.tensor([list(ids)])), 0)
    lengths = [n for n in CHUNK_LENGTHS if n < len(ids)]
    if not lengths:
        raise Unsupported(f"the capture's {len(ids)} tokens fill no chunk of 64")
    found: Rows = []
    for length in lengths:
        part = _row(runner.plain(torch.tensor([list(ids[:length])])), 0)
        same = {layer: value[:length] for layer, value in whole.items()}
        found += _compared(f"{length} tokens", part, same, floor)
    return found


def check_decoding(runner: Runner, ids: Sequence[int], floor: Floor) -> Rows:
    """Half of a sequence at once and the rest token by token, against one forward."""
    tokens = torch.tensor([list(ids)])
    whole = _row(runner.plain(tokens), 0)
    steps = _row(runner.decoded(tokens, len(ids) // 2), 0)
    return _compared("prefill and decode", steps, whole, floor)


TARGET_CHECKS: Mapping[str, Callable[[Runner, Sequence[int], Floor], Rows]] = {
    "hidden.batch": check_batch,
    "hidden.padding": check_padding,
    "hidden.packing": check_packing,
    "hidden.chunks": check_chunks,
    "hidden.decode": check_decoding,
}
"""Checks of a target, by the id of their diagnostic."""


def _row(states: States, n: int) -> States:
    """States [T, H] of one sequence of a batch, on the CPU."""
    return {layer: value[n].float().cpu() for layer, value in states.items()}


def _compared(case: str, x: States, y: States, floor: Floor) -> Rows:
    rows = []
    for layer, value in x.items():
        numbers = deviation(value, y[layer])
        limit = floor(layer)
        error = numbers["rel_rms"]
        rows.append(
            {
                "case": case,
                "layer": layer,
                "rel_rms": error,
                "floor": limit,
                "times_floor": float("inf") if error is None else error / limit,
                "first_rows": _first_rows(value, y[layer]),
            }
        )
    return rows


def _first_rows(x: Tensor, y: Tensor, n: int = PADS) -> float:
    """Relative RMS of the first rows alone, where padding and neighbours show most."""
    return float((x[:n] - y[:n]).norm() / y[:n].norm().clamp(min=1e-30))


# --- a capture ------------------------------------------------------------------------------------


def check_rows(capture: Capture) -> Rows:
    """One row a prompt and layer: as many states as tokens, and what is not a number in them."""
    rows = []
    for i, prompt in enumerate(capture.prompts):
        expected = len(capture.rows(i))
        for layer in capture.layers(i):
            states = capture.states(i, [layer])[:, 0]
            finite = torch.isfinite(states).all(-1)
            magnitudes = states[finite].float().abs()
            largest = magnitudes.max() if bool(finite.any()) else torch.tensor(0.0)
            rows.append(
                {
                    "prompt": prompt.id,
                    "layer": layer,
                    "n_tokens": expected,
                    "n_rows": len(states),
                    "nan_rows": int(states.isnan().any(-1).sum()),
                    "inf_rows": int(states.isinf().any(-1).sum()),
                    "zero_rows": int((states == 0).all(-1).sum()),
                    "first_bad": _first(~finite | (states == 0).all(-1)),
                    "largest": float(largest),
                    "rms": float(states[finite].float().square().mean().sqrt()),
                    "dtype": str(states.dtype).removeprefix("torch."),
                }
            )
    return rows


def _first(flags: Tensor) -> int | None:
    found = flags.nonzero()
    return int(found[0]) if len(found) else None


def check_argmax(capture: Capture, choices: Callable[[int], tuple[Tensor, Tensor]]) -> Rows:
    """One row a prompt: whether the head, on the normed last layer, chooses as the target does.

    Of the choices that differ, ``n_unnormed`` are the target's where the norm is left out.

    Parameters
    ----------
    choices
        The target's own logits of a prompt, as its best ids [R] and the margins [R] to the second.

    Raises
    ------
    Unsupported
        The capture does not hold the last layer, or nothing to apply the head with.
    """
    n_layers = capture.target_facts.get("n_layers")
    last = None if n_layers is None else int(n_layers) - 1
    if last is None or all(last not in capture.layers(i) for i in range(len(capture))):
        raise Unsupported("the capture does not hold the last layer's states (--layers around)")
    try:
        head = capture.head.float()
    except CaptureError as error:
        raise Unsupported(str(error)) from error
    relative = ROUNDING[str(capture.target_facts.get("dtype", "bfloat16"))]
    rows = []
    for i, prompt in enumerate(capture.prompts):
        if last not in capture.layers(i):
            continue
        states = capture.states(i, [last])[:, 0].float()
        logits = capture.final_norm(states) @ head.T
        top = logits.topk(2).values
        ours = logits.argmax(-1)
        ids, margins = choices(i)
        differs = ours != ids
        noise = 4 * relative * top[:, 0].abs()
        # What is not a number is no tie.
        decisive = differs & ~((margins <= noise) | (top[:, 0] - top[:, 1] <= noise))
        unnormed = (states[differs] @ head.T).argmax(-1) == ids[differs]
        rows.append(
            {
                "prompt": prompt.id,
                "n": len(ids),
                "n_equal": int((~differs).sum()),
                "n_decisive": int(decisive.sum()),
                "n_unnormed": int(unnormed.sum()),
                "largest_margin": float(margins[differs].max()) if bool(differs.any()) else 0.0,
            }
        )
    return rows


def check_identity(
    capture: Capture,
    target: Target,
    floor: Floor,
    *,
    tick: Callable[[], None] = lambda: None,
) -> Rows:
    """One row a prompt and layer: what the captured states are, beside the live target's.

    The modules inside a layer and the next are computed only where its states are not what they
    claim. That takes long, so that after `ENOUGH` prompts with such states the others are left out.
    """
    found: Rows = []
    runner, n_wrong = TargetRunner(target), 0
    for i, prompt in enumerate(capture.prompts):
        if n_wrong == ENOUGH:
            break
        tokens = capture.tokens(i)
        live = layer_trace(_row(runner.plain(tokens[None]), 0))
        for layer in capture.layers(i):
            states = capture.states(i, [layer])[:, 0].float()
            places = capture.rows(i)
            made = identify(layer, states, live, floor=_by_place(floor), rows=places)
            if made.rough or made.kind not in ("right", "shifted", "other_layer"):
                made = _look_inside(target, tokens, layer, states, live, floor, places)
            if made.kind == "unknown":
                truth = live[Place(layer, OUTPUT)][places]
                made = _transposed(capture, i, made, truth, FACTOR * floor(layer))
            found.append({"prompt": prompt.id, **made.to_json(), "floor": floor(layer)})
        n_wrong += any(row["kind"] != "right" and row["prompt"] == prompt.id for row in found)
        tick()
    return found


def _look_inside(
    target: Target,
    tokens: Tensor,
    layer: int,
    states: Tensor,
    live: Mapping[Place, Tensor],
    floor: Floor,
    rows: Tensor,
) -> Identity:
    near = [i for i in (layer, layer + 1) if 0 <= i < target.n_layers]
    with torch.inference_mode(), traced(target.parts, near) as inside:
        target.logits(tokens[None], last_only=True)
    trace = {**{k: v.float().cpu() for k, v in inside.items()}, **live}

    def norm(value: Tensor) -> Tensor:
        weight = target.parts.final_norm.weight
        with torch.inference_mode():
            return target.parts.final_norm(value.to(weight.device, weight.dtype)).float().cpu()

    return identify(layer, states, trace, floor=_by_place(floor), rows=rows, final_norm=norm)


def _transposed(capture: Capture, i: int, made: Identity, truth: Tensor, limit: float) -> Identity:
    """States [T, K, H] that were laid out as [T, H, K] and only called so, or what they were."""
    layers = capture.layers(i)
    whole = capture.states(i, layers).float()
    r, k, h = whole.shape
    error = deviation(whole.reshape(r, h, k)[..., layers.index(made.layer)], truth)["rel_rms"]
    if k == 1 or error is None or error > limit:
        return made
    text = f"layer {made.layer}, but laid out as [T, H, K] and read as [T, K, H]"
    return replace(made, kind="transposed", explained=error, text=text)


def _by_place(floor: Floor) -> Callable[[Place], float]:
    return lambda place: floor(place.layer)


def check_sequence(capture: Capture, n_tokens: int = CHECK_TOKENS) -> list[int]:
    """Tokens on which to examine the target: the capture's own, one prompt after the other.

    Raises
    ------
    Unsupported
        There are fewer than twelve, too few to be split, padded and packed.
    """
    found: list[int] = []
    for i in range(len(capture)):
        found += capture.tokens(i).tolist()
        if len(found) >= n_tokens:
            break
    if len(found) < FEWEST_TOKENS:
        raise Unsupported(f"the capture holds {len(found)} tokens, and {FEWEST_TOKENS} are needed")
    return found[:n_tokens]
