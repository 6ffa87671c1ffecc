"""What two looks say together: how it stands, and what happened between them."""

from __future__ import annotations

from typing import Final

import msgspec

from mmcache.cli.top.looks import Account, Capacity, Held, Look, NamedAccount, Room

_LOST: Final = ("entry.lost", "pin.lost")


class HitRatios(msgspec.Struct):
    """Between 0 and 1; None where nothing was asked for, or published."""

    entries: float | None
    nbytes: float | None
    encode_time: float | None


class Load(msgspec.Struct):
    """What is under way: the controller's figures of these names. `removals`: names that the store is to give back."""

    sessions: int
    claims: int
    waiters: int
    removals: int


class Report(msgspec.Struct):
    """One refresh. Without an answer `trouble` says why, and all else but the time is as it was last.

    `interval_s` is the time between the two looks, over which `hit_ratios`, `evicted` and `lost` are; None: there is
    but one look at this controller, which may be because it was restarted.
    """

    at: float
    trouble: str
    term: str
    restarts: int
    """Of the controller, while this command ran."""
    interval_s: float | None
    hit_ratios: HitRatios | None
    evicted: dict[str, int] | None
    lost: int | None
    """Entries that were gone without us: evicted by the store, or lost with an owner."""
    hit_ratios_since_start: HitRatios
    evicted_since_start: dict[str, int]
    lost_since_start: int
    load: Load
    total: Account
    missed: int
    tenants: list[NamedAccount]
    models: list[NamedAccount]
    states: dict[str, Held]
    store: Room


def report(now: Look, before: Look | None, *, restarts: int = 0) -> Report:
    """Of a look, and the one before it, if there was one; `restarts` are those before."""
    capacity = now.capacity
    earlier = before
    if before is not None and before.capacity.term != capacity.term:
        earlier = None
        restarts += 1
    return Report(
        at=now.at,
        trouble="",
        term=capacity.term,
        restarts=restarts,
        interval_s=None if earlier is None else now.moment - earlier.moment,
        hit_ratios=None if earlier is None else ratios(capacity, earlier.capacity),
        evicted=None if earlier is None else _grown(capacity.evicted, earlier.capacity.evicted),
        lost=None if earlier is None else _lost(now) - _lost(earlier),
        hit_ratios_since_start=ratios(capacity, None),
        evicted_since_start=capacity.evicted,
        lost_since_start=_lost(now),
        load=Load(**{name: now.figures.get(name, 0) for name in Load.__struct_fields__}),
        total=capacity.total,
        missed=capacity.missed,
        tenants=capacity.tenants,
        models=capacity.models,
        states=capacity.states,
        store=capacity.store,
    )


def unanswered(last: Report, at: float, trouble: str) -> Report:
    """There was no answer this time."""
    return msgspec.structs.replace(
        last, at=at, trouble=trouble, interval_s=None, hit_ratios=None, evicted=None, lost=None
    )


def ratios(now: Capacity, before: Capacity | None) -> HitRatios:
    """Of what was counted since `before`, or the start; docs/operations.md defines them."""
    one, other = now.total, before.total if before is not None else Account(0, 0, 0, 0, 0.0, 0, 0, 0.0)
    missed = now.missed - (before.missed if before is not None else 0)
    return HitRatios(
        ratio(one.hits - other.hits, missed),
        ratio(one.hit_bytes - other.hit_bytes, one.published_bytes - other.published_bytes),
        ratio(one.saved_ms - other.saved_ms, one.published_ms - other.published_ms),
    )


def ratio(part: float, rest: float) -> float | None:
    """A part of the whole; None where there is nothing."""
    return part / (part + rest) if part + rest > 0 else None


def percent(part: float | None) -> str:
    """A ratio for people."""
    return "-" if part is None else f"{100 * part:.1f} %"


def _lost(look: Look) -> int:
    return sum(look.figures.get(name, 0) for name in _LOST)


def _grown(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    grown = {reason: count - before.get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in grown.items() if count}
