"""The client for asyncio: the same names and arguments as `MMCache`, awaitable."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

import torch

from mmcache.client.cache import MMCache
from mmcache.client.calls import IoThreads, Overloaded
from mmcache.client.invalidate import Invalidation
from mmcache.client.local import Like
from mmcache.client.notices import OnInvalidate
from mmcache.client.pins import Pinnable, Pinned
from mmcache.client.publish import Encoded, dropped
from mmcache.client.results import Embedding, EntryInfo, Mark, PutResult
from mmcache.errors import DeadlineExceeded
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

_Result = TypeVar("_Result")

MAX_CALLS: Final = 64
"""Reads, publications and lookups under way at once; more wait for their turn, within their own deadlines."""
MAX_COMPUTATIONS: Final = 64
"""`get_or_compute` calls under way at once. They wait for other processes, so they have threads of their own."""
_GRACE_SECONDS: Final = 0.1
"""A call that runs ends by its own deadline; it is left this much later, in case it does not."""
_CLOSE_SECONDS: Final = 2.0


class AsyncMMCache:
    """`MMCache` for asyncio. Every call runs on a thread, so the event loop never waits.

    A cancelled call goes on in the background until its own deadline, and gives up its claims there.
    """

    def __init__(self, cache: MMCache) -> None:
        """Wrap a connected cache, which `close` then closes."""
        self._cache = cache
        self._calls = IoThreads(MAX_CALLS, name="mmcache-call")
        self._computations = IoThreads(MAX_COMPUTATIONS, name="mmcache-compute")

    @classmethod
    async def connect(cls, path: str | Path | None = None, **client: object) -> AsyncMMCache:
        """See `MMCache.connect`."""
        return cls(await asyncio.to_thread(functools.partial(MMCache.connect, path, **client)))

    async def _call(self, function: Callable[[float], _Result], timeout: float, late: Callable[[], _Result]) -> _Result:
        """Run `function(seconds left)` on a thread; one that gets no thread in time ends as `late()`."""
        deadline = time.monotonic() + timeout
        try:
            work = _on(self._calls, lambda: function(max(0.0, deadline - time.monotonic())))
        except Overloaded:
            return late()
        await asyncio.wait({work}, timeout=timeout + _GRACE_SECONDS)
        if work.done():
            return work.result()
        work.cancel()  # it has not begun; if it has, it ends by its own deadline, and its result is dropped
        return late()

    async def get(
        self, key: EmbeddingKey, *, like: Like | None = None, timeout: float | None = None
    ) -> Embedding | None:
        """See `MMCache.get`."""
        return (await self.get_many([key], like=like, timeout=timeout))[0]

    async def get_many(
        self, keys: Sequence[EmbeddingKey], *, like: Like | None = None, timeout: float | None = None
    ) -> list[Embedding | None]:
        """See `MMCache.get_many`."""
        return await self._call(
            lambda left: self._cache.get_many(keys, like=like, timeout=left),
            self._cache._settings.client.read_timeout if timeout is None else timeout,
            lambda: self._cache._late("miss", [None] * len(keys)),
        )

    async def lookup(self, keys: Sequence[EmbeddingKey], *, timeout: float | None = None) -> list[EntryInfo | None]:
        """See `MMCache.lookup`."""
        return await self._call(
            lambda left: self._cache.lookup(keys, timeout=left),
            self._cache._settings.client.read_timeout if timeout is None else timeout,
            lambda: self._cache._late("lookup_failed", [None] * len(keys)),
        )

    async def empty(
        self, shape: Iterable[int], dtype: torch.dtype = torch.float32, *, timeout: float = 0.0
    ) -> torch.Tensor:
        """See `MMCache.empty`."""
        size = tuple(shape)
        return await self._call(
            lambda left: self._cache.empty(size, dtype, timeout=left),
            timeout,
            lambda: self._cache.empty(size, dtype, timeout=0.0),
        )

    async def put(
        self,
        key: EmbeddingKey,
        encoded: Encoded,
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        since: Mark | None = None,
        timeout: float | None = None,
    ) -> PutResult:
        """See `MMCache.put`."""
        return (await self.put_many([(key, encoded)], meta=meta, cost_ms=cost_ms, since=since, timeout=timeout))[0]

    def mark(self) -> Mark:
        """See `MMCache.mark`; it does not wait for anything."""
        return self._cache.mark()

    def on_invalidate(self, function: OnInvalidate) -> None:
        """See `MMCache.on_invalidate`: it is called on another thread than this event loop's."""
        self._cache.on_invalidate(function)

    async def invalidate(
        self,
        selector: Selector,
        *,
        reason: str = "",
        wait: bool = False,
        everything: bool = False,
        timeout: float = 30.0,
    ) -> Invalidation:
        """See `MMCache.invalidate`."""

        return await self._call(
            lambda left: self._cache.invalidate(
                selector, reason=reason, wait=wait, everything=everything, timeout=left
            ),
            timeout,
            _not_asked,
        )

    async def pin(self, what: Pinnable, ttl: float, *, reason: str = "", timeout: float = 30.0) -> Pinned:
        """See `MMCache.pin`."""
        return await self._call(
            lambda left: self._cache.pin(what, ttl, reason=reason, timeout=left), timeout, _not_asked
        )

    async def unpin(self, what: Pinnable | Pinned | int | Sequence[int], *, timeout: float = 30.0) -> int:
        """See `MMCache.unpin`."""
        return await self._call(lambda left: self._cache.unpin(what, timeout=left), timeout, _not_asked)

    async def put_many(
        self,
        entries: Iterable[tuple[EmbeddingKey, Encoded]],
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        since: Mark | None = None,
        timeout: float | None = None,
    ) -> list[PutResult]:
        """See `MMCache.put_many`."""
        pairs = list(entries)
        return await self._call(
            lambda left: self._cache.put_many(pairs, meta=meta, cost_ms=cost_ms, since=since, timeout=left),
            self._cache._settings.client.publish_timeout if timeout is None else timeout,
            lambda: self._cache._late("put", [dropped("deadline")] * len(pairs)),
        )

    async def get_or_compute(
        self,
        key: EmbeddingKey,
        compute: Callable[[], Awaitable[Encoded]],
        *,
        like: Like | None = None,
        meta: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """See `MMCache.get_or_compute`; `compute` is a coroutine function, and runs on this event loop."""

        async def compute_many(_: Sequence[EmbeddingKey]) -> list[Encoded]:
            return [await compute()]

        return (await self.get_or_compute_many([key], compute_many, like=like, meta=meta, timeout=timeout))[0]

    async def get_or_compute_many(
        self,
        keys: Sequence[EmbeddingKey],
        compute: Callable[[Sequence[EmbeddingKey]], Awaitable[Sequence[Encoded]]],
        *,
        batch: int = 16,
        like: Like | None = None,
        meta: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> list[Embedding]:
        """See `MMCache.get_or_compute_many`; `compute` is a coroutine function, and runs on this event loop.

        When this call is cancelled, so is the computation, and its claims pass to others.
        """
        loop = asyncio.get_running_loop()
        patience = self._cache._settings.client.wait_timeout if timeout is None else timeout
        running: set[asyncio.Task[Sequence[Encoded]]] = set()
        cancelled = False

        async def run(some: Sequence[EmbeddingKey]) -> Sequence[Encoded]:
            if cancelled:
                raise asyncio.CancelledError
            task = asyncio.ensure_future(_awaited(compute, some))
            running.add(task)
            try:
                return await task
            finally:
                running.discard(task)

        def on_loop(some: Sequence[EmbeddingKey]) -> Sequence[Encoded]:
            if cancelled:
                raise asyncio.CancelledError
            return asyncio.run_coroutine_threadsafe(run(some), loop).result()

        begun = threading.Lock()  # taken by whoever comes first: the thread that begins, or we who have given up on it

        def work() -> list[Embedding]:
            if not begun.acquire(blocking=False):
                return []
            return self._cache.get_or_compute_many(keys, on_loop, batch=batch, like=like, meta=meta, timeout=timeout)

        try:
            running_on_thread = _on(self._computations, work)
            await asyncio.wait({running_on_thread}, timeout=max(patience, _GRACE_SECONDS))
            if not running_on_thread.done() and begun.acquire(blocking=False):
                # All threads wait for each other (computations that compute, perhaps): the cache must not stop them.
                return await self._compute_alone(keys, compute, batch, meta)
            return await asyncio.shield(running_on_thread)
        except Overloaded:
            return await self._compute_alone(keys, compute, batch, meta)
        except asyncio.CancelledError:
            cancelled = True
            begun.acquire(blocking=False)
            for task in running:
                task.cancel()
            raise

    async def _compute_alone(
        self,
        keys: Sequence[EmbeddingKey],
        compute: Callable[[Sequence[EmbeddingKey]], Awaitable[Sequence[Encoded]]],
        batch: int,
        meta: Mapping[str, object] | None,
    ) -> list[Embedding]:
        found: dict[EmbeddingKey, Embedding] = {}
        distinct = list(dict.fromkeys(keys))
        for start in range(0, len(distinct), batch):
            some = distinct[start : start + batch]
            found.update(zip(some, self._cache._computed(some, await compute(some), meta), strict=True))
        return [found[key] for key in keys]

    def stats(self) -> dict[str, float]:
        """See `MMCache.stats`."""
        return self._cache.stats()

    async def close(self) -> None:
        """See `MMCache.close`."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._cache.close()  # ends what the threads wait for
        deadline = time.monotonic() + _CLOSE_SECONDS
        self._calls.close(deadline)
        self._computations.close(deadline)

    async def __aenter__(self) -> AsyncMMCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _on(threads: IoThreads, function: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """Run a function on one of these threads; raises Overloaded or LifecycleError if it cannot be queued."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Result] = loop.create_future()

    def end(setter: Callable[[Any], None], outcome: object) -> None:
        if not future.done():
            setter(outcome)

    def run() -> None:
        if future.cancelled():
            return
        ending: Callable[[], None]
        try:
            ending = functools.partial(end, future.set_result, function())
        except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
            ending = functools.partial(end, future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(ending)

    # Also where nobody awaits it any more, its exception has been seen.
    future.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    threads.submit(run)
    return future


def _not_asked() -> NoReturn:
    raise DeadlineExceeded("no thread was free to ask the controller")


async def _awaited(
    compute: Callable[[Sequence[EmbeddingKey]], Awaitable[Sequence[Encoded]]], keys: Sequence[EmbeddingKey]
) -> Sequence[Encoded]:
    return await compute(keys)
