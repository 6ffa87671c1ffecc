"""Any sequence of calls on a pool, against a model that knows who holds what and what each block must contain."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmcache.errors import PoolExhausted
from mmcache.memory.block import BlockState
from mmcache.memory.host import HostMemory
from mmcache.memory.pool import RegisteredPool

PAGE = 4096
PAGES = 8
NAMES = "abcd"


class PoolMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        memory = HostMemory(PAGES * PAGE)
        self.pool = RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping)
        self.filling: list = []  # with a filler's hold each
        self.holds: list = []  # blocks, one item for every hold that we must end
        self.exports: list = []  # (block, export)
        self.table: dict = {}  # name -> block, least recently used first
        self.quarantined: list = []
        self.contents: dict = {}  # live block -> the byte that fills it
        self.allocations = 0

    def held(self) -> Counter:
        return Counter(self.filling + self.holds + [block for block, _ in self.exports])

    def live(self) -> set:
        return set(self.held()) | set(self.table.values())

    def touch(self, block) -> None:
        """Recency is when something was let go of last."""
        for name, kept in list(self.table.items()):
            if kept is block and block not in self.held():
                self.table[name] = self.table.pop(name)

    @rule(sizes=st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=3))
    def allocate(self, sizes):
        try:
            blocks = self.pool.allocate_many(sizes, deadline=0)
        except PoolExhausted:
            self.give_up_to_model(0)
            return
        assert [block.nbytes for block in blocks] == sizes
        for block in blocks:
            self.allocations += 1
            self.contents[block] = self.allocations % 256
            self.pool.view(block)[:] = bytes([self.contents[block]]) * block.nbytes
        self.filling += blocks
        self.give_up_to_model(len(blocks))

    def give_up_to_model(self, allocated: int) -> None:
        """What was evicted was idle, and older than every idle entry that stayed."""
        held = self.held()
        idle = [(name, block) for name, block in self.table.items() if block not in held]
        gone = [name for name, block in idle if block.state is BlockState.FREED]
        assert gone == [name for name, _ in idle[: len(gone)]]
        for name in gone:
            del self.table[name]

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def keep(self, data, name):
        block = self.filling.pop(data.draw(st.integers(0, len(self.filling) - 1)))
        entry = self.pool.keep(name, block, name.upper())
        assert (entry.name, entry.value) == (name, name.upper())
        assert entry.block is self.table.setdefault(name, block)
        self.holds.append(entry.block)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), names=st.lists(st.sampled_from([*NAMES, None]), min_size=1, max_size=3))
    def keep_many(self, data, names):
        filled = []
        for name, block in zip(names, data.draw(st.permutations(self.filling)), strict=False):
            nbytes = block.nbytes
            if all(exported is not block for exported, _ in self.exports):
                nbytes = data.draw(st.integers(1, nbytes))
            filled.append((name, block, nbytes, name and name.upper()))
        for (name, block, _, value), (kept, export) in zip(filled, self.pool.keep_many(filled), strict=True):
            self.filling.remove(block)
            assert kept == value
            assert export.block is (block if name is None else self.table.setdefault(name, block))
            self.exports.append((export.block, [export]))

    @rule(name=st.sampled_from(NAMES))
    def find(self, name):
        [found] = self.pool.find([name])
        assert (found[1].block if found else None) is self.table.get(name)
        if found:
            value, export = found
            assert value == name.upper()
            self.exports.append((export.block, [export]))

    @rule(name=st.sampled_from(NAMES))
    def forget(self, name):
        assert self.pool.forget(name) is (self.table.pop(name, None) is not None)

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), verb=st.sampled_from(["release", "quarantine"]))
    def end_filling(self, data, verb):
        block = data.draw(st.sampled_from(self.filling))
        getattr(self.pool, verb)(block)
        self.filling.remove(block)
        if verb == "quarantine":
            self.quarantined.append(block)
            self.holds = [held for held in self.holds if held is not block]
            self.exports = [export for export in self.exports if export[0] is not block]

    @precondition(lambda self: self.live())
    @rule(data=st.data(), verb=st.sampled_from(["hold", "export"]))
    def hold(self, data, verb):
        block = data.draw(st.sampled_from(sorted(self.live(), key=lambda block: block.address)))
        if verb == "hold":
            self.pool.hold(block)
            self.holds.append(block)
        else:
            export = self.pool.export(block)
            self.exports.append((block, [export]))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data):
        block = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.unhold(block)
        self.touch(block)

    @precondition(lambda self: self.exports)
    @rule(data=st.data())
    def drop_export(self, data):
        block, export = self.exports.pop(data.draw(st.integers(0, len(self.exports) - 1)))
        export.clear()
        self.touch(block)

    @invariant()
    def every_block_is_what_the_model_says(self):
        live = self.live()
        for block, byte in list(self.contents.items()):
            if block in live:
                assert block.state in (BlockState.FILLING, BlockState.READY)
                assert bytes(self.pool.view(block)) == bytes([byte]) * block.nbytes
                assert self.pool.block_at(block.address) is block
            else:
                expected = BlockState.QUARANTINED if block in self.quarantined else BlockState.FREED
                assert block.state is expected
                del self.contents[block]
        for block, export in self.exports:
            assert export[0][block.offset] == self.contents[block]

    @invariant()
    def nothing_overlaps_and_bytes_are_conserved(self):
        blocks = sorted([*self.live(), *self.quarantined], key=lambda block: block.address)
        for one, next_one in pairwise(blocks):
            assert one.address + one.reserved <= next_one.address
        figures = self.pool.stats()
        assert figures["used"] == sum(block.reserved for block in self.live())
        assert figures["quarantined"] == sum(block.reserved for block in self.quarantined)
        assert figures["ready_entries"] == len(self.table)
        assert figures["ready_bytes"] == sum(block.reserved for block in self.table.values())
        assert figures["held_blocks"] == len(self.held())

    def teardown(self):
        for block in self.filling + self.holds:
            self.pool.unhold(block)
        self.exports.clear()
        self.pool.close()
        figures = self.pool.stats()
        assert (figures["used"], figures["held_blocks"]) == (0, 0)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, deadline=None)
