"""A breaker opens when calls fail, and only a probe closes it."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mmcache.client.breaker import FLOOR_S, PATIENCE_S, PROBE_MOST_S, QUICK_FAILURES, RELAPSE_S, Breaker


def middle() -> float:
    return 0.5


def test_one_patient_failure_opens_it_and_the_first_probe_is_due_at_once() -> None:
    breaker = Breaker(random=middle)
    assert breaker.failed(began=10.0, now=10.0 + PATIENCE_S)
    assert breaker.open
    assert breaker.probe_at == 10.0 + PATIENCE_S


def test_quick_failures_open_it_only_in_a_row() -> None:
    breaker = Breaker(random=middle)
    for _ in range(5):
        for _ in range(QUICK_FAILURES - 1):
            assert not breaker.failed(began=1.0, now=1.0)
        breaker.succeeded()
    assert not breaker.open
    assert [breaker.failed(began=1.0, now=1.0) for _ in range(QUICK_FAILURES)] == [False] * (QUICK_FAILURES - 1) + [
        True
    ]


def test_callers_with_too_little_time_open_it_only_once_a_call_of_theirs_is_overdue() -> None:
    breaker = Breaker(random=middle)
    little = FLOOR_S / 8
    for number in range(7):  # however many, and though none is answered
        began = 10.0 + number * little
        assert not breaker.unanswered([began, 10.0][: number + 1], now=began + little / 2)
    assert breaker.unanswered([10.0 + FLOOR_S, 10.0], now=10.0 + FLOOR_S + little)
    assert breaker.open


def test_a_caller_with_enough_time_opens_it_by_itself() -> None:
    breaker = Breaker(random=middle)
    assert breaker.unanswered([10.0], now=10.0 + 2 * FLOOR_S)


def test_a_call_that_hangs_since_before_it_closed_does_not_open_it_again() -> None:
    breaker = Breaker(random=middle)
    breaker.failed(began=0.0, now=1.0)
    assert breaker.probe_answered(1.0, 2.0)
    assert not breaker.unanswered([9.0, 0.0], now=9.0 + FLOOR_S / 2)
    assert breaker.unanswered([9.0, 0.0, 3.0], now=9.0 + FLOOR_S / 2)


def test_probes_that_fail_are_spaced_out_up_to_a_bound_and_one_that_succeeds_closes_it() -> None:
    breaker = Breaker(random=middle)
    breaker.failed(began=0.0, now=1.0)
    now, gaps = 1.0, []
    for _ in range(8):
        breaker.probe_begins(now)
        gaps.append(breaker.probe_at - now)
        now = breaker.probe_at
    assert gaps == sorted(gaps)
    assert gaps[-1] == PROBE_MOST_S
    assert breaker.probe_answered(now, now)
    assert not breaker.open
    assert breaker.probe_at == math.inf


def test_a_call_that_began_before_it_closed_neither_opens_nor_closes_it() -> None:
    breaker = Breaker(random=middle)
    breaker.failed(began=0.0, now=1.0)
    breaker.succeeded()
    assert breaker.open
    assert breaker.probe_answered(1.0, 2.0)
    assert not breaker.failed(began=1.5, now=6.0)
    assert breaker.failed(began=2.5, now=6.0)


def test_a_probe_of_an_earlier_outage_that_ends_late_does_not_close_it() -> None:
    breaker = Breaker(random=middle)
    breaker.failed(began=0.0, now=1.0)
    assert breaker.probe_answered(1.1, 1.2)
    breaker.failed(began=1.3, now=2.0)
    assert not breaker.probe_answered(1.1, 3.0)
    assert breaker.open


@pytest.mark.parametrize(("later", "at_once"), [(RELAPSE_S / 2, False), (RELAPSE_S * 2, True)])
def test_a_relapse_waits_before_its_first_probe(later: float, at_once: bool) -> None:
    breaker = Breaker(random=middle)
    breaker.failed(began=0.0, now=1.0)
    assert breaker.probe_answered(1.0, 1.0)
    breaker.failed(began=1.0, now=1.0 + later)
    assert (breaker.probe_at == 1.0 + later) is at_once


class BreakerMachine(RuleBasedStateMachine):
    """Whatever happens: open exactly from an accepted failure to a successful probe, with a probe due in between."""

    @initialize()
    def begin(self) -> None:
        self.now = 100.0
        self.breaker = Breaker(random=middle)
        self.open = False
        self.opened_at = 0.0
        self.probes: list[float] = []

    @rule(seconds=st.floats(0.0, 20.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(age=st.floats(0.0, 30.0))
    def fail(self, age: float) -> None:
        opened = self.breaker.failed(self.now - age, self.now)
        assert not (opened and self.open)
        if opened:
            self.open, self.opened_at = True, self.now

    @rule(ages=st.lists(st.floats(0.0, 30.0), min_size=1))
    def give_up(self, ages: list[float]) -> None:
        opened = self.breaker.unanswered([self.now - age for age in ages], self.now)
        assert not (opened and (self.open or max(ages) < FLOOR_S))
        if opened:
            self.open, self.opened_at = True, self.now

    @rule()
    def succeed(self) -> None:
        self.breaker.succeeded()

    @precondition(lambda self: self.open)
    @rule()
    def begin_probe(self) -> None:
        self.now = max(self.now, self.breaker.probe_at)
        self.breaker.probe_begins(self.now)
        self.probes.append(self.now)

    @precondition(lambda self: self.probes)
    @rule(data=st.data())
    def probe_is_answered(self, data: st.DataObject) -> None:
        began = data.draw(st.sampled_from(self.probes))
        assert self.breaker.probe_answered(began, self.now) is (self.open and began >= self.opened_at)
        self.open = self.open and began < self.opened_at

    @invariant()
    def a_probe_is_due_soon_exactly_while_it_is_open(self) -> None:
        if not hasattr(self, "breaker"):
            return
        assert self.breaker.open is self.open
        if self.open:
            assert self.breaker.probe_at <= self.now + 1.5 * PROBE_MOST_S
        else:
            assert self.breaker.probe_at == math.inf


TestBreakerMachine = BreakerMachine.TestCase
