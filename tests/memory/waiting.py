"""Threads that wait for a pool, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from mmcache.memory.pool import Block, RegisteredPool

PATIENCE = 20.0
"""Seconds after which a test has failed; nothing waits that long in one that passes."""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.0005)


class Waiting:
    """`allocate_many` in a thread of its own; returns once it stands in the queue (or is done)."""

    def __init__(self, pool: RegisteredPool, sizes: Sequence[int], *, seconds: float = PATIENCE) -> None:
        self.blocks: list[Block] | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(pool, sizes, seconds), daemon=True)
        before = pool.stats()["waiters"]
        self._thread.start()
        until(lambda: self.done or pool.stats()["waiters"] == before + 1)

    def _run(self, pool: RegisteredPool, sizes: Sequence[int], seconds: float) -> None:
        try:
            self.blocks = pool.allocate_many(sizes, deadline=time.monotonic() + seconds)
        except Exception as error:  # noqa: BLE001  raised again in `result`
            self.error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> list[Block]:
        """The blocks, which must be there without more ado."""
        self._thread.join(PATIENCE)
        assert self.done, "still waiting"
        if self.error is not None:
            raise self.error
        assert self.blocks is not None
        return self.blocks
