from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mmcache.memory.extents import ExtentAllocator

UNIT = 16
UNITS = 40


def test_capacity_is_rounded_down_to_whole_extents():
    extents = ExtentAllocator(4 * 4096 + 4095)
    assert extents.capacity == extents.available == 4 * 4096
    assert extents.allocate(4 * 4096) == 0


@pytest.mark.parametrize("capacity", [0, -1, 4095])
def test_a_range_that_holds_no_extent_is_refused(capacity):
    with pytest.raises(ValueError):
        ExtentAllocator(capacity)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_sizes_that_are_not_positive_are_refused(nbytes):
    extents = ExtentAllocator(4096)
    with pytest.raises(ValueError):
        extents.allocate(nbytes)
    offset = extents.allocate(1)
    with pytest.raises(ValueError):
        extents.trim(offset, nbytes)
    assert extents.available == 0


def test_freeing_twice_is_refused_and_changes_nothing():
    extents = ExtentAllocator(4 * 4096)
    offset = extents.allocate(4096)
    extents.free(offset)
    with pytest.raises(ValueError, match="no extent is allocated"):
        extents.free(offset)
    assert extents.available == 4 * 4096
    assert extents.allocate(4 * 4096) == 0


def test_an_extent_does_not_grow_by_trimming():
    extents = ExtentAllocator(4 * 4096)
    offset = extents.allocate(4096)
    with pytest.raises(ValueError, match="cannot trim"):
        extents.trim(offset, 4097)
    extents.free(offset)
    assert extents.allocate(4 * 4096) == 0


class AgainstBytes(RuleBasedStateMachine):
    """The allocator against a list that says of every unit who has it."""

    offsets = Bundle("offsets")

    def __init__(self):
        super().__init__()
        self.extents = ExtentAllocator(UNITS * UNIT, alignment=UNIT)
        self.units: list[int | None] = [None] * UNITS

    def runs(self) -> list[tuple[int, int]]:
        """(length, first unit) of every maximal free run."""
        runs, start = [], None
        for number, owner in enumerate([*self.units, -1]):
            if owner is None and start is None:
                start = number
            elif owner is not None and start is not None:
                runs.append((number - start, start))
                start = None
        return runs

    def best(self, units: int) -> list[int]:
        """Offsets of the smallest free runs of at least so many units."""
        fitting = [(length, first) for length, first in self.runs() if length >= units]
        return [first * UNIT for length, first in fitting if length == min(fitting)[0]]

    @rule(target=offsets, nbytes=st.integers(1, UNIT * UNITS // 2))
    def allocate(self, nbytes):
        units = -(-nbytes // UNIT)
        best = self.best(units)
        offset = self.extents.allocate(nbytes)
        if not best:
            assert offset is None
            return multiple()
        assert offset in best
        first = offset // UNIT
        self.units[first : first + units] = [offset] * units
        return offset

    @rule(target=offsets, sizes=st.lists(st.integers(1, UNIT * UNITS // 4), min_size=1, max_size=4))
    def allocate_run(self, sizes):
        units = [-(-nbytes // UNIT) for nbytes in sizes]
        best = self.best(sum(units))
        run = self.extents.allocate_run(sizes)
        if not best:
            assert run is None
            return multiple()
        assert run[0] in best
        first = run[0] // UNIT
        for offset, length in zip(run, units, strict=True):
            assert offset == first * UNIT
            self.units[first : first + length] = [offset] * length
            first += length
        return multiple(*run)

    @rule(offset=consumes(offsets))
    def free(self, offset):
        self.extents.free(offset)
        self.units = [None if owner == offset else owner for owner in self.units]

    @rule(offset=offsets, data=st.data())
    def trim(self, offset, data):
        units = self.units.count(offset)
        nbytes = data.draw(st.integers(1, units * UNIT))
        self.extents.trim(offset, nbytes)
        first, kept = offset // UNIT, -(-nbytes // UNIT)
        self.units[first + kept : first + units] = [None] * (units - kept)

    @invariant()
    def conserves_and_coalesces(self):
        runs = self.runs()
        assert self.extents.available == sum(length for length, _ in runs) * UNIT
        assert self.extents._free_from == {first * UNIT: length * UNIT for length, first in runs}
        by_size = self.extents._by_size
        assert {(size, start) for size, starts in by_size.items() for start in starts} == {
            (length * UNIT, first * UNIT) for length, first in runs
        }
        assert self.extents._sizes == sorted(by_size)


TestAgainstBytes = AgainstBytes.TestCase
TestAgainstBytes.settings = settings(max_examples=60, deadline=None)


def test_everything_comes_back_as_one_extent_whatever_the_order():
    extents = ExtentAllocator(1000 * 4096)
    offsets = [extents.allocate(4096) for _ in range(1000)]
    assert extents.allocate(1) is None
    random.Random(7).shuffle(offsets)
    for offset in offsets:
        extents.free(offset)
    assert extents.available == 1000 * 4096
    assert extents.allocate(1000 * 4096) == 0
