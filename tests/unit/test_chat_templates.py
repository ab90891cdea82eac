"""Chat templates are programs of other people: what they make, and what they cannot do."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
from types import SimpleNamespace

import pytest

from dflash_diag import chat_templates
from dflash_diag.chat_templates import Renderer, TemplateError
from dflash_diag.errors import PromptError
from dflash_diag.prompts import Prompt
from dflash_diag.targets import wrap_target

MESSAGES = [
    {"role": "user", "content": "hello \u00e9\ud800"},
    {"role": "assistant", "content": None},
]


@pytest.fixture(scope="module")
def renderer():
    made = Renderer()
    yield made
    made.close()


def render(renderer, template, **arguments):
    tokenizer = SimpleNamespace(chat_template=template, special_tokens_map={"bos_token": "<s>"})
    return renderer.render(tokenizer, MESSAGES, arguments)


TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    "{% if add_generation_prompt %}{{ messages | tojson }}{% endif %}{{ thinking }}",
    {"default": "{{ messages[0]['content'] | trim }}", "tool_use": "{{ tools | length }}"},
)


@pytest.mark.parametrize("template", TEMPLATES, ids=range(len(TEMPLATES)))
@pytest.mark.parametrize("arguments", [{}, {"thinking": False}, {"tools": [{"name": "f"}]}])
def test_a_template_gives_what_transformers_gives(renderer, template, arguments):
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast(tokenizer_object=letters(), bos_token="<s>")
    own.chat_template = template
    wanted = own.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True, **arguments
    )
    assert renderer.render(own, MESSAGES, arguments) == wanted


def letters():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({"<unk>": 0}, unk_token="<unk>"))


BOMBS = {
    "{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}": "not ended",
    "{% macro f(x) %}{{ f(x) + f(x) }}{% endmacro %}{{ f(1) }}": "recursion",
    "{{ 'x' * 10 ** 11 }}": "needs more than 1024 MiB",
    "{% set a = namespace(s='ab') %}{% for i in range(99) %}{% set a.s = a.s + a.s %}{% endfor %}":
        "needs more than 1024 MiB",
    "{{ range(10 ** 9) }}": "Range too big",
    "{{ ('x' * 999999) }}": "writes more than",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{{": "unexpected",
    "{{ raise_exception('roles must alternate') }}": "roles must alternate",
}  # fmt: skip


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_cannot_take_all_time_or_memory(renderer, template, monkeypatch):
    render(renderer, "x")  # so that the process is there
    monkeypatch.setattr(chat_templates, "SECONDS", 1.0 if "ended" in BOMBS[template] else 20.0)
    with pytest.raises(TemplateError, match=BOMBS[template]):
        render(renderer, template)
    monkeypatch.setattr(chat_templates, "SECONDS", 20.0)
    assert render(renderer, "{{ messages | length }}") == "2"


def test_arguments_are_what_json_has(renderer):
    with pytest.raises(TemplateError, match="set is not JSON serializable"):
        render(renderer, "x", tags={1})


def test_a_process_that_dies_is_told_of_and_replaced(renderer):
    render(renderer, "x")
    os.kill(renderer._process.pid, signal.SIGKILL)
    with pytest.raises(TemplateError, match="died"):
        render(renderer, "x")
    assert render(renderer, "x") == "x"


def test_the_process_ends_with_its_owner():
    made = Renderer()
    render(made, "x")
    process = made._process
    assert process.poll() is None
    del made
    gc.collect()
    assert process.returncode is not None


def test_a_template_whose_reader_is_gone_ends(renderer, monkeypatch):
    """Who waits for it may be killed meanwhile."""
    monkeypatch.setattr(chat_templates, "SECONDS", 0.0)
    process = renderer._process or renderer._start()
    with pytest.raises(TemplateError), monkeypatch.context() as patch:
        patch.setattr(renderer, "close", lambda: None)
        render(renderer, next(iter(BOMBS)))
    until = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    assert process.poll() == -signal.SIGXCPU
    renderer.close()


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer_config.json"])
def test_the_error_names_prompt_and_template(hybrid_model, hybrid_folder, tmp_path, file):
    for path in hybrid_folder.glob("*token*"):
        shutil.copy(path, tmp_path)
    shutil.copy(hybrid_folder / "chat_template.jinja", tmp_path)
    target = wrap_target(hybrid_model, source=str(tmp_path), folder=tmp_path)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "w5"},))
    assert target.encode(prompt) == [1, 5, 3]
    if file != "chat_template.jinja":
        (tmp_path / "chat_template.jinja").unlink()
    target.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(PromptError, match=rf"'p'.*{file} refuses it \(no\)"):
        target.encode(prompt)
    target._renderer.close()
