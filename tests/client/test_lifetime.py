"""Tensors keep their values whatever passes through the pool after them, and after the cache itself is closed."""

from __future__ import annotations

import gc

import pytest
import torch
from serving import Serving, key_of

attached = pytest.mark.parametrize("attach", ["sidecar", "embedded"])

ENTRY = 128 << 10
FLOATS = (ENTRY - 4096) // 4


@attached
def test_tensors_keep_their_values_while_ten_thousand_gets_and_puts_pass_through_a_small_pool(
    serving: Serving, attach: str
) -> None:
    cache = serving.connect(attach=attach, pool_bytes=32 * ENTRY)
    keys = [key_of(f"lifetime-{number}", version=attach) for number in range(64)]
    for number, key in enumerate(keys):
        assert cache.put(key, torch.full((FLOATS,), float(number))).readable
    held = {number: cache.get(keys[number]) for number in range(4)}
    assert all(held.values())
    whole = held[0].tensor
    part = held[1].tensor[100:200]
    reshaped = held[2].tensor[:1000].view(10, 100).t()
    detached = held[3].tensor.detach()
    expected = [(tensor, tensor.clone()) for tensor in (whole, part, reshaped, detached)]
    del held, whole, part, reshaped, detached
    gc.collect()
    assert cache.stats()["pool.held_blocks"] == 4
    gets = hits = 0
    for step in range(10_000):
        if step % 4 == 3:
            number = step % 97
            cache.put(key_of(f"passing-{number}", version=attach), torch.full((FLOATS,), float(-number)))
        else:
            number = 4 + step * 7 % 60
            found = cache.get(keys[number])
            gets += 1
            if found is not None:
                hits += 1
                assert found.tensor[0].item() == number
                assert found.tensor[-1].item() == number
    assert hits > 0.9 * gets
    for tensor, value in expected:
        assert torch.equal(tensor, value)
    stats = cache.stats()
    assert stats["pool.evictions"] > 1000
    del expected, tensor, value, found
    gc.collect()
    assert cache.stats()["pool.held_blocks"] == 0


@attached
def test_tensors_outlive_the_cache(serving: Serving, attach: str) -> None:
    cache = serving.connect(attach=attach)
    assert cache.put(key_of(f"outlives-{attach}"), torch.arange(50_000)).readable
    reader = serving.connect(attach=attach, local_entries=False)
    embedding = reader.get(key_of(f"outlives-{attach}"))
    assert embedding is not None
    own = cache.empty((1000,)).fill_(7)
    cache.close()
    reader.close()
    assert torch.equal(embedding.tensor, torch.arange(50_000))
    assert torch.equal(own, torch.full((1000,), 7.0))
