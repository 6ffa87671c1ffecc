"""What the store has, against what the directory says it has. A state machine, without I/O.

The store evicts by itself, loses what a dead owner held, and keeps what a controller was to remove when it ended. Its
master's list of names tells: `begin` before the master is asked, `saw` with each piece of the list, and then `sweep`
until it is done. Only what has not changed since the listing began is judged by it. What the list has and the directory
lacks, since a controller before entered it, or nobody did, is then read (`take_unread`, `read`).
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from mmcache.key import DIGEST_BYTES

if TYPE_CHECKING:  # the reaper's child wants the form of records, and nothing else
    from mmcache.control.messages import Commitment
    from mmcache.controller.entries import Entries
    from mmcache.controller.removals import Removals

RECORD: Final = struct.Struct(">64sQ")
"""A name, as the directory has it, and its generation."""
MOST_RECORDS: Final = 1024
"""In one piece: for a millisecond or two."""


class Reconciliation:
    """One listing after the other.

    Args:
        entries: whose directory is compared.
        removals: told of names of old generations, which nobody reads any more.
        counts: where to count what was found.
    """

    def __init__(self, entries: Entries, removals: Removals, counts: Counter[str]) -> None:
        self._entries = entries
        self._removals = removals
        self._counts = counts
        self._listing = 0
        """The number of the last listing that was begun."""
        self._before = 0
        """The directory's revision when it was."""
        self._removes = False
        self._listed = 0
        self._unknown = 0
        self._unread = bytearray()
        """RECORDs of the present generation that the directory lacks, to be read."""
        self._to_sweep: Iterator[bytes] | None = None
        self.found = {"store_entries": 0, "store_unknown": 0}
        """By the last whole listing: readable names of this lineage, and those of them that the directory lacks."""

    def begin(self) -> None:
        """The master is about to be asked. What another listing has left undone is void."""
        self._listing += 1
        self._before = self._entries.directory.revision
        self._removes = not len(self._removals)  # else names that wait to be removed would be added once more
        self._listed = self._unknown = 0
        self._unread.clear()
        self._to_sweep = None

    def saw(self, records: bytes) -> None:
        """A piece of the list: RECORDs. Raises ValueError for anything else."""
        if len(records) % RECORD.size:
            raise ValueError(f"records: {len(records)} bytes are not whole ones")
        entry_of = self._entries.directory.entry
        for name, generation in RECORD.iter_unpack(records):
            self._listed += 1
            entry = entry_of(name)
            if entry is not None and entry.hit.generation == generation:
                entry.listing = self._listing
            else:
                self._saw_unknown(name, generation)

    def sweep(self, most: int) -> bool:
        """The list is whole: look at so many entries, and forget those that were not in it. False: that was all."""
        directory, claims = self._entries.directory, self._entries.claims
        if self._to_sweep is None:
            self._to_sweep = directory.names()
        looked_at = 0
        for name in itertools.islice(self._to_sweep, most):
            looked_at += 1
            entry = directory.entry(name)
            if (
                entry is not None
                and entry.listing != self._listing
                and entry.hit.revision <= self._before
                and claims.token_of(name) is None
            ):
                directory.drop(name, entry.hit.revision)
                self._counts["entry.lost"] += 1
        if looked_at == most:
            return True
        self._to_sweep = None
        self._counts["listing"] += 1
        self.found = {"store_entries": self._listed, "store_unknown": self._unknown}
        return False

    def take_unread(self, most: int) -> bytes:
        """Some of what the directory lacks, RECORDs, for somebody to read their prefixes; empty: none, or no room.

        What was looked up in vain since the last ones comes first. It may come once more in its turn.
        """
        entries = self._entries
        if not entries.directory.room:
            self._unread.clear()
        asked = entries.asked_in_vain or {}
        first = dict(itertools.islice(asked.items(), most))
        room = (most - len(first)) * RECORD.size
        taken = b"".join(itertools.starmap(RECORD.pack, first.items())) + self._unread[:room]
        del self._unread[:room]
        entries.asked_in_vain = {name: asked[name] for name in asked if name not in first} if self._unread else None
        return taken

    def read(self, record: bytes, entry: Commitment, producer: str, created: float, now: float) -> bool:
        """One of them has this prefix: enter it, unless it became known or outdated meanwhile, or is being computed.

        Or removed: the prefix may be from before that.
        """
        name, generation = RECORD.unpack(record)
        entries = self._entries
        if (
            entries.directory.entry(name) is not None
            or not entry.generation == generation == entries.generation_of(name)
            or entries.claims.token_of(name) is not None
            or entries.room.evictions.doubts(name, generation, now)
            or entries.directory.enter(name, entry, producer, created)[0] is None
        ):
            return False
        self._counts["entry.found"] += 1
        self.found["store_unknown"] = max(0, self.found["store_unknown"] - 1)  # what was asked for may not be of these
        return True

    def _saw_unknown(self, name: bytes, generation: int) -> None:
        """One of a scope that is not known may be of any generation, and is left alone."""
        current = self._entries.generation_of(name) if name[:DIGEST_BYTES] in self._entries.scopes else -1
        if generation < current:
            self._counts["listed.outdated"] += 1
            if self._removes:
                self._removals.add(name, generation)
        else:
            self._unknown += 1
            if generation == current and len(self._unread) < self._entries.directory.room * RECORD.size:
                self._unread += RECORD.pack(name, generation)
