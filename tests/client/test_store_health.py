"""After the first failure a call costs no waiting: what is known to be down is left alone, and tried by probes only."""

from __future__ import annotations

import time

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, store_of

from mmcache import MMCache
from mmcache.client.breaker import FLOOR_S, PATIENCE_S
from mmcache.client.health import FORGET_AFTER_S

LONG = 30.0
MANY = 200


def serves_again(cache: MMCache) -> None:
    wait_until(lambda: cache.stats()["store.open"] == 0, timeout=LONG, what="a probe that is answered")
    number = time.monotonic_ns()
    wait_until(
        lambda: cache.put(key_of(number), torch.ones(10), timeout=5.0).readable, timeout=LONG, what="a put afterwards"
    )
    wait_until(lambda: cache.get(key_of(number), timeout=5.0) is not None, timeout=LONG, what="a get afterwards")


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
@pytest.mark.parametrize("part", ["master", "sidecar"])
def test_while_a_part_of_the_store_is_stopped_only_the_first_call_waits(
    fresh_serving: Serving, attach: str, part: str
) -> None:
    cache = fresh_serving.connect(attach=attach, local_entries=False)
    assert cache.put(key_of("there"), torch.ones(10)).readable
    stopped = {"master": fresh_serving.store.master, "sidecar": fresh_serving.sidecar}[part]
    with stopped.stopped():
        wait_until(lambda: cache.get(key_of("there"), timeout=0.5) is None, timeout=LONG, what="a call in vain")
        wait_until(lambda: cache.stats()["store.open"] == 1, timeout=LONG, what="the breaker's opening")
        before = cache.stats().get("miss.unavailable", 0)
        for _ in range(MANY):  # with this deadline they could take hours
            assert cache.get(key_of("there"), timeout=60.0) is None
            assert cache.put(key_of("new"), torch.ones(10), timeout=60.0) == ("dropped", "unavailable")
            assert cache.get_or_compute(key_of("new"), lambda: torch.ones(10), timeout=60.0).source == "computed"
        assert cache.stats()["miss.unavailable"] == before + 2 * MANY
    serves_again(cache)
    assert cache.stats()["breaker.store"] >= 1


def test_a_caller_with_very_little_time_takes_the_store_from_nobody_until_its_call_is_overdue(
    fresh_serving: Serving,
) -> None:
    cache = fresh_serving.connect(local_entries=False)
    assert cache.put(key_of("there"), torch.ones(10)).readable
    short = (PATIENCE_S + FLOOR_S) / 2
    with fresh_serving.sidecar.stopped():
        started = time.monotonic()
        assert cache.get(key_of("there"), timeout=short) is None
        stats, took = cache.stats(), time.monotonic() - started
        assert stats["store.open"] == 0 or took >= FLOOR_S  # this process may have stood still meanwhile
        assert stats["miss.deadline"] == 1
        wait_until(
            lambda: cache.get(key_of(time.monotonic_ns()), timeout=short) is None and cache.stats()["store.open"] == 1,
            timeout=LONG,
            what="the breaker's opening, by calls that have little time",
        )
        for _ in range(MANY):
            assert cache.get(key_of("there"), timeout=60.0) is None
    serves_again(cache)


def test_names_that_could_not_be_read_are_left_alone_for_seconds_while_the_store_serves_others(
    fresh_serving: Serving,
) -> None:
    """One of two owners is stopped: the store answers, but not for what that one holds."""
    near = fresh_serving.store.start_owner(64 << 20)
    writer = fresh_serving.connect(local_entries=False)
    keys = [key_of(number) for number in range(40)]
    assert all(result.readable for result in writer.put_many([(key, torch.ones(1000)) for key in keys]))
    cache = fresh_serving.connect(
        fresh_serving.write_config("near.yaml", sidecar=near.address), local_entries=False, pool_bytes=32 << 20
    )
    assert all(embedding is not None for embedding in cache.get_many(keys))
    with fresh_serving.sidecar.stopped():
        found: list[bool] = []
        while all(found) or not any(found):  # until one was read from each owner, before the master gives one up
            wait_until(lambda: cache.stats()["store.open"] == 0, timeout=LONG, what="a probe that is answered")
            found.append(cache.get(keys[len(found)], timeout=1.0) is not None)
        lost = keys[found.index(False)]
        wait_until(lambda: cache.stats()["store.open"] == 0, timeout=LONG, what="a probe that is answered")
        started = time.monotonic()
        assert cache.get(lost, timeout=60.0) is None
        assert time.monotonic() - started < LONG
        assert cache.get(keys[found.index(True)], timeout=60.0) is not None
    serves_again(cache)


def test_a_name_is_read_again_once_its_time_is_over(serving: Serving) -> None:
    cache = serving.connect(local_entries=False)
    key = key_of("forgiven")
    assert cache.put(key, torch.ones(10)).readable
    name = cache._reader.wanted([key])[0].name  # type: ignore[index]
    health = cache._parts.health
    health.remember([name])
    assert cache.get(key) is None
    assert cache.stats()["miss.unavailable"] == 1
    health.forgive([name])
    assert cache.get(key) is not None
    health.remember([name])
    wait_until(lambda: cache.get(key) is not None, timeout=FORGET_AFTER_S + LONG, what="the end of the name's time")
    assert not health.unreachable


def test_a_probe_closes_the_breaker_also_when_the_pool_or_the_store_has_no_room(serving: Serving) -> None:
    cache = serving.connect(pool_bytes=1 << 20)
    held = cache.empty((200_000,))
    rest = []
    while not cache.stats().get("empty_outside_pool.PoolExhausted"):
        rest.append(cache.empty((1,)))
    cache._parts.health.failed(time.monotonic() - 1.0)
    wait_until(lambda: cache.stats()["store.open"] == 0, timeout=LONG, what="a probe that is answered")
    assert cache.stats()["breaker.store"] == 1
    assert "breaker.probe_failed" not in cache.stats()
    del held, rest


def test_a_cache_is_closed_while_its_breaker_is_open_and_while_a_probe_hangs(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(local_entries=False)
    store = store_of(cache)
    with fresh_serving.store.master.stopped():
        wait_until(lambda: cache.get(key_of(1), timeout=0.5) is None, timeout=LONG, what="a call in vain")
        wait_until(lambda: cache.stats()["store.open"] == 1, timeout=LONG, what="the breaker's opening")
        assert not store.reachable()
        started = time.monotonic()
        cache.close()
        assert time.monotonic() - started < LONG
