"""The contract of all policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

from mmcache.controller.eviction.queues import MOST_BYTES, NAME_BYTES, Queues

MOST_PASSED_OVER: Final = 256
"""So many entries that are worth keeping a choice goes past; then it takes what comes, to end within a bounded time."""


class Policy(ABC):
    """Entries by name, in the order in which they are to go.

    Its owner chooses victims until there is room. A chosen entry is *aside* until its owner says what became of it:
    `remove` when it is gone, `put_back` when it stays (a reader holds a lease on it, or somebody wants it after all).
    Pinned entries are set aside as well. What is aside is never chosen, costs no choice any time, and is still one of
    those that are there: it counts, and it may be accessed or removed.

    No clock and no randomness: the same calls give the same victims. A policy knows no capacity, which may change:
    where it keeps shares, they are shares of the bytes that are there. It holds as many entries as its owner inserts,
    who bounds them.

    Args:
        queues: how many queues it keeps.
    """

    def __init__(self, queues: int) -> None:
        self._queues = Queues(queues)
        self._nbytes = 0
        self.looked_at = 0
        """Entries that its choices have looked at so far: what they have cost."""

    def __len__(self) -> int:
        """How many entries there are, those aside included."""
        return len(self._queues.slots)

    def __contains__(self, name: bytes) -> bool:
        return name in self._queues.slots

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, those aside included."""
        return self._nbytes

    def insert(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        """An entry has been published. One that is there is accessed by it, and has this size and cost from now on.

        Args:
            name: 64 bytes.
            nbytes: its size in the store.
            cost_ms: what it took to compute, as its publisher says: any number; what cannot be is as good as unknown.

        Raises:
            ValueError: for a name that has another length, or a size that is not positive or is 2**48 bytes or more.
        """
        if len(name) != NAME_BYTES:
            raise ValueError(f"name has {len(name)} bytes, not {NAME_BYTES}")
        if not 0 < nbytes < MOST_BYTES:
            raise ValueError(f"nbytes cannot be {nbytes}: it is positive, and less than {MOST_BYTES}")
        slot = self._queues.slots.get(name)
        if slot is None:
            self._nbytes += nbytes
            self._add(name, nbytes, cost_ms)
        else:
            self._nbytes += nbytes - self._queues.nbytes[slot]
            self._queues.resize(slot, nbytes)
            self._revalue(slot, cost_ms)
            self._access(slot, 1)

    def access(self, name: bytes, count: int = 1) -> None:
        """An entry has been read so often since it was last told. Names that are not there are left alone."""
        slot = self._queues.slots.get(name)
        if slot is not None and count > 0:
            self._access(slot, count)

    def remove(self, name: bytes) -> bool:
        """An entry is gone, for whatever reason; returns whether it was there."""
        slot = self._queues.slots.get(name)
        if slot is None:
            return False
        self._nbytes -= self._queues.nbytes[slot]
        self._forget(name, slot)
        self._queues.drop(slot)
        return True

    def choose(self) -> bytes | None:
        """The entry that is to go next, which is set aside. None: all are aside."""
        self.looked_at += 1
        slot = self._choose()
        if slot is None:
            return None
        self._queues.set_aside(slot)
        return self._queues.name(slot)

    def set_aside(self, name: bytes) -> bool:
        """Do not choose this one until it is put back; returns whether it is there and was not aside yet."""
        slot = self._queues.slots.get(name)
        if slot is None or self._queues.is_aside(slot):
            return False
        self._queues.set_aside(slot)
        return True

    def put_back(self, name: bytes) -> bool:
        """Choose from this one again, later than its like; returns whether it was aside."""
        slot = self._queues.slots.get(name)
        if slot is None or not self._queues.is_aside(slot):
            return False
        self._put_back(slot)
        return True

    def is_aside(self, name: bytes) -> bool:
        """Whether it is there and aside."""
        slot = self._queues.slots.get(name)
        return slot is not None and self._queues.is_aside(slot)

    @abstractmethod
    def _add(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        """Add a new entry to a queue."""

    @abstractmethod
    def _access(self, slot: int, count: int) -> None:
        """An entry was read so often; it may be aside."""

    @abstractmethod
    def _choose(self) -> int | None:
        """The slot that is to go next."""

    def _put_back(self, slot: int) -> None:
        """Put an entry that is aside into the queue that it belongs to."""
        self._queues.move(slot, self._queues.queue[slot])

    def _revalue(self, slot: int, cost_ms: float) -> None:  # noqa: B027 (a policy that heeds no cost has nothing to do)
        """An entry that is there has another size or cost."""

    def _forget(self, name: bytes, slot: int) -> None:  # noqa: B027 (as above)
        """An entry is about to be dropped."""
