"""Strata against pandas, and against worlds whose strata are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from dflash_diag.strata import (
    DIMENSIONS,
    Blocks,
    Text,
    divide,
    forms_of,
    kinds_of,
    repeated,
    stratify,
)
from tests.text_world import D, G, P, world


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks.of(*world())


def table(blocks: Blocks) -> pd.DataFrame:
    """One row an anchor, by loops."""
    rows = []
    for i, text in enumerate(blocks.texts):
        at, visits = P, set()
        mine = np.flatnonzero(blocks.prompt == i)
        jumps = {}
        for row in mine:
            hits = blocks.right[row].tolist()
            jumps[blocks.anchor[row]] = (hits.index(False) if False in hits else D) + 1
        while at in jumps:
            visits.add(at)
            at += jumps[at]
        for row in mine:
            a = int(blocks.anchor[row])
            rows.append(
                {
                    "id": text.id,
                    "kind": text.id.split("-")[0],
                    "anchor": a,
                    "jump": jumps[a],
                    "visited": a in visits,
                    "entropy": np.mean([text.entropy[a + k - 1] for k in range(1, D + 1)]),
                    "accuracy": np.mean(blocks.right[row]),
                }
            )
    return pd.DataFrame(rows)


def test_every_number_of_every_stratum_is_that_of_a_plain_group_by(blocks):
    frame = table(blocks)
    frame["context depth"] = pd.qcut(frame["anchor"], 4, labels=False)
    found = {(s.dimension, s.name): s for s in stratify(blocks, seed=0, draws=200).found}
    kinds = frame.groupby("kind")
    for kind, group in kinds:
        one, walk = found["prompt kind", kind], group[group["visited"]]
        assert one.numbers["tau_walked"].value == pytest.approx(walk["jump"].mean())
        assert one.numbers["tau_uniform"].value == pytest.approx(group["jump"].mean())
        assert one.numbers["accuracy"].value == pytest.approx(group["accuracy"].mean())
        assert (one.n_anchors, one.n_rounds) == (len(group), len(walk))
        assert one.n_prompts == group["id"].nunique()
        rest = frame[(frame["kind"] != kind) & frame["visited"]]
        difference = walk["jump"].mean() - rest["jump"].mean()
        assert one.versus_rest.value == pytest.approx(difference)
    quarters = [s for (d, _), s in found.items() if d == "target entropy"]
    cuts = np.quantile(frame["entropy"], [0, 0.25, 0.5, 0.75, 1])
    for one, low, high in zip(quarters, cuts[:-1], cuts[1:], strict=True):
        inside = frame["entropy"].between(
            low, high, inclusive="left" if high < cuts[-1] else "both"
        )
        walk = frame[inside & frame["visited"]]
        assert one.n_anchors == pytest.approx(inside.sum(), abs=1)
        assert one.numbers["tau_walked"].value == pytest.approx(walk["jump"].mean(), abs=0.02)


def test_strata_of_a_dimension_are_a_partition_of_the_anchors(blocks):
    parts, _ = divide(blocks)
    assert set(parts) >= {"prompt kind", "context depth", "distance to the end", "target entropy"}
    for made in parts.values():
        assert (np.sum([rows for _, rows in made], axis=0) == 1).all()


def test_what_the_target_is_sure_of_is_accepted_more_and_that_is_certain(blocks):
    by = [s for s in stratify(blocks, seed=0, draws=2000).found if s.dimension == "target entropy"]
    taus = [one.numbers["tau_walked"].value for one in by]
    assert taus == sorted(taus, reverse=True)
    assert by[0].differs
    assert by[-1].differs


def test_nothing_differs_between_strata_that_are_the_same():
    wrong = 0
    for seed in range(8):
        scores, texts = world(n=30, seed=seed)
        right = np.random.default_rng([seed, 1]).random(scores.labels.shape) < 0.5
        scores.proposed = np.where(right, scores.labels, -1)
        made = stratify(Blocks.of(scores, texts), seed=0, draws=2000)
        wrong += any(one.differs for one in made.found)
    assert wrong <= 1  # 5 % of them are expected


def test_entropy_is_that_of_the_distribution_that_the_label_is_drawn_from():
    for offset in (0, 1):
        scores, texts = world(n=2, offset=offset)
        made = Blocks.of(scores, texts)
        row, k = 7, 2
        at = int(made.anchor[row]) + k + 1 + offset
        assert texts[0].tokens[at] == scores.labels[row, k]
        assert made.entropy[row, k] == texts[0].entropy[at - 1]
        assert made.own.all()


def test_prompts_without_a_block_are_left_out_and_prompts_are_matched_by_id():
    scores, texts = world(n=4)
    unscored = Text(id="long-0", start=P, tokens=np.arange(P + 1), ended=True, form="text")
    made = Blocks.of(scores, [unscored, *reversed(texts)])
    assert [t.id for t in made.texts] == scores.prompt_ids
    some = made.of_prompts([1, 3])
    assert [t.id for t in some.texts] == [scores.prompt_ids[1], scores.prompt_ids[3]]
    assert some.entropy.tolist() == made.entropy[np.isin(made.prompt, [1, 3])].tolist()
    assert some.visited.tolist() == made.visited[np.isin(made.prompt, [1, 3])].tolist()


def test_another_label_than_the_targets_choice_is_off_policy():
    scores, texts = world(n=6)
    other = texts[0].choice.copy()
    other[P + 10] += 1  # the target would have written something else at P + 11
    made = Blocks.of(scores, [replace(texts[0], choice=other), *texts[1:]])
    parts, _ = divide(made)
    rows = dict(parts["on-policy"])["other text"]
    assert sorted(made.anchor[rows].tolist()) == list(range(P + 11 - D, P + 11))
    assert set(made.prompt[rows].tolist()) == {0}
    _, why = divide(Blocks.of(scores, texts))
    assert why["on-policy"] == "every label is the target's own choice"


def test_repeats_are_blocks_whose_next_token_repeats():
    scores, texts = world(n=3)
    tokens = texts[1].tokens.copy()
    tokens[P + 20 : P + 40] = tokens[P : P + 20]
    made = Blocks.of(scores, [texts[0], replace(texts[1], tokens=tokens), texts[2]])
    rows = np.flatnonzero(made.repeats)
    assert made.anchor[rows].tolist() == list(range(P + 19, P + G - D))
    assert repeated([1, 2, 3, 1, 2, 3], window=3).tolist() == [False] * 3 + [True] * 3


def test_blocks_near_an_end_are_told_from_those_of_texts_that_were_cut_off(blocks):
    parts = dict(divide(blocks)[0]["distance to the end"])
    ended = np.array([t.ended for t in blocks.texts])[blocks.prompt]
    assert parts["cut off before its end"].tolist() == (~ended).tolist()
    near = parts[f"ends within {2 * D} tokens"]
    assert blocks.anchor[near].min() == P + G - 2 * D
    scores, texts = world(n=3, ended=lambda i: False)
    assert "--max-new-tokens" in divide(Blocks.of(scores, texts))[1]["distance to the end"]


def test_what_a_capture_does_not_hold_is_said():
    scores, texts = world(
        n=4, entropy=lambda i: None, choice=lambda i: None, form=lambda i: None,
        ended=lambda i: None,
    )  # fmt: skip
    parts, why = divide(Blocks.of(scores, texts))
    assert "choices" in why["target entropy"]
    assert "choices" in why["on-policy"]
    assert "does not say" in why["chat template"]
    assert "does not say" in why["distance to the end"]
    assert set(parts) | set(why) == set(DIMENSIONS)


@pytest.mark.parametrize(
    ("names", "kinds"),
    [
        (["coding-a", "coding-b", "chat-a", "chat-b"], ["coding", "coding", "chat", "chat"]),
        (["c01", "c02", "g01", "g02"], ["c", "c", "g", "g"]),
        (["maths/1", "maths/2", "law/1", "law/2"], ["maths", "maths", "law", "law"]),
        (["p1", "p2", "p3"], "all prompts are of one kind, 'p'"),
        (["fizzbuzz", "trie", "heap"], "the prompts have no kind"),
    ],
)
def test_kinds_come_from_ids_that_repeat_themselves(names, kinds):
    texts = [Text(id=n, start=1, tokens=np.arange(3), ended=None) for n in names]
    found = kinds_of(texts)
    if isinstance(kinds, str):
        assert found.startswith(kinds)
        assert '"kind"' in found
    else:
        assert found == (kinds, "the start of each prompt's id")


def test_a_stated_kind_comes_before_the_id_and_rare_kinds_are_one():
    texts = [
        Text(id=f"x-{i}", start=1, tokens=np.arange(3), ended=None, kind=f"k{min(i, 20) // 2}")
        for i in range(24)
    ]
    kinds, source = kinds_of(texts)
    assert source == "the prompt file's kind"
    assert kinds[20:] == ["k10"] * 4
    assert len(set(kinds)) == 9
    assert kinds.count("other kinds") == 6


def test_a_template_is_compared_only_where_both_forms_are_at_hand():
    texts = [Text(id=str(i), start=1, tokens=np.arange(3), ended=None, form="text") for i in "ab"]
    assert "all prompts were given as plain text" in forms_of(texts)
    assert forms_of([texts[0], replace(texts[1], form="messages")]) == [
        "plain text",
        "chat template",
    ]
    assert "plain text or token ids" in forms_of([texts[0], replace(texts[1], form="prompt_ids")])


def test_slots_that_a_loss_mask_leaves_out_do_not_count():
    scores, texts = world(n=4)
    scores.valid = np.ones(scores.labels.shape, dtype=bool)
    scores.valid[:, -1] = False
    scores.valid[3] = False
    made, whole = Blocks.of(scores, texts), Blocks.of(*world(n=4))
    assert len(made.prompt) == len(whole.prompt) - 1
    rest = np.delete(whole.right, 3, axis=0)[:, :-1]
    accuracy = made.sums()["accuracy"]
    assert accuracy.numerators.sum() / accuracy.denominators.sum() == pytest.approx(rest.mean())
    assert made.jumps.max() <= D


def test_anchors_with_gaps_have_no_walk():
    scores, texts = world(n=4)
    for name in ("prompt", "anchor", "labels", "proposed"):
        setattr(scores, name, getattr(scores, name)[::2])
    made = Blocks.of(scores, texts)
    assert not made.visited.any()
    found = stratify(made, seed=0, draws=200).found
    assert found[0].numbers["tau_walked"].value is None
    assert found[0].numbers["tau_uniform"].value is not None


def test_slots_behind_the_end_of_a_text_and_anchors_inside_a_prompt_do_no_harm():
    scores, texts = world(n=2)
    scores.anchor = scores.anchor + D - 1  # the last blocks reach beyond the last token
    scores.valid = scores.anchor[:, None] + np.arange(1, D + 1) < P + G
    made = Blocks.of(scores, texts)
    last = int(made.anchor[len(made.prompt) // 2 - 1])
    assert last == P + G - 2
    assert made.hardness[len(made.prompt) // 2 - 1] == texts[0].entropy[last]
    tokens = np.resize(texts[0].tokens[:3], P + G)
    early = replace(
        made, anchor=made.anchor - P - D + 1, texts=[replace(texts[0], tokens=tokens)] * 2
    )
    assert not early.repeats[early.anchor + 1 < P].any()
    assert early.repeats[early.anchor > P + 20].all()
