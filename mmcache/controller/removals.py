"""What the store is to give back: objects under names that nobody reads any more. A state machine, without I/O.

A name holds one generation of one key. A key's generation never falls, and within a lineage no number is used twice.
So once an invalidation is durable, whoever heeds it never names an older generation again, and nothing else will ever
lie there: to remove such a name takes no entry from anybody. Who has not heard of it yet misses, as may happen with any
entry, and is never served something else. And nothing is forced: the store refuses what a reader holds a lease on, so
that no read is torn.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from mmcache.key import store_name_of
from mmcache.store.base import Outcome

BATCH: Final = 256
"""Most names that are to be removed at once."""
MOST_TRIES: Final = 10
"""After so many tries in vain a name is left to the store's own eviction."""
LEASE_MARGIN_S: Final = 1.0
MOST_LEASES: Final = 64
"""How many leases long the wait between two tries becomes, doubling from one."""
FIRST_PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 60.0
_GENERATION_BYTES: Final = 8
_SILENT: Final = frozenset({Outcome.UNAVAILABLE, Outcome.TIMED_OUT})


class Removals:
    """Names on their way out. Each is due, waits for a lease to end, or is out: in the batch that was taken last.

    Nothing is kept before somebody has taken a batch: a controller without a reaper leaves all to the store's eviction.
    The same name may be added more than once, and is then not found the second time.

    Args:
        lineage: the controller's.
        lease_ms: the store's read lease.
        most: names kept; what comes beyond is left to the store's eviction.
        counts: where to count what becomes of them.
    """

    def __init__(self, *, lineage: str, lease_ms: int, most: int, counts: Counter[str]) -> None:
        self._lineage = lineage
        self._lease_s = lease_ms / 1000 + LEASE_MARGIN_S
        self._most = most
        self._counts = counts
        self._wanted = False
        # Millions of them: a name and its generation in one object, which no collector walks.
        self._due: deque[bytes] = deque()
        self._later: list[tuple[float, bytes]] = []
        self._out: list[bytes] = []
        self._tries: dict[bytes, int] = {}
        """How often those that are there still were tried in vain."""
        self._silences = 0
        """How often in a row the store, or who was to ask it, gave no answer."""
        self._paused_until = -math.inf

    def __len__(self) -> int:
        return len(self._due) + len(self._later) + len(self._out)

    def add(self, name: bytes, generation: int) -> None:
        """Nobody reads this generation of a name any more; a name is the 64 bytes that the directory knows."""
        if not self._wanted:
            return
        if len(self) >= self._most:
            self._counts["removal.forgotten"] += 1
            return
        self._due.append(name + generation.to_bytes(_GENERATION_BYTES, "big"))

    def take(self, now: float) -> list[str]:
        """The store's names of the next batch; none: nothing is to be done now. `done` follows.

        Where it does not, the batch is lost: whoever takes the next one knows nothing of it any more.
        """
        self._wanted = True
        if self._out:
            self._lost(now)
        if now < self._paused_until:
            return []
        while self._due and len(self._out) < BATCH:
            self._out.append(self._due.popleft())
        while self._later and self._later[0][0] <= now and len(self._out) < BATCH:
            self._out.append(heapq.heappop(self._later)[1])
        return [
            store_name_of(
                removal[:-_GENERATION_BYTES],
                lineage=self._lineage,
                generation=int.from_bytes(removal[-_GENERATION_BYTES:], "big"),
            )
            for removal in self._out
        ]

    def done(self, outcomes: Sequence[Outcome], now: float) -> None:
        """What became of the batch, name by name. Raises ValueError for another number of them."""
        if len(outcomes) != len(self._out):
            raise ValueError(f"outcomes: {len(outcomes)} for a batch of {len(self._out)}")
        out, self._out = self._out, []
        silent = False
        for removal, outcome in zip(out, outcomes, strict=True):
            if outcome is Outcome.OK or outcome is Outcome.NOT_FOUND:
                self._counts["removed" if outcome is Outcome.OK else "removal.gone"] += 1
                self._tries.pop(removal, None)
                continue
            self._counts[f"removal.{outcome.value}"] += 1
            if outcome in _SILENT:
                silent = True
                self._due.append(removal)
            elif tries := self._tried(removal):
                wait = self._lease_s * min(2 ** (tries - 1), MOST_LEASES)
                heapq.heappush(self._later, (now + wait, removal))
        if silent:
            self._pause(now)
        elif out:
            self._silences = 0

    def _lost(self, now: float) -> None:
        """Nobody knows what became of the batch. It goes to the end: should it be what kills, others go first."""
        self._counts["removal.lost"] += len(self._out)
        self._due += [removal for removal in self._out if self._tried(removal)]
        self._out = []
        self._pause(now)

    def _tried(self, removal: bytes) -> int:
        """Count a try in vain; returns how many there were. 0: that is enough, and it is forgotten."""
        tries = self._tries.pop(removal, 0) + 1
        if tries >= MOST_TRIES:
            self._counts["removal.forgotten"] += 1
            return 0
        self._tries[removal] = tries
        return tries

    def _pause(self, now: float) -> None:
        self._paused_until = now + min(FIRST_PAUSE_S * 2 ** min(self._silences, 10), MOST_PAUSE_S)
        self._silences += 1
