"""Names of entries that left unused: whoever of them comes back was given up too soon."""

from __future__ import annotations

from array import array
from typing import Final

import xxhash

MOST_TRIMMED: Final = 64
"""So many are forgotten at once, however much there is too much: a few for each one that leaves are soon enough."""
HASH_BYTES: Final = 8
TAKEN: Final = bytes(HASH_BYTES)
"""Stands where a name was that came back."""


class Ghosts:
    """What left last, so many bytes and names of it. First in, first out.

    A name is known by a 64-bit hash: two that share one cost a place in the wrong queue. Hashes are on 65,536 shelves
    by their first 16 bits, so that one of two millions is searched for among thirty. On each shelf, as on all together,
    what left first is in front. Who came back is forgotten, but takes its room until all that left before it is
    forgotten, too. All is in plain bytes and arrays, which the garbage collector does not walk, and which take a
    quarter of what a set of integers does.
    """

    __slots__ = ("_first", "_left", "_shelves", "_sizes", "nbytes")

    def __init__(self) -> None:
        self._shelves: dict[int, bytearray] = {}
        # Of each in the order in which they left, from `_first` on: its shelf, and its size.
        self._left = array("H")
        self._sizes = array("q")
        self._first = 0
        self.nbytes = 0
        """Sum over those that it remembers."""

    def __len__(self) -> int:
        return len(self._left) - self._first

    def add(self, name: bytes, nbytes: int) -> None:
        """An entry left. `trim` follows."""
        ghost = xxhash.xxh3_64_digest(name)
        number = ghost[0] << 8 | ghost[1]
        shelf = self._shelves.get(number)
        if shelf is None:
            self._shelves[number] = bytearray(ghost)
        else:
            shelf += ghost
        self._left.append(number)
        self._sizes.append(nbytes)
        self.nbytes += nbytes

    def take(self, name: bytes) -> bool:
        """Whether the name left lately; it is forgotten."""
        ghost = xxhash.xxh3_64_digest(name)
        shelf = self._shelves.get(ghost[0] << 8 | ghost[1])
        if shelf is None or (place := shelf.find(ghost)) < 0 or place % HASH_BYTES:
            return False
        shelf[place : place + HASH_BYTES] = TAKEN
        return True

    def trim(self, most_bytes: float, most: int) -> None:
        """Forget the oldest beyond so many bytes, or so many names, a bounded number at once."""
        first, count, nbytes = self._first, len(self._left), self.nbytes
        end = min(first + MOST_TRIMMED, count)
        while first < end and (nbytes > most_bytes or count - first > most):
            number = self._left[first]
            shelf = self._shelves[number]
            if len(shelf) > HASH_BYTES:
                del shelf[:HASH_BYTES]
            else:
                del self._shelves[number]
            nbytes -= self._sizes[first]
            first += 1
        self._first, self.nbytes = first, nbytes
        if first > 1024 and 8 * first > count - first:
            del self._left[:first]
            del self._sizes[:first]
            self._first = 0
