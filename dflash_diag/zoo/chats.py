"""Conversations on which the drafter of a public chat model trains.

Questions are made of documented functions of the corpus' packages, in four kinds; answers are what
the target itself says. An answer ends with the token that ends the target's turn.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dflash_diag.targets import load_tokenizer
from dflash_diag.zoo import corpus, recipe
from dflash_diag.zoo.recipe import ChatRecipe
from dflash_diag.zoo.sequences import load_target

log = logging.getLogger(__name__)

FUNCTION_CHARACTERS = (80, 700)
MOST_PER_PACKAGE = 900


@dataclass(frozen=True)
class Function:
    """A documented function of a package."""

    signature: str
    """Its ``def`` line, without the colon."""
    doc: str
    """The first paragraph of its docstring."""
    source: str
    """All of it."""
    undocumented: str
    """Without its docstring."""


def explain(function: Function, _rng: random.Random) -> str:
    """What it does."""
    return f"Explain what this function does:\n\n```python\n{function.source}\n```"


def write(function: Function, _rng: random.Random) -> str:
    """It, from its signature and docstring."""
    doc = function.doc[0].lower() + function.doc[1:]
    return f"Write a Python function `{function.signature}` that does this: {doc}"


def fix(function: Function, rng: random.Random) -> str:
    """A slip of the pen in it."""
    return f"Find and fix the error in this code:\n\n```python\n{broken(function, rng)}\n```"


def document(function: Function, _rng: random.Random) -> str:
    """Its docstring."""
    return f"Write a docstring for this function:\n\n```python\n{function.undocumented}\n```"


QUESTIONS: tuple[Callable[[Function, random.Random], str], ...] = (explain, write, fix, document)

_SLIPS = (
    (" == ", " = "),
    ("):\n", ")\n"),
    (" not in ", " in "),
    (" is None", " is not None"),
    (" + ", " - "),
    ("return ", "retrun "),
    ("self.", "slef."),
)


def broken(function: Function, rng: random.Random) -> str:
    """The function with one slip of the pen: the first of a shuffled list that fits it."""
    for right, wrong in rng.sample(_SLIPS, len(_SLIPS)):
        if right in function.undocumented:
            return function.undocumented.replace(right, wrong, 1)
    return function.undocumented.replace(":", "", 1)


def build_questions(work: Path, name: str, plan: ChatRecipe, evaluated: list[str]) -> None:
    """Write ``work/chats/NAME.jsonl``: messages, shuffled, enough of them for ``plan``.

    ``evaluated`` are the texts of the evaluation's prompts: a function that shares a piece of text
    with one of them is left out.
    """
    final = work / "chats" / f"{name}.jsonl"
    if final.exists():
        return
    corpus.download(work / "wheels", recipe.PACKAGES)
    found = list(functions(work / "wheels", evaluated))
    rng = random.Random(recipe.SEED)  # noqa: S311 - an order that can be repeated, no secret
    asked = [
        QUESTIONS[(i + turn) % len(QUESTIONS)](function, rng)
        for turn in range(2)
        for i, function in enumerate(found)
    ]
    rng.shuffle(asked)
    # Some are too long for the plan, and some answers too short.
    lines = [
        json.dumps({"messages": [{"role": "user", "content": text}]})
        for text in asked[: 2 * (plan.train + plan.validation)]
    ]
    final.parent.mkdir(parents=True, exist_ok=True)
    final.write_text("\n".join(lines) + "\n")
    log.info("%d functions, %d questions", len(found), len(lines))


def functions(wheels: Path, evaluated: list[str]) -> Iterator[Function]:
    """Documented functions of all wheels, each text once, none that shares text with a prompt."""
    windows = corpus.windows_of(evaluated)
    seen: set[str] = set()
    for wheel in sorted(wheels.glob("*.whl")):
        found: list[Function] = []
        for text in corpus.source_files(wheel):
            for function in documented(text):
                digest = hashlib.sha256(function.source.encode()).hexdigest()
                if digest not in seen and not corpus.shares_text(function.source, windows):
                    seen.add(digest)
                    found.append(function)
        random.Random(recipe.SEED).shuffle(found)  # noqa: S311
        yield from found[:MOST_PER_PACKAGE]


def documented(text: str) -> Iterator[Function]:
    """Functions of a source file that have a docstring and are neither tiny nor long."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        paragraph = " ".join(doc.split("\n\n")[0].split())
        source = textwrap.dedent(" " * node.col_offset + (ast.get_source_segment(text, node) or ""))
        low, high = FUNCTION_CHARACTERS
        if not low < len(source) < high or not 20 < len(paragraph) < 300 or len(node.body) < 2:
            continue
        lines, first = source.splitlines(), node.body[0]
        last = first.end_lineno or first.lineno
        bare = lines[: first.lineno - node.lineno] + lines[last - node.lineno + 1 :]
        signature = re.sub(r"\s+", " ", "\n".join(bare).split(":\n")[0]).removeprefix("def ")
        if len(bare) > 1 and signature.count("\n") == 0 and len(signature) < 120:
            yield Function(signature, paragraph, source, "\n".join(bare))


def build(work: Path, name: str, plan: ChatRecipe, *, device: str) -> None:
    """Write ``work/sequences/NAME.npz``: tokens, prefixes and ends; resumes batch by batch."""
    final = work / "sequences" / f"{name}.npz"
    if final.exists():
        return
    model = load_target(work / "targets" / name, device)
    tokenizer = load_tokenizer(work / "targets" / name)
    lines = (work / "chats" / f"{name}.jsonl").read_text().splitlines()
    questions = [ask(tokenizer, json.loads(line)["messages"]) for line in lines]
    low, high = plan.prefix
    questions = [ids for ids in questions if low <= len(ids) <= high]
    size, end = plan.batch, int(model.generation_config.eos_token_id)
    answered: list[tuple[list[int], int]] = []
    log.info("%d questions of %d to %d tokens", len(questions), low, high)
    for index in range(len(questions) // size):
        if len(answered) >= plan.train + plan.validation:
            break
        batch = questions[index * size : (index + 1) * size]
        cache = work / "sequences" / f"{name}.{index}.npy"
        if not cache.exists():
            cache.parent.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(recipe.SEED + 31 * index)
            room = plan.length - max(map(len, batch))
            written = answer(model, batch, room, plan.temperature, end, sampled=index % 2 == 1)
            np.save(cache, written.cpu().numpy().astype(np.uint16))
            log.info("%s: answers %d", name, index)
        for asked, row in zip(batch, np.load(cache).tolist(), strict=True):
            said = row[: row.index(end) + 1] if end in row else row
            if len(said) >= plan.least_answer:
                answered.append((asked + said, len(asked)))
    parts, facts = table(answered, plan, end)
    np.savez(final, allow_pickle=False, **parts)
    final.with_suffix(".json").write_text(json.dumps(facts, indent=1))
    log.info("%s: %s", name, facts)


def ask(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a question in the target's chat template."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    questions: list[list[int]],
    room: int,
    temperature: float,
    end: int,
    *,
    sampled: bool,
) -> Tensor:
    """[N, <= room] what the target answers; after the end of its turn, ``end`` again and again."""
    width = max(map(len, questions))
    ids = torch.full((len(questions), width), end)
    mask = torch.zeros_like(ids)
    for row, question in enumerate(questions):
        ids[row, width - len(question) :] = torch.tensor(question)
        mask[row, width - len(question) :] = 1
    options: dict[str, Any] = (
        {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if sampled
        else {"do_sample": False}
    )
    generate: Any = model.generate
    made: Tensor = generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=room,
        pad_token_id=end,
        eos_token_id=end,
        **options,
    )
    return made[:, width:]


def table(
    answered: list[tuple[list[int], int]], plan: ChatRecipe, end: int
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Conversations as arrays by split, and how much they hold."""
    order = np.random.default_rng(recipe.SEED).permutation(len(answered))
    counts = {"validation": plan.validation, "train": len(answered) - plan.validation}
    parts: dict[str, np.ndarray] = {}
    facts: dict[str, int] = {}
    start = 0
    for split, count in counts.items():
        chosen = [answered[i] for i in order[start : start + min(count, getattr(plan, split))]]
        start += count
        tokens = np.full((len(chosen), plan.length), end, np.uint16)
        for row, (ids, _) in enumerate(chosen):
            tokens[row, : len(ids)] = ids
        parts[split] = tokens
        parts[f"{split}_prefix"] = np.asarray([prefix for _, prefix in chosen], np.int16)
        parts[f"{split}_end"] = np.asarray([len(ids) for ids, _ in chosen], np.int16)
        facts[f"{split}_conversations"] = len(chosen)
        facts[f"{split}_answer_tokens"] = sum(len(ids) - prefix for ids, prefix in chosen)
    return parts, facts
