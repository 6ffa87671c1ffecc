"""How soon a process that waits for another's computation has its result: from the commit to a tensor in its hands.

Both ends read CLOCK_MONOTONIC, which all processes of a machine share. Each round has a key of its own. The baseline is
the waiter's raw read of another object of the same size and age, after as long a pause: a machine that has idled is
slow to wake each of the eight threads between the two, and has cold caches. So it is measured with a pause and without.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.crew import Wire, crew
from mmcache import EmbeddingKey, MMCache
from mmcache.config import load
from mmcache.control.calls import Acquisition
from mmcache.control.channel import ControlChannel
from mmcache.entry import PREFIX_BYTES
from mmcache.metrics import nearest_rank

OBJECT_BYTES = 4 << 20
PAUSE_SECONDS = 0.03
"""How long the one still computes once the other waits: long enough for all between them to fall asleep."""
WAIT_SECONDS = 10.0
POOL_BYTES = 96 << 20
RAW_BLOCKS = 4
WARM_UP = 25
"""Rounds that do not count: by then the sidecar has touched all of the waiter's pool, which costs it a page fault for
each 4 KiB of the first lap."""
ALLOWED_MS = 1.0


def measure(config: Path, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds from one process to the other that waits for it, `rested` and `at_once`; see `figures`."""
    return {name: _measure(config, rounds, pause) for name, pause in (("rested", PAUSE_SECONDS), ("at_once", 0.0))}


def _measure(config: Path, rounds: int, pause: float) -> dict[str, Any]:
    told: list[dict[str, float]] = []
    channel = ControlChannel(load(config).control.address, name="handover")
    with contextlib.closing(channel), crew(2, _take_part, str(config), pause) as (publisher, waiter):
        channel.start()
        for worker in (publisher, waiter):
            worker.hear()  # it is connected
        for _ in range(WARM_UP + rounds):
            publisher.tell()
            publisher.hear()  # it computes: the claim is its
            waiter.tell()
            _until_somebody_waits(channel)
            publisher.tell()
            times = publisher.hear() | waiter.hear()
            publisher.tell()
            publisher.hear()  # it has put another object, for the raw read
            waiter.tell()
            told.append(times | waiter.hear())
        for worker in (publisher, waiter):
            worker.tell(end=True)
    return figures(told[WARM_UP:])


def figures(told: list[dict[str, float]]) -> dict[str, Any]:
    """From the times of each round, in seconds, to medians and parts in ms.

    `commit_to_held` begins when the publisher hands its commit to the control channel: the store has the object and has
    confirmed it. `returned_to_held` begins when the publisher's own call returned, and may be negative. Its parts:
    `to_heard` until the waiter's call was woken by the push, `to_read` until the object was read and verified,
    `to_held` until its call returned.
    """

    def spans(begin: str, end: str) -> list[float]:
        return sorted((times[end] - times[begin]) * 1e3 for times in told)

    raw = statistics.median(times["raw"] for times in told) * 1e3
    commit_to_held = spans("committing", "held")
    above = statistics.median(commit_to_held) - raw
    return {
        "rounds": len(told),
        "object_bytes": OBJECT_BYTES,
        "raw_ms": raw,
        "commit_to_held_ms": statistics.median(commit_to_held),
        "commit_to_held_p99_ms": nearest_rank(commit_to_held, 99),
        "returned_to_held_ms": statistics.median(spans("returned", "held")),
        "above_raw_ms": above,
        "allowed_ms": ALLOWED_MS,
        "within": above <= ALLOWED_MS,
        "to_heard_ms": statistics.median(spans("committing", "heard")),
        "to_read_ms": statistics.median(spans("heard", "read")),
        "to_held_ms": statistics.median(spans("read", "held")),
    }


def _until_somebody_waits(channel: ControlChannel) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    channel.wait_fresh(WAIT_SECONDS)
    while not channel.inspect(deadline=deadline)["waiters"]:
        time.sleep(0.001)


def _take_part(wire: Wire, number: int, config: str, pause: float) -> None:
    with MMCache.connect(config, strict=True, name=f"handover-{number}", pool_bytes=POOL_BYTES) as cache:
        (_publish if number == 0 else _wait)(wire, cache, pause)


def _key(number: int, pause: float, use: str = "ours") -> EmbeddingKey:
    return EmbeddingKey("benchmark", f"handover-{pause}", f"{use}-{number}")


def _publish(wire: Wire, cache: MMCache, pause: float) -> None:
    tensor = torch.rand((OBJECT_BYTES - PREFIX_BYTES) // 4)
    times: dict[str, float] = {}
    commit = cache._channel.commit

    def timed_commit(*arguments: Any, **named: Any) -> Any:
        times["committing"] = time.monotonic()
        return commit(*arguments, **named)

    def compute() -> torch.Tensor:
        wire.tell(computing=True)
        wire.hear()  # that the other process waits
        time.sleep(pause)
        return tensor

    cache._channel.commit = timed_commit  # type: ignore[method-assign]
    wire.tell(ready=True)
    rounds = 0
    while not wire.hear():
        cache.get_or_compute(_key(rounds, pause), compute)
        wire.tell(**times, returned=time.monotonic())
        wire.hear()  # that the other process has it
        cache.put(_key(rounds, pause, "raw"), tensor)
        wire.tell()
        rounds += 1


def _wait(wire: Wire, cache: MMCache, pause: float) -> None:
    times: dict[str, float] = {}
    resolutions, read = Acquisition.resolutions, cache._reader.read

    def timed_resolutions(self: Acquisition, deadline: float) -> Any:
        resolved = resolutions(self, deadline)
        times["heard"] = time.monotonic()
        return resolved

    def timed_read(*arguments: Any, **named: Any) -> Any:
        batch = read(*arguments, **named)
        times["read"] = time.monotonic()
        return batch

    Acquisition.resolutions = timed_resolutions  # type: ignore[method-assign]
    cache._reader.read = timed_read  # type: ignore[method-assign]
    store, pool = cache._attacher.require()
    raw = store._binding  # type: ignore[attr-defined]
    blocks = pool.allocate_many([OBJECT_BYTES] * RAW_BLOCKS, deadline=0.0)
    wire.tell(ready=True)
    rounds = 0
    while not wire.hear():
        embedding = cache.get_or_compute(_key(rounds, pause), lambda: torch.zeros(1))
        held = time.monotonic()
        if embedding.source != "store":
            raise SystemExit(f"it did not wait: {embedding}")
        del embedding
        wire.tell(**times, held=held)
        wire.hear()  # that there is another object, as new
        names = [named.name for named in cache._reader.wanted([_key(rounds, pause, "raw")]) or ()]
        block = blocks[rounds % RAW_BLOCKS]
        time.sleep(pause)
        started = time.monotonic()
        raw.batch_get_into(names, [block.address], [OBJECT_BYTES])
        wire.tell(raw=time.monotonic() - started)
        rounds += 1
    for block in blocks:
        pool.release(block)
