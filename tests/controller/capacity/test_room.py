"""Watermarks hold whatever comes and goes, nothing is chosen for no reason, and what must stay is never chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmcache.capacity_rules import age_of, quota_of
from mmcache.control.messages import Commitment
from mmcache.controller.capacity import room as room_module
from mmcache.controller.capacity.evictions import LEASE_MARGIN_S, Fate
from mmcache.controller.capacity.room import LEAST_PASS_S, MEASURE_LASTS_S, MOST_LOST, Room
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.directory import Directory
from mmcache.controller.removals import Removals
from mmcache.key import Scope
from mmcache.store.allocation import allocated
from mmcache.store.base import Outcome

CAPACITY = 1 << 20
NBYTES = 1 << 14
"""Of which 64 fit: 57 are below the high watermark of 0.9, and 54 below the low one of 0.85."""
LEASE_S = 2.0
SCOPES = {
    scope.digest: scope
    for scope in (
        Scope(tenant, "siglip", "v", None, modality) for tenant in ("a", "b") for modality in ("image", "video")
    )
}
SCOPE = Scope("a", "siglip", "v", None, "image")


class Rig:
    """A room, its directory, and a store that is a dict."""

    def __init__(self, *, quotas: Iterable[str] = (), ages: Iterable[str] = (), most: int = 10_000) -> None:
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        removals = Removals(lineage="l", lease_ms=1, most=1, counts=self.counts)
        self.directory = Directory(max_entries=most, removals=removals)
        self.store: dict[bytes, int] = {}
        self.besides = 0
        rules = CapacityRules(policy="lru", quotas=tuple(map(quota_of, quotas)), ages=tuple(map(age_of, ages)))
        self.room = Room(rules, self.directory, SCOPES, lease_ms=round(LEASE_S * 1000), counts=self.counts)

    def put(self, *numbers: int, nbytes: int = NBYTES, scope: Scope = SCOPE, created: float | None = None) -> None:
        for number in numbers:
            name = self.name(number, scope)
            entry = Commitment(str(number), 0, 0, nbytes, 1.0, b"")
            _, new = self.directory.enter(name, entry, "p", self.now if created is None else created)
            if new:
                self.store[name] = nbytes

    @staticmethod
    def name(number: int, scope: Scope = SCOPE) -> bytes:
        return scope.digest + number.to_bytes(32, "big")

    def measure(self, capacity: int = CAPACITY) -> bool:
        return self.room.measured(capacity, sum(self.store.values()) + self.besides, self.now)

    def tick(self, seconds: float = 0.0) -> None:
        """Let time pass, and choose all that is to be chosen by then."""
        self.now += seconds
        self.room.tick(self.now)
        for _ in range(10_000):
            due = self.room.next_deadline(self.now)
            if due is None or due > self.now:
                return
            self.room.tick(self.now)
        raise AssertionError("a tick is always due")

    def take(self) -> list[bytes]:
        taken = [name for name, _ in self.room.evictions.take(10_000, self.now)]
        self.settle()
        return taken

    def done(self, outcomes: list[Outcome]) -> None:
        self.room.evictions.done(outcomes, self.now)
        self.settle()

    def remove(self) -> list[int]:
        """Have all that is chosen removed; returns the numbers."""
        taken = self.take()
        for name in taken:
            del self.store[name]
        self.done([Outcome.OK] * len(taken))
        return [int.from_bytes(name[32:], "big") for name in taken]

    def revision(self, name: bytes) -> int:
        entry = self.directory.entry(name)
        assert entry is not None
        return entry.hit.revision

    def settle(self) -> None:
        """As `Entries` does."""
        for news in self.room.evictions.take_news():
            self.room.settle(*news)


class Against(RuleBasedStateMachine):
    """Names are numbers. The store may refuse, lose and evict; readers read; some entries are pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(quotas=["tenant=a 40%"])
        self.room = self.rig.room
        self.pinned: set[bytes] = set()
        self.room.is_pinned = self.pinned.__contains__
        self.out: list[bytes] = []
        self.number = 50
        self.rig.put(*range(50), created=0.0)

    @rule(
        sizes=st.lists(st.sampled_from([1, 5000, NBYTES, 3 * NBYTES + 1]), min_size=1, max_size=12),
        tenant=st.sampled_from(["a", "b"]),
    )
    def put(self, sizes: list[int], tenant: str) -> None:
        for nbytes in sizes:
            self.number += 1
            if sum(map(allocated, self.rig.store.values())) + allocated(nbytes) <= CAPACITY:
                self.rig.put(self.number, nbytes=nbytes, scope=Scope(tenant, "siglip", "v", None, "image"))

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        if names := list(self.rig.directory.names()):
            self.room.accessed(data.draw(st.sampled_from(names)), 3)

    @rule(data=st.data(), pinned=st.booleans())
    def pin(self, data: st.DataObject, pinned: bool) -> None:
        names = [name for name in self.rig.directory.names() if name not in self.out and name not in self.pinned]
        if pinned and names and len(self.pinned) < 4:
            name = data.draw(st.sampled_from(names))
            self.pinned.add(name)
            self.room.pin(name, True)
        elif self.pinned:
            self.room.pin(self.pinned.pop(), False)

    @rule(data=st.data())
    def want(self, data: st.DataObject) -> None:
        if names := list(self.rig.directory.names()):
            name = data.draw(st.sampled_from(names))
            self.room.keep(name)
            assert self.room.evictions.leaves(name) == (name in self.out or self.is_unsure(name))

    def is_unsure(self, name: bytes) -> bool:
        return self.room.evictions.fate(name, 0, self.rig.now) is Fate.UNSURE

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """The store has it no more, and a reader says so."""
        if names := list(self.rig.directory.names()):
            name = data.draw(st.sampled_from(names))
            entry = self.rig.directory.entry(name)
            assert entry is not None
            self.rig.store.pop(name, None)
            self.rig.directory.drop(name, entry.hit.revision)
            self.pinned.discard(name)

    @rule()
    def take(self) -> None:
        self.out = self.rig.take()

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        some = st.sampled_from([Outcome.OK] * 4 + [Outcome.LEASED, Outcome.UNAVAILABLE])
        outcomes = data.draw(st.lists(some, min_size=len(self.out), max_size=len(self.out)))
        for name, outcome in zip(self.out, outcomes, strict=True):
            if outcome is Outcome.OK:
                self.rig.store.pop(name, None)
        self.out = []
        self.rig.done(outcomes)

    @rule(seconds=st.sampled_from([0.1, 1.0, LEASE_S, LEASE_S + LEASE_MARGIN_S, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.rig.now += seconds

    @rule(besides=st.sampled_from([0, 0, CAPACITY // 10]))
    def measure_and_tick(self, besides: int) -> None:
        self.rig.besides = besides
        self.rig.measure()
        before = self.room.evictions.chosen
        self.rig.tick()
        evictions, low, high = self.room.evictions, 0.85 * CAPACITY, 0.9 * CAPACITY
        left = self.room.used - evictions.nbytes
        if left > high:
            self.nothing_else_may_go()
        if evictions.chosen > before:
            assert left + max(map(allocated, self.rig.store.values())) > low

    def nothing_else_may_go(self) -> None:
        resting = {name for _, name in self.room.evictions._resting}
        for name in self.rig.directory.names():
            assert name in self.pinned or name in resting or self.room.evictions.leaves(name)

    @invariant()
    def sums_are_right(self) -> None:
        entries = {name: self.rig.directory.entry(name) for name in self.rig.directory.names()}
        sizes = {name: allocated(entry.hit.nbytes) for name, entry in entries.items() if entry is not None}
        shares, evictions = self.room._shares, self.room.evictions
        assert shares.nbytes == sum(sizes.values())
        leaving = [nbytes for name, nbytes in sizes.items() if evictions.leaves(name)]
        assert evictions.nbytes == sum(leaving) == sum(group.leaving for group in shares._groups.values())
        assert self.room.sizes()["bytes_removing"] == sum(leaving)
        assert not any(evictions.keep(name) for name in self.pinned), "what is pinned was chosen"


Against.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestAgainstStore = Against.TestCase


def full(number: int = 60, **rules: Iterable[str]) -> Rig:
    """So many entries that are not leased any more."""
    rig = Rig(**rules)
    rig.put(*range(number))
    rig.now += LEASE_S
    return rig


def test_above_the_high_watermark_entries_go_until_there_is_no_more_than_the_low_one() -> None:
    rig = full(57)
    rig.measure()
    rig.tick()
    assert len(rig.room.evictions) == 0
    rig.put(57, created=0.0)
    rig.tick()
    assert rig.remove() == [0, 1, 2, 3]
    assert rig.counts["evicted.watermark"] == 4
    rig.measure()
    rig.tick()
    assert len(rig.room.evictions) == 0
    assert len(rig.directory) == 54


def test_an_entry_counts_for_what_the_stores_allocator_makes_of_it() -> None:
    rig = Rig()
    rig.put(*range(53), nbytes=NBYTES + 1)  # an eighth more: 59.6 of 64
    rig.now += LEASE_S
    rig.measure()
    assert rig.room.used == 53 * allocated(NBYTES + 1) == 53 * (NBYTES + NBYTES // 8)
    rig.tick()
    assert len(rig.room.evictions) == 5


def test_what_the_store_has_besides_counts_too() -> None:
    rig = full(54)
    rig.measure()
    rig.tick()
    assert len(rig.room.evictions) == 0
    rig.besides = 10 * NBYTES
    rig.measure()
    assert rig.room.used == 64 * NBYTES
    rig.tick()
    assert len(rig.room.evictions) == 10


def test_what_others_have_of_most_of_the_store_does_not_take_all_room_for_ever() -> None:
    rig = Rig()
    rig.besides = 56 * NBYTES  # a lineage before, of which nobody reads or removes anything
    for number in range(40):
        rig.put(number)
        rig.now += LEASE_S
        rig.measure()
        rig.tick()
        rig.remove()
        rig.besides = min(rig.besides, 61 * NBYTES - len(rig.store) * NBYTES)  # the store's own eviction takes it
    assert len(rig.store) == 40, "there is room for all of them"
    rig.besides = 4 * NBYTES
    rig.put(*range(40, 60))
    rig.now += LEASE_S
    rig.measure()
    rig.tick()
    rig.remove()
    assert len(rig.store) == 50, "what little there is of others counts as ever"


def test_without_a_late_measure_nothing_is_chosen() -> None:
    rig = full(60)
    rig.tick()
    assert len(rig.room.evictions) == 0, "there was none"
    rig.measure()
    rig.tick(MEASURE_LASTS_S + 0.1)
    assert len(rig.room.evictions) == 0, "it was too long ago"
    rig.measure()
    rig.tick(MEASURE_LASTS_S)
    assert len(rig.room.evictions) == 6


def test_a_store_that_has_lost_much_is_to_be_asked_what_is_there() -> None:
    rig = full(50)
    assert not rig.measure()
    lost = int(50 * MOST_LOST)
    for number in range(lost):
        del rig.store[rig.name(number)]
    assert not rig.measure()
    rig.besides = -NBYTES
    assert rig.measure()
    assert Rig().measure() is False, "nothing was to be there"


def test_after_a_restart_of_the_master_nothing_goes_and_its_segments_come_back() -> None:
    rig = full(60, quotas=["tenant=a 50%", "tenant=b 30%"])
    rig.store.clear()
    rig.put(100, nbytes=NBYTES + 1)  # the allocator takes more than the master counts
    rig.store.clear()
    assert rig.measure(CAPACITY)
    assert rig.measure(0), "which has no segments for a moment"
    rig.tick(LEASE_S)
    assert len(rig.room.evictions) == 0
    assert rig.measure(CAPACITY)
    rig.tick()
    assert len(rig.room.evictions) == 0


def test_what_its_publisher_has_just_seen_rests_until_its_lease_is_over() -> None:
    rig = Rig()
    rig.put(*range(60))
    rig.measure()
    rig.tick(LEASE_S - 0.1)
    assert len(rig.room.evictions) == 0
    rig.tick(0.1)
    assert rig.remove() == [0, 1, 2, 3, 4, 5]


def test_entries_go_as_well_when_there_are_nearly_too_many() -> None:
    rig = Rig(most=50)
    rig.put(*range(46), created=0.0)
    rig.measure(1 << 40)
    rig.tick()
    assert rig.remove() == [0, 1, 2, 3], "until there are no more than 85 % of them"
    rig.tick()
    assert rig.remove() == []


def test_what_is_leased_rests_and_goes_later() -> None:
    rig = full(60)
    rig.measure()
    rig.tick()
    assert len(rig.take()) == 6
    rig.done([Outcome.LEASED] * 6)
    assert rig.counts["eviction.leased"] == 6
    rig.tick()
    assert rig.remove() == [6, 7, 8, 9, 10, 11], "not the same again"
    rig.measure(NBYTES)
    rig.tick(LEASE_S)
    assert set(rig.remove()) == set(range(12, 60))
    rig.measure(NBYTES)
    rig.tick(LEASE_MARGIN_S)
    assert set(rig.remove()) == set(range(6))


@pytest.mark.parametrize("pinned", [False, True])
def test_an_entry_that_came_while_an_older_generation_was_out_goes_in_its_turn(pinned: bool) -> None:
    rig = full(60)
    rig.measure()
    rig.tick()
    name = rig.take()[0]
    rig.done([Outcome.UNAVAILABLE] * 6)
    rig.directory.drop(name, rig.revision(name))
    rig.directory.enter(name, Commitment("new", 1, 0, NBYTES, 1.0, b""), "p", rig.now)
    rig.measure(NBYTES)  # it rests, as all that is new
    rig.tick()
    if pinned:
        rig.room.pin(name, True)
    rig.tick(LEASE_S)
    if pinned:
        rig.room.pin(name, False)
        rig.tick()
    assert rig.room.evictions.keep(name)


def test_what_is_wanted_stays_and_another_goes() -> None:
    rig = full(60)
    rig.measure()
    rig.tick()
    rig.room.keep(rig.name(2))
    assert rig.counts["eviction.cancelled"] == 1
    rig.tick()
    assert rig.remove() == [0, 1, 3, 4, 5], "until the high watermark is passed again"


def test_what_is_read_goes_later() -> None:
    rig = full(60)
    rig.room.accessed(rig.name(0), 1)
    rig.measure()
    rig.tick()
    assert rig.remove() == [1, 2, 3, 4, 5, 6]


def test_what_is_pinned_is_never_chosen() -> None:
    rig = Rig()
    pinned = {rig.name(number) for number in (0, 1, 3)}
    rig.room.is_pinned = pinned.__contains__
    rig.put(*range(60), created=0.0)
    rig.measure()
    rig.tick()
    rig.room.pin(rig.name(4), True)
    pinned.add(rig.name(4))
    assert rig.remove() == [2, 5, 6, 7, 8]
    rig.put(*range(60, 64), created=0.0)
    pinned.remove(rig.name(0))
    rig.room.pin(rig.name(0), False)
    rig.measure()
    rig.tick()
    assert rig.remove()[:1] == [9], "what is put back is the latest"
    assert rig.directory.entry(rig.name(0)) is not None


def test_what_is_pinned_while_it_is_out_and_stays_is_not_put_back() -> None:
    rig = full(60)
    pinned: set[bytes] = set()
    rig.room.is_pinned = pinned.__contains__
    rig.measure()
    rig.tick()
    assert len(rig.take()) == 6
    pinned.add(rig.name(0))
    rig.room.pin(rig.name(0), True)
    rig.done([Outcome.LEASED] * 6)
    rig.measure()
    rig.tick(LEASE_S + LEASE_MARGIN_S)
    for capacity in range(CAPACITY, 0, -3 * NBYTES):
        rig.measure(capacity)
        rig.tick()
        rig.remove()
    assert list(rig.directory.names()) == [rig.name(0)]


def test_so_many_wait_for_their_removal_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MOST_CHOSEN", 4)
    rig = full(60)
    rig.measure()
    rig.tick()
    assert rig.remove() == [0, 1, 2, 3]
    rig.tick()
    assert rig.remove() == [4, 5]


def test_who_borrowed_room_gives_it_back_and_that_is_counted() -> None:
    rig = Rig(quotas=["tenant=a 20%", "tenant=b 50%"])
    other = Scope("b", "siglip", "v", None, "image")
    rig.put(*range(50), scope=other, created=0.0)
    rig.put(*range(100, 110), created=0.0)
    rig.measure()
    rig.tick()
    assert rig.remove() == [0, 1, 2, 3, 4, 5]
    assert (rig.counts["evicted.quota"], rig.counts["evicted.watermark"]) == (6, 0)


def test_quotas_of_more_than_there_is_can_be_seen() -> None:
    rig = Rig(quotas=["tenant=a 1MiB", "tenant=b 1B"])
    assert rig.room.sizes()["quotas_scaled"] == 0, "that is not known yet"
    rig.measure()
    assert rig.room.sizes()["quotas_scaled"] == 1
    rig.measure(2 * CAPACITY)
    assert rig.room.sizes()["quotas_scaled"] == 0


def test_what_is_too_old_goes_though_there_is_room() -> None:
    rig = Rig(ages=["any 1h", "tenant=a,modality=video 60s"])
    video, other = Scope("a", "siglip", "v", None, "video"), Scope("b", "siglip", "v", None, "video")
    rig.put(1)
    rig.put(2, scope=video)
    rig.put(3, scope=other)
    rig.tick(60.0)
    assert rig.remove() == []
    rig.tick(7.0)  # a pass begins each tenth of a minute
    assert rig.remove() == [2]
    rig.put(4, scope=video)
    rig.tick(3540.0)
    assert sorted(rig.remove()) == [1, 3, 4]
    assert rig.counts["evicted.age"] == 4


def test_what_no_age_is_about_stays() -> None:
    rig = Rig(ages=["modality=video 1s"])
    rig.put(1)
    rig.tick(1e6)
    assert rig.remove() == []


def test_a_pass_over_many_that_are_too_old_waits_for_those_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room_module, "MOST_CHOSEN", 4)
    rig = Rig(ages=["any 100s"])
    rig.put(*range(30))
    rig.tick(101.0)
    gone = []
    while removed := rig.remove():
        assert len(removed) <= 4
        gone += removed
        rig.tick(LEAST_PASS_S)
    assert gone == list(range(30)), "in one pass: the next begins ten seconds after it"


def test_a_pass_over_many_entries_takes_some_at_a_time_and_has_an_end() -> None:
    rig = Rig(ages=["any 1s"])
    rig.put(*range(1000))
    rig.now += 10.0
    rig.room.tick(rig.now)
    assert len(rig.room.evictions) == room_module.CHOSEN_AT_ONCE
    assert rig.room.next_deadline(rig.now) == rig.now
    rig.tick()
    assert len(rig.room.evictions) == 1000
    assert rig.room.next_deadline(rig.now) == rig.now + LEAST_PASS_S


def test_an_object_that_no_store_can_have_has_no_room() -> None:
    rig = Rig()
    assert rig.room.has_room_for(1 << 47), "which is not known yet"
    rig.measure()
    assert rig.room.has_room_for(CAPACITY)
    assert not rig.room.has_room_for(CAPACITY + 1)
