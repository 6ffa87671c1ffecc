"""Whatever is asked of a policy, it does what its model does, and keeps what all promise."""

from __future__ import annotations

import hashlib
import math

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from policy_models import MODELS, LruModel, S3FifoModel

from mmcache.controller.eviction import POLICIES, Policy, PolicyName
from mmcache.controller.eviction.s3fifo import SmallFirst

NAMES = [hashlib.sha512(bytes([number])).digest() for number in range(24)]
SIZES = st.sampled_from([1, 2, 3, 10, 60, 1000])
COSTS = st.sampled_from([1.0, 1.0, 2.0, 5.0, 40.0, 3000.0, 0.0, -1.0, 1e12, 5e-324, math.nan, math.inf, -math.inf])
COUNTS = st.sampled_from([1, 1, 1, 2, 3, 1000, 0])


class Against(RuleBasedStateMachine):
    """One policy beside its model."""

    kind: PolicyName

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy = POLICIES[self.kind]()
        self.model: LruModel = MODELS[self.kind]()

    @rule(name=st.sampled_from(NAMES), nbytes=SIZES, cost_ms=COSTS)
    def insert(self, name: bytes, nbytes: int, cost_ms: float) -> None:
        self.policy.insert(name, nbytes, cost_ms)
        self.model.insert(name, nbytes, cost_ms)

    @rule(first=st.integers(0, len(NAMES) - 1), count=st.integers(1, 12), nbytes=SIZES)
    def insert_several(self, first: int, count: int, nbytes: int) -> None:
        for name in (NAMES + NAMES)[first : first + count]:
            self.insert(name, nbytes, 1.0)

    @rule(name=st.sampled_from(NAMES), count=COUNTS)
    def access(self, name: bytes, count: int) -> None:
        self.policy.access(name, count)
        self.model.access(name, count)

    @rule(name=st.sampled_from(NAMES))
    def remove(self, name: bytes) -> None:
        assert self.policy.remove(name) == (name in self.model.sizes)
        if name in self.model.sizes:
            self.model.remove(name)

    @rule(keep=st.booleans())
    def choose(self, keep: bool) -> None:
        victim = self.policy.choose()
        assert victim == self.model.choose()
        if victim is not None and not keep:
            self.remove(victim)

    @precondition(lambda self: self.model.sizes)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.sizes)))
        assert self.policy.set_aside(name) == (name not in self.model.aside)
        self.model.aside.add(name)

    @rule(name=st.sampled_from(NAMES))
    def put_back(self, name: bytes) -> None:
        assert self.policy.put_back(name) == (name in self.model.aside)
        if name in self.model.aside:
            self.model.put_back(name)

    @invariant()
    def sums(self) -> None:
        assert len(self.policy) == len(self.model.sizes)
        assert self.policy.nbytes == sum(self.model.sizes.values())

    @invariant()
    def same_are_aside(self) -> None:
        assert {name for name in NAMES if self.policy.is_aside(name)} == self.model.aside
        assert {name for name in NAMES if name in self.policy} == self.model.sizes.keys()

    @invariant()
    def same_ghosts(self) -> None:
        if isinstance(self.policy, SmallFirst):
            assert isinstance(self.model, S3FifoModel)
            assert self.policy.ghosts == len(self.model.ghosts) <= self.model.GHOSTS * len(self.policy)

    def teardown(self) -> None:
        while (victim := self.policy.choose()) is not None:
            assert victim == self.model.choose()
        assert self.model.aside == self.model.sizes.keys()


@pytest.mark.parametrize("kind", list(POLICIES))
def test_it_does_what_its_model_does(kind: PolicyName) -> None:
    machine = type(f"Against_{kind}", (Against,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40))  # type: ignore[arg-type]
