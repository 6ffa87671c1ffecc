"""Deadlines against a dict that is searched."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mmcache.controller.deadlines import Deadlines

keys = st.integers(0, 5)
times = st.integers(0, 50).map(float)


class DeadlinesAgainstADict(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.deadlines: Deadlines[int] = Deadlines()
        self.model: dict[int, float] = {}

    @rule(key=keys, due=times)
    def set(self, key: int, due: float) -> None:
        self.deadlines.set(key, due)
        self.model[key] = due

    @rule(key=keys)
    def discard(self, key: int) -> None:
        self.deadlines.discard(key)
        self.model.pop(key, None)

    @rule(now=times)
    def pop_due(self, now: float) -> None:
        due = {key for key, time in self.model.items() if time <= now}
        popped = self.deadlines.pop_due(now)
        assert len(popped) == len(due)
        assert set(popped) == due
        for key in due:
            del self.model[key]

    @invariant()
    def same(self) -> None:
        assert self.deadlines.next() == min(self.model.values(), default=None)

    def teardown(self) -> None:
        self.pop_due(1e9)
        assert self.deadlines.next() is None


TestDeadlinesAgainstADict = DeadlinesAgainstADict.TestCase


def test_what_was_removed_or_renewed_does_not_pile_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(10_000):
        deadlines.set(key, 1e9)
        deadlines.discard(key)
    for time in range(10_000):
        deadlines.set(-1, 1e9 - time)
        deadlines.set(-1, 2e9)
    assert len(deadlines._heap) <= 100
    assert deadlines.next() == 2e9
