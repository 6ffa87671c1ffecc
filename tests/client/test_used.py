"""What clients read reaches the controller's accounts, from wherever it came, and nothing that they did not."""

from __future__ import annotations

import time

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import EmbeddingKey, MMCache

FIGURES = ("hits", "missed", "hit_bytes", "saved_ms")


class Told:
    """The controller's figures since a moment. Others may be connected, but must not read."""

    def __init__(self, cache: MMCache) -> None:
        self._cache = cache
        self._before = self._all()

    def _all(self) -> dict[str, int]:
        return self._cache._channel.inspect(deadline=time.monotonic() + 60)

    def wait_for(self, **expected: int) -> None:
        """Until the figures are these; they grow, so what they must not exceed has come before what is waited for."""

        def now() -> dict[str, int]:
            figures = self._all()
            return {name: figures.get(name, 0) - self._before.get(name, 0) for name in expected}

        wait_until(lambda: now() == expected, timeout=60, what=f"{expected}, when the figures were {now()}")


@pytest.fixture
def told(fresh_serving: Serving) -> Told:
    return Told(fresh_serving.connect())


def test_local_hits_hits_from_the_store_and_misses_are_told(fresh_serving: Serving, told: Told) -> None:
    writer, reader = fresh_serving.connect(), fresh_serving.connect()
    keys = [key_of(name) for name in ("a", "b", "absent")]
    for key in keys[:2]:
        assert writer.put(key, torch.ones(1000), cost_ms=7.0).readable
    [info] = reader.lookup(keys[:1])
    assert info is not None
    for source in ("store", "local"):
        found = reader.get_many([*keys, keys[0]])
        assert [embedding and embedding.source for embedding in found] == [source, source, None, source]
    told.wait_for(hits=4, missed=2, hit_bytes=4 * info.nbytes, saved_ms=28, published=2, published_ms=14)
    assert writer.get(keys[0]) is not None, "the publisher's own copy"
    told.wait_for(hits=5, missed=2, hit_bytes=5 * info.nbytes, saved_ms=35)


def test_what_is_computed_is_missed_once_and_what_is_then_read_is_a_hit(fresh_serving: Serving, told: Told) -> None:
    one, other = fresh_serving.connect(), fresh_serving.connect()
    keys = [key_of(number) for number in range(5)]
    computed: list[EmbeddingKey] = []

    def compute(some: list[EmbeddingKey]) -> list[torch.Tensor]:
        computed.extend(some)
        return [torch.ones(4)] * len(some)

    one.get_or_compute_many(keys, compute, batch=2)
    other.get_or_compute_many(keys, compute, batch=2)
    assert len(computed) == 5
    told.wait_for(hits=5, missed=5, published=5)


def test_a_client_that_ends_at_once_tells_what_it_read(fresh_serving: Serving, told: Told) -> None:
    assert fresh_serving.connect().put(key_of("a"), torch.ones(4)).readable
    with MMCache.connect(fresh_serving.config) as reader:
        assert reader.get(key_of("a")) is not None
    told.wait_for(hits=1)


def test_what_reads_only_to_copy_tells_nothing(fresh_serving: Serving, told: Told) -> None:
    assert fresh_serving.connect().put(key_of("a"), torch.ones(4)).readable
    with MMCache.connect(fresh_serving.config, tell_uses=False) as copier:
        assert copier.get(key_of("a")) is not None
        assert copier.get(key_of("absent")) is None
    with MMCache.connect(fresh_serving.config) as reader:  # whose goodbye comes after the other's
        assert reader.get(key_of("a")) is not None
    told.wait_for(hits=1, missed=0)


def test_what_is_read_while_the_controller_restarts_is_told_to_the_next_one(fresh_serving: Serving) -> None:
    reader = fresh_serving.connect()
    fresh_serving.controller.kill()
    assert reader.get(key_of("nobody has it")) is None, "whether its session is fresh still or not"
    fresh_serving.controller.start()
    wait_until(lambda: reader._channel._link.connected, timeout=60, what="a session")
    wait_until(
        lambda: reader._channel.inspect(deadline=time.monotonic() + 60)["missed"] == 1,
        timeout=60,
        what="what it missed",
    )
