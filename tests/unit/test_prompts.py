"""Reading prompts is strict, and the prompts that come with the project are in order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_diag.errors import PromptError
from dflash_diag.prompts import Prompt, read_prompts

DATA = Path(__file__).parents[2] / "data" / "prompts"
PROMPT_FILES = {"coding": 10, "general": 40}


@pytest.fixture
def read(tmp_path):
    def read(content: str | bytes) -> list[Prompt]:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_prompts(path)

    return read


def test_the_three_forms(read):
    text, messages, ids = read(
        '{"id": "a", "text": "def f("}\n'
        "\n"
        '{"id": "b", "messages": [{"role": "user", "content": "hi"}], "source": "ignored"}\r\n'
        '{"id": "c", "prompt_ids": [0, 7], "text": null}'
    )
    assert text == Prompt(id="a", text="def f(")
    assert messages == Prompt(id="b", messages=({"role": "user", "content": "hi"},))
    assert ids == Prompt(id="c", prompt_ids=(0, 7))


def test_a_prompt_may_say_of_what_kind_it_is(read):
    coding, other = read(
        '{"id": "a", "text": "x", "kind": "coding"}\n{"id": "b", "text": "x", "kind": null}'
    )
    assert (coding.kind, other.kind) == ("coding", None)
    assert coding.to_json() == {"id": "a", "text": "x", "kind": "coding"}
    assert "kind" not in other.to_json()
    assert (coding.form, Prompt(id="c", prompt_ids=(1,)).form) == ("text", "prompt_ids")


@pytest.mark.parametrize("line", ['{"id": "a", "text": "x"}', '{"id": "a", "prompt_ids": [1]}'])
def test_a_prompt_becomes_the_line_that_it_was(read, line):
    (prompt,) = read(line)
    assert prompt.to_json() | {} == json.loads(line) or list(prompt.prompt_ids or ()) == [1]


def test_unicode_separators_inside_a_line_do_not_end_it(read):
    (prompt,) = read('\ufeff{"id": "a", "text": "one\u2028two\x85three"}\n')
    assert prompt.text == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: list .*; expected a JSON object"),
        ('"text"', "line 2: str"),
        ('{"text": "x"}', "line 2: no id among the keys text"),
        ("{}", r"no id among the keys \(none\)"),
        ('{"id": "a", "text": "x", "kind": 3}', "prompt 'a': kind is int; expected a string"),
        ('{"id": "a", "text": "x", "kind": ""}', "prompt 'a': kind is empty"),
        ('{"id": 3, "text": "x"}', "id is 3; expected a string"),
        ('{"id": " ", "text": "x"}', "id is ' '"),
        (r'{"id": "a\ud800", "text": "x"}', "id is .*valid Unicode"),
        (
            r'{"id": "b", "messages": [{"role": "user", "content": "\ud800"}]}',
            "lone surrogate",
        ),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"id": "b", "prompt_ids": [' + "9" * 5000 + "]}", "line 2: not JSON"),
        ('{"id": "b"}', "'b' has no content; expected one of text, messages, prompt_ids"),
        ('{"id": "b", "txt": "x"}', "'b' has no content"),
        ('{"id": "b", "text": "x", "prompt_ids": [1]}', "'b' has text and prompt_ids"),
        ('{"id": "b", "text": ""}', "text is empty"),
        ('{"id": "b", "text": 5}', "text is int; expected a string"),
        (r'{"id": "b", "text": "a\ud800"}', "lone surrogate at character 1"),
        ('{"id": "b", "messages": []}', "messages is empty"),
        ('{"id": "b", "messages": "hi"}', "messages is str"),
        ('{"id": "b", "messages": [{"content": "hi"}]}', "entry 0 has no role"),
        ('{"id": "b", "messages": [{"role": "user"}]}', "entry 0 has no content; expected text"),
        ('{"id": "b", "messages": [{"role": "user", "content": 3}]}', "content of type int"),
        (
            '{"id": "b", "messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "entry 0 has content of type list; expected text: a string",
        ),
        ('{"id": "b", "prompt_ids": []}', "prompt_ids is empty"),
        ('{"id": "b", "prompt_ids": [1, -2]}', "entry 1 is -2; expected integers from 0"),
        ('{"id": "b", "prompt_ids": [true]}', "entry 0 is True"),
        ('{"id": "b", "prompt_ids": [1.0]}', "entry 0 is 1.0"),
        ('{"id": "a", "text": "again"}', "line 2: id 'a' is that of line 1; expected unique ids"),
    ],
)
def test_lines_that_are_no_prompt(read, line, message):
    with pytest.raises(PromptError, match=message) as raised:
        read('{"id": "a", "text": "x"}\n' + line + "\n")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no prompt"), ("\n \n", "holds no prompt"), (b"\xff{}", "not UTF-8 text")],
)
def test_files_without_a_prompt(read, content, message):
    with pytest.raises(PromptError, match=message):
        read(content)


def test_paths_that_are_no_file(tmp_path):
    with pytest.raises(PromptError, match="no such file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match="is a folder"):
        read_prompts(tmp_path)


@pytest.mark.parametrize(("name", "count"), PROMPT_FILES.items())
def test_our_prompts_are_beginnings_of_modules(name, count):
    prompts = read_prompts(DATA / f"{name}.jsonl")
    assert len(prompts) == count
    for prompt in prompts:
        assert prompt.id.startswith(f"{name}-")
        assert prompt.text is not None
        assert prompt.text.isascii()
        assert 100 <= len(prompt.text) <= 400, prompt.id
        # A tokenizer would split trailing white space from the word it belongs to, in a way that
        # no training text is split.
        assert prompt.text == prompt.text.strip(), prompt.id


def test_our_prompts_share_no_text():
    owner: dict[str, str] = {}
    for name in PROMPT_FILES:
        for prompt in read_prompts(DATA / f"{name}.jsonl"):
            assert prompt.text is not None
            for start in range(len(prompt.text) - 59):
                window = prompt.text[start : start + 60]
                assert owner.setdefault(window, prompt.id) == prompt.id
