"""Invalidation as callers see it, through a real controller and store."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import AsyncMMCache, ControllerUnavailable, InvalidKey, Mark, MMCache, Selector

TTL = 2.0


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    """Of this file's own: its many caches are closed with it."""
    with Serving() as serving:
        yield serving


def tensor(value: float) -> torch.Tensor:
    return torch.full((64,), value)


def value_of(cache: MMCache, name: str) -> float | None:
    embedding = cache.get(key_of(name))
    return None if embedding is None else float(embedding.tensor[0])


def test_what_was_invalidated_no_client_gets_any_more_once_that_is_complete(serving: Serving) -> None:
    encoder, reader = serving.connect(), serving.connect()
    assert encoder.put(key_of("old"), tensor(1.0)).status == "stored"
    assert encoder.put(key_of("other"), tensor(2.0)).status == "stored"
    assert value_of(reader, "old") == 1.0
    made = encoder.invalidate(Selector.exactly(key_of("old")), reason="a test", wait=True)
    assert made.complete
    assert made.waiting == 0
    for cache in (reader, encoder):
        assert value_of(cache, "old") is None
        assert value_of(cache, "other") == 2.0
    assert encoder.put(key_of("old"), tensor(3.0)).status == "stored", "it may be published anew"
    assert value_of(reader, "old") == 3.0


def test_get_or_compute_computes_again(serving: Serving) -> None:
    cache, other = serving.connect(), serving.connect()
    assert float(cache.get_or_compute(key_of("again"), lambda: tensor(1.0)).tensor[0]) == 1.0
    other.invalidate(Selector.exactly(key_of("again")), wait=True)
    assert float(cache.get_or_compute(key_of("again"), lambda: tensor(2.0)).tensor[0]) == 2.0
    assert float(other.get_or_compute(key_of("again"), lambda: tensor(3.0)).tensor[0]) == 2.0


@pytest.mark.parametrize("how", ["claimed", "marked"])
def test_what_began_before_an_invalidation_is_never_read_after_it(serving: Serving, how: str) -> None:
    encoder, operator = serving.connect(), serving.connect()
    key = key_of(f"late-{how}")

    def encode() -> torch.Tensor:
        operator.invalidate(Selector.exactly(key), wait=True)
        return tensor(1.0)

    if how == "claimed":
        assert float(encoder.get_or_compute(key, encode).tensor[0]) == 1.0, "whoever computed it has it"
        assert encoder.stats()["put.invalidated"] == 1
    else:
        mark = encoder.mark()
        assert encoder.put(key, encode(), since=mark) == ("dropped", "invalidated")
    assert encoder.get(key) is None
    assert operator.get(key) is None
    assert encoder.put(key, tensor(2.0), since=encoder.mark()).status == "stored"


def test_a_mark_without_a_session_vouches_for_nothing(serving: Serving) -> None:
    cache = serving.connect()
    assert cache.put(key_of("unmarked"), tensor(1.0), since=Mark("", -1)) == ("dropped", "invalidated")


def test_who_waits_for_what_is_invalidated_computes_or_waits_anew(serving: Serving) -> None:
    reader, operator = serving.connect(), serving.connect()
    worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1, stall_after=0)
    assert worker.read()["ready"]
    worker.go()
    assert worker.read()["stalled"]
    key = key_of(0)

    def waits() -> bool:
        return operator._channel.inspect(deadline=time.monotonic() + 5)["waiters"] == 1

    async def main() -> float:
        waiting = asyncio.ensure_future(
            asyncio.to_thread(reader.get_or_compute, key, lambda: tensor(7.0), timeout=60.0)
        )
        await asyncio.to_thread(wait_until, waits, timeout=20, what="the wait")
        await asyncio.to_thread(operator.invalidate, Selector.exactly(key))
        return float((await waiting).tensor[0])

    assert asyncio.run(main()) == 7.0


def test_a_stopped_client_is_waited_for_as_long_as_it_may_serve_and_named(serving: Serving) -> None:
    operator = serving.connect()
    worker = serving.start_worker("compute_all", keys=1, seed=0, batch=1)
    assert worker.read()["ready"]
    os.kill(worker.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    made = operator.invalidate(Selector(mm_hash="nobody's"), wait=True, timeout=0.5)
    assert not made.complete
    assert [str(worker.process.pid) in one.name for one in made.awaited] == [True]
    assert 0 < made.awaited[0].most_ms <= 1050 * TTL
    made = operator.invalidate(Selector(mm_hash="nobody's"), wait=True, timeout=20.0)
    assert made.complete
    assert time.monotonic() - began < 1.1 * TTL + 5.0
    os.kill(worker.process.pid, signal.SIGCONT)


def test_all_of_a_version_of_a_model(serving: Serving) -> None:
    cache, reader = serving.connect(), serving.connect()
    keys = {name: key_of("scoped", version=name) for name in ("2", "3")}
    for key in keys.values():
        cache.put(key, tensor(1.0))
    cache.invalidate(Selector(model="encoder", version="3"), wait=True)
    assert reader.get(keys["2"]) is not None
    assert reader.get(keys["3"]) is None


def test_bad_input_is_refused_and_nothing_is_invalidated(serving: Serving) -> None:
    cache = serving.connect()
    cache.put(key_of("kept"), tensor(1.0))
    with pytest.raises(InvalidKey, match="everything"):
        cache.invalidate(Selector())
    with pytest.raises(InvalidKey, match="reason"):
        cache.invalidate(Selector(mm_hash="x"), reason="r" * 513)
    with pytest.raises(InvalidKey, match="mm_hash"):
        Selector(mm_hash="x" * 10_000_000)
    assert value_of(cache, "kept") == 1.0


def test_without_a_controller_it_raises_also_without_strict(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect()
    fresh_serving.controller.kill()
    with pytest.raises((ControllerUnavailable, TimeoutError)):
        cache.invalidate(Selector(mm_hash="x"), timeout=1.0)


def test_for_asyncio(serving: Serving, tmp_path: Path) -> None:
    async def main() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            mark = cache.mark()
            assert (await cache.put(key_of("async"), tensor(1.0), since=mark)).status == "stored"
            assert (await cache.invalidate(Selector.exactly(key_of("async")), wait=True)).complete
            assert await cache.get(key_of("async")) is None
            assert (await cache.put(key_of("async"), tensor(1.0), since=mark)).reason == "invalidated"

    asyncio.run(main())


def test_functions_hear_of_what_was_invalidated_and_cannot_hold_it_up(serving: Serving) -> None:
    cache, operator = serving.connect(), serving.connect()
    heard: list[Selector] = []
    hang = threading.Event()

    def fail(_: object) -> None:
        raise RuntimeError("a fault of the caller's")

    cache.on_invalidate(fail)
    cache.on_invalidate(heard.extend)
    cache.on_invalidate(lambda _: hang.wait(60.0))
    one, two = Selector(mm_hash="one"), Selector(model="two")
    try:
        assert operator.invalidate(one, wait=True).complete
        wait_until(lambda: heard == [one], timeout=20, what="the first")
        assert operator.invalidate(two, wait=True).complete, "though a function hangs"
        assert heard == [one]
    finally:
        hang.set()
    wait_until(lambda: heard == [one, two], timeout=20, what="the second")
    wait_until(lambda: cache.stats().get("on_invalidate_failed.RuntimeError") == 2, timeout=20, what="both faults")


def test_who_may_be_stale_serves_on_and_nobody_waits_for_it(fresh_serving: Serving) -> None:
    fresh = fresh_serving.connect()
    stale = fresh_serving.connect(on_stale="serve")
    assert fresh.put(key_of("kept"), tensor(1.0)).readable
    assert value_of(stale, "kept") == 1.0
    assert fresh.invalidate(Selector(mm_hash="x"), wait=True).unbound == 1
    fresh_serving.controller.kill()
    wait_until(lambda: value_of(fresh, "kept") is None, timeout=20, what="the end of the session")
    assert value_of(stale, "kept") == 1.0
    assert not stale.put(key_of("other"), tensor(2.0)).readable
    assert float(stale.get_or_compute(key_of("computed"), lambda: tensor(3.0)).tensor[0]) == 3.0
