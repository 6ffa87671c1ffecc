"""Names of entries that left unused: whoever of them comes back was given up too soon."""

from __future__ import annotations

from array import array
from typing import Final

import xxhash

MOST_TRIMMED: Final = 64
"""So many are forgotten at once, however much there is too much: a few for each one that leaves are soon enough."""


class Ghosts:
    """What left last, so many bytes and names of it. First in, first out.

    A name is known by a 60-bit hash: two that share one cost a place in the wrong queue. Who came back is forgotten,
    but takes its room until all that left before it is forgotten, too.
    """

    __slots__ = ("_first", "_known", "_left", "_sizes", "nbytes")

    def __init__(self) -> None:
        self._known: set[int] = set()
        # In the order in which they left, from `_first` on. Arrays: nothing for the garbage collector to walk.
        self._left = array("Q")
        self._sizes = array("q")
        self._first = 0
        self.nbytes = 0
        """Sum over those that it remembers."""

    def __len__(self) -> int:
        return len(self._left) - self._first

    def add(self, name: bytes, nbytes: int) -> None:
        """An entry left. `trim` follows."""
        ghost = xxhash.xxh3_64_intdigest(name) >> 4
        self._known.add(ghost)
        self._left.append(ghost)
        self._sizes.append(nbytes)
        self.nbytes += nbytes

    def take(self, name: bytes) -> bool:
        """Whether the name left lately; it is forgotten."""
        ghost = xxhash.xxh3_64_intdigest(name) >> 4
        if ghost in self._known:
            self._known.remove(ghost)
            return True
        return False

    def trim(self, most_bytes: float, most: int) -> None:
        """Forget the oldest beyond so many bytes, or so many names, a bounded number at once."""
        for _ in range(MOST_TRIMMED):
            if not len(self) or (self.nbytes <= most_bytes and len(self) <= most):
                break
            self._known.discard(self._left[self._first])
            self.nbytes -= self._sizes[self._first]
            self._first += 1
        if self._first > 1024 and 8 * self._first > len(self):
            del self._left[: self._first]
            del self._sizes[: self._first]
            self._first = 0
