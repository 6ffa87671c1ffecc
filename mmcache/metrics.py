"""What a process counts and times about itself: bounded, cheap, safe from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

OTHER: Final = "other"
"""Counts what had no room for a name of its own."""


def nearest_rank(ordered: Sequence[float], percent: int) -> float:
    """The smallest of some values, in rising order, that at least `percent` (1 to 100) of them do not exceed."""
    return ordered[-(-len(ordered) * percent // 100) - 1]


class Counters:
    """Counters by name and, where it tells something, a reason: `miss` with `not_found` is `miss.not_found`.

    Args:
        max_names: most distinct names kept; what comes beyond is counted together as `other`.
    """

    def __init__(self, max_names: int = 1024) -> None:
        self._max_names = max_names
        self._counts: dict[str, int] = {}
        self._lock = threading.RLock()  # reentrant: a finaliser may count while its own thread is counting

    def add(self, name: str, n: int = 1, *, reason: str = "") -> None:
        """Count `n` more of `name`."""
        if reason:
            name = f"{name}.{reason}"
        with self._lock:
            counts = self._counts
            if name not in counts and len(counts) >= self._max_names:
                name = OTHER
            counts[name] = counts.get(name, 0) + n

    def snapshot(self) -> dict[str, int]:
        """All counts so far, in the order of their names."""
        with self._lock:
            return dict(sorted(self._counts.items()))


class Latency:
    """How long the last calls took.

    Args:
        window: how many durations are kept.
    """

    def __init__(self, window: int = 1024) -> None:
        self._last: deque[float] = deque(maxlen=window)
        self._count = 0
        self._lock = threading.RLock()

    def add(self, seconds: float) -> None:
        """Note one duration."""
        with self._lock:
            self._last.append(seconds)
            self._count += 1

    def snapshot(self) -> dict[str, float]:
        """`count` of all durations, and `p50_ms` and `p99_ms` of those in the window; without any, `count` alone."""
        with self._lock:
            count, last = self._count, list(self._last)
        if not last:
            return {"count": 0}
        last.sort()
        return {"count": count, "p50_ms": nearest_rank(last, 50) * 1e3, "p99_ms": nearest_rank(last, 99) * 1e3}
