"""Whether to call something that may be down: a state machine that does no I/O.

Closed while calls succeed. Open from a failure on: nobody calls any more, and only a probe that succeeds closes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final

PATIENCE_S: Final = 0.05
"""A failure opens the breaker if its call had waited this long; quicker ones only when several come in a row."""
QUICK_FAILURES: Final = 3
FLOOR_S: Final = 0.1
"""What is well may take so long for an answer: that a caller had less time to wait for it proves nothing."""
PROBE_S: Final = 0.25
PROBE_MOST_S: Final = 1.0
"""Between probes, give or take half of it, so that a fleet does not probe in step."""
RELAPSE_S: Final = 5.0
"""A breaker that opens again so soon after it closed was closed by too lucky a probe: it waits before the next."""


class Breaker:
    """Times are seconds of `time.monotonic()`.

    Args:
        random: returns numbers from 0 to below 1, for jitter.
    """

    def __init__(self, *, random: Callable[[], float]) -> None:
        self.open = False
        self.probe_at = math.inf
        """When to probe next; never while it is closed."""
        self._random = random
        self._in_a_row = 0
        self._opened_at = self._closed_at = -math.inf
        self._probes = 0

    def failed(self, began: float, now: float) -> bool:
        """A call that began then got no answer. Returns whether that opened the breaker.

        What began before the breaker last closed says nothing of now.
        """
        if self.open or began < self._closed_at:
            return False
        self._in_a_row += 1
        if now - began < PATIENCE_S and self._in_a_row < QUICK_FAILURES:
            return False
        self.open = True
        self._opened_at = now
        self._probes = 0
        self.probe_at = now + self._pause() if now - self._closed_at < RELAPSE_S else now
        return True

    def unanswered(self, began: Iterable[float], now: float) -> bool:
        """Calls that began then have had no answer yet, though a caller gave up. Returns whether that opened it."""
        overdue = [then for then in began if now - then >= FLOOR_S and then >= self._closed_at]
        return bool(overdue) and self.failed(min(overdue), now)

    def succeeded(self) -> None:
        """A call was answered. While it is open that proves nothing: the call may have begun before the trouble."""
        if not self.open:
            self._in_a_row = 0

    def probe_begins(self, now: float) -> None:
        """Somebody probes; others follow, without waiting for its end: it may hang where the next would not."""
        if self.open:
            self.probe_at = now + self._pause()
            self._probes += 1

    def probe_answered(self, began: float, now: float) -> bool:
        """A probe that began then succeeded. Returns whether that closed the breaker."""
        if not self.open or began < self._opened_at:
            return False
        self.open = False
        self.probe_at = math.inf
        self._in_a_row = 0
        self._closed_at = now
        return True

    def _pause(self) -> float:
        return min(PROBE_MOST_S, PROBE_S * 2.0 ** min(self._probes, 10)) * (0.5 + self._random())
