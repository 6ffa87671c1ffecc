"""Waiting for room: in turn, with a deadline, and not for what can never be."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from waiting import Waiting, until

from mmcache.errors import LifecycleError, PoolExhausted

PAGE = 4096


def test_a_waiter_gets_what_is_released(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    waiting = Waiting(pool, [PAGE])
    assert not waiting.done
    pool.release(block)
    assert [given.address for given in waiting.result()] == [block.address]


@pytest.mark.parametrize("how", ["unhold", "forget", "export", "keep", "keep_many"])
def test_whatever_makes_room_wakes_the_waiter(make_pool, how):
    pool = make_pool(2)
    block = pool.allocate(2 * PAGE, deadline=0)
    export = pool.export(block) if how == "export" else None
    if how == "export":
        pool.release(block)
    if how == "forget":
        pool.keep("name", block, None)
        export = pool.export(block)
        pool.unhold(block)
    if how == "keep":
        pool.release(block)
        pool.keep("name", pool.allocate(PAGE, deadline=0), None)
        block = pool.allocate(PAGE, deadline=0)
    waiting = Waiting(pool, [PAGE])
    assert not waiting.done
    if how == "unhold":
        pool.keep("name", block, None)
        pool.unhold(block)
    elif how == "forget":
        pool.forget("name")
        assert not waiting.done
    elif how == "keep":
        pool.keep("name", block, None)  # a duplicate: its block is released
    elif how == "keep_many":
        kept = pool.keep_many([("name", block, PAGE, None)])  # the rest of its block is given back
    del export
    assert waiting.result()
    assert how != "keep_many" or kept


def test_waiters_are_served_in_the_order_they_came(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    queue = [Waiting(pool, [PAGE]) for _ in range(5)]
    for number, waiting in enumerate(queue):
        pool.release(block)
        [block] = waiting.result()
        assert not any(later.done for later in queue[number + 1 :])


def test_a_large_request_is_not_starved_by_small_ones_that_would_fit(make_pool):
    pool = make_pool(4)
    blocks = pool.allocate_many([PAGE] * 3, deadline=0)
    large = Waiting(pool, [4 * PAGE])
    small = [Waiting(pool, [PAGE]) for _ in range(3)]
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(PAGE, deadline=0)
    assert caught.value.fits
    for block in blocks:
        assert not large.done
        pool.release(block)
    [block] = large.result()
    assert not any(waiting.done for waiting in small)
    pool.release(block)
    assert all(waiting.result() for waiting in small)


def test_a_large_request_is_not_starved_by_hits_on_hot_entries(make_pool):
    pool = make_pool(4)
    for name in "abcd":
        pool.unhold(pool.keep(name, pool.allocate(PAGE, deadline=0), None).block)
    [held] = pool.find("a")
    large = Waiting(pool, [4 * PAGE])
    for name in "bcda" * 3:  # always one of them held
        [found] = pool.find(name)
        held = found or held
    del held, found
    assert large.result()


def test_at_the_deadline_the_wait_ends_and_the_next_in_line_is_served(make_pool):
    pool = make_pool(2)
    held = pool.allocate(PAGE, deadline=0)
    large = Waiting(pool, [2 * PAGE], seconds=0.3)
    small = Waiting(pool, [PAGE])
    with pytest.raises(PoolExhausted) as caught:
        large.result()
    assert caught.value.fits
    assert small.result()
    pool.release(held)
    assert pool.stats()["waiters"] == 0


def test_a_request_that_timed_out_takes_nothing_later(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    started = time.monotonic()
    with pytest.raises(PoolExhausted):
        pool.allocate(PAGE, deadline=started + 0.05)
    assert time.monotonic() >= started + 0.05
    pool.release(block)
    assert pool.stats()["used"] == 0


def test_what_can_never_fit_is_refused_at_once(make_pool):
    pool = make_pool(4)
    for sizes in ([5 * PAGE], [PAGE] * 5, [1] * 5):
        with pytest.raises(PoolExhausted) as caught:
            pool.allocate_many(sizes, deadline=time.monotonic() + 1000)
        assert not caught.value.fits


def test_quarantine_counts_against_what_can_ever_fit(make_pool):
    pool = make_pool(5)
    blocks = pool.allocate_many([PAGE] * 5, deadline=0)
    pool.quarantine(blocks[1])
    for block in blocks[:1] + blocks[2:]:
        pool.release(block)
    for sizes in ([4 * PAGE], [PAGE] * 5):  # four pages are left, three of them in one piece
        with pytest.raises(PoolExhausted) as caught:
            pool.allocate_many(sizes, deadline=time.monotonic() + 1000)
        assert not caught.value.fits
    assert pool.allocate(3 * PAGE, deadline=0)


def test_a_waiter_whose_room_is_quarantined_is_told_and_the_next_one_served(make_pool):
    pool = make_pool(4)
    blocks = pool.allocate_many([PAGE] * 4, deadline=0)
    large, small = Waiting(pool, [3 * PAGE]), Waiting(pool, [PAGE])
    pool.release(blocks[0])
    pool.quarantine(blocks[2])
    with pytest.raises(PoolExhausted) as caught:
        large.result()
    assert not caught.value.fits
    assert small.result()


def test_the_queue_is_bounded(make_pool):
    pool = make_pool(1, max_waiters=2)
    pool.allocate(PAGE, deadline=0)
    queue = [Waiting(pool, [PAGE]) for _ in range(2)]
    with pytest.raises(PoolExhausted, match="2 requests wait"):
        pool.allocate(PAGE, deadline=time.monotonic() + 1000)
    pool.close()
    assert all(isinstance(waiting.error, LifecycleError) for waiting in queue if waiting.done)


def test_closing_sends_waiters_away(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    queue = [Waiting(pool, [PAGE]) for _ in range(3)]
    pool.close()
    for waiting in queue:
        with pytest.raises(LifecycleError):
            waiting.result()
    with pytest.raises(LifecycleError):
        pool.allocate(PAGE, deadline=0)
    pool.release(block)
    assert pool.stats()["used"] == 0


class Interrupted(BaseException):
    pass


def test_an_interrupted_waiter_leaves_nothing_behind(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    main = threading.main_thread().ident

    def interrupt(*_):
        raise Interrupted

    def send():
        until(lambda: pool.stats()["waiters"] == 1)
        signal.pthread_kill(main, signal.SIGUSR1)

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Thread(target=send, daemon=True).start()
        with pytest.raises(Interrupted):
            pool.allocate(PAGE, deadline=time.monotonic() + 1000)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert pool.stats()["waiters"] == 0
    pool.release(block)
    assert pool.stats()["used"] == 0
