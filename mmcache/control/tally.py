"""What a client has read between two heartbeats, for the controller to know which entries are worth keeping."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from mmcache.control.messages import MAX_BATCH, MAX_USES, Used, Uses
from mmcache.key import EmbeddingKey

if TYPE_CHECKING:
    from mmcache.metrics import Counters

MAX_TALLIED: Final = MAX_BATCH
"""Most distinct keys: as many fit into one message."""


class Tally:
    """Counts keys that were found, each by itself, and those that were not, together. Thread-safe, bounded.

    It is kept until it is taken, also while there is no session.

    Args:
        counters: counts, as `untold`, what was found beyond the bound. The controller is not told of that.
    """

    def __init__(self, counters: Counters | None = None) -> None:
        self._counters = counters
        self._found: dict[EmbeddingKey, int] = {}
        self._missed = 0
        self._lock = threading.Lock()

    def found(self, keys: Iterable[EmbeddingKey]) -> None:
        """Each of these was read once more, from wherever it was."""
        untold = 0
        with self._lock:
            found = self._found
            for key in keys:
                count = found.get(key)
                if count is not None:
                    found[key] = count + 1
                elif len(found) < MAX_TALLIED:
                    found[key] = 1
                else:
                    untold += 1
        if untold and self._counters is not None:
            self._counters.add("untold", untold)

    def missed(self, count: int) -> None:
        """So many keys were asked for and not found, or had to be computed."""
        if count:
            with self._lock:
                self._missed += count

    def take(self, term: int, session: int) -> Used | None:
        """All since the last time, as a message of this session; None: nothing."""
        with self._lock:
            found, self._found = self._found, {}
            missed, self._missed = self._missed, 0
        if not found and not missed:
            return None
        by_scope: dict[bytes, tuple[list[bytes], list[int]]] = {}
        for key, count in found.items():
            digests, counts = by_scope.setdefault(key.scope.digest, ([], []))
            digests.append(key.mm_digest)
            counts.append(min(count, MAX_USES))
        groups = [Uses(scope, digests, counts) for scope, (digests, counts) in by_scope.items()]
        return Used(term, session, groups, min(missed, MAX_USES))
