"""What a schedule changes in the code that it runs: clocks that it reads by itself, and bounds too large to meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from mmcache.control import calls, exchange, session
from mmcache.control.replica import Replica
from mmcache.controller import announcements, directory, invalidations, shelves
from mmcache.controller.capacity import evictions
from mmcache.selector import Selector

_SHELVES = 3


class CurrentTime:
    """In place of the module `time`, for the client whose turn it is."""

    def __init__(self) -> None:
        self.reading: Callable[[], float] = lambda: 0.0

    def monotonic(self) -> float:
        """What that client's clock says."""
        return self.reading()


class TightReplica(Replica):
    """Compacts as soon as it can."""

    __slots__ = ()

    def apply(self, new: Iterable[tuple[int, Selector]]) -> None:
        """As a replica does, and then compact it."""
        super().apply(new)
        with self._lock:
            self._table.compact()


@contextmanager
def simulated(time: CurrentTime, *, per_push: int) -> Iterator[None]:
    """While a schedule runs."""
    with ExitStack() as stack:
        for place, name, value in (
            (calls, "time", time),
            (exchange, "time", time),
            (session, "Replica", TightReplica),
            (invalidations, "MAX_PUSH", per_push),
            (announcements, "MAX_PUSH", per_push),
            (invalidations, "_COMPACT_AT", 2),
            (shelves, "shelf_of", lambda digest: digest[0] % _SHELVES),
            (directory, "SHELVES", _SHELVES),
            (evictions, "DOUBTED_S", 3.0),
            (evictions, "LEASE_MARGIN_S", 0.05),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield
