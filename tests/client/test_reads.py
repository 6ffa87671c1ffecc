"""Reads of one process share the store's work, and never each other's failures."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serving import Serving, key_of

from mmcache.client.local import LocalEntry


def test_threads_that_want_the_same_entry_at_once_read_it_once(serving: Serving) -> None:
    assert serving.connect().put(key_of("shared-read"), torch.ones(1 << 20)).readable
    reader = serving.connect(pool_bytes="64MiB")
    store = reader._attacher.require().store
    read_into, begun, go_on = store.read_into, threading.Event(), threading.Event()

    def slow_read_into(*arguments, **named):
        begun.set()
        assert go_on.wait(20)
        return read_into(*arguments, **named)

    store.read_into = slow_read_into
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(reader.get, key_of("shared-read"), timeout=30)
        assert begun.wait(20)
        others = [threads.submit(reader.get, key_of("shared-read"), timeout=30) for _ in range(7)]
        impatient = threads.submit(reader.get, key_of("shared-read"), timeout=0.05)
        assert impatient.result(20) is None
        go_on.set()
        found = [first.result(20), *(other.result(20) for other in others)]
    assert all(embedding is not None and embedding.tensor.sum() == 1 << 20 for embedding in found)
    assert reader.stats()["hit.store"] == 1
    assert reader.stats()["hit.local"] == 7
    assert reader.stats()["miss.deadline"] == 1


def test_a_get_that_starts_after_a_put_finds_it_though_another_read_missed_it_before(serving: Serving) -> None:
    reader, writer = serving.connect(), serving.connect()
    store = reader._attacher.require().store
    read_into, begun, go_on = store.read_into, threading.Event(), threading.Event()

    def read_then_pause(*arguments, **named):
        results = read_into(*arguments, **named)
        if not begun.is_set():
            begun.set()
            assert go_on.wait(20)
        return results

    store.read_into = read_then_pause
    with ThreadPoolExecutor(2) as threads:
        early = threads.submit(reader.get, key_of("late-put"), timeout=30)
        assert begun.wait(20)
        assert writer.put(key_of("late-put"), torch.ones(3)).readable
        late = threads.submit(reader.get, key_of("late-put"), timeout=30)
        go_on.set()
        assert early.result(20) is None
        assert late.result(20) is not None


def test_an_expectation_of_one_reader_does_not_make_another_miss(serving: Serving) -> None:
    assert serving.connect().put(key_of("two-views"), torch.ones(4, 4)).readable
    reader = serving.connect()
    with ThreadPoolExecutor(8) as threads:
        wrong = [threads.submit(reader.get, key_of("two-views"), like=torch.empty(5)) for _ in range(4)]
        right = [threads.submit(reader.get, key_of("two-views")) for _ in range(4)]
        assert all(future.result(20) is None for future in wrong)
        assert all(future.result(20) is not None for future in right)


def test_keys_given_twice_are_read_once_and_keep_their_places(serving: Serving) -> None:
    assert serving.connect().put(key_of("twice"), torch.ones(1)).readable
    reader = serving.connect()
    found = reader.get_many([key_of("twice"), key_of("never-put"), key_of("twice")])
    assert [embedding is not None for embedding in found] == [True, False, True]
    assert reader.stats()["hit.store"] == 1


@pytest.mark.parametrize(
    ("own_lease", "seconds", "kept"), [("1s", 9, True), ("1h", 11, False)], ids=["within 10 s", "longer than 10 s"]
)
def test_a_read_that_outlasts_the_lease_of_the_welcome_is_discarded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, own_lease: str, seconds: int, kept: bool
) -> None:
    key = key_of(f"lease-{own_lease}")
    assert serving.connect().put(key, torch.ones(3)).readable
    config = serving.write_config(f"lease-{own_lease}.yaml", lease=own_lease)  # the controller says 10 s
    reader = serving.connect(config, local_entries=False)
    # Each look at the store's clock is so many seconds later, so each read seems to last that long.
    monkeypatch.setattr("mmcache.store.mooncake._now", itertools.count(0, seconds).__next__)
    assert (reader.get(key) is not None) is kept
    assert reader.stats().get("miss.lease_expired", 0) == (0 if kept else 1)
    monkeypatch.undo()
    assert reader.get(key) is not None


@pytest.mark.parametrize("step", ["__init__", "embedding"])
def test_a_read_that_is_broken_off_half_way_leaves_no_block_held(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
) -> None:
    caplog.set_level(logging.CRITICAL)  # or pytest would keep the traceback, and with it all that the call had
    keys = [key_of(f"broken-off-{step}-{number}") for number in range(6)]
    assert all(result.readable for result in serving.connect().put_many([(key, torch.ones(9)) for key in keys]))
    reader = serving.connect(local_entries=False)
    calls = 0

    def fails(*_: object) -> None:
        nonlocal calls
        calls += 1
        raise MemoryError

    monkeypatch.setattr(LocalEntry, step, fails)
    assert reader.get_many(keys) == [None] * 6
    assert calls == 1
    assert reader.stats()["internal_error.MemoryError"] == 1
    assert reader.stats()["pool.held_blocks"] == 0


def test_a_name_that_reads_well_again_is_not_taken_for_damaged(serving: Serving) -> None:
    assert serving.connect().put(key_of("healed"), torch.ones(2)).readable
    reader = serving.connect(local_entries=False)
    [named] = reader._reader.wanted([key_of("healed")]) or []
    reader._reader.damaged[named.name] = None
    assert reader.get(key_of("healed")) is not None
    assert reader.put(key_of("healed"), torch.ones(2)).status == "duplicate"
