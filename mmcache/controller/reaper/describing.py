"""What objects are, by their prefixes: for a controller that finds names in the store and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from mmcache.config import StoreSettings
from mmcache.control.messages import Commitment
from mmcache.controller.reaper.messages import MAX_MESSAGE_BYTES, Description
from mmcache.entry import decode_prefix, encode_info
from mmcache.errors import CorruptEntry
from mmcache.key import store_name
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

    def describe(self, names: list[str], lineage: str) -> Iterator[list[Description | None]]:
        """In the order of the names, as many at a time as fit into a message. Raises StoreUnavailable."""
        if self._reader is None:
            self._reader = PrefixReader(self._settings, timeout=ANSWER_TIMEOUT_S)
        described: list[Description | None] = []
        room = MAX_MESSAGE_BYTES - _FRAME_BYTES
        for name, prefix in zip(names, self._reader.read(names), strict=True):
            one = None if prefix is None else description(name, prefix, lineage)
            nbytes = _FRAME_BYTES
            if one is not None:
                nbytes += len(one.entry.mm_hash.encode()) + len(one.entry.info) + len(one.producer.encode())
            if nbytes > room:
                yield described
                described, room = [], MAX_MESSAGE_BYTES - _FRAME_BYTES
            described.append(one)
            room -= nbytes
        yield described


def description(name: str, prefix: Prefix, lineage: str) -> Description | None:
    """None unless it is the prefix of that very entry."""
    try:
        header = decode_prefix(prefix.content, prefix.nbytes)
        if store_name(header.key, lineage=lineage, generation=header.generation) != name:
            return None
        entry = Commitment(header.key.mm_hash, header.generation, 0, prefix.nbytes, header.cost_ms, encode_info(header))
    except CorruptEntry:
        return None
    return Description(entry, header.producer, header.created_ns)
