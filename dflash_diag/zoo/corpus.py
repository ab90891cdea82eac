"""Training text: Python source of permissively licensed packages, without the example's prompts."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dflash_diag.zoo import recipe

log = logging.getLogger(__name__)

PROMPT_WINDOW = 60
"""A file that shares this many consecutive characters with a prompt is left out."""


def build(work: Path, prompts: list[str]) -> None:
    """Write ``tokenizer.json``, ``train.npy`` and ``validation.npy`` (uint16 ids) to ``work``."""
    wheels = work / "wheels"
    download(wheels, recipe.PACKAGES)
    texts, dropped = collect(wheels, prompts)
    rng = random.Random(recipe.SEED)  # noqa: S311 - an order that can be repeated, no secret
    rng.shuffle(texts)
    held_out = max(1, len(texts) // 50)
    tokenizer = train_tokenizer(texts[held_out:])
    tokenizer.save(str(work / "tokenizer.json"))
    for name, part in (("validation", texts[:held_out]), ("train", texts[held_out:])):
        np.save(work / f"{name}.npy", encode(tokenizer, part))
    summary = {
        "files": len(texts),
        "characters": sum(map(len, texts)),
        "train_tokens": int(np.load(work / "train.npy", mmap_mode="r").shape[0]),
        "files_left_out_for_sharing_text_with_a_prompt": dropped,
    }
    (work / "corpus.json").write_text(json.dumps(summary, indent=1))
    log.info("corpus: %s", summary)


def download(wheels: Path, packages: Mapping[str, tuple[str, str]]) -> None:
    """Fetch the wheels of ``packages`` (version and licence by name), without dependencies."""
    wheels.mkdir(parents=True, exist_ok=True)
    for name, (version, _) in packages.items():
        if any(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
            continue
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", str(wheels), f"{name}=={version}"]
        subprocess.run(command, check=True, timeout=600)


def collect(wheels: Path, prompts: list[str]) -> tuple[list[str], int]:
    """Usable source files of all wheels, and how many were dropped for sharing prompt text."""
    windows = windows_of(prompts)
    texts: list[str] = []
    seen: set[str] = set()
    dropped = 0
    for wheel in sorted(wheels.glob("*.whl")):
        budget = recipe.MAX_BYTES_PER_PACKAGE
        files = list(source_files(wheel))
        random.Random(recipe.SEED).shuffle(files)  # noqa: S311
        for text in files:
            digest = hashlib.sha256(text.encode()).hexdigest()
            if digest in seen or budget < len(text):
                continue
            if shares_text(text, windows):
                dropped += 1
                continue
            seen.add(digest)
            budget -= len(text)
            texts.append(text)
    return texts, dropped


def windows_of(prompts: list[str]) -> set[str]:
    """All windows of `PROMPT_WINDOW` characters of ``prompts``."""
    return {p[i : i + PROMPT_WINDOW] for p in prompts for i in range(len(p) - PROMPT_WINDOW + 1)}


def shares_text(text: str, windows: set[str]) -> bool:
    """Whether any window of `PROMPT_WINDOW` characters of ``text`` is one of ``windows``."""
    return any(text[i : i + PROMPT_WINDOW] in windows for i in range(len(text) - PROMPT_WINDOW + 1))


def source_files(wheel: Path) -> Iterator[str]:
    """Python files of a wheel that read like code somebody wrote."""
    with zipfile.ZipFile(wheel) as archive:
        for info in sorted(archive.infolist(), key=lambda i: i.filename):
            name = info.filename
            if not name.endswith(".py") or not 400 < info.file_size < 40_000:
                continue
            if any(part in name for part in ("/tests/", "/_vendor/", "/test_", "_pb2", "/locale/")):
                continue
            text = strip_header(archive.read(info).decode("utf8", "replace"))
            if looks_written(text):
                yield text


def strip_header(text: str) -> str:
    """Drop the leading comment block, which is a licence more often than not."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line and not line.startswith("#")), 0)
    return "\n".join(line.rstrip() for line in lines[start:]).strip() + "\n"


def looks_written(text: str) -> bool:
    """Whether a file parses and is no data table, and is mostly ASCII."""
    if len(text) < 400 or max(map(len, text.splitlines())) > 160 or not text.isascii():
        return False
    if sum(c.isdigit() for c in text) > 0.12 * len(text):
        return False
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE with the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.VOCAB_SIZE,
        special_tokens=list(recipe.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[: len(texts) // 3], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """All texts as one uint16 stream, each ended by the end-of-text token."""
    end = tokenizer.token_to_id(recipe.END_OF_TEXT)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 512):
        encodings = tokenizer.encode_batch(texts[start : start + 512])
        parts += [np.asarray([*one.ids, end], dtype=np.uint16) for one in encodings]
    return np.concatenate(parts)
