"""An engine under load: closed loops of `get`, `put` and `get_or_compute` on one cache, each in a thread of its own.

`python -m benchmarks.fault_load CLIENT_YAML OPTIONS` is such an engine as a process. It says that it is ready once all
loops succeed, then obeys one JSON object a line (`{"do": "watch", "seconds": 30}`), and answers each with another:

    watch    wait until all kinds of calls succeed again
    rest     let the loops rest until no call holds anything, and tell what the process holds
    end      end the loops, then the cache; everything that was measured
    close    end the cache, then the loops; the same

`benchmarks.fault_engine.Engine` is its other end. Without stdin it ends.

What a key must hold follows from its number, and every tensor that a call returns is compared with it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import psutil
import torch

from mmcache import EmbeddingKey, LifecycleError, MMCache

KINDS = ("get", "put", "compute")
WORKING_SET = 16
STEADY = 20
"""So many calls of a kind succeed in a row while it serves."""
READY_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""The store's own calls, which outlast their callers' deadlines, have ended by then."""
_TICK_SECONDS = 0.005


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How an engine asks."""

    name: str = "engine"
    """Engines of one name ask for the same keys."""
    timeout: float = 1.0
    """Of every call, in seconds."""
    burst: int = 16
    """Calls one right after the other, as an engine asks for the items of one step; a loop pauses between bursts."""
    pause: float = 0.03
    """Seconds between two bursts, so that calls that cost microseconds leave the machine to the others."""
    nbytes: int = 32 << 10
    pool_bytes: int = 64 << 20


class Sample(NamedTuple):
    """One call: `time.monotonic()` when it began, how long it took, and whether the cache did what it is for."""

    started: float
    seconds: float
    ok: bool


class Load:
    """The loops, what they measured, and what must never happen: `exceptions` in a caller and `wrong` bytes."""

    def __init__(self, cache: MMCache, options: Options) -> None:
        self.samples: dict[str, list[Sample]] = {kind: [] for kind in KINDS}
        self.exceptions: list[str] = []
        self.wrong: list[str] = []
        self.stall = 0.0
        """The latest that a thread of this process, which only slept, woke up in seconds: the machine's share."""
        self._cache = cache
        self._options = options
        self._base = torch.arange(options.nbytes // 4, dtype=torch.float32)
        self._recent = [0] * WORKING_SET  # numbers that were published last, once they were
        self._numbers = itertools.count()
        self._turns = {kind: threading.Lock() for kind in KINDS}
        self._ending = threading.Event()
        self._closing = False
        loops = dict(zip(KINDS, (self._get, self._put, self._compute), strict=True))
        self._threads = [threading.Thread(target=self._watch_clock, name="load-clock", daemon=True)]
        self._threads += [
            threading.Thread(target=self._run, args=(turn, self._turns[kind]), name=f"load-{kind}", daemon=True)
            for kind, turn in loops.items()
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def steady(self, seconds: float) -> bool:
        """Wait until all kinds of calls succeed again and again; False if they did not within `seconds`."""
        since = time.monotonic()
        while time.monotonic() - since < seconds:
            tails = [samples[-STEADY:] for samples in self.samples.values()]
            if all(len(tail) == STEADY and all(one.ok and one.started > since for one in tail) for tail in tails):
                return True
            time.sleep(_TICK_SECONDS)
        return False

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """No call runs within a `with` block."""
        with contextlib.ExitStack() as stack:
            for turn in self._turns.values():
                stack.enter_context(turn)
            yield

    def so_far(self) -> dict[str, Any]:
        """What must never happen, and the longest call of each kind in seconds."""
        longest = {kind: max(one.seconds for one in samples) for kind, samples in self.samples.items()}
        return {"exceptions": self.exceptions, "wrong": self.wrong, "longest": longest}

    def end(self, seconds: float) -> bool:
        """Begin no further call; whether all that ran have ended within `seconds`."""
        self._ending.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close_under_way(self) -> float:
        """Close the cache while calls run, which may then raise LifecycleError; how many seconds that took."""
        self._closing = True
        started = time.monotonic()
        self._cache.close()
        return time.monotonic() - started

    def _run(self, turn: Callable[[], None], lock: threading.Lock) -> None:
        for number in itertools.count():
            if number % self._options.burst == 0 and self._ending.wait(self._options.pause):
                return
            try:
                with lock:
                    turn()
            except LifecycleError as error:
                if self._closing:
                    return
                self.exceptions.append(repr(error))
            except Exception as error:  # noqa: BLE001 - what may not happen: it is reported, and the load goes on
                self.exceptions.append(repr(error))

    def _key(self, kind: str, number: int) -> EmbeddingKey:
        return EmbeddingKey("benchmark", "1", f"{self._options.name}-{kind}-{number}")

    def _check(self, kind: str, number: int, tensor: torch.Tensor) -> None:
        if not torch.equal(tensor, self._base + number):
            self.wrong.append(f"{kind} {number}: {tensor.flatten()[:4].tolist()}")

    def _get(self) -> None:
        number = self._recent[len(self.samples["get"]) % WORKING_SET]
        key = self._key("put", number)
        started = time.monotonic()
        embedding = self._cache.get(key, timeout=self._options.timeout)
        self.samples["get"].append(Sample(started, time.monotonic() - started, embedding is not None))
        if embedding is not None:
            self._check("get", number, embedding.tensor)

    def _put(self) -> None:
        number = next(self._numbers)
        key, tensor = self._key("put", number), self._base + number
        started = time.monotonic()
        result = self._cache.put(key, tensor, timeout=self._options.timeout)
        self.samples["put"].append(Sample(started, time.monotonic() - started, result.readable))
        if result.readable:
            self._recent[number % WORKING_SET] = number

    def _compute(self) -> None:
        """Twice the same new key. It went well if the second call found what the first had published."""
        number = len(self.samples["compute"])
        key, tensor = self._key("compute", number), self._base + number
        calls: list[tuple[float, float]] = []
        for _ in range(2):
            started = time.monotonic()
            embedding = self._cache.get_or_compute(key, lambda: tensor, timeout=self._options.timeout)
            calls.append((started, time.monotonic() - started))
            self._check("compute", number, embedding.tensor)
        self.samples["compute"] += [Sample(*call, embedding.source != "computed") for call in calls]

    def _watch_clock(self) -> None:
        while not self._ending.is_set():
            started = time.monotonic()
            time.sleep(_TICK_SECONDS)
            self.stall = max(self.stall, time.monotonic() - started - _TICK_SECONDS)


def resources(cache: MMCache) -> dict[str, float]:
    """What a process holds: it must not grow with the faults that it met."""
    process, stats = psutil.Process(), cache.stats()
    return {
        "threads": threading.active_count(),
        "system_threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "resident_bytes": process.memory_info().rss,
        "held_blocks": stats.get("pool.held_blocks", 0),
        "attachments_lost": stats.get("attachment_lost", 0),
    }


def _settled(cache: MMCache) -> dict[str, float]:
    """Its resources once no call holds a block any more, or what they are after SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while (now := resources(cache))["held_blocks"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return now


def _finished(load: Load, cache: MMCache, *, closing: bool) -> dict[str, Any]:
    """End the loops and the cache, in the one order or the other, and report."""
    close_seconds = load.close_under_way() if closing else 0.0
    ended = load.end(SETTLE_SECONDS)
    stats = cache.stats()
    if not closing:
        _settled(cache)
        close_seconds = load.close_under_way()
    return {
        **load.so_far(),
        "samples": load.samples,
        "stall_seconds": load.stall,
        "ended": ended,
        "close_seconds": close_seconds,
        "left": sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("mmcache")),
        "stats": stats,
    }


def main() -> None:
    """Be one engine."""
    torch.set_num_threads(1)
    options = msgspec.json.decode(sys.argv[2], type=Options)
    timeouts = dict.fromkeys(("read_timeout", "publish_timeout", "wait_timeout"), options.timeout)
    cache = MMCache.connect(sys.argv[1], local_entries=False, pool_bytes=options.pool_bytes, **timeouts)
    load = Load(cache, options)
    load.start()
    print(json.dumps({"ready": load.steady(READY_SECONDS), "stats": cache.stats()}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        match command["do"]:
            case "watch":
                answer = {"back": load.steady(command["seconds"]), **load.so_far(), "stats": cache.stats()}
            case "rest":
                with load.resting():
                    answer = {"holds": _settled(cache)}
            case "end" | "close":
                answer = _finished(load, cache, closing=command["do"] == "close")
            case unknown:
                raise ValueError(f"no such command: {unknown}")
        print(json.dumps(answer), flush=True)
    os._exit(0)  # a store that hangs must not keep a benchmark's process


if __name__ == "__main__":
    main()
