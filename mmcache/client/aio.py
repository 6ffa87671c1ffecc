"""The client for asyncio: the same names and arguments as `MMCache`, awaitable."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from mmcache.client.cache import MMCache
from mmcache.client.local import Like
from mmcache.client.publish import Encoded
from mmcache.client.results import Embedding, EntryInfo, PutResult
from mmcache.key import EmbeddingKey

_Result = TypeVar("_Result")

MAX_CONCURRENT_CALLS = 64
"""More calls than this wait for their turn; each waits for a result of the store or of another process meanwhile."""


class AsyncMMCache:
    """`MMCache` for asyncio. Every call runs on a thread of its own kind, so the event loop never waits.

    A cancelled call goes on in the background until its own deadline, and gives up its claims there.
    """

    def __init__(self, cache: MMCache) -> None:
        """Wrap a connected cache, which `close` then closes."""
        self._cache = cache
        self._calls = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="mmcache-call")

    @classmethod
    async def connect(cls, path: str | Path | None = None, **client: object) -> AsyncMMCache:
        """See `MMCache.connect`."""
        return cls(await asyncio.to_thread(functools.partial(MMCache.connect, path, **client)))

    async def _call(self, function: Callable[..., _Result], *arguments: Any, **named: Any) -> _Result:
        work = functools.partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(self._calls, work)

    async def get(
        self, key: EmbeddingKey, *, like: Like | None = None, timeout: float | None = None
    ) -> Embedding | None:
        """See `MMCache.get`."""
        return await self._call(self._cache.get, key, like=like, timeout=timeout)

    async def get_many(
        self, keys: Sequence[EmbeddingKey], *, like: Like | None = None, timeout: float | None = None
    ) -> list[Embedding | None]:
        """See `MMCache.get_many`."""
        return await self._call(self._cache.get_many, keys, like=like, timeout=timeout)

    async def lookup(self, keys: Sequence[EmbeddingKey], *, timeout: float | None = None) -> list[EntryInfo | None]:
        """See `MMCache.lookup`."""
        return await self._call(self._cache.lookup, keys, timeout=timeout)

    async def empty(
        self, shape: Iterable[int], dtype: torch.dtype = torch.float32, *, timeout: float = 0.0
    ) -> torch.Tensor:
        """See `MMCache.empty`."""
        return await self._call(self._cache.empty, shape, dtype, timeout=timeout)

    async def put(
        self,
        key: EmbeddingKey,
        encoded: Encoded,
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        timeout: float | None = None,
    ) -> PutResult:
        """See `MMCache.put`."""
        return await self._call(self._cache.put, key, encoded, meta=meta, cost_ms=cost_ms, timeout=timeout)

    async def put_many(
        self,
        entries: Iterable[tuple[EmbeddingKey, Encoded]],
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        timeout: float | None = None,
    ) -> list[PutResult]:
        """See `MMCache.put_many`."""
        return await self._call(self._cache.put_many, entries, meta=meta, cost_ms=cost_ms, timeout=timeout)

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
        cancelled = False
        running: set[asyncio.Task[Sequence[Encoded]]] = set()

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
            return asyncio.run_coroutine_threadsafe(run(some), loop).result()

        try:
            return await self._call(
                self._cache.get_or_compute_many, keys, on_loop, batch=batch, like=like, meta=meta, timeout=timeout
            )
        except asyncio.CancelledError:
            cancelled = True
            for task in running:
                task.cancel()
            raise

    def stats(self) -> dict[str, float]:
        """See `MMCache.stats`."""
        return self._cache.stats()

    async def close(self) -> None:
        """See `MMCache.close`."""
        await asyncio.to_thread(self._cache.close)
        self._calls.shutdown(wait=False, cancel_futures=True)

    async def __aenter__(self) -> AsyncMMCache:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _awaited(
    compute: Callable[[Sequence[EmbeddingKey]], Awaitable[Sequence[Encoded]]], keys: Sequence[EmbeddingKey]
) -> Sequence[Encoded]:
    return await compute(keys)
