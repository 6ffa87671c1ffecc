"""Finalisers of exports run anywhere, also in the thread that holds the pool's lock: nothing hangs, nothing is lost."""

from __future__ import annotations

import gc
import threading

import pytest
from waiting import Waiting

from mmcache.memory.block import BlockState
from mmcache.memory.deferring import DeferringLock

PAGE = 4096


class DropsWhenHashed(str):
    """A name whose look-up, under the pool's lock, ends the last reference to an export."""

    __slots__ = ("exports",)

    def __hash__(self):
        self.exports.clear()
        return super().__hash__()


def dropping(export):
    name = DropsWhenHashed("name")
    name.exports = [export]
    return name


@pytest.mark.parametrize("call", ["find", "forget"])
def test_an_export_that_ends_while_this_thread_holds_the_lock_frees_its_block(make_pool, call):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    name = dropping(pool.export(block))
    pool.release(block)
    getattr(pool, call)([name] if call == "find" else name)
    assert block.state is BlockState.FREED


def test_a_waiter_does_not_miss_an_export_that_ends_under_the_lock(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    name = dropping(pool.export(block))
    pool.release(block)
    waiting = Waiting(pool, [PAGE])
    pool.find([name])
    assert waiting.result()


def test_an_export_that_ends_under_the_lock_of_a_failing_call_is_not_lost(make_pool):
    class Fails(DropsWhenHashed):
        __slots__ = ()

        def __hash__(self):
            super().__hash__()
            raise RuntimeError("no hash")

    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    name = Fails("name")
    name.exports = [pool.export(block)]
    pool.release(block)
    with pytest.raises(RuntimeError):
        pool.find([name])
    assert block.state is BlockState.FREED


def test_the_collector_may_run_at_any_allocation_in_any_call(make_pool):
    pool = make_pool(8)
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # collections look at this test's objects only, or they would take minutes
    gc.set_threshold(1, 1, 1)
    try:
        for number in range(1500):
            if pool.stats()["held_blocks"] > 4:
                gc.collect()  # cycles that an earlier collection found alive
            block = pool.allocate(PAGE, deadline=0)
            cycle = [pool.export(block)]
            cycle.append(cycle)
            pool.unhold(pool.keep(str(number), block, None).block)
            del cycle
            pool.find([str(number - 1), str(number - 2)])
            pool.forget(str(number - 5))
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
    gc.collect()
    assert pool.stats()["held_blocks"] == 0


class Ledger:
    """Adds up what is settled; the smallest owner of a lock."""

    def __init__(self):
        self.total = 0
        self.lock: DeferringLock[int] = DeferringLock(self)

    def settle(self, deferred):
        while deferred:
            self.total += deferred.popleft()


def test_deferring_never_waits_for_the_holder_and_the_holder_settles():
    ledger = Ledger()
    with ledger.lock, ledger.lock.mutex:
        deferring = threading.Thread(target=ledger.lock.defer, args=(1,))
        deferring.start()
        deferring.join(20)
        assert not deferring.is_alive()
        ledger.lock.defer(2)
        assert ledger.total == 0
    assert ledger.total == 3
    ledger.lock.defer(4)
    assert ledger.total == 7


def test_nothing_deferred_is_lost_between_threads():
    ledger = Ledger()
    threads, times = 4, 5000
    begin = threading.Barrier(threads)

    def work():
        begin.wait()
        for _ in range(times):
            ledger.lock.defer(1)
            with ledger.lock, ledger.lock.mutex:
                pass

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert ledger.total == threads * times


def test_deferring_after_the_owner_is_gone_is_harmless():
    ledger = Ledger()
    lock = ledger.lock
    del ledger
    lock.defer(1)
