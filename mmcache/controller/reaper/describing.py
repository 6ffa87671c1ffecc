"""What objects are, by their prefixes: for a controller that finds names in the store and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from mmcache.config import StoreSettings
from mmcache.control.messages import Commitment
from mmcache.controller.reaper.messages import MAX_MESSAGE_BYTES, Describe, Described, Description
from mmcache.controller.reconciliation import RECORD
from mmcache.entry import decode_prefix, encode_info
from mmcache.errors import CorruptEntry
from mmcache.key import store_name_of
from mmcache.store.prefixes import Prefix, PrefixReader

ANSWER_TIMEOUT_S: Final = 5.0
"""How long the master may take to say where objects lie."""
_FRAME_BYTES: Final = 256
"""More than a description takes besides its mm_hash, producer and info."""


class Describer:
    """One process's; what it needs of Mooncake begins with the first question."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._reader: PrefixReader | None = None

    def describe(self, asked: Iterable[Describe]) -> Iterator[Described]:
        """Answer one after the other, each in the order of its names, with as many at a time as fit into a message.

        Some are taken, and their prefixes on the way, before one is answered. Raises StoreUnavailable.
        """
        if self._reader is None:
            self._reader = PrefixReader(self._settings, timeout=ANSWER_TIMEOUT_S)
        taken: deque[Describe] = deque()
        for prefixes in self._reader.read(_names(asked, taken)):
            yield from _answers(taken.popleft(), prefixes)


def _names(asked: Iterable[Describe], taken: deque[Describe]) -> Iterator[list[str]]:
    for one in asked:
        taken.append(one)
        yield [
            store_name_of(name, lineage=one.lineage, generation=generation)
            for name, generation in RECORD.iter_unpack(one.records)
        ]


def _answers(asked: Describe, prefixes: list[Prefix | None]) -> Iterator[Described]:
    described: list[Description | None] = []
    room = MAX_MESSAGE_BYTES - _FRAME_BYTES
    for (name, generation), prefix in zip(RECORD.iter_unpack(asked.records), prefixes, strict=True):
        one = None if prefix is None else description(name, generation, prefix)
        nbytes = _FRAME_BYTES
        if one is not None:
            nbytes += len(one.entry.mm_hash.encode()) + len(one.entry.info) + len(one.producer.encode())
        if nbytes > room:
            yield Described(asked.number, described)
            described, room = [], MAX_MESSAGE_BYTES - _FRAME_BYTES
        described.append(one)
        room -= nbytes
    yield Described(asked.number, described)


def description(name: bytes, generation: int, prefix: Prefix) -> Description | None:
    """None unless it is the prefix of that very entry; a name is the 64 bytes that the directory knows."""
    try:
        header = decode_prefix(prefix.content, prefix.nbytes)
        if header.generation != generation or header.key.scope.digest + header.key.mm_digest != name:
            return None
        entry = Commitment(header.key.mm_hash, header.generation, 0, prefix.nbytes, header.cost_ms, encode_info(header))
    except CorruptEntry:
        return None
    return Description(entry, header.producer, header.created_ns)
