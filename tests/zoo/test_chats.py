"""Conversations for the drafter of a public chat model: questions, answers, what is kept."""

from __future__ import annotations

import ast
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import tiny_gguf
import torch

from dflash_diag.targets import load_target
from dflash_diag.zoo import chats, recipe
from dflash_diag.zoo.drafters import sequence_anchors
from tests.conftest import ZOO

SOURCE = '''
class Harbour:
    def berth(self, ship, *,
              length=None):
        """Find a berth that is long enough for a ship.

        Longer text that is not asked about.
        """
        for place in self.places:
            if place.length >= (length or ship.length):
                return place
        return None

def tiny():
    """Too short to ask anything about it."""
    return 1

def undocumented(ships):
    total = sum(ship.length for ship in ships)
    return total / len(ships) if ships else None
'''


def test_questions_are_about_documented_functions():
    (function,) = chats.documented(SOURCE)
    assert function.signature == "berth(self, ship, *, length=None)"
    assert function.doc == "Find a berth that is long enough for a ship."
    assert function.source.startswith("def berth(self, ship, *,\n")
    assert '"""' not in function.undocumented
    whole, bare = (ast.parse(s).body[0] for s in (function.source, function.undocumented))
    assert list(map(ast.dump, bare.body)) == list(map(ast.dump, whole.body[1:]))
    asked = [ask(function, random.Random(0)) for ask in chats.QUESTIONS]
    assert function.source in asked[0]
    assert asked[1].endswith("that does this: find a berth that is long enough for a ship.")
    assert function.undocumented in asked[3]


def test_a_slip_of_the_pen_is_one_change():
    (function,) = chats.documented(SOURCE)
    slips = {chats.broken(function, random.Random(seed)) for seed in range(20)}
    assert len(slips) > 1
    for slip in slips:
        lines = zip(slip.splitlines(), function.undocumented.splitlines(), strict=True)
        assert sum(ours != theirs for ours, theirs in lines) == 1


def test_answers_do_not_depend_on_the_padding(tmp_path):
    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.make_llama())
    model = load_target(path).model
    questions = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    end = tiny_gguf.END
    together = chats.answer(model, questions, 12, 0.7, end, sampled=False)
    for row, question in enumerate(questions):
        alone = chats.answer(model, [question], 12, 0.7, end, sampled=False)[0]
        assert torch.equal(together[row, : len(alone)], alone)


def test_what_is_kept_of_answers():
    plan = replace(recipe.CHATS["smollm2"], length=12, train=3, validation=1)
    answered = [(list(range(n, n + 6)), 2) for n in (10, 20, 30, 40, 50)]
    parts, facts = chats.table(answered, plan, 2)
    rows = np.concatenate([parts["train"], parts["validation"]])
    assert rows.shape == (4, 12)
    assert (rows[:, 6:] == 2).all()
    assert len({int(row[0]) for row in rows}) == 4
    assert parts["train_end"].tolist() == [6, 6, 6]
    assert facts["train_answer_tokens"] == 12


@pytest.mark.parametrize(("split", "count"), [("train", 96), ("validation", 64)])
def test_kept_conversations_replay_their_anchors(split, count):
    lines = (ZOO / "smollm2" / "sequences" / f"{split}.jsonl").read_text().splitlines()
    assert len(lines) == count
    plan = recipe.PUBLIC_DRAFTERS["smollm2"]
    for one in map(json.loads, lines):
        drawn = sequence_anchors(one["anchor_seed"], one["prefix"], len(one["tokens"]), plan)
        assert drawn.tolist() == one["anchors"]
        assert min(one["anchors"]) >= one["prefix"]
        assert max(one["anchors"]) + plan.block_size <= len(one["tokens"]) - 1


def test_the_drafter_is_small_and_its_training_saw_a_million_tokens():
    folder = ZOO / "smollm2" / "drafter"
    assert (folder / "model.safetensors").stat().st_size <= 7_500_000
    facts = json.loads((ZOO / "manifest.json").read_text())["measured"]
    assert facts["sequences smollm2"]["train_answer_tokens"] >= 1_000_000
    assert json.loads((folder / "config.json").read_text())["num_target_layers"] == 30
