"""What is drawn, artist by artist; never pixels."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fakes import FakeInputs, simulated_scores

from dflash_diag import diagnostics, plotting
from dflash_diag.published import published_curves

CATALOGUE = diagnostics.catalogue()


def inputs(names=("step_8000", "published"), n_prompts=6, **scores) -> FakeInputs:
    drafters = {
        role: simulated_scores(skill=skill, seed=i, n_prompts=n_prompts, **scores)
        for i, (role, skill) in enumerate((("drafter", 0.4), ("reference", 0.85)))
    }
    return FakeInputs(drafters, dict(zip(drafters, names, strict=True)))


@pytest.fixture(scope="module")
def found() -> FakeInputs:
    return inputs()


def texts(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_the_survival_lines_are_the_frames_numbers(found):
    result = CATALOGUE["acceptance.by_position"](found)
    ax = plotting.figure(result).axes[0]
    walked = result.frame[result.frame["population"] == "walked"]
    drawn = {line.get_color(): line for line in ax.lines}
    for role, look in plotting.LOOKS.items():
        expected = walked[walked["role"] == role]["survival"].to_numpy()
        line = drawn[look.colour]
        assert line.get_ydata() == pytest.approx(expected)
        assert line.get_marker() == look.marker
    assert len(ax.collections) == 2  # a band each
    assert {"step_8000", "published"} <= set(texts(ax))  # named at their ends, no legend
    assert ax.get_legend() is None


def test_published_curves_are_drawn_faintly_where_they_are_at_hand(found):
    result = CATALOGUE["acceptance.by_position"](found)
    ax = plotting.figure(result).axes[0]
    faint = [line for line in ax.lines if line.get_color() == plotting.FAINT]
    assert len(faint) == len(published_curves()) == 19
    without = replace(result, params={**result.params, "published": []}, frame=result.frame)
    ax = plotting.figure(without).axes[0]
    assert len(ax.lines) == 2
    assert not [text for text in texts(ax) if text.startswith("grey")]


def test_published_curves_fall_and_name_their_source():
    for curve in published_curves():
        assert curve["source"] != "same"
        assert curve["survival"] == sorted(curve["survival"], reverse=True)


def test_end_labels_never_overlap(found):
    result = CATALOGUE["acceptance.by_position"](found)
    for ax in plotting.figure(result).axes:
        low, high = ax.get_ylim()
        names = {"step_8000", "published"}
        heights = sorted(t.xy[1] for t in ax.texts if t.get_text() in names)
        assert len(heights) == 2
        for below, above in pairwise(heights):
            assert above - below >= 0.08 * (high - low)


def test_titles_say_n_and_stay_inside_the_figure(found):
    for one in ("acceptance.headline", "acceptance.prompts", "acceptance.trees"):
        figure = plotting.figure(CATALOGUE[one](found))
        title = figure.axes[0].get_title(loc="left")
        assert "n\u00a0=\u00a06" in title
        figure.draw_without_rendering()
        box = figure.axes[0]._left_title.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width


@pytest.mark.parametrize("name", ["$x_1$", "a&b<c>", "日本語", "line\nbreak", "nul\x00", "x" * 200])
def test_any_name_can_be_drawn_and_gives_valid_xml(name):
    found = inputs(names=(name, "reference"))
    found.by_role["drafter"].prompt_ids[0] = name
    found.by_role["reference"].prompt_ids[0] = name
    for one in ("acceptance.headline", "acceptance.prompts", "acceptance.by_position"):
        drawn = plotting.svg(CATALOGUE[one](found))
        root = ElementTree.fromstring(drawn)
        letters = "".join(root.itertext())
        if name.isprintable() and len(name) < 20:
            assert name in letters


def test_many_prompts_are_thinned_out_and_the_title_says_so():
    result = CATALOGUE["acceptance.prompts"](inputs(n_prompts=50, generated=16))
    ax = plotting.figure(result).axes[0]
    assert len(ax.get_yticks()) == plotting.pieces.ROWS
    assert "40 of them drawn" in ax.get_title(loc="left").replace("\n", " ")


def test_the_same_result_gives_the_same_bytes_with_letters_as_letters(found):
    result = CATALOGUE["acceptance.headline"](found)
    first = plotting.svg(result)
    assert first == plotting.svg(result)
    assert "<text" in first
    assert "system-ui" in first
    assert "DejaVu" not in first
    assert "matplotlib.org" not in first
    assert 'href="http' not in first


def test_the_brief_figure_is_the_first_panel_with_words_of_its_own(found):
    result = CATALOGUE["acceptance.by_position"](found)
    assert len(plotting.figure(result, brief=True).axes) == 1
    assert "Middle" in plotting.figure_html(result)
    assert "Middle" not in plotting.figure_html(result, brief=True)


def test_walked_and_uniform_differ_by_fill(found):
    ax = plotting.figure(CATALOGUE["acceptance.headline"](found)).axes[0]
    dots = [line for line in ax.lines if line.get_marker() in "os"]
    filled = [line.get_markerfacecolor() != "white" for line in dots]
    assert filled == [True, False, True, False]


def test_rates_over_few_rounds_are_not_drawn(found):
    result = CATALOGUE["acceptance.by_position"](found)
    frame = result.frame[(result.frame["population"] == "walked") & result.frame["n_before"].ge(10)]
    ax = plotting.figure(result).axes[1]
    drawn = sum(len(line.get_xdata()) for line in ax.lines)
    assert drawn == len(frame.dropna(subset=["conditional"]))
    assert drawn < len(result.frame) / 2
