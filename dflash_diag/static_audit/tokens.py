"""Mask token, vocabulary, and an embedding or head of the drafter's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from dflash_diag.static_audit import ownership
from dflash_diag.static_audit.material import (
    TABLES,
    Checked,
    Material,
    Severity,
    StaticFinding,
    listed,
)

NO_ROW = 1e-3
"""Length of the mask token's embedding, in medians, below which there is nothing in that row."""


def check_mask_token(m: Material) -> Checked:
    """The mask token is one that no text holds, and its embedding is there."""
    mask, cause, found, untested = m.convention.mask_token_id, "mask_token.id", [], []
    special = dict(m.tokenizer.special) if m.tokenizer else {}
    ends = {int(i) for i in m.target.get("eos_token_ids") or ()} | {special.get("eos", -1)}
    own = special.get("mask")
    names = [name for name in ("bos", "pad", "unk") if special.get(name) == mask]
    rows = m.target.get("vocab_size")
    said = f"token {mask}"
    if isinstance(rows, int) and not 0 <= mask < rows:
        text = f"The mask token {mask} is outside the target's embedding of {rows} rows."
        found.append(StaticFinding(cause, "fail", text, {"rows": rows}))
    if mask in ends:
        text = f"The mask token {mask} is the token that ends a text, and means that to the target."
        found.append(StaticFinding(cause, "fail", text, {"is": "eos"}))
    elif names and own != mask:
        text = f"The mask token {mask} is the tokenizer's {' and '.join(names)} token."
        severity: Severity = "fail" if "bos" in names else "warn"
        found.append(StaticFinding(cause, severity, text, {"is": names}))
    if own is not None and own != mask and mask not in ends:
        text = (
            f"The tokenizer's own mask token is {own}, the configuration's is {mask}; trainers "
            "differ on which of the two they use."
        )
        found.append(StaticFinding(cause, "warn", text, {"tokenizer": own, "used": mask}))
    if m.tokenizer and mask >= m.tokenizer.size and (rows is None or mask < rows):
        text = (
            f"The mask token {mask} is beyond the tokenizer's {m.tokenizer.size} tokens: a padding "
            "row of the embedding, which no text has trained."
        )
        found.append(StaticFinding(cause, "note", text, {"tokenizer_size": m.tokenizer.size}))
    if m.tokenizer is None:
        untested.append("the target's tokenizer is not at hand")
    total = sum(len(text) for text in m.texts)
    times = sum(int((text == mask).sum()) for text in m.texts)
    if times and mask not in ends:
        text = f"The mask token {mask} is an ordinary one: {times} of the run's {total} tokens."
        found.append(StaticFinding(cause, "warn", text, {"times": times, "tokens": total}))
    if not total:
        untested.append("no text is at hand to count it in")
    measured = {}
    if m.embedding is None or not 0 <= mask < len(m.embedding):
        untested.append("its row of the target's embedding is not at hand")
    else:
        lengths = torch.cat([part.float().norm(dim=-1) for part in m.embedding.split(4096)])
        size, middle = float(lengths[mask]), float(lengths.median())
        below = float((lengths < lengths[mask]).float().mean())
        measured = {"row_norm": size, "median_norm": middle, "share_shorter": below}
        said += f", whose embedding is {size / middle:.2f} times the median length"
        if size < NO_ROW * middle:
            text = (
                f"The embedding of the mask token {mask} is empty: its vector may lie elsewhere "
                "(mask_embedding.pt), or was never saved."
            )
            found.append(StaticFinding(cause, "warn", text, measured))
    expected = "a token that no text holds, with an embedding, the same for tokenizer and files"
    return Checked("mask token", said, expected, found, untested, measured)


def check_vocabulary(m: Material) -> Checked:
    """Declared vocabulary, rows of the tables and the tokenizer agree."""
    cause, found, untested = "head.tying_or_vocab", [], []
    rows = len(m.embedding) if m.embedding is not None else m.target.get("vocab_size")
    declared = m.body.get("vocab_size")
    size = m.tokenizer.size if m.tokenizer else None
    reduced = "d2t" in m.checkpoint.tensors or "t2d" in m.checkpoint.tensors
    if not isinstance(rows, int):
        untested.append("the target's embedding is not at hand")
    elif isinstance(declared, int) and declared != rows and not reduced:
        fits = size is not None and size <= min(declared, rows)
        text = (
            f"The configuration declares {declared} tokens, the target's embedding has {rows}"
            + (f"; both hold the tokenizer's {size}, the rest is padding." if fits else ".")
        )
        severity: Severity = "note" if fits else "fail"
        found.append(StaticFinding(cause, severity, text, {"declared": declared, "rows": rows}))
    if size is None:
        untested.append("the target's tokenizer is not at hand")
    elif isinstance(rows, int) and size > rows:
        text = f"The tokenizer has ids up to {size - 1}, the target's embedding {rows} rows."
        found.append(StaticFinding(cause, "fail", text, {"tokenizer": size, "rows": rows}))
    elif isinstance(rows, int) and size < rows:
        text = f"{rows - size} rows of the target's embedding are padding."
        found.append(StaticFinding(cause, "note", text, {"tokenizer": size, "rows": rows}))
    if m.head is not None and isinstance(rows, int) and len(m.head) != rows:
        text = f"The target's head has {len(m.head)} rows, its embedding {rows}."
        found.append(StaticFinding(cause, "warn", text, {"head": len(m.head), "embedding": rows}))
    found += _vocabulary_map(m, rows if isinstance(rows, int) else None)
    said = f"{declared or 'an unstated number of'} tokens, {rows or 'unknown'} rows"
    said += "" if size is None else f", {size} tokens of the tokenizer"
    return Checked("vocabulary", said, "one number, padding of the tables aside", found, untested)


def _target_rows(m: Material) -> Tensor | None:
    """[V'] the target's id of each draft id, where the vocabulary is reduced."""
    if "d2t" not in m.checkpoint.tensors or m.convention.vocabulary_map == "none":
        return None
    stored = m.checkpoint.tensors["d2t"].long().flatten()
    return stored + torch.arange(len(stored)) * (m.convention.vocabulary_map == "offset")


def _vocabulary_map(m: Material, rows: int | None) -> Iterator[StaticFinding]:
    """A map of a reduced vocabulary leads to distinct tokens of the target, as ``t2d`` has them."""
    ids, cause = _target_rows(m), "head.tying_or_vocab"
    if ids is None:
        return
    how, evidence = m.convention.vocabulary_map, {"vocabulary_map": m.convention.vocabulary_map}
    outside = int(((ids < 0) | (ids >= rows)).sum()) if rows else int((ids < 0).sum())
    if outside or len(ids.unique()) < len(ids):
        wrong = f"{outside} of them outside the target's" if outside else "some of them twice"
        text = f"d2t, read as {how} ids, does not lead to distinct tokens: {wrong}."
        yield StaticFinding(cause, "fail", text, evidence)
    elif "t2d" in m.checkpoint.tensors:
        kept = m.checkpoint.tensors["t2d"].flatten().bool().nonzero().flatten()
        if not torch.equal(kept, ids.sort().values):
            text = f"d2t, read as {how} ids, leads to other tokens than t2d keeps."
            yield StaticFinding(cause, "fail", text, evidence)


_WHAT: Mapping[ownership.Kind, str] = {
    "trained": "a table that was trained away from the target's; readers that take the target's "
    "lose that",
    "random": "random numbers, as a constructor leaves them",
    "constant": "one value throughout",
    "not finite": "not finite",
    "other": "neither the target's nor random: trained further, or another target's",
}


def check_tables(m: Material) -> Checked:
    """An embedding or head in the file is the target's, or is named for what it is."""
    cause, found, untested = "head.tying_or_vocab", [], []
    measured: dict[str, Any] = {}
    held = [name for name in TABLES if name in m.checkpoint.tensors]
    for name in held:
        theirs = m.embedding if name.startswith("embed") else m.head
        own, rows = m.checkpoint.tensors[name], _target_rows(m)
        if own.ndim != 2:
            continue
        if rows is not None and (
            len(rows) != len(own) or (theirs is not None and int(rows.max()) >= len(theirs))
        ):
            rows = None
        like = ownership.compare(own, theirs, rows)
        measured[name] = asdict(like)
        broken = like.kind in ("random", "constant", "not finite")
        if like.kind == "unknown":
            untested.append(f"{name}: the target's is not at hand to compare with")
        elif like.kind == "copy":
            text = f"{name} is a copy of the target's, harmless while the target stays as it is."
            found.append(StaticFinding(cause, "note", text, measured[name]))
        else:
            cosine = like.median_cosine
            by_row = "" if cosine is None else f" (cosine {cosine:.2f} to the target's rows)"
            text = f"{name} is {_WHAT[like.kind]}{by_row}."
            severity: Severity = "fail" if broken else "warn"
            found.append(StaticFinding(cause, severity, text, measured[name]))
    found += _tied(m, held)
    said = f"{listed(held)} in the file" if held else "none in the file; the target's are borrowed"
    return Checked(
        "own embedding and head", said, "none, or the target's", found, untested, measured
    )


def _tied(m: Material, held: list[str]) -> Iterator[StaticFinding]:
    """One table for both, where the file holds two."""
    if len(held) == 2 and m.body.get("tie_word_embeddings"):
        embedding, head = (m.checkpoint.tensors[name] for name in TABLES)
        if embedding.shape != head.shape or not torch.equal(embedding, head):
            text = (
                "tie_word_embeddings is true, but the file holds an embedding and another head: "
                "code that ties them drops the head."
            )
            yield StaticFinding("head.tying_or_vocab", "warn", text)
