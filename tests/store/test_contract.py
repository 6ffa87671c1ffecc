"""What every store does, run on each: in memory, on Mooncake through a sidecar, and on Mooncake embedded."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from buffers import Buffers, fresh, soon
from cluster import wait_until
from stores import CAPACITY, Attach

from mmcache.errors import LifecycleError, StoreUnavailable
from mmcache.store.base import Outcome, PutResult, ReadResult, Store


@pytest.fixture(scope="session")
def region(store: Store) -> Buffers:
    return Buffers(store, 32 << 20)


def test_what_was_put_is_read_back_whole(region: Buffers) -> None:
    name, content = fresh(), os.urandom(70_001)
    assert region.put({name: content}) == [PutResult(Outcome.OK)]
    region.assert_readable(name, content)


def test_another_client_reads_it(region: Buffers, attach: Attach) -> None:
    name, content = fresh(), os.urandom(4096)
    region.put({name: content})
    Buffers(attach(), 4096).assert_readable(name, content)


def test_a_larger_buffer_is_told_the_size_and_keeps_its_tail(region: Buffers) -> None:
    name, content = fresh(), os.urandom(5000)
    region.put({name: content})
    result, seen = region.read(name, 9000)
    assert result == ReadResult(Outcome.OK, 5000)
    assert seen == content + b"." * 4000


def test_a_buffer_too_small_is_told_the_size_and_stays_untouched(region: Buffers) -> None:
    name = fresh()
    region.put({name: os.urandom(5000)})
    result, seen = region.read(name, 4999)
    assert result == ReadResult(Outcome.TOO_SMALL, 5000)
    assert seen == b"." * 4999


def test_what_is_not_there_is_not_found(region: Buffers) -> None:
    result, _ = region.read(fresh(), 4096)
    assert result == ReadResult(Outcome.NOT_FOUND)


def test_what_exists_is_not_replaced(region: Buffers) -> None:
    name, first, second = fresh(), os.urandom(4096), os.urandom(4096)
    region.put({name: first})
    assert region.put({name: second}) == [PutResult(Outcome.OK)]
    region.assert_readable(name, first)


def test_outcomes_keep_the_order_of_a_mixed_batch(region: Buffers) -> None:
    small, large, absent = fresh(), fresh(), fresh()
    region.put({small: b"s" * 100, large: b"l" * 1000})
    addresses = [region.take(500) for _ in range(3)]
    results = region.store.read_into([absent, large, small], addresses, [500] * 3, deadline=soon())
    assert results == [ReadResult(Outcome.NOT_FOUND), ReadResult(Outcome.TOO_SMALL, 1000), ReadResult(Outcome.OK, 100)]
    assert ctypes.string_at(addresses[2], 100) == b"s" * 100


def test_a_batch_of_several_calls_comes_back_in_order(region: Buffers) -> None:
    objects = {fresh(): os.urandom(256 + index) for index in range(1100)}
    assert set(region.put(objects)) == {PutResult(Outcome.OK)}
    sizes = [len(content) for content in objects.values()]
    addresses = [region.take(size) for size in sizes]
    results = region.store.read_into(list(objects), addresses, sizes, deadline=soon())
    assert [result.nbytes for result in results] == sizes
    assert [ctypes.string_at(*place) for place in zip(addresses, sizes, strict=True)] == list(objects.values())


def test_an_empty_batch_is_nothing(store: Store) -> None:
    assert store.put_from([], [], [], deadline=soon()) == []
    assert store.read_into([], [], [], deadline=soon()) == []
    assert store.exists([], deadline=soon()) == []
    assert store.remove([], deadline=soon()) == []


def test_sizes_and_existence_of_present_and_absent(region: Buffers) -> None:
    present, absent = fresh(), fresh()
    region.put({present: bytes(777)})
    assert region.store.sizes([absent, present], deadline=soon()) == [None, 777]
    assert region.store.exists([absent, present], deadline=soon()) == [False, True]


def test_a_read_object_is_leased_and_can_be_removed_when_that_ends(region: Buffers) -> None:
    name, content, absent = fresh(), os.urandom(4096), fresh()
    region.put({name: content})
    region.assert_readable(name, content)
    assert region.store.remove([name, absent], deadline=soon()) == [Outcome.LEASED, Outcome.NOT_FOUND]
    wait_until(
        lambda: region.store.remove([name], deadline=soon()) == [Outcome.OK], timeout=20, what="the end of the lease"
    )
    assert region.read(name, 4096)[0].outcome is Outcome.NOT_FOUND


def test_a_deadline_that_has_passed_times_out_and_sends_nothing(region: Buffers) -> None:
    name = fresh()
    late = time.monotonic() - 1
    assert region.put({name: b"x" * 100}, deadline=late) == [PutResult(Outcome.TIMED_OUT)]
    assert region.store.read_into([name], [region.take(100)], [100], deadline=late) == [ReadResult(Outcome.TIMED_OUT)]
    assert region.store.remove([name], deadline=late) == [Outcome.TIMED_OUT]
    assert region.store.exists([name], deadline=soon()) == [False]


def test_an_object_larger_than_the_store_does_not_fit(attach: Attach) -> None:
    region = Buffers(attach(), CAPACITY + 4096)
    name = fresh()
    address = region.take(CAPACITY + 4096)
    result = region.store.put_from([name], [address], [CAPACITY + 4096], deadline=soon())
    assert result == [PutResult(Outcome.NO_SPACE)]
    assert region.store.exists([name], deadline=soon()) == [False]


def test_a_full_store_says_so_and_keeps_what_it_took(attach: Attach) -> None:
    region = Buffers(attach(), 2 * CAPACITY)
    objects = {fresh(): os.urandom(4 << 20) for _ in range(CAPACITY // (4 << 20) + 2)}
    results = dict(zip(objects, region.put(objects), strict=True))
    assert set(results.values()) == {PutResult(Outcome.OK), PutResult(Outcome.NO_SPACE)}
    kept = [name for name, result in results.items() if result.outcome is Outcome.OK]
    region.assert_readable(kept[-1], objects[kept[-1]])
    refused = [name for name in objects if name not in kept]
    assert not any(region.store.exists(refused, deadline=soon()))


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 62])
def test_an_impossible_region_is_refused(attach: Attach, nbytes: int) -> None:
    store = attach()
    with pytest.raises((ValueError, StoreUnavailable), match="byte"):
        store.allocate_region(nbytes)


def test_threads_share_a_store(attach: Attach) -> None:
    region = Buffers(attach(), 16 << 20)
    batches = [{fresh(): os.urandom(10_000 + thread) for _ in range(20)} for thread in range(8)]

    def put_and_read(batch: dict[str, bytes]) -> list[bytes]:
        sizes = [len(content) for content in batch.values()]
        sources = [region.filled(content) for content in batch.values()]
        targets = [region.take(size) for size in sizes]
        region.store.put_from(list(batch), sources, sizes, deadline=soon())
        region.store.read_into(list(batch), targets, sizes, deadline=soon())
        return [ctypes.string_at(*place) for place in zip(targets, sizes, strict=True)]

    with ThreadPoolExecutor(8) as threads:
        for batch, seen in zip(batches, threads.map(put_and_read, batches), strict=True):
            assert seen == list(batch.values())


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["a", "a"], [(0, 8), (8, 8)]),  # Mooncake fills one of two buffers and says OK to both
        (["a"], [(-4096, 8)]),
        (["a"], [(0, (32 << 20) + 1)]),
        (["a"], [(0, 0)]),  # stores nothing
        (["a", "b"], [(0, 8)]),
    ],
    ids=["equal names", "before the region", "beyond the region", "no bytes", "lengths differ"],
)
def test_impossible_batches_never_reach_the_store(
    region: Buffers, names: list[str], places: list[tuple[int, int]]
) -> None:
    addresses = [region.region.address + offset for offset, _ in places]
    sizes = [size for _, size in places]
    for method in (region.store.put_from, region.store.read_into):
        with pytest.raises(ValueError, match=r"names|part of a region|one byte"):
            method(names, addresses, sizes, deadline=soon())


def use_all(store: Store, address: int) -> list[type[Exception] | None]:
    """Call every method; what each raised."""
    calls: list[Callable[[], object]] = [
        lambda: store.allocate_region(4096),
        lambda: store.read_into(["a"], [address], [8], deadline=soon()),
        lambda: store.put_from(["a"], [address], [8], deadline=soon()),
        lambda: store.sizes(["a"], deadline=soon()),
        lambda: store.exists(["a"], deadline=soon()),
        lambda: store.remove(["a"], deadline=soon()),
    ]
    raised: list[type[Exception] | None] = []
    for call in calls:
        try:
            call()
            raised.append(None)
        except LifecycleError as error:
            raised.append(type(error))
    return raised


def test_a_closed_store_refuses_every_call_and_its_memory_stays(attach: Attach) -> None:
    store = attach()
    address = Buffers(store, 4096).filled(b"held by a tensor")
    store.close()
    store.close()
    assert use_all(store, address) == [LifecycleError] * 6
    assert ctypes.string_at(address, 16) == b"held by a tensor"
    ctypes.memset(address, 0, 4096)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(region: Buffers) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            raised = use_all(region.store, region.region.address)
            region.store.close()
            status = 0 if raised == [LifecycleError] * 6 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    name = fresh()
    region.put({name: b"parent"})
    region.assert_readable(name, b"parent")
