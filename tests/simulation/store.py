"""The store: objects by name, never replaced, gone at any time. A put that says 0 may have stored nothing."""

from __future__ import annotations

from typing import NamedTuple

from mmcache.key import EmbeddingKey


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


class Store:
    """Objects by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Publication] = {}
        self._held: dict[str, float] = {}

    def read(self, name: str) -> Publication | None:
        """What is there."""
        return self.objects.get(name)

    def put(self, name: str, publication: Publication, *, now: float, stores: bool) -> None:
        """Nothing tells a put that stored something from one that did not."""
        if stores and name not in self.objects and self._held.get(name, 0.0) <= now:
            self.objects[name] = publication

    def hold(self, name: str, until: float) -> None:
        """A writer has died in the middle of a put: until then nobody stores anything there."""
        if name not in self.objects:
            self._held[name] = until

    def evict(self, names: list[str]) -> None:
        """These are gone."""
        for name in names:
            del self.objects[name]
