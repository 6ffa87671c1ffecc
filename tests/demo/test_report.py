"""The figures, and how they are told."""

import io

import msgspec
from rich.console import Console

from mmcache.cli.demo.protocol import Served
from mmcache.cli.demo.report import Report, count_reads, latency, make_report, tables, verdict
from mmcache.key import EmbeddingKey


def served(source: str, elapsed_ms: float, *, encode_ms: float | None = None) -> Served:
    return Served(0, EmbeddingKey("model", "1", "cat"), source, elapsed_ms, encode_ms, nbytes=100, digest="d")


ENCODED = [served("computed", 410.0, encode_ms=400.0), served("store", 300.0), served("local", 0.1)]
READ = [served("store", 2.0), served("store", 4.0), served("local", 0.1), served("local", 0.1)]
COUNTERS = {"encoder-0": {"wait": 1}, "encoder-1": {"wait": 2, "computed": 1}, "prefill-0": {"miss.not_fresh": 3}}


def report(problems: list[str]) -> Report:
    return make_report(
        problems,
        encoded=ENCODED,
        read=READ,
        requests=3,
        unique_images=1,
        model="a tower with seeded random weights",
        counters=COUNTERS,
        encoders=["encoder-0", "encoder-1"],
        prefills=["prefill-0"],
        traffic_s=1.0,
        total_s=2.0,
    )


def test_reads_are_counted_by_where_they_came_from() -> None:
    reads = count_reads(ENCODED, [{"wait": 1}, {"wait": 2, "hit.store": 9}])
    assert (reads.requests, reads.encodes, reads.local_hits, reads.remote_hits) == (3, 1, 1, 1)
    assert (reads.waits, reads.bytes_published, reads.bytes_read) == (3, 100, 100)


def test_the_report_tells_hits_of_prefills_and_encodes_of_encoders() -> None:
    told = report([])
    assert told.ok
    assert (told.encodes, told.embeddings_checked) == (1, 7)
    assert (told.encoders.waits, told.prefills.waits) == (3, 0)
    assert (told.hit.count, told.hit.p50_ms, told.hit.p99_ms) == (4, 0.1, 4.0)
    assert (told.local_hit.p50_ms, told.remote_hit.p50_ms, told.encode.p50_ms) == (0.1, 2.0, 400.0)
    assert msgspec.json.decode(msgspec.json.encode(told), type=Report) == told


def test_a_right_run_says_so_and_compares_an_encode_with_a_hit_in_the_store_not_with_a_local_one() -> None:
    assert verdict(report([])).splitlines() == [
        "All 7 embeddings equal a direct encode bit by bit, and the photograph was encoded once.",
        "The encoder was a tower with seeded random weights.",
        "A hit in the store took 2 ms, an encode 400 ms (p50): 200 times as long.",
    ]


def test_without_a_hit_in_the_store_nothing_is_compared() -> None:
    told = msgspec.structs.replace(report([]), remote_hit=latency([]), unique_images=2)
    assert "times as long" not in verdict(told)
    assert "each of the 2 photographs was encoded once" in verdict(told)


def test_a_wrong_run_names_every_problem_and_what_the_caches_counted() -> None:
    told = report(["cat.png was encoded 2 times"])
    assert not told.ok
    assert verdict(told).splitlines()[:2] == ["FAILED:", "  cat.png was encoded 2 times"]
    assert "prefill-0 counted miss.not_fresh 3" in verdict(told)


def test_the_tables_show_the_figures() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    for table in tables(report([])):
        console.print(table)
    text = console.export_text()
    for words in ("3 requests for 1 photograph  ", "waits", "400 ms", "4 ms"):
        assert words in text


def test_latency_is_by_nearest_rank() -> None:
    timed = latency([float(n) for n in range(200, 0, -1)])
    assert (timed.count, timed.p50_ms, timed.p99_ms) == (200, 100.0, 198.0)
    assert latency([5.0]).p99_ms == 5.0
    assert latency([]).p50_ms is None
