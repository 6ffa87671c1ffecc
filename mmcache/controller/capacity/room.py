"""Keeps room in the store ahead of its own eviction, and gives up what is too old. A state machine, without I/O.

The store's master says how much room there is and how much is used. In between, the directory tells what comes and
goes. An entry counts for what it takes of a segment. Above the high watermark entries are chosen to go, until what
would be left is no more than the low one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from mmcache.controller.capacity.evictions import Evictions, Fate, Reason
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.capacity.shares import Shares
from mmcache.controller.directory import Directory, Entry
from mmcache.controller.eviction import POLICIES
from mmcache.key import DIGEST_BYTES, Scope
from mmcache.store.allocation import allocated

CHOSEN_AT_ONCE: Final = 256
"""Entries that are chosen between two bursts of messages: for a millisecond or two."""
LOOKED_AT_ONCE: Final = 1024
"""Of groups and entries, for these choices: where each has to look at many, fewer are made at once."""
MOST_CHOSEN: Final = 4096
"""So many wait for their removal to be sent: the latest choice is the best one."""
MEASURE_LASTS_S: Final = 30.0
"""Without a later one, nothing is chosen: the store may be empty by now."""
MOST_BESIDES: Final = 0.2
"""Of the store: for what it has beyond that besides entries, no entry goes. Else those of a lineage before, or of other
users, would take all the room for ever: the store's own eviction takes what is read least, and it begins above ours."""
MOST_LOST: Final = 0.05
"""If the store uses so much less than what the directory has, it is time to ask what is there."""
AGES_EVERY: Final = 0.1
"""So long after a pass over all entries the next one begins, in parts of the lowest age."""
LEAST_PASS_S: Final = 1.0


class Room:
    """Of one store.

    Args:
        rules: what an operator has said.
        directory: what is there; this watches it.
        scopes: by their digests, with which names begin.
        lease_ms: the store's read lease.
        counts: where to count what becomes of entries.
    """

    def __init__(
        self,
        rules: CapacityRules,
        directory: Directory,
        scopes: Mapping[bytes, Scope],
        *,
        lease_ms: int,
        counts: Counter[str],
    ) -> None:
        self._rules = rules
        self._directory = directory
        self._scopes = scopes
        self._lease_s = lease_ms / 1000
        self._shares = Shares(rules.quotas, POLICIES[rules.policy], scopes)
        self.evictions = Evictions(lease_ms=lease_ms, counts=counts)
        self.is_pinned: Callable[[bytes], bool] = _nothing_is_pinned
        self.capacity = 0
        """Of the store, in bytes; 0 as long as that is not known."""
        self._object_bytes = 0
        """Of the directory's entries, as the master counts them."""
        self._besides = 0
        """Bytes that the store used when it was asked last, beyond these."""
        self._measured_at: float | None = None
        self._making = False
        self._to_age: Iterator[bytes] | None = None
        self._next_pass = 0.0
        self._age_of_scope: dict[bytes, float | None] = {}
        directory.watchers.append(self)

    @property
    def used(self) -> int:
        """Bytes of the store that are used, as far as is known."""
        return max(0, self._shares.nbytes + self._besides)

    @property
    def scaled(self) -> bool:
        """Whether the quotas are more than the capacity, so that each counts for less."""
        return self._shares.scaled

    # What the directory tells

    def entered(self, name: bytes, entry: Entry) -> None:
        """There is a new entry."""
        self._object_bytes += entry.hit.nbytes
        self._shares.insert(name, allocated(entry.hit.nbytes), entry.cost_ms)
        if self.is_pinned(name):
            self._shares.set_aside(name)

    def left(self, name: bytes, entry: Entry) -> None:
        """There is none of this name any more."""
        self._object_bytes -= entry.hit.nbytes
        if nbytes := self.evictions.forget(name):
            self._shares.leaving(name, -nbytes)
        self._shares.remove(name)

    # What others tell

    def has_room_for(self, nbytes: int) -> bool:
        """Whether an object of so many bytes can be in the store at all."""
        return not self.capacity or nbytes <= self.capacity

    def accessed(self, name: bytes, count: int) -> None:
        """Readers have read an entry so often."""
        self._shares.access(name, count)

    def pin(self, name: bytes, pinned: bool) -> None:
        """An entry must not be chosen, or may be again; `is_pinned` says so, too."""
        if pinned:
            self.keep(name)
            self._shares.set_aside(name)
        elif not self.evictions.leaves(name):
            self._shares.put_back(name)

    def keep(self, name: bytes) -> None:
        """Somebody wants it now: if its removal has not been sent, it stays."""
        if nbytes := self.evictions.keep(name):
            self._shares.leaving(name, -nbytes)
            self._put_back(name)

    def measured(self, capacity: int, used: int, now: float) -> bool:
        """What the store's master said of its memory, in bytes; returns whether much that should be there is lost."""
        self._measured_at = now
        self._besides = used - self._object_bytes
        if capacity != self.capacity:
            self.capacity = capacity
            self._shares.resize(capacity, self._rules.high * capacity)
        return -self._besides > MOST_LOST * self._object_bytes

    def settle(self, name: bytes, generation: int, fate: Fate) -> None:
        """What became of a removal, of an entry that is still there."""
        entry = self._directory.entry(name)
        if entry is None or entry.hit.generation != generation or fate is Fate.UNSURE:
            return
        self._shares.leaving(name, -allocated(entry.hit.nbytes))
        if fate is Fate.GONE:
            self._directory.drop(name, entry.hit.revision)

    def tick(self, now: float) -> None:
        """Choose what is to go by now."""
        for name in self.evictions.tick(now):
            self._put_back(name)
        self._make_room(now)
        if self._rules.ages:
            self._give_up_old(now)

    def next_deadline(self, now: float) -> float | None:
        """When `tick` has something to do next; `now`: at once."""
        if (self._making or self._to_age is not None) and self.evictions.chosen < MOST_CHOSEN:
            return now
        due = self.evictions.next_deadline()
        ages = self._next_pass if self._rules.ages and self._to_age is None else None
        return min((at for at in (due, ages) if at is not None), default=None)

    def sizes(self) -> dict[str, int]:
        """Figures to be seen."""
        known = {"store_capacity_bytes": self.capacity, "store_used_bytes": self.used} if self.capacity else {}
        return {
            **known,
            "entries_removing": len(self.evictions),
            "bytes_removing": self.evictions.nbytes,
            "quotas_scaled": int(self.scaled),
        }

    def _put_back(self, name: bytes) -> None:
        if not self.is_pinned(name):
            self._shares.put_back(name)

    def _make_room(self, now: float) -> None:
        if not self.capacity or self._measured_at is None or now > self._measured_at + MEASURE_LASTS_S:
            self._making = False
            return
        rules, evictions = self._rules, self.evictions
        self._making = self._making or self._is_above(rules.high)
        until = self._shares.looked_at + LOOKED_AT_ONCE
        for _ in range(CHOSEN_AT_ONCE):
            if not self._making or evictions.chosen >= MOST_CHOSEN or self._shares.looked_at >= until:
                return
            if not self._is_above(rules.low) or (victim := self._shares.choose()) is None:
                self._making = False
                return
            entry = self._entry(victim.name)
            if now < entry.created + self._lease_s:  # which its publisher took, to see that it is readable
                evictions.rest(victim.name, entry.created + self._lease_s)
            else:
                self._choose(victim.name, Reason.QUOTA if victim.borrowed else Reason.WATERMARK)

    def _is_above(self, watermark: float) -> bool:
        """Whether what would be left is more than so much of the store, or of what the directory can know."""
        entries = len(self._directory) - len(self.evictions)
        used = self._shares.nbytes + min(self._besides, MOST_BESIDES * self.capacity)
        return (
            used - self.evictions.nbytes > watermark * self.capacity
            or entries > watermark * self._directory.max_entries
        )

    def _entry(self, name: bytes) -> Entry:
        entry = self._directory.entry(name)
        if entry is None:
            raise RuntimeError("the policy has an entry that the directory lacks")
        return entry

    def _choose(self, name: bytes, reason: Reason) -> None:
        entry = self._entry(name)
        nbytes = allocated(entry.hit.nbytes)
        self.evictions.choose(name, entry.hit.generation, nbytes, reason)
        self._shares.leaving(name, nbytes)

    def _give_up_old(self, now: float) -> None:
        """Go on with a pass over all entries; while too many are chosen, it stands still."""
        if self._to_age is None:
            if now < self._next_pass:
                return
            self._to_age = self._directory.names()
        for _ in range(CHOSEN_AT_ONCE):
            if self.evictions.chosen >= MOST_CHOSEN:
                return
            if (name := next(self._to_age, None)) is None:
                self._to_age = None
                lowest = min(rule.seconds for rule in self._rules.ages)
                self._next_pass = now + max(LEAST_PASS_S, AGES_EVERY * lowest)
                return
            entry = self._directory.entry(name)
            if (
                entry is not None
                and (most := self._most_age(name[:DIGEST_BYTES])) is not None
                and now - entry.created > most
                and self._shares.set_aside(name)
            ):
                self._choose(name, Reason.AGE)

    def _most_age(self, digest: bytes) -> float | None:
        if digest not in self._age_of_scope:
            scope = self._scopes[digest]
            self._age_of_scope[digest] = min(
                (rule.seconds for rule in self._rules.ages if rule.matches(scope)), default=None
            )
        return self._age_of_scope[digest]


def _nothing_is_pinned(_name: bytes) -> bool:
    return False
