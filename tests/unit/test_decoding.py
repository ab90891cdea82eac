"""Draft and verify against plain greedy decoding, on targets with and without recurrent state."""

from __future__ import annotations

import dataclasses
import inspect
import random

import pytest
import torch

from dflash_diag import decoding
from dflash_diag.conventions import Convention
from dflash_diag.decoding import (
    Decoded,
    DrafterProposer,
    Expected,
    Round,
    check_lossless,
    decode_gap,
    draft_and_verify,
    expect,
    first_difference,
    greedy,
    logit_noise,
    teacher_forced,
)
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.hidden_states import recorded, stacked
from dflash_diag.masks import rules_of
from dflash_diag.proposals import make_proposal
from dflash_diag.targets import wrap_target

G = 24
LENGTHS = (5, 12, 1, 9)


def prompts(seed=0, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 320, (n,), generator=generator).tolist() for n in lengths]


def slow_greedy(target, prompt, n):
    """One full forward a token."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(n):
            tokens.append(
                int(target.model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax())
            )
    return tokens[len(prompt) :]


class Scripted:
    """Drafts the right continuation but for one wrong token at a chosen place."""

    taps = (0, 2)

    def __init__(self, sequence, n_right, n_proposed=7):
        self.sequence, self.n_right, self.n_proposed = sequence, list(n_right), n_proposed

    def begin(self):
        self.seen = 0

    def observe(self, states):
        assert states.shape[1:] == (2, 64)
        self.seen += len(states)

    def propose(self, token, position):
        assert self.seen == position
        assert self.sequence[position] == token
        right = (self.sequence + [0] * self.n_proposed)[position + 1 :][: self.n_proposed]
        n = self.n_right.pop(0) if self.n_right else 0
        if n < self.n_proposed:
            right[n] = (right[n] + 1) % 320
        return right


def test_plain_greedy_equals_one_full_forward_a_token(target):
    made = greedy(target, prompts(), 12)
    for prompt, one in zip(prompts(), made, strict=True):
        assert one.ids == slow_greedy(target, prompt, 12)
        assert not one.ended
        assert one.top_ids.shape == (12, 8)
        assert one.top_ids[:, 0].tolist() == one.ids


def test_prompts_side_by_side_and_alone(target):
    together = [one.ids for one in greedy(target, prompts(), G)]
    assert together == [greedy(target, [p], G)[0].ids for p in prompts()]
    assert len({tuple(ids) for ids in together}) == len(LENGTHS)


def with_eos(target, ids):
    target.__dict__["eos_ids"] = frozenset(ids)
    return target


def test_generation_ends_at_the_end_token(model):
    target = wrap_target(model)
    free = greedy(target, prompts(), G)
    end = free[0].ids[7]
    with_eos(target, {end})
    for before, after in zip(free, greedy(target, prompts(), G), strict=True):
        stop = before.ids.index(end) + 1 if end in before.ids else G
        assert after.ids == before.ids[:stop]
        assert after.ended == (end in before.ids)
        assert len(after.top_ids) == stop
    assert after.ids is not before.ids


def test_teacher_forcing_agrees_with_decoding_up_to_rounding(target):
    for prompt, made in zip(prompts(), greedy(target, prompts(), G), strict=True):
        forced = teacher_forced(target, [*prompt, *made.ids], (1, 3))
        assert {j: tuple(x.shape) for j, x in forced.states.items()} == {
            1: (len(prompt) + G, 64),
            3: (len(prompt) + G, 64),
        }
        assert float(decode_gap(forced, len(prompt), made.ids).max()) == 0
        assert 0 < logit_noise(forced, len(prompt), made) < 1e-4
        other = [(t + 1) % 320 for t in made.ids]
        assert float(decode_gap(forced, len(prompt), other).min()) > 0


def widest(target):
    """The most rows that its head computes at one time from now on."""
    most = [0]

    def note(_head, _args, output):
        most[0] = max(most[0], output.numel() // output.shape[-1])

    target.parts.head.register_forward_hook(note)
    return most


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "Cohere", "logit_scale": 0.3},
        {"model": "Granite", "logits_scaling": 3.0},
        {"model": "Gemma2", "final_logit_softcapping": 2.0},
    ],
)
def test_logits_by_rows_are_the_models_own(changes, monkeypatch, new_hybrid):
    import transformers

    kind = changes.pop("model", None)
    if kind is None:
        model = new_hybrid()
    else:
        sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = getattr(transformers, f"{kind}Config")(**sizes, **changes)
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    target = wrap_target(model)
    monkeypatch.setattr(decoding, "LOGIT_BYTES", 5 * 4 * 320)
    most = widest(target)
    tokens = prompts(lengths=(23,))[0]
    forced = teacher_forced(target, tokens, (1,))
    slices = list(forced.logits())
    for _ in forced.logits():
        assert not torch.is_inference_mode_enabled()  # whoever reads them goes on as before
    assert [len(rows) for rows in slices] == [5, 5, 5, 5, 3]
    assert most == [5]
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    torch.testing.assert_close(torch.cat(slices), theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(forced.row(7), theirs[7], rtol=1e-5, atol=1e-5)
    chosen = torch.tensor([22, 4])
    found = torch.cat(list(forced.logits(chosen)))
    torch.testing.assert_close(found, theirs[chosen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["scaled behind the norm", "cannot skip logits", "another norm"])
def test_a_head_that_is_not_what_it_seems_costs_a_full_forward(way, new_hybrid, monkeypatch):
    model = new_hybrid()
    target = wrap_target(model)
    if way == "scaled behind the norm":
        model.lm_head.register_forward_pre_hook(
            lambda _, args: (args[0] * 0.5,) if target.__dict__.get("inside") else None
        )
        forward = model.forward

        def scaled(*args, **kwargs):
            target.__dict__["inside"] = True
            try:
                return forward(*args, **kwargs)
            finally:
                target.__dict__["inside"] = False

        scaled.__signature__ = inspect.signature(forward)
        monkeypatch.setattr(model, "forward", scaled)
    elif way == "cannot skip logits":
        target.__dict__["can_skip_logits"] = False
    else:
        other = target.parts.layers[3].input_layernorm
        target = dataclasses.replace(
            target, parts=dataclasses.replace(target.parts, final_norm=other)
        )
    tokens = prompts(lengths=(23,))[0]
    forced = teacher_forced(target, tokens, (0,))
    with torch.inference_mode():
        theirs = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert torch.equal(torch.cat(list(forced.logits())), theirs)
    assert list(forced.states) == [0]


@pytest.mark.parametrize("seed", range(2))
def test_drafts_change_nothing(target, seed):
    drawn = random.Random(seed)
    for one in expect(target, enumerate(prompts(seed)), G):
        proposer = Scripted(one.prompt + one.ids, [drawn.randint(0, 7) for _ in range(G)])
        got = draft_and_verify(target, proposer, one.prompt, G)
        assert got.ids == one.ids


def test_rounds_are_what_was_planned(target):
    (one,) = expect(target, [("p", prompts()[1])], G)
    planned = [0, 7, 3, 1, 0, 2, 7]
    proposer = Scripted(one.prompt + one.ids, planned)
    got = draft_and_verify(target, proposer, one.prompt, G)
    anchors = [12, 13, 21, 25, 27, 28, 31]
    # The last token is at 12 + 24 - 1 = 35, so the last block that fits has its anchor at 28.
    assert got.rounds[:6] == [Round(a, 7, n) for a, n in zip(anchors, planned, strict=True)][:6]
    assert got.rounds[6].anchor == 31
    assert got.complete_rounds(12) == [1, 8, 4, 2, 1, 3]


def test_a_perfect_drafter_and_a_hopeless_one(target):
    (one,) = expect(target, [("p", prompts()[0])], G)
    perfect = draft_and_verify(target, Scripted(one.prompt + one.ids, [7] * G), one.prompt, G)
    hopeless = draft_and_verify(target, Scripted(one.prompt + one.ids, [0] * G), one.prompt, G)
    assert perfect.ids == hopeless.ids == one.ids
    assert perfect.complete_rounds(5) == [8, 8, 8]  # anchors 5, 13, 21; the last token is at 28
    assert hopeless.complete_rounds(5) == [1] * (G - 7)


def test_drafts_beyond_the_end_are_cut(model):
    target = wrap_target(model)
    (free,) = expect(target, [("p", prompts()[0])], G)
    end = free.ids[9]
    with_eos(target, {end})
    stop = free.ids.index(end) + 1
    got = draft_and_verify(target, Scripted(free.prompt + free.ids, [7] * G), free.prompt, G)
    assert got.ids == free.ids[:stop]
    for n in (1, 2, 5):
        with_eos(target, ())
        proposer = Scripted(free.prompt + free.ids, [7] * G)
        assert draft_and_verify(target, proposer, free.prompt, n).ids == free.ids[:n]


def test_a_snapshot_can_be_restored_again_and_again(target):
    prompt, cache = torch.tensor([prompts()[1]]), target.caches.new()
    with torch.inference_mode():
        target.logits(prompt, cache=cache)
        copy = target.caches.snapshot(cache)
        step = torch.tensor([[3, 5, 8]])
        first = target.logits(step, cache=cache)
        for _ in range(2):
            target.logits(torch.tensor([[7]]), cache=cache)
            target.caches.restore(cache, copy)
            assert torch.equal(target.logits(step, cache=cache), first)


def crop_only(target, proposer, prompt, max_new_tokens):
    """The published loop: rejected drafts leave keys and values, and nothing else."""
    tokens, cache = list(prompt), target.caches.new()
    rounds = []
    with torch.inference_mode(), recorded(target.parts, proposer.taps) as kept:
        logits = target.logits(torch.tensor([tokens]), cache=cache)
        proposer.begin()
        proposer.observe(stacked(kept, proposer.taps))
        tokens.append(int(logits[0, -1].argmax()))
        while len(tokens) < len(prompt) + max_new_tokens:
            anchor = len(tokens) - 1
            drafts = proposer.propose(tokens[-1], anchor)
            chosen = target.logits(torch.tensor([[tokens[-1], *drafts]]), cache=cache)[0].argmax(-1)
            n = decoding._agreeing(drafts, chosen.tolist())
            proposer.observe(stacked(kept, proposer.taps)[: n + 1])
            rounds.append(Round(anchor, len(drafts), n))
            tokens += chosen[: n + 1].tolist()
            for layer in cache.layers:
                if getattr(layer, "keys", None) is not None:
                    layer.keys = layer.keys[..., : anchor + n + 1, :]
                    layer.values = layer.values[..., : anchor + n + 1, :]
    return Decoded(tokens[len(prompt) :][:max_new_tokens], rounds)


class Anything:
    """Drafts that are mostly wrong, whatever was decoded so far."""

    taps = (0,)

    def begin(self):
        pass

    def observe(self, states):
        pass

    def propose(self, token, position):
        return [(token * 7 + position + k) % 320 for k in range(7)]


def test_the_crop_only_loop_is_caught_on_a_hybrid_target(hybrid_model):
    target = wrap_target(hybrid_model)
    expected = expect(target, [(str(i), p) for i, p in enumerate(prompts())], G)
    ours = check_lossless(target, Anything(), expected, G)
    assert (ours.checked, ours.ok, ours.exact, ours.mismatches) == (4, 4, 4, [])
    theirs = check_lossless(target, Anything(), expected, G, decode=crop_only)
    assert (theirs.checked, theirs.ok, theirs.exact) == (4, 0, 0)
    assert {m.kind for m in theirs.mismatches} == {"state_fault"}
    first = theirs.mismatches[0]
    assert first.prompt == "0"
    assert first.margin > 10 * theirs.noise_floor
    assert first.expected == (expected[0].prompt + expected[0].ids)[first.position]
    assert first.got != first.expected


def test_the_crop_only_loop_is_right_on_a_full_attention_target(full_model):
    target = wrap_target(full_model)
    expected = expect(target, [(str(i), p) for i, p in enumerate(prompts())], G)
    found = check_lossless(target, Anything(), expected, G, decode=crop_only)
    assert (found.ok, found.exact) == (4, 4)
    assert found.rounds == check_lossless(target, Anything(), expected, G).rounds


def outputs(ids):
    return lambda target, proposer, prompt, n: Decoded(list(ids), [])


def test_mismatches_are_split_by_margin(hybrid_model):
    target = wrap_target(hybrid_model)
    (one,) = expect(target, [("p", prompts()[0])], G)
    # What the target itself would choose second, and then go on from.
    at = 10
    row = teacher_forced(target, one.prompt + one.ids).row(len(one.prompt) - 1 + at).float()
    first, second = row.topk(2).values.tolist()
    swapped = [*one.ids[:at], int(row.topk(2).indices[1])]
    swapped += slow_greedy(target, one.prompt + swapped, G - len(swapped))

    exact = check_lossless(target, Anything(), [one], G, decode=outputs(swapped))
    assert (exact.ok, exact.exact, len(exact.mismatches)) == (0, 0, 1)
    assert exact.mismatches[0].kind == "state_fault"
    assert exact.mismatches[0].position == len(one.prompt) + at
    assert exact.mismatches[0].margin == pytest.approx(first - second, abs=1e-5)

    noisy = Expected(one.id, one.prompt, one.ids, noise=(first - second) / 2 + 1e-4)
    loose = check_lossless(target, Anything(), [noisy], G, decode=outputs(swapped))
    assert (loose.ok, loose.exact) == (1, 0)
    assert [m.kind for m in loose.mismatches] == ["rounding"]

    # After a tie that fell the other way the rest must still follow from it.
    broken = [*swapped[:18], *[(t + 1) % 320 for t in swapped[18:]]]
    found = check_lossless(target, Anything(), [noisy], G, decode=outputs(broken))
    assert found.ok == 0
    assert [(m.kind, m.position - len(one.prompt)) for m in found.mismatches] == [
        ("rounding", at),
        ("state_fault", 18),
    ]


def test_an_output_that_stops_early_is_a_mismatch(hybrid_model):
    target = wrap_target(hybrid_model)
    (one,) = expect(target, [("p", prompts()[0])], G)
    found = check_lossless(target, Anything(), [one], G, decode=outputs(one.ids[:5]))
    assert (found.ok, found.mismatches[0].got) == (0, None)
    assert found.to_json()["mismatches"][0]["id"] == "p"


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([1, 2], [1, 2, 3]) == 2


CONVENTION = {
    "block_size": 6,
    "layer_ids": (0, 2),
    "in_block": ("bidirectional", "causal"),
    "window": (None, 9),
    "rope_theta": 1e4,
    "rotary_width": 16,
    "mask_token_id": 319,
}


def random_drafter(**changes):
    torch.manual_seed(3)
    convention = Convention(**{**CONVENTION, **changes})
    shape = DrafterShape(
        hidden_size=64, n_taps=2, n_layers=2, n_heads=4, n_kv_heads=2, head_width=16, mlp_size=64
    )
    return Drafter(shape, convention).eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"position_offset": 1},
        {"label_layout": "next"},
        {"layer_ids": (3, 1), "last_layer_normed": True, "embedding_scale": 2.0},
        {"layer_id_rule": "input"},
    ],
)
def test_a_drafter_proposes_what_a_recomputation_from_scratch_gives(target, changes):
    drafter = random_drafter(**changes)
    how = drafter.convention
    embedding, head = target.parts.embedding.weight, target.parts.head.weight

    def by_hand(tokens, anchor):
        taken = teacher_forced(target, tokens[:anchor], how.taps).states
        states = torch.stack([taken[j] for j in how.taps], dim=1)
        if how.last_layer_normed:
            states = torch.stack([target.parts.final_norm(states[:, 0]), states[:, 1]], dim=1)
        block = torch.tensor([tokens[anchor], *[319] * 5])
        masks = [rule.training(torch.tensor([[anchor]]), anchor) for rule in rules_of(how)]
        hidden = drafter(
            embedding[block][None] * how.embedding_scale,
            anchor + how.position_offset + torch.arange(6)[None],
            drafter.features(states)[None],
            torch.arange(anchor)[None],
            masks,
            implementation="eager",
        )[0]
        read = hidden if how.label_layout == "next" else hidden[1:]
        return (read @ head.T).argmax(-1).tolist()

    proposer = DrafterProposer(
        drafter,
        embedding=embedding,
        proposal=make_proposal(how, head),
        final_norm=(3, target.parts.final_norm),
    )
    drafts = []

    class Watched:
        taps, begin, observe = proposer.taps, proposer.begin, proposer.observe

        def propose(self, token, position):
            drafts.append((position, proposer.propose(token, position)))
            return drafts[-1][1]

    (one,) = expect(target, [("p", prompts()[1])], 24)
    got = draft_and_verify(target, Watched(), one.prompt, 24)
    assert got.ids == one.ids
    tokens = one.prompt + one.ids
    with torch.inference_mode():
        assert drafts == [(a, by_hand(tokens, a)) for a, _ in drafts]
    assert len(drafts[0][1]) == how.n_proposed
    labels = [tokens[r.anchor + 1 :][: r.proposed] for r in got.rounds]
    assert [r.accepted for r in got.rounds[:-6]] == [
        decoding._agreeing(d, label) for (_, d), label in zip(drafts[:-6], labels[:-6], strict=True)
    ]
