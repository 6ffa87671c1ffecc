"""When things are due: a heap in which renewals and removals are lazy, so that both cost no more than a dict's."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Deadlines(Generic[Key]):
    """A set of keys, each with the time at which it is due. All operations are O(log n), amortised.

    The heap holds, for each key, at least one time that is not later than its deadline; what it says too early is
    corrected when it comes to the top. It is rebuilt before it outgrows twice the number of keys.
    """

    __slots__ = ("_due", "_heap")

    def __init__(self) -> None:
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []

    def set(self, key: Key, due: float) -> None:
        """Add a key, or move its deadline."""
        previous = self._due.get(key)
        self._due[key] = due
        if previous is None or due < previous:
            heapq.heappush(self._heap, (due, key))
            if len(self._heap) > 2 * len(self._due) + 64:
                self._heap = [(due, key) for key, due in self._due.items()]
                heapq.heapify(self._heap)

    def discard(self, key: Key) -> None:
        """Remove a key, if it is there."""
        self._due.pop(key, None)

    def pop_due(self, now: float) -> list[Key]:
        """Remove and return all keys that are due."""
        heap, due_keys = self._heap, []
        while heap and heap[0][0] <= now:
            _, key = heap[0]
            due = self._due.get(key)
            if due is not None and due > now:
                heapq.heapreplace(heap, (due, key))
                continue
            heapq.heappop(heap)
            if due is not None:
                del self._due[key]
                due_keys.append(key)
        return due_keys

    def next(self) -> float | None:
        """The earliest deadline, or None."""
        heap = self._heap
        while heap:
            time, key = heap[0]
            due = self._due.get(key)
            if due == time:
                return time
            if due is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (due, key))
        return None
