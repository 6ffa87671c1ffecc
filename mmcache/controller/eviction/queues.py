"""Entries in queues: linked lists in plain arrays, which the garbage collector does not walk."""

from __future__ import annotations

from array import array
from typing import Final

NAME_BYTES: Final = 64
MOST_BYTES: Final = 2**48
"""An entry's size is less than that, so that sums of millions of them stay in 64 bits."""


class Queues:
    """Each entry has a slot, a number that stays the same until it is dropped, and is in one queue.

    Queues are first in, first out. An entry can be taken out of its queue and set *aside*: it keeps its slot and still
    belongs to that queue, but is not found there. Slots below `count` are the queues' own: the ends of their rings.

    Args:
        count: how many queues there are.
    """

    __slots__ = ("_after", "_before", "_free", "_names", "nbytes", "nbytes_in", "queue", "slots", "uses")

    def __init__(self, count: int) -> None:
        self.slots: dict[bytes, int] = {}
        self.nbytes = array("q", [0]) * count
        """Size of each entry, by slot."""
        self.uses = bytearray(count)
        """How often each was used, as far as a policy counts, by slot."""
        self.queue = bytearray(range(count))
        """The queue that each belongs to, by slot."""
        self.nbytes_in = [0] * count
        """Sum over each queue, without those aside."""
        self._names = bytearray(NAME_BYTES * count)
        self._before = array("i", range(count))
        self._after = array("i", range(count))
        self._free = -1

    def add(self, name: bytes, nbytes: int, queue: int) -> int:
        """Put a name that is not there at the end of a queue; returns its slot."""
        slot = self._free
        if slot < 0:
            slot = len(self.queue)
            self._names += name
            self.nbytes.append(nbytes)
            self.uses.append(0)
            self.queue.append(queue)
            self._before.append(slot)
            self._after.append(slot)
        else:
            self._free = self._after[slot]
            self._names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES] = name
            self.nbytes[slot] = nbytes
            self.uses[slot] = 0
        self.slots[name] = slot
        self._append(slot, queue)
        return slot

    def drop(self, slot: int) -> None:
        """Forget an entry."""
        self.set_aside(slot)
        del self.slots[self.name(slot)]
        self._after[slot] = self._free
        self._free = slot

    def name(self, slot: int) -> bytes:
        """The name in a slot."""
        return bytes(self._names[slot * NAME_BYTES : (slot + 1) * NAME_BYTES])

    def first(self, queue: int) -> int:
        """The slot at the front of a queue; the queue's own number: it is empty."""
        return self._after[queue]

    def is_aside(self, slot: int) -> bool:
        """Whether it was set aside."""
        return self._after[slot] == slot

    def set_aside(self, slot: int) -> None:
        """Take an entry out of its queue, if it is in there."""
        after = self._after[slot]
        if after != slot:
            before = self._before[slot]
            self._after[before] = after
            self._before[after] = before
            self._after[slot] = self._before[slot] = slot
            self.nbytes_in[self.queue[slot]] -= self.nbytes[slot]

    def move(self, slot: int, queue: int) -> None:
        """Put an entry at the end of a queue, also one that was aside."""
        self.set_aside(slot)
        self._append(slot, queue)

    def resize(self, slot: int, nbytes: int) -> None:
        """An entry has another size."""
        if not self.is_aside(slot):
            self.nbytes_in[self.queue[slot]] += nbytes - self.nbytes[slot]
        self.nbytes[slot] = nbytes

    def _append(self, slot: int, queue: int) -> None:
        last = self._before[queue]
        self._after[last] = self._before[queue] = slot
        self._before[slot] = last
        self._after[slot] = queue
        self.queue[slot] = queue
        self.nbytes_in[queue] += self.nbytes[slot]
