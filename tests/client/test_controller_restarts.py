"""What outlives a controller that is killed: entries, invalidations, and what is still to be waited for."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import AsyncMMCache, Embedding, MMCache, Selector

TTL = 2.0
LONG = 30.0


@pytest.fixture
def durable() -> Iterator[Serving]:
    with Serving(durable=True, session_ttl=TTL) as serving:
        yield serving


def restart(serving: Serving) -> None:
    serving.controller.kill()
    serving.controller.start()


def wait_connected(cache: MMCache) -> None:
    wait_until(lambda: cache._channel.wait_fresh(0.1) is not None, timeout=LONG, what="a session")


def put(cache: MMCache, name: str, value: float) -> None:
    assert cache.put(key_of(name), torch.full((8,), value)).status == "stored"


def test_entries_are_read_while_it_is_away_and_afterwards(durable: Serving) -> None:
    cache, reader = durable.connect(), durable.connect(local_entries=False)
    put(cache, "kept", 1.0)
    durable.controller.kill()
    assert reader.get(key_of("kept")) is not None, "names are good for as long as the session was"
    durable.controller.start()
    wait_connected(reader)
    assert reader.get(key_of("kept")) is not None
    assert reader.stats().get("miss.not_fresh", 0) == 0


def test_what_was_invalidated_stays_so(durable: Serving) -> None:
    cache = durable.connect()
    put(cache, "old", 1.0)
    cache.invalidate(Selector.exactly(key_of("old")))
    restart(durable)
    wait_connected(cache)
    assert cache.get(key_of("old")) is None
    newcomer = durable.connect()
    assert newcomer.get(key_of("old")) is None
    put(newcomer, "old", 2.0)
    wait_connected(cache)
    assert cache.get(key_of("old")) is not None


def test_what_was_pending_is_pending_until_nobody_can_serve_it(durable: Serving) -> None:
    cache = durable.connect()
    worker = durable.start_worker("compute_all", keys=1, seed=0, batch=1)
    assert worker.read()["ready"]
    os.kill(worker.process.pid, signal.SIGSTOP)
    made = cache.invalidate(Selector(mm_hash="x"), wait=True, timeout=0.3)
    assert not made.complete
    began = time.monotonic()
    restart(durable)
    wait_connected(cache)
    again = cache.invalidate(Selector(mm_hash="y"), wait=True, timeout=LONG)
    assert (again.number, again.complete) == (made.number + 1, True)
    assert time.monotonic() - began >= TTL, "the term before may have had sessions that this one knows nothing of"
    os.kill(worker.process.pid, signal.SIGCONT)


def test_it_refuses_to_serve_when_its_database_has_gone_back(durable: Serving) -> None:
    cache = durable.connect()
    durable.controller.process.terminate()
    durable.controller.process.wait()
    older = durable.folder / "older"
    older.mkdir()
    for path in durable.folder.glob("controller.db*"):
        shutil.copy(path, older / path.name)
    durable.controller.start()
    wait_connected(cache)
    cache.invalidate(Selector(mm_hash="x"))
    wait_until(lambda: cache.mark().number == 1, timeout=LONG, what="the push")
    durable.controller.kill()
    for path in durable.folder.glob("controller.db*"):
        path.unlink()
    for path in older.iterdir():
        shutil.copy(path, durable.folder / path.name)
    durable.controller.start()
    assert durable.controller.process.wait(LONG) != 0
    assert "older than it was" in durable.controller.log.read_text()


def figure(cache: MMCache, name: str) -> int:
    return cache._channel.inspect(deadline=time.monotonic() + LONG).get(name, 0)


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_what_is_computed_meanwhile_is_computed_once(durable: Serving, kind: str) -> None:
    """The encoder claims it again in its next session; who asks afterwards waits for it, and gets it."""
    encoder, other = durable.connect(), durable.connect(wait_timeout=LONG)
    computing, finish = threading.Event(), threading.Event()
    key = key_of(f"computed-{kind}")

    def encode() -> torch.Tensor:
        computing.set()
        assert finish.wait(LONG)
        return torch.full((8,), 1.0)

    async def compute_in_a_loop() -> Embedding:
        async with AsyncMMCache(encoder) as cache:
            return await cache.get_or_compute(key, lambda: asyncio.to_thread(encode))

    def compute() -> Embedding:
        return encoder.get_or_compute(key, encode) if kind == "threads" else asyncio.run(compute_in_a_loop())

    def must_not_encode() -> torch.Tensor:
        raise AssertionError("it was computed twice")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(compute)
        assert computing.wait(LONG)
        restart(durable)
        wait_until(lambda: encoder.stats().get("control.claim_kept") == 1, timeout=LONG, what="the claim")
        wait_connected(other)
        second = threads.submit(other.get_or_compute, key, must_not_encode)
        wait_until(lambda: other.stats().get("wait") == 1, timeout=LONG, what="the other one's wait")
        finish.set()
        assert first.result(LONG).source == "computed"
        assert second.result(LONG).source == "store"
    assert encoder.stats()["put.stored"] == 1
    assert other.stats().get("computed", 0) == 0
    assert [figure(other, name) for name in ("claims", "waiters", "acquire.granted")] == [0, 0, 1]


def test_who_computes_is_claimed_for_even_where_the_controller_lives_and_only_the_session_ends(
    durable: Serving,
) -> None:
    """A process that is stopped for longer than its session lives, and goes on."""
    worker = durable.start_worker("compute_all", keys=1, seed=0, batch=1, stall_after=0)
    assert worker.read()["ready"]
    worker.go()
    assert worker.read()["stalled"]
    other = durable.connect(wait_timeout=LONG)
    os.kill(worker.process.pid, signal.SIGSTOP)
    wait_until(lambda: figure(other, "session.expired") == 1, timeout=LONG, what="the end of its session")
    os.kill(worker.process.pid, signal.SIGCONT)
    wait_until(lambda: figure(other, "claims") == 1, timeout=LONG, what="the claim")
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(other.get_or_compute, key_of(0), lambda: torch.zeros(1))
        wait_until(lambda: other.stats().get("wait") == 1, timeout=LONG, what="the other one's wait")
        worker.go()
        assert worker.finish()["computed"] == [0]
        assert second.result(LONG).source == "store"


def test_what_another_lineage_answers_is_named_in_that_one(fresh_serving: Serving) -> None:
    """A call that began under one controller and is answered by the next, whose database is another."""
    cache, other = fresh_serving.connect(), fresh_serving.connect()
    before = cache.mark().lineage
    key = key_of("between")
    acquire = cache._channel.acquire

    def acquire_from_the_next(*arguments: Any, **named: Any) -> Any:
        restart(fresh_serving)
        for one in (cache, other):  # the end of a session is not known at once
            wait_until(lambda one=one: one.mark().lineage not in ("", before), timeout=LONG, what="the next session")
            wait_connected(one)
        assert other.put(key, torch.full((8,), 2.0)).status == "stored"
        return acquire(*arguments, **named)

    cache._channel.acquire = acquire_from_the_next  # type: ignore[method-assign]
    found = cache.get_or_compute(key, lambda: torch.full((8,), 1.0))
    assert (float(found.tensor[0]), found.source) == (2.0, "store")
