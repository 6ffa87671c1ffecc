from __future__ import annotations

import threading
import weakref

from mmcache.metrics import Counters, Latency


def test_counts_are_kept_by_name_and_reason_and_listed_in_order() -> None:
    counters = Counters()
    counters.add("miss", reason="not_found")
    counters.add("hit.local", 3)
    counters.add("miss", reason="not_found")
    counters.add("miss")
    assert list(counters.snapshot().items()) == [("hit.local", 3), ("miss", 1), ("miss.not_found", 2)]


def test_a_snapshot_does_not_change_afterwards() -> None:
    counters = Counters()
    counters.add("hit")
    before = counters.snapshot()
    counters.add("hit")
    assert before == {"hit": 1}


def test_names_beyond_the_bound_are_counted_together() -> None:
    counters = Counters(max_names=2)
    for number in range(10):
        counters.add("miss", reason=str(number))
    counters.add("miss", reason="0")
    assert counters.snapshot() == {"miss.0": 2, "miss.1": 1, "other": 8}


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()
    together = threading.Barrier(4)

    def count() -> None:
        together.wait(60)
        for number in range(5000):
            counters.add("calls", reason=str(number % 3))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(counters.snapshot().values()) == 20_000


def test_a_finaliser_may_count_while_its_own_thread_is_counting() -> None:
    counters = Counters()

    class Block:
        pass

    held = [Block()]
    weakref.finalize(held[0], counters.add, "freed")

    class Name(str):
        __slots__ = ()

        def __hash__(self) -> int:  # runs while the counters are locked, as garbage collection may
            held.clear()
            return super().__hash__()

    thread = threading.Thread(target=counters.add, args=[Name("hit")], daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert counters.snapshot() == {"freed": 1, "hit": 1}


def test_percentiles_are_by_nearest_rank_in_milliseconds() -> None:
    latency = Latency()
    for milliseconds in range(100, 0, -1):
        latency.add(milliseconds / 1e3)
    assert latency.snapshot() == {"count": 100, "p50_ms": 50.0, "p99_ms": 99.0}


def test_one_duration_is_every_percentile_and_none_is_none() -> None:
    latency = Latency()
    assert latency.snapshot() == {"count": 0}
    latency.add(0.25)
    assert latency.snapshot() == {"count": 1, "p50_ms": 250.0, "p99_ms": 250.0}


def test_only_the_last_durations_matter_but_all_are_counted() -> None:
    latency = Latency(window=4)
    for seconds in (9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0):
        latency.add(seconds)
    assert latency.snapshot() == {"count": 7, "p50_ms": 1000.0, "p99_ms": 1000.0}
