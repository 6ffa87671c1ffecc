"""Is it alive, can it serve, and what does it count."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from mmcache.controller.admin import figures, models
from mmcache.controller.admin.access import AtDesk, Viewer
from mmcache.controller.admin.desk import Desk
from mmcache.controller.admin.problems import Problem
from mmcache.errors import MMCacheError
from mmcache.store.launch import rpc_answers

router = APIRouter(tags=["health"])

_PATIENCE_S: Final = 1.0
_GOOD_FOR_S: Final = 0.5
"""Anybody may ask whether it is ready, so an answer serves for a moment."""


class Prober:
    """Whether the parts answer that are needed to serve."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._lock = asyncio.Lock()
        self._found: dict[str, str] = {}
        self._found_at = -_GOOD_FOR_S

    async def checks(self) -> dict[str, str]:
        """By part: `ok`, or what is wrong. Takes little more than a second."""
        async with self._lock:
            if time.monotonic() >= self._found_at + _GOOD_FOR_S:
                controller, store = await asyncio.gather(self._controller(), self._store())
                state = "ok" if self._desk.store.still_owner() else "the state was taken away or cannot be written"
                self._found = {"controller": controller, "state": state, "store": store}
                self._found_at = time.monotonic()
            return self._found

    async def _controller(self) -> str:
        try:
            await self._desk.call(lambda core, _: core.views.head, timeout=_PATIENCE_S)
        except (Problem, MMCacheError):
            return f"its loop did not answer within {_PATIENCE_S:g} s"
        return "ok"

    async def _store(self) -> str:
        answers = await asyncio.to_thread(rpc_answers, self._desk.master, timeout=_PATIENCE_S)
        return "ok" if answers else "the master of the store (store.master) does not answer"


@router.get("/healthz")
async def healthz() -> models.Alive:
    """Whether the process is alive: restart it if there is no answer. Needs no token."""
    return models.Alive(status="alive")


@router.get(
    "/readyz",
    response_model=models.Readiness,
    responses={503: {"model": models.Readiness, "description": "It could not serve"}},
)
async def readyz(request: Request) -> JSONResponse:
    """Whether a client could be served: the controller's loop, its state and the store's master answer.

    It asks each part itself and goes around the cache. Needs no token.
    """
    checks = await request.app.state.prober.checks()
    ready = all(found == "ok" for found in checks.values())
    return JSONResponse({"ready": ready, "checks": checks}, 200 if ready else 503)


@router.get("/v1/stats")
async def stats(_: Viewer, desk: AtDesk) -> models.Stats:
    """What the controller counts: docs/architecture.md says what each name is."""
    term, lineage, counted = await desk.call(lambda core, _: (core.term, core.lineage, core.stats()))
    return models.Stats(term=str(term), lineage=lineage, figures=counted)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(_: Viewer, desk: AtDesk) -> Response:
    """The same for Prometheus."""
    counted, held = await desk.call(lambda core, _: (core.stats(), core.views.accounts()))
    text = figures.to_prometheus(counted, held, calls=len(desk.mailbox), broken_token_files=desk.tokens.broken)
    return Response(text, media_type=figures.MEDIA_TYPE)
