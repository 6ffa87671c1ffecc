"""The directory follows what becomes of the store, and takes nothing for itself by looking."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of, plant, store_of

from mmcache import MMCache, Selector
from mmcache.key import EmbeddingKey
from mmcache.store.base import Outcome

LONG = 120.0
LEASE_S = 2.0


def made(**store: str) -> Serving:
    """A cluster whose controller lists its store every second."""
    serving = Serving(lease_ms=round(LEASE_S * 1000), durable=True, controller_store={"lease": LEASE_S})
    serving.controller.kill()
    config = json.loads(serving.controller._config.read_text())
    config["store"] |= {"metrics": serving.store.metrics, **store}
    config["controller"]["reconcile_every"] = 1.0
    serving.controller._config.write_text(json.dumps(config))
    serving.controller.start()
    return serving


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with made() as serving:
        yield serving


@pytest.fixture
def cache(serving: Serving) -> Iterator[MMCache]:
    with MMCache.connect(serving.config) as cache:
        yield cache


def put(cache: MMCache, keys: list[EmbeddingKey]) -> None:
    outcomes = cache.put_many([(key, torch.full((8,), float(number))) for number, key in enumerate(keys)])
    assert {outcome.status for outcome in outcomes} == {"stored"}


def figures(cache: MMCache) -> dict[str, int]:
    return cache._channel.inspect(deadline=time.monotonic() + LONG)


def wait_listings(cache: MMCache, count: int) -> None:
    before = figures(cache).get("listing", 0)
    wait_until(lambda: figures(cache).get("listing", 0) >= before + count, timeout=LONG, what="listings")


def remove(cache: MMCache, names: list[str]) -> list[Outcome]:
    return store_of(cache).remove(names, deadline=time.monotonic() + LONG)


def known(cache: MMCache, keys: list[EmbeddingKey]) -> list[bool]:
    return [found is not None for found in cache.lookup(keys)]


def test_what_was_removed_behind_its_back_is_forgotten_and_nothing_else(serving: Serving, cache: MMCache) -> None:
    keys = [key_of(number, version="behind") for number in range(20)]
    put(cache, keys)
    wait_listings(cache, 2)
    assert known(cache, keys) == [True] * 20
    names = [name_of(cache, key) for key in keys[:10]]
    wait_until(lambda: set(remove(cache, names)) <= {Outcome.OK, Outcome.NOT_FOUND}, timeout=LONG, what="the removal")
    wait_until(lambda: known(cache, keys) == [False] * 10 + [True] * 10, timeout=LONG, what="the next listing")
    assert all(embedding is not None for embedding in cache.get_many(keys[10:]))
    said = "the store has lost"
    wait_until(lambda: said in serving.controller.log.read_text(), timeout=LONG, what="a word of it")


def test_a_listing_takes_no_lease(cache: MMCache) -> None:
    """Listed more often than leases last, an object that every listing leased could never be removed."""
    [key] = keys = [key_of("unleased")]
    put(cache, keys)
    name = name_of(cache, key)
    wait_listings(cache, 5)
    wait_until(lambda: remove(cache, [name]) == [Outcome.OK], timeout=LONG, what="the end of the writer's own lease")


def test_what_nobody_reads_any_more_is_removed_though_nobody_told_of_it(cache: MMCache) -> None:
    key = key_of("orphan")
    cache.invalidate(Selector.exactly(key), wait=True)
    plant(cache, key, b"orphan" * 1000)
    before = figures(cache).get("removed", 0)
    wait_until(lambda: figures(cache).get("removed", 0) > before, timeout=LONG, what="the removal")
    assert remove(cache, [name_of(cache, key)]) == [Outcome.NOT_FOUND]


def test_after_a_restart_the_directory_knows_again_what_is_there(serving: Serving, cache: MMCache) -> None:
    keys = [key_of(number, version="before") for number in range(300)]  # more than one batch
    put(cache, keys[:150])
    put(cache, keys[150:])
    gone, old = keys[:3], keys[3:6]
    for key in old:
        cache.invalidate(Selector.exactly(key), wait=True)
    before = cache.lookup(keys)
    names = [name_of(cache, key) for key in gone]
    serving.controller.kill()
    wait_until(lambda: set(remove(cache, names)) <= {Outcome.OK, Outcome.NOT_FOUND}, timeout=LONG, what="the removal")
    serving.controller.start()
    wait_until(lambda: cache._channel.wait_fresh(LONG) is not None, timeout=LONG, what="another session")
    wait_until(lambda: sum(known(cache, keys)) == 294, timeout=LONG, what="the directory")
    assert known(cache, keys) == [False] * 6 + [True] * 294
    assert cache.lookup(keys[6:]) == before[6:]
    with MMCache.connect(serving.config) as reader:  # which has none of them in its own memory
        assert all(embedding is not None for embedding in reader.get_many(keys[6:200]))
        assert reader.get_many(keys[:6]) == [None] * 6


def test_when_the_child_is_killed_another_lists(serving: Serving, cache: MMCache) -> None:
    wait_listings(cache, 1)
    for child in psutil.Process(serving.controller.process.pid).children():
        child.kill()
    wait_listings(cache, 1)


def test_a_master_that_has_forgotten_all_leaves_an_empty_directory() -> None:
    with made() as serving:
        cache = serving.connect()
        keys = [key_of(number) for number in range(10)]
        put(cache, keys)
        serving.store.master.kill()
        serving.store.restart(serving.store.master)
        wait_until(lambda: known(cache, keys) == [False] * 10, timeout=LONG, what="the next listing")
        log = serving.controller.log.read_text()
        assert log.count("the reaper, which lists what the store has, failed") <= 2


def test_without_a_list_the_directory_stays_as_it_is() -> None:
    with made(metrics="127.0.0.1:1") as serving:
        cache = serving.connect()
        keys = [key_of(number) for number in range(10)]
        put(cache, keys)
        said = "failed: http://127.0.0.1:1/get_all_keys: Connection refused"
        wait_until(lambda: said in serving.controller.log.read_text(), timeout=LONG, what="a word of it")
        assert known(cache, keys) == [True] * 10
        assert "listing" not in figures(cache)
