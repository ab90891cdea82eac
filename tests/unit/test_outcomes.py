"""What a drafter foretells of a block, and which blocks are picked, against sums done by hand."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from fakes import FakeInputs, simulated_scores

from dflash_diag import diagnostics, plotting
from dflash_diag.outcomes import FINEST, ORDERS, PICKS, Outcomes, expected, surprise
from dflash_diag.token_kinds import KINDS, kind_of


def table(p, right, *, prompt=None, label_logprob=None) -> Outcomes:
    """Blocks with probabilities ``p`` [A, D] of the proposals, right where ``right`` is."""
    p, right = np.array(p, float), np.array(right, bool)
    prompt = np.zeros(len(p), int) if prompt is None else np.array(prompt)
    starts = {one: int(np.flatnonzero(prompt == one)[0]) for one in prompt.tolist()}
    labels = np.arange(right.size).reshape(right.shape)
    return Outcomes(
        SimpleNamespace(
            prompt=prompt,
            anchor=np.array([10 + i - starts[one] for i, one in enumerate(prompt.tolist())]),
            labels=labels,
            proposed=np.where(right, labels, -7),
            topk_logprobs=np.log(p)[..., None].astype(np.float32),
            label_logprob=np.log(p) if label_logprob is None else np.array(label_logprob, float),
        )
    )


def test_a_forecast_by_hand():
    one = table([[0.5, 0.8, 0.1]] * 4, [[0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
    assert one.accepted.tolist() == [0, 1, 2, 3]
    assert one.expected == pytest.approx([0.5 + 0.4 + 0.04] * 4)
    chances = [0.5, 0.5 * 0.2, 0.5 * 0.8 * 0.9, 0.5 * 0.8 * 0.1]
    assert one.surprise == pytest.approx([-math.log(chance) for chance in chances])
    assert sum(chances) == pytest.approx(1)
    assert one.missed.tolist() == [0, 4, 8, -1]


def test_surprise_is_the_surprisal_of_a_distribution_whose_mean_is_expected():
    rng = np.random.default_rng(0)
    logprobs = np.log(rng.uniform(0.01, 0.99, (50, 7)))
    chances = np.stack([np.exp(-surprise(logprobs, np.full(50, j))) for j in range(8)])
    assert chances.sum(axis=0) == pytest.approx(1)
    assert (np.arange(8) @ chances) == pytest.approx(expected(logprobs))


def test_a_proposal_that_was_certain_surprises_by_what_float32_can_tell():
    certain = surprise(np.zeros((1, 2)), np.array([0]))
    assert certain == pytest.approx([-math.log(FINEST)])
    assert surprise(np.zeros((1, 2)), np.array([2])).tolist() == [0.0]
    # Rounding can put a log-probability a little above 0.
    above = table([[1.0 + 1e-7]], [[1]])
    assert above.surprise.tolist() == [0.0]


def test_telling_blocks():
    right = [[1, 1], [0, 0], [1, 0], [0, 1], [1, 0]]
    p = [[0.9, 0.9], [0.2, 0.5], [0.3, 0.9], [0.2, 0.5], [0.3, 0.4]]
    liked = np.log([[0.9, 0.9], [0.1, 0.5], [0.3, 0.01], [0.05, 0.5], [0.3, 0.2]])
    one = table(p, right, label_logprob=liked)
    every = np.ones(5, bool)
    # Nothing accepted at rows 1 and 3; the target's token is least probable at row 3.
    assert one.pick("worst", every) == 3
    # By (accepted, surprise): 1 and 3, then 4 and 2 with one accepted, then 0: the middle is 4.
    assert one.pick("median", every) == 4
    # -ln(0.3 x 0.1) at row 2 is more than -ln(0.3 x 0.6) and -ln 0.8.
    assert one.pick("most surprising", every) == 2
    assert one.ordered("as in the text", every).tolist() == [0, 1, 2, 3, 4]
    assert one.ordered("worst first", every).tolist() == [3, 1, 2, 4, 0]
    assert one.ordered("most surprising first", every).tolist() == [2, 4, 1, 3, 0]


def test_what_a_filter_leaves_out_is_never_picked_and_equal_blocks_stay_in_order():
    one = table([[0.5]] * 5, [[1]] * 5)
    kept = np.array([0, 1, 0, 1, 0], bool)
    assert [one.pick(name, kept) for name in PICKS] == [1, 1, 1]
    for order in ORDERS:
        assert one.ordered(order, kept).tolist() == [1, 3]
        assert one.ordered(order, ~kept).tolist() == [0, 2, 4]
    assert {one.pick(name, np.zeros(5, bool)) for name in PICKS} == {None}


def test_a_label_that_cannot_be_proposed_is_the_worst():
    one = table([[0.5]] * 3, [[0]] * 3, label_logprob=[[-9.0], [-np.inf], [-3.0]])
    assert one.pick("worst", np.ones(3, bool)) == 1


def test_the_walk_around_an_anchor():
    # Accepted 2, -, -, 0, 1, - in one prompt and 0, 0 in the next.
    right = [[1, 1], [0, 0], [1, 1], [0, 1], [1, 0], [1, 1], [0, 0], [0, 0]]
    one = table([[0.5, 0.5]] * 8, right, prompt=[0] * 6 + [1] * 2)
    assert one.visited.tolist() == [True, False, False, True, True, False, True, True]
    found = [one.visit(row) for row in range(8)]
    assert [visit.rounds.tolist() for visit in found] == [[0, 3, 4]] * 6 + [[6, 7]] * 2
    assert [visit.at for visit in found] == [0, 0, 0, 1, 2, 2, 0, 1]
    assert [visit.starts for visit in found] == one.visited.tolist()


# --- the diagnostic -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs() -> FakeInputs:
    made = {role: simulated_scores(skill=0.5 + 0.4 * i) for i, role in enumerate(plotting.LOOKS)}
    return FakeInputs(made, {"drafter": "step_8000", "reference": "published"})


def test_shares_of_rounds_are_counted_along_the_walk(inputs):
    result = diagnostics.get("acceptance.rounds")(inputs)
    for role, scores in inputs.by_role.items():
        right = (scores.proposed == scores.labels).tolist()
        lengths = [[*one, False].index(False) for one in right]
        walked, belief = [], []
        for prompt in range(len(scores.prompt_ids)):
            rows = np.flatnonzero(scores.prompt == prompt)
            at = 0
            while at < len(rows):
                walked.append(lengths[rows[at]])
                belief.append(np.cumprod(np.exp(scores.topk_logprobs[rows[at], :, 0])).sum())
                at += walked[-1] + 1
        rows = result.frame[result.frame["role"] == role]
        assert rows["accepted"].tolist() == list(range(8))
        assert rows["n"].tolist() == [walked.count(j) for j in range(8)]
        assert rows["share"].tolist() == pytest.approx(np.array(rows["n"]) / len(walked))
        assert (rows["lo"] <= rows["share"]).all()
        assert (rows["share"] <= rows["hi"]).all()
        prefix = "" if role == "drafter" else "reference_"
        found = {name: result.estimates[prefix + name].value for name in
                 ("nothing", "everything", "accepted", "expected")}  # fmt: skip
        assert found["nothing"] == pytest.approx(walked.count(0) / len(walked))
        assert found["everything"] == pytest.approx(walked.count(7) / len(walked))
        assert found["accepted"] == pytest.approx(np.mean(walked))
        assert found["expected"] == pytest.approx(np.mean(belief), rel=1e-5)
    assert f"of its {result.params['n_rounds']} rounds" in result.headline
    assert [one["which"] for one in result.params["blocks"]] == list(PICKS)
    outcomes = Outcomes(inputs.by_role["drafter"])
    for one in result.params["blocks"]:
        at = (outcomes.scores.prompt == int(one["prompt"][1:])) & (
            outcomes.scores.anchor == one["anchor"]
        )
        assert outcomes.visited[at].tolist() == [True]
        assert outcomes.accepted[at].tolist() == [one["accepted"]]
        assert outcomes.surprise[at] == pytest.approx(one["surprise"])


def test_what_never_happened_is_told_in_words(inputs):
    hopeless = simulated_scores(skill=0.5)
    hopeless.proposed = hopeless.labels + 1
    found = diagnostics.get("acceptance.rounds")(FakeInputs({"drafter": hopeless}, inputs.names))
    assert found.headline.endswith("and everything in none.")
    assert found.verdict.name == "FAIL"


def test_rounds_are_drawn_at_their_shares_by_marker(inputs):
    result = diagnostics.get("acceptance.rounds")(inputs)
    ax = plotting.figure(result).axes[0]
    for role, look in plotting.LOOKS.items():
        rows = result.frame[result.frame["role"] == role]
        (line,) = [one for one in ax.lines if one.get_color() == look.colour and
                   len(one.get_ydata()) > 1]  # fmt: skip
        assert line.get_ydata() == pytest.approx(rows["share"])
        assert line.get_marker() == look.marker
    assert {"step_8000", "published"} <= {text.get_text() for text in ax.texts}


# --- kinds of tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("return", "word"),
        (" été", "word"),
        ("单词", "word"),
        (" Booking", "name"),
        ("max_len", "name"),
        ("x2", "name"),
        ("HTTP", "name"),
        ("42", "number"),
        (" 3.14", "number"),
        ("1_000", "number"),
        ("0xFF", "number"),
        ("٣", "number"),
        (".", "punctuation"),
        (" ==", "punctuation"),
        ("_", "punctuation"),
        ("):\n", "punctuation"),
        ("\n", "line break"),
        ("\r\n    ", "line break"),
        ("   ", "space"),
        ("\t", "space"),
        ("<|endoftext|>", "special"),
        ("</s>", "special"),
        ("[MASK]", "special"),
        ("x)", "mixed"),
        ("it's", "mixed"),
        ("#1", "mixed"),
        ("", "no text"),
        (None, "no text"),
        ("\ufffd", "no text"),
    ],
)
def test_kinds_of_tokens(text, kind):
    assert kind_of(text) == kind
    assert kind in KINDS
