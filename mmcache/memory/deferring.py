"""A mutex for state that finalisers change too."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Settles(Protocol[T]):
    """The owner of a `DeferringLock`."""

    def settle(self, deferred: deque[T]) -> None:
        """Do what was deferred, and empty the queue. Called with the lock held."""


class DeferringLock(Generic[T]):
    """A mutex, and a queue of what finalisers left to be done under it. Entered as `with lock, lock.mutex:`.

    The garbage collector runs finalisers in any thread at any time, also in the thread that holds this lock, so a
    finaliser must not wait for it. It calls `defer`, which never blocks: the owner's `settle` then runs under the lock,
    at once if nobody holds it, else when its holder lets go. Nothing that was deferred is left behind: whoever finds
    the lock taken has queued its item before, and whoever lets go looks at the queue after.

    A signal's handler may raise anywhere, KeyboardInterrupt say. The mutex itself is taken and let go by the
    interpreter, without a gap in which it could be left taken; but what was being changed may be half done: `broken`.

    The owner is referred to weakly: no cycle, so it ends with its last user and not with some later collection.
    """

    def __init__(self, owner: Settles[T]) -> None:
        self.mutex = threading.Lock()
        self.broken = False
        """Whether an interrupt struck under the lock: what it guards is not to be relied on."""
        self._owner = weakref.ref(owner)
        self._deferred: deque[T] = deque()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self.broken = True
        if self._deferred:
            self._settle_if_free()

    def defer(self, item: T) -> None:
        """For finalisers: have `item` settled without waiting for anyone."""
        self._deferred.append(item)
        self._settle_if_free()

    def _settle_if_free(self) -> None:
        while self._deferred and self.mutex.acquire(False):
            try:
                owner = self._owner()
                if owner is None or self.broken:  # all that could be settled went with it
                    self._deferred.clear()
                else:
                    owner.settle(self._deferred)
            finally:
                self.mutex.release()
