"""A million entries fit, and neither they nor claims make the garbage collector's work grow."""

from __future__ import annotations

import gc
import tracemalloc

from controller_driver import World

ENTRIES = 8_000
MOST_BYTES = 1000
"""An entry's share of 1 GiB for a million, with what else a process needs."""


def test_a_million_entries_fit_into_a_gibibyte() -> None:
    client = World().client("c")
    client.put("warm")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for start in range(0, ENTRIES, 100):
            client.put(*(f"{number:064x}" for number in range(start, start + 100)), info=bytes(150))
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / ENTRIES <= MOST_BYTES


def test_the_collector_walks_no_entry_and_no_claim() -> None:
    world = World()
    client = world.client("c")
    gc.collect()
    walked = len(gc.get_objects())
    for start in range(0, ENTRIES, 100):
        names = [f"{number:064x}" for number in range(start, start + 100)]
        client.put(*names)
        client.acquire(*(f"new-{name}" for name in names))
    gc.collect()
    assert world.stats("entries", "claims") == (ENTRIES, ENTRIES)
    assert len(gc.get_objects()) - walked < ENTRIES / 10
