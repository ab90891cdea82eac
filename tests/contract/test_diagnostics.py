"""What every registered diagnostic owes its readers."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from fakes import FakeInputs
from matplotlib.figure import Figure

from dflash_diag import diagnostics, plotting
from dflash_diag.diagnostics.base import Skip
from dflash_diag.results import MIME_TYPE, Result, Verdict
from dflash_diag.stats import Estimate

CATALOGUE = diagnostics.catalogue()
IDS = list(CATALOGUE)
NOT_MEASURED = (Verdict.SKIPPED, Verdict.ERROR)


@pytest.fixture(scope="session")
def results(inputs) -> dict[str, Result]:
    return {id_: one(inputs) for id_, one in CATALOGUE.items()}


@pytest.fixture(params=IDS)
def result(request, results) -> Result:
    return results[request.param]


class Page(HTMLParser):
    """Tags with their attributes, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def test_every_module_of_the_list_registers_something_and_none_is_left_out():
    folder = Path(diagnostics.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "base"}
    assert files == set(diagnostics.MODULES)
    modules = {one.measure.__module__ for one in CATALOGUE.values()}
    assert modules == {"dflash_diag.diagnostics.base"}
    assert len(IDS) == len(set(IDS)) >= len(diagnostics.MODULES)


def test_a_diagnostic_is_short():
    for path in Path(diagnostics.__file__).parent.glob("*.py"):
        lines = len(path.read_text().splitlines())
        assert path.name == "base.py" or lines <= 150, f"{path.name} has {lines} lines"


def test_it_returns_a_judged_result(result):
    assert result.verdict not in NOT_MEASURED, result.headline
    known = CATALOGUE[result.id]
    assert result.question == known.question
    assert result.question.endswith("?")
    assert result.headline.endswith(".")
    assert isinstance(result.frame, pd.DataFrame)
    assert len(result.frame)
    assert all(isinstance(one, Estimate) for one in result.estimates.values())
    assert result.params["judged"]


def test_thresholds_are_data_with_a_source(result):
    known = CATALOGUE[result.id]
    assert len(result.params.get("thresholds", [])) == len(known.thresholds)
    for threshold in known.thresholds:
        assert threshold.source
        assert threshold.estimate in result.estimates
        assert (threshold.at_least is None) != (threshold.at_most is None)


def test_its_numbers_lie_in_their_intervals_and_rates_in_zero_to_one(result):
    for name, one in result.estimates.items():
        if one.value is None or one.lo is None:
            continue
        assert one.lo <= one.value <= one.hi, name
        if one.unit == "share":
            assert 0 <= one.lo <= one.hi <= 1, name


def test_it_is_json(result):
    text = json.dumps(result.to_json(), allow_nan=False)
    assert json.loads(text)["id"] == result.id


def test_it_survives_disk_and_is_drawn_the_same(result, tmp_path):
    loaded = Result.load(result.save(tmp_path / "kept"))
    assert loaded.to_json() == result.to_json()
    pd.testing.assert_frame_equal(loaded.frame, result.frame)
    assert plotting.svg(loaded) == plotting.svg(result)
    assert CATALOGUE[result.id].rejudge(loaded).verdict is result.verdict


def test_other_thresholds_judge_a_stored_result_without_its_inputs(result):
    known = CATALOGUE[result.id]
    for threshold in known.thresholds:
        end = {"at_least": -1e9} if threshold.at_least is not None else {"at_most": 1e9}
        easy = replace(threshold, **end)
        assert easy.judge(result).verdict is Verdict.PASS


def test_it_draws_on_given_axes(result):
    ax = Figure().subplots()
    assert result.plot(ax) is ax
    assert ax.get_title(loc="left")
    assert ax.has_data() or ax.texts


def test_drawing_leaves_no_global_state(result):
    import sys

    import matplotlib as mpl

    before = dict(mpl.rcParams)
    result.plot()
    assert dict(mpl.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules


def test_axes_name_their_quantity(result):
    for ax in plotting.figure(result).axes:
        labels = [ax.get_xlabel(), ax.get_ylabel(), *(t.get_text() for t in ax.get_yticklabels())]
        assert any(labels)
        if "share" in ax.get_ylabel():
            assert ax.get_ylim() == (0, 1)


def test_its_html_is_static_and_says_what_the_figure_shows(result):
    html = result._repr_mimebundle_()["text/html"]
    page = Page(html)
    (image,) = page.all("img")
    assert image["src"].startswith("data:image/svg+xml;base64,")
    assert result.headline in image["alt"]
    assert page.all("figcaption")
    assert page.all("table")
    assert not page.all("script")
    assert "<b>" not in html  # the reference is called <b>published</b>
    assert result._repr_mimebundle_()[MIME_TYPE]["id"] == result.id


def test_roles_differ_by_more_than_colour():
    looks = list(plotting.LOOKS.values())
    for part in ("colour", "marker", "dash"):
        assert len({str(getattr(look, part)) for look in looks}) == len(looks)


@pytest.mark.parametrize("id_", IDS)
def test_one_prompt_and_no_reference_are_enough(id_, another):
    alone = CATALOGUE[id_](another(reference=False, n_prompts=2))
    assert alone.verdict is not Verdict.ERROR, alone.headline
    assert alone.html()
    if id_ == "acceptance.comparison":
        assert alone.verdict is Verdict.SKIPPED
        assert "--reference" in alone.headline


def test_a_single_prompt_gives_numbers_without_intervals(another):
    single = another(reference=True, n_prompts=1)
    for id_, one in CATALOGUE.items():
        found = one(single)
        assert found.verdict is not Verdict.ERROR, f"{id_}: {found.headline}"
    headline = CATALOGUE["acceptance.headline"](single)
    assert headline.verdict is Verdict.INCONCLUSIVE
    assert headline.estimates["tau_walked"].lo is None


def test_a_crash_becomes_a_result_and_bad_input_does_not(inputs):
    from dflash_diag.errors import BadInput

    class Broken(FakeInputs):
        def metrics(self, role):
            raise self.error

    broken = Broken(inputs.by_role, inputs.names)
    broken.error = ZeroDivisionError("no rounds")
    found = CATALOGUE["acceptance.headline"](broken)
    assert found.verdict is Verdict.ERROR
    assert "no rounds" in found.headline
    assert found.html()
    broken.error = BadInput("a capture of another target")
    with pytest.raises(BadInput):
        CATALOGUE["acceptance.headline"](broken)


def test_without_a_target_losslessness_is_skipped_not_assumed(inputs):
    bare = replace(inputs, lossless_check=None)
    found = CATALOGUE["target.lossless"](bare)
    assert found.verdict is Verdict.SKIPPED
    assert "target" in found.headline


def test_real_decoding_and_the_walk_are_compared_round_by_round(inputs):
    walked = {one["id"]: one["rounds"] for one in inputs.metrics("drafter")["per_prompt"]}
    other = {**walked, "p02": [*walked["p02"], 1], "not scored": [1]}
    checked = replace(inputs, lossless_check={**inputs.lossless_check, "rounds": other})
    found = CATALOGUE["target.lossless"](checked)
    assert found.params["n_rounds_agree"] == 5
    assert any("on 5 of 6 prompts" in note for note in found.notes)


def test_claims_are_decided_on_the_trainers_texts_and_hinted_at_on_others(inputs):
    from dflash_diag.claims import read_claims

    split = inputs.replay()["splits"]["train"]
    texts = {"topk_oracle@8 uniform": {"value": 3.6, "lo": 3.4, "hi": 3.8}}
    texts |= {"ddtree_tau@8 uniform": {"value": 2.4, "lo": 2.3, "hi": 2.5}}
    lines = read_claims(["dds8=3.58", "streak=1.24"])

    class Replayed(FakeInputs):
        def replay(self):
            if self.texts is None:
                raise Skip("No texts.")
            return {"splits": {"train": {**split, "numbers": self.texts}}}

    given = Replayed(inputs.by_role, inputs.names, claimed_lines=lines)
    given.texts = texts
    found = CATALOGUE["claims.fit"](given)
    assert found.verdict is Verdict.PASS
    dds8, streak = found.params["claims"]
    assert (dds8["fits"], dds8["by"]) == (["topk_oracle@8 uniform"], "measured")
    assert streak["by"] == "bounds"
    given.texts = None
    found = CATALOGUE["claims.fit"](given)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert len(found.params["claims"][0]["fits"]) == 3
    assert set(found.frame["text"]) == {"your prompts"}


@pytest.mark.parametrize(
    ("texts", "verdict", "said"),
    [
        ([], Verdict.SKIPPED, "--claim"),
        (["dds4=2.78", "dds8=2.11"], Verdict.WARN, "contradicts"),
        (["accuracy=1.3"], Verdict.WARN, "fits no definition (it is at most 1)"),
        (["oddity=-3.0"], Verdict.WARN, "none has such a value"),
        (["dds8=3.58", "streak=1.24"], Verdict.INCONCLUSIVE, "its line does not tell"),
        (["topk_oracle@8=3.58", "streak=1.24"], Verdict.PASS, "one reading"),
    ],
)
def test_claims_are_judged_without_a_drafter_too(texts, verdict, said):
    from dflash_diag.claims import read_claims

    bare = FakeInputs({}, {}, claimed_lines=read_claims(texts), replayed={"splits": {}})
    found = CATALOGUE["claims.fit"](bare)
    assert found.verdict is verdict, found.headline
    assert said in found.headline
    if verdict is not Verdict.SKIPPED:
        assert found.html()
    assert CATALOGUE["claims.dictionary"](bare).verdict is Verdict.SKIPPED
