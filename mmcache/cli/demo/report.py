"""What the demo found, as figures and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from mmcache.cli.demo.protocol import Served, Source
from mmcache.cli.plurals import counted
from mmcache.metrics import nearest_rank


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of process came by its embeddings. `waits` are among the hits: another process was computing."""

    requests: int
    encodes: int
    local_hits: int
    remote_hits: int
    waits: int
    bytes_published: int
    """Of embeddings that were encoded here."""
    bytes_read: int
    """Of embeddings that came out of the store."""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds, by nearest rank; None if nothing was timed."""

    count: int
    p50_ms: float | None
    p99_ms: float | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `problems` is empty if it succeeded."""

    ok: bool
    problems: list[str]
    requests: int
    unique_images: int
    model: str
    """What the encoders run, for people."""
    encodes: int
    embeddings_checked: int
    encoders: Reads
    prefills: Reads
    hit: Latency
    """A prefill process's get, wherever the embedding came from."""
    local_hit: Latency
    remote_hit: Latency
    encode: Latency
    counters: Mapping[str, Mapping[str, int]]
    """By process, what its cache counted."""
    traffic_s: float
    total_s: float


def latency(milliseconds: Sequence[float]) -> Latency:
    """p50 and p99 of what was timed."""
    if not milliseconds:
        return Latency(count=0, p50_ms=None, p99_ms=None)
    ordered = sorted(milliseconds)
    return Latency(count=len(ordered), p50_ms=nearest_rank(ordered, 50), p99_ms=nearest_rank(ordered, 99))


def count_reads(answers: Sequence[Served], counters: Sequence[Mapping[str, int]]) -> Reads:
    """Sums up the answers of one kind of process, and what their caches counted."""
    from_store = [served for served in answers if served.source == "store"]
    return Reads(
        requests=len(answers),
        encodes=sum(served.encode_ms is not None for served in answers),
        local_hits=sum(served.source == "local" for served in answers),
        remote_hits=len(from_store),
        waits=sum(counted.get("wait", 0) for counted in counters),
        bytes_published=sum(served.nbytes for served in answers if served.encode_ms is not None),
        bytes_read=sum(served.nbytes for served in from_store),
    )


def make_report(
    problems: Sequence[str],
    *,
    encoded: Sequence[Served],
    read: Sequence[Served],
    requests: int,
    unique_images: int,
    model: str,
    counters: Mapping[str, Mapping[str, int]],
    encoders: Sequence[str],
    prefills: Sequence[str],
    traffic_s: float,
    total_s: float,
) -> Report:
    """Puts the figures together. `encoders` and `prefills` are the names of the processes, as in `counters`."""

    def hits(*sources: Source) -> Latency:
        return latency([served.elapsed_ms for served in read if served.source in sources])

    encode_ms = [served.encode_ms for served in encoded if served.encode_ms is not None]
    return Report(
        ok=not problems,
        problems=list(problems),
        requests=requests,
        unique_images=unique_images,
        model=model,
        encodes=len(encode_ms),
        embeddings_checked=len(encoded) + len(read),
        encoders=count_reads(encoded, [counters[name] for name in encoders]),
        prefills=count_reads(read, [counters[name] for name in prefills]),
        hit=hits("local", "store"),
        local_hit=hits("local"),
        remote_hit=hits("store"),
        encode=latency(encode_ms),
        counters=counters,
        traffic_s=traffic_s,
        total_s=total_s,
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"


def tables(report: Report) -> tuple[Table, Table]:
    """The figures for people: who did what, and how long it took."""
    title = f"{counted(report.requests, 'request')} for {counted(report.unique_images, 'photograph')}"
    counts = Table("", "encoders", "prefills", title=title)
    timings = Table("", "count", "p50", "p99", title="Time")
    for table in (counts, timings):
        for column in table.columns[1:]:
            column.justify = "right"
    for label, field in (
        ("requests served", "requests"),
        ("encodes", "encodes"),
        ("hits in the process (local)", "local_hits"),
        ("hits in the store (remote)", "remote_hits"),
        ("waits for another's encode", "waits"),
    ):
        counts.add_row(label, *(f"{getattr(reads, field):,}" for reads in (report.encoders, report.prefills)))
    for label, field in (("MB published", "bytes_published"), ("MB read from the store", "bytes_read")):
        counts.add_row(label, *(f"{getattr(reads, field) / 1e6:,.1f}" for reads in (report.encoders, report.prefills)))
    for label, timed in (
        ("hit", report.hit),
        ("  local", report.local_hit),
        ("  remote", report.remote_hit),
        ("encode", report.encode),
    ):
        timings.add_row(label, f"{timed.count:,}", _milliseconds(timed.p50_ms), _milliseconds(timed.p99_ms))
    return counts, timings


def verdict(report: Report) -> str:
    """The result in a few sentences."""
    if not report.ok:
        counted = [
            f"{process} counted {', '.join(f'{name} {count}' for name, count in counters.items() if count)}"
            for process, counters in report.counters.items()
        ]
        return "\n  ".join(["FAILED:", *report.problems, *counted])
    photographs = "the photograph" if report.unique_images == 1 else f"each of the {report.unique_images} photographs"
    sentences = [
        f"All {report.embeddings_checked} embeddings equal a direct encode bit by bit, "
        f"and {photographs} was encoded once.",
        f"The encoder was {report.model}.",
    ]
    hit_ms, encode_ms = report.remote_hit.p50_ms, report.encode.p50_ms
    if hit_ms and encode_ms:
        times = f"{encode_ms / hit_ms:,.3g} times as long"
        sentences.append(
            f"A hit in the store took {_milliseconds(hit_ms)}, an encode {_milliseconds(encode_ms)} (p50): {times}."
        )
    return "\n".join(sentences)
