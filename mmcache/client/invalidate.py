"""Invalidating, from a client: asked for once however often the answer is lost, and followed until it is complete."""

from __future__ import annotations

import time
import uuid
from typing import Final, NamedTuple

from mmcache.control.channel import ControlChannel
from mmcache.control.messages import MAX_REASON, Awaited
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, InvalidKey
from mmcache.selector import Selector

_TRY_SECONDS: Final = 1.0
"""How long one question may take, so that one whose answer was lost is asked again in time."""
_PAUSE_S: Final = 0.05


class Invalidation(NamedTuple):
    """What is known of an invalidation.

    Args:
        lineage, number: its name: the number is one of the controller's sequence, which the lineage names.
        complete: whether no `get` that starts from now on returns what it is for, on any client that is bound.
        waiting: how many sessions may do so still.
        awaited: some of them, with the milliseconds after which they cannot any more.
        unbound: how many sessions are excluded from that, since they serve what may be stale (`on_stale`).
    """

    lineage: str
    number: int
    complete: bool = False
    waiting: int = 0
    awaited: tuple[Awaited, ...] = ()
    unbound: int = 0


def invalidate(
    channel: ControlChannel, selector: Selector, *, reason: str, everything: bool, deadline: float
) -> Invalidation:
    """Make an invalidation durable. Raises InvalidKey, ControllerUnavailable, or DeadlineExceeded."""
    if not selector.fields() and not everything:
        raise InvalidKey("an empty selector matches every entry: pass everything=True if that is meant")
    if len(reason) > MAX_REASON:
        raise InvalidKey(f"reason has {len(reason)} characters; at most {MAX_REASON} are allowed")
    idempotency = uuid.uuid4().hex
    while True:
        try:
            lineage, number = channel.invalidate(
                selector, reason=reason, idempotency=idempotency, deadline=_soon(deadline)
            )
        except (ControllerUnavailable, DeadlineExceeded):
            if not _again(deadline):
                raise
        else:
            return Invalidation(lineage, number)


def follow(channel: ControlChannel, made: Invalidation, *, deadline: float) -> Invalidation:
    """How far it is: once it is complete, or at the deadline. Raises ControllerUnavailable if nothing was heard."""
    heard = False
    while True:
        left = deadline - time.monotonic()
        wait_s = max(0.0, min(_TRY_SECONDS / 2, left - _TRY_SECONDS / 4))
        try:
            progress = channel.follow(made.lineage, made.number, wait_s=wait_s, deadline=_soon(deadline))
        except (ControllerUnavailable, DeadlineExceeded):
            if _again(deadline):
                continue
            if heard:
                return made
            raise
        heard = True
        made = made._replace(
            complete=progress.complete,
            waiting=progress.waiting,
            awaited=tuple(progress.awaited),
            unbound=progress.unbound,
        )
        if progress.complete or time.monotonic() + _TRY_SECONDS / 4 >= deadline:
            return made


def _soon(deadline: float) -> float:
    return min(deadline, time.monotonic() + _TRY_SECONDS)


def _again(deadline: float) -> bool:
    """Whether there is time to ask once more; after a pause."""
    time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))
    return time.monotonic() < deadline
