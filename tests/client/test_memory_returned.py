"""What a replaced attachment leaves behind goes back to the system, and never while anybody may touch it."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import MMCache

POOL_BYTES = 32 << 20
LONG = 30.0


CLIENT_BYTES = 24 << 20
"""What an embedded client of Mooncake's takes of this process's own memory."""


def shared_bytes() -> int:
    return resident("RssShmem")


def resident(kind: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1]) * 1024


def fill(cache: MMCache) -> None:
    """Touch every page of the pool."""
    full = "empty_outside_pool.PoolExhausted"
    before, tensors = cache.stats().get(full, 0), []
    while cache.stats().get(full, 0) == before:
        tensors.append(cache.empty((1 << 18,)).fill_(1.0))


def replace_attachment(cache: MMCache) -> None:
    before = cache._attacher.require()
    cache._attacher.lost(before)
    wait_until(lambda: cache._attacher.current is not None, timeout=LONG, what="another attachment")


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
def test_memory_of_a_replaced_attachment_is_returned_once_the_last_tensor_on_it_is_gone(
    serving: Serving, attach: str
) -> None:
    cache = serving.connect(attach=attach, pool_bytes=POOL_BYTES)
    assert cache.put(key_of(f"held-{attach}"), torch.full((1000,), 5.0)).readable
    held = cache.get(key_of(f"held-{attach}"))
    assert held is not None
    fill(cache)
    before = shared_bytes()
    replace_attachment(cache)
    fill(cache)
    assert shared_bytes() > before + POOL_BYTES // 2, "a tensor lies in the old memory still"
    assert torch.equal(held.tensor, torch.full((1000,), 5.0))
    del held
    gc.collect()
    wait_until(lambda: shared_bytes() < before + POOL_BYTES // 2, timeout=LONG, what="the return of the memory")


def test_an_embedded_client_that_was_replaced_leaves_nothing_behind(serving: Serving) -> None:
    cache = serving.connect(attach="embedded", pool_bytes=POOL_BYTES)
    for _ in range(4):
        replace_attachment(cache)  # what the first take, allocators may keep: a client or two for each of their arenas
    before = resident("RssAnon")
    for _ in range(8):
        replace_attachment(cache)
    wait_until(
        lambda: resident("RssAnon") < before + 4 * CLIENT_BYTES, timeout=LONG, what="the memory of eight clients"
    )
    cache.close()


def test_quarantined_bytes_stay_until_their_client_has_ended(serving: Serving) -> None:
    cache = serving.connect(attach="sidecar", pool_bytes=POOL_BYTES)
    store, pool = cache._attacher.require()
    block = pool.allocate(1 << 20, deadline=0.0)
    pool.view(block)[:4] = b"data"
    view = pool._memory[block.offset : block.offset + 4]
    pool.quarantine(block)
    store._moves_bytes_until = time.monotonic() + 3600.0  # type: ignore[attr-defined]
    region, quarantined = store._regions[0], dict(pool.quarantined_extents)  # type: ignore[attr-defined]
    store.give_back(region, quarantined)
    assert bytes(view) == b"data"
    store._moves_bytes_until = 0.0  # type: ignore[attr-defined]
    store.close()
    wait_until(lambda: bytes(view) == bytes(4), timeout=LONG, what="the return of the rest")
