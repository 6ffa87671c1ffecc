"""An HTTP server on real sockets that answers as a test says, well or badly, and remembers what it was asked."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

PATIENCE_S = 20.0


class Asked(NamedTuple):
    """One request. Header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    at: float
    """`time.monotonic()`."""


Answering = Callable[[Asked, socket.socket], bytes | None]
"""The bytes of an answer; None: it was sent, or there is none, and the connection is kept until the end."""


class RawServer:
    """A context manager; serves from when it is made."""

    def __init__(self, answer: Answering) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._asked: list[Asked] = []
        self._connections: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.closing = threading.Event()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._start(self._accept)

    @property
    def asked(self) -> list[Asked]:
        with self._lock:
            return list(self._asked)

    @property
    def targets(self) -> list[str]:
        return [one.target for one in self.asked]

    def close(self) -> None:
        self.closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for connection in connections:
            connection.close()

    def __enter__(self) -> RawServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with self._lock:
                    self._connections.append(connection)
                self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            received = b""
            while b"\r\n\r\n" not in received:
                piece = connection.recv(1 << 16)
                if not piece:
                    return
                received += piece
            head, _, body = received.partition(b"\r\n\r\n")
            first, *rest = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            while len(body) < int(headers.get("content-length", 0)):
                body += connection.recv(1 << 16)
            method, target, _ = first.split(" ")
            asked = Asked(method, target, headers, body, time.monotonic())
            with self._lock:
                self._asked.append(asked)
            answer = self._answer(asked, connection)
            if answer is not None:
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_RDWR)


def response(status: int, body: bytes = b"", media_type: str = "application/json", **headers: str) -> bytes:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {media_type}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body
