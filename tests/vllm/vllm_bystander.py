"""A client of the store that is no part of any engine: it looks at the raw objects, removes and forges them."""

from __future__ import annotations

import ctypes
import http.client
import re
import struct
import time
from contextlib import closing
from typing import NamedTuple

import msgspec

from benchmarks.parts import Parts
from mmcache import EmbeddingKey, MMCache
from mmcache.entry import PREFIX_BYTES, EntryHeader, encode_prefix, lay_out, payload_checksum
from mmcache.store.base import Outcome, Store

PATIENCE_S = 60.0
_METADATA_AT = 40
_LENGTH_AT = 6


class Entry(NamedTuple):
    """What an object says of itself."""

    name: str
    key: EmbeddingKey
    generation: int
    dtype: str
    shape: tuple[int, ...]


class Bystander:
    """Attached to a cluster's store for the length of a `with` block."""

    def __init__(self, cluster: Parts) -> None:
        self._metrics = cluster.metrics
        self._cache = MMCache.connect(cluster.config, name="bystander", connect_timeout=PATIENCE_S)

    def names(self) -> set[str]:
        """Of all objects, by the master."""
        with closing(http.client.HTTPConnection(self._metrics, timeout=PATIENCE_S)) as connection:
            connection.request("GET", "/get_all_keys")
            return set(re.findall(r"mmc1\.[a-z0-9.]+", connection.getresponse().read().decode()))

    def new_entries(self, before: set[str], count: int) -> list[Entry]:
        """Those that are there now and were not before, once there are as many of them as `count`."""
        deadline = time.monotonic() + PATIENCE_S
        while len(new := self.names() - before) < count:
            assert time.monotonic() < deadline, f"{len(new)} new objects, not {count}"
            time.sleep(0.05)
        return [self.entry(name) for name in new]

    def entry(self, name: str) -> Entry:
        """Read an object. Waits until it is complete."""
        store, pool = self._cache._attacher.require()
        [nbytes] = self._until(lambda: store.sizes([name], deadline=self._soon()), lambda sizes: None not in sizes)
        block = pool.allocate(nbytes, deadline=self._soon())
        self._until(
            lambda: store.read_into([name], [block.address], [nbytes], deadline=self._soon()),
            lambda results: results[0].outcome is Outcome.OK,
        )
        prefix = ctypes.string_at(block.address, PREFIX_BYTES)
        pool.release(block)
        (length,) = struct.unpack_from("<H", prefix, _LENGTH_AT)
        fields, generation, tensors, *_ = msgspec.msgpack.decode(prefix[_METADATA_AT : _METADATA_AT + length])
        return Entry(name, EmbeddingKey(*fields), generation, tensors[0][1], tuple(tensors[0][2]))

    def remove(self, entry: Entry) -> None:
        """Take it out of the store, and tell nobody; waits for readers' leases."""
        store = self._store
        self._until(
            lambda: store.remove([entry.name], deadline=self._soon()),
            lambda outcomes: outcomes[0] in (Outcome.OK, Outcome.NOT_FOUND) and entry.name not in self.names(),
        )

    def forge(self, entry: Entry, *, shape: tuple[int, ...], dtype: str | None = None) -> None:
        """Put another tensor in its place, in an entry that is whole and has its very key."""
        specs, nbytes = lay_out([("embedding", dtype or entry.dtype, shape)])
        payload = bytes(nbytes)
        header = EntryHeader(entry.key, entry.generation, specs, {}, 1.0, "forger", time.time_ns())
        self._put(
            entry,
            encode_prefix(header, payload_nbytes=nbytes, payload_checksum=payload_checksum(memoryview(payload)))
            + payload,
        )

    def spoil(self, entry: Entry) -> None:
        """Put bytes in its place that are no entry."""
        self._put(entry, b"\x5a" * (PREFIX_BYTES + 64))

    def _put(self, entry: Entry, content: bytes) -> None:
        self.remove(entry)
        store, pool = self._cache._attacher.require()
        block = pool.allocate(len(content), deadline=self._soon())
        ctypes.memmove(block.address, content, len(content))
        [result] = store.put_from([entry.name], [block.address], [len(content)], deadline=self._soon())
        assert result.outcome is Outcome.OK
        pool.release(block)

    @property
    def _store(self) -> Store:
        return self._cache._attacher.require().store

    @staticmethod
    def _soon() -> float:
        return time.monotonic() + PATIENCE_S

    @staticmethod
    def _until(act, enough):
        deadline = time.monotonic() + PATIENCE_S
        while not enough(result := act()):
            assert time.monotonic() < deadline, result
            time.sleep(0.1)
        return result

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *_: object) -> None:
        self._cache.close()
