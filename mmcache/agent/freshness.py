"""Tells the engine, through the staging memory, whether what it was given may be used still."""

from __future__ import annotations

import threading
import time
from typing import Final

from mmcache.agent.staging import Staging
from mmcache.control.channel import ControlChannel

_LOOKS_PER_TTL: Final = 8
_SHORTEST_S: Final = 0.01
_LONGEST_S: Final = 1.0
_WITHOUT_SESSION_S: Final = 0.1


class Freshness:
    """The epoch, and until when it is good. A new one begins with each agent, lineage and invalidation.

    Names must be asked for after an epoch was had from `look`: then what is read under them is of that epoch, or of a
    later one. Thread-safe.
    """

    def __init__(self, staging: Staging, channel: ControlChannel) -> None:
        self._staging = staging
        self._channel = channel
        self._lock = threading.Lock()
        self._world: tuple[str, int] | None = None
        self._ended = False
        self._epoch = staging.epoch
        self.pause_s = _WITHOUT_SESSION_S
        """How long until `look` is to be called again, whoever needs it or not."""
        staging.set_fresh_until(0.0)
        self._begin_epoch()
        channel.on_outdated(lambda _: self.look())  # an invalidation is complete only once nothing older is used here

    def look(self) -> int | None:
        """Bring the staging memory up to date; returns the epoch, or None while there is no fresh session."""
        with self._lock:
            view = None if self._ended else self._channel.fresh()
            if view is None:
                self._staging.set_fresh_until(0.0)
                self.pause_s = _WITHOUT_SESSION_S
                return None
            world = view.lineage, view.replica.head
            if world != self._world:
                self._staging.set_fresh_until(0.0)
                self._begin_epoch()
                self._world = world
            self._staging.set_fresh_until(view.fresh_until)
            left = view.fresh_until - time.clock_gettime(time.CLOCK_BOOTTIME)  # never more than the TTL
            self.pause_s = min(_LONGEST_S, max(_SHORTEST_S, left / _LOOKS_PER_TTL))
            return self._epoch

    def end(self) -> None:
        """Nothing is fresh from here on."""
        with self._lock:
            self._ended = True
            self._staging.set_fresh_until(0.0)

    def _begin_epoch(self) -> None:
        self._epoch += 1
        self._staging.set_epoch(self._epoch)
