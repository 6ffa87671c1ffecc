"""Who a request is from, and whether that one may make it."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from mmcache.controller.admin.desk import Desk
from mmcache.controller.admin.problems import Problem
from mmcache.controller.admin.tokens import ANYBODY, MAX_TOKEN_CHARACTERS, Actor, Role, TokenRefused

_bearer: Final = HTTPBearer(auto_error=False, description="A token of `controller.admin_tokens`.")


def desk_of(request: Request) -> Desk:
    """The desk of the application that serves a request."""
    desk = request.app.state.desk
    assert isinstance(desk, Desk)  # noqa: S101 (for the type)
    return desk


AtDesk = Annotated[Desk, Depends(desk_of)]
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]


def _viewer(request: Request, desk: AtDesk, credentials: _Credentials) -> Actor:
    return _actor(request, desk, credentials, Role.VIEWER)


def _operator(request: Request, desk: AtDesk, credentials: _Credentials) -> Actor:
    return _actor(request, desk, credentials, Role.OPERATOR)


Viewer = Annotated[Actor, Depends(_viewer)]
"""Whoever may look."""
Operator = Annotated[Actor, Depends(_operator)]
"""Whoever may also invalidate."""


def _actor(request: Request, desk: Desk, credentials: HTTPAuthorizationCredentials | None, role: Role) -> Actor:
    if not desk.tokens.wanted:
        if desk.checks_hosts and not _names_this_machine(request.url.hostname):
            # A page in a browser here could have its own name resolve to this machine.
            detail = "without tokens, requests name the controller by its address or as localhost"
            raise Problem(403, "foreign-host", detail)
        return ANYBODY
    if credentials is None:
        raise _unknown("give a token: Authorization: Bearer …", "Bearer")
    if len(credentials.credentials) > MAX_TOKEN_CHARACTERS:
        raise _unknown("the token is not known")
    try:
        actor = desk.tokens.actor_of(credentials.credentials)
    except TokenRefused as error:
        raise _unknown(str(error)) from error
    if actor.role < role:
        raise Problem(403, "role", f"{actor.name} is {actor.role.word}; this needs {role.word}")
    return actor


def _unknown(detail: str, challenge: str = 'Bearer error="invalid_token"') -> Problem:
    return Problem(401, "token", detail, headers={"WWW-Authenticate": challenge})


def _names_this_machine(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
