"""Renews the leases of what is pinned, so that the store's own eviction takes it last: on the reaper's thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

from mmcache.controller.core import ControllerCore
from mmcache.controller.pinned import Due
from mmcache.controller.reaper.child import ReaperChild
from mmcache.controller.removals import BATCH
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

MOST_BATCHES: Final = 64
"""In one turn, so that removals have their turns as well."""
PAUSE_S: Final = 1.0
"""After a turn in which the store gave no answer."""


class InCore(Protocol):
    """Has a function called by the thread of the core, and returns what that returns."""

    def __call__(self, call: Callable[[ControllerCore, float], Any]) -> Any:
        """It gets the core and its time."""


class Renewing:
    """One thread's.

    Args:
        in_core: reaches the core.
        attached_child: returns a child that is attached to the store, or raises.
        lease_s: the store's. A turn is worth taking every eighth of it.
    """

    def __init__(self, in_core: InCore, attached_child: Callable[[], ReaperChild], lease_s: float) -> None:
        self._in_core = in_core
        self._attached_child = attached_child
        self.every_s = lease_s / 8
        self._next = 0.0

    def turn(self) -> bool:
        """Renew what is due, if it is time for that. False: the store did not answer for all of it.

        Raises whatever `in_core`, `attached_child` and the child raise.
        """
        now = time.monotonic()
        if now < self._next:
            return True
        self._next = now + self.every_s
        for _ in range(MOST_BATCHES):
            lineage, due = self._in_core(_take)
            if not due:
                return True
            names = [store_name_of(one.name, lineage=lineage, generation=one.generation) for one in due]
            try:
                outcomes = self._attached_child().renew(names)
            except BaseException:
                self._next = time.monotonic() + PAUSE_S
                self._in_core(partial(_not_renewed, due))
                raise
            if not self._in_core(partial(_renewed, due, outcomes)):
                self._next = time.monotonic() + PAUSE_S
                return False
        self._next = 0.0  # there may be more
        return True


def _take(core: ControllerCore, now: float) -> tuple[str, list[Due]]:
    return core.lineage, core.pinning.pinned.take_due(now, BATCH)


def _renewed(due: Sequence[Due], outcomes: Sequence[Outcome], core: ControllerCore, _now: float) -> bool:
    return core.pinning.pinned.renewed(due, outcomes)


def _not_renewed(due: Sequence[Due], core: ControllerCore, _now: float) -> None:
    core.pinning.pinned.not_renewed(due)
