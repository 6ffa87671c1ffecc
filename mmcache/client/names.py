"""A key together with the name that it has in the store."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from mmcache.control.replica import Replica
from mmcache.key import EmbeddingKey, store_name

MAX_NAMES = 16_384


class NamedKey(NamedTuple):
    """A key at one generation, in the world of one controller.

    `nbytes` is the object's size where the directory told it, else 0.
    """

    key: EmbeddingKey
    name: str
    lineage: str
    generation: int
    nbytes: int = 0

    @classmethod
    def of(cls, key: EmbeddingKey, lineage: str, generation: int) -> NamedKey:
        """The key with its name."""
        return cls(key, store_name(key, lineage=lineage, generation=generation), lineage, generation)

    def at(self, generation: int, nbytes: int = 0, *, lineage: str | None = None) -> NamedKey:
        """The same key at the generation that a controller told, which is one of its own lineage."""
        lineage = lineage or self.lineage
        same = (generation, lineage) == (self.generation, self.lineage)
        named = self if same else NamedKey.of(self.key, lineage, generation)
        return named._replace(nbytes=nbytes)


class Names(dict[EmbeddingKey, NamedKey]):
    """Keys with their names, as long as a replica stays as it is; each made when it is first looked up. Bounded.

    Args:
        replica: says the keys' generations.
        before: names from before it changed: most of them are the same still.
    """

    def __init__(self, replica: Replica, before: Mapping[EmbeddingKey, NamedKey] = MappingProxyType({})) -> None:
        super().__init__()
        self.replica = replica
        self.head = replica.head  # first: what it may gain while names are made is not promised by it
        self._before = before

    def __missing__(self, key: EmbeddingKey) -> NamedKey:
        if len(self) >= MAX_NAMES:
            self.clear()
            self._before = {}
        generation = self.replica.generation(key.scope, key.mm_digest)
        named = self._before.get(key)
        if named is None or named.generation != generation or named.lineage != self.replica.lineage:
            named = NamedKey.of(key, self.replica.lineage, generation)
        self[key] = named
        return named

    def renewed(self, replica: Replica) -> Names:
        """The names now."""
        self._before = {}  # one generation of them is enough
        return Names(replica, self)
