"""Greedy continuations from a server: SGLang, vLLM, ``transformers serve`` and their like.

Tokens travel as ids where a server takes and gives them. Where it gives text, that text is turned
into ids only if these are the only ones that it can stand for; otherwise the prompt is reported and
left out. A server is ready when it has completed one token of a real prompt. Every wait has an end:
what may pass is tried again with growing pauses until the time is up.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from dflash_diag.deadlines import within
from dflash_diag.errors import BadInput, Interrupted

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that is sent; it is never stored."""
TIMEOUT_S = 600.0
"""Seconds within which a server has to be ready, and to answer one prompt, retries included."""

_ATTEMPTS = 3
"""Times that an answer which cannot be used is asked for again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 15.0
_SHARE = 1 / 3
"""Share of the time that one attempt may take, so that a request that hangs is not the only one."""
_CONNECT_S = 10.0
_LARGEST = 2**26
"""Bytes of one answer."""
_PASSING = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of a server that is loading, overloaded or restarting."""
_NOT_SPOKEN = frozenset({400, 404, 405, 415, 422, 501})
"""Statuses with which a server refuses a request that it does not know."""


class ServerError(BadInput):
    """A server cannot be used: not ready in time, another model, or answers that make no sense."""


class _Again(Exception):
    """What happened may pass: worth another attempt, not before ``pause`` seconds."""

    def __init__(self, why: str, pause: float = 0.0) -> None:
        super().__init__(why)
        self.pause = pause


class _Odd(_Again):
    """An answer came that cannot be used; another attempt or two may bring a better one."""


class _Failed(_Again):
    """Status 500: the server may not be whole yet, or this very request is what it trips over."""


class _Refused(Exception):
    """The server does not take this kind of request."""


class Tokenizer(Protocol):
    """What is needed of a tokenizer to turn text into the tokens that it stands for."""

    def __call__(self, text: str, *, add_special_tokens: bool = ...) -> Mapping[str, Any]:
        """Token ids of text, under the key ``input_ids``."""

    def decode(
        self, ids: Any, *, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool = ...
    ) -> str:
        """Text of token ids."""


@dataclass(frozen=True)
class Asked:
    """One prompt, and what its continuation has to be made of."""

    id: str
    ids: tuple[int, ...]
    """[P] token ids."""
    text: str | None
    """Text that a tokenizer encodes to these very ids; None if there is none."""
    max_new_tokens: int
    vocab_size: int
    eos_ids: frozenset[int]


@dataclass(frozen=True)
class Served:
    """A server's continuation of one prompt, as token ids."""

    ids: tuple[int, ...] = ()
    """[G] the end-of-sequence token included, nothing after it."""
    ended: bool = False
    """Whether the end of the sequence ended it."""
    how: str = "ids"
    """What the server gave: ``ids``, ``text``, or ``uncounted text``, with no number of tokens."""
    finish_reason: str | None = None
    """In the server's words."""
    unusable: str = ""
    """Why there are no ids: the text does not tell which."""

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(**{**value, "ids": tuple(value["ids"])})


@dataclass(frozen=True)
class _Answer:
    """What one response says, as far as it says it."""

    ids: list[int] | None
    text: str | None
    finish_reason: str | None
    model: str | None
    prompt_ids: list[int] | None
    n_prompt: int | None
    n_generated: int | None


@dataclass(frozen=True)
class _Dialect:
    """One way of asking for a completion, and of reading the answer."""

    name: str
    path: str
    by_ids: bool
    """Whether the prompt goes as token ids."""
    body: Callable[[Asked, str, int], dict[str, Any]]
    """The request for a prompt, a model's name and a seed."""
    read: Callable[[Any], _Answer]


class Server:
    """A server that continues prompts greedily; nothing is sent before it is first asked.

    Parameters
    ----------
    url
        With or without the ``/v1`` at its end. User name, password and query are used and never
        recorded.
    model
        The name to ask for; needed where the server has several.
    timeout
        See `TIMEOUT_S`.
    seed
        Sent along, for servers that draw even at temperature 0.

    Raises
    ------
    ServerError
        Not a URL, or no time at all.
    """

    def __init__(
        self, url: str, *, model: str = "", timeout: float = TIMEOUT_S, seed: int = 0
    ) -> None:
        if not timeout > 0:
            raise ServerError(f"--server-timeout {timeout:g}", "seconds, more than 0")
        self.url, self.model, self.timeout, self.seed = bare_url(url), model, timeout, seed
        self._given = url
        self._name = self._answered = model
        self._dialect: _Dialect | None = None
        self._facts: dict[str, Any] = {}
        self._http_client: httpx.Client | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._http_client is not None:
            self._http_client.close()
            self._http_client = None

    def identity(self) -> dict[str, str]:
        """What names this server before it is asked anything."""
        return {"url": self.url, "model": self.model}

    def facts(self) -> dict[str, Any]:
        """What a capture records: ``url``, ``dialect``, ``model``, ``version``, ``precision``.

        Version and precision are None where the server does not tell.
        """
        return {"url": self.url, **self._facts}

    def open(self, asked: Asked) -> None:
        """Wait until the server completes one token of a prompt, and learn what it speaks.

        Raises
        ------
        ServerError
            Not ready in time, refuses us, or serves another model.
        """
        failed = 0

        def attempt(limit: float) -> None:
            nonlocal failed
            about, refusals = self._about(limit), []
            self._name = self._answered = about["model"]
            for dialect in _order(about.pop("owner")):
                if not dialect.by_ids and asked.text is None:
                    refusals.append(f"{dialect.name}: no text encodes to the prompt's token ids")
                    continue
                try:
                    answer = self._complete(dialect, replace(asked, max_new_tokens=1), limit)
                except _Refused as error:
                    refusals.append(f"{dialect.name}: {error}")
                    continue
                except _Failed as error:
                    failed += 1
                    if not dialect.by_ids or failed < _ATTEMPTS:
                        raise
                    refusals.append(f"{dialect.name}: {error}")
                    continue
                self._answered = answer.model or self._name
                # A local model is called by its path, which is nobody's business.
                local, shown = self._answered.startswith("/"), self._answered
                about["model"] = shown.rsplit("/", 1)[-1] if local else shown
                about["dialect"] = dialect.name
                self._dialect, self._facts = dialect, about
                return
            raise ServerError(
                f"{self.url} completes no prompt ({'; '.join(refusals)})",
                "SGLang, vLLM, transformers serve, or another server with /v1/completions",
                "name the model with --server-model, or check the address",
            )

        try:
            self._until(attempt)
        except _Odd as error:
            raise ServerError(
                f"{self.url} answers with what cannot be used ({error})",
                "a completion",
                "check the address, and the model's name with --server-model",
            ) from error
        except _Again as error:
            raise ServerError(
                f"{self.url} is not ready ({error})",
                f"a server that completes one token within {self.timeout:g} s",
                "see that it runs, or give it longer with --server-timeout",
            ) from error

    def complete(self, asked: Asked, tokenizer: Tokenizer | None = None) -> Served:
        """The greedy continuation of one prompt.

        Parameters
        ----------
        tokenizer
            The target's, for servers that answer with text.

        Raises
        ------
        Interrupted
            The server stopped answering.
        ServerError
            It keeps answering what cannot be used, or came back as another one.
        """
        if self._dialect is None:
            self.open(asked)
        dialect, tries = self._dialect, 0
        if dialect is None or (not dialect.by_ids and asked.text is None):
            return Served(how="text", unusable="no text encodes to its token ids")

        def attempt(limit: float) -> Served:
            nonlocal tries
            tries += 1
            if tries > 1:
                self._still_the_same(limit)
            return _served(asked, self._complete(dialect, asked, limit), tokenizer)

        try:
            return self._until(attempt)
        except (_Odd, _Failed) as error:
            raise ServerError(
                f"{self.url} answers prompt {asked.id!r} with what cannot be used ({error})",
                "a greedy continuation",
                "see the server's log",
            ) from error
        except _Again as error:
            raise Interrupted(f"{self.url} no longer answers ({error})") from error
        except _Refused as error:
            raise ServerError(f"{self.url} refuses prompt {asked.id!r} ({error})") from error

    def _until(self, attempt: Callable[[float], T]) -> T:
        """Call ``attempt`` with the seconds that it may take until it works or the time is up."""
        import tenacity

        end = time.monotonic() + self.timeout
        growing = tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S)

        def pause(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            return max(growing(state), error.pause if isinstance(error, _Again) else 0.0)

        def enough(state: RetryCallState) -> bool:
            error = state.outcome.exception() if state.outcome else None
            ready = self._dialect is not None
            if isinstance(error, _Odd) or (ready and isinstance(error, _Failed)):
                return state.attempt_number >= _ATTEMPTS
            # What is left has to be long enough for an answer.
            return time.monotonic() + state.upcoming_sleep >= end - min(1.0, 0.05 * self.timeout)

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again), wait=pause, stop=enough, reraise=True
        )
        return tries(lambda: attempt(max(1e-3, min(self.timeout * _SHARE, end - time.monotonic()))))

    def _about(self, limit: float) -> dict[str, Any]:
        """Model, owner, version and precision, as far as the server's own pages tell."""
        try:
            listed = self._call("GET", "/v1/models", limit)
        except _Refused:
            listed = {}
        data = listed.get("data") if isinstance(listed, dict) else None
        cards = data if isinstance(data, list) else []
        cards = [c for c in cards if isinstance(c, dict) and isinstance(c.get("id"), str)]
        names = [card["id"] for card in cards if not card.get("parent")]
        if not self.model and len(names) != 1:
            raise ServerError(
                f"{self.url} serves {len(names) or 'no'} models that it names"
                + (f" ({', '.join(names[:5])})" if names else ""),
                "one",
                "say which with --server-model",
            )
        owner = str(cards[0].get("owned_by", "")) if cards else ""
        about = self._pages(limit)
        precision = [about.get(k) for k in ("dtype", "quantization")]
        known = [p for p in precision if isinstance(p, str) and p not in ("auto", "")]
        version = about.get("version")
        return {
            "owner": owner,
            "model": self.model or names[0],
            "version": version if isinstance(version, str) else None,
            "precision": ", ".join(known) or None,
        }

    def _pages(self, limit: float) -> dict[str, Any]:
        """What the pages of SGLang, new and old, and of vLLM say; they need not be there."""
        found: dict[str, Any] = {}
        for path in ("/server_info", "/get_server_info", "/version"):
            try:
                page = self._call("GET", path, min(limit, _CONNECT_S))
            except (_Refused, _Again, ServerError):
                continue
            found |= page if isinstance(page, dict) else {}
            if "version" in found:
                break
        return found

    def _still_the_same(self, limit: float) -> None:
        """Refuse a server that came back as another one."""
        now = self._about(limit)
        before = {**self._facts, "model": self._name}
        changed = [
            f"{k} {now[k]!r} instead of {before[k]!r}"
            for k in ("model", "version", "precision")
            if None not in (now[k], before[k]) and now[k] != before[k]
        ]
        if changed:
            raise ServerError(f"{self.url} came back with {' and '.join(changed)}", "the same one")

    def _complete(self, dialect: _Dialect, asked: Asked, limit: float) -> _Answer:
        body = dialect.body(asked, self._name, self.seed)
        value = self._call("POST", dialect.path, limit, body)
        try:
            answer = dialect.read(value)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise _Odd(f"an answer without what {dialect.name} answers have") from error
        # transformers serve adds the revision to the name.
        bare, known = ((n or "").partition("@")[0] for n in (answer.model, self._answered))
        if answer.model is not None and bare != known:
            raise _Odd(f"it answers as model {answer.model!r} instead of {self._answered!r}")
        if answer.prompt_ids is not None and tuple(answer.prompt_ids) != asked.ids:
            raise _Odd("it read other prompt tokens than were sent")
        if dialect.by_ids and answer.n_prompt not in (None, len(asked.ids)):
            raise _Refused(f"read {answer.n_prompt} prompt tokens where {len(asked.ids)} were sent")
        return answer

    def _call(self, method: str, path: str, limit: float, body: Any = None) -> Any:
        """One request, done within ``limit`` seconds: the answer's JSON value."""
        import httpx

        try:
            status, headers, content = within(
                limit + _CONNECT_S, lambda: self._exchanged(method, path, limit, body)
            )
        except (httpx.TimeoutException, TimeoutError) as error:
            raise _Again(f"no answer within {limit:.3g} s") from error
        except httpx.TransportError as error:
            raise _Again(f"{error}" or type(error).__name__) from error
        except httpx.HTTPError as error:
            raise _Odd(f"{error}" or type(error).__name__) from error
        if status in (401, 403):
            raise ServerError(
                f"{self.url} wants another key (status {status})",
                do=f"set the environment variable {KEY_VARIABLE}",
            )
        if status == 500:
            raise _Failed(_said(status, content))
        if status in _PASSING:
            pause = _retry_after(headers.get("retry-after"))
            wait = f", to be asked again in {pause:.0f} s" if pause else ""
            raise _Again(_said(status, content) + wait, pause)
        if status in _NOT_SPOKEN:
            raise _Refused(_said(status, content))
        if status != 200:
            raise ServerError(f"{self.url}{path}: {_said(status, content)}", "status 200")
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _Odd("an answer that is not JSON") from error

    def _exchanged(
        self, method: str, path: str, limit: float, body: Any
    ) -> tuple[int, httpx.Headers, bytearray]:
        """Status, headers and content of an answer, read piece by piece until the time is up."""
        import httpx

        end, content = time.monotonic() + limit, bytearray()
        times = httpx.Timeout(limit, connect=min(limit, _CONNECT_S))
        with self._http.stream(method, self.url + path, json=body, timeout=times) as response:
            for piece in response.iter_bytes():
                content += piece
                if len(content) > _LARGEST:
                    raise _Odd(f"an answer of more than {_LARGEST} bytes")
                if time.monotonic() > end:
                    raise _Again(f"no whole answer within {limit:.3g} s")
        return response.status_code, response.headers, content

    @property
    def _http(self) -> httpx.Client:
        import httpx

        if self._http_client is None:
            url, key = httpx.URL(self._given), os.environ.get(KEY_VARIABLE, "").strip()
            if not (key.isascii() and key.isprintable()):
                raise ServerError(f"{KEY_VARIABLE} has characters that no key has")
            self._http_client = httpx.Client(
                headers={"Authorization": f"Bearer {key}"} if key else None,
                auth=(url.username, url.password) if url.username else None,
                params=url.params,
                # A proxy cannot reach this machine's own servers.
                trust_env=url.host not in ("localhost", "127.0.0.1", "::1"),
            )
        return self._http_client


def bare_url(url: str) -> str:
    """The address alone: no user name, password, query or ``/v1`` at its end.

    Raises
    ------
    ServerError
        Not the address of a server; the text is not repeated, as it may hold a password.
    """
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ServerError("--server is not a URL", "http://HOST:PORT") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerError("--server names no host", "http://HOST:PORT")
    path = parsed.path.rstrip("/").removesuffix("/v1")
    host = f"[{parsed.host}]" if ":" in parsed.host else parsed.host
    port = "" if parsed.port is None else f":{parsed.port}"
    return f"{parsed.scheme}://{host}{port}{path}"


def text_for(ids: Sequence[int], text: str | None, tokenizer: Tokenizer | None) -> str | None:
    """Text that a server's tokenizer, taken for the same as ours, encodes to ``ids``.

    A tokenizer that puts a token before every text would put a second one before decoded ids, so
    the text without the first token is tried too.
    """
    if tokenizer is None:
        return None
    tried = [text, _decoded(tokenizer, ids), _decoded(tokenizer, ids[1:])]
    fits = (t for t in tried if t and list(tokenizer(t)["input_ids"]) == list(ids))
    return next(fits, None)


def ids_of(
    text: str, prompt: Sequence[int], tokenizer: Tokenizer, lengths: Container[int] | None = None
) -> list[int]:
    """The token ids that a continuation's text stands for.

    The text is encoded by itself and behind its prompt. What comes out has to give the text again,
    alone and behind the prompt, in one of the lengths that are possible.

    Raises
    ------
    ValueError
        No such ids, or more than one choice.
    """
    if "\ufffd" in text:
        raise ValueError("its text has bytes that are no characters")
    before = _decoded(tokenizer, prompt)
    alone = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    both = list(tokenizer(before + text, add_special_tokens=False)["input_ids"])
    found = [alone]
    if both[: len(prompt)] == list(prompt) and both[len(prompt) :] != alone:
        found.append(both[len(prompt) :])
    found = [
        ids
        for ids in found
        if _decoded(tokenizer, ids) == text
        and _decoded(tokenizer, [*prompt, *ids]) == before + text
    ]
    if not found:
        raise ValueError("its text does not come out of the tokenizer as it went in")
    right = found if lengths is None else [ids for ids in found if len(ids) in lengths]
    if not right:
        raise ValueError(f"its text has {len(found[0])} tokens, and the server counted others")
    if len(right) > 1:
        raise ValueError("its text stands for more than one sequence of tokens")
    return right[0]


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )


def _served(asked: Asked, answer: _Answer, tokenizer: Tokenizer | None) -> Served:
    """An answer as token ids, checked against the target's vocabulary and ends."""
    how = "ids" if answer.ids is not None else "text" if answer.n_generated else "uncounted text"
    stopped = answer.finish_reason in ("stop", "eos", "eos_token")
    if answer.ids is None:
        if not answer.text and not answer.n_generated:
            raise _Odd("an empty continuation")
        try:
            ids, ended = _from_text(asked, answer, tokenizer, stopped=stopped)
        except ValueError as error:
            return Served(how=how, finish_reason=answer.finish_reason, unusable=str(error))
    else:
        ids, ended = answer.ids, False
    wrong = next((i for i in ids if not 0 <= i < asked.vocab_size), None)
    if wrong is not None:
        raise _Odd(f"token id {wrong} is not below {asked.vocab_size}, the target's vocabulary")
    end = next((i + 1 for i, token in enumerate(ids) if token in asked.eos_ids), None)
    kept = tuple(ids[:end][: asked.max_new_tokens])
    if not kept:
        raise _Odd("an empty continuation")
    ended = ended or kept[-1] in asked.eos_ids
    return Served(ids=kept, ended=ended, how=how, finish_reason=answer.finish_reason)


def _from_text(
    asked: Asked, answer: _Answer, tokenizer: Tokenizer | None, *, stopped: bool
) -> tuple[list[int], bool]:
    """Ids that an answer's text stands for, and whether the sequence ended there.

    Servers leave the token that ended a sequence out of the text and count it. Where the target has
    one such token it is put back; among several, the text does not tell which it was.
    """
    if tokenizer is None:
        raise ValueError("the server gives text and the target has no tokenizer")
    if answer.n_prompt not in (None, len(asked.ids)):
        raise ValueError(
            f"the server read {answer.n_prompt} prompt tokens instead of {len(asked.ids)}"
        )
    n, text = answer.n_generated, answer.text or ""
    lengths = None if n is None else {n, n - 1} if stopped else {n}
    ids = ids_of(text, asked.ids, tokenizer, lengths) if text else []
    if stopped and n == len(ids) + 1 and len(asked.eos_ids) == 1:
        ids = [*ids, *asked.eos_ids]
    return ids, stopped


def _said(status: int, content: bytes | bytearray) -> str:
    """A status, and what the answer says about it."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = content.decode("utf-8", "replace")
    for key in ("error", "message", "detail"):
        value = value.get(key, value) if isinstance(value, dict) else value
    said = " ".join(str(value).split())[:200]
    return f"status {status}" + (f": {said}" if said else "")


def _retry_after(value: str | None) -> float:
    """Seconds of a Retry-After header, which holds seconds or a date; 0 without one."""
    if not value:
        return 0.0
    try:
        return max(0.0, float(int(value)))
    except ValueError:
        pass
    try:
        then = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (then.astimezone(UTC) - datetime.now(UTC)).total_seconds())


# --- dialects -------------------------------------------------------------------------------------

_GREEDY = {"temperature": 0, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0}
"""Said in full, because servers take what is left out from the model's generation config."""


def _sglang_body(asked: Asked, _model: str, seed: int) -> dict[str, Any]:
    settings = {
        **_GREEDY,
        "repetition_penalty": 1,
        "max_new_tokens": asked.max_new_tokens,
        "ignore_eos": False,
        "sampling_seed": seed,
    }
    return {"input_ids": list(asked.ids), "sampling_params": settings, "stream": False}


def _read_sglang(value: Any) -> _Answer:
    about = value["meta_info"]
    reason = about.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, dict) else reason
    if reason == "abort":
        raise _Odd("it gave the request up")
    return _Answer(
        ids=_ids(value.get("output_ids")),
        text=_text(value.get("text")),
        finish_reason=_text(reason),
        model=None,
        prompt_ids=_ids(value.get("prompt_token_ids")),
        n_prompt=_count(about.get("prompt_tokens")),
        n_generated=_count(about.get("completion_tokens")),
    )


def _completions_body(asked: Asked, model: str, seed: int) -> dict[str, Any]:
    return {
        **_GREEDY,
        "model": model,
        "prompt": asked.text,
        "max_tokens": asked.max_new_tokens,
        "seed": seed,
        "stream": False,
    }


def _ids_body(asked: Asked, model: str, seed: int) -> dict[str, Any]:
    return {
        **_completions_body(asked, model, seed),
        "prompt": list(asked.ids),
        "repetition_penalty": 1,
        "ignore_eos": False,
        "return_token_ids": True,
    }


def _read_completions(value: Any) -> _Answer:
    choice, usage = value["choices"][0], value.get("usage") or {}
    return _Answer(
        ids=_ids(choice.get("token_ids")),
        text=_text(choice.get("text")),
        finish_reason=_text(choice.get("finish_reason")),
        model=_text(value.get("model")),
        prompt_ids=_ids(choice.get("prompt_token_ids")),
        n_prompt=_count(usage.get("prompt_tokens")),
        n_generated=_count(usage.get("completion_tokens")),
    )


def _ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise _Odd("token ids that are no list of integers")
    return value


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise _Odd(f"{type(value).__name__} where text should be")


def _count(value: Any) -> int | None:
    return value if type(value) is int else None


_SGLANG = _Dialect("sglang", "/generate", True, _sglang_body, _read_sglang)
_IDS = _Dialect("openai-ids", "/v1/completions", True, _ids_body, _read_completions)
_PLAIN = _Dialect("openai-text", "/v1/completions", False, _completions_body, _read_completions)


def _order(owner: str) -> list[_Dialect]:
    """Dialects in the order of trying: ids first, and SGLang's own where it says that it is one."""
    return [*([_SGLANG] if owner == "sglang" else []), _IDS, _PLAIN]
