"""Continuations from servers: three dialects, every way in which a server fails, text and ids."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny_world
from serving import FaultyServer

from dflash_diag import servers
from dflash_diag.capture import make_capture
from dflash_diag.decoding import expect_as_captured, greedy
from dflash_diag.diagnostics import get
from dflash_diag.errors import BadInput, Interrupted
from dflash_diag.prompts import Prompt
from dflash_diag.references import ServedOutput, check_reference, check_served
from dflash_diag.servers import Asked, Server, ServerError
from dflash_diag.targets import load_target

pytestmark = pytest.mark.allow_hosts("127.0.0.1")

G = 12
PROMPTS = [Prompt(id=f"p{i}", text=f"def f{i}(x): return") for i in range(4)]
DIALECTS = ("sglang", "vllm", "ids-in", "text")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny_world.write_target(tmp_path_factory.mktemp("ascii") / "target", ascii_only=True)
    return load_target(folder)


@pytest.fixture(scope="module")
def own(target):
    """The target's own greedy continuation of every prompt, by its token ids."""
    prompts = [target.encode(prompt) for prompt in PROMPTS]
    made = greedy(target, prompts, G)
    return {tuple(p): one.ids for p, one in zip(prompts, made, strict=True)}


@pytest.fixture
def start(target, own):
    """Makes a server of a dialect that answers as the target does; still to be entered."""

    def make(dialect="vllm", write=None, **facts) -> FaultyServer:
        return FaultyServer(
            dialect,
            write or (lambda prompt, n: own[tuple(prompt)][:n]),
            encode=lambda text: list(target.tokenizer(text)["input_ids"]),
            decode=target.decode,
            **facts,
        )

    return make


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(servers, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv(servers.KEY_VARIABLE, raising=False)


@pytest.fixture
def capture(target, tmp_path):
    def make(server: FaultyServer | str, prompts=PROMPTS, name="capture", timeout=20.0, **options):
        url = server if isinstance(server, str) else server.url
        reference = Server(url, timeout=timeout, **options)
        return make_capture(
            target,
            prompts,
            tmp_path / name,
            max_new_tokens=G,
            layers="taps",
            reference=reference,
            silent=True,
        )

    return make


@pytest.fixture
def ask(target):
    """Continuations of all prompts, as token ids, without a capture around them."""

    def run(server: FaultyServer, timeout=20.0):
        common = {"max_new_tokens": G, "vocab_size": target.vocab_size, "eos_ids": frozenset()}
        prompts = [Asked(p.id, tuple(target.encode(p)), p.text, **common) for p in PROMPTS]
        with Server(server.url, timeout=timeout) as asked:
            return [list(asked.complete(p, target.tokenizer).ids) for p in prompts]

    return run


def asked_prompts(server: FaultyServer) -> list:
    """Prompts of the completions of more than one token, in order."""
    whole = []
    for body in server.asked:
        n = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        if n > 1:
            whole.append(body.get("prompt") or body["input_ids"])
    return whole


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_gives_the_targets_own_tokens(dialect, start, capture, own, target):
    with start(dialect) as server:
        made = capture(server)
    how = "ids" if dialect in ("sglang", "vllm") else "text"
    for i, prompt in enumerate(PROMPTS):
        assert made.continuation(i).tolist() == own[tuple(target.encode(prompt))]
    assert [(p.origin, p.finish_reason, p.ended) for p in made.prompts] == [
        (how, "length", False)
    ] * len(PROMPTS)
    about = made.reference
    assert about["url"] == server.url
    assert about["model"] == "tiny"
    assert about["tokens_by"] == [how]
    assert about["unusable"] == []
    spoken = {"sglang": "sglang", "vllm": "openai-ids", "ids-in": "openai-ids"}
    assert about["dialect"] == spoken.get(dialect, "openai-text")
    assert about["version"] == ("1.2" if dialect in ("sglang", "vllm") else None)
    assert about["precision"] == ("float32" if dialect == "sglang" else None)
    if how == "ids":
        sent = asked_prompts(server)
        assert all(isinstance(ids, list) for ids in sent)
    check = check_reference(made)
    assert [row["n_equal"] for row in check["rows"]] == [G] * len(PROMPTS)


def test_afterwards_no_server_is_needed(start, capture):
    with start() as server:
        made = capture(server)
    again = capture(server)
    assert again.facts == made.facts
    assert not (made.path.parent / ".capture.partial").exists()


def test_one_token_is_completed_before_any_prompt_is_asked(start, capture):
    with start() as server:
        capture(server)
    assert server.asked[0]["max_tokens"] == 1
    assert [body["max_tokens"] for body in server.asked[1:]] == [G] * len(PROMPTS)


PASSING = [503, 429, 502, 500, "cut", "reset", "garbage"]


@pytest.mark.parametrize("fault", PASSING, ids=str)
@pytest.mark.parametrize("when", ["loading", "later"])
def test_what_passes_is_survived(fault, when, start, ask, own):
    with start() as server:
        server.script = [fault, fault] if when == "loading" else [None, None, fault, None, fault]
        assert ask(server) == list(own.values())
    assert server.script == []


@pytest.mark.parametrize("fault", ["hang", "trickle"])
def test_a_request_that_hangs_is_given_up_and_repeated(fault, start, ask, own):
    with start() as server:
        server.script = [None, fault]
        began = time.monotonic()
        assert ask(server, timeout=3.0) == list(own.values())
    assert time.monotonic() - began < 10


def changed(**fields):
    """A change of a completion's answer."""

    def change(value):
        choice = {**value["choices"][0], **fields}
        return {**value, "choices": [choice]}

    return change


USELESS = {
    "outside": (changed(token_ids=[3, 320]), "token id 320 is not below 320"),
    "negative": (changed(token_ids=[3, -1]), "token id -1 is not below 320"),
    "no integers": (changed(token_ids=["a"]), "no list of integers"),
    "empty": (changed(token_ids=[]), "an empty continuation"),
    "other prompt": (changed(prompt_token_ids=[1, 2]), "other prompt tokens"),
    "other model": (lambda v: {**v, "model": "else"}, "answers as model 'else' instead of 'tiny'"),
    "no choices": (lambda v: {"choices": []}, "an answer without"),
    "not an object": (lambda v: [1], "an answer without"),
    "error in 200": (lambda v: {"error": "no"}, "an answer without"),
    "not JSON": ("garbage", "not JSON"),
    "failing": (500, "status 500: not now"),
}


@pytest.mark.parametrize("fault", USELESS)
def test_a_useless_answer_is_asked_for_again_and_then_reported(fault, start, ask, own):
    change, said = USELESS[fault]
    with start() as server:
        server.script = [None, change]  # the first is the one-token completion
        assert ask(server) == list(own.values())
        server.script = [None, None, *[change] * 9]
        with pytest.raises(ServerError, match=said) as error:
            ask(server)
    assert "'p1'" in str(error.value)
    assert len(server.script) == 9 - 3


def test_sglang_may_give_a_request_up(start, ask):
    abort = {"finish_reason": {"type": "abort", "message": "x"}, "prompt_tokens": 3}
    with start("sglang") as server:
        server.script = [None, *[lambda v: {**v, "meta_info": abort}] * 3]
        with pytest.raises(ServerError, match="gave the request up"):
            ask(server)


def test_finished_prompts_are_kept_when_the_server_goes_away(start, capture, own):
    with start() as server:
        server.script = [None, None, None, *[503] * 100]
        with pytest.raises(Interrupted, match="2 of 4 prompts are kept.*same command") as error:
            capture(server, timeout=0.5)
        assert error.value.exit_code == 3
        server.script, server.asked = [], []
        made = capture(server)
    assert len(asked_prompts(server)) == 2
    assert [made.continuation(i).tolist() for i in range(4)] == list(own.values())


def test_prompts_of_another_server_under_the_same_address_are_asked_again(start, capture):
    with start() as server:
        server.script = [None, None, None, *[503] * 100]
        with pytest.raises(Interrupted):
            capture(server, timeout=0.5)
        server.script, server.asked = [], []
        server.facts["version"] = "1.3"
        made = capture(server)
    assert len(asked_prompts(server)) == 4
    assert made.reference["version"] == "1.3"


@pytest.mark.parametrize(("fact", "value"), [("model", "other"), ("version", "2.0")])
def test_a_server_that_comes_back_as_another_one_is_refused(fact, value, start, ask):
    with start() as server:

        def restart(_):
            server.facts[fact] = value
            return {}

        server.script = [None, None, restart]
        with pytest.raises(ServerError, match=f"came back with {fact} '{value}' instead of"):
            ask(server)


def test_retry_after_is_honoured_and_not_waited_for_in_vain(start, ask):
    with start() as server:
        server.script = [(503, "1")]
        began = time.monotonic()
        ask(server)
        assert time.monotonic() - began >= 1
        server.script = [(429, "3600")] * 9
        began = time.monotonic()
        with pytest.raises(ServerError, match="not ready.*status 429: busy.*again in 3600 s"):
            ask(server)
        assert time.monotonic() - began < 5
    later = datetime.now(UTC) + timedelta(seconds=30)
    assert 27 < servers._retry_after(format_datetime(later, usegmt=True)) <= 30
    assert [servers._retry_after(v) for v in (None, "soon", "-5")] == [0, 0, 0]


def test_a_server_that_never_gets_ready(start, ask):
    with start() as server:
        server.script = [503] * 10_000
        began = time.monotonic()
        with pytest.raises(ServerError, match=r"is not ready \(.*within 0.4 s"):
            ask(server, timeout=0.4)
        assert time.monotonic() - began < 5
    with pytest.raises(ServerError, match="is not ready.*--server-timeout"):
        ask(server, timeout=0.4)  # nobody listens there any more


def test_a_server_that_starts_late(start, ask, own):
    with start() as server:
        port = server.http.server_port
    late = start(port=port)
    timer = threading.Timer(0.6, late.__enter__)
    timer.start()
    try:
        assert ask(server) == list(own.values())
    finally:
        timer.join()
        late.__exit__()


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_key_is_said_at_once(status, start, ask):
    with start() as server:
        server.script = [status]
        with pytest.raises(ServerError, match=servers.KEY_VARIABLE):
            ask(server)
        assert len(server.asked) == 1


def test_a_server_that_trips_over_token_ids_is_given_text(start, ask, own):
    with start("text") as server:
        plain = server.completion

        def trips(path, body):
            status, value = plain(path, body)
            return (500 if status == 400 else status), value

        server.completion = trips
        assert ask(server) == list(own.values())


def test_a_key_that_cannot_be_sent_is_not_shown(start, ask, monkeypatch):
    monkeypatch.setenv(servers.KEY_VARIABLE, "sk-se\ncret")
    with start() as server, pytest.raises(ServerError, match=servers.KEY_VARIABLE) as error:
        ask(server)
    assert "sk-se" not in str(error.value)


def test_a_server_that_speaks_nothing_we_know(start, ask):
    with start("unheard-of", model="tiny") as server:
        server.completion = lambda path, body: (404, {"detail": "Not Found"})
        with pytest.raises(ServerError, match="completes no prompt.*openai-ids: status 404"):
            ask(server)


def test_several_models_need_a_name(start, capture):
    with start(model="tiny,other") as server:
        with pytest.raises(ServerError, match=r"2 models.*tiny, other.*--server-model"):
            capture(server)
        assert capture(server, model="other").reference["model"] == "other"
    assert {body["model"] for body in server.asked} == {"other"}


def test_secrets_are_sent_and_never_written(start, capture, monkeypatch):
    monkeypatch.setenv(servers.KEY_VARIABLE, "sk-very-secret")
    with start() as server:
        made = capture(server)
        host = server.url.removeprefix("http://")
        inside = f"http://user:pass-word@{host}/v1?token=to-ken"
        other = capture(inside, name="other")
    sent = {headers["Authorization"] for headers in server.headers}
    assert "Bearer sk-very-secret" in sent
    assert any(one.startswith("Basic ") for one in sent)
    assert server.paths[-1] == "/v1/completions?token=to-ken"
    assert other.reference["url"] == server.url
    for folder in (made.path, other.path):
        for file in folder.rglob("*"):
            content = file.read_bytes() if file.is_file() else b""
            for secret in (b"sk-very-secret", b"pass-word", b"to-ken"):
                assert secret not in content, file
    with pytest.raises(ServerError) as error:
        Server("ftp://user:pass-word@host")
    assert "pass-word" not in str(error.value)


# --- text -----------------------------------------------------------------------------------------


def test_prompts_that_text_cannot_carry_are_left_out_and_named(start, capture, target):
    # Byte 0xC3 alone is no character: its id comes back from no text.
    odd = Prompt(id="odd", prompt_ids=(5, 250, 7))
    with start("text") as server:
        made = capture(server, [PROMPTS[0], odd, PROMPTS[1]])
    assert [p.id for p in made.prompts] == ["p0", "p1"]
    assert made.reference["unusable"] == [
        {"id": "odd", "reason": "no text encodes to its token ids"}
    ]
    with start("text") as server, pytest.raises(ServerError, match="no text encodes"):
        capture(server, [odd], name="none")


def test_text_that_tells_no_tokens(start, capture):
    with start("text") as server:
        server.script = [None, changed(text="\ufffdabc"), None, None, None]
        made = capture(server)
    assert [p.id for p in made.prompts] == ["p1", "p2", "p3"]
    assert "bytes that are no characters" in made.reference["unusable"][0]["reason"]


def test_another_count_of_tokens_tells_another_tokenizer(start, capture):
    def counted(**usage):
        return lambda value: {**value, "usage": {**value["usage"], **usage}}

    with start("text") as server:
        server.script = [None, counted(prompt_tokens=99), counted(completion_tokens=5), None, None]
        made = capture(server)
    reasons = [one["reason"] for one in made.reference["unusable"]]
    assert "read 99 prompt tokens" in reasons[0]
    assert "counted others" in reasons[1]


def test_without_a_count_the_text_says_so(start, capture):
    with start("text") as server:
        server.script = [None, *[lambda v: {k: v[k] for k in ("model", "choices")}] * 4]
        made = capture(server)
    assert {p.origin for p in made.prompts} == {"uncounted text"}


class Pieces:
    """A tokenizer of pieces: greedy from the left, with a space put before every text."""

    pieces = ("<s>", " a", " b", "a", "b", "ab", " ", "c")

    def __call__(self, text, *, add_special_tokens=True):
        ids, rest = [0] if add_special_tokens else [], text if text[:1] == "<" else " " + text
        while rest:
            fits = [i for i, piece in enumerate(self.pieces) if rest.startswith(piece)]
            ids.append(max(fits, key=lambda i: len(self.pieces[i])))
            rest = rest[len(self.pieces[ids[-1]]) :]
        return {"input_ids": ids}

    def decode(self, ids, **_):
        text = "".join(self.pieces[i] for i in ids)
        return text.removeprefix(" ")


def test_ids_of_text_are_the_only_ones_that_it_stands_for(target):
    tokenizer = target.tokenizer
    prompt = tokenizer("x = ")["input_ids"]
    ids = tokenizer("1 + 2")["input_ids"]
    assert servers.ids_of("1 + 2", prompt, tokenizer) == ids
    assert servers.ids_of("1 + 2", prompt, tokenizer, {5}) == ids
    with pytest.raises(ValueError, match="counted others"):
        servers.ids_of("1 + 2", prompt, tokenizer, {4})
    with pytest.raises(ValueError, match="no characters"):
        servers.ids_of("1\ufffd", prompt, tokenizer)


def test_a_tokenizer_that_puts_a_space_before_text_is_seen_through():
    # Alone, "b" encodes to " b" and decodes to "b": the round trip works, and the token is wrong.
    tokenizer = Pieces()
    assert tokenizer.decode(tokenizer("b", add_special_tokens=False)["input_ids"]) == "b"
    assert servers.ids_of("b", [0, 1, 7], tokenizer) == [4]


def test_a_prompts_first_token_is_not_put_there_twice():
    tokenizer = Pieces()
    ids = tokenizer("a b")["input_ids"]
    assert ids[0] == 0
    text = servers.text_for(ids, None, tokenizer)
    assert tokenizer(text)["input_ids"] == ids


# --- ends -----------------------------------------------------------------------------------------


@pytest.fixture
def ending(target):
    """The target with one, or several, tokens that end a sequence."""
    from dflash_diag.targets import wrap_target

    def make(*eos):
        made = wrap_target(target.model, source=target.source, folder=target.folder)
        made.__dict__["eos_ids"] = frozenset(eos)
        return made

    return make


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_end_of_a_sequence(dialect, start, own, ending, tmp_path):
    ids = next(iter(own.values()))
    eos = ids[5]
    first = ids.index(eos)
    with start(dialect, write=lambda p, n: own[tuple(p)][: min(n, first + 1)]) as server:
        # As servers do, the text leaves out what ended it.
        server.decode = lambda i: "".join(chr(33 + t) for t in i if t != eos)
        options = {"max_new_tokens": G, "layers": "taps", "silent": True}
        made = make_capture(
            ending(eos), PROMPTS[:1], tmp_path / "one", reference=Server(server.url), **options
        )
        several = make_capture(
            ending(eos, 300), PROMPTS[:1], tmp_path / "two", reference=Server(server.url), **options
        )
    (prompt,) = made.prompts
    assert (prompt.ended, prompt.finish_reason) == (True, "stop")
    assert made.continuation(0).tolist() == ids[: first + 1]
    assert several.prompts[0].ended
    by_text = dialect in ("ids-in", "text")
    assert several.continuation(0).tolist() == ids[: first + (not by_text)]
    assert not check_reference(made)["rows"][0]["stopped_early"]


def test_nothing_is_kept_after_the_end(start, own, ending, tmp_path):
    ids = next(iter(own.values()))
    with start() as server:
        made = make_capture(
            ending(ids[3]),
            PROMPTS[:1],
            tmp_path / "c",
            max_new_tokens=G,
            reference=Server(server.url),
            silent=True,
        )
    assert made.continuation(0).tolist() == ids[: ids.index(ids[3]) + 1]
    assert made.prompts[0].ended


# --- what came back -------------------------------------------------------------------------------


class Inputs:
    """As much of a run as the question needs."""

    seed, draws = 0, 400

    def __init__(self, capture):
        self.capture = capture

    def reference(self):
        return check_reference(self.capture)

    def provenance(self):
        return {}


def many(n=8):
    return [Prompt(id=f"q{i}", text=f"x{i} = {i}") for i in range(n)]


@pytest.fixture
def judged(start, capture, target, tmp_path):
    """The verdict on a server that changes the target's own tokens."""

    def run(change, **options):
        prompts = many()
        ids = [target.encode(p) for p in prompts]
        own = dict(zip(map(tuple, ids), (m.ids for m in greedy(target, ids, G)), strict=True))
        order = {key: i for i, key in enumerate(own)}

        def write(prompt, n):
            key = tuple(prompt)
            return change(order[key], list(own[key]))[:n]

        with start("vllm", write=write) as server:
            made = capture(server, prompts, **options)
        return get("target.reference")(Inputs(made)), made

    return run


def test_the_targets_own_text_passes(judged):
    found, _ = judged(lambda i, ids: ids)
    assert found.verdict.name == "PASS"
    assert found.headline.startswith("100")
    assert found.html()


def test_a_token_here_and_there_warns_of_a_quantised_server(judged):
    def change(i, ids):
        if i in (2, 5):
            ids[6] = (ids[6] + 1) % tiny_world.PRINTABLE
        return ids

    found, made = judged(change)
    assert found.verdict.name in ("WARN", "INCONCLUSIVE")
    row = found.frame.set_index("id").loc["q2"]
    assert row["kind"] == "scattered"
    assert row["first_differ"] == 6
    rows = made.positions(2)
    assert row["margin"] == pytest.approx(rows["margin"][made.prompts[2].n_prompt_tokens + 5])
    assert row["gap"] >= row["margin"] - 1e-4
    assert (found.frame["n_equal"] + found.frame["n_rounding"] + found.frame["n_differ"] == G).all()


def test_disagreement_from_the_first_token_tells_another_prompt_or_model(judged):
    found, _ = judged(lambda i, ids: [(ids[0] + 7) % tiny_world.PRINTABLE, *ids[1:]])
    assert found.verdict.name == "FAIL"
    assert "chat template" in found.params["judged"]
    assert set(found.frame["kind"]) == {"from_start"}


def test_other_text_altogether_fails(judged):
    # The first token is right, the rest is drawn.
    found, _ = judged(lambda i, ids: [ids[0], *[(7 * i + 13 * t) % 94 for t in range(G - 1)]])
    assert found.verdict.name == "FAIL"
    assert "at most 0.1 is wanted" in found.params["judged"]


def test_stopping_early_warns(judged):
    found, _ = judged(lambda i, ids: ids[:7] if i == 1 else ids)
    assert found.verdict.name == "WARN"
    assert "1 continuations stopped early" in found.params["judged"]


def test_near_ties_are_rounding(judged, monkeypatch):
    found, made = judged(lambda i, ids: ids)
    second = made.positions(0).copy()
    at = made.prompts[0].n_prompt_tokens + 3
    logprobs = second["top_logprobs"][at].copy()
    logprobs[1] = logprobs[0] - 1e-3
    ids = second["top_ids"][at][[1, 0, *range(2, 8)]]
    second.at[at, "top_ids"] = ids
    second.at[at, "top_logprobs"] = logprobs
    real = type(made).positions
    monkeypatch.setattr(
        type(made), "positions", lambda self, i: second if i == 0 else real(self, i)
    )
    found = get("target.reference")(Inputs(made))
    assert found.verdict.name == "PASS"
    assert found.frame["kind"].tolist() == ["rounding", *[""] * 7]
    assert found.frame["n_rounding"][0] == 1


def test_the_targets_own_text_is_not_asked_about(target, tmp_path):
    made = make_capture(target, PROMPTS[:1], tmp_path / "own", max_new_tokens=G, silent=True)
    found = get("target.reference")(Inputs(made))
    assert found.verdict.name == "SKIPPED"
    assert "--server" in found.headline
    assert made.prompts[0].origin == "target"


def test_a_servers_text_is_never_taken_for_plain_greedy_text(start, capture, target, own):
    wrong = {key: [(ids[0] + 7) % 94, *ids[1:]] for key, ids in own.items()}
    with start(write=lambda p, n: wrong[tuple(p)][:n]) as server:
        made = capture(server)
    assert made.continuation(0).tolist() == next(iter(wrong.values()))
    expected = expect_as_captured(target, made)
    assert [one.ids for one in expected] == list(own.values())
    with pytest.raises(BadInput, match="what the server .* wrote.*capture without --server"):
        check_served(made, [ServedOutput("p0", ids=(1,))])
    assert made.prompts[0].logit_noise is None
    assert dataclasses.asdict(made.prompts[0])["decode_gap"] > 0
