"""Cutting batches into calls, and bounding what is under way."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from buffers import soon
from cluster import wait_until
from hypothesis import given
from hypothesis import strategies as st

from mmcache.store import mooncake
from mmcache.store.base import Outcome
from mmcache.store.batches import MAX_CHUNK_BYTES, MAX_CHUNK_OBJECTS, ObjectLimiter, chunks
from mmcache.store.mooncake import MooncakeStore

SIZES = st.one_of(
    st.lists(st.integers(0, 2 * MAX_CHUNK_BYTES), max_size=20),
    st.integers(0, 1600).map(lambda count: [0] * count),
)


@given(SIZES)
def test_chunks_cover_a_batch_in_order_within_their_bounds(sizes: list[int]) -> None:
    parts = [sizes[part] for part in chunks(sizes)]
    assert list(itertools.chain.from_iterable(parts)) == sizes
    for part in parts:
        assert 0 < len(part) <= MAX_CHUNK_OBJECTS
        assert len(part) == 1 or sum(part) <= MAX_CHUNK_BYTES


@given(SIZES)
def test_no_two_neighbouring_chunks_would_fit_in_one_call(sizes: list[int]) -> None:
    parts = [sizes[part] for part in chunks(sizes)]
    for part, following in itertools.pairwise(parts):
        assert len(part) == MAX_CHUNK_OBJECTS or sum(part) + following[0] > MAX_CHUNK_BYTES


def in_thread(limiter: ObjectLimiter, count: int, order: list[int]) -> threading.Thread:
    """Take `count` in a thread that is in the queue when this returns."""

    def take() -> None:
        if limiter.take(count, time.monotonic() + 30):
            order.append(count)

    thread = threading.Thread(target=take)
    queued = len(limiter._queue)
    thread.start()
    deadline = time.monotonic() + 10
    while len(limiter._queue) == queued:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return thread


def test_a_large_call_is_not_starved_by_small_ones_behind_it() -> None:
    limiter = ObjectLimiter(10)
    assert limiter.take(6, 0.0)
    order: list[int] = []
    threads = [in_thread(limiter, count, order) for count in (10, 1)]
    assert not limiter.take(4, 0.0), "overtook those who wait"
    limiter.give_back(6)
    threads[0].join(10)
    assert order == [10]
    limiter.give_back(10)
    threads[1].join(10)
    assert order == [10, 1]


def test_a_deadline_ends_the_wait_and_leaves_no_trace() -> None:
    limiter = ObjectLimiter(10)
    assert limiter.take(10, 0.0)
    order: list[int] = []
    assert not limiter.take(1, time.monotonic() + 0.05)
    thread = in_thread(limiter, 5, order)
    limiter.give_back(10)
    thread.join(10)
    assert order == [5]
    assert limiter.take(5, 0.0)
    assert not limiter.take(1, 0.0)


def test_the_bound_holds_under_threads() -> None:
    limiter = ObjectLimiter(20)
    lock = threading.Lock()
    under_way = most = 0

    def work(count: int) -> None:
        nonlocal under_way, most
        for _ in range(200):
            assert limiter.take(count, time.monotonic() + 30)
            with lock:
                under_way += count
                most = max(most, under_way)
            with lock:
                under_way -= count
            limiter.give_back(count)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 3, 7, 12, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert 12 <= most <= 20
    assert limiter.take(20, 0.0)


def test_more_than_the_limit_is_refused_rather_than_waited_for() -> None:
    with pytest.raises(ValueError, match="never"):
        ObjectLimiter(10).take(11, time.monotonic() + 30)


class HeldBinding:
    """Mooncake's client, as far as transfers go: each one lasts until it is let go, and all succeed."""

    def __init__(self) -> None:
        self.under_way: list[int] = []
        """Objects of each call that is under way."""
        self.most = 0
        self.let_go = threading.Event()
        self._lock = threading.Lock()

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [1] * len(names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        with self._lock:
            self.under_way.append(len(names))
            self.most = max(self.most, sum(self.under_way))
        assert self.let_go.wait(30)
        with self._lock:
            self.under_way.remove(len(names))
        return sizes

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.batch_get_into(names, addresses, sizes)
        return [0] * len(names)


def test_all_stores_of_a_process_together_stay_below_where_transfers_begin_to_fail() -> None:
    """Above 2,048 objects for one peer, Mooncake's transfers over TCP fail."""
    binding, count, callers = HeldBinding(), 700, 8
    outcomes: list[Outcome] = []

    def transfer(store: MooncakeStore, method: str) -> None:
        first = store.allocate_region(count).address
        names, addresses = [str(number) for number in range(count)], list(range(first, first + count))
        results = getattr(store, method)(names, addresses, [1] * count, deadline=soon())
        outcomes.extend(result.outcome for result in results)

    stores = [MooncakeStore(binding, kind="embedded", peers=(), lease_s=60.0) for _ in range(2)]
    pairs = itertools.product(stores, ("read_into", "put_from"))
    threads = [threading.Thread(target=transfer, args=pair) for pair in [*pairs] * (callers // 4)]
    for thread in threads:
        thread.start()
    try:
        wait_until(
            lambda: len(binding.under_way) + len(mooncake._limiter._queue) == callers,
            timeout=20,
            what="every caller under way or in the queue",
        )
    finally:
        binding.let_go.set()
        for thread in threads:
            thread.join(30)
    assert MAX_CHUNK_OBJECTS < binding.most < 2048
    assert outcomes == [Outcome.OK] * (count * callers)
