"""The store: objects by name, never replaced, gone at any time. A put that says 0 may have stored nothing.

It has little room. What is read is leased for a while, which forbids a removal; what finds no room makes the store
evict what is not leased, least recently leased first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mmcache.key import EmbeddingKey
from mmcache.store.allocation import allocated
from mmcache.store.base import Outcome

_EVICTS_TO: Final = 0.85
"""Of the capacity, once something found no room."""


class Publication(NamedTuple):
    """One entry: what it is of, and how it came about.

    Args:
        content: the version of the key's content that was encoded.
        since: when its generation was fixed, by a mark or a claim.
        by: who published it.
    """

    key: EmbeddingKey
    lineage: str
    generation: int
    content: int
    since: float
    by: str


class Item(NamedTuple):
    """What entries of a key are like."""

    nbytes: int
    cost_ms: float


class Removed(NamedTuple):
    """By the reaper of which term an object was removed, and when by its controller's clock."""

    term: int
    at: float


class Store:
    """Objects by name.

    Args:
        items: by key.
        capacity: in bytes.
        lease_s: how long a read keeps an object from being removed or evicted.
        on_gone: told of the name of each object that is gone.
    """

    def __init__(
        self, items: dict[EmbeddingKey, Item], *, capacity: int, lease_s: float, on_gone: Callable[[str], object]
    ) -> None:
        self.objects: dict[str, Publication] = {}
        self.capacity = capacity
        self.removed: dict[str, Removed] = {}
        """Names that the reaper has removed, and that nobody has put again."""
        self._items = items
        self._lease_s = lease_s
        self._on_gone = on_gone
        self._leased_until: dict[str, float] = {}
        self._held: dict[str, float] = {}

    @property
    def used(self) -> int:
        """As its master counts: without what the allocator adds."""
        return sum(self._items[one.key].nbytes for one in self.objects.values())

    @property
    def taken(self) -> int:
        """Bytes of its memory that nothing else can have."""
        return sum(allocated(self._items[one.key].nbytes) for one in self.objects.values())

    def read(self, name: str, now: float) -> Publication | None:
        """What is there, which is leased then."""
        found = self.objects.get(name)
        if found is not None:
            self._leased_until[name] = now + self._lease_s
        return found

    def put(self, name: str, publication: Publication, *, now: float, stores: bool) -> bool:
        """False if it found no room. Nothing else tells a put that stored something from one that did not."""
        if not stores or name in self.objects or self._held.get(name, 0.0) > now:
            return True
        needed = allocated(self._items[publication.key].nbytes)
        if self.taken + needed > self.capacity:
            self._make_room(now)
            return False
        self.objects[name] = publication
        self.removed.pop(name, None)
        return True

    def remove(self, name: str, by: Removed, now: float) -> Outcome:
        """Without force."""
        if name not in self.objects:
            return Outcome.NOT_FOUND
        if self._leased_until.get(name, 0.0) > now:
            return Outcome.LEASED
        self._drop(name)
        self.removed[name] = by
        return Outcome.OK

    def hold(self, name: str, until: float) -> None:
        """A writer has died in the middle of a put: until then nobody stores anything there."""
        if name not in self.objects:
            self._held[name] = until

    def evict(self, names: list[str]) -> None:
        """These are gone."""
        for name in names:
            self._drop(name)

    def _make_room(self, now: float) -> None:
        """Evict at least one object."""
        leased = self._leased_until
        free = [name for name in self.objects if leased.get(name, 0.0) <= now]
        for name in sorted(free, key=lambda name: leased.get(name, 0.0)):
            self._drop(name)
            if self.taken <= _EVICTS_TO * self.capacity:
                return

    def _drop(self, name: str) -> None:
        del self.objects[name]
        self._leased_until.pop(name, None)
        self._on_gone(name)
