"""Which entries the store is believed to hold. A hint, not a promise: the store may evict what stands here."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from mmcache.control.messages import Commitment, Hit


class Entry(msgspec.Struct, gc=False):
    """One entry. `gc=False`: millions of these hold plain data only, and the collector need not walk them."""

    hit: Hit
    """The answer to whoever asks: generation, revision, size in bytes, tensors and metadata."""
    mm_hash: str
    cost_ms: float
    producer: str
    """Name of the session that committed it first."""
    created: float
    """When it was committed first, on the controller's clock in seconds."""


class Directory:
    """Entries by name: a scope's digest followed by that of an mm_hash, 64 bytes.

    Revisions grow within the term and are never used twice, so a report about an entry that has been replaced or seen
    again since is recognised.
    """

    def __init__(self, *, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, Entry] = {}
        self._revision = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, names: Iterable[bytes], generations: Iterable[int]) -> list[Hit | None]:
        """The answer for each name to whoever asks; None where nothing is known of this generation."""
        get = self._entries.get
        return [
            entry.hit if (entry := get(name)) is not None and entry.hit.generation == generation else None
            for name, generation in zip(names, generations, strict=True)
        ]

    def enter(self, name: bytes, commitment: Commitment, producer: str, now: float) -> tuple[Hit | None, bool]:
        """Enter what a publisher has seen in the store; returns the answer to whoever asks, and whether it is new.

        There is no answer where the directory is full. The store never replaces an object, so a duplicate leaves what
        the first said of it. But it is readable news, so it gets a new revision: reports of it as missing that are
        older than this no longer count.
        """
        known = self._entries.get(name)
        if known is None and len(self._entries) >= self._max_entries:
            return None, False
        self._revision += 1
        if known is not None and known.hit.generation == commitment.generation:
            known.hit = Hit(commitment.generation, self._revision, known.hit.nbytes, known.hit.info)
            return known.hit, False
        hit = Hit(commitment.generation, self._revision, commitment.nbytes, commitment.info)
        self._entries[name] = Entry(hit, commitment.mm_hash, commitment.cost_ms, producer, now)
        return hit, True

    def drop(self, name: bytes, revision: int) -> bool:
        """Forget an entry that a reader did not find, if nothing has been heard of it since it was promised."""
        known = self._entries.get(name)
        if known is None or known.hit.revision != revision:
            return False
        del self._entries[name]
        return True
