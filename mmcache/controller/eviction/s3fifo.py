"""S3-FIFO (Yang et al., SOSP 2023): new entries wait in a small queue, and only those that are used there stay."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Final

from mmcache.controller.eviction.ghosts import Ghosts
from mmcache.controller.eviction.policy import MOST_PASSED_OVER, Policy

SMALL: Final = 0
MAIN: Final = 1
SMALL_SHARE: Final = 0.1
"""Of the bytes that can be chosen from: beyond it, victims come from the small queue."""
GHOST_SHARE: Final = 0.9
"""So many bytes are remembered that left the small queue, to all those that are there; see `GHOSTS`."""


class SmallFirst(Policy):
    """What policies with a small queue have in common.

    A new entry begins in the small queue, first in, first out. Once it gets to the front it goes to the main part if it
    was used enough meanwhile, and otherwise it is the victim, and remembered as a ghost. A ghost that is inserted again
    begins in the main part. So what is used once passes through a tenth of the room and disturbs nothing else.
    """

    GHOSTS: ClassVar[int] = 1
    """So many names are remembered at most for each that is there, and so many times `GHOST_SHARE` of the bytes."""

    def __init__(self, queues: int) -> None:
        super().__init__(queues)
        self._ghosts = Ghosts()

    @property
    def ghosts(self) -> int:
        """How many names are remembered that are gone: no more than `GHOSTS` says."""
        return len(self._ghosts)

    def _add(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        back = self._ghosts.take(name)
        slot = self._queues.add(name, nbytes, SMALL)
        self._revalue(slot, cost_ms)
        if back:
            self._promote(slot)

    def _choose(self) -> int | None:
        queues = self._queues
        for passed in range(MOST_PASSED_OVER + 1):
            small = queues.nbytes_in[SMALL]
            main = sum(queues.nbytes_in) - small
            if main and small <= SMALL_SHARE * (small + main):
                slot = self._choose_from_main(last=passed == MOST_PASSED_OVER)
                if slot is not None:
                    return slot
                self.looked_at += 1
            elif small:
                slot = queues.first(SMALL)
                if passed == MOST_PASSED_OVER or not self._used_enough(slot):
                    return slot
                self._promote(slot)
                self.looked_at += 1
            else:
                return None
        raise AssertionError("the last one is taken whatever it is")

    def _forget(self, name: bytes, slot: int) -> None:
        nbytes = self._queues.nbytes[slot]
        if self._queues.queue[slot] == SMALL:
            self._ghosts.add(name, nbytes)
        self._ghosts.trim(self.GHOSTS * GHOST_SHARE * self._nbytes, self.GHOSTS * (len(self._queues.slots) - 1))

    @abstractmethod
    def _used_enough(self, slot: int) -> bool:
        """Whether what is at the front of the small queue is to stay."""

    @abstractmethod
    def _promote(self, slot: int) -> None:
        """Move an entry from the small queue, or from nowhere, to the main part."""

    @abstractmethod
    def _choose_from_main(self, *, last: bool) -> int | None:
        """A victim from the main part; None: it had to be passed over, which must not be when it is the last."""


class S3Fifo(SmallFirst):
    """S3-FIFO. The main queue gives each entry another round for each use, up to three. Blind to costs.

    Before the first choice there is no telling who will be used: what comes then is shared out over both queues, so
    that they have their sizes once room is wanted. (libCacheSim, S3-FIFO's reference, does so.)
    """

    MOST_USES: Final = 3
    ENOUGH: Final = 2

    def __init__(self) -> None:
        super().__init__(2)
        self._filling = True

    def _add(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        small, main = self._queues.nbytes_in
        super()._add(name, nbytes, cost_ms)
        slot = self._queues.slots[name]
        if self._filling and small > SMALL_SHARE * (small + main) and self._queues.queue[slot] == SMALL:
            self._promote(slot)

    def _choose(self) -> int | None:
        slot = super()._choose()
        self._filling = self._filling and slot is None
        return slot

    def _access(self, slot: int, count: int) -> None:
        uses = self._queues.uses
        uses[slot] = min(uses[slot] + count, self.MOST_USES)

    def _used_enough(self, slot: int) -> bool:
        return self._queues.uses[slot] >= self.ENOUGH

    def _promote(self, slot: int) -> None:
        self._queues.uses[slot] = 0
        self._queues.move(slot, MAIN)

    def _choose_from_main(self, *, last: bool) -> int | None:
        slot = self._queues.first(MAIN)
        if last or not self._queues.uses[slot]:
            return slot
        self._queues.uses[slot] -= 1
        self._queues.move(slot, MAIN)
        return None
