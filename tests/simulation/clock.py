"""Time: what happens when in the world, and what the clock of each machine says then."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random

from mmcache.controller.sessions import DRIFT_BOUND

SLOWEST, FASTEST = 1 / (1 + DRIFT_BOUND) ** 0.5, (1 + DRIFT_BOUND) ** 0.5
"""Rates of clocks: no two differ by more than the bound."""
_INSTANT = 1e-6
_MOST_EVENTS = 50_000
"""Many times what a schedule has."""


class Clock:
    """A machine's clock that counts suspension."""

    def __init__(self, random: Random, *, drifts: bool) -> None:
        self._offset = 1000.0 + random.random() * 1e5
        self._rate = random.choice((SLOWEST, 1.0, FASTEST)) if drifts else 1.0

    def at(self, now: float) -> float:
        """What it says at this time of the world's."""
        return self._offset + self._rate * now

    def when(self, reading: float) -> float:
        """The world's time at which it says this, or a little more."""
        return (reading - self._offset) / self._rate + _INSTANT


class Thread:
    """What events happen to: nothing while it is stopped, and nothing any more once it has ended."""

    __slots__ = ("alive", "stopped_until")

    def __init__(self) -> None:
        self.alive = True
        self.stopped_until = 0.0


class Events:
    """What is going to happen, in order of time; at one time in the order in which it was said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._numbers = itertools.count()
        self._heap: list[tuple[float, int, Thread, Callable[..., object], tuple[object, ...]]] = []

    def after(self, seconds: float, thread: Thread, act: Callable[..., object], *arguments: object) -> float:
        """Have something happen to a thread, or when it goes on if it is stopped then. Returns the time."""
        time = self.now + seconds
        heapq.heappush(self._heap, (time, next(self._numbers), thread, act, arguments))
        return time

    def run(self, until: float) -> None:
        """Let it happen. Raises RuntimeError where it goes round in circles."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, thread, act, arguments = heapq.heappop(heap)
            if not thread.alive:
                continue
            if thread.stopped_until > time:
                heapq.heappush(heap, (thread.stopped_until, next(self._numbers), thread, act, arguments))
                continue
            self.now = time
            self.count += 1
            if self.count > _MOST_EVENTS:
                raise RuntimeError(f"{self.count} events by {time:.4f}: it goes round in circles")
            act(*arguments)
        self.now = until
