"""Which entries the store is believed to hold. A hint, not a promise: the store may evict what stands here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from mmcache.control.messages import Commitment, Hit
from mmcache.controller.removals import Removals
from mmcache.controller.shelves import SHELVES, Shelves


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
    listing: int = 0
    """The last listing of the store that had it."""
    uses: int = 0
    """How often clients said to have read it, as far as it goes."""


class Watcher(Protocol):
    """Is told what comes and goes."""

    def entered(self, name: bytes, entry: Entry) -> None:
        """There is a new entry."""

    def left(self, name: bytes, entry: Entry) -> None:
        """This one is not there any more."""


class Directory:
    """Entries by name: a scope's digest followed by that of an mm_hash, 64 bytes.

    Revisions grow within the term and are never used twice, so a report about an entry that has been replaced or seen
    again since is recognised.

    Args:
        max_entries: how many it holds.
        removals: told of each entry that is forgotten because its generation is old.
    """

    def __init__(self, *, max_entries: int, removals: Removals) -> None:
        self.max_entries = max_entries
        self._removals = removals
        self._entries: dict[bytes, Entry] = {}
        self._shelves = Shelves()
        self._revision = 0
        self._to_sweep: Iterator[bytes] | None = None
        self._sweep_again = False
        self.watchers: list[Watcher] = []
        """Each is told of all that comes and goes, in this order."""

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, names: Iterable[bytes], generations: Iterable[int]) -> list[Hit | None]:
        """The answer for each name to whoever asks; None where nothing is known of this generation."""
        get = self._entries.get
        return [
            entry.hit if (entry := get(name)) is not None and entry.hit.generation == generation else None
            for name, generation in zip(names, generations, strict=True)
        ]

    @property
    def room(self) -> int:
        """How many further entries fit."""
        return max(0, self.max_entries - len(self._entries))

    @property
    def revision(self) -> int:
        """The last one that was given."""
        return self._revision

    def names(self) -> Iterator[bytes]:
        """Of all that are there until it ends. Of the others, some: it takes a shelf at a time, to hold nobody up."""
        for number in range(SHELVES):
            yield from self._shelves.names(number, self._entries)

    def entry(self, name: bytes) -> Entry | None:
        """What stands under a name, of whatever generation."""
        return self._entries.get(name)

    def shelf(self, number: int) -> list[tuple[bytes, Entry]]:
        """The entries of one of `SHELVES`, in order."""
        return [(name, self._entries[name]) for name in self._shelves.names(number, self._entries)]

    def enter(self, name: bytes, commitment: Commitment, producer: str, now: float) -> tuple[Hit | None, bool]:
        """Enter what a publisher has seen in the store; returns the answer to whoever asks, and whether it is new.

        There is no answer where the directory is full. The store never replaces an object, so a duplicate leaves what
        the first said of it. But it is readable news, so it gets a new revision: reports of it as missing that are
        older than this no longer count.
        """
        known = self._entries.get(name)
        if known is None and not self.room:
            return None, False
        self._revision += 1
        if known is not None and known.hit.generation == commitment.generation:
            known.hit = Hit(commitment.generation, self._revision, known.hit.nbytes, known.hit.info)
            return known.hit, False
        hit = Hit(commitment.generation, self._revision, commitment.nbytes, commitment.info)
        if known is not None:
            self._remove(name, known)
            self._removals.add(name, known.hit.generation)
        entry = self._entries[name] = Entry(hit, commitment.mm_hash, commitment.cost_ms, producer, now)
        if known is None:
            self._shelves.add(name, self._entries)
        for watcher in self.watchers:
            watcher.entered(name, entry)
        return hit, True

    def drop(self, name: bytes, revision: int) -> bool:
        """Forget an entry that a reader did not find, if nothing has been heard of it since it was promised."""
        known = self._entries.get(name)
        if known is None or known.hit.revision != revision:
            return False
        self._remove(name, known)
        return True

    @property
    def sweeping(self) -> bool:
        """Whether there may be entries of an old generation."""
        return self._to_sweep is not None

    def outdate(self) -> None:
        """Some entries are of an old generation by now. They are not found any more; `sweep` forgets them."""
        if self._to_sweep is None:
            self._to_sweep = self.names()
        else:
            self._sweep_again = True

    def sweep(self, generation_of: Callable[[bytes], int], most: int) -> int:
        """Look at so many entries, and forget those of an old generation; returns how many that were."""
        if self._to_sweep is None:
            return 0
        names = list(itertools.islice(self._to_sweep, most))
        outdated = [
            (name, entry)
            for name in names
            if (entry := self._entries.get(name)) is not None and entry.hit.generation != generation_of(name)
        ]
        for name, entry in outdated:
            self._remove(name, entry)
            self._removals.add(name, entry.hit.generation)
        if len(names) < most:
            self._to_sweep = self.names() if self._sweep_again else None
            self._sweep_again = False
        return len(outdated)

    def _remove(self, name: bytes, entry: Entry) -> None:
        del self._entries[name]
        for watcher in self.watchers:
            watcher.left(name, entry)
