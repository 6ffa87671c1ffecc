"""Least recently used: the baseline that everybody knows."""

from __future__ import annotations

from mmcache.controller.eviction.policy import Policy


class LeastRecentlyUsed(Policy):
    """What was not used for longest goes. Blind to sizes and costs, and a scan empties it."""

    def __init__(self) -> None:
        super().__init__(1)

    def _add(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        self._queues.add(name, nbytes, 0)

    def _access(self, slot: int, count: int) -> None:
        if not self._queues.is_aside(slot):
            self._queues.move(slot, 0)

    def _choose(self) -> int | None:
        slot = self._queues.first(0)
        return slot if slot > 0 else None
