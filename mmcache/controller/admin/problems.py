"""What goes wrong, as problem documents (RFC 9457), which say what to do."""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mmcache.controller.mailbox import MailboxClosed, MailboxFull
from mmcache.controller.state.base import StateFull, StateLost
from mmcache.errors import InvalidKey, LifecycleError

MEDIA_TYPE: Final = "application/problem+json"
_MAX_DETAIL: Final = 512
_MAX_FAULTS: Final = 16
_URN: Final = "urn:mmcache:problem:"

_log = logging.getLogger(__name__)


class Problem(Exception):
    """An answer that tells what is wrong.

    Args:
        status: of HTTP.
        word: what it is, for programs: the end of `type`.
        detail: for people, and what they can do.
        headers: more of them.
        faults: of a request's fields: where, and what.
    """

    def __init__(
        self,
        status: int,
        word: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        faults: Sequence[Mapping[str, str]] = (),
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.word = word
        self.detail = detail
        self.headers = headers
        self.faults = faults

    def response(self) -> JSONResponse:
        """As it is sent."""
        content: dict[str, Any] = {
            "type": _URN + self.word,
            "title": http.HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": _clean(self.detail),
        }
        if self.faults:
            content["errors"] = [{name: _clean(text) for name, text in fault.items()} for fault in self.faults]
        headers = None if self.headers is None else dict(self.headers)
        return JSONResponse(content, self.status, headers, media_type=MEDIA_TYPE)


def overloaded(detail: str) -> Problem:
    """Too much is under way."""
    return Problem(503, "overloaded", detail, headers={"Retry-After": "1"})


def no_room(detail: str) -> Problem:
    """The state store cannot take it."""
    return Problem(507, "no-room", detail)


def of(error: Exception) -> Problem:
    """The problem that an error of ours is."""
    match error:
        case Problem():
            return error
        case InvalidKey():
            return Problem(422, "invalid", str(error))
        case MailboxFull():
            return overloaded(str(error))
        case MailboxClosed() | LifecycleError() | StateLost():
            return Problem(503, "ending", f"the controller is ending: {error}", headers={"Retry-After": "5"})
        case StateFull():
            return no_room(str(error))
        case HTTPException():
            word = http.HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
            return Problem(error.status_code, word, str(error.detail), headers=error.headers)
        case RequestValidationError():
            return _invalid(error)
        case _:
            _log.error("a request failed", exc_info=error)
            return Problem(500, "internal", "a fault of the controller, which its log has: report it")


def install(app: FastAPI) -> None:
    """Have all errors of an application answered so."""
    ours = (Problem, InvalidKey, MailboxFull, MailboxClosed, LifecycleError, StateLost, StateFull)
    for kind in (*ours, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, _handle)


async def _handle(_: Request, error: Exception) -> JSONResponse:
    return of(error).response()


def _invalid(error: RequestValidationError) -> Problem:
    """Where the faults are and what they are, but nothing of what was sent, which may be anything at all."""
    faults = error.errors()
    if any(fault.get("type") == "json_invalid" for fault in faults):
        return Problem(400, "malformed", "the body is not JSON")
    if isinstance(error.body, bytes):  # not looked at
        return Problem(422, "invalid", "the body must be JSON and be said to be: Content-Type: application/json")
    told = [
        {"where": ".".join(str(part) for part in fault["loc"]), "detail": str(fault["msg"])}
        for fault in faults[:_MAX_FAULTS]
    ]
    first = told[0] if told else {"where": "request", "detail": "is not valid"}
    return Problem(422, "invalid", f"{first['where']}: {first['detail']}", faults=told)


def _clean(text: str) -> str:
    """Text that can be written in UTF-8, and is short."""
    return text.encode(errors="replace").decode()[:_MAX_DETAIL]
