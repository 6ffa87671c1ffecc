"""The controller's generation table as a client has it: one lineage's, fed by pushes, asked by every read."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from mmcache.control.generations import GenerationTable
from mmcache.key import Scope
from mmcache.selector import Selector

_BUDGET: Final = 1 << 62
"""What becomes of a full table is the controller's to say."""


class Replica:
    """Generations in one lineage. The channel's thread feeds it; all threads may ask.

    `head` is the number of the invalidation up to which it has all that count. Names that were made with it are good
    while it has not changed.
    """

    __slots__ = ("_compact_at", "_lock", "_table", "head", "lineage")

    def __init__(self, lineage: str) -> None:
        self.lineage = lineage
        self.head = 0
        self._table = GenerationTable(_BUDGET)
        self._lock = threading.Lock()
        self._compact_at = 1024

    def generation(self, scope: Scope, digest: bytes) -> int:
        """The generation of the key of this scope whose mm_hash has this digest."""
        if not self._table.head:
            return 0
        with self._lock:
            return self._table.generation(scope, digest)

    def apply(self, invalidations: Iterable[tuple[int, Selector]]) -> None:
        """More of them, in the order of their numbers; those that it has already are left out."""
        with self._lock:
            for number, selector in invalidations:
                if number > self._table.head:
                    self._table.apply(number, selector)
            if len(self._table) > self._compact_at:
                self._table.compact()
                self._compact_at = 2 * len(self._table) + 1024
