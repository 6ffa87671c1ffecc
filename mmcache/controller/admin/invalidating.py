"""`/v1/invalidations`: make them, follow them, list them."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Header, Path, Query, Response
from fastapi.responses import JSONResponse

from mmcache.control.messages import Progress
from mmcache.controller.admin import matching, models
from mmcache.controller.admin.access import AtDesk, Operator, Viewer
from mmcache.controller.admin.desk import Desk
from mmcache.controller.admin.problems import Problem
from mmcache.controller.announcements import Asked
from mmcache.controller.state.base import Invalidation
from mmcache.engines import ClearedEngine

router = APIRouter(prefix="/v1/invalidations", tags=["invalidations"])

_IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=128,
        pattern=r"^[!-~]+$",
        description="With the same key it is the same invalidation: send it again when an answer was lost.",
    ),
]
_PathNumber = Annotated[models.Number, Path(description="Of the sequence.")]


@router.post(
    "",
    status_code=201,
    response_model=models.MadeInvalidation,
    responses={
        200: {"model": models.Matches, "description": "With `dry_run`, or since no entry was found: nothing was done"},
        507: {"model": models.ProblemDocument, "description": "No room for it: nothing was invalidated"},
    },
)
async def invalidate(
    body: models.NewInvalidation,
    response: Response,
    actor: Operator,
    desk: AtDesk,
    idempotency_key: _IdempotencyKey = None,
) -> models.MadeInvalidation | JSONResponse:
    """Have nothing served any more that matches.

    Once the answer says `complete`, no get that starts afterwards returns a matching entry that was published before,
    on any client. Without `wait`, or where `timeout` is over first, follow it with GET: it is in force all the same.

    `producer`, `created_from` and `created_until` are in no key: with one of them, the entries are invalidated that the
    controller knows of now, each by itself, up to 10,000. The answer is then that of the last of them.

    With `clear_engines` the answer takes up to `engines.timeout` longer, and an engine that was not cleared changes
    nothing else. Send it again with the same `Idempotency-Key` to have them cleared again.
    """
    selector = body.selector.selector()
    by_entry = any(given is not None for given in (body.producer, body.created_from, body.created_until))
    if not (selector.fields() or by_entry or body.all):
        raise Problem(422, "selector-empty", "the selector is empty: give a field, or `all` for everything there is")
    if (selector.fields() or by_entry) and body.all:
        raise Problem(422, "selector-and-all", "`all` is everything there is: give it an empty selector")
    if body.clear_engines:
        _check_engines(body, desk)
    entries = matching.wanted(selector, body.producer, body.created_from, body.created_until)
    narrowed = matching.narrowed(selector, body.producer, body.created_from, body.created_until)
    if body.dry_run:
        return JSONResponse((await matching.count(desk, entries, body.timeout)).model_dump())
    asked = Asked(selector, body.reason, actor.name, idempotency_key or "", actor.role.word)
    found: int | None = None
    known = await desk.read(lambda store: store.by_idempotency_key(idempotency_key)) if idempotency_key else None
    if not by_entry:
        number = await desk.invalidate([asked])
    elif known is not None:  # what it was for then is not to be found any more
        number = known.number
    else:
        number, found = await matching.invalidate(desk, entries, asked, narrowed)
        if not found:
            return JSONResponse(models.Matches(dry_run=False, matches=0, counted_all=True).model_dump())
    made = await desk.read(lambda store: store.invalidation(number))
    if made is None:
        detail = f"the idempotency key is that of invalidation {number}, which is too old to be known; take another key"
        raise Problem(409, "idempotency-key", detail)
    if not by_entry:
        is_another = made.selector != selector
    else:
        is_another = known is not None and narrowed != await desk.read(partial(matching.asked_for, made=made))
    if is_another:
        detail = f"the idempotency key is that of invalidation {number}, for {made.selector}; take another key"
        raise Problem(409, "idempotency-key", detail)
    response.headers["Location"] = f"/v1/invalidations/{number}"
    progress = await desk.follow(number, body.timeout if body.wait else 0.0)
    engines: list[ClearedEngine] = []
    if body.clear_engines:  # not before it is complete, or they fill up again from what is stale
        why_not = "the invalidation is not complete yet; send it again, with an Idempotency-Key"
        engines = desk.engines.leave(why_not) if progress.waiting else await desk.engines.clear()
    return models.MadeInvalidation(
        **_followed(made, progress).model_dump(), entries=found, engines=msgspec.to_builtins(engines)
    )


@router.get("")
async def list_invalidations(
    page: Annotated[models.NumberedPage, Query()], _: Viewer, desk: AtDesk
) -> models.Invalidations:
    """The newest first. Those that count no more since later ones cover them are kept for a while."""
    known = await desk.read(lambda store: store.page(page.before, page.limit))
    waiting = await desk.call(lambda core, _: core.views.awaited([one.number for one in known]))
    return models.Invalidations(
        invalidations=[models.Invalidation(**_fields(one, waiting.get(one.number, 0))) for one in known],
        next=known[-1].number if len(known) == page.limit and known[-1].number > 1 else None,
    )


@router.get("/{number}")
async def get_invalidation(
    number: _PathNumber, patience: Annotated[models.Patience, Query()], _: Viewer, desk: AtDesk
) -> models.FollowedInvalidation:
    """One, and whom it waits for. With `wait`, once it is complete or the time is over."""
    progress = await desk.follow(number, patience.wait)
    known = await desk.read(lambda store: store.invalidation(number))
    if known is None:
        detail = f"invalidation {number} is too old to be known; it counts as long as nothing covers it"
        raise Problem(404, "invalidation-forgotten", detail)
    return _followed(known, progress)


def _check_engines(body: models.NewInvalidation, desk: Desk) -> None:
    """Raises Problem: no engine could be cleared for it."""
    if body.dry_run or not body.wait:
        raise Problem(422, "clear-needs-wait", "clear_engines needs `wait`: engines are cleared once it is complete")
    if not desk.engines.urls:
        raise Problem(422, "no-engines", "clear_engines: the controller's setting engines.urls names no engine")


def _fields(known: Invalidation, waiting: int) -> dict[str, Any]:
    return {
        "number": known.number,
        "selector": known.selector.fields(),
        "reason": known.reason,
        "actor": known.actor,
        "at": known.at,
        "idempotency_key": known.idempotency_key,
        "complete": not waiting,
        "completed_at": known.completed_at,
        "waiting": waiting,
    }


def _followed(known: Invalidation, progress: Progress) -> models.FollowedInvalidation:
    return models.FollowedInvalidation(
        **_fields(known, progress.waiting),
        unbound=progress.unbound,
        awaited=[models.AwaitedSession(name=one.name, host=one.host, most_ms=one.most_ms) for one in progress.awaited],
    )
