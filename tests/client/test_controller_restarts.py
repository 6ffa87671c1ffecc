"""What outlives a controller that is killed: entries, invalidations, and what is still to be waited for."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import MMCache, Selector

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
