"""A store in this process's memory, for simulation and for tests of what stands on a store."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from mmcache.store.base import Outcome, PutResult, ReadResult, Region, Store
from mmcache.store.batches import check_batch, check_names
from mmcache.store.lifecycle import CallGate
from mmcache.store.mapping import kept, map_region


class MemoryWorld:
    """What all attached `MemoryStore`s share: immutable objects, a capacity, leases, and faults to inject.

    Args:
        capacity: bytes that fit.
        segment_bytes: the largest object that fits; `capacity` by default.
        lease_s: how long a read or a question keeps an object from being removed, in seconds.
        now: the world's clock, in seconds. Deadlines of calls stay `time.monotonic()`.
    """

    def __init__(
        self,
        *,
        capacity: int = 1 << 30,
        segment_bytes: int | None = None,
        lease_s: float = 10.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.segment_bytes = capacity if segment_bytes is None else segment_bytes
        self.lease_s = lease_s
        self.now = now
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}
        """May be written, to plant what no client would publish."""
        self.in_progress: set[str] = set()
        """Names that a writer holds: a put stores nothing, a read finds nothing."""
        self.failures: dict[str, tuple[Outcome, bool]] = {}
        """Names whose reads and puts end with this outcome, settled or not."""
        self.available = True
        """False: no call gets through."""
        self._leases: dict[str, float] = {}

    @property
    def used(self) -> int:
        """Bytes of all objects."""
        return sum(map(len, self.objects.values()))

    def fault(self, name: str) -> tuple[Outcome, bool] | None:
        """The injected outcome of a read or a put of `name`, if any."""
        return self.failures.get(name) if self.available else (Outcome.UNAVAILABLE, True)

    def find(self, name: str) -> bytes | None:
        """The object, which is leased from now."""
        found = self.objects.get(name)
        if found is not None:
            self._leases[name] = self.now() + self.lease_s
        return found

    def publish(self, name: str, content: bytes) -> Outcome:
        """Enter an object; one that exists stays as it is."""
        if name in self.objects:
            return Outcome.OK
        if name in self.in_progress:
            return Outcome.IN_PROGRESS
        if len(content) > self.segment_bytes or self.used + len(content) > self.capacity:
            return Outcome.NO_SPACE
        self.objects[name] = content
        return Outcome.OK

    def remove(self, name: str) -> Outcome:
        """Remove an object that nobody leases."""
        if name not in self.objects:
            return Outcome.NOT_FOUND
        if self._leases.get(name, self.now()) > self.now():
            return Outcome.LEASED
        del self.objects[name]
        self._leases.pop(name, None)
        return Outcome.OK


class MemoryStore(Store):
    """A client of a `MemoryWorld`."""

    kind = "memory"

    def __init__(self, world: MemoryWorld) -> None:
        self.lease_s = world.lease_s
        self._world = world
        self._regions: list[Region] = []
        self._gate = CallGate("store")

    def allocate_region(self, nbytes: int) -> Region:
        """See `Store`."""
        if nbytes <= 0:
            raise ValueError(f"a region has at least one byte, not {nbytes}")
        with self._gate:
            region, memory = map_region(nbytes)
            kept.append(memory)
            self._regions.append(region)
            return region

    def read_into(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, deadline: float
    ) -> list[ReadResult]:
        """See `Store`."""
        with self._gate:
            check_batch(names, addresses, sizes, self._regions)
            if time.monotonic() >= deadline:
                return [ReadResult(Outcome.TIMED_OUT)] * len(names)
            return list(map(self._read, names, addresses, sizes))

    def _read(self, name: str, address: int, size: int) -> ReadResult:
        with self._world.lock:
            if fault := self._world.fault(name):
                return ReadResult(fault[0], 0, fault[1])
            if (content := self._world.find(name)) is None:
                return ReadResult(Outcome.IN_PROGRESS if name in self._world.in_progress else Outcome.NOT_FOUND)
        if len(content) > size:
            return ReadResult(Outcome.TOO_SMALL, len(content))
        ctypes.memmove(address, content, len(content))
        return ReadResult(Outcome.OK, len(content))

    def put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, deadline: float
    ) -> list[PutResult]:
        """See `Store`."""
        with self._gate:
            check_batch(names, addresses, sizes, self._regions)
            if time.monotonic() >= deadline:
                return [PutResult(Outcome.TIMED_OUT)] * len(names)
            return list(map(self._put, names, addresses, sizes))

    def _put(self, name: str, address: int, size: int) -> PutResult:
        content = ctypes.string_at(address, size)
        with self._world.lock:
            if fault := self._world.fault(name):
                return PutResult(*fault)
            return PutResult(self._world.publish(name, content))

    def sizes(self, names: Sequence[str], *, deadline: float) -> list[int | None]:
        """See `Store`."""
        return [None if content is None else len(content) for content in self._find(names, deadline)]

    def exists(self, names: Sequence[str], *, deadline: float) -> list[bool]:
        """See `Store`."""
        return [content is not None for content in self._find(names, deadline)]

    def _find(self, names: Sequence[str], deadline: float) -> list[bytes | None]:
        with self._gate, self._world.lock:
            check_names(names)
            if time.monotonic() >= deadline or not self._world.available:
                return [None] * len(names)
            return [self._world.find(name) for name in names]

    def remove(self, names: Sequence[str], *, deadline: float) -> list[Outcome]:
        """See `Store`."""
        with self._gate, self._world.lock:
            check_names(names)
            if time.monotonic() >= deadline:
                return [Outcome.TIMED_OUT] * len(names)
            if not self._world.available:
                return [Outcome.UNAVAILABLE] * len(names)
            return [self._world.remove(name) for name in names]

    def reachable(self) -> bool:
        """See `Store`."""
        with self._gate:
            return self._world.available

    @property
    def ended(self) -> bool:
        """See `Store`."""
        return self._gate.empty

    def close(self) -> None:
        """See `Store`."""
        self._gate.close(wait_s=1.0)
