"""An error that a pool raises keeps neither the pool nor what its caller uses alive: no cycle, so no collection."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from mmcache.errors import LifecycleError, MMCacheError, PoolExhausted
from mmcache.memory.pool import RegisteredPool
from tests.memory.conftest import PAGE, MakePool
from tests.memory.waiting import until


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def refuse(pool: RegisteredPool, nbytes: int, error: type[MMCacheError], *, deadline: float = 0.0) -> None:
    try:
        pool.allocate(nbytes, deadline=deadline)
    except error:
        return
    raise AssertionError(f"no {error.__name__} was raised")


def meet_every_error(pool: RegisteredPool) -> None:
    refuse(pool, 5 * PAGE, PoolExhausted)
    block = pool.allocate(4 * PAGE, deadline=0.0)
    refuse(pool, PAGE, PoolExhausted)
    refuse(pool, PAGE, PoolExhausted, deadline=time.monotonic() + 0.001)
    waiter = threading.Thread(target=refuse, args=(pool, PAGE, LifecycleError), kwargs={"deadline": 1e9})
    waiter.start()
    until(lambda: pool.stats()["waiters"] == 1)
    pool.close()
    waiter.join()
    pool.release(block)
    refuse(pool, PAGE, LifecycleError)


def test_no_error_keeps_the_pool_alive(make_pool: MakePool) -> None:
    pool = make_pool(4)
    meet_every_error(pool)
    reference = weakref.ref(pool)
    del pool
    assert reference() is None
