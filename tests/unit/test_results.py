"""Results: judged by the whole interval, saved and read back, shown without us."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

import dflash_diag
from dflash_diag.errors import BadInput
from dflash_diag.results import (
    MIME_TYPE,
    ROWS_SHOWN,
    Result,
    Verdict,
    failed,
    judge,
    skipped,
    worst,
)
from dflash_diag.stats import Estimate


@pytest.fixture
def plotting(monkeypatch):
    """A plotting module with one registered plot, in place of the real one."""
    module = ModuleType("dflash_diag.plotting")
    module.PLOTS = {"acceptance": lambda result, ax: ax}
    module.plot = lambda result, ax: (result.id, ax)
    module.figure_html = lambda result: f'<figure><img alt="{result.id}"></figure>'
    monkeypatch.setitem(sys.modules, "dflash_diag.plotting", module)
    monkeypatch.setattr(dflash_diag, "plotting", module, raising=False)
    return module


def result(**changes) -> Result:
    frame = pd.DataFrame(
        {
            "k": [1, 2],
            "survival": [0.81234, np.nan],
            "token": ["<b>", "nan"],
            "rounds": [[1, 2], []],
        }
    )
    fields = {
        "id": "acceptance",
        "question": "How many tokens are accepted?",
        "headline": "2.68 tokens a round",
        "verdict": Verdict.PASS,
        "estimates": {"tau": Estimate(2.68, 2.3, 3.1, 12, "tokens"), "none": Estimate(None)},
        "frame": frame,
        "params": {"seed": 1, "layers": (1, 4), "share": float("nan")},
        "notes": ("12 prompts",),
        "provenance": {"device": "cpu"},
    }
    return Result(**fields | changes)


# --- verdicts -----------------------------------------------------------------------------------


def test_the_suite_is_as_bad_as_its_worst_verdict():
    assert worst([Verdict.PASS, Verdict.WARN, Verdict.INCONCLUSIVE]) is Verdict.WARN
    assert worst([Verdict.ERROR, Verdict.FAIL]) is Verdict.FAIL
    assert worst([]) is Verdict.SKIPPED


def test_each_verdict_has_its_own_word_and_glyph():
    assert [str(v) for v in sorted(Verdict, key=lambda v: v.severity)] == [
        "PASS", "SKIPPED", "INCONCLUSIVE", "WARN", "ERROR", "FAIL"
    ]  # fmt: skip
    assert len({v.glyph for v in Verdict}) == 6


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ({"at_least": 1.5}, Verdict.PASS),
        ({"at_least": 2.0}, Verdict.PASS),
        ({"at_most": 3.0}, Verdict.PASS),
        ({"at_least": 1.9, "at_most": 3.1}, Verdict.PASS),
        ({"at_least": 3.5}, Verdict.FAIL),
        ({"at_most": 1.5}, Verdict.FAIL),
        ({"at_least": 4.0, "at_most": 5.0}, Verdict.FAIL),
        ({"at_least": 3.5, "margin": 2.0}, Verdict.WARN),
        ({"at_most": 1.5, "margin": 1.5}, Verdict.WARN),
        ({"at_least": 3.5, "margin": 1.0}, Verdict.INCONCLUSIVE),
        ({"at_least": 2.4}, Verdict.INCONCLUSIVE),
        ({"at_least": 2.6}, Verdict.INCONCLUSIVE),
        ({"at_most": 2.4}, Verdict.INCONCLUSIVE),
        ({"at_least": 2.4, "margin": 1.0}, Verdict.INCONCLUSIVE),
        ({"at_least": 1.0, "at_most": 2.9}, Verdict.INCONCLUSIVE),
    ],
)
def test_the_whole_interval_decides(bounds, verdict):
    assert judge(Estimate(2.5, 2.0, 3.0, 12), **bounds).verdict is verdict


def test_inconclusive_says_how_many_prompts_would_settle_it():
    found = judge(Estimate(2.5, 2.0, 3.0, 12, "tokens"), at_least=2.4, what="walked tau")
    # spread = 1 * sqrt(12) / (2 * 1.96) = 0.884; (2.8016 * 0.884 / 0.1)^2 = 613
    assert "walked tau is 2.5 [2, 3] tokens over 12 prompts" in found.reason
    assert "about 613 prompts would settle it" in found.reason


def test_no_interval_no_verdict():
    assert judge(Estimate(9.0, n=1), at_least=1).verdict is Verdict.INCONCLUSIVE
    assert "24 or more" in judge(Estimate(9.0, n=1), at_least=1).reason
    assert judge(Estimate(None), at_least=1).verdict is Verdict.INCONCLUSIVE
    on_the_edge = judge(Estimate(2.0, 1.0, 3.0, 12), at_least=2.0)
    assert "no number of prompts can be named" in on_the_edge.reason


def test_a_judgement_needs_something_to_judge_by():
    with pytest.raises(ValueError, match="at_least, at_most or both"):
        judge(Estimate(1.0, 0.5, 1.5, 9))


# --- frozen -------------------------------------------------------------------------------------


def test_a_result_cannot_be_changed():
    one = result()
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.verdict = Verdict.FAIL
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.frame = pd.DataFrame()


def test_its_frame_is_copied_in_and_out():
    frame = pd.DataFrame({"k": [1]})
    one = result(frame=frame)
    frame.loc[0, "k"] = 7
    handed_out = one.frame
    handed_out.loc[0, "k"] = 8
    assert one.frame["k"].tolist() == [1]


def test_a_copy_with_another_verdict_keeps_the_rest():
    judged = dataclasses.replace(result(), verdict=Verdict.WARN)
    assert judged.verdict is Verdict.WARN
    pd.testing.assert_frame_equal(judged.frame, result().frame)


def test_a_result_needs_a_headline():
    with pytest.raises(ValueError, match="headline"):
        result(headline="")


# --- on disk ------------------------------------------------------------------------------------


def test_saving_and_loading_is_the_identity(tmp_path):
    one = result(frame=pd.DataFrame({"k": [1, 2], "x": [0.5, np.nan], "s": ["a", None]}))
    one.save(tmp_path / "r")
    again = Result.load(tmp_path / "r")
    pd.testing.assert_frame_equal(again.frame, one.frame)
    assert again.to_json() == one.to_json()
    assert again.estimates == one.estimates
    assert again.verdict is Verdict.PASS


def test_the_file_is_plain_json_without_nan(tmp_path):
    result().save(tmp_path)
    record = json.loads((tmp_path / "result.json").read_text(), parse_constant=pytest.fail)
    assert record["schema_version"] == "dflash_diag.result/1"
    assert record["params"] == {"seed": 1, "layers": [1, 4], "share": None}
    assert record["estimates"]["none"]["value"] is None


def test_saving_again_replaces(tmp_path):
    result().save(tmp_path / "r")
    result(headline="other").save(tmp_path / "r")
    assert Result.load(tmp_path / "r").headline == "other"
    assert [p.name for p in tmp_path.iterdir()] == ["r"]


def test_an_empty_frame_survives(tmp_path):
    skipped("x", "q?", "no target").save(tmp_path)
    assert Result.load(tmp_path).frame.empty


def test_another_table_or_schema_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        Result.load(tmp_path)
    result().save(tmp_path)
    pd.DataFrame({"k": [3]}).to_parquet(tmp_path / "frame.parquet")
    with pytest.raises(BadInput, match="not the table that result.json names"):
        Result.load(tmp_path)
    record = json.loads((tmp_path / "result.json").read_text()) | {"schema_version": "other/9"}
    (tmp_path / "result.json").write_text(json.dumps(record))
    with pytest.raises(BadInput, match="other/9"):
        Result.load(tmp_path)


# --- shown --------------------------------------------------------------------------------------


def test_the_bundle_holds_html_text_and_json(plotting):
    bundle = result()._repr_mimebundle_(include=None, exclude=None)
    assert set(bundle) == {"text/html", "text/plain", MIME_TYPE}
    assert bundle[MIME_TYPE]["verdict"] == "PASS"
    assert bundle["text/plain"].startswith("✓ PASS  2.68 tokens a round")
    assert "tau: 2.68 [2.3, 3.1] tokens" in bundle["text/plain"]


def test_the_figure_comes_before_its_table(plotting):
    html = result().html()
    assert html.index("<figure>") < html.index("<caption>How many tokens are accepted?")
    assert "<strong>PASS</strong>" in html
    assert '<th scope="col">survival</th>' in html


def test_unknown_numbers_are_dashes_and_the_word_nan_stays(plotting):
    html = result().html()
    assert "<td>0.8123</td>" in html
    assert "<td>—</td><td>nan</td>" in html


def test_all_text_is_escaped(plotting):
    evil = "<script>alert('x')</script>"
    html = result(
        id="none",
        question=evil,
        headline=evil,
        notes=(evil,),
        estimates={evil: Estimate(1, unit=evil)},
        frame=pd.DataFrame({evil: [evil]}),
    ).html()
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 8


def test_without_a_registered_plot_there_is_only_the_table(plotting):
    html = result(id="unplotted").html()
    assert "<figure" not in html
    assert "<table>" in html


def test_a_long_table_says_that_it_is_cut(plotting):
    html = result(id="long", frame=pd.DataFrame({"k": range(ROWS_SHOWN + 5)})).html()
    assert f"the first {ROWS_SHOWN} of {ROWS_SHOWN + 5} rows" in html
    assert f"<td>{ROWS_SHOWN}</td>" not in html


def test_plot_looks_itself_up_by_id(plotting):
    assert result().plot("axes") == ("acceptance", "axes")
    with pytest.raises(BadInput, match="unplotted has no plot"):
        result(id="unplotted").plot()


def test_short_repr():
    assert repr(result()) == (
        "Result(id='acceptance', verdict=PASS, headline='2.68 tokens a round')"
    )


# --- without numbers ----------------------------------------------------------------------------


def test_skipped_says_why_and_draws_nothing():
    one = skipped("acceptance", "q?", "no target at hand", params={"seed": 1})
    assert one.verdict is Verdict.SKIPPED
    assert "no target at hand" in one.html()
    assert "<figure" not in one.html()
    assert "<table" not in one.html()


def test_a_crash_becomes_a_result():
    try:
        {}["missing"]
    except KeyError as error:
        one = failed("acceptance", "q?", error)
    assert one.verdict is Verdict.ERROR
    assert one.headline == "KeyError: 'missing'"
    assert one.notes[0].startswith("raised in test_results.py, line ")


def test_bad_input_keeps_its_own_words():
    one = failed("acceptance", "q?", BadInput("fc has 5 taps", "6"))
    assert one.headline == "fc has 5 taps; expected 6"
