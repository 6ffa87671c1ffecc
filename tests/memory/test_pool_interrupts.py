"""An exception out of a signal's handler leaves no lock taken; a pool that it struck at work gives out nothing more."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from mmcache.errors import LifecycleError
from mmcache.memory.host import HostMemory
from mmcache.memory.pool import RegisteredPool


class Interrupt(BaseException):
    pass


def test_a_pool_that_was_interrupted_at_work_refuses_and_can_be_closed() -> None:
    memory = HostMemory(1 << 20)
    pool = RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping)
    kept = pool.allocate(4096, deadline=0.0)
    pool.unhold(pool.keep("kept", kept, None).block)
    export = pool.export(pool.allocate(4096, deadline=0.0))

    def struck(*_: object) -> None:
        raise Interrupt

    pool._extents.allocate_run = struck  # type: ignore[method-assign]
    with pytest.raises(Interrupt):
        pool.allocate(4096, deadline=0.0)
    assert pool.broken
    assert pool.find(["kept"]) == [None]
    with pytest.raises(LifecycleError, match="interrupt"):
        pool.allocate(4096, deadline=time.monotonic() + 20)
    pool.close()
    del export


def test_signals_that_raise_never_leave_the_lock_taken() -> None:
    memory = HostMemory(1 << 20)
    interrupts = 0

    def strike(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, strike)
    try:
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            pool = RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                while True:
                    pool.release(pool.allocate(4096, deadline=0.0))
            except (Interrupt, LifecycleError):
                interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            closing = threading.Thread(target=pool.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive(), f"the lock was left taken by interrupt {interrupts}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupts > 10
