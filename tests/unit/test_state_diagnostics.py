"""Verdicts and sentences on hidden states, from hand-made comparisons and audits."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import fake_states
from fakes import FakeInputs, simulated_scores

from dflash_diag import diagnostics, plotting
from dflash_diag.results import Verdict
from dflash_diag.widgets import StateBrowser

CATALOGUE = diagnostics.catalogue()
ABOVE = {2: 9.0, 3: 12.0}
N = 6
GOOD = {"hidden.rows": fake_states.state_rows(N), "hidden.argmax": fake_states.argmax_rows(N)}
GOOD |= {"hidden.identity": fake_states.identity_rows(N)}
GOOD |= {"hidden.chunks": fake_states.case_rows({"63 tokens": 1.9})}


def inputs(comparisons=None, scored=None, checks=None) -> FakeInputs:
    made = FakeInputs({"drafter": simulated_scores(skill=0.45)}, {"drafter": "mine"})
    made.comparisons, made.scored_sides = comparisons or {}, scored or {}
    made.checks = checks or {}
    return made


def same() -> SimpleNamespace:
    return simulated_scores(skill=0.45)


def other() -> SimpleNamespace:
    return simulated_scores(skill=0.8, seed=3)


def judged(id_: str, layers, flips=None, scored=None):
    side = fake_states.comparison(layers, flips=flips)
    return CATALOGUE[id_](inputs({"s": side}, {} if scored is None else {"s": scored}))


@pytest.mark.parametrize(
    ("layers", "scored", "verdict", "words"),
    [
        ({}, same(), Verdict.PASS, "within the noise"),
        ({}, None, Verdict.PASS, "within the noise"),
        (ABOVE, same(), Verdict.WARN, "above the noise from layer 2 on"),
        (ABOVE, other(), Verdict.FAIL, "tau changes by -"),
        (ABOVE, None, Verdict.INCONCLUSIVE, "above the noise from layer 2 on"),
    ],
)
def test_a_difference_is_noise_harmless_a_cause_or_of_unknown_cost(layers, scored, verdict, words):
    found = judged("hidden.divergence", fake_states.layer_rows(layers), scored=scored)
    assert found.verdict is verdict
    assert words in found.headline
    assert found.params["judged"].startswith("s: ")
    assert ("interval" in found.headline) == (scored is not None)


def test_a_wide_interval_around_no_change_is_undecided():
    # The same drafter with its luck handed to other prompts: nothing changes but by prompt.
    swapped = same()
    blocks = swapped.rank.reshape(N, -1, swapped.rank.shape[1])
    swapped.rank = blocks[::-1].reshape(swapped.rank.shape)
    swapped.proposed = swapped.labels + (swapped.rank > 0)
    found = judged("hidden.divergence", fake_states.layer_rows(ABOVE), scored=swapped)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "undecided" in found.params["judged"]
    delta = found.estimates["delta_tau s"]
    assert delta.lo < -0.05 < 0.05 < delta.hi


def test_states_that_are_no_numbers_fail_whatever_they_cost():
    found = judged("hidden.divergence", fake_states.layer_rows({}, broken=(1,)), scored=same())
    assert found.verdict is Verdict.FAIL
    assert "zeros or no numbers at layer 1" in found.headline
    assert found.frame.set_index("layer")["rel_rms"].isna().to_dict()[1]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({1: 9.0, 2: 9.0, 3: 9.0}, "above the noise from layer 1 on"),
        ({3: 9.0}, "above the noise at layer 3"),
        ({0: 9.0, 2: 9.0}, "above the noise at layers 0, 2"),
    ],
)
def test_the_layers_above_the_noise_are_the_ones_that_are_named(times, words):
    assert words in judged("hidden.divergence", fake_states.layer_rows(times)).headline


@pytest.mark.parametrize("scored", [same(), None])
@pytest.mark.parametrize("layers", [{}, ABOVE])
@pytest.mark.parametrize(
    ("id_", "rows"),
    [
        ("hidden.identity", fake_states.identity_rows(N, {1: "the states of layer 0"})),
        ("hidden.rows", fake_states.state_rows(N, zeros=1)),
    ],
)
def test_no_cost_clears_a_capture_that_is_not_what_it_claims(id_, rows, layers, scored):
    side = fake_states.comparison(fake_states.layer_rows(layers))
    checks = {**GOOD, id_: rows}
    found = CATALOGUE["hidden.divergence"](
        inputs({"s": side}, {} if scored is None else {"s": scored}, checks)
    )
    assert found.verdict is Verdict.FAIL
    assert found.headline.endswith(f"The capture is broken ({id_}).")
    assert found.params["judged"].startswith("the capture is broken")
    sound = CATALOGUE["hidden.divergence"](inputs({"s": side}, {"s": same()}, GOOD))
    assert sound.verdict is (Verdict.WARN if layers else Verdict.PASS)


def test_a_part_that_was_compared_is_not_taken_for_all():
    side = fake_states.comparison(fake_states.layer_rows({}))
    side["left_out"] = "1 of 3 prompts, 60 of 180 positions"
    found = CATALOGUE["hidden.divergence"](inputs({"s": side}))
    assert "on 1 of 3 prompts, 60 of 180 positions alone" in found.headline
    assert "s. Compared: 1 of 3 prompts, 60 of 180 positions." in found.notes


WRONG_TEXT = [
    {"id": f"p{i:02d}", "n_tokens": 48, "n_equal": 1, "n_rounding": 0, "n_differ": 47}
    | {"first_differ": 0, "margin": 2.0, "gap": 9.0, "kind": "from_start"}
    | {"stopped_early": False, "how": "ids", "finish_reason": "length"}
    for i in range(N)
]
SERVER = {"url": "http://s", "model": "m", "dialect": "vllm", "version": None, "precision": None}


def test_neither_lossless_nor_noise_speaks_for_a_servers_tokens():
    made = inputs({"s": fake_states.comparison(fake_states.layer_rows({}))}, {"s": same()}, GOOD)
    row = {"n_tokens": 48, "n_same": 48, "cause": "", "margin": None}
    made.lossless_check = {"rows": [{"id": f"p{i:02d}", **row} for i in range(N)]}
    ids, said = ("target.lossless", "hidden.divergence"), "target.reference is FAIL"
    for id_ in ids:
        assert said not in CATALOGUE[id_](made).headline
    server = SERVER | {"tokens_by": ["ids"], "unusable": []}
    made.reference_check = {"server": server, "rows": WRONG_TEXT, "notes": []}
    for id_ in ids:
        found = CATALOGUE[id_](made)
        assert found.verdict is Verdict.PASS
        assert said in found.headline
    same_text = [row | {"n_equal": 48, "n_differ": 0, "kind": ""} for row in WRONG_TEXT]
    made.reference_check["rows"] = [row | {"first_differ": None} for row in same_text]
    for id_ in ids:
        assert "server" not in CATALOGUE[id_](made).headline


def test_the_worst_side_decides_and_nothing_to_compare_is_skipped():
    sides = fake_states.comparisons()
    for names, verdict in (
        (["torch/bfloat16"], Verdict.PASS),
        (["torch/bfloat16", "fla/bfloat16"], Verdict.INCONCLUSIVE),
        (["fla/bfloat16", "torch/bfloat16", "<b>broken</b>"], Verdict.FAIL),
    ):
        found = CATALOGUE["hidden.divergence"](inputs({name: sides[name] for name in names}))
        assert found.verdict is verdict
    for id_ in ("hidden.divergence", "hidden.effect", "hidden.modules"):
        nothing = CATALOGUE[id_](inputs())
        assert nothing.verdict is Verdict.SKIPPED
        assert "--against" in nothing.headline


@pytest.mark.parametrize(
    ("flipped", "scored", "verdict", "words"),
    [
        ({3: 0.01}, same(), Verdict.PASS, "1.7\u00a0% of the target's choices"),
        ({3: 0.01}, other(), Verdict.FAIL, "of the drafts flip, tau changes by -"),
        ({3: 0.9, 4: 0.9}, same(), Verdict.WARN, "3.3\u00a0% of the target's choices"),
        ({3: 0.01}, None, Verdict.INCONCLUSIVE, "flip (0 by more than rounding)"),
        (None, None, Verdict.INCONCLUSIVE, "unknown"),
    ],
)
def test_the_effect_is_judged_by_tau_and_by_flips(flipped, scored, verdict, words):
    flips = None if flipped is None else fake_states.flip_rows(N, flipped)
    found = judged("hidden.effect", fake_states.layer_rows({}), flips, scored)
    assert found.verdict is verdict
    assert words in found.headline
    assert len(found.frame) == len(flipped or {})
    assert found.html()


def test_one_harmless_side_does_not_speak_for_a_side_of_unknown_cost():
    flips = fake_states.flip_rows(N, {})
    noise = fake_states.comparison(fake_states.layer_rows({}), flips=flips)
    above = fake_states.comparison(fake_states.layer_rows(ABOVE), flips=flips)
    found = CATALOGUE["hidden.effect"](inputs({"a": noise, "b": above}, {"a": same()}))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.params["judged"].startswith("b: ")
    # One that is rounding alone need not be known.
    found = CATALOGUE["hidden.effect"](inputs({"a": noise, "b": noise}, {"a": same()}))
    assert found.verdict is Verdict.PASS


def test_the_first_module_is_named_with_where_its_error_comes_from():
    rows = fake_states.module_rows((2, "linear_attn"))
    side = fake_states.comparison(fake_states.layer_rows(ABOVE), rows)
    found = CATALOGUE["hidden.modules"](inputs({"s": side}))
    assert found.verdict is Verdict.WARN
    assert "linear_attn of layer 2" in found.headline
    assert found.headline.endswith("created there.")
    ax = plotting.figure(found).axes[0]
    assert "linear_attn of layer 2" in [text.get_text() for text in ax.texts]
    fine = fake_states.comparison(fake_states.layer_rows({}), fake_states.module_rows())
    assert CATALOGUE["hidden.modules"](inputs({"s": fine})).verdict is Verdict.PASS
    bare = fake_states.comparison(fake_states.layer_rows({}))
    assert CATALOGUE["hidden.modules"](inputs({"s": bare})).verdict is Verdict.SKIPPED


BAD = {
    "hidden.rows": (fake_states.state_rows(N, nans=3), "3 rows with NaN or Inf, the first at 7"),
    "hidden.argmax": (fake_states.argmax_rows(N, decisive=4), "4 of 360 choices differ"),
    "hidden.identity": (
        fake_states.identity_rows(N, {1: "the states of layer 0"}),
        "layer 1 are the states of layer 0 (on 6 of 6 prompts)",
    ),
    "hidden.chunks": (
        fake_states.case_rows({"63 tokens": 2.1}),
        "63 tokens: 2.1 noise floors, from layer 1 on",
    ),
}


@pytest.mark.parametrize("id_", BAD)
def test_the_audit_passes_fails_and_is_skipped_with_its_reason(id_):
    assert CATALOGUE[id_](inputs(checks=GOOD)).verdict is Verdict.PASS
    rows, words = BAD[id_]
    found = CATALOGUE[id_](inputs(checks={id_: rows}))
    assert found.verdict is Verdict.FAIL
    assert words in found.headline
    crosses = [one for one in plotting.figure(found).axes[0].lines if one.get_marker() == "X"]
    assert sum(len(one.get_xdata()) for one in crosses)
    skipped = CATALOGUE[id_](inputs(checks={id_: "No target is at hand."}))
    assert (skipped.verdict, skipped.headline) == (Verdict.SKIPPED, "No target is at hand.")


@pytest.mark.parametrize("n", [1, 6])
def test_layers_above_are_crosses_and_each_side_has_a_marker_of_its_own(n):
    side = fake_states.comparison(fake_states.layer_rows(ABOVE))
    found = CATALOGUE["hidden.divergence"](inputs({f"side {i}": side for i in range(n)}))
    for ax in plotting.figure(found).axes:
        crosses = [line for line in ax.lines if line.get_marker() == "X"]
        assert sorted({float(x) for line in crosses for x in line.get_xdata()}) == [2, 3]
        markers = {line.get_marker() for line in ax.lines} - {"X", "None", None}
        assert len(markers) == n
        named = {text.get_text() for text in ax.texts}
        assert (f"side {n - 1}" in named) == (n > 1)
    # One band for all: their floors are the same.
    assert len(plotting.figure(found).axes[0].collections) == 1


def near_rows(error: float):
    rows = fake_states.identity_rows(N, {1: "layer 1, no known fault"})
    return [
        row | {"kind": "near", "rel_rms": error, "explained": error} if row["layer"] == 1 else row
        for row in rows
    ]


def test_what_is_near_warns_and_is_said_after_what_has_a_name():
    near = near_rows(0.049)
    found = CATALOGUE["hidden.identity"](inputs(checks={"hidden.identity": near}))
    assert found.verdict is Verdict.WARN
    said = "The states kept as layer 1 are layer 1, 4.9\u00a0% off, no known fault (on 6 of 6"
    assert found.headline == f"{said} prompts)."
    other = fake_states.identity_rows(N, {2: "layer 2 times 100"})
    rough = {"kind": "scaled", "rough": True, "explained": 0.011}
    mixed = [o | rough if o["layer"] == 2 else n for n, o in zip(near, other, strict=True)]
    found = CATALOGUE["hidden.identity"](inputs(checks={"hidden.identity": mixed}))
    assert found.verdict is Verdict.FAIL
    assert "layer 2 are layer 2 times 100, 1.1\u00a0% off (on 6 of 6 prompts)" in found.headline
    assert found.headline.endswith("(and 1 more, of layer 1).")
    assert CATALOGUE["hidden.identity"](inputs(checks=GOOD)).headline == (
        "The states of layers -1 to 3 are what the target computes (relative RMS at most "
        "0.2\u00a0%; up to 0.8\u00a0% counts as rounding)."
    )


def test_integers_are_not_called_numbers_like_others():
    rows = [row | {"dtype": "int8"} for row in fake_states.state_rows(N)]
    found = CATALOGUE["hidden.rows"](inputs(checks={"hidden.rows": rows}))
    assert found.verdict is Verdict.FAIL
    assert found.headline.startswith("The states are integers (int8)")


# --- the browser ----------------------------------------------------------------------------------


class FakeCapture:
    foreign = True
    prompts = tuple(SimpleNamespace(id=f"p{i:02d}", n_prompt_tokens=21) for i in range(N))

    def index(self, id_: str) -> int:
        return int(id_[1:])

    def tokens(self, _: int):
        import torch

        return torch.arange(100, 130)


@pytest.fixture
def browser() -> StateBrowser:
    made = inputs(fake_states.comparisons())
    made.capture = FakeCapture()
    return StateBrowser(made)


def test_the_static_twin_shows_the_worst_side_layer_and_prompt(browser):
    assert browser.worst() == ("<b>broken</b>", 3, "p00")
    html = browser.static_html()
    assert "<b>broken" not in html
    assert "&lt;b&gt;broken" in html
    assert "zeros or no numbers" in html


def test_flips_are_marked_by_a_sign_and_modules_in_words(browser):
    html = browser.html("fla/bfloat16", 2, "p00")
    assert html.count('class="flip" title') == 3
    assert html.count('class="tie" title') == 1
    assert "[124] <sup>✗</sup>" in html
    assert "4 of 10 choices flip, 3 by more than rounding" in html
    assert "✗ created in this layer" in html
    assert "! inherited" in html
    assert "✓ noise" in html
    assert html.index("linear_attn") < html.index("mlp") < html.index("output")


def test_menus_change_what_is_shown_and_stay_within_what_a_side_has(browser):
    widget = browser.widget()
    *rows, shown = widget.children
    side, layer, prompt = menus = [row.children[0] for row in rows]
    assert [menu.description for menu in menus] == ["against", "layer", "prompt"]
    side.value, layer.value, prompt.value = "fla/bfloat16", 2, "p03"
    assert shown.value == browser.html("fla/bfloat16", 2, "p03")
    assert [value for _, value in prompt.options] == [f"p{i:02d}" for i in range(N)]


def test_buttons_step_through_a_menu_and_stop_at_its_ends(browser):
    *rows, shown = browser.widget().children
    layer, up, down = rows[1].children
    assert layer.options[0] == ("Embedding", -1)
    layer.value = 0
    up.click()
    assert layer.value == -1
    up.click()
    assert layer.value == -1
    down.click()
    assert layer.value == 0
    side, _, prompt = (row.children[0].value for row in rows)
    assert shown.value == browser.html(side, 0, prompt)
    layer.index = len(layer.options) - 1
    down.click()
    assert layer.index == len(layer.options) - 1


def test_a_side_with_other_layers_and_prompts_is_sent_once(browser):
    found = browser.comparison("torch/bfloat16")
    found["layers"] = [row for row in found["layers"] if row["layer"] < 2]
    found["prompts"] = [
        row for row in found["prompts"] if row["layer"] < 2 and row["prompt"] != "p00"
    ]
    *rows, shown = browser.widget().children
    side, layer, prompt = (row.children[0] for row in rows)
    assert (layer.value, prompt.value) == (3, "p00")
    sent = []
    shown.send_state = lambda key: sent.append(key)
    side.value = "torch/bfloat16"
    assert (layer.value, prompt.value) == (-1, "p01")
    assert shown.value == browser.html("torch/bfloat16", -1, "p01")
    assert len(sent) == 1


def test_the_bundle_is_both_live_and_static(browser):
    bundle = browser._repr_mimebundle_()
    assert {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"} <= set(bundle)
    nothing = StateBrowser(inputs())
    assert set(nothing._repr_mimebundle_()) == {"text/html", "text/plain"}
    assert "--against" in nothing.static_html()
