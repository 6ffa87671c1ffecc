"""One HTTP request: its deadline covers everything, its answer is bounded, and it goes where it was sent."""

from __future__ import annotations

import socket
import time

import pytest
from raw_http import PATIENCE_S, Asked, RawServer, response

from mmcache.http_call import Answer, NoAnswer, call

SHORT_S = 0.3


def test_what_is_asked_and_answered() -> None:
    with RawServer(lambda *_: response(201, b"{}", "Application/JSON; charset=utf-8")) as server:
        answer = call("POST", f"{server.url}/a/b?c=d%20e", timeout=PATIENCE_S, headers={"X-One": "1"}, body=b"body")
        assert answer == Answer(201, "application/json", b"{}")
        [asked] = server.asked
        assert (asked.method, asked.target, asked.body) == ("POST", "/a/b?c=d%20e", b"body")
        assert (asked.headers["x-one"], asked.headers["host"]) == ("1", server.url.removeprefix("http://"))


def test_any_status_is_an_answer_and_no_redirect_is_followed() -> None:
    with RawServer(lambda *_: response(500)) as elsewhere:
        with RawServer(lambda *_: response(307, location=f"{elsewhere.url}/there")) as server:
            answer = call("POST", f"{server.url}/here", timeout=PATIENCE_S, headers={"Authorization": "Bearer x"})
        assert answer.status == 307
        assert elsewhere.asked == []


def silent(asked: Asked, connection: socket.socket) -> None:
    return None


def dripping(asked: Asked, connection: socket.socket) -> None:
    """A byte now and then, each well within any timeout of a socket."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-Y: z\r\n")
        time.sleep(SHORT_S / 10)


def dripping_body(asked: Asked, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(SHORT_S / 10)


@pytest.mark.parametrize("answer", [silent, dripping, dripping_body])
def test_the_deadline_covers_all_of_an_answer(answer) -> None:
    with RawServer(answer) as server:
        began = time.monotonic()
        with pytest.raises(NoAnswer):
            call("GET", server.url, timeout=SHORT_S)
        assert time.monotonic() - began < PATIENCE_S


def endless(asked: Asked, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


@pytest.mark.parametrize(
    "answer",
    [
        endless,
        lambda *_: response(200, b"x" * 1001),
        lambda *_: b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        lambda *_: b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        lambda *_: b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        lambda *_: b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000,
        lambda *_: b"SSH-2.0-OpenSSH_9.6\r\n",
        lambda *_: b"\xff\xfe\x00",
        lambda *_: b"",
    ],
)
def test_what_is_no_answer_is_told(answer) -> None:
    with RawServer(answer) as server, pytest.raises(NoAnswer) as caught:
        call("GET", server.url, timeout=PATIENCE_S, most_bytes=1000)
    assert not caught.value.refused


def test_nobody_there_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NoAnswer, match="refused") as caught:
        call("GET", f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
    assert caught.value.refused


def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(lambda *_: response(200)) as proxy, RawServer(lambda *_: response(204)) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        assert call("GET", server.url, timeout=PATIENCE_S).status == 204
        assert proxy.asked == []
