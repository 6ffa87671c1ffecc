"""A controller with a million entries: its memory, and who asks while it compares them with the store's names.

All processes are real: master, memory owner, controller, its reaper. Entries are committed as a publisher commits them,
and the store has an object under the name of each. But these objects have 16 bytes and are no entries: nobody reads
them, since the directory knows all of them. Nothing is removed and nothing found: the names are only compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.parts import Parts
from benchmarks.reconciliation import Probe, opened
from mmcache import EmbeddingKey
from mmcache.config import StoreSettings
from mmcache.control.channel import CommitEntry, ControlChannel
from mmcache.entry import EntryHeader, encode_info, lay_out
from mmcache.key import store_name
from mmcache.store.base import Outcome
from mmcache.store.mooncake import MooncakeStore

BATCH: Final = 512
OBJECT_BYTES: Final = 16
WIDTH: Final = 3584
EVERY_S: Final = 10.0
"""From the end of one reconciliation to the next."""
SHORTEST_S: Final = 5.0
"""Of a phase without a reconciliation."""
RECONCILIATIONS: Final = 3
_REGION_BYTES: Final = 1 << 20
_PATIENCE_S: Final = 60.0
_MIB: Final = 1 << 20


def entries(count: int) -> Iterator[list[CommitEntry]]:
    """Batch by batch, as vLLM's connector publishes images: one tensor, its grid, and an mm_hash in hexadecimal.

    But for their sizes, which are those of the objects that stand for them: else the controller would evict.
    """
    draw = random.Random(1)
    version = f"f1-{1:064x}"
    for start in range(0, count, BATCH):
        batch: list[CommitEntry] = []
        for number in range(start, min(start + BATCH, count)):
            tokens = draw.randrange(300, 1272)
            key = EmbeddingKey("Qwen/Qwen2.5-VL-7B-Instruct", version, f"{draw.getrandbits(256):064x}")
            tensors, _ = lay_out([("embedding", "bfloat16", (tokens, WIDTH))])
            cost_ms = draw.uniform(5.0, 40.0)
            meta = {"grid_thw": [1, 2 * (tokens // 25), 50], "num_tokens": tokens}
            header = EntryHeader(key, 0, tensors, meta, cost_ms, f"encoder-{number % 16}", 0)
            batch.append(CommitEntry(key, 0, 0, OBJECT_BYTES, cost_ms, encode_info(header)))
        yield batch


class Names:
    """Puts a small object under each name that it is given."""

    def __init__(self, parts: Parts) -> None:
        settings = StoreSettings(
            master=parts.master.address, metrics=parts.metrics, sidecar=parts.sidecar.address, attach="sidecar"
        )
        self._store = MooncakeStore.from_settings(settings, region_bytes=_REGION_BYTES, timeout=_PATIENCE_S)
        self._address = self._store.allocate_region(_REGION_BYTES).address

    def put(self, names: Sequence[str]) -> None:
        addresses, sizes = [self._address] * len(names), [OBJECT_BYTES] * len(names)
        results = self._store.put_from(names, addresses, sizes, deadline=time.monotonic() + _PATIENCE_S)
        if failed := sum(result.outcome is not Outcome.OK for result in results):
            raise SystemExit(f"the store does not take {failed} of {len(names)} objects")

    def close(self) -> None:
        self._store.close()


def fill(parts: Parts, channel: ControlChannel, count: int, console: Console) -> EmbeddingKey:
    """Have the store hold, and the controller know, so many; returns the key of one."""
    names = Names(parts)
    view = channel.wait_fresh(_PATIENCE_S)
    if view is None:
        raise SystemExit("there is no session")
    done = 0
    try:
        with console.status("publishing") as status:
            for batch in entries(count):
                names.put([store_name(entry.key, lineage=view.lineage, generation=0) for entry in batch])
                channel.commit(batch, deadline=time.monotonic() + _PATIENCE_S)
                done += len(batch)
                status.update(f"{done} of {count}")
    finally:
        names.close()
    return batch[0].key


def _is_later(ends: float, _: dict[str, int]) -> bool:
    return time.monotonic() > ends


def _has_listed(before: int, figures: dict[str, int]) -> bool:
    return figures["listing"] > before


def measure(parts: Parts, count: int, console: Console) -> dict[str, Any]:
    process = psutil.Process(parts.controller.pid)
    with opened(json.loads(parts.config.read_text())["control"]["address"]) as channel:

        def figures() -> dict[str, int]:
            return channel.inspect(deadline=time.monotonic() + _PATIENCE_S)

        empty = process.memory_info().rss
        key = fill(parts, channel, count, console)
        probe = Probe(channel, key)
        listings = figures()["listing"]
        while figures()["listing"] == listings:  # one with all of them
            time.sleep(0.1)
        taken: list[float] = []
        quiet: list[dict[str, float]] = []
        comparing: list[dict[str, float]] = []
        for number in range(RECONCILIATIONS):
            console.print(f"reconciliation {number + 1} of {RECONCILIATIONS}")
            ended = time.monotonic()
            quiet.append(probe.until(functools.partial(_is_later, ended + SHORTEST_S)))
            comparing.append(probe.until(functools.partial(_has_listed, figures()["listing"])))
            taken.append(time.monotonic() - ended - EVERY_S)
        after = figures()
    if after["entries"] != count or after.get("entry.lost", 0) or after["store_entries"] < count:
        raise SystemExit(f"that was not all of them: {after}")
    return {
        "entries": count,
        "empty_bytes": empty,
        "full_bytes": process.memory_info().rss,
        "seconds": taken,
        "quiet": quiet,
        "comparing": comparing,
    }


def bars(figures: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was promised of a million entries, and what is."""
    delay = max(one["longest_ms"] for one in figures["comparing"]) - min(one["p50_ms"] for one in figures["quiet"])
    return [
        ("the controller's memory, MiB", figures["full_bytes"] / _MIB, 1.2 * 1024),
        ("a reconciliation, s", max(figures["seconds"]), 20.0),
        ("longest delay of a lookup meanwhile, ms", delay, 20.0),
    ]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_directory", description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="how many (default: 1,000,000)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mmcache-benchmark-") as folder:
        controller = {"state": f"{folder}/controller.db", "reconcile_every": EVERY_S}
        owner_bytes = max(1 << 28, 256 * given.entries)
        with Parts(owner_bytes=owner_bytes, controller=controller) as parts:
            figures = measure(parts, given.entries, console)
    table = Table(title=f"{given.entries} entries: a lookup, over and over, in ms")
    for column in ("while", "seconds", "p50", "p99", "longest"):
        table.add_column(column, justify="left" if column == "while" else "right")
    for phase in ("quiet", "comparing"):
        for one in figures[phase]:
            table.add_row(phase, *(f"{value:.2f}" for value in one.values()))
    Console().print(table)
    per_entry = (figures["full_bytes"] - figures["empty_bytes"]) / given.entries
    Console().print(f"the controller's memory: {per_entry:.0f} bytes an entry", highlight=False)
    for bar, value, most in bars(figures):
        Console().print(f"{bar}: {value:.2f} < {most:g}: {'met' if value < most else 'NOT MET'}", highlight=False)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
