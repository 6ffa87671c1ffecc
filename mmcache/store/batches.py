"""Batches: what a valid one is, how it is cut into calls, and how many objects may be under way at once."""

from __future__ import annotations

import operator
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from mmcache.store.base import Region

MAX_CHUNK_OBJECTS: Final = 512
MAX_CHUNK_BYTES: Final = 256 * 2**20
"""A call of this many bytes ends well within a lease, and deadlines are looked at between two."""

MAX_OBJECTS_UNDER_WAY: Final = 1536
"""In one process. Above about 2,048 for one peer, transfers over TCP begin to fail."""


def check_names(names: Sequence[str]) -> None:
    """ValueError unless the names differ: of two equal ones, Mooncake fills one buffer and says OK to both."""
    if len(set(names)) != len(names):
        raise ValueError("the names of one batch must differ")


def check_batch(
    names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], regions: Sequence[Region]
) -> None:
    """ValueError unless the three agree in length, the names differ, and every buffer lies in a region of the store."""
    if not len(names) == len(addresses) == len(sizes):
        raise ValueError(f"{len(names)} names, {len(addresses)} addresses and {len(sizes)} sizes")
    check_names(names)
    if not names:
        return
    first, end = min(addresses), max(map(operator.add, addresses, sizes))
    if min(sizes) <= 0:
        raise ValueError("a buffer has at least one byte")
    for region in regions:
        if region.address <= first and end <= region.address + region.nbytes:
            return
    for address, size in zip(addresses, sizes, strict=True):
        if not any(r.address <= address and address + size <= r.address + r.nbytes for r in regions):
            raise ValueError(f"{size} bytes at {address:#x} are not part of a region that this store lent")


def chunks(sizes: Sequence[int]) -> Iterator[slice]:
    """Cut a batch of buffers, given by their sizes in bytes, into slices for one call each."""
    start = nbytes = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == MAX_CHUNK_OBJECTS or nbytes + size > MAX_CHUNK_BYTES):
            yield slice(start, index)
            start, nbytes = index, 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))


class ObjectLimiter:
    """At most `limit` objects under way; calls wait first in, first out, so that a large one is not starved."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._under_way = 0
        self._queue: deque[object] = deque()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def take(self, count: int, deadline: float) -> bool:
        """Admit `count` objects (at most the limit); False at the deadline (`time.monotonic()` seconds)."""
        if not 0 <= count <= self._limit:
            raise ValueError(f"{count} objects can never be under way with a limit of {self._limit}")
        with self._lock:
            if not self._queue and self._under_way + count <= self._limit:
                self._under_way += count
                return True
            ticket = object()
            self._queue.append(ticket)
            try:
                while self._queue[0] is not ticket or self._under_way + count > self._limit:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        return False
                    self._changed.wait(remaining)
                self._under_way += count
                return True
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def give_back(self, count: int) -> None:
        """End of a call that was admitted with `count` objects."""
        with self._lock:
            self._under_way -= count
            if self._queue:
                self._changed.notify_all()
