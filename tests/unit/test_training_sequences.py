"""Training texts as trainers keep them, and the anchors that each stack's trainer may draw."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_diag.errors import BadInput
from dflash_diag.masks import PADDING
from dflash_diag.training_sequences import (
    TRAIN,
    VALIDATION,
    AnchorRule,
    Texts,
    check_ids,
    draw_anchors,
    read_training_sequences,
    rule_of,
    sampled,
)

B = 4


def write(folder, name="train.jsonl", *rows):
    path = folder / name
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def row(n=12, prefix=4, **more):
    return {"tokens": list(range(n)), "prefix": prefix, **more}


def texts(folder, *rows):
    (split,) = read_training_sequences(write(folder, "train.jsonl", *rows)).values()
    return split


def test_both_forms_and_both_splits(tmp_path):
    columns = {
        "tokens": np.arange(24, dtype=np.int32).reshape(2, 12),
        "prefix": np.array([4, 5], np.int32),
        "anchors": np.array([[6, 5], [7, 8]], np.int32),
        "anchor_seed": np.array([1, 2]),
    }
    save_file(columns, tmp_path / "train.safetensors")
    write(tmp_path, "val.jsonl", row())
    (tmp_path / "notes.jsonl").write_text("not a split")
    found = read_training_sequences(tmp_path)
    assert list(found) == [TRAIN, VALIDATION]
    first, second = found[TRAIN]
    assert (first.prefix, second.prefix) == (4, 5)
    assert first.anchors.tolist() == [5, 6]
    assert second.tokens.tolist() == list(range(12, 24))
    assert first.learned.tolist() == [False] * 4 + [True] * 8


def test_what_follows_the_last_learned_token_is_left_out(tmp_path):
    mask = [0, 0, 1, 1, 0, 1, 0, 0]
    (text,) = texts(tmp_path, {"tokens": list(range(8)), "loss_mask": mask})
    assert text.tokens.tolist() == [0, 1, 2, 3, 4, 5]
    assert text.prefix == 2
    assert text.row_length == 8


def test_a_packed_row_is_taken_apart(tmp_path):
    packed = {
        "tokens": list(range(10)),
        "loss_mask": [0, 1, 1, 1, 0, 0, 1, 1, 1, 0],
        "documents": [0, 0, 0, 0, 1, 1, 1, 1, 1, PADDING],
        "anchors": [6, 1, 2],
    }
    first, second = texts(tmp_path, packed)
    assert first.tokens.tolist() == [0, 1, 2, 3]
    assert second.tokens.tolist() == [4, 5, 6, 7, 8]
    assert (second.prefix, second.start, second.row) == (2, 4, first.row)
    assert first.anchors.tolist() == [1, 2]
    assert second.anchors.tolist() == [2]


def test_a_prefix_beside_a_mask_tells_what_was_written(tmp_path):
    """Learned everywhere, but the first tokens were given: anchors may lie in the prompt."""
    (text,) = texts(tmp_path, row(n=8, prefix=3, loss_mask=[1] * 8))
    assert text.learned.all()
    assert text.written.tolist() == [False] * 3 + [True] * 5


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "no row"),
        ([{"tokens": [1, 2]}], "no prefix and no loss_mask"),
        ([{"tokens": [1, 2.5], "prefix": 1}], "tokens is something else"),
        ([{"tokens": [1, 2], "loss_mask": [1]}], "loss_mask is something else"),
        ([{"tokens": [1, 2], "prefix": 2}], "nothing in it is learned"),
        ([{"tokens": [[1], [2]], "prefix": 1}], "tokens is something else"),
        ([row(anchors=[99])], "outside of the 12 tokens"),
        ([row(documents=[0, 1] * 6)], "has a gap"),
        ([3], "no JSON object"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, says):
    with pytest.raises(BadInput, match=says):
        read_training_sequences(write(tmp_path, "train.jsonl", *rows))


def test_bad_files_are_named(tmp_path):
    with pytest.raises(BadInput, match="no sequences there"):
        read_training_sequences(tmp_path)
    (tmp_path / "train.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadInput, match="cannot be read"):
        read_training_sequences(tmp_path)
    (tmp_path / "train.jsonl").write_text("{")
    with pytest.raises(BadInput, match="line 1 is no JSON"):
        read_training_sequences(tmp_path / "train.jsonl")


def test_texts_of_another_target_are_refused(tmp_path):
    splits = read_training_sequences(write(tmp_path, "train.jsonl", row()))
    check_ids(splits, 12)
    check_ids(splits, None)
    with pytest.raises(BadInput, match=r"row00000 holds token 11; expected .* 0 to 10"):
        check_ids(splits, 11)


# A row of 12: two documents of 6, each with 2 given tokens, the second's last two left out.
PACKED = {
    "tokens": list(range(12)),
    "documents": [0] * 6 + [1] * 6,
    "loss_mask": [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1],
}
ALLOWED = {
    # a and a+1 learned, one token left: document 0 at 2..4, document 1 at row 8.
    "specforge": [2, 3, 4, 8],
    "deepspec": [2, 3, 4, 8],
    # The last B of the row are left out, whatever their document.
    "speculators": [2, 3, 4, 5],
    # A block's labels fit into the row, and into the document.
    "automodel": [2, 8],
    "speco": [2, 3, 4, 5, 8],
    "modelopt": [2, 3, 4, 5, 8],
}


@pytest.mark.parametrize("stack", ALLOWED)
def test_eligible_anchors_by_stack(tmp_path, stack):
    split, rule = texts(tmp_path, PACKED), rule_of(stack, B)
    found = [t.start + int(a) for t in split for a in rule.eligible(t, B)]
    assert found == ALLOWED[stack]
    drawn = draw_anchors(split, rule, B, seed=0)
    places = [t.start + int(a) for t, at in zip(split, drawn, strict=True) for a in at]
    fewer = stack == "modelopt"
    assert len(places) == len(found) - fewer
    assert set(places) <= set(found)
    assert rule.labels == ("target" if stack == "speculators" else "tokens")


def test_anchors_are_uniform_without_repetition_and_fixed_by_the_seed(tmp_path):
    split, rule = texts(tmp_path, row(n=40)), AnchorRule(count=3)
    draws = [draw_anchors(split, rule, B, seed=s)[0] for s in range(600)]
    assert all(len(set(d.tolist())) == 3 and (np.diff(d) > 0).all() for d in draws)
    counts = np.bincount(np.concatenate(draws), minlength=40)
    assert counts[:4].sum() == counts[37:].sum() == 0
    expected = 600 * 3 / 33
    assert np.abs(counts[4:37] - expected).max() < 5 * expected**0.5
    again = draw_anchors(split, rule, B, seed=7)[0]
    assert again.tolist() == draws[7].tolist()


def test_kept_anchors_and_seeds_come_first(tmp_path):
    kept = texts(tmp_path, row(anchors=[9, 5]))
    assert draw_anchors(kept, AnchorRule(count=1), B, seed=0)[0].tolist() == [5, 9]
    seeded = texts(tmp_path, row(n=40, anchor_seed=5))
    rule = AnchorRule(count=3)
    one, two = (draw_anchors(seeded, rule, B, seed=s)[0].tolist() for s in (0, 1))
    assert one == two


def test_rows_are_spread_evenly_and_stay_whole(tmp_path):
    split = texts(tmp_path, *(PACKED for _ in range(9)))
    chosen = sampled(split, 3)
    assert [t.row for t in chosen] == [0, 0, 4, 4, 8, 8]
    assert sampled(split, 99) == list(split)


def test_texts_look_like_a_capture(tmp_path):
    made = Texts.of([("a", [1, 2, 3], 1), ("b", [4, 5], 1)], "training text")
    assert len(made) == 2
    assert made.max_new_tokens == 2
    assert made.prompts[0].n_generated == 2
    assert made.tokens(1).tolist() == [4, 5]
