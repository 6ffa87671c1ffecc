"""Cuts a range of bytes into extents by offset: best fit, coalescing, a few look-ups a call, no memory of its own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence


class ExtentAllocator:
    """Hands out extents of `[0, capacity)`, each at a multiple of `alignment` and rounded up to one.

    Best fit: from the smallest free extent that is large enough; among equals the one that came to be last, since its
    memory was used last. Freed neighbours are merged at once, so no two free extents ever touch. Not thread-safe: it
    belongs to whoever holds it.

    Free extents are found by size in a sorted list of their different sizes. It stays short: n different sizes take up
    n²/2 units of alignment, so 64 GiB have at most 5,800 of them.

    Raises: ValueError for sizes that are not positive and for offsets that are not allocated (a double free).
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        if alignment <= 0:
            raise ValueError(f"alignment must be positive, not {alignment}")
        self._alignment = alignment
        self.capacity = capacity // alignment * alignment
        """Bytes that can be handed out in all: what was given, rounded down to the alignment."""
        if self.capacity <= 0:
            raise ValueError(f"capacity of {capacity} bytes holds no extent of {alignment}")
        self.available = 0
        """Free bytes, in however many extents."""
        self._allocated: dict[int, int] = {}
        # Every free extent is in all three: by start, by end (to merge), and by size (to choose).
        self._free_from: dict[int, int] = {}
        self._free_until: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._insert(0, self.capacity)

    def reserved(self, nbytes: int) -> int:
        """The bytes that an extent for `nbytes` takes up."""
        return self.reserved_each((nbytes,))[0]

    def reserved_each(self, sizes: Sequence[int]) -> list[int]:
        """The bytes that an extent for each of these sizes takes up."""
        if min(sizes) <= 0:
            raise ValueError(f"an extent has a positive size, not {min(sizes)}")
        alignment = self._alignment
        return [-(-nbytes // alignment) * alignment for nbytes in sizes]

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a new extent of at least `nbytes`, or None if no free extent is large enough."""
        offsets = self.allocate_run((nbytes,))
        return offsets[0] if offsets is not None else None

    def allocate_run(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets of new extents, one for each size, side by side; None if no free extent holds them all.

        One choice and one split, where one after the other they would take one each.
        """
        reserved = self.reserved_each(sizes)
        total = sum(reserved)
        index = bisect_left(self._sizes, total)
        if index == len(self._sizes):
            return None
        found = self._sizes[index]
        offset, _ = self._by_size[found].popitem()
        self._remove(offset, found)
        if found > total:
            self._insert(offset + total, found - total)
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
        equals = self._by_size.get(size)
        if equals is None:
            self._by_size[size] = {offset: None}
            insort(self._sizes, size)
        else:
            equals[offset] = None
        self.available += size

    def _remove(self, offset: int, size: int) -> None:
        del self._free_from[offset]
        del self._free_until[offset + size]
        equals = self._by_size[size]
        equals.pop(offset, None)
        if not equals:
            del self._by_size[size]
            del self._sizes[bisect_left(self._sizes, size)]
        self.available -= size
