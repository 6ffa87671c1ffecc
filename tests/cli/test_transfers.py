"""Transfers of a command: bounded, ended on every path, and patient with a cluster that is silent for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from cluster import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Serving, key_of

from mmcache import MMCache
from mmcache.cli.warm import transfers
from mmcache.cli.warm.transfers import AT_ONCE, ClusterSilent, Job, Transfers, pool_for
from mmcache.errors import CorruptEntry, EntryDropped, StoreUnavailable


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=16 << 20, durable=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cache(serving: Serving) -> MMCache:
    return serving.connect(strict=True)


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, 12), max_size=20))
def test_all_are_done_once(cache: MMCache, sizes: list[int]) -> None:
    done: list[int] = []
    jobs = [Job(nbytes, lambda number=number: done.append(number)) for number, nbytes in enumerate(sizes)]  # type: ignore[misc]
    Transfers(cache, pool_bytes=20).carry_out(jobs, lambda: None)
    assert sorted(done) == list(range(len(sizes)))


@pytest.mark.parametrize(
    ("sizes", "most"),
    [([6, 6], 1), ([5, 5, 1], 2), ([12, 1], 1), ([0] * 6, AT_ONCE)],
    ids=["too many bytes", "as many as fit", "one that is larger than all that may be", "too many"],
)
def test_few_are_under_way_at_a_time(cache: MMCache, sizes: list[int], most: int) -> None:
    """Each goes on until the thread that begins them has waited for one to end, and begins no more before that."""
    changed = threading.Condition()
    begun: list[int] = []
    waits = 0
    under_way = highest = 0

    def work() -> None:
        nonlocal under_way, highest
        with changed:
            under_way += 1
            highest = max(highest, under_way)
            begun.append(1)
            waited = waits
            assert changed.wait_for(lambda: waits > waited, timeout=60)
            under_way -= 1

    def tick() -> None:
        nonlocal waits
        with changed:
            waits += 1
            changed.notify_all()

    Transfers(cache, pool_bytes=20).carry_out([Job(nbytes, work) for nbytes in sizes], tick)
    assert (len(begun), highest) == (len(sizes), most)


def test_what_one_raises_ends_the_rest_once_those_that_run_have_ended(cache: MMCache) -> None:
    begun = threading.Semaphore(0)
    ended: list[int] = []

    def slow(number: int) -> None:
        begun.release()
        assert carried.stopping.wait(60)
        ended.append(number)

    def failing() -> None:
        for _ in range(AT_ONCE - 1):
            assert begun.acquire(timeout=60)
        raise MemoryError("full")

    carried = Transfers(cache, pool_bytes=1 << 20)
    slow_ones = [Job(1, lambda number=number: slow(number)) for number in range(AT_ONCE - 1)]  # type: ignore[misc]
    later = [Job(1, lambda: ended.append(99)) for _ in range(10)]
    with pytest.raises(MemoryError, match="full"):
        carried.carry_out([*slow_ones, Job(1, failing), *later], lambda: None)
    assert sorted(ended) == list(range(AT_ONCE - 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mmcache-transfer")]


@pytest.mark.parametrize(
    ("error", "calls"),
    [
        (CorruptEntry("magic", "no entry"), 1),
        (EntryDropped("invalidated", "not published"), 1),
        (EntryDropped("uncommitted", "not published"), 3),
        (StoreUnavailable("in a hurry"), 3),
    ],
)
def test_what_is_wrong_with_one_entry_is_told_soon(cache: MMCache, error: Exception, calls: int) -> None:
    made: list[int] = []

    def attempt() -> None:
        made.append(1)
        raise error

    with pytest.raises(type(error)):
        Transfers(cache, pool_bytes=1).patiently(attempt)
    assert len(made) == calls


def test_a_controller_that_is_away_for_a_while_is_waited_for_and_no_longer(
    serving: Serving, cache: MMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving.controller.kill()
    monkeypatch.setattr(transfers, "PATIENCE_S", 0.5)
    with pytest.raises(ClusterSilent, match="Run it again when it does: it goes on where it ended"):
        Transfers(cache, pool_bytes=1).patiently(lambda: cache.lookup([key_of(1)], timeout=1.0))

    monkeypatch.setattr(transfers, "PATIENCE_S", 120.0)
    tried = threading.Event()
    found: list[object] = []

    def attempt() -> None:
        tried.set()
        found.extend(cache.lookup([key_of(1)], timeout=1.0))

    waiting = threading.Thread(target=Transfers(cache, pool_bytes=1).patiently, args=(attempt,))
    waiting.start()
    assert tried.wait(60)
    serving.controller.start()
    waiting.join(120)
    assert found == [None]
    wait_until(lambda: cache.mark().number >= 0, timeout=60, what="a session")


def test_one_that_is_being_ended_waits_no_longer(serving: Serving, cache: MMCache) -> None:
    carried = Transfers(cache, pool_bytes=1)
    carried.stopping.set()
    serving.controller.kill()
    try:
        with pytest.raises(ClusterSilent):
            carried.patiently(lambda: cache.lookup([key_of(1)], timeout=1.0))
    finally:
        serving.controller.start()


def test_a_pool_has_room_for_the_largest_twice() -> None:
    assert pool_for(100 << 20, 32 << 20) == 201 << 20
    assert pool_for(0, 32 << 20) == 32 << 20
