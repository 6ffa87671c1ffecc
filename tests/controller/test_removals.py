"""What is to be removed from the store is offered until it is gone, and never before the store may take it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from unittest import mock

import hypothesis.strategies as st
import pytest
from controller_driver import LINEAGE, SCOPE, World
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmcache.control.messages import CommitStatus
from mmcache.controller import removals
from mmcache.controller.removals import BATCH, LEASE_MARGIN_S, MOST_PAUSE_S, MOST_TRIES, Removals
from mmcache.key import EmbeddingKey, mm_digest, store_name, store_name_of
from mmcache.selector import Selector
from mmcache.store.base import Outcome

LEASE_S = 5.0
ENDS = {Outcome.OK: "removed", Outcome.NOT_FOUND: "removal.gone"}
SILENT = (Outcome.UNAVAILABLE, Outcome.TIMED_OUT)


def made(*, most: int = 100_000) -> tuple[Removals, Counter[str]]:
    counts: Counter[str] = Counter()
    return Removals(lineage=LINEAGE, lease_ms=round(LEASE_S * 1000), most=most, counts=counts), counts


def digests(number: int) -> bytes:
    return number.to_bytes(64, "big")


def name(number: int, generation: int) -> str:
    return store_name_of(digests(number), lineage=LINEAGE, generation=generation)


class Against(RuleBasedStateMachine):
    """Names are numbers, each added once, at a generation of its own. The model knows the last of each."""

    MOST = 12

    @initialize()
    def begin(self) -> None:
        self.patch = mock.patch.object(removals, "BATCH", 4)
        self.patch.start()
        self.now = 1000.0
        self.removals, self.counts = made(most=self.MOST)
        assert self.removals.take(self.now) == []
        self.added = 0
        self.here: dict[str, float] = {}
        """Names with the time before which they may not be taken."""
        self.tries: Counter[str] = Counter()
        self.out: list[str] = []
        self.paused_until = 0.0
        self.silences = 0
        self.forgotten = 0

    @rule(number=st.integers(1, 6))
    def add(self, number: int) -> None:
        for _ in range(number):
            self.added += 1
            self.removals.add(digests(self.added), self.added * 7)
            if len(self.here) < self.MOST:
                self.here[name(self.added, self.added * 7)] = 0.0
            else:
                self.forgotten += 1

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, LEASE_S + LEASE_MARGIN_S, 60.0, 1000.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take(self) -> None:
        if self.out:  # they are lost
            for one in self.out:
                self.try_in_vain(one, 0.0)
            self.pause()
        taken = self.removals.take(self.now)
        may = {one for one, since in self.here.items() if since <= self.now}
        if self.now < self.paused_until:
            assert taken == []
        else:
            assert len(taken) == len(set(taken)) == min(4, len(may))
            assert set(taken) <= may
        self.out = taken

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        outcomes = data.draw(st.lists(st.sampled_from(Outcome), min_size=len(self.out), max_size=len(self.out)))
        before = Counter(self.counts)
        self.removals.done(outcomes, self.now)
        silent = False
        for one, outcome in zip(self.out, outcomes, strict=True):
            if outcome in ENDS:
                del self.here[one]
            elif outcome in SILENT:
                silent = True
            else:
                leases = min(2 ** self.tries[one], removals.MOST_LEASES)
                self.try_in_vain(one, self.now + (LEASE_S + LEASE_MARGIN_S) * leases)
        for outcome, number in Counter(outcomes).items():
            word = ENDS.get(outcome, f"removal.{outcome.value}")
            assert self.counts[word] - before[word] == number
        self.out = []
        if silent:
            self.pause()
        else:
            self.silences = 0

    def try_in_vain(self, one: str, again: float) -> None:
        self.tries[one] += 1
        if self.tries[one] == MOST_TRIES:
            del self.here[one]
            self.forgotten += 1
        else:
            self.here[one] = again

    def pause(self) -> None:
        self.paused_until = self.now + min(2.0**self.silences, MOST_PAUSE_S)
        self.silences += 1

    @invariant()
    def nothing_is_lost_uncounted(self) -> None:
        if not hasattr(self, "here"):
            return
        assert len(self.removals) == len(self.here) <= self.MOST
        assert self.counts["removal.forgotten"] == self.forgotten
        ended = self.counts["removed"] + self.counts["removal.gone"] + self.forgotten
        assert self.added == len(self.here) + ended

    def teardown(self) -> None:
        """A store that answers is rid of all of them within a while."""
        if not hasattr(self, "here"):
            return
        self.take()
        for _ in range(2 * self.MOST):
            if self.out:
                self.removals.done([Outcome.OK] * len(self.out), self.now)
            self.now += removals.MOST_LEASES * (LEASE_S + LEASE_MARGIN_S)
            self.out = self.removals.take(self.now)
        self.patch.stop()
        assert (len(self.removals), self.out) == (0, [])


Against.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAgainstModel = Against.TestCase


def test_a_million_names_leave_in_batches_and_cost_no_turn_more_than_one() -> None:
    waiting, counts = made()
    waiting.take(0.0)
    for number in range(1000):
        waiting.add(digests(number), 3)
    taken = waiting.take(0.0)
    assert taken == [name(number, 3) for number in range(BATCH)]
    waiting.done([Outcome.OK] * BATCH, 0.0)
    assert (len(waiting), counts["removed"]) == (1000 - BATCH, BATCH)


def test_names_whose_leases_end_together_come_in_batches_too_and_after_new_ones() -> None:
    waiting, _ = made()
    waiting.take(0.0)
    for number in range(BATCH):
        waiting.add(digests(number), 1)
    waiting.take(0.0)
    waiting.done([Outcome.LEASED] * BATCH, 0.0)
    assert waiting.take(LEASE_S) == []
    waiting.add(digests(BATCH), 1)
    later = LEASE_S + LEASE_MARGIN_S
    taken = waiting.take(later)
    assert (len(taken), taken[0]) == (BATCH, name(BATCH, 1))


def test_what_was_tried_in_vain_ten_times_is_forgotten_and_each_wait_is_twice_the_last() -> None:
    waiting, counts = made()
    waiting.take(0.0)
    waiting.add(digests(1), 1)
    now, tried = 0, []
    while len(waiting) and now < 10_000:
        if waiting.take(now):
            tried.append(now)
            waiting.done([Outcome.LEASED], now)
        now += 1
    assert (len(tried), counts["removal.leased"], counts["removal.forgotten"]) == (MOST_TRIES, MOST_TRIES, 1)
    leases = (1, 2, 4, 8, 16, 32, 64, 64, 64)
    assert [after - before for before, after in pairwise(tried)] == [(LEASE_S + LEASE_MARGIN_S) * n for n in leases]


def test_a_batch_of_which_nobody_knows_is_tried_again_after_the_others_and_not_for_ever() -> None:
    waiting, counts = made()
    waiting.take(0.0)
    for number in range(BATCH + 1):
        waiting.add(digests(number), 1)
    waiting.take(0.0)
    assert waiting.take(0.0) == [], "there is a pause first"
    assert waiting.take(1.0)[:2] == [name(BATCH, 1), name(0, 1)]
    for turn in range(2, 4 * MOST_TRIES):
        waiting.take(turn * MOST_PAUSE_S)
    assert (len(waiting), counts["removal.forgotten"]) == (0, BATCH + 1)


def test_a_name_of_which_new_bytes_came_while_it_was_out_is_offered_again() -> None:
    waiting, _ = made()
    waiting.take(0.0)
    waiting.add(digests(1), 1)
    assert waiting.take(0.0) == [name(1, 1)]
    waiting.add(digests(1), 1)
    waiting.done([Outcome.OK], 0.0)
    assert waiting.take(0.0) == [name(1, 1)]


def test_without_a_reaper_nothing_is_kept() -> None:
    waiting, counts = made()
    waiting.add(digests(1), 1)
    assert (len(waiting), waiting.take(0.0), counts) == (0, [], Counter())


def test_another_number_of_outcomes_than_names_is_refused() -> None:
    waiting, _ = made()
    waiting.take(0.0)
    waiting.add(digests(1), 1)
    waiting.take(0.0)
    with pytest.raises(ValueError, match="2 for a batch of 1"):
        waiting.done([Outcome.OK] * 2, 0.0)


def of(mm_hash: str, generation: int) -> str:
    key = EmbeddingKey("siglip", "v1", mm_hash)
    assert key.scope == SCOPE
    assert store_name_of(SCOPE.digest + mm_digest(mm_hash), lineage=LINEAGE, generation=generation) == store_name(
        key, lineage=LINEAGE, generation=generation
    )
    return store_name(key, lineage=LINEAGE, generation=generation)


def test_what_an_invalidation_outdates_is_removed_under_its_old_name_and_nothing_else() -> None:
    world = World()
    client = world.client("c")
    world.core.take_removals(world.now)
    client.put("a", "b", "c")
    client.invalidate(Selector(mm_hash="a"))
    client.apply(1)
    world.advance(1.0)
    assert world.stats("removals", "entries") == (1, 2)
    assert world.core.take_removals(world.now) == [of("a", 0)]
    world.core.removed([Outcome.OK], world.now)
    assert world.stats("removals", "removed") == (0, 1)


def test_an_entry_that_is_published_anew_before_it_was_swept_leaves_its_old_name() -> None:
    world = World()
    client = world.client("c")
    world.core.take_removals(world.now)
    client.put("a", "b")
    client.invalidate(Selector(mm_hash="a"))
    client.apply(1)
    assert client.commit("a", generation=1) == [CommitStatus.STORED]
    world.advance(1.0)
    assert world.core.take_removals(world.now) == [of("a", 0)]
    assert world.stats("entries") == (2,)


def test_a_commit_that_comes_too_late_leaves_its_name_and_one_of_the_future_does_not() -> None:
    world = World()
    client = world.client("c")
    world.core.take_removals(world.now)
    client.invalidate(Selector(mm_hash="a"))
    client.apply(1)
    assert client.commit("a", generation=0) == [CommitStatus.OUTDATED]
    assert client.commit("a", generation=2) == [CommitStatus.REFUSED]
    assert client.commit("a", generation=1) == [CommitStatus.STORED]
    assert world.core.take_removals(world.now) == [of("a", 0)]


def test_what_readers_did_not_find_is_not_removed() -> None:
    world = World()
    client = world.client("c")
    world.core.take_removals(world.now)
    client.put("a")
    [hit] = client.lookup("a")
    assert hit is not None
    client.report("a", hit.revision)
    assert world.stats("entries", "removals") == (0, 0)
