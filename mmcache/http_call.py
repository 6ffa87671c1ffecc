"""One HTTP request with a deadline for all of it, and an answer of bounded size. Redirects and proxies are not used."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.parse
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final, NamedTuple

from mmcache.errors import MMCacheError

MOST_BYTES: Final = 1 << 20
NO_HEADERS: Final[Mapping[str, str]] = {}


class NoAnswer(MMCacheError):
    """There is none, or none that can be used; the message says why. `refused`: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Answer(NamedTuple):
    """What came back; any status. `media_type` is in lower case, without parameters."""

    status: int
    media_type: str
    body: bytes


def call(
    method: str,
    url: str,
    *,
    timeout: float,
    headers: Mapping[str, str] = NO_HEADERS,
    body: bytes | None = None,
    most_bytes: int = MOST_BYTES,
) -> Answer:
    """Ask, and return what is answered.

    Args:
        url: of the form that `setting_kinds.Url` takes, with a path and a query behind it.
        timeout: seconds for everything: the name's address, the connection, the request, and all of the answer.
        most_bytes: a larger body is none that can be used.

    Raises:
        NoAnswer: at `timeout` at the latest. The request may have been carried out.
    """
    attempt = _Attempt(method, url, dict(headers), body, timeout, most_bytes)
    try:
        attempt.start()
        return attempt.future.result(timeout)
    except (FutureTimeout, TimeoutError) as error:
        raise NoAnswer(f"no answer within {timeout:.3g} s") from error
    except OSError as error:
        detail = str(error.strerror or error)
        raise NoAnswer(f"no connection: {detail}", refused=isinstance(error, ConnectionRefusedError)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise NoAnswer(f"no HTTP answer: {type(error).__name__}") from error
    finally:
        attempt.abandon()


class _Attempt:
    """The request, on a thread: a name's address can be waited for without end, and a slow answer come byte by byte."""

    def __init__(
        self, method: str, url: str, headers: dict[str, str], body: bytes | None, timeout: float, most_bytes: int
    ) -> None:
        self.future: Future[Answer] = Future()
        self._method = method
        self._url = urllib.parse.urlsplit(url)
        self._headers = {"Accept-Encoding": "identity", "Connection": "close", **headers}
        self._body = body
        self._timeout = timeout
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_abandoned = False

    def start(self) -> None:
        """Begin, in the background. Raises NoAnswer: there is no thread to be had."""
        try:
            threading.Thread(target=self._run, name="mmcache-http", daemon=True).start()
        except RuntimeError as error:
            raise NoAnswer(f"not asked: {error}") from error

    def _run(self) -> None:
        try:
            self.future.set_result(self._perform())
        except BaseException as error:  # noqa: BLE001 (whatever it is, the caller is told)
            self.future.set_exception(error)

    def abandon(self) -> None:
        """Nobody waits any more: what is under way ends at once. Idempotent."""
        with self._lock:
            self._is_abandoned = True
            if self._socket is not None:
                with contextlib.suppress(OSError):  # it has ended by itself
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _perform(self) -> Answer:
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        with contextlib.closing(kind(self._url.hostname or "", self._url.port, timeout=self._timeout)) as connection:
            connection.connect()
            with self._lock:
                if self._is_abandoned:
                    raise TimeoutError
                self._socket = connection.sock
            try:
                target = urllib.parse.urlunsplit(("", "", self._url.path or "/", self._url.query, ""))
                connection.request(self._method, target, self._body, self._headers)
                with contextlib.closing(connection.getresponse()) as response:
                    return self._read(response)
            finally:
                with self._lock:
                    self._socket = None

    def _read(self, response: http.client.HTTPResponse) -> Answer:
        body = response.read(self._most_bytes + 1)
        if len(body) > self._most_bytes:
            raise NoAnswer(f"an answer of more than {self._most_bytes:,} bytes")
        if response.length:  # bytes that were announced and did not come
            raise http.client.IncompleteRead(body, response.length)
        media_type = (response.getheader("Content-Type") or "").partition(";")[0].strip().lower()
        return Answer(response.status, media_type, body)
