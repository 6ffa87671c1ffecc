"""What a call used is let go of when it returns, not at some later collection: it may be a whole pool's memory."""

from __future__ import annotations

import contextlib
import gc
import weakref

import torch

from mmcache.client.calls import IoThreads
from mmcache.errors import StoreUnavailable
from tests.serving import Serving, key_of, wait_until


def test_a_replaced_pool_goes_without_a_collection(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(pool_bytes=16 << 20, local_entries=False)
    wait_until(
        lambda: cache.stats()["store.attached"] == 1 and cache.stats()["session.fresh"] == 1,
        timeout=60,
        what="the client's start",
    )
    gc.collect()
    gc.disable()
    try:
        for number in range(3):
            assert cache.put(key_of(number), torch.full((100_000,), float(number)), timeout=20).readable
            assert cache.get(key_of(number), timeout=20) is not None
            assert cache.get(key_of(f"absent-{number}"), timeout=20) is None
        with fresh_serving.sidecar.stopped():
            assert cache.get(key_of(0), timeout=0.3) is None
            assert not cache.put(key_of("late"), torch.ones(1000), timeout=0.3).readable
        pool = weakref.ref(cache._attacher.require().pool)
        cache._attacher.lost(cache._attacher.require())
        wait_until(lambda: pool() is None, timeout=60, what="the end of the old pool")
    finally:
        gc.enable()


def test_an_error_of_a_call_keeps_nothing_alive() -> None:
    class Used:
        """Something that a caller refers to."""

    def fail() -> None:
        raise StoreUnavailable("gone")

    def call() -> weakref.ref[Used]:
        used = Used()
        with contextlib.suppress(StoreUnavailable):
            threads.perform(fail, deadline=1e9, dispose=lambda _result, began: began or used)
        return weakref.ref(used)

    threads = IoThreads(1)
    gc.disable()
    try:
        used = call()
        wait_until(lambda: used() is None, timeout=20, what="the end of the call")
    finally:
        gc.enable()
        threads.close(1e9)
