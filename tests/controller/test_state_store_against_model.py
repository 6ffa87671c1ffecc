"""SQLite against the store in memory: the same calls, restarts and lost writes, and the same is seen of both."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from state_stores import LINEAGE, did, made, pinned, quick_folder, scope, seen

from mmcache.controller.state.base import StateFull, StateLimits, StateStore
from mmcache.controller.state.memory import MemoryStateStore
from mmcache.controller.state.sqlite import SqliteStateStore

LIMITS = StateLimits(history=3, max_held=6, max_scopes=3, max_settings=2, max_pins=3, audit_rows=4)
few = st.lists(st.integers(1, 12), max_size=4)
keys = st.sampled_from([None, None, "k1", "k2", "k3"])
records = st.lists(st.builds(did, st.sampled_from(["invalidate", "pin"]), actor=st.sampled_from(["ann", "bob"])))


class SqliteAgainstMemory(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folders = contextlib.ExitStack()
        self.folder = self.folders.enter_context(quick_folder())
        self.model = MemoryStateStore(LINEAGE, LIMITS)
        self.store = SqliteStateStore.open(self.folder / "state.db", LIMITS)

    def both(self, call: Callable[[StateStore], Any]) -> None:
        """The same comes back from both, or the same error."""
        results = []
        for store in (self.store, self.model):
            try:
                results.append(call(store))
            except (ValueError, StateFull) as error:
                results.append((type(error), str(error)))
        assert results[0] == results[1]

    @rule(term=st.integers(1, 4), ttl_ms=st.integers(1, 9))
    def begin_term(self, term: int, ttl_ms: int) -> None:
        self.both(lambda store: store.begin_term(term, ttl_ms))

    @rule()
    def settle_terms(self) -> None:
        self.both(lambda store: store.settle_terms())

    @rule(steps=st.lists(st.sampled_from([1, 1, 1, 1, 1, 0, 2]), max_size=3), key=keys, forget=few, records=records)
    def invalidate(self, steps: list[int], key: str | None, forget: list[int], records: list[Any]) -> None:
        number = self.model.head
        batch = [made(number := number + step, idempotency_key=key) for step in steps if number + step > 0]
        self.both(lambda store: store.invalidate(batch, forget=forget, audit=records))

    @rule(numbers=few, at=st.integers(1, 3))
    def complete(self, numbers: list[int], at: int) -> None:
        self.both(lambda store: store.complete(numbers, at))

    @rule(back=st.lists(st.integers(0, 6), max_size=4))
    def forget(self, back: list[int]) -> None:
        self.both(lambda store: store.forget([store.head - steps for steps in back]))

    @rule(before=st.none() | st.integers(1, 12), limit=st.integers(1, 4), key=keys)
    def read(self, before: int | None, limit: int, key: str | None) -> None:
        self.both(lambda store: store.page(before, limit))
        self.both(lambda store: store.audit(before, limit, action="pin"))
        self.both(lambda store: store.audit(before, limit, actor="ann"))
        self.both(lambda store: store.invalidation(before or limit))
        self.both(lambda store: store.by_idempotency_key(key or "k1"))

    @rule(back=st.lists(st.integers(-2, 4), max_size=3), until=st.integers(1, 9), drop=few, records=records)
    def change_pins(self, back: list[int], until: int, drop: list[int], records: list[Any]) -> None:
        last = self.model.last_pin
        put = [pinned(last + 1 - steps, until=until) for steps in back if last + 1 - steps > 0]
        self.both(lambda store: store.change_pins(put, drop, audit=records))

    @rule(models=st.lists(st.sampled_from("abcde"), max_size=3))
    def add_scopes(self, models: list[str]) -> None:
        self.both(lambda store: store.add_scopes([scope(model) for model in models]))

    @rule(name=st.sampled_from("abc"), value=st.sampled_from([None, 1, {"x": [1.5, "y"]}]))
    def set_setting(self, name: str, value: object) -> None:
        self.both(lambda store: store.set_setting(name, value))

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.store = SqliteStateStore.open(self.folder / "state.db", LIMITS)
        self.model = self.model.copy()

    @rule()
    def crash(self) -> None:
        """The files as they are, without what closing does to them."""
        crashed = self.folders.enter_context(quick_folder())
        for file in self.folder.iterdir():
            shutil.copy(file, crashed)
        self.store.close()
        self.folder = crashed
        self.store = SqliteStateStore.open(self.folder / "state.db", LIMITS)
        self.model = self.model.copy()

    @invariant()
    def the_same_is_seen(self) -> None:
        assert seen(self.store) == seen(self.model)

    def teardown(self) -> None:
        self.store.close()
        self.folders.close()


SqliteAgainstMemory.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
TestSqliteAgainstMemory = SqliteAgainstMemory.TestCase
