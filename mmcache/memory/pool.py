"""One registered region cut into blocks, each of which lives as long as anybody may touch it.

A block is *held* by callers (`hold`/`unhold`, counted) and by exported objects (until they are garbage collected), and
*kept* by the local table under the name of the entry in it. Held by nobody and kept: idle, the local cache, given up
least recently used first when room is needed. Held by nobody and not kept: freed. Quarantined: never used again.
"""

from __future__ import annotations

import ctypes
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmcache.errors import LifecycleError, MMCacheError, PoolExhausted
from mmcache.memory.block import Block, BlockState, BlockStateError, ReadyEntry
from mmcache.memory.deferring import DeferringLock
from mmcache.memory.export import Export, export_type
from mmcache.memory.extents import ExtentAllocator
from mmcache.memory.request import Request

__all__ = ["Block", "BlockState", "BlockStateError", "Export", "ReadyEntry", "RegisteredPool"]

MAX_WAITERS = 1024


class RegisteredPool:
    """Blocks of one region of memory, which a store can read into and write from. Thread-safe.

    Nobody allocates past a request that waits: waiters are served first in, first out, and while one waits all that
    becomes idle is given up for it, so a large request is not starved by small ones or by hits. Finalisers of exported
    objects may run anywhere, at any time (see `DeferringLock`).

    An exception that a signal's handler raises in the middle of a change leaves the pool `broken`: it gives out nothing
    more, and its user makes another.

    Raises: BlockStateError where a block is not in the state, or not of the pool, that a call needs.
    """

    def __init__(self, address: int, nbytes: int, *, owner: object = None, max_waiters: int = MAX_WAITERS) -> None:
        """A pool of the `nbytes` at `address`; `owner` is kept alive with the pool and with all that it exported."""
        self._extents = ExtentAllocator(nbytes)
        self._address = address
        self._owner = owner
        self._export_type = export_type(nbytes)
        self._memory = memoryview((ctypes.c_ubyte * nbytes).from_address(address)).cast("B")
        self._max_waiters = max_waiters
        self._closed = False
        self._lock: DeferringLock[Block] = DeferringLock(self)
        # The rest belongs to the lock. A live block (filling or ready) is held or idle, never neither.
        self._live: dict[int, Block] = {}
        self._ready: dict[str, ReadyEntry] = {}
        self._ready_bytes = 0
        self._idle: OrderedDict[Block, str] = OrderedDict()
        self._idle_bytes = 0
        self._quarantined: dict[int, int] = {}
        self._quarantined_bytes = 0
        self._largest_possible = self._extents.capacity
        self._waiters: deque[Request] = deque()
        self._evictions = 0

    @property
    def capacity(self) -> int:
        """Bytes that blocks can take up in all, quarantined ones included."""
        return self._extents.capacity

    @property
    def broken(self) -> bool:
        """Whether an interrupt struck in the middle of a change: it allocates nothing any more."""
        return self._lock.broken

    @property
    def quarantined(self) -> int:
        """Bytes that are never used again."""
        return self._quarantined_bytes

    @property
    def quarantined_extents(self) -> Mapping[int, int]:
        """The same in bytes by offset, as they are at any time. Does not keep the pool alive."""
        return self._quarantined

    # ---- allocation

    def allocate(self, nbytes: int, *, deadline: float) -> Block:
        """One block; see `allocate_many`."""
        return self.allocate_many((nbytes,), deadline=deadline)[0]

    def allocate_many(self, sizes: Sequence[int], *, deadline: float) -> list[Block]:
        """A filling block for each size in bytes, all or none, each with one hold: the filler's.

        Waits its turn until `deadline` (`time.monotonic()` seconds); one that has passed means to try and not to wait.

        Raises: PoolExhausted, at once with `fits` False if the pool could not hold this even with nothing else in it,
        with `fits` True at the deadline or when too many wait already; LifecycleError once closed; ValueError for a
        size that is not positive.
        """
        if not sizes:
            return []
        request = Request(sizes, self._extents.reserved_each(sizes))
        with self._lock, self._lock.mutex:
            self._check_possible(request)
            # Entries are not given up for a request that would have no room even then, unless it waits.
            if not self._waiters and request.total <= self._extents.available + self._idle_bytes:
                blocks = self._carve(request)
                if blocks:
                    return blocks
            patience = deadline - time.monotonic()
            if patience <= 0 or len(self._waiters) >= self._max_waiters:
                raise self._no_room(request)
            self._waiters.append(request)
            self._serve()
        return self._wait(request, patience)

    def _wait(self, request: Request, patience: float) -> list[Block]:
        try:
            request.wait(patience)
        except BaseException:  # an interrupt: nobody is there to own what was allocated, or would be
            with self._lock, self._lock.mutex:
                self._leave(request)
                for block in request.blocks:
                    self._unhold(block)
                self._serve()
            raise
        with self._lock, self._lock.mutex:
            if not request.settled:
                self._leave(request)
                self._serve()
                raise self._no_room(request)
            if request.refused:
                self._check_possible(request)
        return request.blocks

    def _leave(self, request: Request) -> None:
        if not request.settled:
            self._waiters.remove(request)

    def _serve(self) -> None:
        """Serve waiters in turn, as far as there is room. Called after anything that may have made room."""
        while self._waiters:
            request = self._waiters[0]
            blocks: list[Block] = []
            try:
                self._check_possible(request)
            except MMCacheError:
                refused = True
            else:
                refused = False
                blocks = self._carve(request)
                if not blocks:
                    return
            self._waiters.popleft()
            request.settle(blocks, refused=refused)

    def _carve(self, request: Request) -> list[Block]:
        """A block for each size, giving up idle entries as needed; none at all if that is not enough."""
        blocks: list[Block] = []
        offsets = self._extents.allocate_run(request.reserved) or self._carve_apart(request)
        for offset, nbytes, reserved in zip(offsets, request.sizes, request.reserved, strict=bool(offsets)):
            block = Block(self._address + offset, offset, nbytes, reserved)
            self._live[block.address] = block
            blocks.append(block)
        return blocks

    def _carve_apart(self, request: Request) -> list[int]:
        offsets: list[int] = []
        for nbytes in request.sizes:
            while (offset := self._extents.allocate(nbytes)) is None and self._idle:
                self._evictions += 1
                self._forget(next(iter(self._idle.values())))
            if offset is None:
                for allocated in offsets:
                    self._extents.free(allocated)
                return []
            offsets.append(offset)
        return offsets

    def _check_possible(self, request: Request) -> None:
        """Raise where waiting is pointless. (Whether all blocks fit around quarantined ones is not looked into.)

        Once it is it stays so: the pool does not open again, and quarantined bytes do not come back.
        """
        if self._closed or self._lock.broken:
            raise LifecycleError("the pool is closed" if self._closed else "an interrupt struck the pool at work")
        room = self._extents.capacity - self._quarantined_bytes
        if request.total <= room and request.largest <= self._largest_possible:
            return
        raise PoolExhausted(
            f"{request.total} bytes in {len(request.sizes)} blocks can never fit: of its {self._extents.capacity} bytes"
            f" the pool has {room} to give, at most {self._largest_possible} in one piece",
            fits=False,
        )

    def _no_room(self, request: Request) -> PoolExhausted:
        return PoolExhausted(
            f"no room for {request.total} bytes in {len(request.sizes)} blocks: {self._extents.available} of"
            f" {self._extents.capacity} bytes are free, {len(self._waiters)} requests wait",
            fits=True,
        )

    # ---- filling

    def view(self, block: Block) -> memoryview:
        """The block's bytes, writable until it is ready, read-only after. It does not hold the block: its user does."""
        self._require_live(block)
        view = self._memory[block.offset : block.offset + block.nbytes]
        return view if block.state is BlockState.FILLING else view.toreadonly()

    def _trim(self, block: Block, nbytes: int) -> None:
        """Shorten a filling block that nothing was exported from, and give the tail back."""
        if block.exports:
            raise BlockStateError(f"cannot trim what is exported: {block}")
        if not 0 < nbytes <= block.nbytes:
            raise ValueError(f"cannot trim {block} to {nbytes} bytes")
        self._extents.trim(block.offset, nbytes)
        block.nbytes = nbytes
        block.reserved = self._extents.reserved(nbytes)

    def release(self, block: Block) -> None:
        """End the filler's hold without making the block ready. It is freed once no export holds it either."""
        with self._lock, self._lock.mutex:
            self._require_filler(block)
            self._unhold(block)
            self._serve()

    def quarantine(self, block: Block) -> None:
        """Never use these bytes again: a transfer may still touch them. Once is enough; holds do not matter any more.

        If the local table kept the block, it forgets it.
        """
        with self._lock, self._lock.mutex:
            if block.state is BlockState.QUARANTINED:
                return
            self._require_live(block)
            if block.name is not None:
                self._unlist(block.name)
            del self._live[block.address]
            block.state = BlockState.QUARANTINED
            self._quarantined[block.offset] = block.reserved
            self._quarantined_bytes += block.reserved
            self._largest_possible = self._find_largest_possible()
            self._serve()

    def _find_largest_possible(self) -> int:
        """Bytes of the longest run without quarantined ones."""
        largest = start = 0
        for offset, nbytes in [*sorted(self._quarantined.items()), (self._extents.capacity, 0)]:
            largest = max(largest, offset - start)
            start = offset + nbytes
        return largest

    # ---- the local table

    def keep(self, name: str, block: Block, value: Any) -> ReadyEntry:
        """Make a filled block ready and keep it under `name` with `value`; the filler's hold becomes the caller's.

        If the name is there already, the block is released and the entry that is there is returned, held for the caller
        all the same. Once the pool is closed nothing is kept: the entry lives as long as it is held.
        """
        with self._lock, self._lock.mutex:
            self._require_filler(block)
            entry = self._keep(ReadyEntry(name, block, value))
            if entry.block is not block:
                self._hold(entry.block)
                self._unhold(block)
                self._serve()
            return entry

    def keep_many(self, filled: Iterable[tuple[str | None, Block, int, Any]]) -> list[tuple[Any, Export]]:
        """As `keep`, for (name, block, bytes that were filled, value) each; exports hold what they return.

        Each block is trimmed to what was filled of it. What has no name is not kept.
        """
        with self._lock, self._lock.mutex:
            kept: list[tuple[Any, Export]] = []
            for name, block, nbytes, value in filled:
                self._require_filler(block)
                if nbytes != block.nbytes:
                    self._trim(block, nbytes)
                entry = self._keep(ReadyEntry(name, block, value))
                kept.append((entry.value, self._export(entry.block)))
                self._unhold(block)
            if self._waiters:
                self._serve()
            return kept

    def _keep(self, entry: ReadyEntry) -> ReadyEntry:
        """The entry that has this name from now on: this one, unless there is one already."""
        name, block, _ = entry
        if name is not None and (existing := self._ready.get(name)) is not None:
            return existing
        block.state = BlockState.READY
        if name is not None and not self._closed:
            block.name = name
            self._ready[name] = entry
            self._ready_bytes += block.reserved
        return entry

    def find(self, names: Iterable[str]) -> list[tuple[Any, Export] | None]:
        """What is kept with each of these names, and an export that holds its block; None where nothing is kept.

        What is held is the last to be given up.
        """
        with self._lock, self._lock.mutex:
            found: list[tuple[Any, Export] | None] = []
            for name in names:
                entry = self._ready.get(name) if not self._lock.broken else None
                found.append(entry and (entry.value, self._export(entry.block)))
            return found

    def forget(self, name: str) -> bool:
        """Stop keeping `name`; its block is freed once nobody holds it. False if it was not kept."""
        with self._lock, self._lock.mutex:
            if name not in self._ready:
                return False
            self._forget(name)  # serves nobody: while one waits, nothing is idle
            return True

    def _forget(self, name: str) -> None:
        block = self._ready[name].block
        idle = block in self._idle
        self._unlist(name)
        if idle:
            self._free(block)

    def _unlist(self, name: str) -> None:
        """Take an entry out of the local table. Its block is not idle any more: the caller frees it if it was."""
        block = self._ready.pop(name).block
        block.name = None
        self._ready_bytes -= block.reserved
        if block in self._idle:
            self._wake(block)

    # ---- holding

    def hold(self, block: Block) -> None:
        """Hold a live block once more; `unhold` ends it."""
        with self._lock, self._lock.mutex:
            self._require_live(block)
            self._hold(block)

    def unhold(self, block: Block) -> None:
        """End one hold. The last one frees the block unless the local table keeps it."""
        with self._lock, self._lock.mutex:
            if block.state is BlockState.QUARANTINED:
                return
            self._require_live(block)
            self._unhold(block)
            if self._waiters:
                self._serve()

    def export(self, block: Block) -> Export:
        """Hold a live block by an object."""
        with self._lock, self._lock.mutex:
            self._require_live(block)
            return self._export(block)

    def _export(self, block: Block) -> Export:
        export = self._export_type.from_address(self._address)
        export.pool = self
        if not (block.holds or block.exports):
            del self._idle[block]
            self._idle_bytes -= block.reserved
        block.exports += 1
        export.block = block
        return export

    def block_at(self, address: int) -> Block | None:
        """The live block that starts at this address of the process, if one does."""
        return self._live.get(address)

    def _hold(self, block: Block) -> None:
        if not (block.holds or block.exports):
            self._wake(block)
        block.holds += 1

    def _unhold(self, block: Block) -> None:
        if not block.holds:
            raise BlockStateError(f"nobody holds {block}")
        block.holds -= 1
        if not (block.holds or block.exports):
            self._rest(block)

    def _wake(self, block: Block) -> None:
        """An idle block is held again, or given up."""
        del self._idle[block]
        self._idle_bytes -= block.reserved

    def _rest(self, block: Block) -> None:
        """The last hold of a block has ended."""
        if block.name is None:
            self._free(block)
        else:
            self._idle[block] = block.name
            self._idle_bytes += block.reserved

    def _free(self, block: Block) -> None:
        self._require_live(block)
        del self._live[block.address]
        block.state = BlockState.FREED
        self._extents.free(block.offset)

    def _require_live(self, block: Block) -> None:
        if self._live.get(block.address) is not block:
            raise BlockStateError(f"not a live block of this pool: {block}")

    def _require_filler(self, block: Block) -> None:
        self._require_live(block)
        if block.state is not BlockState.FILLING or not block.holds:
            raise BlockStateError(f"not a block that its filler holds: {block}")

    def settle(self, deferred: deque[Block]) -> None:
        """For the lock: end the holds of exports that are gone."""
        while deferred:
            block = deferred.popleft()
            block.exports -= 1
            if not (block.holds or block.exports) and block.state is not BlockState.QUARANTINED:
                self._rest(block)
        if self._waiters:
            self._serve()

    # ---- the whole

    def close(self) -> None:
        """Forget every entry and send waiters away (LifecycleError); idempotent.

        What is held stays as it is until its holders are done.
        """
        with self._lock, self._lock.mutex:
            self._closed = True
            if self._lock.broken:
                self._ready.clear()
            for name in list(self._ready):
                self._forget(name)
            self._serve()

    def stats(self) -> dict[str, int]:
        """Figures of this moment; bytes count what blocks take up, alignment included."""
        with self._lock, self._lock.mutex:
            return {
                "capacity": self._extents.capacity,
                "used": self._extents.capacity - self._extents.available - self._quarantined_bytes,
                "quarantined": self._quarantined_bytes,
                "ready_entries": len(self._ready),
                "ready_bytes": self._ready_bytes,
                "held_blocks": len(self._live) - len(self._idle),
                "waiters": len(self._waiters),
                "evictions": self._evictions,
            }
