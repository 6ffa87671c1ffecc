"""What a call used is let go of when it returns, not at some later collection: it may be a whole pool's memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
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


class Used:
    """Something that a caller refers to."""


def used_by_a_caller_of(action: Callable[[], object], error: type[Exception]) -> weakref.ref[Used]:
    """What a caller used that an error came to; an error that is in a cycle with its traceback keeps it."""
    used = Used()
    try:
        action()
    except error:
        return weakref.ref(used)
    raise AssertionError(f"no {error.__name__} was raised")


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_an_error_of_a_call_keeps_nothing_alive() -> None:
    def fail() -> None:
        raise StoreUnavailable("gone")

    def call() -> None:
        threads.perform(fail, deadline=1e9, dispose=lambda _result, _began: None)

    threads = IoThreads(1)
    try:
        used = used_by_a_caller_of(call, StoreUnavailable)
        wait_until(lambda: used() is None, timeout=20, what="the end of the call")
    finally:
        threads.close(1e9)


@pytest.mark.usefixtures("no_collection")
def test_what_the_callers_function_raises_keeps_nothing_alive(serving: Serving) -> None:
    def fail() -> torch.Tensor:
        raise KeyError("the encoder failed")

    cache = serving.connect()
    used = used_by_a_caller_of(lambda: cache.get_or_compute(key_of("cycle-compute"), fail), KeyError)
    assert used() is None


@pytest.mark.usefixtures("no_collection")
def test_a_failure_that_strict_raises_keeps_nothing_alive(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    cache = serving.connect(strict=True)
    monkeypatch.setattr(cache._reader, "read", fail)
    assert used_by_a_caller_of(lambda: cache.get(key_of("cycle-strict")), RuntimeError)() is None
