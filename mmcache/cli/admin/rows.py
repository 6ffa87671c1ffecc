"""What is read of the admin API's answers; fields that are not known here are let through, and left out."""

from __future__ import annotations

from typing import Any

import msgspec


class Session(msgspec.Struct):
    """One client's session."""

    session: str
    name: str
    host: str
    pid: int
    live: bool
    serves_stale: bool
    acknowledged: int
    heard_s_ago: float
    trusted_for_s: float


class Key(msgspec.Struct):
    """An entry's."""

    model: str
    version: str
    mm_hash: str
    lora: str | None
    modality: str
    tenant: str


class Entry(msgspec.Struct):
    """One entry that the controller knows."""

    name: str
    key: Key
    generation: int
    nbytes: int
    cost_ms: float
    uses: int
    producer: str
    created: float


class Invalidation(msgspec.Struct):
    """One number of the sequence."""

    number: int
    selector: dict[str, str | None]
    reason: str
    actor: str
    at: float
    idempotency_key: str | None
    complete: bool
    completed_at: float | None
    waiting: int


class AwaitedSession(msgspec.Struct):
    """A session that may still serve what was invalidated."""

    name: str
    host: str
    most_ms: int


class FollowedInvalidation(Invalidation):
    """One number, and some of those that it waits for."""

    unbound: int
    awaited: list[AwaitedSession]


class Pin(msgspec.Struct):
    """One pin."""

    id: int
    selector: dict[str, str | None]
    until: float
    reason: str
    actor: str


class Record(msgspec.Struct):
    """What somebody did."""

    id: int
    at: float
    actor: str
    role: str
    action: str
    detail: dict[str, Any]
    outcome: str


class SessionsPage(msgspec.Struct, rename={"rows": "sessions"}):
    """See `listing.Page`."""

    rows: list[Session]
    next: str | None


class EntriesPage(msgspec.Struct, rename={"rows": "entries"}):
    """See `listing.Page`."""

    rows: list[Entry]
    next: str | None


class InvalidationsPage(msgspec.Struct, rename={"rows": "invalidations"}):
    """See `listing.Page`."""

    rows: list[Invalidation]
    next: int | None


class PinsPage(msgspec.Struct, rename={"rows": "pins"}):
    """See `listing.Page`."""

    rows: list[Pin]
    next: int | None


class RecordsPage(msgspec.Struct, rename={"rows": "records"}):
    """See `listing.Page`."""

    rows: list[Record]
    next: int | None


class Matches(msgspec.Struct):
    """What an invalidation would be for."""

    dry_run: bool
    matches: int
    counted_all: bool
