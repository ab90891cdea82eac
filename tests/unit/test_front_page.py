"""The front page: what to do next, and answers that are no longer than a person reads."""

from __future__ import annotations

import pandas as pd
import pytest

from dflash_diag import front_page, next_steps
from dflash_diag.causes import CAUSES
from dflash_diag.results import Result, Verdict


def result(id_: str, verdict: Verdict, headline: str = "Something.", **changes) -> Result:
    given = {"frame": pd.DataFrame(), "question": f"What of {id_}?"}
    return Result(id=id_, verdict=verdict, headline=headline, **given | changes)


def doctor(**found: str) -> Result:
    """The doctor's result with causes by status, in its order."""
    rows = [
        {"cause": cause, "status": status, "remedy": CAUSES[cause].remedy * (status == "found")}
        for cause, status in found.items()
    ]
    return result("doctor.causes", Verdict.FAIL, frame=pd.DataFrame(rows))


def undecided(id_: str, n: int) -> Result:
    judged = f"it is 1 [0, 2], which does not decide; about {n} prompts would settle it"
    return result(id_, Verdict.INCONCLUSIVE, params={"judged": judged})


def test_remedies_come_first_then_prompts_then_options():
    causes = {"mask.window": "found", "rope.theta": "not tested", "metric.population": "found"}
    steps = next_steps.next_steps(
        [
            result("target.served", Verdict.SKIPPED, "No output was given (--served-output)."),
            undecided("a", 55),
            doctor(**causes),
        ]
    )
    assert [one.do for one in steps] == [
        CAUSES["mask.window"].remedy,
        CAUSES["metric.population"].remedy,
        "Bring about 55 prompts.",
    ]
    assert [one.check for one in steps] == ["doctor.causes", "doctor.causes", "a"]
    assert steps[0].why.lower() == f"{CAUSES['mask.window'].means}."


def test_what_only_explains_numbers_is_one_step():
    causes = dict.fromkeys(["metric.population", "metric.bonus", "data.domain"], "found")
    (step,) = next_steps.next_steps([doctor(**causes)])
    assert step.do == " ".join(CAUSES[cause].remedy for cause in causes)


def test_prompts_are_asked_for_once_in_the_largest_number():
    (step,) = next_steps.next_steps([undecided("a", 55), undecided("b", 240), undecided("c", 9)])
    assert step.do == "Bring about 240 prompts."
    assert step.check == "b"
    assert "What of a? (about 55)" in step.why


def test_the_option_that_turns_on_most_checks_comes_first():
    skipped = [
        result("a", Verdict.SKIPPED, "No server wrote it (--server)."),
        result("b", Verdict.SKIPPED, "Nothing to compare with (--against: a capture)."),
        result("c", Verdict.SKIPPED, "Nothing to compare with (--against: a capture)."),
        result("d", Verdict.SKIPPED, "Not possible on this backend."),
    ]
    assert [one.do for one in next_steps.next_steps(skipped)] == [
        "Give --against.",
        "Give --server.",
    ]


@pytest.mark.parametrize(
    "results",
    [
        [],
        [result("a", Verdict.PASS), doctor()],
        [doctor(**{"mask.window": "excluded", "rope.theta": "not identifiable"})],
        [result("a", Verdict.INCONCLUSIVE, params={"judged": "no number can be named"})],
        [result("a", Verdict.ERROR, "It broke (--against).")],
    ],
)
def test_nothing_is_advised_that_no_result_says(results):
    assert next_steps.next_steps(results) == []


def test_an_answer_ends_with_a_clause():
    text = "It is 1.64 [1.53, 1.78]; the weights see (among others; mostly) too much. Retrain."
    assert front_page.brief(text) == text
    assert front_page.brief(text, 30) == "It is 1.64 [1.53, 1.78] …"
    assert front_page.brief(text, 60) == "It is 1.64 [1.53, 1.78] …"
    assert front_page.brief(text, 78) == text.removesuffix(" Retrain.") + " …"
    assert (
        front_page.brief("One long clause without an end", 10) == "One long clause without an end"
    )
