"""Ten times as much is published as there is room for: all is taken, what is read stays, what is known is there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import EmbeddingKey, MMCache
from mmcache.store.launch import memory

LONG = 120.0
SEGMENT = 32 << 20
ROWS, WIDTH = 128, 1024
"""float32: 512 KiB, of which the allocator makes 576 with the prefix."""
HIGH, LOW = 0.7, 0.4
AT_ONCE, ROUNDS = 14, 46


def made(*, store_lease_s: float, told_lease_s: float) -> Serving:
    """A cluster of one small segment. The controller may believe leases to be shorter than they are."""
    serving = Serving(
        segment_bytes=SEGMENT, lease_ms=round(store_lease_s * 1000), controller_store={"lease": told_lease_s}
    )
    serving.controller.kill()
    config = json.loads(serving.controller._config.read_text())
    config["store"]["metrics"] = serving.store.metrics
    config["controller"] |= {
        "eviction": "lru",
        "high_watermark": HIGH,
        "low_watermark": LOW,
        "min_embeddings": 4,
        "max_bytes": "1MiB",
        "quotas": ["tenant=default 1TiB"],
        "reconcile_every": 1.0,
    }
    serving.controller._config.write_text(json.dumps(config))
    serving.controller.start()
    return serving


def figures(cache: MMCache) -> dict[str, int]:
    return cache._channel.inspect(deadline=time.monotonic() + LONG)


def put(cache: MMCache, numbers: Sequence[int], version: str) -> list[EmbeddingKey]:
    keys = [key_of(number, version=version) for number in numbers]
    values = [torch.full((ROWS, WIDTH), float(number)) for number in numbers]
    outcomes = cache.put_many(list(zip(keys, values, strict=True)))
    assert all(outcome.readable for outcome in outcomes), outcomes  # a listing may be first to enter it
    return keys


def used(serving: Serving) -> float:
    """Of the capacity, as the master says."""
    told = memory(serving.store.metrics)
    assert told is not None
    assert told.capacity == SEGMENT
    return told.used / told.capacity


def test_ten_times_as_much_as_there_is_room_for_is_published_and_none_refused() -> None:
    with made(store_lease_s=0.5, told_lease_s=0.5) as serving:
        cache = serving.connect(local_entries=False, publish_timeout=LONG, read_timeout=LONG)
        often = put(cache, range(4), "often")
        keys: list[EmbeddingKey] = []
        most, missed = 0.0, 0

        def has_room() -> bool:
            told = figures(cache)
            return told["store_capacity_bytes"] > 0 and told["store_used_bytes"] <= HIGH * SEGMENT

        for round_of in range(ROUNDS):
            wait_until(has_room, timeout=LONG, what="room")
            keys += put(cache, range(AT_ONCE * round_of, AT_ONCE * (round_of + 1)), "much")
            most = max(most, used(serving))
            found = cache.get_or_compute_many(often, lambda lost: [torch.full((ROWS, WIDTH), -1.0) for _ in lost])
            missed += any(embedding.source == "computed" for embedding in found)
            del found
        assert most < 0.95
        assert missed < ROUNDS // 8, "what is read often stays, as long as this machine has time to tell"
        wait_until(has_room, timeout=LONG, what="room")
        wait_until(lambda: figures(cache)["entries_removing"] == 0, timeout=LONG, what="the last removal")

        known = [hit is not None for hit in cache.lookup(keys)]
        found = cache.get_many(keys)
        assert [embedding is not None for embedding in found] == known
        assert known[-AT_ONCE:] == [True] * AT_ONCE, "the latest"
        assert not any(known[: len(known) // 2])
        for number, embedding in enumerate(found):
            assert embedding is None or embedding.tensor[0, 0] == number
        del found, embedding  # which hold the pool
        told = figures(cache)
        assert known.count(False) <= told["evicted.watermark"] <= known.count(False) + 4 * missed
        assert LOW * 0.8 <= told["store_used_bytes"] / SEGMENT <= HIGH
        assert told["quotas_scaled"] == 1
        before = told.get("listing", 0)
        wait_until(lambda: figures(cache).get("listing", 0) > before + 1, timeout=LONG, what="a listing")
        assert "entry.lost" not in figures(cache), "the store itself had nothing to evict"
        log = serving.controller.log.read_text()
        assert log.count("the quotas (controller.quotas) are more together than the store's 0.0312 GiB") == 1

        refuses_what_is_not_admitted(cache)
        again = cache.get_or_compute(keys[0], lambda: torch.full((ROWS, WIDTH), 7.0))
        assert (again.source, again.tensor[0, 0]) == ("computed", 7.0)
        assert cache.lookup(keys[:1]) != [None], "with a claim it is published again at once"


def refuses_what_is_not_admitted(cache: MMCache) -> None:
    few, large = key_of("few"), key_of("large")
    outcomes = cache.put_many([(few, torch.zeros(3, 8)), (large, torch.zeros(1 << 18))])
    assert [outcome.reason for outcome in outcomes] == ["too_few_embeddings", "too_large"]
    assert cache.get_or_compute(few, lambda: torch.ones(3, 8)).tensor[0, 0] == 1.0
    assert cache.lookup([few, large]) == [None, None]
    assert cache.put(key_of("enough"), torch.zeros(4, 8)).status == "stored"


def test_what_is_leased_is_not_forced_out_and_goes_when_the_lease_is_over() -> None:
    """Each was seen in the store by its publisher, and so is leased for longer than the controller knows."""
    with made(store_lease_s=5.0, told_lease_s=0.1) as serving:
        cache = serving.connect(local_entries=False, publish_timeout=LONG, read_timeout=LONG)
        keys = put(cache, range(24), "leased") + put(cache, range(24, 48), "leased")
        assert figures(cache)["store_used_bytes"] > HIGH * SEGMENT
        wait_until(lambda: figures(cache).get("eviction.leased", 0) > 0, timeout=LONG, what="a refusal of the store")
        wait_until(lambda: figures(cache).get("evicted.watermark", 0) > 0, timeout=LONG, what="the leases' end")
        wait_until(lambda: figures(cache)["entries_removing"] == 0, timeout=LONG, what="the last removal")
        known = sum(hit is not None for hit in cache.lookup(keys))
        assert 0 < known < len(keys)
        assert known == len(keys) - figures(cache)["evicted.watermark"]
