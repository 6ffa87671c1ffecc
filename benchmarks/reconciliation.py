"""How soon a controller knows again what the store has, and what that costs whoever asks it meanwhile.

Entries are published, the controller is killed and started again, and a client asks it for one key all the time:
before, while the store is listed and read, and afterwards, when it is only listed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.parts import Parts
from mmcache import EmbeddingKey, MMCache
from mmcache.control.channel import ControlChannel
from mmcache.metrics import nearest_rank

BATCH: Final = 500
ENTRY_BYTES: Final = 8 << 10
"""More than the store takes for one."""
EVERY_S: Final = 0.005
"""A lookup, or a look at the figures."""
LISTINGS: Final = 3
_PATIENCE_S: Final = 600.0


class Probe:
    """Asks for one key, over and over."""

    def __init__(self, channel: ControlChannel, key: EmbeddingKey) -> None:
        self._channel = channel
        self._key = key

    def until(self, done: Callable[[dict[str, int]], bool]) -> dict[str, float]:
        """Ask until the controller's figures are so; milliseconds that lookups took, and seconds that all of it did."""
        taken: list[float] = []
        began = time.monotonic()
        while True:
            asked = time.monotonic()
            self._channel.lookup([self._key], deadline=asked + 60.0)
            taken.append((time.monotonic() - asked) * 1e3)
            if done(self._channel.inspect(deadline=time.monotonic() + 60.0)):
                break
            if time.monotonic() > began + _PATIENCE_S:
                raise SystemExit(f"that does not happen within {_PATIENCE_S:.0f} s")
            time.sleep(EVERY_S)
        taken.sort()
        return {
            "seconds": time.monotonic() - began,
            "p50_ms": nearest_rank(taken, 50),
            "p99_ms": nearest_rank(taken, 99),
            "longest_ms": taken[-1],
        }


def publish(config: Path, count: int, console: Console) -> EmbeddingKey:
    """So many small entries; returns the key of one."""
    tensor = torch.zeros(8)
    keys = [EmbeddingKey("model", "1", f"item-{number}") for number in range(count)]
    with MMCache.connect(config) as cache, console.status("publishing") as status:
        for start in range(0, count, BATCH):
            batch = keys[start : start + BATCH]
            while batch:  # a busy store refuses some
                outcomes = cache.put_many([(key, tensor) for key in batch])
                batch = [key for key, one in zip(batch, outcomes, strict=True) if not one.readable]
            status.update(f"published {start + BATCH} of {count}")
    return keys[0]


def measure(parts: Parts, count: int, console: Console) -> dict[str, Any]:
    key = publish(parts.config, count, console)
    address = json.loads(parts.config.read_text())["control"]["address"]
    with opened(address) as channel:
        probe = Probe(channel, key)
        console.print("before")
        ends = time.monotonic() + 5.0
        quiet = probe.until(lambda _: time.monotonic() > ends)
        console.print("starting the controller anew")
        term = term_of(channel)
        parts.controller.kill()
        began = time.monotonic()
        parts.controller.start()
        while term_of(channel) == term:
            time.sleep(EVERY_S)
        serving_s = time.monotonic() - began
        found = probe.until(lambda figures: figures.get("entry.found", 0) >= count)
        known_s = time.monotonic() - began
        console.print("listing")
        before = channel.inspect(deadline=time.monotonic() + 60.0)["listing"]
        listed = probe.until(lambda figures: figures["listing"] >= before + LISTINGS)
    return {
        "entries": count,
        "serving_s": serving_s,
        "known_s": known_s,
        "quiet": quiet,
        "reading": found,
        "listing": listed,
    }


def term_of(channel: ControlChannel) -> int:
    """Of the session that it has, or waits for."""
    view = channel.wait_fresh(60.0)
    if view is None:
        raise SystemExit("there is no session")
    return view.term


@contextlib.contextmanager
def opened(address: str) -> Iterator[ControlChannel]:
    channel = ControlChannel(address, name="probe")
    with contextlib.closing(channel):
        channel.start()
        term_of(channel)
        yield channel


def bars(figures: dict[str, Any]) -> list[tuple[str, float, float]]:
    """What was promised of 100,000 entries, and what is."""
    delay = max(figures[phase]["longest_ms"] for phase in ("reading", "listing")) - figures["quiet"]["p50_ms"]
    return [
        ("all is known after the controller's start, s", figures["known_s"], 10.0),
        ("longest delay of a lookup meanwhile, ms", delay, 20.0),
    ]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reconciliation", description=__doc__)
    parser.add_argument("--entries", type=int, default=100_000, help="how many (default: 100,000)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mmcache-benchmark-") as folder:
        controller = {"state": f"{folder}/controller.db", "reconcile_every": 1.0}
        with Parts(owner_bytes=max(1 << 28, given.entries * ENTRY_BYTES), controller=controller) as parts:
            figures = measure(parts, given.entries, console)
    table = Table(title=f"{given.entries} entries: a lookup, over and over, in ms")
    for column in ("while", "seconds", "p50", "p99", "longest"):
        table.add_column(column, justify="left" if column == "while" else "right")
    for phase in ("quiet", "reading", "listing"):
        table.add_row(phase, *(f"{value:.2f}" for value in figures[phase].values()))
    Console().print(table)
    for bar, value, most in bars(figures):
        Console().print(f"{bar}: {value:.2f} < {most:g}: {'met' if value < most else 'NOT MET'}", highlight=False)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
