"""The load of one client of the soak: calls of every kind at random, each checked, timed and counted."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

import torch

from benchmarks import soak_content as content
from mmcache import AsyncMMCache, Embedding, EmbeddingKey, MMCache

NEW_KEYS_A_SECOND: Final = 4.0
RECENT_KEYS: Final = 300
"""How many of the newest keys are asked for; older ones are left to the store's eviction."""
LONGEST_HOLD_S: Final = 20.0
ALLOWED_SHARE, ALLOWED_S = 0.10, 0.020
"""A call may exceed its deadline by this share of it and this much."""
MAX_DEFECTS: Final = 20
MAX_BATCH: Final = 12
PAUSE_SECONDS: Final = 120.0
STALL_WATCH_S: Final = 0.02
COMPUTE_S: Final = 0.002

OPERATIONS: Final = {
    "get": 20,
    "get_like": 10,
    "get_many": 20,
    "get_many_like": 8,
    "get_unlike": 1,
    "put": 8,
    "put_many": 6,
    "put_empty": 8,
    "get_or_compute": 15,
    "get_or_compute_many": 12,
    "lookup": 5,
    "stats": 1,
}
"""With their weights."""


class Figures:
    """What happened so far. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.largest: dict[str, float] = {}
        self.defects: list[str] = []
        self.stalled_s = 0.0
        """How long, in all, no thread of this process could run, for want of a CPU or of the GIL."""

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def most(self, name: str, value: float) -> None:
        """Keep the largest."""
        with self._lock:
            self.largest[name] = max(self.largest.get(name, 0.0), value)

    def defect(self, kind: str, text: str) -> None:
        """Something that must never happen."""
        with self._lock:
            self.counts[f"defect.{kind}"] += 1
            if len(self.defects) < MAX_DEFECTS:
                self.defects.append(f"{kind}: {text}")

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {"counts": dict(self.counts), "largest": dict(self.largest), "defects": list(self.defects)}


class AsyncAsSync:
    """The asyncio client behind the names of the other, on an event loop of its own; some calls are cancelled."""

    def __init__(self, config: str, cancel_share: float = 0.03, **client: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._cancel_share = cancel_share
        threading.Thread(target=self._loop.run_forever, name="soak-loop", daemon=True).start()
        self._cache: AsyncMMCache = self._run(AsyncMMCache.connect(config, **client))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cache, name)

        def call(*arguments: Any, **named: Any) -> Any:
            return self._run(self._perhaps_cancelled(method(*arguments, **named)))

        return call

    async def _perhaps_cancelled(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if random.random() >= self._cancel_share:
            return await coroutine
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait({task}, timeout=random.uniform(0.0, 0.02))
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            raise Cancelled from None

    def get_or_compute(self, key: EmbeddingKey, compute: Callable[[], Any], **named: Any) -> Any:
        async def computed() -> Any:
            return await asyncio.to_thread(compute)

        return self._run(self._perhaps_cancelled(self._cache.get_or_compute(key, computed, **named)))

    def get_or_compute_many(self, keys: Sequence[EmbeddingKey], compute: Any, **named: Any) -> Any:
        async def computed(some: Sequence[EmbeddingKey]) -> Any:
            return await asyncio.to_thread(compute, some)

        return self._run(self._perhaps_cancelled(self._cache.get_or_compute_many(keys, computed, **named)))

    def stats(self) -> dict[str, float]:
        return self._cache.stats()

    @property
    def sync(self) -> MMCache:
        return self._cache._cache

    def close(self) -> None:
        self._run(self._cache.close())
        self._loop.call_soon_threadsafe(self._loop.stop)


class Cancelled(Exception):
    """The soak itself cancelled a call."""


class _Held(NamedTuple):
    until: float
    number: int
    embedding: Embedding


class Load:
    """Threads that call one cache. `pause` returns once they stand still and hold nothing.

    Args:
        epoch: when the soak began, `time.monotonic()` seconds; which keys are new follows from it, in every process.
        hold_bytes: most bytes of tensors that each thread keeps.
    """

    def __init__(
        self, cache: Any, figures: Figures, *, seed: int, epoch: float, threads: int, hold_bytes: int, pace_s: float
    ) -> None:
        self._cache = cache
        self._figures = figures
        self._epoch = epoch
        self._hold_bytes = hold_bytes
        self._pace_s = pace_s
        self._running = threading.Event()
        self._ending = False
        self._resting = [threading.Event() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._work, args=(seed * 100 + number, resting), name="soak-load", daemon=True)
            for number, resting in enumerate(self._resting)
        ]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        self._running.set()

    def pause(self) -> None:
        """Return once all threads stand still. A call that does not end is a defect."""
        self._running.clear()
        deadline = time.monotonic() + PAUSE_SECONDS
        for resting in self._resting:
            if not resting.wait(max(0.0, deadline - time.monotonic())):
                self._figures.defect("hung", f"a call has not ended after {PAUSE_SECONDS:g} s")

    def end(self) -> None:
        """Pause, and let the threads end."""
        self.pause()
        self._ending = True
        self._running.set()
        for thread in self._threads:
            thread.join(PAUSE_SECONDS)

    def _work(self, seed: int, resting: threading.Event) -> None:
        choose = random.Random(seed)
        held: list[_Held] = []
        while not self._ending:
            if not self._running.is_set():
                self._release(held, math.inf)
                resting.set()
                self._running.wait()
                resting.clear()
                continue
            self._release(held, time.monotonic())
            operation = choose.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
            try:
                getattr(self, f"_{operation}")(choose, held)
            except Cancelled:
                self._figures.count("cancelled")
            except Exception:  # noqa: BLE001 - none is allowed: that is what is being tested
                self._figures.defect("exception", f"{operation}: {traceback.format_exc()}")
            self._figures.count(f"call.{operation}")
            time.sleep(choose.uniform(0.0, 2 * self._pace_s))

    # Keys, deadlines, checks

    def _number(self, choose: random.Random) -> int:
        """Of a key: the newer, the more often."""
        newest = int((time.monotonic() - self._epoch) * NEW_KEYS_A_SECOND) + RECENT_KEYS
        return newest - int(RECENT_KEYS * choose.random() ** 2)

    def _numbers(self, choose: random.Random) -> list[int]:
        return [self._number(choose) for _ in range(choose.randint(1, MAX_BATCH))]

    def _alike(self, choose: random.Random) -> list[int]:
        """Numbers of keys whose entries have one layout."""
        first = self._number(choose)
        wanted = content.layout(first)
        others = range(first - RECENT_KEYS, first + RECENT_KEYS)
        return [first, *[number for number in others if content.layout(number) == wanted]][:MAX_BATCH]

    def _timed(self, operation: str, choose: random.Random, default: float, call: Callable[..., Any]) -> Any:
        timeout = None if choose.random() < 0.5 else choose.choice((0.02, 0.1, 0.3, 1.0, 2.0))
        allowed = default if timeout is None else timeout
        started, stalled = time.monotonic(), self._figures.stalled_s
        result = call(timeout=timeout)
        self._took(operation, time.monotonic() - started, allowed, stalled)
        return result

    def _took(self, operation: str, seconds: float, allowed: float, stalled: float) -> None:
        self._figures.most(f"seconds.{operation}", seconds)
        excess = seconds - allowed * (1.0 + ALLOWED_SHARE) - ALLOWED_S
        if excess > 0.0:
            self._figures.count(f"late.{operation}")
            self._figures.most(f"excess.{operation}", excess)
            time.sleep(2 * STALL_WATCH_S)  # for what watches to have noticed
            self._figures.most(f"unexplained.{operation}", excess - (self._figures.stalled_s - stalled))

    def _check(self, number: int, embedding: Embedding, choose: random.Random, held: list[_Held]) -> None:
        self._figures.count("checked")
        self._figures.count(f"had.{embedding.source}")
        if (fault := content.fault(number, embedding)) is not None:
            self._figures.defect("wrong", f"item {number} from {embedding.source} {fault}")
            return
        if embedding.source != "computed" and choose.random() < 0.3:
            held.append(_Held(time.monotonic() + choose.random() ** 2 * LONGEST_HOLD_S, number, embedding))

    def _release(self, held: list[_Held], now: float) -> None:
        """Check once more what was held, and let go of what is due, and of the oldest of what is too much."""
        excess = sum(content.nbytes_of(item.number) for item in held) - self._hold_bytes
        kept = []
        for item in held:
            if item.until > now and excess <= 0:
                kept.append(item)
                continue
            excess -= content.nbytes_of(item.number)
            self._figures.count("checked_again")
            if (fault := content.fault(item.number, item.embedding)) is not None:
                self._figures.defect("overwritten", f"item {item.number}, while it was held, {fault}")
        held[:] = kept

    # Operations

    def _read(
        self, operation: str, choose: random.Random, held: list[_Held], numbers: list[int], **named: Any
    ) -> list[Embedding | None]:
        keys = [content.key_of(number) for number in numbers]
        found = self._timed(
            operation, choose, 2.0, lambda timeout: self._cache.get_many(keys, timeout=timeout, **named)
        )
        for number, embedding in zip(numbers, found, strict=True):
            if embedding is None:
                self._figures.count("missed")
            else:
                self._check(number, embedding, choose, held)
        return list(found)

    def _get(self, choose: random.Random, held: list[_Held]) -> None:
        self._get_one(choose, held, "get")

    def _get_like(self, choose: random.Random, held: list[_Held]) -> None:
        self._get_one(choose, held, "get_like")

    def _get_one(self, choose: random.Random, held: list[_Held], operation: str) -> None:
        number = self._number(choose)
        named: dict[str, Any] = {} if operation == "get" else {"like": content.like(number)}
        key = content.key_of(number)
        embedding = self._timed(operation, choose, 2.0, lambda timeout: self._cache.get(key, timeout=timeout, **named))
        if embedding is None:
            self._figures.count("missed")
        else:
            self._check(number, embedding, choose, held)

    def _get_many(self, choose: random.Random, held: list[_Held]) -> None:
        self._read("get_many", choose, held, self._numbers(choose))

    def _get_many_like(self, choose: random.Random, held: list[_Held]) -> None:
        numbers = self._alike(choose)
        self._read("get_many_like", choose, held, numbers, like=content.like(numbers[0]))

    def _get_unlike(self, choose: random.Random, held: list[_Held]) -> None:
        """An entry that is not like what is asked for is a miss."""
        found = self._read("get_unlike", choose, held, [self._number(choose)], like=torch.empty(7, device="meta"))
        if found != [None]:
            self._figures.defect("unlike", f"{found} was read with like=7 floats")

    def _published(self, results: Sequence[Any]) -> None:
        for result in results:
            self._figures.count(f"put.{result.reason or result.status}")

    def _put(self, choose: random.Random, held: list[_Held]) -> None:
        number = self._number(choose)
        key, encoded, meta = content.key_of(number), content.tensors(number), content.metadata(number)
        call = lambda timeout: self._cache.put(key, encoded, meta=meta, timeout=timeout)  # noqa: E731
        self._published([self._timed("put", choose, 5.0, call)])

    def _put_many(self, choose: random.Random, held: list[_Held]) -> None:
        entries = [
            (content.key_of(number), (content.tensors(number), content.metadata(number)))
            for number in self._numbers(choose)
        ]
        call = lambda timeout: self._cache.put_many(entries, timeout=timeout)  # noqa: E731
        self._published(self._timed("put_many", choose, 5.0, call))

    def _put_empty(self, choose: random.Random, held: list[_Held]) -> None:
        """Written in registered memory; published, and still right after that."""
        numbers = [number for number in self._numbers(choose) if len(content.specs(number)) == 1][:4]
        entries, filled = [], []
        for number in numbers:
            [spec] = content.specs(number)
            tensor = self._timed(
                "empty",
                choose,
                0.0,
                lambda timeout, s=spec: self._cache.empty(s.shape, s.dtype, timeout=timeout or 0.0),
            )
            tensor.copy_(content.tensors(number)[spec.name])
            filled.append((number, tensor))
            entries.append((content.key_of(number), (tensor, content.metadata(number))))
        self._published(
            self._timed("put_empty", choose, 5.0, lambda timeout: self._cache.put_many(entries, timeout=timeout))
        )
        for number, tensor in filled:
            if (fault := content.fault_of(number, {"embedding": tensor})) is not None:
                self._figures.defect("overwritten", f"item {number} from empty(), after its put, {fault}")

    def _encode(self, keys: Sequence[EmbeddingKey]) -> list[Any]:
        time.sleep(COMPUTE_S * len(keys))
        self._figures.count("computed", len(keys))
        numbers = [int(key.mm_hash.removeprefix("item-")) for key in keys]
        return [(content.tensors(number), content.metadata(number)) for number in numbers]

    def _get_or_compute(self, choose: random.Random, held: list[_Held]) -> None:
        number = self._number(choose)
        key = content.key_of(number)
        like = content.like(number) if choose.random() < 0.3 else None
        started = time.monotonic()
        timeout = choose.choice((None, 0.0, 0.5, 5.0))
        embedding = self._cache.get_or_compute(key, lambda: self._encode([key])[0], like=like, timeout=timeout)
        self._figures.most("seconds.get_or_compute", time.monotonic() - started)
        self._check(number, embedding, choose, held)

    def _get_or_compute_many(self, choose: random.Random, held: list[_Held]) -> None:
        numbers = self._numbers(choose)
        keys = [content.key_of(number) for number in numbers]
        started = time.monotonic()
        timeout, batch = choose.choice((None, 0.0, 0.5, 5.0)), choose.choice((1, 4, 16))
        found = self._cache.get_or_compute_many(keys, self._encode, batch=batch, timeout=timeout)
        self._figures.most("seconds.get_or_compute_many", time.monotonic() - started)
        for number, embedding in zip(numbers, found, strict=True):
            self._check(number, embedding, choose, held)

    def _lookup(self, choose: random.Random, held: list[_Held]) -> None:
        numbers = self._numbers(choose)
        keys = [content.key_of(number) for number in numbers]
        found = self._timed("lookup", choose, 2.0, lambda timeout: self._cache.lookup(keys, timeout=timeout))
        for number, info in zip(numbers, found, strict=True):
            if info is not None and info.meta.get("number") != number:
                self._figures.defect("wrong", f"the directory says of item {number}: {info}")

    def _stats(self, choose: random.Random, held: list[_Held]) -> None:
        self._cache.stats()
