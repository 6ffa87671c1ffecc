"""What the admin API says at one moment; fields that are not known here are let through, and left out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

from mmcache.cli.errors import AdminUnavailable

if TYPE_CHECKING:
    from mmcache.cli.admin.connection import AdminApi

PATIENCE_S: Final = 5.0
"""For each answer: what it waits for longer is worth saying."""


class Account(msgspec.Struct):
    """What is held, and since the controller's start what was hit and published."""

    entries: int
    nbytes: int
    hits: int
    hit_bytes: int
    saved_ms: float
    published: int
    published_bytes: int
    published_ms: float


class NamedAccount(Account):
    """A tenant's or a model's."""

    name: str


class Held(msgspec.Struct):
    """Entries in one state."""

    entries: int
    nbytes: int


class Room(msgspec.Struct):
    """The store's; None where the controller does not know."""

    capacity_bytes: int | None
    used_bytes: int | None


class Capacity(msgspec.Struct):
    """What `GET /v1/capacity` answers."""

    term: str
    total: Account
    missed: int
    tenants: list[NamedAccount]
    models: list[NamedAccount]
    states: dict[str, Held]
    evicted: dict[str, int]
    store: Room


class Stats(msgspec.Struct):
    """What `GET /v1/stats` answers."""

    term: str
    figures: dict[str, int]


class Look(msgspec.Struct):
    """Both, of one controller. Times are seconds: `at` since 1970, `moment` of `time.monotonic()`."""

    at: float
    moment: float
    capacity: Capacity
    figures: dict[str, int]


def look(api: AdminApi) -> Look:
    """Look once. Raises AdminUnavailable, and InputError where it wants another token."""
    capacity = api.get("/v1/capacity", Capacity, timeout=PATIENCE_S)
    at, moment = time.time(), time.monotonic()
    stats = api.get("/v1/stats", Stats, timeout=PATIENCE_S)
    if stats.term != capacity.term:
        raise AdminUnavailable("the controller was restarted while it was asked")
    return Look(at, moment, capacity, stats.figures)
