"""A request for blocks, which may have to wait its turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mmcache.memory.block import Block


class Request:
    """What one call asks for and, once it is settled, what came of it.

    The pool settles it under its lock, maybe from a finaliser, which may run in the very thread that waits here. So the
    wait is on a bare lock: an Event has a lock inside, which that thread may hold already.
    """

    __slots__ = ("_turn", "blocks", "largest", "refused", "reserved", "settled", "sizes", "total")

    def __init__(self, sizes: Sequence[int], reserved: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        """What each block must hold, in bytes."""
        self.reserved = tuple(reserved)
        """What each takes up."""
        self.total = sum(reserved)
        self.largest = max(sizes)
        self.settled = False
        self.blocks: list[Block] = []
        self.refused = False
        """Settled without blocks, since it can never have them."""
        self._turn = threading.Lock()
        self._turn.acquire()

    def settle(self, blocks: list[Block], *, refused: bool) -> None:
        """Give it the blocks, or say that it gets none, and wake whoever waits for it."""
        self.blocks = blocks
        self.refused = refused
        self.settled = True
        self._turn.release()

    def wait(self, seconds: float) -> None:
        """Sleep until it is settled, but no longer than that."""
        self._turn.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))
