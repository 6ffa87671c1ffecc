from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorLogging
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from mmcache.integrations.vllm.statistics import (
    COUNTERS,
    EVENTS,
    HISTOGRAMS,
    LOAD_SECONDS,
    MAX_OBSERVATIONS,
    MAX_WORDS,
    MMCacheECPromMetrics,
    MMCacheECStats,
)

LABELS = {0: ["tiny", "0"], 1: ["tiny", "1"]}


@pytest.fixture
def metrics() -> Iterator[MMCacheECPromMetrics]:
    """As an API server of two engines makes them."""
    unregister_vllm_metrics()
    yield MMCacheECPromMetrics(
        SimpleNamespace(ec_transfer_config=None),  # type: ignore[arg-type]
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        ["model_name", "engine"],
        LABELS,  # type: ignore[arg-type]
    )
    unregister_vllm_metrics()


def sample(name: str, engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": str(engine), **labels})


def test_what_was_not_counted_is_not_sent() -> None:
    assert MMCacheECStats.of({"granted": 0, "load_s": []}).is_empty()
    assert MMCacheECStats().is_empty()
    stats = MMCacheECStats.of({"granted": 2, "hit.local": 1, "load_s": [0.5]})
    assert not stats.is_empty()
    assert stats.data == {"granted": 2, "hit.local": 1, "load_s": [0.5]}
    stats.reset()
    assert stats.is_empty()


COUNTS = st.dictionaries(
    st.sampled_from(["hit.local", "hit.store", "miss.absent", "granted", "deferred_ms", "odd"]), st.integers(1, 1000)
)


@given(st.lists(COUNTS, min_size=1, max_size=5))
def test_intervals_add_up_and_leave_their_parts_as_they_were(intervals: list[dict[str, int]]) -> None:
    parts = [MMCacheECStats.of(interval) for interval in intervals]
    total = parts[0]
    for part in parts[1:]:
        total = total.aggregate(part)
    names = {name for interval in intervals for name in interval}
    assert total.data == {name: sum(interval.get(name, 0) for interval in intervals) for name in names}
    assert [part.data for part in parts] == intervals


def test_observations_are_kept_up_to_a_bound() -> None:
    many = MMCacheECStats.of({LOAD_SECONDS: [1.0] * (MAX_OBSERVATIONS + 5)})
    assert len(many.data[LOAD_SECONDS]) == MAX_OBSERVATIONS  # type: ignore[arg-type]
    assert len(many.aggregate(many).data[LOAD_SECONDS]) == MAX_OBSERVATIONS  # type: ignore[arg-type]
    two = MMCacheECStats.of({LOAD_SECONDS: [1.0]}).aggregate(MMCacheECStats.of({LOAD_SECONDS: [2.0]}))
    assert two.data == {LOAD_SECONDS: [1.0, 2.0]}


def test_a_name_of_two_kinds_does_no_harm() -> None:
    counts, observations = MMCacheECStats.of({"x": 1}), MMCacheECStats.of({"x": [1.0]})
    assert counts.aggregate(observations).data == {"x": 1}
    assert observations.aggregate(counts).data == {"x": [1.0]}


def test_the_line_in_the_log_says_hits_and_misses_first() -> None:
    stats = MMCacheECStats.of(
        {"miss.absent": 2, "miss.deadline": 1, "hit.store": 4, "granted": 2, "load_s": [0.1, 0.3]}
    )
    line = stats.reduce()
    assert list(line)[:2] == ["hit", "miss"]
    assert line == {
        "hit": 4,
        "miss": 3,
        "granted": 2,
        "hit.store": 4,
        "load_s.count": 2,
        "load_s.mean": 0.2,
        "miss.absent": 2,
        "miss.deadline": 1,
    }
    assert MMCacheECStats.of({"wait": 1}).reduce() == {"hit": 0, "miss": 0, "wait": 1}


def test_vllm_logs_them_after_the_trip_between_processes() -> None:
    logging = ECConnectorLogging(None)
    logging.connector_cls = SimpleNamespace(build_ec_connector_stats=lambda data: MMCacheECStats(data=data))
    for _ in range(2):
        sent = msgspec.msgpack.encode(MMCacheECStats.of({"hit.local": 1, "load_s": [0.25]}).data)
        logging.observe(msgspec.msgpack.decode(sent))
    lines: list[str] = []
    logging.log(lambda form, *values: lines.append(form % values))
    assert lines == ["EC Transfer metrics: hit=2, miss=0, hit.local=2, load_s.count=2, load_s.mean=0.25"]
    logging.log(lambda *_: lines.append("again"))
    assert len(lines) == 1


def test_counts_become_counters_with_their_words_as_labels(metrics: MMCacheECPromMetrics) -> None:
    metrics.observe({"hit.store": 3, "miss.absent": 2, "granted": 1, "published.stored": 1, "loaded_bytes": 4096})
    metrics.observe({"hit.store": 1, "hit.local": 1})
    assert sample("vllm:mmcache_ec_hits_total", source="store") == 4
    assert sample("vllm:mmcache_ec_hits_total", source="local") == 1
    assert sample("vllm:mmcache_ec_misses_total", reason="absent") == 2
    assert sample("vllm:mmcache_ec_granted_total") == 1
    assert sample("vllm:mmcache_ec_published_total", status="stored") == 1
    assert sample("vllm:mmcache_ec_loaded_bytes_total") == 4096


def test_each_engine_has_its_own(metrics: MMCacheECPromMetrics) -> None:
    metrics.observe({"granted": 1}, engine_idx=1)
    assert sample("vllm:mmcache_ec_granted_total", engine=0) == 0
    assert sample("vllm:mmcache_ec_granted_total", engine=1) == 1
    metrics.observe({"granted": 1, "hit.local": 1, "load_s": [1.0]}, engine_idx=7)  # not one of this process's
    assert sample("vllm:mmcache_ec_granted_total", engine=7) is None


def test_times_are_in_seconds(metrics: MMCacheECPromMetrics) -> None:
    metrics.observe({"deferred_ms": 1500, "load_s": [0.003, 0.3]})
    assert sample("vllm:mmcache_ec_deferred_seconds_total") == 1.5
    assert sample("vllm:mmcache_ec_load_seconds_count") == 2
    assert sample("vllm:mmcache_ec_load_seconds_sum") == pytest.approx(0.303)
    assert sample("vllm:mmcache_ec_load_seconds_bucket", le="0.005") == 1


def test_what_has_no_metric_of_its_own_is_an_event(metrics: MMCacheECPromMetrics) -> None:
    metrics.observe({"grant_unused": 2, "odd.reason": 1, "hit": 1, "unheard_of": [1.0]})
    assert sample("vllm:mmcache_ec_events_total", event="grant_unused") == 2
    assert sample("vllm:mmcache_ec_events_total", event="odd.reason") == 1
    assert sample("vllm:mmcache_ec_hits_total", source="none") == 1


def test_words_beyond_a_bound_are_counted_together(metrics: MMCacheECPromMetrics) -> None:
    metrics.observe({f"miss.word{number}": 1 for number in range(MAX_WORDS + 10)})
    metrics.observe({"miss.word0": 1})
    assert sample("vllm:mmcache_ec_misses_total", reason="other") == 10
    assert sample("vllm:mmcache_ec_misses_total", reason="word0") == 2


def test_every_metric_is_on_the_page(metrics: MMCacheECPromMetrics) -> None:
    figures: dict[str, Any] = {name: [0.1] if name in HISTOGRAMS else 1 for name in (*COUNTERS, *HISTOGRAMS, "odd")}
    metrics.observe(figures)
    page = generate_latest(REGISTRY).decode()
    for metric in (*COUNTERS.values(), EVENTS):
        assert f"\n{metric.name}_total{{" in page
    assert "vllm:mmcache_ec_load_seconds_bucket{" in page
