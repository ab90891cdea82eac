"""Other ways of rendering the same chat prompts, and what each costs a drafter.

A drafter that trained on a chat template knows its tokens. Whoever benchmarks it on bare text, or
serves it under another system prompt, measures another number, and neither is wrong: `price` says
how far apart they are, paired by prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dflash_diag import metrics, stats
from dflash_diag.errors import BadInput
from dflash_diag.metrics import Scored
from dflash_diag.prompts import Prompt
from dflash_diag.stats import Estimate

OFF, SYSTEM = "off", "system="
BETWEEN = "\n\n"
"""What stands between the messages of a conversation where there is no template."""
DIALECTS = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "<start_of_turn>": "Gemma",
    "[INST]": "Mistral and Llama 2",
}
"""What templates are called, by a token that no other has."""


@dataclass(frozen=True)
class Rendering:
    """One way of rendering chat messages.

    Raises
    ------
    BadInput
        It is neither ``off`` nor ``system=TEXT``.
    """

    spec: str

    def __post_init__(self) -> None:
        if self.spec != OFF and not self.spec.startswith(SYSTEM):
            raise BadInput(f"--render {self.spec}", f"{OFF}, or {SYSTEM}TEXT")

    @property
    def name(self) -> str:
        """What it is called in a table."""
        if self.spec == OFF:
            return "template off"
        said = self.spec.removeprefix(SYSTEM)
        return f"system prompt “{said}”" if said else "system prompt empty"

    def apply(self, prompt: Prompt) -> Prompt:
        """The prompt as it is rendered here; one that has no messages is returned as it is."""
        if prompt.messages is None:
            return prompt
        said = [one for one in prompt.messages if one.get("role") != "system"]
        if self.spec == OFF:
            text = BETWEEN.join(str(one.get("content", "")) for one in said)
            return replace(prompt, messages=None, text=text)
        first = {"role": "system", "content": self.spec.removeprefix(SYSTEM)}
        return replace(prompt, messages=(first, *said))


class Price(NamedTuple):
    """What a rendering costs: walked tau [tokens a round], paired by prompt."""

    tau: Estimate
    tau_usual: Estimate
    """As the prompts were given."""
    delta: Estimate
    """The first less the second."""
    p: float
    """Of a sign-flip test of the prompts' differences."""


def price(usual: Scored, other: Scored, *, seed: int, draws: int) -> Price:
    """Compare the drafter's scores under another rendering with those on the prompts as given."""
    theirs, ours = metrics.paired(other, usual, trees=False)["tau_walked_micro"]
    found = stats.estimates({"tau": theirs, "tau_usual": ours}, seed=seed, draws=draws)
    delta = stats.differences({"delta": (theirs, ours)}, seed=seed, draws=draws)["delta"]
    each = theirs.per_prompt() - ours.per_prompt()
    p = stats.sign_flip(each, seed=seed, draws=draws)
    return Price(found["tau"], found["tau_usual"], delta, p)


def template_facts(template: Any) -> Mapping[str, Any] | None:
    """What a tokenizer's chat template is called, and its hash; None where there is none."""
    if not isinstance(template, str) or not template:
        return None
    named = [name for token, name in DIALECTS.items() if token in template]
    digest = hashlib.sha256(template.encode()).hexdigest()
    return {"dialect": named[0] if named else "its own", "sha256": digest}


def chat_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those made of messages."""
    return [one for one in prompts if one.messages is not None]
