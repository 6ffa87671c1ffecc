"""The life of a block: who holds it, when it is freed, and what its state forbids."""

from __future__ import annotations

import gc
import weakref

import pytest

from mmcache.errors import PoolExhausted
from mmcache.memory.pool import BlockState, BlockStateError

PAGE = 4096


def keep(pool, name, nbytes=PAGE):
    """An entry that nobody holds."""
    block = pool.allocate(nbytes, deadline=0)
    pool.unhold(pool.keep(name, block, None).block)
    return block


def test_a_released_block_is_freed_and_its_room_used_again(make_pool):
    pool = make_pool(1)
    block = pool.allocate(100, deadline=0)
    assert (block.state, block.nbytes, pool.stats()["used"]) == (BlockState.FILLING, 100, PAGE)
    pool.release(block)
    assert (block.state, pool.stats()["used"]) == (BlockState.FREED, 0)
    assert pool.allocate(PAGE, deadline=0).address == block.address


def test_a_ready_entry_is_found_with_its_value_and_stays_when_unheld(make_pool):
    pool = make_pool(2)
    block = pool.allocate(PAGE, deadline=0)
    value = {"rows": 3}
    entry = pool.keep("name", block, value)
    pool.unhold(block)
    assert block.state is BlockState.READY
    assert entry.value is value
    [found, nothing] = pool.find(["name", "other"])
    assert nothing is None
    assert found[0] is value
    assert found[1].block is block
    assert pool.stats()["held_blocks"] == 1
    del found
    assert pool.stats()["held_blocks"] == 0


def test_keeping_a_name_twice_gives_the_first_entry_and_releases_the_second_block(make_pool):
    pool = make_pool(4)
    first = keep(pool, "name")
    second = pool.allocate(PAGE, deadline=0)
    entry = pool.keep("name", second, None)
    assert entry.block is first
    assert second.state is BlockState.FREED
    pool.forget("name")
    assert first.state is BlockState.READY  # held for whoever kept it a second time
    pool.unhold(first)
    assert first.state is BlockState.FREED


def test_a_forgotten_entry_is_not_found_and_goes_with_its_last_hold(make_pool):
    pool = make_pool(1)
    block = keep(pool, "name")
    found = pool.find(["name"])
    pool.hold(block)
    assert pool.forget("name") is True
    assert pool.forget("name") is False
    assert pool.find(["name"]) == [None]
    pool.unhold(block)
    assert block.state is BlockState.READY
    del found
    assert block.state is BlockState.FREED


def test_an_idle_entry_is_freed_when_forgotten(make_pool):
    pool = make_pool(1)
    block = keep(pool, "name")
    pool.forget("name")
    assert block.state is BlockState.FREED
    assert pool.stats()["used"] == 0


def test_the_least_recently_used_idle_entry_is_given_up_first(make_pool):
    pool = make_pool(4)
    for name in "abcd":
        keep(pool, name)
    pool.find(["a"])
    held = pool.find(["b"])
    pool.allocate_many([PAGE, PAGE], deadline=0)
    assert held
    assert [found is not None for found in pool.find("abcd")] == [True, True, False, False]
    assert pool.stats()["evictions"] == 2


def test_held_entries_are_not_given_up(make_pool):
    pool = make_pool(2)
    keep(pool, "a")
    pool.hold(keep(pool, "b"))
    held = pool.find(["a"])
    with pytest.raises(PoolExhausted) as caught:
        pool.allocate(1, deadline=0)
    assert caught.value.fits
    assert held


def test_no_entry_is_given_up_for_a_try_that_fails_all_the_same(make_pool):
    pool = make_pool(3)
    keep(pool, "idle")
    pool.allocate(PAGE, deadline=0)
    with pytest.raises(PoolExhausted):
        pool.allocate(3 * PAGE, deadline=0)
    assert pool.find(["idle"]) != [None]


def test_many_blocks_are_allocated_all_or_none(make_pool):
    pool = make_pool(4)
    pool.allocate(PAGE, deadline=0)
    with pytest.raises(PoolExhausted):
        pool.allocate_many([PAGE, PAGE, PAGE, PAGE], deadline=0)
    assert pool.stats()["used"] == PAGE
    blocks = pool.allocate_many([PAGE, 2 * PAGE], deadline=0)
    assert len({block.address for block in blocks}) == 2
    assert pool.allocate_many([], deadline=0) == []


@pytest.mark.parametrize("sizes", [[0], [1, -5]])
def test_sizes_that_are_not_positive_are_refused(make_pool, sizes):
    pool = make_pool(4)
    with pytest.raises(ValueError):
        pool.allocate_many(sizes, deadline=0)
    assert pool.stats()["used"] == 0


def test_a_block_that_is_kept_gives_back_what_was_not_filled(make_pool):
    pool = make_pool(4)
    block = pool.allocate(4 * PAGE, deadline=0)
    for nbytes in (0, 4 * PAGE + 1):
        with pytest.raises(ValueError):
            pool.keep_many([("name", block, nbytes, None)])
    kept = pool.keep_many([("name", block, PAGE + 1, None)])
    assert (block.nbytes, len(pool.view(block)), pool.stats()["used"]) == (PAGE + 1, PAGE + 1, 2 * PAGE)
    assert pool.allocate(2 * PAGE, deadline=0).address == block.address + 2 * PAGE
    del kept


def test_what_is_exported_is_not_shortened(make_pool):
    pool = make_pool(2)
    block = pool.allocate(2 * PAGE, deadline=0)
    export = pool.export(block)
    with pytest.raises(BlockStateError, match="exported"):
        pool.keep_many([("name", block, PAGE, None)])
    del export
    pool.keep_many([("name", block, PAGE, None)])
    assert block.nbytes == PAGE


def test_the_view_is_the_block_and_writable_only_while_filling(make_pool):
    pool = make_pool(2)
    first, second = pool.allocate_many([PAGE, 10], deadline=0)
    pool.view(first)[:] = b"a" * PAGE
    pool.view(second)[:] = b"b" * 10
    pool.keep("name", first, None)
    assert bytes(pool.view(first)) == b"a" * PAGE
    assert bytes(pool.view(second)) == b"b" * 10
    with pytest.raises(TypeError):
        pool.view(first)[0] = 0


def test_an_export_is_the_memory_itself_and_holds_the_block(make_pool):
    pool = make_pool(2)
    _, block = pool.allocate_many([PAGE, PAGE], deadline=0)
    pool.view(block)[100:110] = b"0123456789"
    export = pool.export(block)
    start = block.offset + 102
    assert bytes(export[start : start + 4]) == b"2345"
    export[start] = ord("x")
    assert bytes(pool.view(block)[100:104]) == b"01x3"
    pool.release(block)
    assert block.state is BlockState.FILLING
    again = memoryview(export)[1:]
    del export
    assert block.state is BlockState.FILLING
    del again
    assert block.state is BlockState.FREED


def test_many_blocks_are_kept_at_what_was_filled_of_them(make_pool):
    pool = make_pool(6)
    first = keep(pool, "first")
    blocks = pool.allocate_many([PAGE, 2 * PAGE, PAGE, PAGE], deadline=0)
    names = ["first", "second", "third", None]
    filled = [(name, block, 10, index) for index, (name, block) in enumerate(zip(names, blocks, strict=True))]
    kept = pool.keep_many(filled)
    assert [value for value, _ in kept] == [None, 1, 2, 3], "the first name was there already"
    assert [export.block for _, export in kept] == [first, *blocks[1:]]
    assert blocks[0].state is BlockState.FREED
    assert (blocks[1].nbytes, blocks[1].reserved) == (10, PAGE)
    assert pool.stats()["used"] == 4 * PAGE
    assert pool.stats()["held_blocks"] == 4
    assert pool.stats()["ready_entries"] == 3
    with pytest.raises(BlockStateError):
        pool.keep_many([("again", blocks[1], 10, None)])
    kept.clear()
    assert pool.stats()["held_blocks"] == 0
    assert blocks[3].state is BlockState.FREED, "it has no name"
    assert [found is not None for found in pool.find(["first", "second", "third"])] == [True] * 3


def test_memory_handed_out_to_be_filled_can_be_found_by_its_address(make_pool):
    pool = make_pool(4)
    block = pool.allocate(PAGE, deadline=0)
    tensor_memory = pool.export(block)
    pool.unhold(block)
    assert pool.block_at(block.address) is block
    assert pool.block_at(block.address + 1) is None
    pool.hold(block)
    assert pool.keep("name", block, None).block is block
    pool.unhold(block)
    pool.forget("name")
    del tensor_memory
    assert pool.block_at(block.address) is None


def test_a_quarantined_block_is_never_used_again(make_pool):
    pool = make_pool(3)
    blocks = pool.allocate_many([PAGE, PAGE, PAGE], deadline=0)
    export = pool.export(blocks[1])
    pool.quarantine(blocks[1])
    pool.quarantine(blocks[1])
    assert pool.stats()["quarantined"] == PAGE
    assert pool.block_at(blocks[1].address) is None
    pool.unhold(blocks[1])
    pool.unhold(blocks[1])  # holds do not matter any more
    del export
    pool.release(blocks[0])
    pool.release(blocks[2])
    assert blocks[1].state is BlockState.QUARANTINED
    addresses = {pool.allocate(PAGE, deadline=0).address for _ in range(2)}
    assert addresses == {blocks[0].address, blocks[2].address}
    assert pool.stats()["used"] == 2 * PAGE


def test_a_quarantined_block_stays_so_when_the_last_that_held_it_was_an_export(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    export = pool.export(block)
    pool.release(block)
    pool.quarantine(block)
    del export
    assert block.state is BlockState.QUARANTINED
    assert (pool.stats()["used"], pool.stats()["quarantined"]) == (0, PAGE)


@pytest.mark.parametrize("held", [True, False])
def test_a_quarantined_entry_is_forgotten(make_pool, held):
    pool = make_pool(2)
    block = keep(pool, "name")
    if held:
        pool.hold(block)
    pool.quarantine(block)
    assert pool.find(["name"]) == [None]
    figures = pool.stats()
    assert (figures["ready_entries"], figures["ready_bytes"], figures["held_blocks"]) == (0, 0, 0)
    assert pool.allocate(PAGE, deadline=0).address != block.address


@pytest.mark.parametrize("what", ["release", "unhold", "hold", "quarantine", "view", "export"])
def test_a_freed_block_is_refused_everywhere(make_pool, what):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    pool.release(block)
    with pytest.raises(BlockStateError):
        getattr(pool, what)(block)
    reused = pool.allocate(PAGE, deadline=0)
    with pytest.raises(BlockStateError):
        getattr(pool, what)(block)
    assert (reused.state, reused.holds) == (BlockState.FILLING, 1)


def test_calls_that_the_state_forbids_are_refused(make_pool):
    pool, other = make_pool(4), make_pool(4)
    block = pool.allocate(PAGE, deadline=0)
    pool.keep("name", block, None)
    for call in (
        lambda: other.unhold(block),
        lambda: other.quarantine(block),
        lambda: pool.release(block),
        lambda: pool.keep("again", block, None),
    ):
        with pytest.raises(BlockStateError):
            call()
    pool.unhold(block)
    with pytest.raises(BlockStateError, match="nobody holds"):
        pool.unhold(block)
    assert pool.find(["name"]) != [None]


def test_the_hold_of_an_export_cannot_be_ended_by_name(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    export = pool.export(block)
    pool.unhold(block)
    with pytest.raises(BlockStateError, match="nobody holds"):
        pool.unhold(block)
    for call in (lambda: pool.release(block), lambda: pool.keep("name", block, None)):
        with pytest.raises(BlockStateError, match="its filler holds"):
            call()
    assert block.state is BlockState.FILLING
    del export
    assert block.state is BlockState.FREED


def test_a_closed_pool_keeps_nothing_and_frees_nothing_that_is_held(make_pool):
    pool = make_pool(4)
    idle, filling = keep(pool, "idle"), pool.allocate(PAGE, deadline=0)
    held = pool.find(["idle"])
    keep(pool, "other")
    pool.close()
    pool.close()
    assert pool.find(["idle", "other"]) == [None, None]
    assert idle.state is BlockState.READY
    pool.unhold(pool.keep("late", filling, None).block)
    assert filling.state is BlockState.FREED
    del held
    assert idle.state is BlockState.FREED


def test_pool_and_memory_last_as_long_as_what_was_exported_and_no_longer(make_pool):
    pool = make_pool(1)
    alive = weakref.ref(pool)
    export = pool.export(pool.allocate(PAGE, deadline=0))
    gc.disable()  # no cycle may be needed to be found
    try:
        del pool
        export[:PAGE] = b"x" * PAGE
        assert alive() is not None
        del export
        assert alive() is None
    finally:
        gc.enable()
