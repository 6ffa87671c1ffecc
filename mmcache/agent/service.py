"""What the agent does for each item: reads it into its block, asks who encodes it, waits, publishes.

The thread that receives the engine's messages never waits for the cache: it notes items in the table and hands work to
threads, of which there is a bounded number. What does not fit is `Missing`, as `overloaded`. Whatever goes wrong costs
the engine one encoding.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from mmcache.agent.expectation import is_expected, object_bytes
from mmcache.agent.freshness import Freshness
from mmcache.agent.messages import AgentMessage, Ask, Drop, Encoded, EngineMessage, Item, Missing, Ready
from mmcache.agent.publications import Publications
from mmcache.agent.staging import Staging
from mmcache.agent.table import Claim, Table, Wait, Wanted
from mmcache.client.cache import MMCache
from mmcache.client.calls import IoThreads, Overloaded
from mmcache.client.names import NamedKey
from mmcache.client.reads import ABSENT, UNPUBLISHED
from mmcache.client.results import Embedding
from mmcache.control.channel import Acquisition
from mmcache.control.messages import CLAIMED, INVALIDATED, AbortReason, Granted, Hit, Unclaimed, Waiting
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, InvalidEntry, LifecycleError
from mmcache.key import EmbeddingKey
from mmcache.memory.host import copy_into, dtype_of

_log = logging.getLogger(__name__)

READERS: Final = 8
MAX_ASKS: Final = 256
"""Most batches that wait for a reader."""
WAITERS: Final = 64
"""Most acquisitions that wait for other engines at once; each takes a thread."""
_TRIES: Final = 2
"""How often an entry that the directory promises may fail to be delivered before it is missing."""


class _Acquired(NamedTuple):
    """An acquisition, with the items that it is for in the order of its answers."""

    acquisition: Acquisition
    wanted: Sequence[Wanted]
    tries: int
    """How often its items may be acquired once more."""


class Service:
    """Serves one engine.

    Args:
        cache: connected, or trying to be; not strict. Its parts are used directly: an item's way does not fit a call.
        post: tells the engine; must not raise.
    """

    def __init__(
        self, cache: MMCache, staging: Staging, freshness: Freshness, post: Callable[[AgentMessage], None]
    ) -> None:
        parts = cache._parts
        self._client = parts.settings.client
        self._channel = parts.channel
        self._reader = parts.reader
        self._publisher = parts.publisher
        self._tally = parts.tally
        self._counters = parts.counters
        self._staging = staging
        self._freshness = freshness
        self._table = Table(post)
        self._readers = IoThreads(READERS, name="mmcache-agent-read", max_pending=MAX_ASKS)
        self._waiters = IoThreads(WAITERS, name="mmcache-agent-wait", max_pending=WAITERS)
        self._may_wait = threading.BoundedSemaphore(WAITERS)
        self._publications = Publications(
            table=self._table,
            staging=staging,
            publisher=parts.publisher,
            channel=parts.channel,
            counters=parts.counters,
            publish_timeout=self._client.publish_timeout,
        )

    # On the thread that receives

    def receive(self, message: EngineMessage) -> None:
        """A message of the engine."""
        match message:
            case Ask():
                self._asked(message)
            case Encoded():
                self._publications.take(message)
            case Drop():
                self._drop(message)

    def figures(self) -> dict[str, float]:
        """Of this object alone."""
        return {"agent.items": float(len(self._table))}

    def _asked(self, message: Ask) -> None:
        now = time.monotonic()
        batches: list[dict[EmbeddingKey, Wanted]] = []
        for item in message.items:
            wanted = self._table.add(item, now + item.wait_s if item.wait_s > 0.0 else now)  # also for NaN
            if wanted is None:
                self._counters.add("agent.refused")
                continue
            if fault := self._fault(item):
                self._miss(wanted, fault)
                continue
            batch = next((batch for batch in batches if item.key not in batch), None)  # keys of a batch are distinct
            if batch is None:
                batch = {}
                batches.append(batch)
            batch[item.key] = wanted
        for batch in batches:
            some = list(batch.values())
            try:
                self._readers.submit(functools.partial(self._serve, some))
            except (Overloaded, LifecycleError):
                self._miss_all(some, "overloaded")

    def _fault(self, item: Item) -> str:
        """Why there can be no such item; empty if there can."""
        try:
            self._staging.block(item.offset, item.nbytes)
            dtype_of(item.dtype)
        except (ValueError, InvalidEntry):
            return "invalid"
        return ""

    def _drop(self, message: Drop) -> None:
        for number in message.numbers:
            claim, acquisition = self._table.drop(number)
            if claim is not None:
                self._channel.abort([claim.token], AbortReason.UNWANTED)
            if acquisition is not None:
                acquisition.leave()

    # On readers' threads

    def _serve(self, some: list[Wanted]) -> None:
        """Read a batch, and ask who computes what is not there."""
        try:
            epoch = self._freshness.look()
            names = self._reader.wanted([wanted.item.key for wanted in some]) if epoch is not None else None
            if epoch is None or names is None:
                self._miss_all(some, "not_fresh")
                return
            for wanted, named in zip(some, names, strict=True):
                wanted.epoch, wanted.named = epoch, named
            rest: list[Wanted] = []
            for wanted, reason in self._read(list(zip(some, names, strict=True))):
                if reason in UNPUBLISHED:
                    rest.append(wanted)
                else:
                    self._miss(wanted, reason)
            self._acquire(rest, _TRIES)
        except Exception as error:  # noqa: BLE001 - no item may end the agent; counted and logged
            self._survive(error, some)

    def _read(self, some: Sequence[tuple[Wanted, NamedKey]]) -> list[tuple[Wanted, str]]:
        """Read what can be read, as much at once as takes a quarter of the pool; returns what is missing, and why."""
        deadline = time.monotonic() + self._client.read_timeout
        missing: list[tuple[Wanted, str]] = []
        part: list[tuple[Wanted, NamedKey]] = []
        room = most = self._client.pool_bytes // 4
        for wanted, named in some:
            sized = named if named.nbytes else named._replace(nbytes=object_bytes(wanted.item))
            if sized.nbytes > room:
                missing += self._read_part(part, deadline)
                part, room = [], most
            part.append((wanted, sized))
            room -= sized.nbytes
        return missing + self._read_part(part, deadline)

    def _read_part(self, part: list[tuple[Wanted, NamedKey]], deadline: float) -> list[tuple[Wanted, str]]:
        part = [(wanted, named) for wanted, named in part if self._table.lives(wanted)]
        if not part:
            return []
        batch = self._reader.read([named for _, named in part], expect=None, deadline=deadline)
        missing: list[tuple[Wanted, str]] = []
        for wanted, named in part:
            embedding = batch.found.get(named.name)
            if embedding is None:
                missing.append((wanted, batch.missing.get(named.name, ABSENT)))
            elif is_expected(embedding, wanted.item):
                self._fill(wanted, embedding)
            else:
                self._miss(wanted, "unexpected")
        return missing

    def _fill(self, wanted: Wanted, embedding: Embedding) -> None:
        """Copy an embedding into its block, unless the item was dropped."""
        if not self._table.begin_filling(wanted):
            return
        item, tensor = wanted.item, embedding.tensor
        nbytes = tensor.numel() * tensor.itemsize
        try:
            copy_into(self._staging.block(item.offset, nbytes), tensor)
            epoch = self._freshness.look()
        except BaseException:  # from here on nobody else would end it
            self._miss(wanted, "failed")
            raise
        if epoch != wanted.epoch:
            self._miss(wanted, "stale" if epoch is not None else "not_fresh")
        elif self._table.end(wanted, Ready(item.number, epoch, list(tensor.shape), nbytes, embedding.source)):
            self._counters.add("agent.ready", reason=embedding.source)

    def _acquire(self, some: list[Wanted], tries: int) -> None:
        """Ask who computes these; also on waiters' threads."""
        some = [wanted for wanted in some if self._table.lives(wanted)]
        if not some:
            return
        now = time.monotonic()
        try:
            acquisition = self._channel.acquire(
                [wanted.item.key for wanted in some],
                wait_s=max(0.0, max(wanted.until for wanted in some) - now),
                deadline=now + self._client.read_timeout,
                renew_for_s=self._client.compute_timeout,
            )
        except (ControllerUnavailable, DeadlineExceeded, LifecycleError) as error:
            self._counters.add("acquire_failed", reason=type(error).__name__)
            self._miss_all(some, "deadline" if isinstance(error, DeadlineExceeded) else "unavailable")
            return
        acquired = _Acquired(acquisition, some, tries - 1)
        try:
            hits, waiting, again = self._answer(acquired, list(enumerate(acquisition.answers)))
            if waiting:
                self._wait(acquired, waiting)
            else:
                acquisition.leave()
            self._read_hits(acquired, hits)
            self._ask_again(acquired, again, "unclaimed")
        except BaseException:
            acquisition.leave()
            self._give_back(some, acquisition.answers)
            raise

    def _answer(
        self, acquired: _Acquired, answers: Sequence[tuple[int, Hit | Granted | Waiting | Unclaimed]]
    ) -> tuple[list[tuple[Wanted, Hit]], list[int], list[Wanted]]:
        """Tell the engine what it can be told at once; returns what can be read, which wait, and what to ask again."""
        hits: list[tuple[Wanted, Hit]] = []
        waiting: list[int] = []
        again: list[Wanted] = []
        for position, answer in answers:
            wanted = acquired.wanted[position]
            match answer:
                case Granted():
                    self._granted(wanted, answer, acquired.acquisition.lineage)
                case Hit():
                    hits.append((wanted, answer))
                case Waiting():
                    waiting.append(position)
                case Unclaimed() if answer.reason == INVALIDATED:
                    again.append(wanted)
                case Unclaimed():
                    self._counters.add("unclaimed")
                    self._miss(wanted, "wait_failed" if answer.reason == CLAIMED else "unclaimed")
        return hits, waiting, again

    def _granted(self, wanted: Wanted, answer: Granted, lineage: str) -> None:
        if not wanted.item.claim:
            self._channel.abort([answer.token], AbortReason.UNWANTED)
            self._miss(wanted, ABSENT)
        elif self._table.grant(wanted, Claim(wanted.name.at(answer.generation, lineage=lineage), answer.token)):
            self._tally.missed(1)
        else:
            self._channel.abort([answer.token], AbortReason.UNWANTED)

    def _read_hits(self, acquired: _Acquired, hits: list[tuple[Wanted, Hit]]) -> None:
        """Read what the directory promises. What the store does not deliver is reported, and asked for once more."""
        promised = {id(wanted): hit for wanted, hit in hits}
        undelivered: list[Wanted] = []
        lineage = acquired.acquisition.lineage
        for wanted, reason in self._read(
            [(w, w.name.at(hit.generation, hit.nbytes, lineage=lineage)) for w, hit in hits]
        ):
            if reason not in UNPUBLISHED:
                self._miss(wanted, reason)
                continue
            undelivered.append(wanted)
            self._counters.add("undelivered")
            self._channel.report([(wanted.item.key, promised[id(wanted)].revision)])
        self._ask_again(acquired, undelivered, "undelivered")

    def _ask_again(self, acquired: _Acquired, some: list[Wanted], reason: str) -> None:
        if acquired.tries > 0:
            self._acquire(some, acquired.tries)
        else:
            self._miss_all(some, reason)

    # On waiters' threads

    def _wait(self, acquired: _Acquired, positions: list[int]) -> None:
        """Have a thread wait for what others compute."""
        wait = Wait(acquired.acquisition)
        waiting = {position for position in positions if self._table.wait(acquired.wanted[position], wait)}
        self._counters.add("wait", len(waiting))
        if waiting and self._may_wait.acquire(blocking=False):
            try:
                self._waiters.submit(functools.partial(self._await, acquired, waiting))
                return
            except (Overloaded, LifecycleError):
                self._may_wait.release()
        acquired.acquisition.leave()
        self._miss_all([acquired.wanted[position] for position in waiting], "overloaded")

    def _await(self, acquired: _Acquired, waiting: set[int]) -> None:
        try:
            with acquired.acquisition:
                self._follow(acquired, waiting)
        except Exception as error:  # noqa: BLE001 - no item may end the agent; counted and logged
            self._survive(error, acquired.wanted)
        finally:
            self._may_wait.release()

    def _follow(self, acquired: _Acquired, waiting: set[int]) -> None:
        """Wait until each of these has its result, was dropped, or has waited for as long as it may."""
        acquisition, wanted, _ = acquired
        while waiting:
            now = time.monotonic()
            for position in [position for position in waiting if wanted[position].until <= now]:
                waiting.discard(position)
                self._miss(wanted[position], "wait_failed")
            waiting = {position for position in waiting if self._table.lives(wanted[position])}
            if not waiting:
                return
            resolved = acquisition.resolutions(min(wanted[position].until for position in waiting))
            if not resolved and time.monotonic() < min(wanted[position].until for position in waiting):
                for position in waiting:  # the session is lost, or all were dropped meanwhile
                    self._miss(wanted[position], "wait_failed")
                return
            waiting -= {position for position, _ in resolved}
            for position, _ in resolved:
                self._table.wait_no_more(wanted[position])
            try:
                hits, _, again = self._answer(acquired, resolved)
            except BaseException:
                self._give_back(wanted, [answer for _, answer in resolved])
                raise
            self._read_hits(acquired, hits)
            self._ask_again(acquired, again, "unclaimed")

    # Endings

    def _miss(self, wanted: Wanted, reason: str) -> None:
        if self._table.end(wanted, Missing(wanted.item.number, reason)):
            self._counters.add("agent.missing", reason=reason)
            self._tally.missed(1)

    def _miss_all(self, some: Sequence[Wanted], reason: str) -> None:
        for wanted in some:
            self._miss(wanted, reason)

    def _give_back(self, some: Sequence[Wanted], answers: Sequence[object]) -> None:
        """End the claims among these answers that no item holds."""
        held = {wanted.claim.token for wanted in some if wanted.claim is not None}
        tokens = {answer.token for answer in answers if isinstance(answer, Granted)} - held
        self._channel.abort(sorted(tokens), AbortReason.FAILED)

    def _survive(self, error: Exception, some: Sequence[Wanted]) -> None:
        """A fault of ours ends the items that it met, but for those whose claim the engine has been told of."""
        self._counters.add("agent.internal_error", reason=type(error).__name__)
        _log.error("the agent failed; these items are missing", exc_info=error)
        for wanted in some:
            self._table.fail(wanted)
