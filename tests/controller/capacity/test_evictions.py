"""What is on its way out, against a model: nothing is sent that was kept, and each removal has one end."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmcache.controller.capacity import evictions
from mmcache.controller.capacity.evictions import (
    DOUBTED_S,
    LEASE_MARGIN_S,
    MOST_TRIES,
    WAIT_S,
    Evictions,
    Fate,
    News,
    Reason,
)
from mmcache.store.base import Outcome

LEASE_S = 5.0
REST_S = LEASE_S + LEASE_MARGIN_S
UNKNOWN = (Outcome.UNAVAILABLE, Outcome.TIMED_OUT)
ENDS = (Outcome.OK, Outcome.NOT_FOUND)
NAMES = [bytes([number]) * 64 for number in range(6)]


def made() -> tuple[Evictions, Counter[str]]:
    counts: Counter[str] = Counter()
    return Evictions(lease_ms=round(LEASE_S * 1000), counts=counts), counts


class Leaving:
    """One entry that is to go. `counts`: it is in the directory."""

    def __init__(self, name: bytes, generation: int, nbytes: int, reason: Reason) -> None:
        self.name = name
        self.generation = generation
        self.nbytes = nbytes
        self.reason = reason
        self.tries = 0
        self.counts = True


class Against(RuleBasedStateMachine):
    """A directory of six names, each of which may come back with the generation that it had, or another."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.evictions, self.counts = made()
        self.there = {name: (0, 100 + number) for number, name in enumerate(NAMES)}
        self.chosen: list[Leaving] = []
        self.out: list[Leaving] = []
        self.unsure: list[Leaving] = []
        self.wait_until = -1.0
        self.told_to_wait_no_more = False
        self.resting: list[tuple[float, bytes]] = []
        self.left: dict[bytes, tuple[float, int]] = {}
        self.paused_until = 0.0
        self.silences = 0
        self.news: list[News] = []
        self.sent: set[tuple[bytes, int]] = set()
        """Whose end is not known."""
        self.ended: Counter[str] = Counter()

    def leaving(self, name: bytes) -> list[Leaving]:
        return [one for one in self.chosen + self.out + self.unsure if one.name == name]

    @rule(name=st.sampled_from(NAMES), reason=st.sampled_from(Reason))
    def choose(self, name: bytes, reason: Reason) -> None:
        if name in self.there and not any(one.counts for one in self.leaving(name)):
            generation, nbytes = self.there[name]
            self.evictions.choose(name, generation, nbytes, reason)
            self.chosen.append(Leaving(name, generation, nbytes, reason))

    @rule(name=st.sampled_from(NAMES))
    def keep(self, name: bytes) -> None:
        kept = [one for one in self.chosen if one.name == name]
        assert self.evictions.keep(name) == sum(one.nbytes for one in kept)
        self.chosen = [one for one in self.chosen if one.name != name]
        self.ended["eviction.cancelled"] += len(kept)

    @rule(name=st.sampled_from(NAMES))
    def leave_the_directory(self, name: bytes) -> None:
        if self.there.pop(name, None) is not None:
            counted = [one for one in self.leaving(name) if one.counts]
            assert self.evictions.forget(name) == sum(one.nbytes for one in counted)
            self.chosen = [one for one in self.chosen if one.name != name]
            for one in counted:
                one.counts = False

    @rule(name=st.sampled_from(NAMES), nbytes=st.integers(1, 99), again=st.booleans())
    def come_back(self, name: bytes, nbytes: int, again: bool) -> None:
        """Of the same generation only what nobody doubts, as `Entries` sees to."""
        if name not in self.there:
            generations = [one.generation for one in self.leaving(name)]
            generation = max(generations, default=-1) + 1
            if again and not generations:
                generation = max(0, self.left.get(name, (0.0, 0))[1])
                self.evictions.trust(name)
                self.left.pop(name, None)
            self.there[name] = generation, nbytes

    @rule(seconds=st.sampled_from([0.1, WAIT_S / 2, WAIT_S, REST_S / 2, REST_S, DOUBTED_S, 60.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick(self) -> None:
        if self.out and self.now >= self.wait_until and not self.told_to_wait_no_more:
            self.told_to_wait_no_more = True
            self.news += [News(one.name, one.generation, Fate.UNSURE) for one in self.out]
        self.left = {name: (until, generation) for name, (until, generation) in self.left.items() if until > self.now}
        due = sorted(one for one in self.resting if one[0] <= self.now)
        self.resting = [one for one in self.resting if one[0] > self.now]
        again = list(self.evictions.tick(self.now))
        assert again == [name for _, name in due if not any(one.counts for one in self.leaving(name))]

    @rule(most=st.integers(0, 4))
    def take(self, most: int) -> None:
        lost, self.out = self.out, []
        if lost:
            self.lose(lost)
        taken = self.evictions.take(most, self.now)
        if self.now >= self.paused_until:
            for table in (self.unsure, self.chosen):
                for one in table[: most - len(self.out)]:
                    if all(one.name != another.name for another in self.out):
                        self.out.append(one)
                        table.remove(one)
        assert taken == [(one.name, one.generation) for one in self.out]
        self.sent |= set(taken)
        self.wait_until = self.now + WAIT_S
        self.told_to_wait_no_more = False

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        outcomes = data.draw(st.lists(st.sampled_from(Outcome), min_size=len(self.out), max_size=len(self.out)))
        self.evictions.done(outcomes, self.now)
        out, self.out = self.out, []
        unknown = []
        for one, outcome in zip(out, outcomes, strict=True):
            if outcome in UNKNOWN:
                unknown.append(one)
            elif outcome in ENDS:
                self.left[one.name] = self.now + DOUBTED_S, one.generation
                self.ended[f"evicted.{one.reason.value}"] += 1
                self.news.append(News(one.name, one.generation, Fate.GONE))
                if one.counts:  # as `Room` does once it hears of it
                    del self.there[one.name]
            else:
                self.ended[f"eviction.{outcome.value}"] += 1
                self.stay(one)
        if unknown:
            self.lose(unknown)
        else:
            self.silences = 0

    def lose(self, lost: list[Leaving]) -> None:
        for one in lost:
            one.tries += 1
            self.ended["eviction.unknown"] += 1
            if one.tries < MOST_TRIES:
                self.unsure.append(one)
                self.news.append(News(one.name, one.generation, Fate.UNSURE))
            else:
                self.stay(one)
        self.paused_until = self.now + min(2.0**self.silences, 60.0)
        self.silences += 1

    def stay(self, one: Leaving) -> None:
        self.resting.append((self.now + REST_S, one.name))
        self.news.append(News(one.name, one.generation, Fate.STAYS))

    @invariant()
    def news_are_told_once_and_each_removal_ends_once(self) -> None:
        assert self.evictions.has_news == bool(self.news)
        assert self.evictions.take_news() == self.news
        for name, generation, fate in self.news:
            if fate is not Fate.UNSURE:
                self.sent.remove((name, generation))
        self.news = []
        assert self.sent == {(one.name, one.generation) for one in self.out + self.unsure}
        assert +self.counts == +self.ended

    @invariant()
    def sizes_are_right(self) -> None:
        every = self.chosen + self.out + self.unsure
        assert len(self.evictions) == len(every)
        assert self.evictions.chosen == len(self.chosen)
        assert self.evictions.nbytes == sum(one.nbytes for one in every if one.counts)
        assert self.evictions.busy == bool(every or self.left)
        waits = self.out and not self.told_to_wait_no_more
        assert self.evictions.next_deadline() == (self.wait_until if waits else None)

    @invariant()
    def fates_and_doubts_are_right(self) -> None:
        for name in NAMES:
            assert self.evictions.leaves(name) == any(one.counts for one in self.leaving(name))
            for generation in range(3):
                fate = Fate.STAYS
                for one in self.out + self.unsure:
                    if (one.name, one.generation) == (name, generation):
                        waits = one in self.out and self.now < self.wait_until
                        fate = Fate.OUT if waits else Fate.UNSURE
                assert self.evictions.fate(name, generation, self.now) is fate
                until, left = self.left.get(name, (0.0, -1))
                doubted = fate is not Fate.STAYS or (left == generation and self.now < until)
                assert self.evictions.doubts(name, generation, self.now) == doubted

    def teardown(self) -> None:
        """With a store that answers, all ends."""
        for _ in range(2 * len(NAMES)):
            self.now += 60.0
            self.take(4)
            if self.out:
                self.evictions.done([Outcome.OK] * len(self.out), self.now)
                self.out = []
        assert (len(self.evictions), self.evictions.nbytes) == (0, 0)
        list(self.evictions.tick(self.now + DOUBTED_S + REST_S))
        assert not self.evictions.busy


Against.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestAgainstModel = Against.TestCase


def chosen(number: int) -> tuple[Evictions, Counter[str]]:
    leaving, counts = made()
    for one in range(number):
        leaving.choose(one.to_bytes(64, "big"), 0, 10, Reason.WATERMARK)
    return leaving, counts


def test_another_number_of_outcomes_is_refused_and_changes_nothing() -> None:
    leaving, counts = chosen(2)
    leaving.take(2, 0.0)
    for outcomes in ([Outcome.OK], [Outcome.OK] * 3, []):
        with pytest.raises(ValueError, match=f"{len(outcomes)} for 2 removals"):
            leaving.done(outcomes, 0.0)
    assert (len(leaving), leaving.nbytes, leaving.take_news(), counts) == (2, 20, [], Counter())
    leaving.done([Outcome.OK] * 2, 0.0)
    assert (len(leaving), leaving.nbytes) == (0, 0)


def test_what_never_has_an_outcome_is_given_up_and_stays() -> None:
    leaving, counts = chosen(1)
    news, now = [], 0.0
    for _ in range(3 * MOST_TRIES):
        leaving.take(1, now)
        news += leaving.take_news()
        now += evictions.MOST_PAUSE_S
    assert [one.fate for one in news] == [Fate.UNSURE] * (MOST_TRIES - 1) + [Fate.STAYS]
    assert (len(leaving), leaving.nbytes, counts["eviction.unknown"]) == (0, 0, MOST_TRIES)


def test_a_store_that_does_not_answer_is_asked_less_and_less_often() -> None:
    leaving, _ = chosen(1)
    asked = []
    for now in range(200):
        if leaving.take(1, float(now)):
            asked.append(now)
            leaving.done([Outcome.TIMED_OUT], float(now))
    assert asked[:7] == [0, 1, 3, 7, 15, 31, 63]
    assert asked[7] == 63 + evictions.MOST_PAUSE_S


def test_of_what_has_left_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evictions, "MOST_DOUBTED", 3)
    leaving, _ = chosen(5)
    taken = leaving.take(5, 0.0)
    leaving.done([Outcome.OK] * 5, 0.0)
    assert [leaving.doubts(*one, 0.0) for one in taken] == [False, False, True, True, True]


def test_an_entry_whose_older_generation_is_out_is_counted_once_and_goes_after_it() -> None:
    leaving, _ = made()
    [name, *_] = NAMES
    leaving.choose(name, 0, 10, Reason.WATERMARK)
    assert leaving.take(9, 0.0) == [(name, 0)]
    assert leaving.forget(name) == 10
    leaving.choose(name, 1, 7, Reason.WATERMARK)
    leaving.done([Outcome.TIMED_OUT], 0.0)
    assert leaving.take(9, 1.0) == [(name, 0)]
    assert (len(leaving), leaving.nbytes, leaving.chosen) == (2, 7, 1)
    assert leaving.forget(name) == 7
    assert (len(leaving), leaving.nbytes, leaving.chosen) == (1, 0, 0)
