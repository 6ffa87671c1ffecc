"""From the store into blocks: handed to I/O threads, which also verify what came, while the rest is still coming."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Literal, NamedTuple

from mmcache.client.attachment import Attacher, Attachment
from mmcache.client.calls import HandOff, IoThreads
from mmcache.client.health import UNANSWERED, StoreHealth
from mmcache.client.names import NamedKey
from mmcache.entry import EntryHeader, decode_entry
from mmcache.errors import CorruptEntry, DeadlineExceeded
from mmcache.memory.pool import Block
from mmcache.store.base import Outcome, ReadResult

PART_BYTES = 8 << 20
"""A batch of at least twice as many bytes that is verified in full comes through the sidecar in two halves at once:
while one is verified, the other comes. (Over TCP two halves only get into each other's way.)"""


class Arrival(NamedTuple):
    """What became of one object: the store's word and, of what it delivered, the header or what is wrong with it."""

    result: ReadResult
    entry: EntryHeader | CorruptEntry | None


class Part(NamedTuple):
    """A part of a read that has ended; `arrivals` is None when the deadline came first."""

    wanted: list[NamedKey]
    blocks: list[Block]
    arrivals: list[Arrival] | None


class Transfers:
    """Reads objects into blocks. Blocks of what arrived are the caller's to end, those of a late part are not."""

    def __init__(
        self, *, io: IoThreads, attacher: Attacher, health: StoreHealth, verify: Literal["full", "prefix"]
    ) -> None:
        self._io = io
        self._attacher = attacher
        self._health = health
        self._verify: Literal["full", "prefix"] = verify

    def read(
        self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], deadline: float
    ) -> Generator[Part, None, None]:
        """The parts of a read as they end. Raises what `HandOff.result` raises. To be closed."""
        divided = self._verify == "full" and attachment.store.kind == "sidecar"
        half = len(wanted) // 2 if divided and sum(block.nbytes for block in blocks) >= 2 * PART_BYTES else 0
        parts = [part for part in (slice(0, half), slice(half, None)) if wanted[part]]
        under_way: list[tuple[slice, HandOff[list[Arrival]]]] = []
        ended = 0
        try:
            for part in parts:
                under_way.append((part, self._begin(attachment, wanted[part], blocks[part], deadline)))
            for part, hand_off in under_way:
                ended += 1
                try:
                    arrivals = hand_off.result(deadline)
                except DeadlineExceeded:
                    yield Part(wanted[part], blocks[part], None)
                else:
                    yield Part(wanted[part], blocks[part], arrivals)
        finally:
            for _, hand_off in under_way[ended:]:
                hand_off.drop()

    def _begin(
        self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], deadline: float
    ) -> HandOff[list[Arrival]]:
        return self._io.hand_off(
            self._work(attachment, wanted, blocks, deadline), self._disposal(attachment, wanted, blocks)
        )

    def _work(
        self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], deadline: float
    ) -> Callable[[], list[Arrival]]:
        names = [item.name for item in wanted]
        addresses = [block.address for block in blocks]
        sizes = [block.nbytes for block in blocks]

        def read_and_verify() -> list[Arrival]:
            results = attachment.store.read_into(names, addresses, sizes, deadline=deadline)
            return [
                Arrival(result, self._verified(attachment, item, block, result))
                for item, block, result in zip(wanted, blocks, results, strict=True)
            ]

        return read_and_verify

    def _verified(
        self, attachment: Attachment, item: NamedKey, block: Block, result: ReadResult
    ) -> EntryHeader | CorruptEntry | None:
        if result.outcome is not Outcome.OK:
            return None
        view = attachment.pool.view(block)[: result.nbytes]
        try:
            return decode_entry(view, key=item.key, generation=item.generation, verify=self._verify)
        except CorruptEntry as error:
            return error

    def _disposal(
        self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block]
    ) -> Callable[[list[Arrival] | None, bool], None]:
        def dispose(arrivals: list[Arrival] | None, began: bool) -> None:
            for number, block in enumerate(blocks):
                settled = arrivals[number].result.settled if arrivals is not None else not began
                self._attacher.give_back(attachment, block, settled=settled)
            if arrivals is not None:  # late: now it shows on which of the names the others had to wait
                late = [
                    (item.name, arrival.result.outcome in UNANSWERED)
                    for item, arrival in zip(wanted, arrivals, strict=True)
                ]
                self._health.remember(name for name, unanswered in late if unanswered)
                self._health.forgive(name for name, unanswered in late if not unanswered)

        return dispose
