"""With `strict=True` each kind of failure raises its own error; a plain miss never does."""

from __future__ import annotations

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of, plant

from mmcache import (
    ControllerUnavailable,
    CorruptEntry,
    DeadlineExceeded,
    EntryDropped,
    MMCache,
    PoolExhausted,
    StoreUnavailable,
)


@pytest.fixture(scope="module")
def cache(serving: Serving) -> MMCache:
    return serving.connect(strict=True, pool_bytes="8MiB", local_entries=False)


def test_a_plain_miss_is_none(cache: MMCache) -> None:
    assert cache.get(key_of("strict-absent")) is None
    assert cache.get_many([key_of("strict-absent"), key_of("strict-absent-too")]) == [None, None]
    assert cache.lookup([key_of("strict-absent")]) == [None]


def test_an_entry_that_looks_different_raises(cache: MMCache) -> None:
    assert cache.put(key_of("strict-unexpected"), torch.ones(5, 7)).readable
    with pytest.raises(CorruptEntry) as raised:
        cache.get(key_of("strict-unexpected"), like=torch.empty(7, 5))
    assert raised.value.reason == "unexpected"
    assert cache.get(key_of("strict-unexpected"), like=torch.empty(5, 7)) is not None


def test_a_corrupt_object_raises(cache: MMCache) -> None:
    plant(cache, key_of("strict-corrupt"), b"not one of ours" * 500)
    with pytest.raises(CorruptEntry) as raised:
        cache.get(key_of("strict-corrupt"))
    assert raised.value.reason == "magic"


def test_a_pool_without_room_raises(cache: MMCache, serving: Serving) -> None:
    assert cache.put(key_of("strict-room"), torch.ones(1 << 20)).readable
    assert serving.connect().put(key_of("strict-giant"), torch.ones(3 << 20)).readable
    held = cache.empty((5 << 18,))
    with pytest.raises(PoolExhausted) as raised:
        cache.get(key_of("strict-room"), timeout=0.2)
    assert raised.value.fits
    with pytest.raises(PoolExhausted):
        cache.empty((1 << 20,))
    with pytest.raises(EntryDropped) as dropped:
        cache.put(key_of("strict-no-room"), torch.ones(1 << 20), timeout=0.2)
    assert dropped.value.reason == "no_memory"
    del held
    assert cache.get(key_of("strict-room")) is not None
    with pytest.raises(PoolExhausted) as raised:
        cache.get(key_of("strict-giant"))
    assert not raised.value.fits


def test_a_store_that_hangs_raises_at_the_deadline_and_one_that_is_gone_at_once(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(strict=True, local_entries=False)
    assert cache.put(key_of(1), torch.ones(1)).readable
    with fresh_serving.sidecar.stopped():
        with pytest.raises(DeadlineExceeded):
            cache.get(key_of(1), timeout=0.2)
        with pytest.raises(EntryDropped) as dropped:  # it is known by now, and nobody waits
            cache.put(key_of(2), torch.ones(1), timeout=60.0)
        assert dropped.value.reason == "unavailable"
    wait_until(lambda: cache.stats()["store.open"] == 0, timeout=10, what="a probe after the sidecar goes on")
    cache._parts.health.forgive([name_of(cache, key_of(1))])
    wait_until(lambda: cache.get(key_of(1)) is not None, timeout=10, what="a read after the sidecar goes on")
    fresh_serving.sidecar.kill()
    with pytest.raises(StoreUnavailable):
        cache.get(key_of(1))
    with pytest.raises(EntryDropped) as dropped:
        cache.put(key_of(2), torch.ones(1))
    assert dropped.value.reason == "unavailable"


def test_a_lost_session_raises(fresh_serving: Serving) -> None:
    cache = fresh_serving.connect(strict=True)
    assert cache.put(key_of(1), torch.ones(1)).readable
    fresh_serving.controller.kill()
    wait_until(lambda: cache.stats()["session.fresh"] == 0, timeout=10, what="the end of freshness")
    for call in (lambda: cache.get(key_of(1)), lambda: cache.lookup([key_of(1)])):
        with pytest.raises(ControllerUnavailable):
            call()
    with pytest.raises(EntryDropped) as dropped:
        cache.put(key_of(2), torch.ones(1))
    assert dropped.value.reason == "not_fresh"
