"""What a hit and a publication cost, against the raw store, files on tmpfs and a memory copy, in one run.

The bytes lie in another process (`mooncake_client`), and nothing is local unless a line says so. Ratios are medians
over paired runs of (baseline's time / ours): 1.00 is as fast as the baseline.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cluster import Cluster, cluster
from benchmarks.measure import Contender, medians, paired, ratio
from benchmarks.stages import LOCAL_HIT, REST, TOTAL, Stages, publication, store_read
from mmcache import EmbeddingKey, MMCache
from mmcache.entry import PREFIX_BYTES
from mmcache.memory.pool import Block
from mmcache.store.binding import Binding

BATCH = 16
KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64 KiB": 64 * KIB, "1 MiB": MIB, "4 MiB": 4 * MIB, "16 MiB": 16 * MIB}
"""Sizes of whole objects, prefix included, so that the raw store moves exactly the same bytes."""
POOL_BYTES = 640 * MIB

BASELINES = ("safetensors", "memcpy")
"""What has nothing to do with how a client is attached."""

Attach = Literal["sidecar", "embedded"]
ATTACH: tuple[Attach, ...] = ("sidecar", "embedded")


class Client:
    """A client without local entries, and the raw store client below it with blocks of its own."""

    def __init__(self, place: Cluster, attach: Attach, **settings: Any) -> None:
        import os  # noqa: PLC0415

        os.environ["MMCACHE_STORE__ATTACH"] = attach
        try:
            self.cache = MMCache.connect(
                place.config,
                strict=True,
                pool_bytes=POOL_BYTES,
                read_timeout=60.0,
                **{"local_entries": False, **settings},
            )
        finally:
            del os.environ["MMCACHE_STORE__ATTACH"]
        self._attachment = self.cache._attacher.require()
        self.raw: Binding = self._attachment.store._binding  # type: ignore[attr-defined]
        if self._attachment.store.kind != attach:
            raise SystemExit(f"attached as {self._attachment.store.kind}, not {attach}")

    def blocks(self, nbytes: int) -> list[Block]:
        return self._attachment.pool.allocate_many([nbytes] * BATCH, deadline=time.monotonic() + 10)

    def release(self, blocks: list[Block]) -> None:
        for block in blocks:
            self._attachment.pool.release(block)

    def names(self, keys: list[EmbeddingKey]) -> list[str]:
        return [named.name for named in self.cache._reader.wanted(keys) or ()]


def keys_of(label: str, count: int = BATCH) -> list[EmbeddingKey]:
    return [EmbeddingKey("benchmark", "1", f"{label}-{number}") for number in range(count)]


def floats(nbytes: int) -> int:
    return (nbytes - PREFIX_BYTES) // 4


def publish(writer: MMCache, label: str, nbytes: int) -> list[EmbeddingKey]:
    keys = keys_of(f"{label}-{time.monotonic_ns()}")
    for key in keys:
        if not writer.put(key, torch.rand(floats(nbytes))).readable:
            raise SystemExit("the store has no room for the benchmark")
    return keys


def read_all(cache: MMCache, keys: list[EmbeddingKey]) -> list[torch.Tensor]:
    """The tensors of entries that must all be there."""
    return [embedding.tensor for embedding in cache.get_many(keys)]  # type: ignore[union-attr]


def read_one(cache: MMCache, key: EmbeddingKey) -> torch.Tensor:
    """The tensor of an entry that must be there."""
    return cache.get(key).tensor  # type: ignore[union-attr]


def reads(place: Cluster, writer: MMCache, attach: Attach, runs: int) -> list[dict[str, Any]]:
    """`get_many` of 16, verified by prefix and in full, against the raw client's `batch_get_into` of the same bytes."""
    rows = []
    prefix, full = Client(place, attach, verify="prefix"), Client(place, attach, verify="full")
    for label, nbytes in SIZES.items():
        keys = publish(writer, label, nbytes)
        names, blocks = prefix.names(keys), prefix.blocks(nbytes)
        addresses, sizes = [block.address for block in blocks], [nbytes] * BATCH
        contenders: dict[str, Callable[[], object]] = {
            "raw": functools.partial(prefix.raw.batch_get_into, names, addresses, sizes),
            "prefix": functools.partial(read_all, prefix.cache, keys),
            "full": functools.partial(read_all, full.cache, keys),
        }
        if attach == "sidecar":
            contenders |= {"safetensors": safetensors_reader(label, nbytes), "memcpy": copier(nbytes)}
        seconds = paired(contenders, runs=runs)
        prefix.release(blocks)
        median = medians(seconds)
        row = {"attach": attach, "size": label, **{f"{name}_ms": value * 1e3 for name, value in median.items()}}
        row |= {f"{name}_to_raw": ratio(seconds, name, "raw") for name in ("prefix", "full")}
        if attach == "sidecar":
            row["prefix_to_safetensors"] = ratio(seconds, "prefix", "safetensors")
        row["prefix_GB_s"] = BATCH * nbytes / median["prefix"] / 1e9
        rows.append(row)
    prefix.cache.close()
    full.cache.close()
    return rows


def safetensors_reader(label: str, nbytes: int) -> Callable[[], object]:
    """Reads 16 files on tmpfs into memory, as an engine would that keeps embeddings in files."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 - a baseline only

    folder = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="mmcache-benchmark-")
    paths = [Path(folder.name) / f"{label}-{number}" for number in range(BATCH)]
    for path in paths:
        save_file({"embedding": torch.rand(floats(nbytes))}, path)

    def read() -> object:
        folder.name  # noqa: B018  it goes with the last reader
        return [load_file(path)["embedding"].clone() for path in paths]

    return read


def copier(nbytes: int) -> Callable[[], object]:
    """A warm copy of as many bytes within this process."""
    source, target = torch.rand(BATCH, nbytes // 4), torch.rand(BATCH, nbytes // 4)
    return lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), BATCH * nbytes)


def single(place: Cluster, writer: MMCache, runs: int) -> dict[str, float]:
    """p50 in µs of one 64 KiB entry, raw and ours, and of local hits of one and of 16.

    Hits are timed over and over, and `in_turn`: one, 16, one, 16, …, where a processor has to learn each call anew.
    """
    nbytes = SIZES["64 KiB"]
    keys = publish(writer, "single", nbytes)
    client = Client(place, "sidecar", verify="prefix")
    names, blocks = client.names(keys), client.blocks(nbytes)
    seconds = paired(
        {
            "raw": lambda: client.raw.batch_get_into(names[:1], [blocks[0].address], [nbytes]),
            "ours": lambda: read_one(client.cache, keys[0]),
        },
        runs=100 * runs,
        warm_up=100,
    )
    client.release(blocks)
    client.cache.close()
    local = Client(place, "sidecar", verify="prefix", local_entries=True)
    local.cache.get_many(keys)
    one: Contender = functools.partial(read_one, local.cache, keys[0])
    sixteen: Contender = functools.partial(read_all, local.cache, keys)
    alone = {
        name: medians(paired({name: hit}, runs=500 * runs, warm_up=500))[name]
        for name, hit in (("one", one), ("sixteen", sixteen))
    }
    in_turn = medians(paired({"one": one, "sixteen": sixteen}, runs=500 * runs, warm_up=500))
    local.cache.close()
    return {
        "raw_us": statistics.median(seconds["raw"]) * 1e6,
        "ours_us": statistics.median(seconds["ours"]) * 1e6,
        "above_raw_us": (statistics.median(seconds["ours"]) - statistics.median(seconds["raw"])) * 1e6,
        "local_one_us": alone["one"] * 1e6,
        "local_of_sixteen_us": alone["sixteen"] * 1e6 / BATCH,
        "local_one_in_turn_us": in_turn["one"] * 1e6,
        "local_of_sixteen_in_turn_us": in_turn["sixteen"] * 1e6 / BATCH,
    }


def puts(place: Cluster, attach: Attach, runs: int) -> dict[str, Any]:
    """`put_many` of 16 of 4 MiB from `empty` memory against the raw `batch_put_from` and one `batch_is_exist`."""
    nbytes = SIZES["4 MiB"]
    client = Client(place, attach)
    tensors = [client.cache.empty((floats(nbytes),)).fill_(1.0) for _ in range(BATCH)]
    blocks = client.blocks(nbytes)
    addresses, sizes = [block.address for block in blocks], [nbytes] * BATCH

    def raw() -> object:
        names = [f"raw-{time.monotonic_ns()}-{number}" for number in range(BATCH)]
        codes = client.raw.batch_put_from(names, addresses, sizes)
        there = client.raw.batch_is_exist(names)
        if any(codes) or min(there) < 1:
            raise SystemExit(f"the raw put failed: {codes} {there}")
        return names

    def ours() -> object:
        keys = keys_of(f"put-{time.monotonic_ns()}")
        results = client.cache.put_many(list(zip(keys, tensors, strict=True)), timeout=60.0)
        if not all(result.readable for result in results):
            raise SystemExit(f"our put failed: {results}")
        return results

    seconds = paired({"raw": raw, "ours": ours}, runs=runs, warm_up=1)
    client.release(blocks)
    tensors.clear()
    client.cache.close()
    median = medians(seconds)
    return {
        "attach": attach,
        "raw_ms": median["raw"] * 1e3,
        "ours_ms": median["ours"] * 1e3,
        "ours_to_raw": ratio(seconds, "ours", "raw"),
    }


def profile(place: Cluster, writer: MMCache, runs: int) -> dict[str, dict[str, float]]:
    """Median µs of each stage of each path; reads and publications through the sidecar."""
    small, large = publish(writer, "profile", SIZES["64 KiB"]), publish(writer, "profile", SIZES["1 MiB"])
    client = Client(place, "sidecar", verify="prefix")
    local = Client(place, "sidecar", verify="prefix", local_entries=True)
    local.cache.get_many(small)
    tensors = [client.cache.empty((floats(SIZES["1 MiB"]),)).fill_(1.0) for _ in range(BATCH)]
    hit, read, put = Stages(LOCAL_HIT), Stages(store_read(client.raw)), Stages(publication(client.raw))

    def publish_all() -> object:
        return client.cache.put_many(list(zip(keys_of(f"put-{time.monotonic_ns()}"), tensors, strict=True)))

    profiles = {
        "local hit": hit.median_us(lambda: read_one(local.cache, small[0]), runs=500 * runs),
        f"{BATCH} local hits": hit.median_us(lambda: read_all(local.cache, small), runs=500 * runs),
        "one of 64 KiB": read.median_us(lambda: read_one(client.cache, small[0]), runs=50 * runs),
        f"{BATCH} of 64 KiB": read.median_us(lambda: read_all(client.cache, small), runs=20 * runs),
        f"{BATCH} of 1 MiB": read.median_us(lambda: read_all(client.cache, large), runs=5 * runs),
        f"put of {BATCH} of 1 MiB": put.median_us(publish_all, runs=runs),
    }
    local.cache.close()
    tensors.clear()
    client.cache.close()
    return profiles


def show(figures: dict[str, Any], console: Console) -> None:
    """The figures as tables."""
    table = Table(title=f"get_many of {BATCH}: median ms, and how fast against the raw client (1.00 is as fast)")
    columns = ["attach", "size", "raw_ms", "prefix_ms", "full_ms", "safetensors_ms", "memcpy_ms", "prefix_to_raw"]
    columns += ["full_to_raw", "prefix_to_safetensors", "prefix_GB_s"]
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in figures["reads"]:
        table.add_row(*(text(row.get(column)) for column in columns))
    console.print(table)
    table = Table(title=f"put_many of {BATCH} of 4 MiB from empty() memory, and one entry of 64 KiB")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for row in figures["puts"]:
        for name in ("raw_ms", "ours_ms", "ours_to_raw"):
            table.add_row(f"{row['attach']} put: {name.replace('_', ' ')}", text(row[name]))
    for name, value in figures["single"].items():
        table.add_row(f"64 KiB: {name.replace('_', ' ')}", text(value))
    console.print(table)
    if profiles := figures.get("profile"):
        show_profiles(profiles, console)


def show_profiles(profiles: dict[str, dict[str, float]], console: Console) -> None:
    """Stages in rows, paths in columns."""
    table = Table(title="Where the time goes: median µs of each stage (sidecar, verify: prefix)")
    table.add_column("stage")
    for path in profiles:
        table.add_column(path, justify="right")
    stages = dict.fromkeys(stage for profile in profiles.values() for stage in profile)
    for stage in [*(stage for stage in stages if stage not in (REST, TOTAL)), REST, TOTAL]:
        table.add_row(stage, *(text(profile.get(stage)) for profile in profiles.values()))
    console.print(table)


def text(value: object) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def plot(figures: dict[str, Any], path: Path) -> None:
    """Throughput by size, as a picture."""
    import matplotlib  # noqa: PLC0415 - only where it is asked for

    matplotlib.use("Agg")
    from matplotlib import pyplot  # noqa: PLC0415

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for attach in ("sidecar", "embedded"):
        rows = [row for row in figures["reads"] if row["attach"] == attach]
        for contender in ("raw", "prefix", "full", "safetensors", "memcpy"):
            points = [
                (row["size"], BATCH * SIZES[row["size"]] / row[f"{contender}_ms"] / 1e6)
                for row in rows
                if f"{contender}_ms" in row
            ]
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    marker="o",
                    label=contender if contender in BASELINES else f"{attach}, {contender}",
                )
    axes.set_ylabel("GB/s")
    axes.set_title(f"Reading {BATCH} entries that another process owns")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.datapath", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="paired runs of each line (default: 15)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="draw throughput by size there (needs matplotlib)")
    parser.add_argument("--profile", action="store_true", help="also time each stage of each path")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    with console.status("starting a cluster") as status, cluster("8GiB") as place:
        writer = MMCache.connect(place.config, strict=True, local_entries=False)
        figures: dict[str, Any] = {"batch": BATCH, "runs": arguments.runs, "reads": [], "puts": []}
        for attach in ATTACH:
            status.update(f"reading, {attach}")
            figures["reads"] += reads(place, writer, attach, arguments.runs)
        status.update("single entries and local hits")
        figures["single"] = single(place, writer, arguments.runs)
        for attach in ATTACH:
            status.update(f"publishing, {attach}")
            figures["puts"].append(puts(place, attach, arguments.runs))
        if arguments.profile:
            status.update("timing stages")
            figures["profile"] = profile(place, writer, arguments.runs)
        writer.close()
    show(figures, Console())
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.plot:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
