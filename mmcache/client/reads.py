"""Reading: local entries first, then one batched store read of the rest into pool blocks, verified before it is shown.

Everything here is keyed by the store's name. Reads in flight are shared: of two calls that want the same name at once,
one reads and the other waits for it, within its own deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from mmcache.client.attachment import Attacher, Attachment
from mmcache.client.calls import IoThreads
from mmcache.client.health import UNANSWERED, StoreHealth
from mmcache.client.local import Expectation, ExpectedSizes, LocalEntry
from mmcache.client.names import NamedKey, Names
from mmcache.client.results import Embedding
from mmcache.client.transfers import Arrival, Transfer, Transfers
from mmcache.control.channel import AbandonEntry, ControlChannel
from mmcache.control.messages import AbandonReason
from mmcache.control.replica import Replica
from mmcache.control.tally import Tally
from mmcache.entry import EntryHeader
from mmcache.errors import (
    CORRUPT_REASONS,
    CorruptEntry,
    DeadlineExceeded,
    LifecycleError,
    PoolExhausted,
    StoreUnavailable,
)
from mmcache.key import EmbeddingKey
from mmcache.memory.pool import Block, BlockState
from mmcache.metrics import Counters, Latency
from mmcache.store.base import Outcome, ReadResult

_log = logging.getLogger(__name__)

ABSENT = "absent"
"""The one reason for a miss that is no failure."""

MAX_DAMAGED = 1024

UNPUBLISHED = frozenset({ABSENT, Outcome.IN_PROGRESS.value, *CORRUPT_REASONS})
"""Reasons that a publication would cure: nothing usable is under the name. For all others it may well be there."""


class ReadBatch:
    """One read under way, and in the end its outcome: embeddings by name, and why the others are missing."""

    __slots__ = ("began", "deadline", "expect", "found", "from_store", "missing", "nbytes")

    def __init__(self, expect: Expectation | None, deadline: float) -> None:
        self.began = time.monotonic()
        self.expect = expect
        self.deadline = deadline
        self.found: dict[str, Embedding] = {}
        self.missing: dict[str, str] = {}
        self.nbytes = 0
        """Bytes of the pool that what was read from the store takes."""
        self.from_store = 0

    def miss(self, wanted: Sequence[NamedKey], reason: str) -> None:
        """All of these are missing for one reason."""
        self.missing.update((item.name, reason) for item in wanted)


class _Flight:
    """A read of some names, for a batch, that other calls may wait for."""

    __slots__ = ("_landing", "batch", "began")

    def __init__(self, batch: ReadBatch) -> None:
        self.began = time.monotonic()
        self.batch = batch
        self._landing = threading.Lock()  # held until it has landed: cheaper than an Event
        self._landing.acquire()

    def land(self) -> None:
        """It has ended."""
        self._landing.release()

    def landed(self, deadline: float) -> bool:
        """Wait for its end; False at the deadline."""
        if not self._landing.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return False
        self._landing.release()
        return True

    def absent(self, name: str, since: float) -> bool:
        """Once landed: whether the name was found absent after a time, so that whoever asks since then knows it too."""
        return self.began >= since and self.batch.missing.get(name) == ABSENT


class Reader:
    """Turns wanted keys into embeddings or reasons for a miss. Never raises for what the store does."""

    def __init__(
        self,
        *,
        io: IoThreads,
        channel: ControlChannel,
        attacher: Attacher,
        health: StoreHealth,
        tally: Tally,
        counters: Counters,
        verify: Literal["full", "prefix"],
        local_entries: bool,
        default_bytes: int,
    ) -> None:
        self._io = io
        self._channel = channel
        self._attacher = attacher
        self._health = health
        self._tally = tally
        self._counters = counters
        self._transfers = Transfers(io=io, attacher=attacher, health=health, verify=verify)
        self._local_entries = local_entries
        self._sizes = ExpectedSizes(default_bytes=default_bytes)
        self._names = Names(Replica(""))
        self._lease_s = 0.0
        self._flights: dict[str, _Flight] = {}
        self._flights_lock = threading.Lock()
        self._told_of_full_pool = False
        self.damaged: OrderedDict[str, None] = OrderedDict()
        """Names under which there is something that is not their entry: a put would not replace it. Bounded."""
        self.store_latency = Latency()
        self.local_latency = Latency()

    def wanted(self, keys: Sequence[EmbeddingKey], *, publishing: bool = False) -> list[NamedKey] | None:
        """The names of these keys now; None while this process has no fresh session, and so cannot know them.

        Where staleness is allowed they may be old ones, but not for `publishing`.
        """
        view = self._channel.fresh() if publishing else self._channel.readable()
        if view is None:
            return None
        self._lease_s = view.lease_s
        names = self._names
        if names.head != view.replica.head or names.replica is not view.replica:
            names = self._names = names.renewed(view.replica)
        return [names[key] for key in keys]

    def read(self, wanted: Sequence[NamedKey], *, expect: Expectation | None, deadline: float) -> ReadBatch:
        """Read each distinct name once. What is found is tallied; what is not, its caller may have by other ways."""
        batch = ReadBatch(expect, deadline)
        remote = self._take_local(wanted, batch)
        while remote:
            again = self._read_once(remote, batch)
            remote = self._take_local(again, batch) if again else {}
        self._tally.found([embedding.key for embedding in batch.found.values()])
        local = len(batch.found) - batch.from_store
        if local:
            self._counters.add("hit", local, reason="local")
        if batch.from_store:
            self._counters.add("hit", batch.from_store, reason="store")
            self._counters.add("bytes_read", batch.nbytes)
        for reason in batch.missing.values():
            self._counters.add("miss", reason=reason)
            if reason == "no_memory" and not self._told_of_full_pool:
                self._told_of_full_pool = True
                _log.warning("the pool is full of tensors that are still held: raise client.pool_bytes, or clone them")
        return batch

    def _read_once(self, remote: dict[str, NamedKey], batch: ReadBatch) -> list[NamedKey]:
        """Read what no other call reads already, and wait for the rest; returns what to try again."""
        others = self._fly(remote, batch)
        again: list[NamedKey] = []
        for name, flight in others.items():
            if not flight.landed(batch.deadline):
                batch.missing[name] = "deadline"
            elif flight.absent(name, batch.began):
                batch.missing[name] = ABSENT
            else:  # it is local now, or it failed for a reason of the other call's own
                again.append(remote[name])
        return again

    def _take_local(self, wanted: Sequence[NamedKey], batch: ReadBatch) -> dict[str, NamedKey]:
        """Show what this process holds; returns the rest, by name."""
        attachment = self._attacher.current
        if not self._local_entries or attachment is None:
            return {item.name: item for item in wanted}
        started = time.perf_counter()
        found, expect = batch.found, batch.expect
        remote: dict[str, NamedKey] = {}
        for item, local in zip(wanted, attachment.pool.find([item.name for item in wanted]), strict=True):
            if local is None:
                remote[item.name] = item
                continue
            entry, export = local
            try:
                found[item.name] = entry.embedding(export, item.key, "local", expect)
            except CorruptEntry as error:
                batch.missing[item.name] = error.reason
        if not remote:
            self.local_latency.add(time.perf_counter() - started)
        return remote

    def _fly(self, remote: dict[str, NamedKey], batch: ReadBatch) -> dict[str, _Flight]:
        """Read what nobody is reading yet; returns the flights of others that read the rest."""
        if not self._local_entries:  # then a flight would leave nothing here for those who wait for it
            self._read_from_store(list(remote.values()), batch)
            return {}
        flight = _Flight(batch)
        mine: list[NamedKey] = []
        others: dict[str, _Flight] = {}
        try:
            with self._flights_lock:
                for name, item in remote.items():
                    if (other := self._flights.get(name)) is not None:
                        others[name] = other
                    else:
                        mine.append(item)
                        self._flights[name] = flight
            if mine:
                self._read_from_store(mine, batch)
        finally:
            with self._flights_lock:
                for item in mine:
                    if self._flights.get(item.name) is flight:
                        del self._flights[item.name]
            flight.land()
        return others

    def _read_from_store(self, wanted: list[NamedKey], batch: ReadBatch) -> None:
        started = time.perf_counter()
        attachment = self._attacher.current
        if attachment is None or self._health.open:
            batch.miss(wanted, "unavailable")
            return
        if self._health.unreachable:
            unreachable = self._health.unreachable_among(item.name for item in wanted)
            batch.miss([item for item in wanted if item.name in unreachable], "unavailable")
            wanted = [item for item in wanted if item.name not in unreachable]
            if not wanted:
                return
        try:
            attachment.store.lease_s = self._lease_s
            if batch.expect is not None:
                wanted = [item._replace(nbytes=batch.expect.object_bytes) for item in wanted]
            if sized := [item for item in wanted if item.nbytes]:
                self._read_sized(attachment, sized, batch)
            if len(sized) < len(wanted):
                self._read_unsized(attachment, [item for item in wanted if not item.nbytes], batch)
        except (StoreUnavailable, LifecycleError) as error:
            batch.miss([item for item in wanted if item.name not in batch.found], "unavailable")
            self._attacher.failed(attachment, error)
        if batch.found:
            self.store_latency.add(time.perf_counter() - started)

    def _read_unsized(self, attachment: Attachment, wanted: list[NamedKey], batch: ReadBatch) -> None:
        """Read objects into blocks of guessed sizes, as many at once as take a quarter of the pool at most."""
        most = attachment.pool.capacity // 4
        part: list[NamedKey] = []
        sizes: list[int] = []
        room = most
        for item in wanted:
            size = min(self._sizes.guess(item.name, item.key), most)
            if size > room:
                self._read_guessed(attachment, part, sizes, batch)
                part, sizes, room = [], [], most
            part.append(item)
            sizes.append(size)
            room -= size
        self._read_guessed(attachment, part, sizes, batch)

    def _read_guessed(self, attachment: Attachment, wanted: list[NamedKey], sizes: list[int], batch: ReadBatch) -> None:
        """Read into blocks of these sizes or, where there is no room for guesses, of the objects' real sizes."""
        store, pool = attachment
        try:
            blocks = pool.allocate_many(sizes, deadline=0.0)
        except PoolExhausted:
            pass
        else:
            self._read_into(attachment, wanted, blocks, batch)
            return
        names = [item.name for item in wanted]
        began = time.monotonic()
        try:
            real_sizes = self._io.perform(
                lambda: store.sizes(names, deadline=batch.deadline),
                deadline=batch.deadline,
                dispose=lambda _sizes, _began: None,
            )
        except DeadlineExceeded:
            batch.miss(wanted, "deadline")
            self._health.timed_out(began, late=self._io.late())
            return
        batch.miss([item for item, size in zip(wanted, real_sizes, strict=True) if size is None], ABSENT)
        sized = [item._replace(nbytes=size) for item, size in zip(wanted, real_sizes, strict=True) if size is not None]
        self._read_sized(attachment, sized, batch)

    def _read_sized(self, attachment: Attachment, wanted: list[NamedKey], batch: ReadBatch) -> None:
        """Read objects of known sizes, waiting for room in the pool if need be."""
        pool = attachment.pool
        room = pool.capacity - batch.nbytes  # what this batch has found already stays held until it returns
        fitting: list[NamedKey] = []
        for item in wanted:
            if item.nbytes > pool.capacity:
                batch.missing[item.name] = "larger_than_pool"
            elif item.nbytes > room:
                batch.missing[item.name] = "no_memory"
            else:
                room -= item.nbytes
                fitting.append(item)
        if not fitting:
            return
        try:
            blocks = pool.allocate_many([item.nbytes for item in fitting], deadline=batch.deadline)
        except PoolExhausted:
            batch.miss(fitting, "no_memory")
        else:
            self._read_into(attachment, fitting, blocks, batch)

    def _read_into(self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], batch: ReadBatch) -> None:
        """Read each object into its block; those larger than that once more, now that their size is known."""
        larger: list[NamedKey] = []
        began = time.monotonic()
        transfers = self._transfers.begin(attachment, wanted, blocks, batch.deadline)
        try:
            while transfers:
                transfer = transfers.pop(0)
                try:
                    arrivals = transfer.arrivals()
                except DeadlineExceeded:
                    batch.miss(transfer.wanted, "deadline")
                    self._health.timed_out(began, [item.name for item in transfer.wanted], self._io.late())
                else:
                    self._health.ended([arrival.result.outcome for arrival in arrivals], began)
                    larger += self._accept(transfer, arrivals, batch)
        finally:
            for transfer in transfers:
                transfer.drop()
        if larger:
            self._counters.add("second_round", len(larger))
            self._read_sized(attachment, larger, batch)

    def _accept(self, transfer: Transfer, arrivals: list[Arrival], batch: ReadBatch) -> list[NamedKey]:
        """Keep what came and was verified, and show it; returns what was larger than its block."""
        larger: list[NamedKey] = []
        shown: list[NamedKey] = []
        filled: list[tuple[str | None, Block, int, LocalEntry]] = []
        try:
            for item, block, (result, header) in zip(transfer.wanted, transfer.blocks, arrivals, strict=True):
                if not isinstance(header, EntryHeader):
                    larger += self._not_delivered(item, result, header, batch)
                    continue
                self.damaged.pop(item.name, None)
                self._sizes.learn(item.name, item.key, result.nbytes)
                try:
                    entry = LocalEntry(header, block)
                except CorruptEntry as error:
                    batch.missing[item.name] = error.reason
                else:
                    shown.append(item)
                    filled.append((item.name if self._local_entries else None, block, result.nbytes, entry))
            kept = transfer.attachment.pool.keep_many(filled)
        finally:
            for block, arrival in zip(transfer.blocks, arrivals, strict=True):
                if block.state is BlockState.FILLING:
                    self._attacher.give_back(transfer.attachment, block, settled=arrival.result.settled)
        for item, (entry, export) in zip(shown, kept, strict=True):
            try:
                batch.found[item.name] = entry.embedding(export, item.key, "store", batch.expect)
            except CorruptEntry as error:
                batch.missing[item.name] = error.reason
            else:
                batch.nbytes += export.block.nbytes
                batch.from_store += 1
        return larger

    def _not_delivered(
        self, item: NamedKey, result: ReadResult, error: EntryHeader | CorruptEntry | None, batch: ReadBatch
    ) -> list[NamedKey]:
        """Note why an object is missing, or return it with its size if its block was but too small."""
        if result.outcome in UNANSWERED:
            self._health.remember((item.name,))
        if isinstance(error, CorruptEntry):
            self._refuse(item, error, batch)
        elif result.outcome is not Outcome.TOO_SMALL:
            batch.missing[item.name] = ABSENT if result.outcome is Outcome.NOT_FOUND else result.outcome.value
        elif batch.expect is not None:
            batch.missing[item.name] = "unexpected"
        elif result.nbytes <= item.nbytes:  # smaller than it was said to be: to try again is of no use
            batch.missing[item.name] = "length"
        else:
            return [item._replace(nbytes=result.nbytes)]
        return []

    def _refuse(self, item: NamedKey, error: CorruptEntry, batch: ReadBatch) -> None:
        """What fails verification is never seen. Its name is abandoned, and remembered: a put would not replace it."""
        batch.missing[item.name] = error.reason
        if error.reason != "version":  # to those who know that format it may be sound
            corrupt = AbandonEntry(item.key, item.generation, 0, AbandonReason.CORRUPT)
            self._channel.abandon([corrupt], lineage=item.lineage)
        self.damaged[item.name] = None
        if len(self.damaged) > MAX_DAMAGED:
            self.damaged.popitem(last=False)
