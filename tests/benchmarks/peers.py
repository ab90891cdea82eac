"""Other ways of drafting the blocks of a problem, on the same weights and tokens.

z-lab's are PyPI ``dflash`` as it is: its model, called once a block, and its decoding loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from worlds import Problem, Text, checkpoint_config

from dflash_diag.blocks import _together, draft_blocks
from dflash_diag.proposals import make_proposal

Run = Callable[[], list[Tensor]]
"""Drafts and gives the accepted lengths of each text's blocks."""


def leading(proposed: Tensor, labels: Tensor) -> Tensor:
    """[A] proposals [A, D] before the first that is not the label."""
    return (proposed == labels).int().cumprod(-1).sum(-1)


def ours(problem: Problem, *, compiled: bool = False, dense: bool = False) -> Run:
    """All anchors of a text in one pass, with everything that a score keeps.

    Parameters
    ----------
    dense
        The same layers under one dense mask instead, as a training step runs them.
    """
    drafter, embedding = problem.drafter, problem.embedding
    proposal = make_proposal(drafter.convention, problem.head, drafter)
    read = slice(drafter.convention.first_slot, None)
    labels = [text.labels(drafter.convention.n_proposed) for text in problem.texts]

    def run() -> list[Tensor]:
        found = []
        for text, wanted in zip(problem.texts, labels, strict=True):
            features = drafter.features(text.states[: text.last])
            given = drafter, embedding, text.tokens, text.anchors, features
            hidden = (
                _together(*given)[:, read] if dense else draft_blocks(*given, compiled=compiled)
            )
            made = proposal.score(hidden, text.tokens[text.anchors], wanted)
            found.append(leading(made.ids, wanted))
        return found

    return run


def zlab_model(problem: Problem) -> Any:
    """z-lab's model over the problem's own weights, which are shared."""
    from dflash.model import DFlashDraftModel
    from transformers import Qwen3Config

    drafter = problem.drafter
    shape, how = drafter.shape, drafter.convention
    given = checkpoint_config(
        shape, how, n_target_layers=max(how.taps) + 3, vocabulary=len(problem.embedding)
    )
    theta = given.pop("rope_theta")
    given["dtype"] = str(problem.head.dtype).removeprefix("torch.")
    config = Qwen3Config(
        **given,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = DFlashDraftModel(config)
    model.load_state_dict(drafter.state_dict(), assign=True)
    # Its frequencies are in no checkpoint.
    model.rotary_emb = type(model.rotary_emb)(config).to(problem.head.device)
    return model.eval().requires_grad_(requires_grad=False)


def one_at_a_time(problem: Problem, most: int | None = None) -> Run:
    """z-lab's model, one call a block over its own context, with nothing but an argmax behind.

    Parameters
    ----------
    most
        Blocks of each text, evenly spread; all if None.
    """
    model, how = zlab_model(problem), problem.drafter.convention
    size, device = how.block_size, problem.head.device
    chosen = [some(text.anchors, most).tolist() for text in problem.texts]

    def run() -> list[Tensor]:
        found = []
        for text, anchors in zip(problem.texts, chosen, strict=True):
            states, accepted = text.states.flatten(1)[None], []
            for anchor in anchors:
                ids = torch.full((1, size), how.mask_token_id, device=device)
                ids[0, 0] = text.tokens[anchor]
                hidden = model(
                    target_hidden=states[:, :anchor],
                    noise_embedding=problem.embedding[ids],
                    position_ids=torch.arange(anchor + size, device=device)[None],
                )[:, 1:]
                made = (hidden @ problem.head.T).argmax(-1)[0]
                accepted.append(leading(made, text.tokens[anchor + 1 : anchor + size]))
            found.append(torch.stack(accepted))
        return found

    return run


def some(anchors: Tensor, most: int | None) -> Tensor:
    """At most so many of some anchors, evenly spread."""
    if most is None or len(anchors) <= most:
        return anchors
    return anchors[:: len(anchors) // most][:most]


class Replay(nn.Module):
    """A target that answers from a text: with its states, and its next tokens as the choice.

    So z-lab's loop drafts where it would with the target that made the text, and what it costs is
    its own: drafting, the head, and what it does around a verification that costs next to nothing.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        from transformers import Qwen3Config

        # One small layer in its cache, whose length is that of what was read.
        self.config = Qwen3Config(num_hidden_layers=1)
        self.taps = problem.drafter.convention.taps
        self.embedding = nn.Embedding.from_pretrained(problem.embedding)
        self.lm_head = nn.Linear(1, 1, bias=False)
        self.lm_head.weight = nn.Parameter(problem.head, requires_grad=False)
        self.seen: list[Tensor] = []
        """First position of each call."""

    def begin(self, text: Text) -> None:
        self.text, self.seen = text, []

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        past_key_values: Any,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> SimpleNamespace:
        at, head = position_ids[0], self.lm_head.weight
        self.seen.append(at[0])
        nothing = head.new_zeros(1, 1, len(at), 1)
        past_key_values.update(nothing, nothing, 0)
        # The last block may reach beyond the text; what is drafted there is never taken.
        rows = self.text.states[at.clamp(max=len(self.text.states) - 1)][None]
        after = self.text.tokens[(at + 1).clamp(max=len(self.text.tokens) - 1)][-logits_to_keep:]
        logits = head.new_zeros(1, len(after), len(head)).scatter_(2, after[None, :, None], 1)
        states = {tap + 1: rows[:, :, i] for i, tap in enumerate(self.taps)}
        return SimpleNamespace(logits=logits, hidden_states=states)


class Spans:
    """Seconds between the starts of one module's calls and the ends of another's.

    On a GPU by events in its queue, which nothing waits for.
    """

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        self.marks: list[Any] = []
        self.gpu = next(first.parameters()).is_cuda
        first.register_forward_pre_hook(lambda *_: self._mark())
        last.register_forward_hook(lambda *_: self._mark())

    def _mark(self) -> None:
        if self.gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> float:
        """Since the last time it was asked."""
        pairs = list(zip(self.marks[::2], self.marks[1::2], strict=True))
        self.marks.clear()
        return sum(a.elapsed_time(b) / 1e3 if self.gpu else b - a for a, b in pairs)


class Loop:
    """z-lab's own loop, ``dflash_generate``, over the texts of a problem.

    Parameters
    ----------
    new_tokens
        Generated at the end of each text; all behind its first anchor if None.
    """

    def __init__(self, problem: Problem, new_tokens: int | None = None) -> None:
        self.problem, self.model, self.replay = problem, zlab_model(problem), Replay(problem)
        self.spans = Spans(self.model, self.replay.lm_head)
        size = problem.drafter.convention.block_size
        self.texts = [
            (text, int(text.anchors[0]), text.last + size)
            if new_tokens is None
            else (text, text.last + 1 - new_tokens, text.last + 1)
            for text in problem.texts
        ]
        self.rounds = 0
        """Of the last run."""
        self.drafting = 0.0
        """Seconds of the last run between the drafter's calls and the logits of what it drafted."""

    def __call__(self) -> list[tuple[Tensor, Tensor]]:
        """Anchors and accepted lengths of the rounds with a whole block, of each text."""
        from dflash.model import dflash_generate

        found, self.rounds = [], 0
        size = self.problem.drafter.convention.block_size
        for text, first, end in self.texts:
            self.replay.begin(text)
            out = dflash_generate(
                self.model, self.replay, text.tokens[None, :first], end - first, None
            )
            if not torch.equal(out[0], text.tokens[:end]):
                raise AssertionError("the loop did not generate the text that it was told")
            at = torch.stack(self.replay.seen[1:])  # the first call reads the prompt
            self.rounds += len(at)
            whole = at <= end - size
            jumps = torch.diff(at, append=at.new_tensor([end - 1]))
            found.append((at[whole], jumps[whole] - 1))
        self.drafting = self.spans.seconds()
        return found
