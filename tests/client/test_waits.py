"""Waiting for another's result: the clock runs only while one waits, and the last word is the controller's."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from cluster import wait_until
from serving import Serving, key_of

from mmcache import EmbeddingKey, MMCache


def test_what_is_spent_on_computing_does_not_count_as_waiting(serving: Serving) -> None:
    """Two clients in opposite orders, each with more to compute than its patience for the other lasts."""
    clients = [serving.connect(wait_timeout="1s"), serving.connect(wait_timeout="1s")]
    keys = [key_of(f"opposite-{number}") for number in range(8)]
    computed: Counter[EmbeddingKey] = Counter()
    both = threading.Barrier(2)

    def encoder(first: bool) -> Callable[[Sequence[EmbeddingKey]], list[torch.Tensor]]:
        pause = threading.Event()

        def encode(some: Sequence[EmbeddingKey]) -> list[torch.Tensor]:
            pause.wait(0.3 if first else 0.45)
            computed.update(some)
            return [torch.ones(4)] * len(some)

        return encode

    def ask(number: int) -> None:
        both.wait(20)
        order = keys if number == 0 else keys[::-1]
        assert len(clients[number].get_or_compute_many(order, encoder(number == 0), batch=1)) == 8

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, range(2)))
    assert computed == Counter(keys)


def test_what_was_published_while_this_client_computed_is_read_though_the_wait_is_over(serving: Serving) -> None:
    mine, theirs = serving.connect(wait_timeout="300ms"), serving.connect()
    a, b = key_of("lapsed-a"), key_of("lapsed-b")
    b_begun, a_begun, b_published = threading.Event(), threading.Event(), threading.Event()
    computed: list[EmbeddingKey] = []

    def encode_b() -> torch.Tensor:
        b_begun.set()
        assert a_begun.wait(20)
        return torch.full((2,), 2.0)

    def encode(some: Sequence[EmbeddingKey]) -> list[torch.Tensor]:
        computed.extend(some)
        a_begun.set()
        assert b_published.wait(20)
        threading.Event().wait(0.5)  # longer than the wait that the controller was told of
        return [torch.full((2,), 1.0)] * len(some)

    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(theirs.get_or_compute, b, encode_b)
        assert b_begun.wait(20)
        ours = threads.submit(mine.get_or_compute_many, [a, b], encode)
        other.result(20)
        b_published.set()
        assert [e.tensor[0].item() for e in ours.result(20)] == [1.0, 2.0]
    assert computed == [a]


def test_whoever_computes_longer_than_others_wait_is_not_waited_for(serving: Serving) -> None:
    slow, quick = serving.connect(), serving.connect(wait_timeout="200ms")
    begun, go_on = threading.Event(), threading.Event()

    def encode() -> torch.Tensor:
        begun.set()
        assert go_on.wait(20)
        return torch.ones(3)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(slow.get_or_compute, key_of("slow"), encode)
        assert begun.wait(20)
        assert quick.get_or_compute(key_of("slow"), lambda: torch.ones(3)).source == "computed"
        assert quick.stats()["wait_failed"] == 1
        assert serving.connect().get(key_of("slow")) is not None, "it is published all the same"
        go_on.set()
        assert first.result(20).source == "computed"
    assert slow.stats()["put.duplicate"] == 1


def test_a_put_that_came_second_does_not_become_this_process_s_local_entry(serving: Serving) -> None:
    first, second = serving.connect(), serving.connect()
    assert first.put(key_of("second"), torch.full((4,), 1.0)).status == "stored"
    assert second.put(key_of("second"), torch.full((4,), 2.0)).status == "duplicate"
    found = second.get(key_of("second"))
    assert found is not None
    assert found.source == "store"
    assert found.tensor.tolist() == [1.0] * 4


def test_a_cache_that_is_dropped_unclosed_ends_by_itself(serving: Serving) -> None:
    cache = MMCache.connect(serving.config, name="dropped")
    session = cache._channel._link
    cycle: list[object] = [cache]
    cycle.append(cycle)
    del cache, cycle
    gc.collect()
    wait_until(lambda: not session.running, timeout=20, what="the end of its session")
