"""A key together with the name that it has in the store."""

from __future__ import annotations

from typing import NamedTuple

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

    def at(self, generation: int, nbytes: int = 0) -> NamedKey:
        """The same key at the generation that the controller told."""
        named = self if generation == self.generation else NamedKey.of(self.key, self.lineage, generation)
        return named._replace(nbytes=nbytes)


class Names(dict[EmbeddingKey, NamedKey]):
    """The keys of one lineage at generation 0 with their names, each made when it is first looked up; bounded."""

    def __init__(self, lineage: str) -> None:
        super().__init__()
        self.lineage = lineage

    def __missing__(self, key: EmbeddingKey) -> NamedKey:
        if len(self) >= MAX_NAMES:
            self.clear()
        named = self[key] = NamedKey.of(key, self.lineage, generation=0)
        return named
