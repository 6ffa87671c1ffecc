"""`/v1/pins`: make them, list them, end them."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query

from mmcache.controller.admin import models
from mmcache.controller.admin.access import AtDesk, Operator, Viewer
from mmcache.controller.admin.desk import unix_offset
from mmcache.controller.admin.problems import Problem
from mmcache.controller.pinning import PinAsked, UnpinAsked
from mmcache.selector import Selector

router = APIRouter(prefix="/v1/pins", tags=["pins"])


@router.post(
    "",
    status_code=201,
    responses={
        409: {"model": models.ProblemDocument, "description": "More would be pinned than may be: nothing was pinned"}
    },
)
async def pin(body: models.NewPin, actor: Operator, desk: AtDesk) -> models.MadePin:
    """Keep what matches from eviction: entries that are there, and those that are published meanwhile.

    All that is pinned may take a share of the store, the controller's setting `pinned_share`. The same selector once
    more is the same pin, which lasts until later. An invalidation goes before a pin.
    """
    asked = PinAsked(_selectors(body), body.ttl, body.reason, actor.name, actor.role.word)
    answer = await desk.ask_pins(asked)
    until = time.time() + answer.left_ms / 1000
    return models.MadePin(ids=answer.ids, entries=answer.entries, nbytes=answer.nbytes, until=until)


@router.get("")
async def list_pins(page: Annotated[models.NumberedPage, Query()], _: Viewer, desk: AtDesk) -> models.PinList:
    """The newest first, and how much all of them keep."""
    pinned, found = await desk.call(
        lambda core, _: (
            (len(core.pinning.pinned), core.pinning.pinned.nbytes, core.pinning.pinned.most_bytes),
            core.pinning.pins.page(page.before, page.limit),
        )
    )
    entries, nbytes, most_nbytes = pinned
    return models.PinList(
        pins=[
            models.Pin(
                id=one.id,
                selector=one.selector.fields(),
                until=max(0.0, one.until + unix_offset()),
                reason=one.reason,
                actor=one.actor,
            )
            for one in found
        ],
        next=found[-1].id if len(found) == page.limit and found[-1].id > 1 else None,
        entries=entries,
        nbytes=nbytes,
        most_nbytes=most_nbytes,
    )


@router.delete("/{number}")
async def unpin(
    number: Annotated[models.Number, Path(description="Its id.")], actor: Operator, desk: AtDesk
) -> models.EndedPins:
    """End one. What it kept can be evicted again."""
    answer = await desk.ask_pins(UnpinAsked((number,), (), actor.name, actor.role.word))
    if not answer.ids:
        raise Problem(404, "no-such-pin", f"there is no pin {number}, or its time is over: see /v1/pins")
    return models.EndedPins(ids=answer.ids)


def _selectors(body: models.NewPin) -> tuple[Selector, ...]:
    """Raises Problem, or InvalidKey."""
    if (body.selector is None) is (body.keys is None):
        raise Problem(422, "invalid", "body: give either selector or keys")
    if body.keys is not None:
        return tuple(dict.fromkeys(Selector.exactly(key.key()) for key in body.keys))
    selector = Selector() if body.selector is None else body.selector.selector()
    if not selector.fields():
        detail = "the selector is empty, which matches every entry, and to pin all is to pin nothing: give a field"
        raise Problem(422, "selector-empty", detail)
    return (selector,)
