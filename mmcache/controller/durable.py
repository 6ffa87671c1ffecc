"""What a controller needs to be durable: what one term leaves to the next, and what a core wants written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from mmcache.controller.announcements import Asked
from mmcache.controller.pins import Pin
from mmcache.key import Scope
from mmcache.selector import Selector

MAX_TERMS: Final = 100
"""Of how many terms it is remembered where each began."""


class Past(NamedTuple):
    """What is durable when a term begins.

    Args:
        lineage: made together with the database; a part of every name in the store.
        head: the last number of the invalidation sequence.
        held: the invalidations that count, in order.
        pending: numbers of those that are not complete.
        scopes: of all keys that were ever claimed or committed.
        remembered: numbers of invalidations by the idempotency keys with which they were asked for.
        terms: the last `MAX_TERMS` terms, oldest first, each with the head when it began.
        strangers_until: until when sessions of a term before may live; None: there can be none.
        pins: those whose time may not be over, in the order of their ids, on the core's clock.
        last_pin: the id of the newest pin that ever was.
    """

    lineage: str
    head: int = 0
    held: Sequence[tuple[int, Selector]] = ()
    pending: Sequence[int] = ()
    scopes: Sequence[Scope] = ()
    remembered: Sequence[tuple[str, int]] = ()
    terms: Sequence[tuple[int, int]] = ()
    strangers_until: float | None = None
    pins: Sequence[Pin] = ()
    last_pin: int = 0


class PinsChange(NamedTuple):
    """What becomes of pins at somebody's wish.

    Args:
        put: new ones, and such as are changed.
        drop: ids of those that end.
        now: the core's clock, by which `put` last.
        role: as what the actor wished it. What is wished in a role is also recorded for an audit; empty: a session did.
    """

    put: Sequence[Pin]
    drop: Sequence[int]
    now: float
    actor: str
    role: str


class ToWrite(NamedTuple):
    """What is to become durable before any effects are sent: all of it at once.

    Args:
        first: the number of the first of `asked`; the others follow.
        completed: numbers of invalidations that are complete by now. That may be lost: they complete again.
        forgotten: numbers of those that count no more, since later ones cover them. That may be lost too.
        settled: whether the sessions of all earlier terms are over by now. That too.
        pins: only where nothing is `asked`, so that a refusal is of one of them.
        over: ids of pins whose time is over. That may be lost: it stays over.
    """

    scopes: Sequence[Scope]
    first: int
    asked: Sequence[Asked]
    completed: Sequence[int]
    forgotten: Sequence[int]
    settled: bool
    pins: PinsChange | None = None
    over: Sequence[int] = ()
