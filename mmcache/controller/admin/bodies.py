"""Bodies of requests, bounded in size and time before anything reads them."""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmcache.controller.admin.problems import Problem

MAX_BODY_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 10.0


class BoundedBodies:
    """Reads each body whole, and answers in the application's place where it is too large or too slow."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(_read(scope, receive), _PATIENCE_S)
        except asyncio.TimeoutError:
            body = Problem(408, "timeout", f"the body did not come within {_PATIENCE_S:g} s")
        except Problem as problem:
            body = problem
        if body is None:
            return
        if isinstance(body, Problem):
            response = body.response()
            response.headers["Connection"] = "close"  # what else is on its way is not read
            await response(scope, receive, send)
            return
        await self._app(scope, _Replayed(body, receive), send)


async def _read(scope: Scope, receive: Receive) -> bytes | Problem | None:
    """The body; None if the sender has left."""
    too_large = Problem(413, "too-large", f"the body is larger than {MAX_BODY_BYTES:,} bytes; ask in parts")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and (len(value) > 18 or int(value) > MAX_BODY_BYTES):
            return too_large
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return too_large
        if not message.get("more_body", False):
            return bytes(body)


class _Replayed:
    """What an application receives: the body in one piece, then what else there is."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}
