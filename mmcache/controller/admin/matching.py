"""Entries that match, as the directory knows them: counted, or invalidated each by itself.

A selector matches what is in a key. Who published an entry, and when, is in no key: so what is asked for by these is
what the controller knows of now, and each entry that it finds gets an invalidation of exactly its key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from mmcache.controller.admin import models
from mmcache.controller.admin.desk import Desk, unix_offset
from mmcache.controller.admin.problems import Problem
from mmcache.controller.announcements import Asked
from mmcache.controller.core import ControllerCore
from mmcache.controller.recorder import told
from mmcache.controller.state.base import Invalidation, StateStore
from mmcache.controller.state.checks import MAX_PAGE
from mmcache.controller.views import START, EntryPage, Wanted
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

MAX_FOUND: Final = 10_000
"""Most entries that are invalidated at once each by itself: every client has each of them in its table."""
_AT_ONCE: Final = 500
"""Of these are durable together, and between two such parts messages are served."""
_LONGEST_LOOK_S: Final = 30.0
_ROUNDING_S: Final = 1e-6
"""A time that an answer told finds its entry again: there and back, floats lose up to half of it."""


def wanted(selector: Selector, producer: str | None, since: float | None, until: float | None) -> Wanted:
    """Entries by key, producer and time; times in seconds since 1970."""
    offset = unix_offset()
    return Wanted(
        selector,
        producer,
        None if since is None else since - offset - _ROUNDING_S,
        None if until is None else until - offset + _ROUNDING_S,
    )


async def count(desk: Desk, entries: Wanted, timeout: float) -> models.Matches:
    """How many match, as far as they can be counted in this time."""
    matches = 0
    after: bytes | None = START
    until = time.monotonic() + timeout
    while after is not None:
        found, after = await desk.call(_counting(entries, after))
        matches += found
        if time.monotonic() >= until:
            break
    return models.Matches(dry_run=True, matches=matches, counted_all=after is None)


def narrowed(
    selector: Selector, producer: str | None, since: float | None, until: float | None
) -> Mapping[str, object]:
    """What an audit record says of which entries were asked for; times in seconds since 1970."""
    return {"selector": told(selector), "producer": producer, "created_from": since, "created_until": until}


def asked_for(store: StateStore, made: Invalidation) -> object:
    """The `narrowed` with which an invalidation was asked for; None: with none, or that is not known any more."""
    before: int | None = None
    while records := store.audit(before, MAX_PAGE, action="invalidate", actor=made.actor):
        for _, record in records:
            if record.detail["number"] <= made.number:  # the newest come first
                return record.detail.get("matching") if record.detail["number"] == made.number else None
        before = records[-1][0]
    return None


async def invalidate(desk: Desk, entries: Wanted, asked: Asked, matching: Mapping[str, object]) -> tuple[int, int]:
    """Invalidate those that match, each by itself; returns the last number, and how many they were.

    Args:
        asked: what all of them are asked for as; its selector is the one that narrows `entries`.
        matching: which entries these are, for the audit: see `narrowed`.

    Raises Problem: they are too many, or there is no room for all of them; the detail says how many were made.
    """
    keys = await _find(desk, entries)
    if not keys:
        return 0, 0
    number = 0
    note = {"matching": matching, "entries": len(keys)}
    for start in range(0, len(keys), _AT_ONCE):
        part = [
            asked._replace(selector=Selector.exactly(key), idempotency="", role="")
            for key in keys[start : start + _AT_ONCE]
        ]
        if start + _AT_ONCE >= len(keys):  # the last stands for all: complete, it shows that those before are
            part[-1] = part[-1]._replace(idempotency=asked.idempotency, role=asked.role, note=note)
        try:
            number = await desk.invalidate(part)
        except Problem as problem:
            if start:
                problem.detail += f"; {start} of {len(keys)} were invalidated"
            raise
    return number, len(keys)


async def _find(desk: Desk, entries: Wanted) -> list[EmbeddingKey]:
    keys: list[EmbeddingKey] = []
    after: bytes | None = START
    until = time.monotonic() + _LONGEST_LOOK_S
    while after is not None:
        page = await desk.call(_looking(entries, after, models.MAX_PAGE))
        keys += [view.key for view in page.entries]
        after = page.after
        if len(keys) > MAX_FOUND:
            detail = f"more than {MAX_FOUND:,} entries match: narrow it, or invalidate by a selector alone"
            raise Problem(422, "too-many-entries", detail)
        if after is not None and time.monotonic() >= until:
            raise Problem(504, "no-answer", f"not all entries were looked at within {_LONGEST_LOOK_S:g} s: narrow it")
    return keys


def _counting(entries: Wanted, after: bytes) -> Callable[[ControllerCore, float], tuple[int, bytes | None]]:
    return lambda core, _: core.views.count(entries, after)


def _looking(entries: Wanted, after: bytes, limit: int) -> Callable[[ControllerCore, float], EntryPage]:
    return lambda core, _: core.views.entries(entries, after, limit)
