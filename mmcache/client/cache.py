"""The client: what encoders publish with and prefill processes read with."""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from mmcache import config
from mmcache.client.compute import Computation, ComputeMany, Timeouts
from mmcache.client.invalidate import Invalidation, follow, invalidate
from mmcache.client.local import Expectation, Like
from mmcache.client.names import NamedKey
from mmcache.client.notices import OnInvalidate
from mmcache.client.parts import Parts
from mmcache.client.pins import Pinnable, Pinned, pin, unpin
from mmcache.client.publish import DUPLICATE, Encoded, Publication, dropped
from mmcache.client.reads import ABSENT
from mmcache.client.results import Embedding, EntryInfo, Mark, PutResult
from mmcache.control.messages import INVALIDATED
from mmcache.entry import decode_info
from mmcache.errors import (
    CORRUPT_REASONS,
    ControllerUnavailable,
    CorruptEntry,
    DeadlineExceeded,
    EntryDropped,
    InvalidKey,
    LifecycleError,
    MMCacheError,
    PoolExhausted,
    StoreUnavailable,
)
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")
_LONGEST_TIMEOUT_S = 86_400.0


class MMCache:
    """A process's view of the shared cache. Thread-safe; made by `connect`, after fork, and closed once.

    What goes wrong below is a miss or a drop, counted in `stats()`; only bad input, use after `close` and use in a
    forked child raise. With `strict=True` everything but a plain miss raises. No call outlasts its `timeout` (seconds;
    the configured one by default) by more than scheduling, but for the time that the caller's own function takes.
    """

    def __init__(self, settings: config.Settings) -> None:
        """Start the client's threads; use `connect`, which also waits until they can serve."""
        self._settings = settings
        self._closed = False
        self._parts = Parts(settings)
        self._counters = self._parts.counters
        self._attacher = self._parts.attacher
        self._channel = self._parts.channel
        self._reader = self._parts.reader
        self._tally = self._parts.tally
        self._publisher = self._parts.publisher
        weakref.finalize(self, self._parts.end_unattended).atexit = False

    @classmethod
    def connect(cls, path: str | Path | None = None, **client: object) -> MMCache:
        """Connect as a configuration file says, and wait until the cache can serve.

        Args:
            path: the file, such as the `client.yaml` that `mmcache up` writes; by default the one that `MMCACHE_CONFIG`
                names. The environment overrides it.
            **client: settings of the `client` section, which override both: `connect(pool_bytes="1GiB", strict=True)`.

        If store or controller do not answer within `connect_timeout`, the cache comes up anyway: its reads miss and its
        puts drop until they do. With `strict=True` it raises StoreUnavailable or ControllerUnavailable instead.

        Raises:
            ConfigError: a setting is unknown or ill-typed; the message names it.
        """
        settings = config.load(path, overrides={f"client.{name}": value for name, value in client.items()})
        cache = cls(settings)
        try:
            cache._parts.start()
        except BaseException:
            cache.close()
            raise
        return cache

    # Reading

    def get(self, key: EmbeddingKey, *, like: Like | None = None, timeout: float | None = None) -> Embedding | None:
        """The embedding, or None on a miss. See `get_many`."""
        return self.get_many([key], like=like, timeout=timeout)[0]

    def get_many(
        self, keys: Sequence[EmbeddingKey], *, like: Like | None = None, timeout: float | None = None
    ) -> list[Embedding | None]:
        """Read entries in one batch; None where there is none, in the order of the keys.

        Args:
            keys: any number; repeated ones are read once.
            like: a tensor (any device, meta included), or named tensors, of the shapes and dtypes that every entry must
                have. It spares a guess at the size; an entry that looks different is a miss.
            timeout: seconds; `client.read_timeout` by default.
        """
        self._check_usable()
        _check_keys(keys)
        expect = Expectation(like) if like is not None else None
        deadline = self._deadline(timeout, self._settings.client.read_timeout)
        wanted = self._reader.wanted(keys)
        if wanted is None:
            self._counters.add("miss", len(keys), reason="not_fresh")
            self._tally.missed(len(set(keys)))
            self._complain("not_fresh")
            return [None] * len(keys)
        try:
            batch = self._reader.read(wanted, expect=expect, deadline=deadline)
        except Exception as error:  # noqa: BLE001 - no fault of the cache may reach an engine; counted and logged
            self._survive(error)
            return [None] * len(keys)
        self._tally.missed(len(batch.missing))
        for reason in batch.missing.values():
            self._complain(reason)
        found = batch.found
        return [found.get(item.name) for item in wanted]

    def lookup(self, keys: Sequence[EmbeddingKey], *, timeout: float | None = None) -> list[EntryInfo | None]:
        """What the controller knows of entries, without reading or claiming them; None where it knows nothing."""
        self._check_usable()
        _check_keys(keys)
        try:
            hits = self._channel.lookup(keys, deadline=self._deadline(timeout, self._settings.client.read_timeout))
        except MMCacheError as error:
            self._counters.add("lookup_failed", reason=type(error).__name__)
            if self._settings.client.strict:
                raise
            return [None] * len(keys)
        results: list[EntryInfo | None] = []
        for key, hit in zip(keys, hits, strict=True):
            try:
                info = decode_info(hit.info) if hit is not None else None
            except CorruptEntry as error:
                self._counters.add("lookup_failed", reason=error.reason)
                info = None
            results.append(
                EntryInfo(key, hit.nbytes, hit.generation, info.tensors, info.meta) if hit and info else None
            )
        return results

    # Publishing

    def empty(self, shape: Iterable[int], dtype: torch.dtype = torch.float32, *, timeout: float = 0.0) -> torch.Tensor:
        """An uninitialised tensor in registered memory: encode into it, and publishing it copies nothing.

        It is an ordinary tensor on the CPU and may outlive the cache. Do not write to it while a put of it runs, nor
        ever after one that was dropped with `deadline`: the store may still be reading it. When the pool has no room
        within `timeout` seconds, or there is no store, it is an ordinary tensor outside the pool (counted);
        `strict=True` raises PoolExhausted or StoreUnavailable.
        """
        self._check_usable()
        size = tuple(shape)
        try:
            return self._publisher.empty(size, dtype, deadline=self._deadline(timeout, 0.0))
        except (PoolExhausted, StoreUnavailable, LifecycleError) as error:
            self._counters.add("empty_outside_pool", reason=type(error).__name__)
            if self._settings.client.strict:
                raise
            return torch.empty(size, dtype=dtype, device="cpu")

    def put(
        self,
        key: EmbeddingKey,
        encoded: Encoded,
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        since: Mark | None = None,
        timeout: float | None = None,
    ) -> PutResult:
        """Publish one embedding. See `put_many`."""
        return self.put_many([(key, encoded)], meta=meta, cost_ms=cost_ms, since=since, timeout=timeout)[0]

    def mark(self) -> Mark:
        """Where the sequence of invalidations is. Take it before you encode, and `put` with `since=` of it."""
        self._check_usable()
        view = self._channel.fresh()
        return Mark("", -1) if view is None else Mark(view.lineage, view.replica.head)

    def put_many(
        self,
        entries: Iterable[tuple[EmbeddingKey, Encoded]],
        *,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
        since: Mark | None = None,
        timeout: float | None = None,
    ) -> list[PutResult]:
        """Publish embeddings in one batch; when it returns `stored`, every process can read them.

        Args:
            entries: keys, each with a dense tensor of any shape, with named tensors, or with a tuple of either and
                metadata of its own. A key given twice is published once.
            meta: plain data to keep with every entry (`{"grid_thw": [1, 16, 16]}`; lists, not tuples); about 2 KiB.
            cost_ms: what encoding one of them cost.
            since: from `mark()`, called before they were encoded: what was invalidated after it is dropped. Without it
                this call is your word that they are current.
            timeout: seconds; `client.publish_timeout` by default.

        Raises:
            InvalidEntry: something here can never be an entry; nothing was sent.
        """
        self._check_usable()
        deadline = self._deadline(timeout, self._settings.client.publish_timeout)
        pairs = list(entries)
        keys = [key for key, _ in pairs]
        _check_keys(keys)
        targets = self._reader.wanted(keys, publishing=True)
        publications = [
            self._publisher.prepare(target, encoded, meta=meta, cost_ms=cost_ms)
            for target, (_, encoded) in zip(
                targets or [NamedKey.of(key, "none", 0) for key in keys], pairs, strict=True
            )
        ]
        distinct: dict[str, Publication] = {}
        for item in publications:
            distinct.setdefault(item.name, item)
        if targets is None:
            self._counters.add("put", len(distinct), reason="not_fresh")
            results = [dropped("not_fresh")] * len(distinct)
        else:
            outdated = [
                name
                for name, item in distinct.items()
                if since is not None and not since.covers(item.target.lineage, item.target.generation)
            ]
            current = [item for name, item in distinct.items() if name not in outdated]
            if outdated:
                self._counters.add("put", len(outdated), reason=INVALIDATED)
            try:
                published = iter(self._publisher.publish(current, deadline=deadline) if current else ())
            except Exception as error:  # noqa: BLE001 - no fault of the cache may reach an engine; counted and logged
                self._survive(error)
                published = itertools.repeat(dropped("failed"))
            results = [dropped(INVALIDATED) if name in outdated else next(published) for name in distinct]
        for result in results:
            if not result.readable:
                self._complain(result.reason, publishing=True)
        by_name = dict(zip(distinct, results, strict=True))
        return [
            DUPLICATE if by_name[item.name].readable and item is not distinct[item.name] else by_name[item.name]
            for item in publications
        ]

    # Invalidating

    def invalidate(
        self,
        selector: Selector,
        *,
        reason: str = "",
        wait: bool = False,
        everything: bool = False,
        timeout: float = 30.0,
    ) -> Invalidation:
        """Have no entry served any more that matches.

        Args:
            selector: which: `Selector(model="siglip", version="3")`, `Selector.exactly(key)`.
            reason: for people; at most 512 characters.
            wait: return when no `get` that starts afterwards, on any client, returns an entry that matches and was
                published before: within milliseconds, or the time to live of sessions where a client is silent.
            everything: allows a selector that is empty, and so matches everything.
            timeout: seconds. After it the result says whom it waits for: the invalidation is made all the same.

        Raises (also without `strict`, since whoever asks must know): InvalidKey, ControllerUnavailable or
        DeadlineExceeded. It may have been made even so.
        """
        self._check_usable()
        deadline = self._deadline(timeout, timeout)
        made = invalidate(self._channel, selector, reason=reason, everything=everything, deadline=deadline)
        return follow(self._channel, made, deadline=deadline) if wait else made

    def on_invalidate(self, function: OnInvalidate) -> None:
        """Have a function called with selectors whenever something was invalidated, soon after it counts here.

        For what this cache cannot know of: an engine's own caches, say. It runs on a thread of the cache's own, with
        all that has come since its last call; an invalidation may be complete before it was called. A selector that is
        empty means everything. What it raises is logged and counted (`on_invalidate_failed`).
        """
        self._check_usable()
        self._parts.notices.add(function)

    # Pinning

    def pin(self, what: Pinnable, ttl: float, *, reason: str = "", timeout: float = 30.0) -> Pinned:
        """Keep entries from eviction for a time, those that are there and those that are published meanwhile.

        All that is pinned may take a share of the store (`controller.pinned_share`); what matches and is published when
        it is used up is not kept. An invalidation goes before a pin. Pinned again, it is the same pin, which lasts
        until later and never shorter. Pins outlive the controller where it has `controller.state`.

        Args:
            what: `Selector(model="siglip", version="3")`, a key, or up to 4,096 keys, which need not be there yet.
            ttl: seconds, at most 30 days.
            reason: for people; at most 512 characters.
            timeout: seconds.

        Raises (also without `strict`, since whoever asks must know): PinRefused where more would be pinned than may be,
        InvalidKey or ValueError for bad input, ControllerUnavailable or DeadlineExceeded. With these two it may have
        been pinned even so.
        """
        self._check_usable()
        return pin(self._channel, what, ttl=ttl, reason=reason, deadline=self._deadline(timeout, timeout))

    def unpin(self, what: Pinnable | Pinned | int | Sequence[int], *, timeout: float = 30.0) -> int:
        """End pins; what they kept can be evicted again. Returns how many there were, 0 if they had ended.

        Args:
            what: what `pin` returned, ids, or exactly the selector or keys that were pinned.
            timeout: seconds.

        Raises: as `pin`.
        """
        self._check_usable()
        return unpin(self._channel, what, deadline=self._deadline(timeout, timeout))

    # Computing once

    def get_or_compute(
        self,
        key: EmbeddingKey,
        compute: Callable[[], Encoded],
        *,
        like: Like | None = None,
        meta: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> Embedding:
        """The embedding, computed by `compute` if nobody has it or is computing it. See `get_or_compute_many`."""
        return self.get_or_compute_many([key], lambda _: [compute()], like=like, meta=meta, timeout=timeout)[0]

    def get_or_compute_many(
        self,
        keys: Sequence[EmbeddingKey],
        compute: ComputeMany,
        *,
        batch: int = 16,
        like: Like | None = None,
        meta: Mapping[str, object] | None = None,
        timeout: float | None = None,
    ) -> list[Embedding]:
        """An embedding for each key; of all processes that ask at the same time, one computes each.

        Args:
            keys: any number; repeated ones are computed once.
            compute: given some of the keys, returns for each a tensor or named tensors, alone or in a tuple with
                metadata of its own. Called in this thread, never with more than `batch` keys at once; each batch is
                published before the next.
            like: see `get_many`.
            meta: see `put_many`.
            timeout: longest wait in seconds for another process's result (`client.wait_timeout` by default); after it
                this process computes for itself.

        Raises:
            Whatever `compute` raises; its claims then pass to others. InvalidEntry: it returned no embedding.
        """
        self._check_usable()
        _check_keys(keys)
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        client = self._settings.client
        timeouts = Timeouts(
            client.read_timeout,
            client.publish_timeout,
            self._deadline(timeout, client.wait_timeout) - time.monotonic(),
            client.compute_timeout,
        )
        computation = Computation(
            reader=self._reader,
            publisher=self._publisher,
            channel=self._channel,
            tally=self._tally,
            counters=self._counters,
            timeouts=timeouts,
            compute=compute,
            batch=batch,
            expect=Expectation(like) if like is not None else None,
            meta=meta,
            on_failure=self._complain,
        )
        try:
            found = computation.run(keys)
        except Exception as error:
            if error is computation.callers_error:
                computation.callers_error = None  # its frames hold the computation, and all that was found
                raise
            self._survive(error)
            found = computation.run_alone(keys)
        return [found[key] for key in keys]

    # For the asyncio client, which is a part of this one

    def _late(self, counter: str, results: list[_Result]) -> list[_Result]:
        """The results of a call that could not begin before its deadline, counted; with `strict`, DeadlineExceeded."""
        self._counters.add(counter, len(results), reason="deadline")
        self._complain("deadline")
        return results

    def _computed(
        self, keys: Sequence[EmbeddingKey], values: Sequence[Encoded], meta: Mapping[str, object] | None
    ) -> list[Embedding]:
        """What the caller computed for itself, checked as if it were to be published."""
        self._counters.add("computed", len(keys))
        self._tally.missed(len(keys))
        return [
            self._publisher.prepare(_unnamed(key), value, meta=meta).as_embedding()
            for key, value in zip(keys, values, strict=True)
        ]

    # The client itself

    def stats(self) -> dict[str, float]:
        """Counters since `connect`, latencies in ms, and the pool's state; names are stable, values are numbers."""
        stats: dict[str, float] = dict(self._counters.snapshot())
        view = self._channel.fresh() if not self._closed else None
        attachment = self._attacher.current
        stats["session.fresh"] = int(view is not None)
        stats["controller.in_doubt"] = int(self._channel.in_doubt)
        stats["store.attached"] = int(attachment is not None)
        stats["store.open"] = int(self._parts.health.open)
        if attachment is not None:
            stats.update((f"pool.{name}", value) for name, value in attachment.pool.stats().items())
        for name, latency in (
            ("latency.local", self._reader.local_latency),
            ("latency.store", self._reader.store_latency),
            ("latency.publish", self._publisher.latency),
        ):
            stats.update((f"{name}.{figure}", value) for figure, value in latency.snapshot().items())
        return stats

    def close(self) -> None:
        """End the session and detach from the store. Idempotent. Tensors that were handed out stay valid."""
        self._closed = True
        self._parts.end()

    def __enter__(self) -> MMCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise LifecycleError("this MMCache is closed")
        if os.getpid() != self._parts.process:
            raise LifecycleError("this MMCache belongs to the parent process: connect after fork, or use spawn")

    @staticmethod
    def _deadline(timeout: float | None, default: float) -> float:
        seconds = default if timeout is None else timeout
        if not seconds >= 0.0:
            raise ValueError(f"timeout must be a number of seconds from 0 up, not {timeout!r}")
        return time.monotonic() + min(seconds, _LONGEST_TIMEOUT_S)

    def _survive(self, error: Exception) -> None:
        if self._settings.client.strict:
            try:
                raise error
            finally:
                del error  # it holds this frame, which else held it, and what its callers do, until a collection
        self._counters.add("internal_error", reason=type(error).__name__)
        _log.exception("mmcache failed; the call ends as a miss")

    def _complain(self, reason: str, publishing: bool = False) -> None:
        """With `strict`, raise for a miss or a drop that is a failure."""
        if not self._settings.client.strict or reason == ABSENT:
            return
        if publishing:
            raise EntryDropped(reason, "an embedding was not published")
        if reason == "not_fresh":
            raise ControllerUnavailable("no fresh session with the controller")
        if reason == "deadline":
            raise DeadlineExceeded("no answer in time")
        if reason in ("no_memory", "larger_than_pool"):
            raise PoolExhausted(f"no block for what was to be read ({reason})", fits=reason == "no_memory")
        if reason in CORRUPT_REASONS or reason in ("unexpected", "unsupported"):
            raise CorruptEntry(reason, "the entry under this name cannot be used")
        raise StoreUnavailable(f"the store could not serve: {reason}")


def _check_keys(keys: Sequence[EmbeddingKey]) -> None:
    if not isinstance(keys, Sequence):  # a generator would be used up here, and nothing be read
        raise InvalidKey(f"keys must be a sequence, such as a list, not {type(keys).__name__}")
    for key in keys:
        if not isinstance(key, EmbeddingKey):
            raise InvalidKey(f"a key must be an EmbeddingKey, not {type(key).__name__}")


def _unnamed(key: EmbeddingKey) -> NamedKey:
    """A key whose name cannot be known now, for checking what was to be published under it."""
    return NamedKey.of(key, "unknown", 0)
