"""The faults and the clock that a simulation gives to the store in memory. What it does otherwise: `test_contract`."""

from __future__ import annotations

import pytest
from buffers import Buffers, soon

from mmcache.store.base import Outcome, PutResult, ReadResult
from mmcache.store.memory import MemoryStore, MemoryWorld


@pytest.fixture
def world() -> MemoryWorld:
    return MemoryWorld(capacity=1000)


@pytest.fixture
def region(world: MemoryWorld) -> Buffers:
    return Buffers(MemoryStore(world), 1 << 16)


def test_a_name_that_another_writer_holds_takes_nothing(world: MemoryWorld, region: Buffers) -> None:
    world.in_progress.add("held")
    assert region.put({"held": b"mine"}) == [PutResult(Outcome.IN_PROGRESS)]
    assert region.read("held", 10)[0] == ReadResult(Outcome.IN_PROGRESS)
    world.in_progress.discard("held")
    assert region.put({"held": b"mine"}) == [PutResult(Outcome.OK)]


def test_an_injected_failure_ends_reads_and_puts_of_its_name_only(world: MemoryWorld, region: Buffers) -> None:
    region.put({"good": b"1", "bad": b"2"})
    world.failures["bad"] = Outcome.TRANSFER_FAILED, False
    assert region.read("bad", 10)[0] == ReadResult(Outcome.TRANSFER_FAILED, 0, settled=False)
    assert region.put({"bad": b"3"}) == [PutResult(Outcome.TRANSFER_FAILED, settled=False)]
    region.assert_readable("good", b"1")


def test_an_unavailable_world_serves_nothing_and_keeps_what_it_has(world: MemoryWorld, region: Buffers) -> None:
    region.put({"a": b"1"})
    world.available = False
    assert region.read("a", 10)[0] == ReadResult(Outcome.UNAVAILABLE)
    assert region.put({"b": b"1"}) == [PutResult(Outcome.UNAVAILABLE)]
    assert region.store.remove(["a"], deadline=soon()) == [Outcome.UNAVAILABLE]
    assert region.store.exists(["a"], deadline=soon()) == [False]
    assert region.store.sizes(["a"], deadline=soon()) == [None]
    world.available = True
    region.assert_readable("a", b"1")


def test_leases_end_by_the_worlds_clock() -> None:
    now = [0.0]
    world = MemoryWorld(lease_s=10.0, now=lambda: now[0])
    region = Buffers(MemoryStore(world), 1 << 16)
    region.put({"a": b"1"})
    region.assert_readable("a", b"1")
    now[0] = 9.9
    assert region.store.remove(["a"], deadline=soon()) == [Outcome.LEASED]
    now[0] = 10.0
    assert region.store.remove(["a"], deadline=soon()) == [Outcome.OK]


def test_segments_bound_an_object_and_capacity_bounds_all() -> None:
    region = Buffers(MemoryStore(MemoryWorld(capacity=1000, segment_bytes=600)), 1 << 16)
    assert region.put({"large": bytes(601)}) == [PutResult(Outcome.NO_SPACE)]
    assert region.put({"a": bytes(600), "b": bytes(401), "c": bytes(400)}) == [
        PutResult(Outcome.OK),
        PutResult(Outcome.NO_SPACE),
        PutResult(Outcome.OK),
    ]
