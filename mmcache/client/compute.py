"""Computing once: what nobody has is claimed, computed and published here, or awaited from whoever computes it.

A call computes and commits all that it was granted before it waits for anything. Whatever goes wrong on the way costs
one computation: the caller gets every embedding it asked for, unless its own function raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mmcache.client.local import Expectation
from mmcache.client.names import NamedKey
from mmcache.client.publish import Encoded, Publication, Publisher
from mmcache.client.reads import UNPUBLISHED, Reader
from mmcache.client.results import Embedding, PutResult
from mmcache.control.channel import Acquisition, ControlChannel
from mmcache.control.messages import AbortReason, Granted, Hit, Unclaimed, Waiting
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, InvalidEntry, LifecycleError
from mmcache.key import EmbeddingKey
from mmcache.metrics import Counters

ComputeMany = Callable[[Sequence[EmbeddingKey]], Sequence[Encoded]]

_UNPUBLISHABLE = frozenset({"no_space", "quota", "no_memory", "larger_than_pool", "not_finite"})
"""Drops that would meet the next publisher as well, so that its waiting would be in vain."""


class Timeouts(NamedTuple):
    """Seconds: for a store read, for a publication, for waiting on another's result, and for renewing one claim."""

    read: float
    publish: float
    wait: float
    compute: float


class _Task(NamedTuple):
    """One key to compute; `token` 0 without a claim. Without `publish` the result is for this caller alone."""

    wanted: NamedKey
    token: int = 0
    publish: bool = True


class Computation:
    """One `get_or_compute_many`: owns its claims and waits, and gives all of them up when it ends."""

    def __init__(
        self,
        *,
        reader: Reader,
        publisher: Publisher,
        channel: ControlChannel,
        counters: Counters,
        timeouts: Timeouts,
        compute: ComputeMany,
        batch: int,
        expect: Expectation | None,
        meta: Mapping[str, object] | None,
    ) -> None:
        self._reader = reader
        self._publisher = publisher
        self._channel = channel
        self._counters = counters
        self._timeouts = timeouts
        self._compute = compute
        self._batch = batch
        self._expect = expect
        self._meta = meta
        self._found: dict[EmbeddingKey, Embedding] = {}
        self._claims: set[int] = set()
        self.callers_error: BaseException | None = None
        """What the caller's function raised, to tell it from a fault of the cache."""

    def run(self, keys: Sequence[EmbeddingKey]) -> dict[EmbeddingKey, Embedding]:
        """An embedding for each distinct key. Raises what `compute` raises, or InvalidEntry for what it returns."""
        distinct = list(dict.fromkeys(keys))
        wanted = self._reader.wanted(distinct)
        if wanted is None:
            self._counters.add("miss", len(distinct), reason="not_fresh")
            return self.run_alone(distinct)
        wait_until = time.monotonic() + self._timeouts.wait
        unpublished = self._read(wanted)
        if len(unpublished) > self._batch:
            # Claim a batch at a time and come back for what others compute: those who ask for the same share the work.
            unpublished = [
                item
                for start in range(0, len(unpublished), self._batch)
                for item in self._acquire(unpublished[start : start + self._batch], wait_s=0.0)
            ]
        for _ in range(2):  # once more for what the directory promised and the store did not deliver
            if unpublished:
                unpublished = self._acquire(unpublished, wait_s=max(0.001, wait_until - time.monotonic()))
        return self.run_alone(distinct)

    def run_alone(self, keys: Sequence[EmbeddingKey]) -> dict[EmbeddingKey, Embedding]:
        """Compute, for this caller alone, what is not found yet."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._found]
        self._compute_all([_Task(NamedKey(key, "", "", 0), publish=False) for key in missing])
        return self._found

    def _read(self, wanted: Sequence[NamedKey]) -> list[NamedKey]:
        """Read what can be read; returns what is not there. What is there but cannot be read is left for the end."""
        batch = self._reader.read(wanted, expect=self._expect, deadline=time.monotonic() + self._timeouts.read)
        self._found.update((embedding.key, embedding) for embedding in batch.found.values())
        return [item for item in wanted if batch.missing.get(item.name) in UNPUBLISHED]

    def _acquire(self, wanted: list[NamedKey], *, wait_s: float) -> list[NamedKey]:
        """Claim, compute, wait; returns what to ask for again: what was promised and not delivered and, if there was no
        time to wait, what is not to be had yet.
        """
        wait_until = time.monotonic() + wait_s
        try:
            acquisition = self._channel.acquire(
                [item.key for item in wanted],
                wait_s=wait_s,
                deadline=time.monotonic() + self._timeouts.read,
                renew_for_s=self._timeouts.compute,
            )
        except (ControllerUnavailable, DeadlineExceeded, LifecycleError) as error:
            self._counters.add("acquire_failed", reason=type(error).__name__)
            return []
        failed = False
        with acquisition:
            self._claims = {answer.token for answer in acquisition.answers if isinstance(answer, Granted)}
            try:
                return self._carry_out(wanted, acquisition, wait_until if wait_s else None)
            except BaseException:
                failed = True
                raise
            finally:
                if self._claims:
                    self._channel.abort(sorted(self._claims), AbortReason.FAILED if failed else AbortReason.UNWANTED)
                    self._claims = set()

    def _carry_out(self, wanted: list[NamedKey], acquisition: Acquisition, wait_until: float | None) -> list[NamedKey]:
        waiting = {i for i, answer in enumerate(acquisition.answers) if isinstance(answer, Waiting)}
        undelivered = self._take(wanted, list(enumerate(acquisition.answers)))
        unclaimed = [wanted[i] for i, answer in enumerate(acquisition.answers) if isinstance(answer, Unclaimed)]
        if wait_until is None:
            return undelivered + unclaimed
        self._counters.add("unclaimed", len(unclaimed))
        self._counters.add("wait", len(waiting))
        while waiting and not acquisition.lost:
            resolved = acquisition.resolutions(wait_until)
            if not resolved:
                break
            waiting.difference_update(position for position, _ in resolved)
            self._claims.update(answer.token for _, answer in resolved if isinstance(answer, Granted))
            undelivered += self._take(wanted, resolved)
        if waiting:
            acquisition.leave()
            self._counters.add("wait_failed", len(waiting), reason="lost" if acquisition.lost else "deadline")
            self._compute_all([_Task(wanted[position]) for position in sorted(waiting)])
        return undelivered

    def _take(
        self, wanted: list[NamedKey], answers: Sequence[tuple[int, Hit | Granted | Waiting | Unclaimed]]
    ) -> list[NamedKey]:
        """Compute what was granted, then read what others have; returns what they were said to have and have not."""
        tasks: list[_Task] = []
        hits: dict[str, tuple[NamedKey, Hit]] = {}
        for position, answer in answers:
            item = wanted[position]
            if isinstance(answer, Granted):
                tasks.append(_Task(item.at(answer.generation), answer.token))
            elif isinstance(answer, Hit):
                item = item.at(answer.generation, answer.nbytes)
                hits[item.name] = (item, answer)
        self._compute_all(tasks)
        undelivered = self._read([item for item, _ in hits.values()]) if hits else []
        if undelivered:
            self._counters.add("undelivered", len(undelivered))
            self._channel.report([(item.key, hits[item.name][1].revision) for item in undelivered])
        return [item.at(item.generation) for item in undelivered]

    def _compute_all(self, tasks: Sequence[_Task]) -> None:
        """Compute in batches, and publish each batch before the next, so that others wait no longer than they must."""
        for start in range(0, len(tasks), self._batch):
            self._compute_batch(tasks[start : start + self._batch])

    def _compute_batch(self, tasks: Sequence[_Task]) -> None:
        keys = [task.wanted.key for task in tasks]
        started = time.perf_counter()
        try:
            values = list(self._compute(keys))
        except BaseException as error:
            self.callers_error = error
            raise
        cost_ms = (time.perf_counter() - started) * 1000.0 / len(keys)
        if len(values) != len(keys):
            raise InvalidEntry(f"the function was given {len(keys)} keys and returned {len(values)} embeddings")
        self._counters.add("computed", len(keys))
        prepared = [
            self._publisher.prepare(task.wanted, value, token=task.token, meta=self._meta, cost_ms=cost_ms)
            for task, value in zip(tasks, values, strict=True)
        ]
        self._found.update((item.target.key, item.as_embedding()) for item in prepared)
        publications = [item for item, task in zip(prepared, tasks, strict=True) if task.publish]
        if publications:
            results = self._publisher.publish(publications, deadline=time.monotonic() + self._timeouts.publish)
            self._settle_claims(publications, results)

    def _settle_claims(self, publications: Sequence[Publication], results: Sequence[PutResult]) -> None:
        """A commit ended its claim; the claims of what was dropped are given up for the reason that it was dropped."""
        for publication, result in zip(publications, results, strict=True):
            if not publication.token:
                continue
            self._claims.discard(publication.token)
            if not result.readable:
                self._channel.abort([publication.token], abort_reason(result.reason))


def abort_reason(drop: str) -> AbortReason:
    """What a dropped publication means for those who wait for it."""
    if drop in _UNPUBLISHABLE:
        return AbortReason.NO_ROOM
    return AbortReason.HELD if drop == "in_progress" else AbortReason.FAILED
