"""Texts that a drafter trained on, as trainers keep them, and the anchors that its trainer draws.

A file holds the rows of one split: a ``.safetensors`` with ``tokens`` [n, T] and either ``prefix``
[n] (tokens that were given) or ``loss_mask`` [n, T] (tokens that are learned), and where they were
kept ``anchors`` [n, A], ``anchor_seed`` [n] and, for packed rows, ``documents`` [n, T] (`PADDING`
where there is none); or a ``.jsonl`` with the same by row, without ``s``: ``{"tokens", "prefix"}``
and so on. A folder holds one file a split, named after it.

A packed row is taken apart into its documents: a trainer that masks its documents from each other
and counts positions anew in each computes the same for them.

Symbols: n rows, T tokens, A anchors, B block size, a an anchor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dflash_diag.bundle import CapturedPrompt
from dflash_diag.errors import BadInput
from dflash_diag.masks import PADDING
from dflash_diag.storage import read_text

TRAIN, VALIDATION = "train", "validation"
NAMES = {"train": TRAIN, "training": TRAIN}
NAMES |= dict.fromkeys(("validation", "valid", "val", "eval", "test", "heldout"), VALIDATION)
"""What a split's file may be called."""
MOST = 2**62
"""No token and no position is larger."""
Mask = NDArray[np.bool_]
Positions = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TrainingText:
    """One document that was trained on."""

    id: str
    tokens: Positions
    """[T]."""
    learned: Mask
    """[T] tokens that the loss mask keeps."""
    prefix: int
    """P: tokens before the first that the model was to write."""
    row: int
    """The row that it lay in."""
    start: int
    """Where in that row it began."""
    row_length: int
    anchors: Positions | None = None
    """Those that the trainer drew, if it kept them."""
    seed: int | None = None
    """Of the row's anchors, if it was kept."""

    @property
    def written(self) -> Mask:
        """[T] tokens that the model was to write: learned, and after the prefix."""
        return self.learned & (np.arange(len(self.tokens)) >= self.prefix)


Split = Sequence[TrainingText]


def read_training_sequences(path: str | Path) -> dict[str, Split]:
    """Read all splits that a file or folder holds, `TRAIN` first.

    Raises
    ------
    BadInput
        Nothing there, or a row that is no text with a prefix or a loss mask.
    """
    named = _files(Path(path))
    order = sorted(named, key=lambda name: (name != TRAIN, name))
    return {name: _split(named[name]) for name in order}


def check_ids(splits: Mapping[str, Split], vocab_size: int | None) -> None:
    """Refuse texts with tokens that the target does not have.

    Raises
    ------
    BadInput
        An id below 0, or beyond the vocabulary where its size is known.
    """
    for name, split in splits.items():
        for text in split:
            least, most = int(text.tokens.min()), int(text.tokens.max())
            if least < 0 or (vocab_size is not None and most >= vocab_size):
                raise BadInput(
                    f"--training-sequences: {name}, {text.id} holds token "
                    f"{least if least < 0 else most}",
                    f"the target's tokens, 0 to {vocab_size - 1}" if vocab_size else "ids from 0",
                    "give the texts of this target",
                )


def _files(path: Path) -> dict[str, Path]:
    """The file of each split."""
    files = [path] if path.is_file() else sorted(path.glob("*"))
    named = {NAMES.get(file.stem, file.stem): file for file in files if file.suffix in _READ}
    if path.is_dir():
        named = {name: file for name, file in named.items() if name in NAMES.values()}
    if not named:
        raise BadInput(
            f"--training-sequences {path}: no sequences there",
            "a .safetensors or .jsonl file, or a folder with train and validation of them",
        )
    for file in named.values():
        if not file.is_file():  # left out silently, it would leave fewer texts
            raise BadInput(f"{file} is no file", "a .safetensors or .jsonl file")
    return named


def _split(file: Path) -> Split:
    rows = list(_READ[file.suffix](file))
    if not rows:
        raise BadInput(f"{file} holds no row", "at least one")
    return [text for i, row in enumerate(rows) for text in _documents(row, i, f"{file}, row {i}")]


def _of_safetensors(file: Path) -> Iterator[dict[str, Any]]:
    try:
        columns = load_file(file)
    except (OSError, SafetensorError, AttributeError, TypeError, KeyError) as error:
        # The last three for types that numpy does not have.
        raise BadInput(f"{file} cannot be read ({error})", "a safetensors file") from error
    names = {"anchors": "anchors", "documents": "documents", "anchor_seed": "anchor_seed"}
    names |= {"tokens": "tokens", "prefix": "prefix", "loss_mask": "loss_mask"}
    if "tokens" not in columns or columns["tokens"].ndim != 2:
        raise BadInput(f"{file} has no tokens [n, T]", "tokens [n, T], prefix [n] or loss_mask")
    n = len(columns["tokens"])
    uneven = [name for name in names if name in columns and len(columns[name]) != n]
    if uneven:
        raise BadInput(f"{file}: {uneven[0]} has {len(columns[uneven[0]])} rows", f"{n}")
    for i in range(n):
        yield {name: columns[name][i] for name in names if name in columns}


def _of_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_text(file, "a .jsonl file").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadInput(f"{file}, line {number} is no JSON", '{"tokens": [...], ...}') from error
        if not isinstance(row, dict):
            raise BadInput(f"{file}, line {number} is no JSON object", '{"tokens": [...], ...}')
        yield row


_READ: Mapping[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".safetensors": _of_safetensors,
    ".jsonl": _of_jsonl,
}


def _documents(row: Mapping[str, Any], index: int, where: str) -> Iterator[TrainingText]:
    """The documents of one row, without what follows the last learned token of each."""
    tokens, learned, prefix = _checked(row, where)
    n = len(tokens)
    documents = _numbers(row, "documents", n, where, default=np.zeros(n, np.int64))
    anchors = None
    if row.get("anchors") is not None and np.size(row["anchors"]):
        anchors = _numbers(row, "anchors", None, where)
    elif row.get("anchors") is not None:
        anchors = np.zeros(0, np.int64)
    if anchors is not None and not ((anchors >= 0) & (anchors < n)).all():
        raise BadInput(
            f"{where}: an anchor outside of the {n} tokens", f"anchors from 0 to {n - 1}"
        )
    seed = _whole(row, "anchor_seed", where)
    for name in dict.fromkeys(documents[documents != PADDING].tolist()):
        at = np.flatnonzero(documents == name)
        start, end = int(at[0]), int(at[-1]) + 1
        kept = learned[start:end]
        if end - start != len(at):
            raise BadInput(f"{where}: document {name} has a gap", "documents in one piece each")
        if not kept.any():
            continue
        end = start + int(np.flatnonzero(kept)[-1]) + 1
        own = None
        if anchors is not None:
            own = np.sort(anchors[(anchors >= start) & (anchors < end)]) - start
        yield TrainingText(
            id=f"row{index:05d}" + (f".{name}" if len(at) < n else ""),
            tokens=tokens[start:end],
            learned=learned[start:end],
            prefix=prefix if len(at) == n else int(np.flatnonzero(kept)[0]),
            row=index,
            start=start,
            row_length=n,
            anchors=own,
            seed=seed,
        )


def _checked(row: Mapping[str, Any], where: str) -> tuple[Positions, Mask, int]:
    """Tokens, loss mask and prefix of one row."""
    tokens = _numbers(row, "tokens", None, where)
    given, prefix = row.get("loss_mask"), _whole(row, "prefix", where)
    if given is None and prefix is None:
        raise BadInput(f"{where} has no prefix and no loss_mask", "one of the two")
    learned = np.arange(len(tokens)) >= (0 if prefix is None else prefix)
    if given is not None:
        learned = _numbers(row, "loss_mask", len(tokens), where).astype(bool)
    if not learned.any():
        raise BadInput(f"{where}: nothing in it is learned", "a token that the loss mask keeps")
    return tokens, learned, int(np.flatnonzero(learned)[0]) if prefix is None else prefix


def _whole(row: Mapping[str, Any], name: str, where: str) -> int | None:
    """A whole number from 0, if it is there."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < 2**63:
        raise BadInput(f"{where}: {name} is {value!r:.40}", "a whole number from 0")
    return int(value)


def _numbers(
    row: Mapping[str, Any],
    name: str,
    length: int | None,
    where: str,
    default: Positions | None = None,
) -> Positions:
    if row.get(name) is None and default is not None:
        return default
    try:
        found = np.asarray(row.get(name))
        whole = found.ndim == 1 and len(found) > 0 and found.dtype.kind in "iub"
        whole = whole and not (found > MOST).any()
    except (ValueError, OverflowError):
        whole = False
    if not whole or (length is not None and len(found) != length):
        wanted = f"{length} whole numbers" if length else "a list of whole numbers, not empty"
        raise BadInput(f"{where}: {name} is something else", wanted)
    return found.astype(np.int64)


def sampled(split: Split, rows: int) -> Split:
    """The documents of some rows, evenly spread."""
    there = sorted({text.row for text in split})
    chosen = {there[i] for i in np.linspace(0, len(there) - 1, min(rows, len(there))).astype(int)}
    return [text for text in split if text.row in chosen]


# --- anchors --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AnchorRule:
    """How a trainer draws the anchors of a row, uniformly and without repetition."""

    count: int
    """A, fewer where fewer can be."""
    next_too: bool = False
    """Whether the token after the anchor must be learned as well as the anchor."""
    room: int | None = None
    """Tokens that must follow in the row; None: a whole block's labels."""
    in_document: bool = False
    """Whether a whole block's labels must follow in the document too."""
    last_left_out: int = 0
    """Anchors fewer than there could be."""
    labels: Literal["tokens", "target"] = "tokens"
    """``tokens`` of the text, or the ``target``'s own choices after the text so far."""

    def eligible(self, text: TrainingText, block_size: int) -> Positions:
        """Positions of a document where it may draw an anchor."""
        learned, n = text.learned, len(text.tokens)
        could = learned.copy()
        if self.next_too:
            could[:-1] &= learned[1:]
            could[-1] = False
        room = block_size - 1 if self.room is None else self.room
        left = text.row_length - text.start - 1 - np.arange(n)
        could &= left >= room
        if self.in_document:
            could &= n - 1 - np.arange(n) >= block_size - 1
        return np.flatnonzero(could)


def rule_of(stack: str, block_size: int, count: int | None = None) -> AnchorRule:
    """How a stack's trainer draws anchors.

    Parameters
    ----------
    stack
        As in `dflash_diag.checkpoints.detect_stack`. A stack whose trainer is not public is taken
        to leave room for every label, as in the paper's algorithm.
    count
        A as the trainer's arguments have it; 512 by default.
    """
    count = count or ANCHORS
    if stack in ("specforge", "deepspec"):
        return AnchorRule(count=count, next_too=True, room=1)
    if stack == "speculators":
        return AnchorRule(count=count, room=block_size, labels="target")
    if stack == "automodel":
        return AnchorRule(count=count, in_document=True)
    if stack == "modelopt":
        return AnchorRule(count=count, last_left_out=1)
    return AnchorRule(count=count)


ANCHORS = 512
"""What all public trainers draw in a row by default."""


def draw_anchors(split: Split, rule: AnchorRule, block_size: int, seed: int) -> list[Positions]:
    """Anchors of every document, ascending: the trainer's own where it kept them, else drawn."""
    found: list[Positions] = []
    for row in dict.fromkeys(text.row for text in split):
        texts = [text for text in split if text.row == row]
        if all(text.anchors is not None for text in texts):
            found += [text.anchors for text in texts if text.anchors is not None]
            continue
        places = [(i, int(a)) for i, t in enumerate(texts) for a in rule.eligible(t, block_size)]
        own = texts[0].seed
        rng = np.random.default_rng([seed, row] if own is None else own)
        n = min(rule.count, max(0, len(places) - rule.last_left_out))
        chosen = sorted(places[i] for i in rng.permutation(len(places))[:n])
        found += [np.array([a for i, a in chosen if i == k], np.int64) for k in range(len(texts))]
    return found


# --- as a capture takes them ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Texts:
    """Given texts in the form of a capture's, for `make_capture` to be ``like``."""

    prompts: tuple[CapturedPrompt, ...]
    ids: tuple[Sequence[int], ...]
    max_new_tokens: int
    target_facts: Mapping[str, Any]
    reference: None = None

    @classmethod
    def of(cls, texts: Sequence[tuple[str, Sequence[int], int]], source: str) -> Texts:
        """From id, tokens and prefix of each; ``source`` says what they are."""
        prompts = tuple(
            CapturedPrompt(name, prefix, len(tokens) - prefix, ended=False, origin=source)
            for name, tokens, prefix in texts
        )
        longest = max(one.n_generated for one in prompts)
        return cls(prompts, tuple(tokens for _, tokens, _ in texts), longest, {"source": source})

    def __len__(self) -> int:
        return len(self.prompts)

    def tokens(self, i: int) -> torch.Tensor:
        """[T]."""
        return torch.as_tensor(np.asarray(self.ids[i], np.int64))
