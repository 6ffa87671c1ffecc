"""Bytes of what was invalidated leave the store, whatever becomes of the process that removes them."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import psutil
import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of, plant, store_of

from mmcache import MMCache, Selector
from mmcache.control.batches import CommitEntry
from mmcache.control.messages import CommitStatus
from mmcache.key import EmbeddingKey

LONG = 120.0
LEASE_S = 2.0


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with made() as serving:
        yield serving


def made(**controller_store: str) -> Serving:
    return Serving(lease_ms=round(LEASE_S * 1000), controller_store={"lease": LEASE_S, **controller_store})


def put(cache: MMCache, keys: list[EmbeddingKey]) -> None:
    outcomes = cache.put_many([(key, torch.full((8,), float(number))) for number, key in enumerate(keys)])
    assert {outcome.status for outcome in outcomes} == {"stored"}


def names(serving: Serving) -> set[str]:
    """All that the store's master knows."""
    with closing(http.client.HTTPConnection(serving.store.metrics, timeout=20)) as connection:
        connection.request("GET", "/get_all_keys")
        return set(connection.getresponse().read().decode().split())


def wait_gone(serving: Serving, gone: list[str]) -> None:
    wait_until(lambda: names(serving).isdisjoint(gone), timeout=LONG, what="the removal of all of them")


def child(serving: Serving) -> psutil.Process | None:
    """The reaper's child of the controller, if there is one."""
    try:
        children = psutil.Process(serving.controller.process.pid).children()
        found = [one for one in children if "mmcache.controller.reaper.process" in one.cmdline()]
    except psutil.Error:
        return None
    return found[0] if found and found[0].status() != psutil.STATUS_ZOMBIE else None


def wait_child(serving: Serving) -> psutil.Process:
    """Have something removed, so that there is a child, attached; returns it."""
    cache, key = serving.connect(), key_of(f"first-{time.monotonic_ns()}")
    put(cache, [key])
    cache.invalidate(Selector.exactly(key), wait=True)
    wait_gone(serving, [name_of(cache, key)])
    found = child(serving)
    assert found is not None
    return found


def figures(cache: MMCache) -> dict[str, int]:
    return cache._channel.inspect(deadline=time.monotonic() + LONG)


def test_what_was_invalidated_leaves_the_store_and_nothing_else_does(serving: Serving) -> None:
    cache = serving.connect()
    old = [key_of(number, version="old") for number in range(300)]  # more than one batch
    other = [key_of(number, version="other") for number in range(20)]
    for start in range(0, 300, 100):
        put(cache, old[start : start + 100])
    put(cache, other)
    before = figures(cache)
    generation = cache.invalidate(Selector(version="old"), wait=True).number
    put(cache, old[:10])
    wait_gone(serving, [name_of(cache, key) for key in old])
    kept = {name_of(cache, key) for key in other} | {name_of(cache, key, generation) for key in old[:10]}
    assert kept <= names(serving)
    wait_until(lambda: figures(cache)["removals"] == 0, timeout=LONG, what="an empty backlog")
    after = figures(cache)
    assert sum(after.get(word, 0) - before.get(word, 0) for word in ("removed", "removal.gone")) == 300
    assert all(embedding is not None for embedding in cache.get_many(other + old[:10]))


def test_what_a_reader_holds_leaves_when_its_lease_has_ended(serving: Serving) -> None:
    cache, key = serving.connect(), key_of("leased")
    put(cache, [key])
    name, store = name_of(cache, key), store_of(cache)
    before = figures(cache).get("removal.leased", 0)

    def refused() -> bool:
        assert store.exists([name], deadline=time.monotonic() + LONG) == [True], "a leased object was removed"
        return figures(cache).get("removal.leased", 0) > before

    assert refused() is False  # that took a lease
    cache.invalidate(Selector.exactly(key), wait=True)
    wait_until(refused, timeout=LONG, what="a refusal")
    assert figures(cache)["removals"] == 1
    wait_gone(serving, [name])


def test_a_commit_that_came_too_late_loses_its_bytes(serving: Serving) -> None:
    cache, key = serving.connect(), key_of("late")
    cache.invalidate(Selector.exactly(key), wait=True)
    plant(cache, key, b"late" * 2000)
    name = name_of(cache, key)
    assert name in names(serving)
    late = CommitEntry(key, generation=0, token=0, nbytes=8000, cost_ms=1.0, info=b"")
    assert cache._channel.commit([late], deadline=time.monotonic() + LONG) == [CommitStatus.OUTDATED]
    wait_gone(serving, [name])


def test_when_the_child_is_killed_another_goes_on(serving: Serving) -> None:
    first = wait_child(serving)
    cache = serving.connect()
    old = [key_of(number, version="killed") for number in range(100)]
    put(cache, old)
    first.kill()
    cache.invalidate(Selector(version="killed"), wait=True)
    wait_gone(serving, [name_of(cache, key) for key in old])
    second = child(serving)
    assert second is not None
    assert second.pid != first.pid
    assert figures(cache)["reaper.ended"] >= 1


def test_while_the_child_stands_still_the_controller_serves_and_another_goes_on(serving: Serving) -> None:
    stopped = wait_child(serving)
    cache, other = serving.connect(), serving.connect()
    old = [key_of(number, version="stopped") for number in range(20)]
    put(cache, old)
    stopped.suspend()
    assert cache.invalidate(Selector(version="stopped"), wait=True).complete
    meanwhile = 0
    for number in range(20):
        key = key_of(number, version="meanwhile")
        put(cache, [key])
        assert other.get(key) is not None
        meanwhile += stopped.is_running()
    assert meanwhile > 0
    wait_gone(serving, [name_of(cache, key) for key in old])
    assert not stopped.is_running()


@pytest.mark.parametrize(
    ("number", "stands_still"),
    [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_the_child_ends_with_its_controller_however_that_ends(number: signal.Signals, stands_still: bool) -> None:
    with made() as serving:
        found = wait_child(serving)
        if stands_still:
            found.suspend()
        serving.controller.process.send_signal(number)
        serving.controller.process.wait(LONG)
        wait_until(lambda: not psutil.pid_exists(found.pid), timeout=LONG, what="the child's end")


def test_it_goes_on_after_the_master_was_away() -> None:
    with made() as serving:
        wait_child(serving)
        cache, key = serving.connect(), key_of("away")
        put(cache, [key])
        serving.store.master.kill()
        assert cache.invalidate(Selector.exactly(key), wait=True).complete
        wait_until(lambda: figures(cache).get("removal.unavailable", 0) > 0, timeout=LONG, what="a try in vain")
        assert figures(cache)["removals"] == 1
        serving.store.restart(serving.store.master)  # and has forgotten all, so there is nothing to remove
        wait_until(lambda: figures(cache)["removals"] == 0, timeout=LONG, what="an empty backlog")
        assert figures(cache)["removal.gone"] == 1


def test_it_goes_by_the_sidecar_where_the_controller_has_one() -> None:
    with made() as serving:
        serving.controller.kill()
        config = serving.controller._config
        config.write_text(config.read_text().replace('"master"', f'"sidecar": "{serving.sidecar.address}", "master"'))
        serving.controller.start()
        wait_child(serving)
        assert "attached to the store: sidecar" in serving.controller.log.read_text()


def test_without_it_the_bytes_are_left_to_the_store() -> None:
    with made() as serving:
        serving.controller.kill()
        os.environ["MMCACHE_CONTROLLER__REAPER"] = "false"
        try:
            serving.controller.start()
        finally:
            del os.environ["MMCACHE_CONTROLLER__REAPER"]
        cache, key = serving.connect(), key_of("kept")
        put(cache, [key])
        cache.invalidate(Selector.exactly(key), wait=True)
        wait_until(lambda: figures(cache).get("entry.outdated", 0) == 1, timeout=LONG, what="the sweep")
        assert (figures(cache)["removals"], child(serving)) == (0, None)
        assert name_of(cache, key) in names(serving)


WITHOUT_MOONCAKE = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mooncake" else find(name, *rest)
sys.argv = ["mmcache", "controller", "--bind", "tcp://127.0.0.1:0"]
from mmcache.cli.__main__ import main
main()
"""


def test_a_controller_without_mooncake_says_so_and_serves() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_MOONCAKE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("controller at tcp://")
    finally:
        process.terminate()
        _, log = process.communicate(timeout=LONG)
    assert process.returncode == 0
    assert log.count("(controller.reaper)") == 1
    assert "pip install 'mmcache[cpu]'" in log
