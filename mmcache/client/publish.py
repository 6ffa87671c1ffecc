"""Publishing: a block is filled, put in one batch, confirmed, and committed to the controller's directory.

Bad input (what can never be an entry) raises before anything is sent. All else that goes wrong drops the entry, with
the reason in a word.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from mmcache.client.attachment import Attacher, Attachment
from mmcache.client.calls import IoThreads
from mmcache.client.health import StoreHealth
from mmcache.client.local import LocalEntry
from mmcache.client.names import NamedKey
from mmcache.client.results import DEFAULT_TENSOR, Embedding, PutResult
from mmcache.control.channel import CommitEntry, ControlChannel
from mmcache.control.messages import INVALIDATED, CommitStatus
from mmcache.entry import (
    PREFIX_BYTES,
    EntryHeader,
    encode_info,
    encode_prefix,
    lay_out,
    padding,
    payload_checksum,
)
from mmcache.errors import (
    ControllerUnavailable,
    DeadlineExceeded,
    InvalidEntry,
    LifecycleError,
    PoolExhausted,
    StoreUnavailable,
)
from mmcache.memory.host import copy_into, dtype_name, tensor_maker
from mmcache.memory.pool import Block, BlockState, RegisteredPool
from mmcache.metrics import Counters, Latency
from mmcache.store import base
from mmcache.store.base import Outcome

Tensors = torch.Tensor | Mapping[str, torch.Tensor]
Encoded = Tensors | tuple[Tensors, Mapping[str, object]]
"""An encoder's output: a dense tensor or named ones, alone or in a tuple with metadata of its own."""

STORED = PutResult("stored")
DUPLICATE = PutResult("duplicate")


def dropped(reason: str) -> PutResult:
    """An entry that was not published, and why."""
    return PutResult("dropped", reason)


class Publication(NamedTuple):
    """One entry that is to be published, checked: it fits the format, and its tensors can be read as bytes.

    `token` is the claim under which it was computed, 0 without one; `object_bytes` is prefix and payload.
    """

    target: NamedKey
    header: EntryHeader
    tensors: tuple[torch.Tensor, ...]
    info: bytes
    token: int
    object_bytes: int

    @property
    def name(self) -> str:
        """The name under which the store is to keep it."""
        return self.target.name

    @property
    def embeddings(self) -> int:
        """Rows of its first tensor."""
        shape = self.tensors[0].shape
        return shape[0] if shape else 1

    def as_embedding(self) -> Embedding:
        """What it is to the caller that computed it."""
        names = (spec.name for spec in self.header.tensors)
        return Embedding(
            self.target.key,
            MappingProxyType(dict(zip(names, self.tensors, strict=True))),
            MappingProxyType(self.header.meta),
            source="computed",
        )


class _Staged(NamedTuple):
    """A publication in its block; `in_place` when that is the caller's own, from `empty`."""

    publication: Publication
    block: Block
    in_place: bool


class Publisher:
    """Carries publications to the store and the directory."""

    def __init__(
        self,
        *,
        io: IoThreads,
        channel: ControlChannel,
        attacher: Attacher,
        health: StoreHealth,
        counters: Counters,
        producer: str,
        local_entries: bool,
        check_finite: bool,
        damaged: MutableMapping[str, None],
    ) -> None:
        self._io = io
        self._channel = channel
        self._attacher = attacher
        self._health = health
        self._counters = counters
        self._producer = producer
        self._local_entries = local_entries
        self._check_finite = check_finite
        self._damaged = damaged
        self._in_place: dict[int, object] = {}
        self.latency = Latency()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, deadline: float) -> torch.Tensor:
        """An uninitialised tensor in pool memory, with room for the prefix before it.

        Raises PoolExhausted, or StoreUnavailable while there is no pool.
        """
        _, payload_bytes = lay_out([(DEFAULT_TENSOR, dtype_name(dtype), shape)])
        pool = self._attacher.require().pool
        block = pool.allocate(PREFIX_BYTES + payload_bytes, deadline=deadline)
        try:
            return tensor_maker(block, offset=PREFIX_BYTES, dtype=dtype, shape=shape)(pool.export(block))
        finally:
            pool.unhold(block)  # from here on the tensor alone holds it

    def prepare(
        self,
        target: NamedKey,
        encoded: Encoded,
        *,
        token: int = 0,
        meta: Mapping[str, object] | None = None,
        cost_ms: float = 0.0,
    ) -> Publication:
        """Check what is to be published. Raises InvalidEntry, naming what cannot be an entry."""
        tensors, own_meta = encoded if isinstance(encoded, tuple) and len(encoded) == 2 else (encoded, {})
        named = {DEFAULT_TENSOR: tensors} if isinstance(tensors, torch.Tensor) else tensors
        if not isinstance(named, Mapping) or not isinstance(own_meta, Mapping):
            raise InvalidEntry(f"an entry is made of a tensor or named tensors, not of a {type(tensors).__name__}")
        if not named:
            raise InvalidEntry("an entry needs at least one tensor")
        strided = {name: _readable_as_bytes(name, tensor) for name, tensor in named.items()}
        specs, payload_bytes = lay_out(
            [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in strided.items()]
        )
        header = EntryHeader(
            key=target.key,
            generation=target.generation,
            tensors=specs,
            meta={**(meta or {}), **own_meta},
            cost_ms=float(cost_ms),
            producer=self._producer,
            created_ns=time.time_ns(),
        )
        encode_prefix(header, payload_nbytes=payload_bytes, payload_checksum=0)  # refuses what does not fit
        return Publication(
            target, header, tuple(strided.values()), encode_info(header), token, PREFIX_BYTES + payload_bytes
        )

    def publish(self, publications: Sequence[Publication], *, deadline: float) -> list[PutResult]:
        """Publish distinct names of one lineage; one result each, in order."""
        started = time.perf_counter()
        results: dict[str, PutResult] = {}
        attachment = self._attacher.current
        if self._channel.in_doubt:  # what it does not hear of, nobody would find
            results.update((item.name, dropped("uncommitted")) for item in publications)
        elif attachment is not None and not self._health.open:
            self._put_and_commit(attachment, publications, results, deadline)
        for item in publications:
            result = results.setdefault(item.name, dropped("unavailable"))
            self._counters.add("put", reason=result.reason or result.status)
            if result.readable:
                self._counters.add("bytes_published", item.object_bytes)
        self.latency.add(time.perf_counter() - started)
        return [results[item.name] for item in publications]

    def _put_and_commit(
        self,
        attachment: Attachment,
        publications: Sequence[Publication],
        results: dict[str, PutResult],
        deadline: float,
    ) -> None:
        put: list[_Staged] = []
        try:
            sendable = [item for item in publications if self._sendable(attachment.pool, item, results)]
            # The controller must hear of what was put, so the put does not get all of the time.
            put_until = deadline - _commit_time(deadline)
            try:
                sendable = self._without_damaged(attachment, sendable, results, put_until)
                self._fill_and_put(attachment, sendable, put, results, put_until)
            except (StoreUnavailable, LifecycleError) as error:
                self._attacher.failed(attachment, error)
            self._commit([item for item in publications if results.get(item.name) == STORED], results, deadline)
        finally:
            for item in put:
                self._end_put(attachment, item, results.get(item.publication.name))

    def _without_damaged(
        self, attachment: Attachment, items: list[Publication], results: dict[str, PutResult], deadline: float
    ) -> list[Publication]:
        """Make way where something else was read under an entry's name; drop what that still stands in the way of.

        A put would not replace it, and say that it did. Its removal takes until no reader has a lease on it.
        """
        names = [item.name for item in items if item.name in self._damaged]
        if not names:
            return items
        try:
            outcomes = self._io.perform(
                lambda: attachment.store.remove(names, deadline=deadline),
                deadline=deadline,
                dispose=lambda _outcomes, _began: None,
                publishes=True,
            )
        except DeadlineExceeded:
            outcomes = [Outcome.TIMED_OUT] * len(names)
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome in (Outcome.OK, Outcome.NOT_FOUND):
                self._damaged.pop(name, None)
            else:
                results[name] = dropped("damaged")
        return [item for item in items if item.name not in results]

    def _sendable(self, pool: RegisteredPool, item: Publication, results: dict[str, PutResult]) -> bool:
        view = self._channel.fresh()
        if view is not None and item.object_bytes > view.max_bytes:
            results[item.name] = dropped("too_large")
        elif view is not None and item.embeddings < view.min_embeddings:
            results[item.name] = dropped("too_few_embeddings")
        elif item.object_bytes > pool.capacity:
            results[item.name] = dropped("larger_than_pool")
        elif self._check_finite and not _all_finite(item.tensors):
            results[item.name] = dropped("not_finite")
        return item.name not in results

    def _fill_and_put(
        self,
        attachment: Attachment,
        items: list[Publication],
        put: list[_Staged],
        results: dict[str, PutResult],
        deadline: float,
    ) -> None:
        """Copy what is not in the pool already into blocks of it, and put all in one batch.

        What was put is added to `put`, for the caller to end once it is committed.
        """
        pool = attachment.pool
        in_place = {item.name: block for item in items if (block := self._block_of(pool, item)) is not None}
        copied = [item for item in items if item.name not in in_place]
        try:
            blocks = pool.allocate_many([item.object_bytes for item in copied], deadline=deadline)
        except BaseException as error:
            for block in in_place.values():
                self._in_place.pop(block.address, None)
                pool.unhold(block)
            if not isinstance(error, PoolExhausted):
                raise
            if error.fits or len(items) == 1:
                results.update((item.name, dropped("no_memory")) for item in items)
                return
            half = len(items) // 2  # published one after the other, halves fit where the whole did not
            first: list[_Staged] = []
            self._fill_and_put(attachment, items[:half], first, results, deadline)
            for item in first:  # its room is needed for the others
                self._end_put(attachment, item, None)
            self._fill_and_put(attachment, items[half:], put, results, deadline)
            return
        by_name = dict(zip((item.name for item in copied), blocks, strict=True)) | in_place
        staged = [_Staged(item, by_name[item.name], item.name in in_place) for item in items]
        try:
            for item in staged:
                _fill(pool, item)
        except BaseException:  # a device's error in the middle of a copy, say: nothing was sent
            for item in staged:
                self._end_staged(attachment, item, settled=True)
            raise
        if staged:
            put += self._put(attachment, staged, results, deadline)

    def _put(
        self, attachment: Attachment, staged: list[_Staged], results: dict[str, PutResult], deadline: float
    ) -> list[_Staged]:
        """Put filled blocks: one hand-off to an I/O thread. Returns what the store has; the rest is ended."""
        names = [item.publication.name for item in staged]
        sizes = [item.publication.object_bytes for item in staged]
        addresses = [item.block.address for item in staged]
        began = time.monotonic()

        def dispose(landed: list[base.PutResult] | None, began: bool) -> None:
            for number, item in enumerate(staged):
                self._end_staged(attachment, item, settled=landed[number].settled if landed is not None else not began)

        try:
            landed = self._io.perform(
                lambda: attachment.store.put_from(names, addresses, sizes, deadline=deadline),
                deadline=deadline,
                dispose=dispose,
                publishes=True,
            )
        except DeadlineExceeded:
            results.update((name, dropped("deadline")) for name in names)
            self._health.timed_out(began, late=self._io.late())
            return []
        self._health.ended([result.outcome for result in landed], began)
        put: list[_Staged] = []
        for item, result in zip(staged, landed, strict=True):
            if result.outcome is Outcome.OK:
                results[item.publication.name] = STORED
                put.append(item)
            else:
                results[item.publication.name] = dropped(result.outcome.value)
                self._end_staged(attachment, item, settled=result.settled)
        return put

    def _end_staged(self, attachment: Attachment, item: _Staged, *, settled: bool) -> None:
        """The block is not needed any more; unless it is settled, the store may yet read it."""
        if item.in_place:
            self._in_place.pop(item.block.address, None)
        self._attacher.give_back(attachment, item.block, settled=settled)

    def _end_put(self, attachment: Attachment, item: _Staged, result: PutResult | None) -> None:
        """What the store took because of us becomes a local entry: under this name there are our bytes, no others."""
        publication, block, in_place = item
        if self._local_entries and not in_place and result == STORED:
            pool = attachment.pool
            pool.unhold(pool.keep(publication.name, block, LocalEntry(publication.header, block)).block)
        else:
            self._end_staged(attachment, item, settled=True)

    def _commit(self, stored: list[Publication], results: dict[str, PutResult], deadline: float) -> None:
        if not stored:
            return
        entries = [
            CommitEntry(
                item.target.key, item.target.generation, item.token, item.object_bytes, item.header.cost_ms, item.info
            )
            for item in stored
        ]
        try:
            statuses = self._channel.commit(entries, deadline=deadline, lineage=stored[0].target.lineage)
        except (ControllerUnavailable, DeadlineExceeded, LifecycleError):
            results.update((item.name, dropped("uncommitted")) for item in stored)
            return
        for item, status in zip(stored, statuses, strict=True):
            if status is CommitStatus.DUPLICATE:
                results[item.name] = DUPLICATE
            elif status is CommitStatus.OUTDATED:
                results[item.name] = dropped(INVALIDATED)
            elif status is not CommitStatus.STORED:
                results[item.name] = dropped(status.name.lower())

    def _block_of(self, pool: RegisteredPool, item: Publication) -> Block | None:
        """The block from `empty` that holds exactly this entry's one tensor and that nobody is publishing yet."""
        if len(item.tensors) != 1 or not item.tensors[0].is_contiguous() or item.tensors[0].numel() == 0:
            return None
        address = item.tensors[0].data_ptr() - PREFIX_BYTES - item.header.tensors[0].offset
        block = pool.block_at(address)
        if block is None or block.state is not BlockState.FILLING or block.nbytes < item.object_bytes:
            return None
        mine = object()
        if self._in_place.setdefault(address, mine) is not mine:
            return None
        pool.hold(block)
        return block


def _fill(pool: RegisteredPool, staged: _Staged) -> None:
    """Write an entry into its block: its tensors, unless they are there already, and the prefix that seals it."""
    publication, block, in_place = staged
    view = pool.view(block)[: publication.object_bytes]
    payload = view[PREFIX_BYTES:]
    if not in_place:
        for offset, nbytes in padding(publication.header.tensors):
            payload[offset : offset + nbytes] = bytes(nbytes)
        for spec, tensor in zip(publication.header.tensors, publication.tensors, strict=True):
            copy_into(payload[spec.offset : spec.offset + spec.nbytes], tensor)
    view[:PREFIX_BYTES] = encode_prefix(
        publication.header, payload_nbytes=len(payload), payload_checksum=payload_checksum(payload)
    )


def _commit_time(deadline: float) -> float:
    """Seconds of what is left until the deadline that are kept for the commit."""
    return min(0.5, max(0.0, deadline - time.monotonic()) / 10)


def _readable_as_bytes(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidEntry(f"tensor {name!r} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.is_meta:
        raise InvalidEntry(f"tensor {name!r} is on the meta device and has no values")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise InvalidEntry(f"tensor {name!r} is {tensor.layout}; only dense tensors can be published")
    if tensor.is_quantized:
        raise InvalidEntry(f"tensor {name!r} is quantised; publish its dequantised or integer values")
    dtype_name(tensor.dtype)  # refuses a dtype that has no name in the format
    return tensor.detach().resolve_conj().resolve_neg()


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether every floating-point value is finite; other dtypes always are, and float4 has no others."""
    for tensor in tensors:
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or "float4" in str(tensor.dtype):
            continue
        wide = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no isfinite
        if not bool(torch.isfinite(wide).all()):
            return False
    return True
