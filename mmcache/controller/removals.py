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
import struct
from collections import Counter
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
_RECORD: Final = struct.Struct(">64sQB")
"""A name, its generation, and how often it was tried in vain."""
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
        # Millions of them, one record after the other: nothing for the garbage collector to walk.
        self._due = bytearray()
        self._later: list[tuple[float, bytes]] = []
        """A heap: records by the time when they are due again."""
        self._later_bytes = 0
        self._out = b""
        self._silences = 0
        """How often in a row the store, or who was to ask it, gave no answer."""
        self._paused_until = -math.inf

    def __len__(self) -> int:
        return (len(self._due) + self._later_bytes + len(self._out)) // _RECORD.size

    def add(self, name: bytes, generation: int) -> None:
        """Nobody reads this generation of a name any more; a name is the 64 bytes that the directory knows."""
        if not self._wanted:
            return
        if len(self) >= self._most:
            self._counts["removal.forgotten"] += 1
            return
        self._due += _RECORD.pack(name, generation, 0)

    def take(self, now: float, most: int | None = None) -> list[str]:
        """The store's names of the next batch, so many or `BATCH`; none: nothing is to be done now. `done` follows.

        Where it does not, the batch is lost: whoever takes the next one knows nothing of it any more.
        """
        self._wanted = True
        if self._out:
            self._lost(now)
        if now < self._paused_until:
            return []
        room = (BATCH if most is None else most) * _RECORD.size
        while len(self._due) < room and self._later and self._later[0][0] <= now:
            records = heapq.heappop(self._later)[1]
            self._later_bytes -= len(records)
            self._due += records
        self._out = bytes(self._due[:room])
        del self._due[:room]
        return [
            store_name_of(name, lineage=self._lineage, generation=generation)
            for name, generation, _ in _RECORD.iter_unpack(self._out)
        ]

    def done(self, outcomes: Sequence[Outcome], now: float) -> None:
        """What became of the batch, name by name. Raises ValueError for another number of them."""
        if len(outcomes) * _RECORD.size != len(self._out):
            raise ValueError(f"outcomes: {len(outcomes)} for a batch of {len(self._out) // _RECORD.size}")
        out, self._out = self._out, b""
        again: dict[int, bytes] = {}
        """Records to be tried again, by how often they were tried."""
        silent = False
        for (name, generation, tries), outcome in zip(_RECORD.iter_unpack(out), outcomes, strict=True):
            if outcome is Outcome.OK or outcome is Outcome.NOT_FOUND:
                self._counts["removed" if outcome is Outcome.OK else "removal.gone"] += 1
                continue
            self._counts[f"removal.{outcome.value}"] += 1
            if outcome in _SILENT:
                silent = True
                self._due += _RECORD.pack(name, generation, tries)
            else:
                again[tries] = again.get(tries, b"") + self._tried(name, generation, tries)
        for tries, records in again.items():
            if records:
                wait = self._lease_s * min(2**tries, MOST_LEASES)
                heapq.heappush(self._later, (now + wait, records))
                self._later_bytes += len(records)
        if silent:
            self._pause(now)
        elif outcomes:
            self._silences = 0

    def _lost(self, now: float) -> None:
        """Nobody knows what became of the batch. It goes to the end: should it be what kills, others go first."""
        for name, generation, tries in _RECORD.iter_unpack(self._out):
            self._counts["removal.lost"] += 1
            self._due += self._tried(name, generation, tries)
        self._out = b""
        self._pause(now)

    def _tried(self, name: bytes, generation: int, tries: int) -> bytes:
        """The record after one more try in vain. Empty: that is enough, and it is forgotten."""
        if tries + 1 >= MOST_TRIES:
            self._counts["removal.forgotten"] += 1
            return b""
        return _RECORD.pack(name, generation, tries + 1)

    def _pause(self, now: float) -> None:
        self._paused_until = now + min(FIRST_PAUSE_S * 2 ** min(self._silences, 10), MOST_PAUSE_S)
        self._silences += 1
