"""What there is: entries, sessions, and what was done."""

from __future__ import annotations

import heapq
import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query

from mmcache.controller.admin import matching, models
from mmcache.controller.admin.access import AtDesk, Viewer
from mmcache.controller.admin.desk import Desk, unix_offset
from mmcache.controller.admin.problems import Problem
from mmcache.controller.core import ControllerCore
from mmcache.controller.views import START, EntryPage, EntryView, SessionView, Wanted
from mmcache.entry import decode_info
from mmcache.errors import CorruptEntry
from mmcache.key import store_name
from mmcache.selector import Selector

router = APIRouter(prefix="/v1")

_LONGEST_LOOK_S: Final = 5.0
"""After which a page of entries is what was found until then."""
_LONGEST_SEARCH_S: Final = 30.0
"""In which those that were used most must be found."""
_NAME: Final = re.compile(r"mmc1\.([a-z0-9]{1,32})\.([0-9a-f]{64})\.([0-9a-f]{64})\.(0|[1-9][0-9]{0,18})", re.ASCII)
_FIELDS: Final = ("tenant", "model", "version", "lora", "modality", "mm_hash")


@router.post("/lookup", tags=["entries"])
async def lookup(body: models.Keys, _: Viewer, desk: AtDesk) -> models.Found:
    """What the controller knows of each key. Reads and claims nothing."""
    keys = [key.key() for key in body.keys]
    lineage, found = await desk.call(lambda core, _: (core.lineage, core.views.lookup(keys)))
    return models.Found(results=[None if one is None else _entry(one, lineage) for one in found])


@router.get("/entries", tags=["entries"])
async def list_entries(page: Annotated[models.EntriesPage, Query()], _: Viewer, desk: AtDesk) -> models.Entries:
    """Entries that match all that is given, in an order that does not change; each page goes on where `next` says.

    What is published or goes while one reads on may be on a page or not; everything else is on exactly one.
    """
    if page.lora is not None and page.no_lora:
        raise Problem(422, "invalid", "query: give either lora or no_lora")
    wanted = _wanted(page)
    if page.order == "hottest":
        if page.cursor is not None:
            raise Problem(422, "invalid", "query: with order=hottest there is one page, and so no cursor")
        lineage, found = await _hottest(desk, wanted, page.limit)
        return models.Entries(entries=[_entry(one, lineage) for one in found], next=None)
    after: bytes | None = START if page.cursor is None else bytes.fromhex(page.cursor)
    found = []
    lineage = ""
    until = time.monotonic() + _LONGEST_LOOK_S
    while after is not None and len(found) < page.limit and time.monotonic() < until:
        lineage, (some, after) = await desk.call(_looking(wanted, after, page.limit - len(found)))
        found += some
    return models.Entries(entries=[_entry(one, lineage) for one in found], next=None if after is None else after.hex())


@router.get("/entries/{name}", tags=["entries"])
async def get_entry(
    name: Annotated[str, Path(description="The store's name of it.", max_length=256)], _: Viewer, desk: AtDesk
) -> models.EntryInFull:
    """One entry, by the store's name of it. One that was invalidated is not there."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise Problem(404, "no-such-entry", "an entry's name is mmc1.LINEAGE.SCOPE.ITEM.GENERATION: see /v1/entries")
    place, generation = bytes.fromhex(match[2] + match[3]), int(match[4])
    lineage, found = await desk.call(lambda core, _: (core.lineage, core.views.entry(place, generation)))
    if found is None or match[1] != lineage:
        raise Problem(404, "no-such-entry", "the controller knows no entry of this name, or it was invalidated")
    tensors, meta = _contents(found.info)
    return models.EntryInFull(**_entry(found, lineage).model_dump(), tensors=tensors, meta=meta)


@router.get("/sessions", tags=["sessions"])
async def list_sessions(page: Annotated[models.SessionsPage, Query()], _: Viewer, desk: AtDesk) -> models.SessionList:
    """Clients' sessions, also those that have ended while their clients may not know yet."""
    after = int(page.after or 0)
    now, found = await desk.call(lambda core, now: (now, core.views.sessions(after, page.limit)))
    return models.SessionList(
        sessions=[_session(one, now) for one in found],
        next=str(found[-1].number) if len(found) == page.limit else None,
    )


@router.get("/audit", tags=["audit"])
async def list_audit(page: Annotated[models.AuditPage, Query()], _: Viewer, desk: AtDesk) -> models.Audit:
    """What was done by this API, the newest first."""
    known = await desk.read(lambda store: store.audit(page.before, page.limit, action=page.action, actor=page.actor))
    return models.Audit(
        records=[models.AuditRecord(id=number, **msgspec.structs.asdict(record)) for number, record in known],
        next=known[-1][0] if len(known) == page.limit and known[-1][0] > 1 else None,
    )


async def _hottest(desk: Desk, wanted: Wanted, limit: int) -> tuple[str, list[EntryView]]:
    """The most used of all that are wanted, and the lineage. Raises Problem where they are too many to look at."""
    best: list[EntryView] = []
    lineage = ""
    after: bytes | None = START
    until = time.monotonic() + _LONGEST_SEARCH_S
    while after is not None:
        above = best[-1].uses if len(best) == limit else -1
        lineage, (some, after) = await desk.call(_searching(wanted, after, limit, above))
        best = heapq.nlargest(limit, itertools.chain(best, some), key=lambda one: one.uses)
        if after is not None and time.monotonic() >= until:
            detail = (
                f"not all entries could be looked at within {_LONGEST_SEARCH_S:g} s: narrow them, by model or tenant"
            )
            raise Problem(504, "no-answer", detail)
    return lineage, best


def _searching(
    wanted: Wanted, after: bytes, limit: int, above: int
) -> Callable[[ControllerCore, float], tuple[str, EntryPage]]:
    return lambda core, _: (core.lineage, core.views.hottest(wanted, after, limit, above))


def _looking(wanted: Wanted, after: bytes, limit: int) -> Callable[[ControllerCore, float], tuple[str, EntryPage]]:
    return lambda core, _: (core.lineage, core.views.entries(wanted, after, limit))


def _wanted(page: models.EntriesPage) -> Wanted:
    """Raises InvalidKey."""
    fields: dict[str, Any] = {name: value for name in _FIELDS if (value := getattr(page, name)) is not None}
    if page.no_lora:
        fields["lora"] = None
    return matching.wanted(Selector(**fields), page.producer, page.created_from, page.created_until)


def _entry(view: EntryView, lineage: str) -> models.Entry:
    key = view.key
    return models.Entry(
        name=store_name(key, lineage=lineage, generation=view.generation),
        key=models.Key(**{name: getattr(key, name) for name in _FIELDS}),
        generation=view.generation,
        nbytes=view.nbytes,
        cost_ms=view.cost_ms,
        uses=view.uses,
        producer=view.producer,
        created=max(0.0, view.created + unix_offset()),
    )


def _session(view: SessionView, now: float) -> models.Session:
    return models.Session(
        session=str(view.number),
        name=view.name,
        host=view.host,
        pid=view.pid,
        live=view.live,
        serves_stale=view.serves_stale,
        acknowledged=view.acknowledged,
        heard_s_ago=max(0.0, now - view.heard),
        trusted_for_s=max(0.0, view.trusted_until - now),
    )


def _contents(info: bytes) -> tuple[list[models.Tensor] | None, dict[str, Any] | None]:
    """What a publisher says of its entry; None where that cannot be read."""
    try:
        contents = decode_info(info)
        meta = json.loads(msgspec.json.encode(dict(contents.meta)))  # bytes as base64, NaN as null
    except (CorruptEntry, TypeError, ValueError, msgspec.MsgspecError):
        return None, None
    tensors = [models.Tensor(name=one.name, dtype=one.dtype, shape=list(one.shape)) for one in contents.tensors]
    return tensors, meta
