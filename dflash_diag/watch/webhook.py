"""Tell somebody else: one JSON object by HTTP POST for every finished checkpoint.

An address may hold a password, or be one (that of a chat's incoming hook is), so nothing but its
host is ever shown.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from queue import Full, Queue
from threading import Thread
from typing import Any

from dflash_diag.deadlines import within
from dflash_diag.errors import BadInput

VARIABLE = "DFLASH_DIAG_WEBHOOK"
"""Environment variable with the address, which a command line shows to everybody."""
ATTEMPTS = 3
TIMEOUT_S = 10.0
"""Seconds to connect, to send and to answer; one attempt takes at most twice as long."""
MOST = 64
"""Messages that may wait for those before them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Again(Exception):
    """What happened may pass."""


def webhook_of(url: str) -> Webhook | None:
    """The one that was named, or that the environment names; None if neither does."""
    url = url or os.environ.get(VARIABLE, "")
    return Webhook(url) if url else None


class Webhook:
    """An address that is told.

    Raises
    ------
    BadInput
        It is none.
    """

    def __init__(self, url: str, *, timeout: float = TIMEOUT_S) -> None:
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise BadInput("--webhook is not a URL", "https://HOST/PATH") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BadInput("--webhook names no host", "https://HOST/PATH")
        self._url, self._timeout = parsed, timeout
        self.host = parsed.host
        self._waiting: Queue[tuple[Mapping[str, Any], Future[str]]] = Queue(MOST)
        self._thread: Thread | None = None

    def __repr__(self) -> str:
        return f"Webhook({self.host})"

    def post(self, value: Mapping[str, Any]) -> Future[str]:
        """`tell` as soon as all that was posted before is told; whoever posts need not wait.

        A process that ends does not wait either: what is still on its way is lost then.
        """
        if self._thread is None:
            self._thread = Thread(target=self._tell_all, daemon=True)
            self._thread.start()
        answer: Future[str] = Future()
        try:
            self._waiting.put_nowait((value, answer))
        except Full:
            answer.set_result(f"{MOST} messages are waiting already")
        return answer

    def _tell_all(self) -> None:
        while True:
            value, answer = self._waiting.get()  # ends with the process
            try:
                answer.set_result(self.tell(value))
            except Exception as error:  # noqa: BLE001 - raised where it is waited for
                answer.set_exception(error)

    def tell(self, value: Mapping[str, Any]) -> str:
        """Send a value; why it could not be, or nothing. What may pass is tried again."""
        import tenacity

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(_Again),
            wait=tenacity.wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            reraise=True,
        )
        try:
            return tries(self._post, value)
        except _Again as error:
            return f"{error}, {ATTEMPTS} times"

    def _post(self, value: Mapping[str, Any]) -> str:
        import httpx

        try:
            status = self._status(value)
        except httpx.TimeoutException as error:
            raise _Again(f"no answer within {self._timeout:g} s") from error
        except httpx.TransportError as error:
            raise _Again(f"not reached ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            return type(error).__name__
        if status in _PASSING:
            raise _Again(f"status {status}")
        return "" if 200 <= status < 300 else f"status {status}"

    def _status(self, value: Mapping[str, Any]) -> int:
        """What the host answers; its words are not read."""
        import httpx

        try:
            return within(2 * self._timeout, lambda: self._asked(value))
        except TimeoutError as error:
            raise httpx.ReadTimeout("no whole answer") from error

    def _asked(self, value: Mapping[str, Any]) -> int:
        import httpx

        url = self._url
        with (
            httpx.Client(
                auth=(url.username, url.password) if url.username else None,
                timeout=self._timeout,
                trust_env=url.host not in ("localhost", "127.0.0.1", "::1"),
            ) as client,
            client.stream(
                "POST", url.copy_with(username=None, password=None), json=value
            ) as answer,
        ):
            return int(answer.status_code)
