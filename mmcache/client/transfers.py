"""From the store into blocks: handed to I/O threads, which also verify what came, while the rest is still coming."""

from __future__ import annotations

from typing import Literal, NamedTuple

from mmcache.client.attachment import Attacher, Attachment
from mmcache.client.calls import IoThreads
from mmcache.client.health import UNANSWERED, StoreHealth
from mmcache.client.names import NamedKey
from mmcache.entry import EntryHeader, decode_entry
from mmcache.errors import CorruptEntry
from mmcache.memory.pool import Block
from mmcache.store.base import Outcome, ReadResult

PART_BYTES = 8 << 20
"""A batch of at least twice as many bytes that is verified in full comes through the sidecar in two halves at once:
while one is verified, the other comes. (Over TCP two halves only get into each other's way.)"""


class Arrival(NamedTuple):
    """What became of one object: the store's word and, of what it delivered, the header or what is wrong with it."""

    result: ReadResult
    entry: EntryHeader | CorruptEntry | None


class Transfer:
    """A batched read that is under way, on an I/O thread: of these objects, into these blocks."""

    __slots__ = ("_hand_off", "_transfers", "attachment", "blocks", "deadline", "wanted")

    def __init__(
        self, transfers: Transfers, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], deadline: float
    ) -> None:
        self.attachment = attachment
        self.wanted = wanted
        self.blocks = blocks
        self.deadline = deadline
        self._transfers = transfers
        self._hand_off = [transfers.io.hand_off(self._read_and_verify, self._dispose)]

    def arrivals(self) -> list[Arrival]:
        """Wait for its end, once. Raises what `HandOff.result` raises; what it used is given back when it has ended."""
        return self._hand_off.pop().result(self.deadline)  # which refers to this: no cycle may keep a pool's memory

    def drop(self) -> None:
        """Wait for it no more; instead of `arrivals`."""
        self._hand_off.pop().drop()

    def _read_and_verify(self) -> list[Arrival]:
        names = [item.name for item in self.wanted]
        addresses = [block.address for block in self.blocks]
        sizes = [block.nbytes for block in self.blocks]
        results = self.attachment.store.read_into(names, addresses, sizes, deadline=self.deadline)
        return [
            Arrival(result, self._verified(item, block, result))
            for item, block, result in zip(self.wanted, self.blocks, results, strict=True)
        ]

    def _verified(self, item: NamedKey, block: Block, result: ReadResult) -> EntryHeader | CorruptEntry | None:
        if result.outcome is not Outcome.OK:
            return None
        view = self.attachment.pool.view(block)[: result.nbytes]
        try:
            return decode_entry(view, key=item.key, generation=item.generation, verify=self._transfers.verify)
        except CorruptEntry as error:
            return error

    def _dispose(self, arrivals: list[Arrival] | None, began: bool) -> None:
        for number, block in enumerate(self.blocks):
            settled = arrivals[number].result.settled if arrivals is not None else not began
            self._transfers.attacher.give_back(self.attachment, block, settled=settled)
        if arrivals is not None:  # late: now it shows on which of the names the others had to wait
            late = [
                (item.name, arrival.result.outcome in UNANSWERED)
                for item, arrival in zip(self.wanted, arrivals, strict=True)
            ]
            self._transfers.health.remember(name for name, unanswered in late if unanswered)
            self._transfers.health.forgive(name for name, unanswered in late if not unanswered)


class Transfers:
    """Reads objects into blocks. Blocks of what arrived are the caller's to end, those of a late part are not."""

    def __init__(
        self, *, io: IoThreads, attacher: Attacher, health: StoreHealth, verify: Literal["full", "prefix"]
    ) -> None:
        self.io = io
        self.attacher = attacher
        self.health = health
        self.verify: Literal["full", "prefix"] = verify

    def begin(
        self, attachment: Attachment, wanted: list[NamedKey], blocks: list[Block], deadline: float
    ) -> list[Transfer]:
        """Begin a read, in one or two parts, each to be waited for or dropped. Raises as `IoThreads.hand_off` does."""
        if not self._worth_dividing(attachment, blocks):
            return [Transfer(self, attachment, wanted, blocks, deadline)]
        half = len(wanted) // 2
        first = Transfer(self, attachment, wanted[:half], blocks[:half], deadline)
        try:
            return [first, Transfer(self, attachment, wanted[half:], blocks[half:], deadline)]
        except BaseException:
            first.drop()
            raise

    def _worth_dividing(self, attachment: Attachment, blocks: list[Block]) -> bool:
        if self.verify != "full" or attachment.store.kind != "sidecar" or len(blocks) < 2:
            return False
        return sum(block.nbytes for block in blocks) >= 2 * PART_BYTES
