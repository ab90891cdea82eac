"""What the two diagnostics about text say, on worlds whose answer is known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from dflash_diag import diagnostics, plotting
from dflash_diag.results import Verdict
from dflash_diag.strata import Text
from tests.text_world import D, G, P, world


@dataclass
class Inputs:
    """The part of `dflash_diag.diagnostics.Inputs` that these two read."""

    made_scores: SimpleNamespace
    made_texts: list[Text]
    seed: int = 0
    draws: int = 1000
    roles: tuple[str, ...] = ("drafter",)

    def name(self, role: str) -> str:
        return "step_8000"

    def scores(self, role: str) -> SimpleNamespace:
        return self.made_scores

    def texts(self) -> list[Text]:
        return self.made_texts

    def provenance(self) -> dict[str, str]:
        return {"made_by": "tests"}


def kinds(n: int = 36, *, hard: float = 1.0, far: float = 0.0, **facts) -> Inputs:
    """Code and chat of the same drafter; chat's entropies are ``hard`` times code's."""
    scores, texts = world(n, seed=2)
    rng, made = np.random.default_rng(1), []
    for i, text in enumerate(texts):
        scale = 0.6 * np.exp(rng.normal(0, 0.6)) * (hard if i % 2 else 1)
        entropy = rng.gamma(2.0, scale, P + G) + (far if i % 2 else 0)
        kind = "chat" if i % 2 else "code"
        made.append(replace(text, kind=kind, **{"entropy": entropy, **facts}))
    entropy = np.stack([text.entropy if text.entropy is not None else np.ones(P + G)
                        for text in made])  # fmt: skip
    ahead = entropy[scores.prompt[:, None], scores.anchor[:, None] + np.arange(D)]
    right = rng.random(ahead.shape) < 0.95 * np.exp(-ahead / 2)
    scores.proposed = np.where(right, scores.labels, -1)
    return Inputs(scores, made)


def result(id_: str, inputs: Inputs):
    return diagnostics.get(id_)(inputs)


def test_strata_name_what_acceptance_goes_with():
    found = result("data.strata", kinds())
    assert found.verdict is Verdict.PASS
    assert "by target entropy it differs most" in found.headline
    assert found.params["n_clear"] >= 2
    frame = found.frame
    rows = frame[frame["dimension"] == "target entropy"]
    assert rows["tau_walked"].is_monotonic_decreasing
    assert rows["differs"].iloc[0]
    assert any("The kind of a prompt is the prompt file's kind" in note for note in found.notes)
    assert any("No strata by chat template" in note for note in found.notes)
    assert found.estimates["versus_rest"].lo > 0


def test_strata_with_few_prompts_are_named():
    (note,) = [n for n in result("data.strata", kinds(n=20)).notes if "run short" in n]
    assert "code (10)" in note
    assert "chat (10)" in note


def test_strata_whose_bounds_round_to_the_same_are_kept_apart():
    even = np.linspace(5.001, 5.002, P + G)  # as of a target with random weights
    found = result("data.strata", kinds(entropy=even))
    rows = found.frame[found.frame["dimension"] == "target entropy"]
    assert len(rows) > 1
    assert rows["versus_rest"].notna().all()


def test_a_single_prompt_decides_nothing():
    found = result("data.strata", kinds(n=1))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.estimates["tau_walked"].lo is None


def test_harder_text_is_told_from_a_worse_drafter():
    found = result("data.entropy", kinds(n=80, hard=1.5))
    assert found.verdict is Verdict.PASS
    one = found.estimates
    assert one["composition"].value + one["rate"].value == pytest.approx(one["difference"].value)
    total, mix = abs(one["difference"].value), abs(one["composition"].value)
    assert mix > 0.7 * total
    assert "because the target is surer" in found.headline
    assert any("is taken first" in note for note in found.notes)
    parts = found.frame[found.frame["part"] == "share"]
    sums = parts[parts["number"] == "tau_walked"].groupby("set")["value"].sum()
    assert sums.tolist() == pytest.approx([1, 1])
    assert len(plotting.figure(found).axes) == 3


def test_text_without_common_entropy_is_inconclusive_and_still_drawn():
    found = result("data.entropy", kinds(far=20.0))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "hardly ever has" in found.headline
    assert not found.estimates
    assert plotting.figure(found).axes


@pytest.mark.parametrize(
    ("inputs", "reason"),
    [
        (kinds(n=6, entropy=None), "no choices of the target"),
        (Inputs(*world(n=6), roles=()), "--drafter"),
    ],
)
def test_what_cannot_be_split_is_skipped_with_the_reason(inputs, reason):
    found = result("data.entropy", inputs)
    assert found.verdict is Verdict.SKIPPED
    assert reason in found.headline


def test_prompts_of_one_kind_are_no_sets():
    inputs = kinds(n=6)
    inputs.made_texts = [replace(text, kind="code") for text in inputs.made_texts]
    found = result("data.entropy", inputs)
    assert found.verdict is Verdict.SKIPPED
    assert 'add "kind"' in found.headline
