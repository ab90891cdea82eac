"""Served output against the capture's greedy continuation."""

from __future__ import annotations

import json

import pytest
import torch

from dflash_diag.capture import make_capture
from dflash_diag.errors import BadInput
from dflash_diag.prompts import Prompt
from dflash_diag.references import ServedOutput, check_served, read_served
from dflash_diag.targets import load_target

G = 8


@pytest.fixture(scope="module")
def target(hybrid_folder):
    return load_target(hybrid_folder)


@pytest.fixture(scope="module")
def capture(target, tmp_path_factory):
    prompts = [Prompt(id=f"p{i}", prompt_ids=(7 + i, 9, 100 + i)) for i in range(3)]
    out = tmp_path_factory.mktemp("served") / "capture"
    return make_capture(target, prompts, out, max_new_tokens=G, silent=True)


def served(capture, changes=None, **options):
    outputs = []
    for i, prompt in enumerate(capture.prompts):
        ids = capture.continuation(i).tolist()
        for at, token in (changes or {}).get(prompt.id, {}).items():
            ids[at] = token
        outputs.append(ServedOutput(prompt.id, ids=tuple(ids)))
    return check_served(capture, outputs, **options)


def test_equal_output(capture):
    found = served(capture)
    assert (found.checked, found.ok, found.exact, found.mismatches) == (3, 3, 3, [])


def test_a_server_may_stop_earlier_or_later(capture):
    ids = tuple(capture.continuation(0).tolist())
    outputs = [
        ServedOutput("p0", ids=ids[:3]),
        ServedOutput("p1", ids=(*capture.continuation(1).tolist(), 5, 6)),
    ]
    assert check_served(capture, outputs).exact == 2


def test_another_token_is_judged_by_the_margin(capture):
    rows = capture.positions(1)
    at = int(rows["margin"][2:-1].idxmax())  # the row that predicts generated token at - 2
    expected = int(capture.tokens(1)[at + 1])
    found = served(capture, {"p1": {at - 2: (expected + 1) % 320}})
    (mismatch,) = found.mismatches
    assert (found.checked, found.ok, found.exact) == (3, 2, 2)
    assert (mismatch.prompt, mismatch.position) == ("p1", at + 1)
    assert (mismatch.expected, mismatch.got) == (expected, (expected + 1) % 320)
    assert mismatch.margin == pytest.approx(float(rows["margin"][at]))
    assert mismatch.kind == "state_fault"


def test_a_tie_at_the_servers_precision_is_rounding(capture, monkeypatch):
    rows = capture.positions(1).copy()
    top = float(rows["top_logit"][4])
    rows.loc[4, "margin"] = 1.9 * 2**-8 * abs(top)
    monkeypatch.setattr(type(capture), "positions", lambda self, i: rows)
    wrong = {"p1": {2: (int(capture.tokens(1)[5]) + 1) % 320}}
    assert [m.kind for m in served(capture, wrong).mismatches] == ["rounding"]
    exact = served(capture, wrong, precision="float32")
    assert [m.kind for m in exact.mismatches] == ["state_fault"]
    with pytest.raises(BadInput, match="precision int8"):
        served(capture, wrong, precision="int8")


class Letters:
    """Two tokens a character: an odd number of tokens ends inside one."""

    def decode(self, ids, *, skip_special_tokens=True):
        text = "".join(chr(0x4E00 + a + b) for a, b in zip(ids[::2], ids[1::2], strict=False))
        return text + "\ufffd" * (len(ids) % 2)


def test_text(capture, target):
    tokenizer = target.tokenizer
    text = tokenizer.decode(capture.continuation(2).tolist(), skip_special_tokens=True)
    good = [ServedOutput("p2", text=text)]
    assert check_served(capture, good, tokenizer=tokenizer).exact == 1
    assert (
        check_served(capture, [ServedOutput("p2", text=text[:6])], tokenizer=tokenizer).exact == 1
    )
    words = text.split(" ")
    words[3] = "x" + words[3]
    found = check_served(capture, [ServedOutput("p2", text=" ".join(words))], tokenizer=tokenizer)
    (mismatch,) = found.mismatches
    assert mismatch.position == 3 + 3
    assert mismatch.got.startswith(words[3])
    assert mismatch.expected == int(capture.tokens(2)[6])


def test_text_whose_characters_span_tokens(capture):
    ids = capture.continuation(0).tolist()
    text = Letters().decode(ids)
    good = [ServedOutput("p0", text=text)]
    assert check_served(capture, good, tokenizer=Letters()).exact == 1
    bad = [ServedOutput("p0", text=text[:1] + "a" + text[2:])]
    # Characters 0 and 1 end with tokens 1 and 3.
    assert check_served(capture, bad, tokenizer=Letters()).mismatches[0].position == 3 + 3


def test_what_cannot_be_compared(capture):
    with pytest.raises(BadInput, match="'q9'; expected the id of a prompt"):
        check_served(capture, [ServedOutput("q9", ids=(1,))])
    with pytest.raises(BadInput, match="token id 320; expected ids below 320"):
        check_served(capture, [ServedOutput("p0", ids=(320,))])
    with pytest.raises(BadInput, match="text and no tokenizer is at hand.*--target"):
        check_served(capture, [ServedOutput("p0", text="hello")])


def test_reading(tmp_path):
    path = tmp_path / "served.jsonl"
    path.write_text('{"id": "a", "output_ids": [1, 2]}\n\n{"id": "b", "text": "", "model": "x"}\n')
    assert read_served(path) == [ServedOutput("a", ids=(1, 2)), ServedOutput("b", text="")]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "holds no output"),
        ("{", "line 1: not JSON"),
        ("[1]", "line 1: no id"),
        ('{"id": 3, "text": "x"}', "line 1: no id"),
        ('{"id": "a"}', "line 1: prompt 'a' has no output"),
        ('{"id": "a", "text": "x", "output_ids": [1]}', "has both"),
        ('{"id": "a", "text": "", "output_ids": [1]}', "has both"),
        ('{"id": "a", "text": 5}', "is int"),
        ('{"id": "a", "output_ids": [1, -1]}', "no list of token ids"),
        ('{"id": "a", "output_ids": []}', "no list of token ids"),
        ('{"id": "a", "output_ids": [true]}', "no list of token ids"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}', "line 2: id 'a' again"),
    ],
)
def test_malformed_files(tmp_path, lines, message):
    path = tmp_path / "served.jsonl"
    path.write_text(lines)
    with pytest.raises(BadInput, match=message):
        read_served(path)


def test_no_such_file(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        read_served(tmp_path / "nothing.jsonl")
    with pytest.raises(BadInput, match="is a folder"):
        read_served(tmp_path)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="not UTF-8"):
        read_served(tmp_path / "x")


def test_as_json(capture):
    found = served(capture, {"p0": {0: (int(capture.continuation(0)[0]) + 1) % 320}})
    value = json.loads(json.dumps(found.to_json()))
    assert (value["checked"], value["ok"]) == (3, 3 - len(value["mismatches"]))
    assert set(value["mismatches"][0]) == {"id", "position", "expected", "got", "margin", "kind"}
    assert torch.is_tensor(capture.tokens(0))
