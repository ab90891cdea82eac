"""Faults planted into the code of small real drafters are named; healthy code is clean."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

from dflash_diag import storage
from dflash_diag.adapters import AdapterError, DraftSpec, Refused, TargetBits
from dflash_diag.adapters.bench import change
from dflash_diag.adapters.builtin import Builtin, Rows
from dflash_diag.adapters.checking import changes, snapshot
from dflash_diag.adapters.function import Function
from dflash_diag.config import RunConfig
from dflash_diag.conventions import Convention
from dflash_diag.drafter import Drafter, DrafterShape
from dflash_diag.errors import BadInput
from dflash_diag.influence import CAUSES, Influence, probe
from dflash_diag.results import Verdict
from dflash_diag.runs import Run
from dflash_diag.visibility import Rule, dependence
from tests.tiny_world import write_world

SHAPE = DrafterShape(
    hidden_size=32, n_taps=3, n_layers=2, n_heads=4, n_kv_heads=2, head_width=8, mlp_size=48
)
READING = Convention(
    block_size=5,
    layer_ids=(-1, 1, 2),
    in_block=("bidirectional", "bidirectional"),
    window=(None, None),
    rope_theta=10_000.0,
    rotary_width=8,
    mask_token_id=1,
)
VOCABULARY, N, ANCHORS = 60, 34, (9, 24)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


FEATURES = random(N, 3, 32, seed=1)
TOKENS = torch.randint(2, VOCABULARY, (N,), generator=torch.Generator().manual_seed(1))
EMBEDDING, HEAD = random(VOCABULARY, 32, seed=2), random(VOCABULARY, 32, seed=3)
HEAD[READING.mask_token_id] = 0  # never the best choice


def reading(**changes):
    return dataclasses.replace(READING, **changes)


def make(how=READING, dtype=torch.float32):
    torch.manual_seed(0)
    drafter = Drafter(SHAPE, how)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return drafter.eval().requires_grad_(False).to(dtype)


def adapter(how=READING, kind=Builtin, dtype=torch.float32):
    return kind(make(how, dtype), EMBEDDING, HEAD)


def tried(one, rule=READING, *, anchors=ANCHORS[1:]):
    return probe(one, FEATURES, TOKENS, anchors, rule)


def causes(found: Influence) -> set[str]:
    return {one["cause"] for one in found.found}


def status(found: Influence, check: str) -> str:
    (row,) = [one for one in found.checks if one["check"] == check]
    return row["status"]


def evidence(found: Influence, cause: str) -> str:
    (row,) = [one for one in found.causes if one["cause"] == cause]
    return row["evidence"]


# --- healthy code -------------------------------------------------------------------------------

SERVABLE = {
    "full and bidirectional": {},
    "causal": {"in_block": ("causal", "causal")},
    "a causal layer after a bidirectional one": {"in_block": ("bidirectional", "causal")},
    "sliding": {"window": (7, 7)},
    "sliding, counted from the anchor": {"window": (7, 7), "window_rule": "anchor"},
    "sliding below full": {"window": (None, 7)},
    "sliding and causal": {"window": (7, 7), "in_block": ("causal", "causal")},
    "next-token layout": {"label_layout": "next"},
    "moved block": {"position_offset": 1},
}


@pytest.mark.parametrize("name", SERVABLE)
def test_code_that_follows_a_servable_rule_is_clean(name):
    how = reading(**SERVABLE[name])
    found = tried(adapter(how), how, anchors=ANCHORS)
    assert found.clean, (found.found, found.differing)
    assert {one["status"] for one in found.checks} == {"ok"}
    assert {one["status"] for one in found.causes} == {"excluded"}
    assert (found.frame["seen"] == found.frame["expected"]).all()


def test_low_precision_is_no_fault():
    found = tried(adapter(dtype=torch.bfloat16))
    assert found.clean, (found.found, found.differing)
    assert 1e-3 < found.facts["rounding"] < 1


def test_the_serving_rule_is_what_is_expected_by_default():
    assert tried(adapter(), None).clean
    assert causes(tried(adapter(reading(window=(7, 7))), None)) == {"mask.window"}


def test_the_matrix_holds_slots_rows_and_both_ways_of_measuring():
    found = tried(adapter())
    rows, slots = found.matrix("row"), found.matrix("slot")
    assert list(rows.index) == [1, 2, 3, 4]
    assert list(slots.columns) == [0, 1, 2, 3, 4]
    assert (rows.loc[:, :-1] > 0.01).all().all()
    assert (rows.loc[:, 0:] == 0).all().all()
    assert (slots > 0.01).all().all()
    slopes = found.matrix("row", "gradient")
    assert ((slopes > 0) == (rows > 0)).all().all()
    # Rows that move the logits more are also steeper.
    single = found.frame[lambda f: (f["kind"] == "row") & f["seen"] & (f["first"] == f["last"])]
    assert single["influence"].corr(single["gradient"], method="spearman") > 0.3


def test_perturbations_alone_find_the_same():
    """An adapter that keeps no graph and shows no slots."""

    class Opaque:
        def __init__(self, inner):
            self.spec, self.context = inner.spec, inner.context
            self.truncate, self.target_bits = inner.truncate, inner.target_bits
            self.propose = lambda *given: inner.propose(*given).detach()

    for change_, cause in (({}, set()), ({"context_bound": "inclusive"}, {"mask.anchor_included"})):
        how = reading(**change_)
        opaque, full = tried(Opaque(adapter(how))), tried(adapter(how))
        assert causes(opaque) == cause
        columns = ["kind", "anchor", "slot", "first", "seen"]
        ours = full.frame[lambda f: f["kind"] == "row"][columns]
        theirs = opaque.frame[lambda f: f["kind"] == "row"][columns]
        assert ours.reset_index(drop=True).equals(theirs.reset_index(drop=True))
        assert status(opaque, "gradient") == status(opaque, "batched") == "not testable"
        untested = {o["cause"] for o in opaque.causes if o["status"] == "not_tested"}
        assert untested == {"mask.cross_block_leak", "mask.block_causality"}


def test_rows_beyond_the_anchor_may_be_refused():
    class Strict(Builtin):
        def propose(self, state, anchor_id, anchor_pos):
            if state.start + len(state.features) > anchor_pos:
                raise Refused("rows beyond the anchor")
            return super().propose(state, anchor_id, anchor_pos)

    found = tried(adapter(kind=Strict))
    assert found.clean
    assert any("refused: rows beyond the anchor" in note for note in found.notes)
    assert found.frame[lambda f: f["kind"] == "row"]["last"].max() == -1


def test_it_survives_json():
    found = tried(adapter(reading(context_bound="inclusive")))
    kept = Influence.from_json(json.loads(storage.to_json_text(found.to_json())))
    assert kept.to_json() == storage.plain(found.to_json())
    assert kept.frame.equals(found.frame)
    with pytest.raises(BadInput, match="schema"):
        Influence.from_json({"schema": "other"})


# --- masks --------------------------------------------------------------------------------------

MASKS = {
    "anchor included": ({"context_bound": "inclusive"}, "mask.anchor_included", r"row \(a\+0\)"),
    "causal": ({"in_block": ("causal",) * 2}, "mask.block_causality", "no slot sees the later"),
    "window": (
        {"window": (7, 7)},
        "mask.window",
        r"slot 1 reads back to a-6, .* back to a-24 .* a window of 7 tokens",
    ),
    "later blocks": (
        {"other_blocks": "later"},
        "mask.cross_block_leak",
        r"anchor a\+\d+ .* a later block",
    ),
    "all blocks": ({"other_blocks": "all"}, "mask.cross_block_leak", "12 pairs of blocks"),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_other_than_the_rule_is_named(name):
    changed, cause, said = MASKS[name]
    found = tried(adapter(reading(**changed)))
    assert causes(found) == {cause}
    assert re.search(said, evidence(found, cause)), evidence(found, cause)


def test_the_mask_that_a_rule_wants_and_the_code_lacks_is_named():
    for name in ("causal", "window"):
        changed, cause, _ = MASKS[name]
        assert causes(tried(adapter(), reading(**changed))) == {cause}
    found = tried(adapter(), reading(context_bound="inclusive"))
    assert "it is not read" in evidence(found, "mask.anchor_included")


@pytest.mark.parametrize("name", ["anchor included", "later blocks", "all blocks"])
def test_code_that_follows_a_rule_which_nobody_can_serve_is_not_clean(name):
    changed, cause, _ = MASKS[name]
    how = reading(**changed)
    found = tried(adapter(how), how, anchors=ANCHORS)
    assert causes(found) == {cause}
    assert (found.frame["seen"] == found.frame["expected"]).all()
    assert status(found, "batched") == "differs"


def test_a_window_one_token_off_is_seen_at_the_edge():
    found = tried(adapter(reading(window=(8, 8))), reading(window=(7, 7)))
    assert causes(found) == {"mask.window"}
    ours, rule = found.facts["reach"], found.facts["reach_expected"]
    assert [a - b for a, b in zip(ours, rule, strict=True)] == [1] * len(ours)


def test_the_end_of_a_window_beyond_the_text_is_found_on_a_longer_one():
    how = reading(window=(90, 90))
    found = tried(adapter(how), how)
    assert found.clean
    assert found.facts["reach_of"] > 90 > N
    shorter = tried(adapter(reading(window=(80, 80))), how)
    assert causes(shorter) == {"mask.window"}


def test_a_window_that_cannot_be_reached_is_not_tested():
    class Short(Builtin):
        def spec(self):
            return dataclasses.replace(super().spec(), max_context=64)

    how = reading(window=(90, 90))
    found = tried(adapter(how, Short), how)
    assert "mask.window" not in causes(found)
    assert "59 is the longest" in evidence(found, "mask.window")
    (row,) = [one for one in found.causes if one["cause"] == "mask.window"]
    assert row["status"] == "not_tested"


def test_a_training_pass_that_shows_later_rows_is_named():
    """Visibility taken from the pass's last block, as where it is decided by block index."""

    class ByIndex(Builtin):
        def forward_train(self, features, positions, anchors, anchor_ids):
            own = [
                self.propose(
                    self.context(features, positions)._replace(start=-int(anchors.max() - a)),
                    int(t),
                    int(a),
                )
                for a, t in zip(anchors, anchor_ids, strict=True)
            ]
            return torch.stack(own)

    found = tried(adapter(kind=ByIndex))
    assert {"mask.anchor_included", "mask.future_included"} <= causes(found)
    assert "with several blocks in one pass" in evidence(found, "mask.future_included")
    assert "mask.cross_block_leak" not in causes(found)


def by_forward(mask_of, drafter=None):
    """The drafter's plain forward as one function of everything."""
    drafter = drafter or make()
    b = READING.block_size

    def function(features, positions, anchor_id, anchor_pos):
        noise = EMBEDDING[[anchor_id] + [READING.mask_token_id] * (b - 1)]
        rows = (positions < anchor_pos).expand(b, -1)
        mask = mask_of(torch.cat([rows, torch.ones(b, b, dtype=torch.bool)], dim=-1))
        slots = torch.arange(anchor_pos, anchor_pos + b)
        given = drafter.features(features)[None], positions[None], mask[None]
        return drafter(noise[None], slots[None], *given)[0, 1:] @ HEAD.T

    return Function(function, Builtin(drafter, EMBEDDING, HEAD).spec(), TargetBits(EMBEDDING, HEAD))


def test_a_plain_function_is_clean():
    found = tried(by_forward(lambda visible: visible))
    assert found.clean
    assert status(found, "gradient") == "ok"


def test_a_mask_of_truth_values_added_to_the_scores_masks_nothing():
    found = tried(by_forward(lambda visible: visible.float()))
    assert causes(found) == {"mask.anchor_included", "mask.future_included"}
    # It still lies about what a longer context is.
    assert status(found, "truncated") == "ok"


def test_a_row_too_few_is_named():
    def without_newest(visible):
        newest = int(visible[0, : -READING.block_size].sum()) - 1
        cut = visible.clone()
        cut[:, newest] = False
        return cut

    found = tried(by_forward(without_newest))
    assert causes(found) == {"mask.rows_hidden"}


# --- context and taps ---------------------------------------------------------------------------


def with_fc(edit):
    one = adapter()
    one.drafter = copy.deepcopy(one.drafter)
    edit(one.drafter.fc.weight.data.view(32, 3, 32))
    return one


def test_a_tap_whose_columns_are_zero_is_dead():
    found = tried(with_fc(lambda fc: fc[:, 1].zero_()))
    assert causes(found) == {"layers.missing_or_default"}
    assert evidence(found, "layers.missing_or_default") == "leaving out layer 1 changes nothing"
    assert dict(found.facts["tap_influence"])[1] == 0


def test_taps_that_may_be_swapped_are_named():
    found = tried(with_fc(lambda fc: fc.copy_(fc[:, :1].expand_as(fc).clone())))
    assert causes(found) == {"layers.order"}
    assert evidence(found, "layers.order").count("swapping") == 2

    def pair(fc):
        fc[:, 1] = fc[:, 0]
        fc[:, 2] = 0

    found = tried(with_fc(pair))
    assert causes(found) == {"layers.order", "layers.missing_or_default"}
    assert "swapping layers -1 and 1" in evidence(found, "layers.order")


def test_a_context_without_influence_is_named_once():
    found = tried(with_fc(lambda fc: fc.zero_()))
    assert causes(found) == {"hidden.ignored_by_drafter"}
    untested = {one["cause"] for one in found.causes if one["status"] == "not_tested"}
    assert untested == {"layers.missing_or_default", "layers.order", "mask.window"}


# --- states -------------------------------------------------------------------------------------


class Rebased(Builtin):
    """Context positions start at 0, whatever they are; the block's do not."""

    def context(self, features, positions, state=None):
        made = super().context(features, positions, state)
        rows = torch.arange(len(made.features))
        return made._replace(layers=self.drafter.context(made.features, rows))


class Mutating(Builtin):
    """The block's own rows stay in the state."""

    def context(self, features, positions, state=None):
        return dict(super().context(features, positions, state and Rows(**state))._asdict())

    def propose(self, state, anchor_id, anchor_pos):
        logits = super().propose(Rows(**state), anchor_id, anchor_pos)
        state["layers"] = [(k + 0.01, v) for k, v in state["layers"]]
        return logits

    def propose_block(self, state, block, anchor_pos):
        return super().propose_block(Rows(**state), block, anchor_pos)

    def truncate(self, state, length):
        return dict(super().truncate(Rows(**state), length)._asdict())

    forward_train = None


class Uncropped(Builtin):
    """Truncation moves a counter and leaves the rejected rows in the way of the true ones."""

    def truncate(self, state, length):
        return state._replace(start=state.start)

    def context(self, features, positions, state=None):
        if state is not None and len(state.features) > int(positions[0]):
            return state
        return super().context(features, positions, state)


class Restarting(Builtin):
    """Rows that are added later are numbered from 0."""

    def context(self, features, positions, state=None):
        made = super().context(features, positions, state)
        if state is None:
            return made
        late = self.drafter.context(made.features[len(state.features) :], positions * 0)
        joined = [
            (torch.cat([k, k2]), torch.cat([v, v2]))
            for (k, v), (k2, v2) in zip(state.layers, late, strict=True)
        ]
        return made._replace(layers=joined)


class Noisy(Builtin):
    """Every call rounds as it likes."""

    size = 1e-6

    def propose(self, state, anchor_id, anchor_pos):
        return self.noisy(super().propose(state, anchor_id, anchor_pos))

    def propose_block(self, state, block, anchor_pos):
        return self.noisy(super().propose_block(state, block, anchor_pos))

    def forward_train(self, *given):
        return self.noisy(super().forward_train(*given))

    def noisy(self, logits):
        return logits + self.size * logits.std() * torch.randn_like(logits)


class Random(Noisy):
    size = 10.0


class Counting(Builtin):
    """What it proposes depends on how often it was asked."""

    calls = 0

    def propose(self, state, anchor_id, anchor_pos):
        self.calls += 1
        return super().propose(state, anchor_id, anchor_pos) * (1 + self.step() * HEAD[:, 0])

    def step(self):
        return 0.01 * self.calls


class Creeping(Counting):
    """Less at first than half the digits, but more and more."""

    def step(self):
        return 1e-6 * self.calls


class Alternating(Counting):
    def step(self):
        return 0.1 * (self.calls % 2)


class Remembering(Builtin):
    """The state of the call before has a part in the next."""

    last = None

    def propose(self, state, anchor_id, anchor_pos):
        last, self.last = self.last, state.features[0].detach()
        logits = super().propose(state, anchor_id, anchor_pos)
        return logits if last is None else logits + HEAD @ last


class Dropping(Builtin):
    """A training pass with its dropout on."""

    def forward_train(self, *given):
        return torch.nn.functional.dropout(super().forward_train(*given), 0.1)


STATES = {
    Rebased: ("shifted", {"position.rebased"}),
    Mutating: ("pure", {"serving.state"}),
    Uncropped: ("truncated", {"serving.state"}),
    Restarting: ("chunked", {"serving.state"}),
}


@pytest.mark.parametrize("kind", STATES, ids=lambda kind: kind.__name__)
def test_a_state_that_is_not_the_context_is_named(kind):
    check, named = STATES[kind]
    found = tried(adapter(kind=kind))
    assert status(found, check) == "differs"
    assert causes(found) == named


def test_a_state_that_is_changed_without_consequences_is_named_too():
    class Counting(Builtin):
        def context(self, features, positions, state=None):
            inner = None if state is None else state["rows"]
            return {"rows": super().context(features, positions, inner), "calls": 0}

        def propose(self, state, anchor_id, anchor_pos):
            state["calls"] += 1
            return super().propose(state["rows"], anchor_id, anchor_pos)

        def propose_block(self, state, block, anchor_pos):
            return super().propose_block(state["rows"], block, anchor_pos)

        def truncate(self, state, length):
            return {"rows": super().truncate(state["rows"], length), "calls": 0}

        forward_train = None

    found = tried(adapter(kind=Counting))
    assert status(found, "repeatable") == "ok"
    assert [one["reason"] for one in found.differing] == ["propose() changes state['calls']"]


def test_answers_that_vary_are_noise_and_hide_what_is_smaller():
    torch.manual_seed(0)
    found = tried(adapter(kind=Noisy))
    assert 0 < found.facts["repeated"] < 1e-4
    assert not causes(found)
    assert status(found, "deterministic") == status(found, "repeatable") == "ok"


@pytest.mark.parametrize(
    "kind",
    [Random, Counting, Creeping, Alternating, Remembering, Dropping],
    ids=lambda kind: kind.__name__,
)
def test_nothing_else_is_said_of_a_drafter_that_is_not_deterministic(kind):
    torch.manual_seed(0)
    # Under a rule of its own that nobody can serve, and with a mask that it does not have.
    found = tried(adapter(kind=kind), reading(context_bound="inclusive"))
    assert [one["check"] for one in found.differing] == ["deterministic"]
    others = [one for one in found.checks if one["check"] != "deterministic"]
    for one in (*others, *found.causes):
        assert one["status"] in ("not testable", "not_tested")
        assert "not deterministic" in one.get("reason", one.get("evidence"))
    assert any("not told" in note for note in found.notes)


def test_what_an_adapter_cannot_do_is_not_testable():
    class Fixed(Builtin):
        def truncate(self, state, length):
            raise NotImplementedError("cannot be shortened")

        def context(self, features, positions, state=None):
            if state is not None or int(positions[0]):
                raise Refused("built once, from position 0")
            return super().context(features, positions)

    found = tried(adapter(kind=Fixed))
    assert found.clean
    untestable = {one["check"]: one["reason"] for one in found.checks if one["status"] != "ok"}
    assert untestable == {
        "truncated": "cannot be shortened",
        "chunked": "built once, from position 0",
        "shifted": "built once, from position 0",
    }
    (row,) = [one for one in found.causes if one["cause"] == "position.rebased"]
    assert (row["status"], row["evidence"]) == ("not_tested", "built once, from position 0")


# --- proposals ----------------------------------------------------------------------------------


def test_an_anchor_that_is_not_read_differs():
    class Deaf(Builtin):
        def propose(self, state, anchor_id, anchor_pos):
            return super().propose(state, 7, anchor_pos)

    found = tried(adapter(kind=Deaf))
    assert "anchor_read" in [one["check"] for one in found.differing]


def test_a_mask_token_that_is_proposed_is_named():
    class Masked(Builtin):
        def propose(self, state, anchor_id, anchor_pos):
            logits = super().propose(state, anchor_id, anchor_pos)
            logits[-1, READING.mask_token_id] = 1e3
            return logits

    assert causes(tried(adapter(kind=Masked))) == {"mask_token.id"}


def test_a_graph_that_is_cut_differs():
    class Cut(Builtin):
        def context(self, features, positions, state=None):
            half = torch.cat([features[:, :1].detach(), features[:, 1:]], dim=1)
            return super().context(half, positions, state)

    found = tried(adapter(kind=Cut))
    assert causes(found) == set()
    assert [one["check"] for one in found.differing] == ["gradient"]


# --- contracts ----------------------------------------------------------------------------------


def broken(change_):
    class Broken(Builtin):
        def propose(self, state, anchor_id, anchor_pos):
            return change_(super().propose(state, anchor_id, anchor_pos))

    return adapter(kind=Broken)


@pytest.mark.parametrize(
    ("change_", "said"),
    [
        (lambda x: x[:-1], r"propose\(\) returns a tensor \[3, 60\]; expected logits \[4, 60\]"),
        (lambda x: x[None], r"\[1, 4, 60\]"),
        (lambda x: x.argmax(-1), r"a tensor \[4\]"),
        (lambda x: x.long(), "torch.int64 values; expected logits, not token ids"),
        (lambda x: x * float("nan"), "NaN or infinite, first in row 0"),
        (lambda x: torch.where(x == x[2].max(), torch.inf, x), "NaN or infinite, first in row 2"),
        (lambda x: torch.full_like(x, -torch.inf), "no choice of tokens"),
        (lambda x: x.tolist(), "returns list"),
    ],
    ids=["few rows", "batch", "ids", "integers", "nan", "inf", "nothing", "list"],
)
def test_answers_that_break_the_contract_are_errors(change_, said):
    with pytest.raises(AdapterError, match=said):
        tried(broken(change_))


def raises(error):
    def function(self, *given, **named):
        raise error

    return function


def without_state(self, features, positions):
    return Builtin.context(self, features, positions)


FUNCTIONS = {
    "spec": r"spec\(\) to return",
    "context": r"context\(features, positions, state=None\)",
    "propose": r"propose\(state, anchor_id, anchor_pos\) to return logits",
    "truncate": r"truncate\(state, length\)",
    "target_bits": r"target_bits\(\)",
    "block": r"block\(anchor_id\)",
    "propose_block": r"propose_block\(state",
    "forward_train": r"forward_train\(features",
}


@pytest.mark.parametrize(
    ("function", "put", "said"),
    [
        *(
            (name, raises(RuntimeError("first\nsecond")), rf"{name}\(\) raises .*: first; .*{how}")
            for name, how in FUNCTIONS.items()
        ),
        ("propose", raises(KeyError("k")), r"propose\(\) raises KeyError: 'k'"),
        ("propose", raises(ValueError("no")), r"propose\(\) refuses what every drafter .*: no"),
        ("block", raises(NotImplementedError), r"block\(\) refuses .*: NotImplementedError"),
        ("context", lambda *given: None, r"context\(\) returns None"),
        ("truncate", lambda *given: None, r"truncate\(\) returns None; .* changed in place"),
        ("context", without_state, r"context\(\) raises TypeError: .*state=None"),
        ("block", lambda *given: EMBEDDING[:5] / 0, "no finite numbers"),
        ("forward_train", lambda *given: None, r"forward_train\(\) returns NoneType"),
        ("spec", lambda self: DraftSpec(), r"spec\(\) raises TypeError: .*block_size"),
        ("truncate", None, "has no function truncate"),
    ],
)
def test_an_adapter_that_breaks_off_is_an_error_of_one_line(function, put, said):
    with pytest.raises(AdapterError, match=said) as caught:
        tried(adapter(kind=type("Broken", (Builtin,), {function: put})))
    assert "\n" not in str(caught.value)


def test_what_is_no_adapter_is_an_error():
    with pytest.raises(AdapterError, match="the class Builtin; expected an adapter made of it"):
        tried(Builtin)
    with pytest.raises(AdapterError, match="object has no function spec, context"):
        tried(object())


def test_an_adapter_may_change_what_it_is_given_and_use_its_buffers_again():
    class Reusing(Builtin):
        room = torch.zeros(4, VOCABULARY)

        def context(self, features, positions, state=None):
            made = super().context(features, positions, state)
            with torch.no_grad():
                features.zero_()
                positions.zero_()
            return made

        def propose(self, state, anchor_id, anchor_pos):
            return self.room.copy_(super().propose(state, anchor_id, anchor_pos).detach())

        propose_block = forward_train = None

    how = reading(context_bound="inclusive")
    assert causes(tried(adapter(how, Reusing))) == {"mask.anchor_included"}
    assert torch.equal(FEATURES, random(N, 3, 32, seed=1))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_size": 1}, "block_size=1"),
        ({"block_size": True}, "block_size=True"),
        ({"n_proposed": 5}, "n_proposed=5; expected 1 to 4"),
        ({"n_proposed": 0}, "n_proposed=0"),
        ({"layer_ids": ()}, "layer_ids"),
        ({"layer_ids": (1, 1)}, "different layers"),
        ({"layer_ids": (-2, 1)}, "-1 is the embedding output"),
        ({"layer_ids": 5}, "layer_ids=5; expected a tuple"),
        ({"layer_ids": "12"}, "layer_ids='12'"),
        ({"last_layer_normed": None}, "True or False"),
        ({"device": "nowhere"}, "a device that torch has here"),
        ({"vocabulary_map": [1, 2]}, "a tensor with"),
        ({"vocabulary_map": torch.tensor([], dtype=torch.int64)}, "a tensor with"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"layout": "shifted"}, "'same' or 'next'"),
        ({"max_context": 0}, "max_context=0"),
        ({"dtype": torch.int64}, "a floating-point type"),
        ({"vocabulary_map": torch.tensor([3, 3])}, "different target id"),
    ],
    ids=str,
)
def test_a_spec_that_cannot_be_is_an_error(changed, said):
    base = {"block_size": 5, "n_proposed": 4, "layer_ids": (0, 1)}
    DraftSpec(**base)
    with pytest.raises(AdapterError, match=said):
        DraftSpec(**base | changed)


def with_spec(**changed):
    class Other(Builtin):
        def spec(self):
            return dataclasses.replace(super().spec(), **changed)

    return adapter(kind=Other)


def test_a_spec_that_does_not_fit_is_an_error():
    with pytest.raises(AdapterError, match="token 60; expected ids below 60"):
        tried(with_spec(mask_token_id=60))
    with pytest.raises(AdapterError, match="does not name"):
        tried(with_spec(vocabulary_map=torch.arange(40)))
    with pytest.raises(BadInput, match="block_size, first slot"):
        tried(adapter(), reading(block_size=6))
    with pytest.raises(BadInput, match="max_context = 30"):
        tried(with_spec(max_context=30))


def test_a_reduced_vocabulary_is_fine_where_it_is_declared():
    kept = torch.arange(0, VOCABULARY, 2)
    outside = torch.ones(VOCABULARY, dtype=torch.bool)
    outside[kept] = False

    class Reduced(Builtin):
        def spec(self):
            return dataclasses.replace(super().spec(), vocabulary_map=kept)

        def _logits(self, hidden):
            return super()._logits(hidden).masked_fill(outside, -torch.inf)

    found = tried(adapter(kind=Reduced))
    assert found.clean, (found.found, found.differing)
    assert status(found, "gradient") == "ok"


def test_the_built_in_drafter_brings_what_it_has_of_its_own():
    """Its own embedding with a mask token beyond the target's, and its own head of 40 tokens."""
    how = reading(head="own", embedding="own", vocabulary_map="offset", mask_token_id=VOCABULARY)
    shape = dataclasses.replace(SHAPE, embedding_rows=VOCABULARY + 1, head_rows=40, has_map=True)
    torch.manual_seed(0)
    drafter = Drafter(shape, how).eval().requires_grad_(False)
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    drafter.d2t[10:] = 15
    capture = SimpleNamespace(embedding=EMBEDDING, head=HEAD, target_facts={"n_layers": 3})
    one = Builtin.of_capture(capture, drafter)
    found = tried(one, how)
    assert found.clean, (found.found, found.differing)
    assert status(found, "mask_not_proposed") == "not testable"
    logits = one.propose(one.context(FEATURES[:9], torch.arange(9)), 3, 9)
    assert logits.isfinite().nonzero()[:, 1].unique().tolist() == [*range(10), *range(25, 55)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"features": FEATURES[:, :2]}, r"the K = 3 layers \[-1, 1, 2\]"),
        ({"features": FEATURES / 0}, "not finite"),
        ({"features": FEATURES.long()}, "not floating-point"),
        ({"tokens": TOKENS[:-1]}, "one for each state"),
        ({"tokens": ["a"] * N}, "tokens as list; expected a tensor"),
        ({"tokens": TOKENS.float()}, "token ids, whole numbers"),
        ({"anchors": 12}, "a list of positions"),
        ({"rule": "strict"}, "a rule as str; expected a Convention, a Rule, or None"),
        ({"tokens": TOKENS + VOCABULARY}, "ids below 60"),
        ({"anchors": ()}, "positions from 2 to 33"),
        ({"anchors": (1,)}, "positions from 2"),
        ({"anchors": (N,)}, "positions from 2"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_inputs_that_do_not_fit_are_errors(given, said):
    usual = {"features": FEATURES, "tokens": TOKENS, "anchors": ANCHORS}
    with pytest.raises(BadInput, match=said):
        probe(adapter(), **usual | given)


def test_lists_are_as_good_as_tensors():
    given = FEATURES.numpy(), TOKENS.tolist(), torch.tensor(ANCHORS)
    ours, plain = probe(adapter(), *given), probe(adapter(), FEATURES, TOKENS, ANCHORS)
    assert ours.to_json() == plain.to_json()


@pytest.mark.parametrize("bits", [None, (EMBEDDING,), (EMBEDDING, HEAD[0]), (EMBEDDING, HEAD / 0)])
def test_target_bits_that_cannot_be_are_errors(bits):
    one = adapter()
    one.target_bits = lambda: bits
    with pytest.raises(AdapterError, match=r"target_bits\(\)"):
        tried(one)


# --- a run --------------------------------------------------------------------------------------


def test_a_run_probes_once_and_judges(tmp_path, monkeypatch):
    write_world(tmp_path)
    options = {"target": "target", "drafter": "drafter", "prompts": "prompts.jsonl"}
    config = RunConfig(
        **{name: str(tmp_path / path) for name, path in options.items()},
        out=str(tmp_path / "run"),
        max_new_tokens=12,
        draws=200,
    )
    run = Run.open(config)
    result = run.result("mask.influence")
    assert result.verdict is Verdict.PASS, result.headline
    assert result.params["facts"]["layer_ids"] == [0, 2]
    assert result.frame["seen"].equals(result.frame["expected"])
    assert len(list((tmp_path / "run" / "influence").iterdir())) == 1

    monkeypatch.setattr(Run, "_probe", None)  # what is kept is read
    again = Run.open(config)
    assert again.influence("drafter").to_json() == run.influence("drafter").to_json()
    monkeypatch.undo()
    leaky = config.model_copy(update={"overrides": ("context_bound=inclusive",)})
    result = Run.open(leaky).result("mask.influence")
    assert result.verdict is Verdict.FAIL
    assert "mask.anchor_included" in result.headline
    cells = result.frame[lambda f: (f["kind"] == "row") & (f["first"] == 0)]
    assert (cells["seen"] & cells["expected"] & ~cells["served"]).all()


# --- pieces -------------------------------------------------------------------------------------


def test_dependence_through_two_layers_by_hand():
    """Slot 0 alone sees row 0; a second layer carries it to every slot that sees slot 0."""
    rule = Rule(block_size=3, first_slot=0, n_proposed=3, in_block=("causal",), window=(2,))
    rows, slots = dependence(rule, torch.tensor([2]), 2)
    assert rows[0].int().tolist() == [[0, 1], [0, 0], [0, 0]]
    assert slots[0, :, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    twice = dataclasses.replace(rule, in_block=("causal",) * 2, window=(2, 2))
    rows, slots = dependence(twice, torch.tensor([2]), 2)
    assert rows[0].int().tolist() == [[0, 1], [0, 1], [0, 0]]
    assert slots[0, :, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_change_is_relative_and_what_tokens_share_does_not_count():
    x = torch.tensor([[1.0, -1.0], [3.0, 1.0], [1.0, 2.0]])
    y = torch.tensor([[2.0, -2.0], [3.0, 1.0], [1.0, -torch.inf]])
    assert change(x, y).tolist() == [1.0, 0.0, torch.inf]
    assert change(x + 100, y + 100)[0] == pytest.approx(1.0)


def test_a_snapshot_sees_tensors_numbers_and_texts_at_any_depth():
    class Cache:
        def __init__(self):
            self.layers, self.length = [{"k": torch.zeros(2)}], 3

    state = (Cache(), torch.nn.Linear(2, 2))
    before = snapshot(state)
    assert changes(before, snapshot(state)) == []
    state[0].layers[0]["k"][1] = 1
    state[0].length += 1
    assert changes(before, snapshot(state)) == ["state[0].layers[0]['k']", "state[0].length"]


def test_every_cause_is_looked_for_once_and_in_order():
    found = tried(adapter())
    assert [one["cause"] for one in found.causes] == list(CAUSES)
