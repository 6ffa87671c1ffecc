"""Cuts a range of bytes into extents by offset: best fit, coalescing, O(log n) a call, no memory of its own."""

from __future__ import annotations

from collections.abc import Sequence

from sortedcontainers import SortedList


class ExtentAllocator:
    """Hands out extents of `[0, capacity)`, each at a multiple of `alignment` and rounded up to one.

    Best fit: the smallest free extent that is large enough, the lowest offset among equals. Freed neighbours are merged
    at once, so no two free extents ever touch. Not thread-safe: it belongs to whoever holds it.

    Raises: ValueError for sizes that are not positive and for offsets that are not allocated (a double free).
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, not {alignment}")
        self._alignment = alignment
        self._capacity = capacity // alignment * alignment
        if self._capacity <= 0:
            raise ValueError(f"capacity of {capacity} bytes holds no extent of {alignment}")
        self._allocated: dict[int, int] = {}
        # Every free extent is in all three: by start, by end (to merge), and by size (to choose).
        self._free_from: dict[int, int] = {}
        self._free_until: dict[int, int] = {}
        self._by_size: SortedList = SortedList()
        self._available = 0
        self._insert(0, self._capacity)

    @property
    def capacity(self) -> int:
        """Bytes that can be handed out in all: what was given, rounded down to the alignment."""
        return self._capacity

    @property
    def available(self) -> int:
        """Free bytes, in however many extents."""
        return self._available

    def reserved(self, nbytes: int) -> int:
        """The bytes that an extent for `nbytes` takes up."""
        if nbytes <= 0:
            raise ValueError(f"an extent has a positive size, not {nbytes}")
        return -(-nbytes // self._alignment) * self._alignment

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new extent of at least `nbytes`, or None if no free extent is large enough."""
        size = self.reserved(nbytes)
        index = self._by_size.bisect_left((size, 0))
        if index == len(self._by_size):
            return None
        found, offset = self._by_size[index]
        self._remove(offset, found)
        if found > size:
            self._insert(offset + size, found - size)
        self._allocated[offset] = size
        return int(offset)

    def allocate_run(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets of new extents, one for each size, side by side; None if no free extent holds them all.

        One choice and one split, where one after the other they would take one each.
        """
        reserved = [self.reserved(nbytes) for nbytes in sizes]
        offset = self.allocate(sum(reserved))
        if offset is None:
            return None
        offsets = []
        for size in reserved:
            self._allocated[offset] = size
            offsets.append(offset)
            offset += size
        return offsets

    def free(self, offset: int) -> None:
        """Take a whole extent back."""
        self._give_back(offset, self._pop_allocated(offset))

    def trim(self, offset: int, nbytes: int) -> None:
        """Shorten an extent to what `nbytes` needs and take its tail back. It never grows: ValueError."""
        kept = self.reserved(nbytes)
        size = self._pop_allocated(offset)
        self._allocated[offset] = min(kept, size)
        if kept > size:
            raise ValueError(f"cannot trim the extent of {size} bytes at {offset} to {nbytes}")
        if kept < size:
            self._give_back(offset + kept, size - kept)

    def _pop_allocated(self, offset: int) -> int:
        size = self._allocated.pop(offset, None)
        if size is None:
            raise ValueError(f"no extent is allocated at {offset}")
        return size

    def _give_back(self, offset: int, size: int) -> None:
        before = self._free_until.get(offset)
        if before is not None:
            size += offset - before
            self._remove(before, offset - before)
            offset = before
        after = self._free_from.get(offset + size)
        if after is not None:
            self._remove(offset + size, after)
            size += after
        self._insert(offset, size)

    def _insert(self, offset: int, size: int) -> None:
        self._free_from[offset] = size
        self._free_until[offset + size] = offset
        self._by_size.add((size, offset))
        self._available += size

    def _remove(self, offset: int, size: int) -> None:
        del self._free_from[offset]
        del self._free_until[offset + size]
        self._by_size.remove((size, offset))
        self._available -= size
