"""Computing once: what nobody has is claimed, computed and published here, or awaited from whoever computes it.

A call computes and commits all that it was granted before it waits for anything. Whatever goes wrong on the way costs
one computation: the caller gets every embedding it asked for, unless its own function raises.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mmcache.client.local import Expectation
from mmcache.client.names import NamedKey
from mmcache.client.publish import Encoded, Publication, Publisher
from mmcache.client.reads import UNPUBLISHED, Reader
from mmcache.client.results import Embedding, PutResult
from mmcache.control.channel import AbandonEntry, Acquisition, ControlChannel
from mmcache.control.messages import (
    CLAIMED,
    INVALIDATED,
    AbandonReason,
    AbortReason,
    Granted,
    Hit,
    Unclaimed,
    Waiting,
)
from mmcache.control.tally import Tally
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, InvalidEntry, LifecycleError
from mmcache.key import EmbeddingKey
from mmcache.metrics import Counters
from mmcache.store.base import Outcome

ComputeMany = Callable[[Sequence[EmbeddingKey]], Sequence[Encoded]]

_UNPUBLISHABLE = frozenset(
    {"no_space", "quota", "no_memory", "larger_than_pool", "too_large", "too_few_embeddings", "not_finite"}
)
"""Drops that would meet the next publisher as well, so that its waiting would be in vain."""


_TRIES = 2
"""How often an entry that the directory promises may fail to be delivered before it is computed without it."""
_SHORTEST_WAIT_S = 0.001
"""What each wait counts for besides its length, so that asking again and again ends."""


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
    """One `get_or_compute_many`: owns its claims and waits, and gives all of them up when it ends.

    Args:
        on_failure: told the reason of each failure of the cache, and whether it was in publishing; what it raises ends
            the computation.
    """

    def __init__(
        self,
        *,
        reader: Reader,
        publisher: Publisher,
        channel: ControlChannel,
        tally: Tally,
        counters: Counters,
        timeouts: Timeouts,
        compute: ComputeMany,
        batch: int,
        expect: Expectation | None,
        meta: Mapping[str, object] | None,
        on_failure: Callable[[str, bool], None],
    ) -> None:
        self._reader = reader
        self._publisher = publisher
        self._channel = channel
        self._tally = tally
        self._counters = counters
        self._timeouts = timeouts
        self._compute = compute
        self._batch = batch
        self._expect = expect
        self._meta = meta
        self._on_failure = on_failure
        self._patience = timeouts.wait
        self._found: dict[EmbeddingKey, Embedding] = {}
        self._claims: set[int] = set()
        self._undelivered: Counter[str] = Counter()
        self.callers_error: BaseException | None = None
        """What the caller's function raised, or what is wrong with its output, to tell it from a fault of the cache."""

    def run(self, keys: Sequence[EmbeddingKey]) -> dict[EmbeddingKey, Embedding]:
        """An embedding for each distinct key. Raises what `compute` raises, or InvalidEntry for what it returns."""
        distinct = list(dict.fromkeys(keys))
        wanted = self._reader.wanted(distinct)
        if wanted is None:
            self._counters.add("miss", len(distinct), reason="not_fresh")
            self._on_failure("not_fresh", False)
            return self.run_alone(distinct)
        rest = self._read(wanted)
        while rest:
            # Without waiting, and a batch at a time: those who ask for the same share the work. Then wait for the rest.
            rest = [
                item
                for start in range(0, len(rest), self._batch)
                for item in self._acquire(rest[start : start + self._batch], wait_s=0.0)
            ]
            if not rest or self._patience <= 0.0:
                break
            rest = self._acquire(rest, wait_s=self._patience)
            self._patience -= _SHORTEST_WAIT_S
        if rest:
            self._counters.add("wait_failed", len(rest))
            self._compute_all([_Task(item) for item in rest])
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
        for reason in batch.missing.values():
            if reason not in UNPUBLISHED:
                self._on_failure(reason, False)
        return [item for item in wanted if batch.missing.get(item.name) in UNPUBLISHED]

    def _acquire(self, wanted: list[NamedKey], *, wait_s: float) -> list[NamedKey]:
        """Claim, compute, wait; returns what to ask for again."""
        try:
            acquisition = self._channel.acquire(
                [item.key for item in wanted],
                wait_s=wait_s,
                deadline=time.monotonic() + self._timeouts.read,
                renew_for_s=self._timeouts.compute,
            )
        except (ControllerUnavailable, DeadlineExceeded, LifecycleError) as error:
            self._counters.add("acquire_failed", reason=type(error).__name__)
            self._on_failure("deadline" if isinstance(error, DeadlineExceeded) else "not_fresh", False)
            return []
        failed = False
        with acquisition:
            self._claims = {answer.token for answer in acquisition.answers if isinstance(answer, Granted)}
            try:
                return self._carry_out(wanted, acquisition)
            except BaseException:
                failed = True
                raise
            finally:
                if self._claims:
                    self._channel.abort(sorted(self._claims), AbortReason.FAILED if failed else AbortReason.UNWANTED)
                    self._claims = set()

    def _carry_out(self, wanted: list[NamedKey], acquisition: Acquisition) -> list[NamedKey]:
        waiting = {i for i, answer in enumerate(acquisition.answers) if isinstance(answer, Waiting)}
        self._counters.add("wait", len(waiting))
        again = self._take(wanted, list(enumerate(acquisition.answers)), acquisition.lineage)
        while waiting and not acquisition.lost:
            started = time.monotonic()  # only what is spent on waiting counts, and not what is spent on computing
            resolved = acquisition.resolutions(started + self._patience)
            self._patience -= time.monotonic() - started
            if not resolved:
                break
            waiting.difference_update(position for position, _ in resolved)
            self._claims.update(answer.token for _, answer in resolved if isinstance(answer, Granted))
            again += self._take(wanted, resolved, acquisition.lineage)
        return again + [wanted[position] for position in sorted(waiting)]

    def _take(
        self,
        wanted: list[NamedKey],
        answers: Sequence[tuple[int, Hit | Granted | Waiting | Unclaimed]],
        lineage: str,
    ) -> list[NamedKey]:
        """Compute what was granted, then read what others have; returns what to ask for again.

        Who answers may be of another lineage than the names.
        """
        tasks: list[_Task] = []
        again: list[NamedKey] = []
        hits: dict[str, tuple[NamedKey, Hit]] = {}
        for position, answer in answers:
            item = wanted[position]
            if isinstance(answer, Granted):
                tasks.append(_Task(item.at(answer.generation, lineage=lineage), answer.token))
            elif isinstance(answer, Hit):
                item = item.at(answer.generation, answer.nbytes, lineage=lineage)
                hits[item.name] = (item, answer)
            elif isinstance(answer, Unclaimed) and answer.reason in (CLAIMED, INVALIDATED):
                again.append(item)
            elif isinstance(answer, Unclaimed):
                self._counters.add("unclaimed")
        self._compute_all(tasks)
        undelivered = self._read([item for item, _ in hits.values()]) if hits else []
        if undelivered:
            self._counters.add("undelivered", len(undelivered))
            self._undelivered.update(item.name for item in undelivered)
            self._channel.report([(item.key, hits[item.name][1].revision) for item in undelivered])
        return again + [item.at(item.generation) for item in undelivered if self._undelivered[item.name] < _TRIES]

    def _compute_all(self, tasks: Sequence[_Task]) -> None:
        """Compute in batches, and publish each batch before the next, so that others wait no longer than they must."""
        self._tally.missed(len(tasks))
        for start in range(0, len(tasks), self._batch):
            self._compute_batch(tasks[start : start + self._batch])

    def _compute_batch(self, tasks: Sequence[_Task]) -> None:
        try:
            prepared = self._encode(tasks)
        except BaseException as error:
            self.callers_error = error
            raise
        self._found.update((item.target.key, item.as_embedding()) for item in prepared)
        publications = [item for item, task in zip(prepared, tasks, strict=True) if task.publish]
        if publications:
            results = self._publisher.publish(publications, deadline=time.monotonic() + self._timeouts.publish)
            self._claims.difference_update(publication.token for publication in publications)
            settle_claims(self._channel, publications, results)
            for result in results:
                if not result.readable:
                    self._on_failure(result.reason, True)

    def _encode(self, tasks: Sequence[_Task]) -> list[Publication]:
        """Call the caller's function, and check what it returns."""
        keys = [task.wanted.key for task in tasks]
        started = time.perf_counter()
        values = list(self._compute(keys))
        cost_ms = (time.perf_counter() - started) * 1000.0 / len(keys)
        if len(values) != len(keys):
            raise InvalidEntry(f"the function was given {len(keys)} keys and returned {len(values)} embeddings")
        self._counters.add("computed", len(keys))
        return [
            self._publisher.prepare(task.wanted, value, token=task.token, meta=self._meta, cost_ms=cost_ms)
            for task, value in zip(tasks, values, strict=True)
        ]


def settle_claims(channel: ControlChannel, publications: Sequence[Publication], results: Sequence[PutResult]) -> None:
    """A commit ended its claim; the claims of what was dropped are given up for the reason that it was dropped.

    A name that another writer holds, though the claim on it is ours, is abandoned: that writer must be dead.
    """
    for publication, result in zip(publications, results, strict=True):
        target, token = publication.target, publication.token
        if token and result.reason == Outcome.IN_PROGRESS.value:
            held = AbandonEntry(target.key, target.generation, token, AbandonReason.HELD)
            channel.abandon([held], lineage=target.lineage)
        elif token and not result.readable:
            channel.abort([token], abort_reason(result.reason))


def abort_reason(drop: str) -> AbortReason:
    """What a dropped publication means for those who wait for it."""
    if drop in _UNPUBLISHABLE:
        return AbortReason.NO_ROOM
    return AbortReason.HELD if drop == "damaged" else AbortReason.FAILED
