"""Which part of the cluster fails, how, when and for how long: a random schedule from a seed."""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable

from benchmarks.parts import Part, Parts

SHORTEST_STOP_S, LONGEST_STOP_S = 0.1, 10.0
RARE_STOP_S = 40.0
RARE_SHARE = 0.02
LONGEST_ABSENCE_S = 10.0
KINDS = {"stopped": 5, "restarted": 3, "restarted late": 3}
"""With their weights."""


class Faults:
    """Injects faults into the parts of a cluster, and ends them. `tick` is to be called often, from the main thread.

    Parts fail one at a time or several at once. One that ended by itself, as a `mooncake_client` may that finds no
    master, is started again, as an operator's supervisor would.

    Args:
        pause_s: between the beginnings of two faults, on average, in seconds.
    """

    def __init__(self, parts: Parts, *, seed: int, pause_s: float, told: Callable[[str], None]) -> None:
        self._parts = parts
        self._choose = random.Random(seed)
        self._pause_s = pause_s
        self._told = told
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._busy: set[str] = set()
        self._next = time.monotonic() + pause_s
        self.injected: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """How many faults were injected so far."""
        return sum(number for name, number in self.injected.items() if not name.endswith("by itself"))

    @property
    def peers_gone(self) -> int:
        """How many processes that move bytes have ended so far."""
        return sum(
            number
            for name, number in self.injected.items()
            if name.startswith(("owner", "sidecar")) and "stopped" not in name
        )

    def tick(self) -> None:
        """Begin and end what is due."""
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        for part in self._parts.parts.values():
            if not part.alive and part.name not in self._busy:
                self.injected[f"{part.name} ended by itself"] += 1
                part.launch()
        if now >= self._next:
            self._next = now + self._choose.uniform(0.2, 1.8) * self._pause_s
            self._inject(now)

    def end(self) -> None:
        """End all that is under way, and wait until the cluster serves."""
        self._due.clear()
        self._busy.clear()
        self._parts.heal()

    def again(self) -> None:
        """Go on after `end`."""
        self._next = time.monotonic() + self._pause_s

    def _inject(self, now: float) -> None:
        idle = [part for part in self._parts.parts.values() if part.name not in self._busy]
        if not idle:
            return
        part = self._choose.choice(idle)
        kind = self._choose.choices(list(KINDS), list(KINDS.values()))[0]
        seconds = 0.0
        if kind == "stopped":
            seconds = SHORTEST_STOP_S * (LONGEST_STOP_S / SHORTEST_STOP_S) ** self._choose.random()
            if self._choose.random() < RARE_SHARE:
                seconds = RARE_STOP_S
            part.stop()
        else:
            part.kill()
            if kind == "restarted late":
                seconds = self._choose.uniform(1.0, LONGEST_ABSENCE_S)
        self.injected[f"{part.name} {kind}"] += 1
        self._told(f"{part.name} {kind}" + (f", {seconds:.1f} s" if seconds else ""))
        self._busy.add(part.name)
        heapq.heappush(self._due, (now + seconds, next(self._order), lambda: self._recover(part)))

    def _recover(self, part: Part) -> None:
        self._busy.discard(part.name)
        if part.is_stopped:
            part.resume()
        else:
            part.launch()
