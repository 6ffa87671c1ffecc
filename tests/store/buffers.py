"""A store's region, cut by hand."""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Mapping

from mmcache.store.base import Outcome, PutResult, ReadResult, Store

_numbers = itertools.count()


def fresh(label: str = "object") -> str:
    """A name that no other test uses."""
    return f"mmc1.test.{label}.{os.getpid()}.{next(_numbers)}"


def soon(seconds: float = 30.0) -> float:
    return time.monotonic() + seconds


class Buffers:
    """Hands out each byte of a region once, so that nothing in a test overlaps."""

    def __init__(self, store: Store, nbytes: int) -> None:
        self.store = store
        self.region = store.allocate_region(nbytes)
        self._used = 0

    def take(self, nbytes: int) -> int:
        address = self.region.address + self._used
        self._used += nbytes
        assert self._used <= self.region.nbytes, "the test's region is too small"
        return address

    def filled(self, content: bytes) -> int:
        address = self.take(len(content))
        ctypes.memmove(address, content, len(content))
        return address

    def put(self, objects: Mapping[str, bytes], *, deadline: float | None = None) -> list[PutResult]:
        addresses = [self.filled(content) for content in objects.values()]
        sizes = [len(content) for content in objects.values()]
        return self.store.put_from(list(objects), addresses, sizes, deadline=deadline or soon())

    def read(self, name: str, nbytes: int) -> tuple[ReadResult, bytes]:
        """One object into a buffer of `nbytes`, and all of that buffer's bytes afterwards (`.` where untouched)."""
        address = self.filled(b"." * nbytes)
        result = self.store.read_into([name], [address], [nbytes], deadline=soon())[0]
        return result, ctypes.string_at(address, nbytes)

    def assert_readable(self, name: str, content: bytes) -> None:
        result, seen = self.read(name, len(content))
        assert result == ReadResult(Outcome.OK, len(content))
        assert seen == content, "the bytes read are not the bytes put"
