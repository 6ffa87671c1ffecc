"""What every state store does, on SQLite and in memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from state_stores import MemoryStores, SqliteStores, Stores, did, filled, made, pinned, quick_folder, scope, seen

from mmcache.control.generations import GenerationTable
from mmcache.controller.state.base import AuditRecord, Invalidation, StateFull, StateLimits, StateStore
from mmcache.errors import LifecycleError
from mmcache.selector import Selector


@pytest.fixture(params=["sqlite", "memory"])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    with quick_folder() as folder:
        stores: Stores = SqliteStores(folder) if request.param == "sqlite" else MemoryStores()
        yield stores
        stores.store.close()


@pytest.fixture
def store(stores: Stores) -> StateStore:
    return stores.store


def numbers(found: list[Invalidation]) -> list[int]:
    return [invalidation.number for invalidation in found]


def test_a_new_one_is_empty_and_has_a_lineage_that_stays(stores: Stores) -> None:
    store = stores.store
    assert len(store.lineage) == 16
    assert set(store.lineage) <= set("0123456789abcdef")
    assert (store.head, store.previous_ttl_ms) == (0, None)
    assert (store.held(), store.pending(), store.page(None, 10), store.audit(None, 10)) == ([], [], [], [])
    assert (store.scopes(), store.setting("a"), store.invalidation(1)) == ({}, None, None)
    assert stores.reopened().lineage == store.lineage


def test_all_of_it_is_there_at_the_next_start(stores: Stores) -> None:
    filled(stores.store)
    before = seen(stores.store)
    assert before["settings"]["a"] == {"high": 0.9, "names": ["x", None, True]}
    after = seen(stores.reopened())
    assert after.pop("previous_ttl_ms") == 5000
    assert before.pop("previous_ttl_ms") is None
    assert after == before


# Terms


def test_the_wait_covers_every_term_since_the_last_that_was_alone(stores: Stores) -> None:
    store = stores.store
    for term, ttl_ms, previous in ((1, 60_000, None), (2, 1_000, 60_000), (3, 5_000, 60_000), (4, 90_000, 60_000)):
        store.begin_term(term, ttl_ms)
        assert store.previous_ttl_ms == previous
        store = stores.reopened()
        assert store.previous_ttl_ms == max(ttl_ms, previous or 0), "also before the term begins"
    store.begin_term(5, 2_000)
    assert store.previous_ttl_ms == 90_000
    store.settle_terms()
    assert store.previous_ttl_ms is None
    assert stores.reopened().previous_ttl_ms == 2_000, "the term that settled may have sessions of its own"


def test_terms_are_settled_by_one_that_began(stores: Stores) -> None:
    stores.store.begin_term(1, 60_000)
    store = stores.reopened()
    with pytest.raises(ValueError, match="no term was begun"):
        store.settle_terms()
    with pytest.raises(ValueError, match="term 1 was begun before"):
        store.begin_term(1, 1_000)
    assert store.previous_ttl_ms == 60_000


@pytest.mark.parametrize(("term", "ttl_ms"), [(0, 1), (1 << 63, 1), (1, 0), (1, 86_400_001), (1.0, 1), (True, 1)])
def test_no_term_without_a_number_and_a_time(store: StateStore, term: Any, ttl_ms: int) -> None:
    with pytest.raises(ValueError, match="must be an int from 1"):
        store.begin_term(term, ttl_ms)
    assert store.previous_ttl_ms is None


# Invalidations


@pytest.mark.parametrize("batch", [[1], [4], [3, 3], [3, 5], [4, 3], [2]])
def test_numbers_come_in_succession_or_nothing_changes(store: StateStore, batch: list[int]) -> None:
    store.invalidate([made(1), made(2)])
    before = seen(store)
    with pytest.raises(ValueError, match="comes where"):
        store.invalidate([made(number, selector=Selector(tenant="other")) for number in batch], audit=[did()])
    assert seen(store) == before


def test_the_head_never_falls(stores: Stores) -> None:
    store = stores.store
    store.invalidate([made(1), made(2), made(3)])
    store.forget([1, 2, 3])
    assert (store.held(), store.head) == ([], 3)
    store = stores.reopened(StateLimits(history=1))
    store.invalidate([made(4)], forget=[4])
    assert (numbers(store.page(None, 10)), store.head) == ([4], 4)
    assert stores.reopened().head == 4


def test_a_table_of_generations_becomes_what_it_was(stores: Stores) -> None:
    table = GenerationTable(budget=8)
    store = stores.store
    for number in range(1, 60):
        selector = table.coarser() or Selector(model=f"m{number % 9}", mm_hash=f"h{number}")
        table.apply(number, selector)
        held = {number for number, _ in table.invalidations()}
        table.compact()
        gone = held - {number for number, _ in table.invalidations()}
        store.invalidate([made(number, selector=selector)], forget=gone)
    assert 0 < len(table) < 20
    again = GenerationTable(budget=8)
    for number, selector in stores.reopened().held():
        again.apply(number, selector)
    assert again.invalidations() == table.invalidations()
    assert again.head == table.head == store.head


def test_each_is_complete_by_itself_and_once(store: StateStore) -> None:
    store.invalidate([made(1), made(2), made(3)])
    store.complete([3, 1], 7.0)
    store.complete([3, 3], 8.0)
    assert numbers(store.pending()) == [2]
    assert [known.completed_at for known in reversed(store.page(None, 10))] == [7.0, None, 7.0]
    assert [number for number, _ in store.held()] == [1, 2, 3]
    for wrong in ([0], [4], [2, 9], [True]):
        with pytest.raises(ValueError, match="number must be"):
            store.complete(wrong, 9.0)
        with pytest.raises(ValueError, match="number must be"):
            store.forget(wrong)
    assert numbers(store.pending()) == [2]


def test_what_is_forgotten_stays_as_history_until_there_is_too_much(stores: Stores) -> None:
    store = stores.reopened(StateLimits(history=3))
    store.invalidate([made(number) for number in range(1, 9)])
    store.forget([1, 2, 4])
    store.forget([1])
    assert [number for number, _ in store.held()] == [3, 5, 6, 7, 8]
    assert numbers(store.page(None, 10)) == [8, 7, 6, 5, 4, 3, 2, 1]
    store.complete([4], 5.0)
    store.forget([6, 7])
    assert numbers(store.page(None, 10)) == [8, 7, 6, 5, 4, 3]
    store.complete([1, 4], 9.0)  # of which one is gone
    assert store.invalidation(1) is None
    forgotten = store.invalidation(4)
    assert forgotten is not None
    assert forgotten.completed_at == 5.0
    assert numbers(store.pending()) == [3, 5, 6, 7, 8]


def test_pages_go_from_the_newest_to_the_oldest(store: StateStore) -> None:
    store.invalidate([made(number) for number in range(1, 8)], forget=[2, 5])
    pages = []
    before = None
    while page := store.page(before, 3):
        pages.append(numbers(page))
        before = page[-1].number
    assert pages == [[7, 6, 5], [4, 3, 2], [1]]
    for limit in (0, 1001, True):
        with pytest.raises(ValueError, match="limit"):
            store.page(None, limit)
    with pytest.raises(ValueError, match="before"):
        store.page(1 << 63, 1)
    with pytest.raises(ValueError, match="number"):
        store.invalidation(0)


def test_a_request_that_is_repeated_is_found_and_not_made_again(stores: Stores) -> None:
    store = stores.store
    store.invalidate([made(1, idempotency_key="k1"), made(2), made(3)])
    store = stores.reopened()
    found = store.by_idempotency_key("k1")
    assert found is not None
    assert found.number == 1
    assert store.by_idempotency_key("k2") is None
    for batch in (
        [made(4, idempotency_key="k1")],
        [made(4, idempotency_key="k2"), made(5, idempotency_key="k2")],
    ):
        with pytest.raises(ValueError, match="idempotency key 'k"):
            store.invalidate(batch)
    assert store.head == 3
    for key in ("", "x" * 129, "a\nb"):
        with pytest.raises(ValueError, match="idempotency_key"):
            store.by_idempotency_key(key)


def test_a_new_one_is_not_complete(store: StateStore) -> None:
    with pytest.raises(ValueError, match="complete before it was made"):
        store.invalidate([made(1, completed_at=2.0)])


def test_more_are_not_held_than_allowed(stores: Stores) -> None:
    store = stores.reopened(StateLimits(max_held=3))
    store.invalidate([made(1), made(2), made(3)])
    with pytest.raises(StateFull, match="more than 3"):
        store.invalidate([made(4)], audit=[did()])
    assert (store.head, store.audit(None, 1)) == (3, [])
    store.invalidate([made(4), made(5)], forget=[1, 1, 4])
    assert [number for number, _ in store.held()] == [2, 3, 5]
    store = stores.reopened(StateLimits(max_held=1))
    store.forget([2])
    with pytest.raises(StateFull):
        store.invalidate([made(6)])


@pytest.mark.parametrize(
    "values",
    [
        {"number": 0},
        {"number": 1 << 63},
        {"number": True},
        {"selector": {"model": "m"}},
        {"reason": "x" * 513},
        {"reason": "two\nlines"},
        {"reason": None},
        {"actor": ""},
        {"actor": "x" * 129},
        {"actor": "\ud800"},
        {"at": -1.0},
        {"at": math.nan},
        {"at": math.inf},
        {"at": 1e12},
        {"at": "now"},
        {"idempotency_key": ""},
        {"idempotency_key": "x" * 129},
        {"completed_at": -1},
    ],
)
def test_an_invalidation_is_checked_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=name):
        made(**{"number": 1, **values})


def test_the_largest_values_come_back_as_they_are(stores: Stores) -> None:
    largest = made(1, reason="ä" * 512, actor="ö" * 128, at=-0.0, idempotency_key="~" * 128)
    record = did("x" * 64, actor="y" * 128, role="z" * 32, outcome="é" * 512, detail={"n": (1 << 64) - 1, "x": -0.0})
    stores.store.invalidate([largest], audit=[record])
    stores.store.complete([1], 5)
    store = stores.reopened()
    assert store.page(None, 1) == [
        made(1, reason="ä" * 512, actor="ö" * 128, at=0, idempotency_key="~" * 128, completed_at=5.0)
    ]
    assert store.audit(None, 1) == [(1, record)]


# Scopes


def test_scopes_are_remembered_once(stores: Stores) -> None:
    store = stores.store
    store.add_scopes([scope("a"), scope("b"), scope("a")])
    store.add_scopes(iter([scope("b"), scope("c")]))
    store.add_scopes([])
    expected = {scope(model).digest: scope(model) for model in "abc"}
    assert store.scopes() == expected
    store = stores.reopened(StateLimits(max_scopes=4))
    with pytest.raises(StateFull, match="more than 4"):
        store.add_scopes([scope("d"), scope("e")])
    assert store.scopes() == expected
    store.add_scopes([scope("a"), scope("d")])
    assert set(store.scopes()) == {*expected, scope("d").digest}


# Pins


def test_pins_are_put_changed_and_dropped_and_no_id_comes_twice(stores: Stores) -> None:
    store = stores.store
    assert (store.last_pin, store.pins()) == (0, [])
    store.change_pins([pinned(1), pinned(2), pinned(3)])
    store.change_pins([pinned(2, until=5.0), pinned(4)], [3, 3, 1], audit=[did("pin")])
    store = stores.reopened()
    assert (store.last_pin, store.pins()) == (4, [pinned(2, until=5.0), pinned(4)])
    assert [record.action for _, record in store.audit(None, 5)] == ["pin"]
    store.change_pins([], [4, 1])
    store = stores.reopened()
    assert (store.last_pin, store.pins()) == (4, [pinned(2, until=5.0)])
    with pytest.raises(ValueError, match="pin 6 comes where 5 does"):
        store.change_pins([pinned(6)])
    with pytest.raises(ValueError, match="number must be an int from 1 to 4"):
        store.change_pins([], [5])
    assert (store.last_pin, store.pins()) == (4, [pinned(2, until=5.0)])


def test_there_are_no_more_pins_than_allowed_and_those_there_can_be_changed(stores: Stores) -> None:
    store = stores.reopened(StateLimits(max_pins=2))
    store.change_pins([pinned(1), pinned(2)])
    with pytest.raises(StateFull, match="more than 2 pins"):
        store.change_pins([pinned(3)])
    assert store.last_pin == 2
    store.change_pins([pinned(2, until=7.0), pinned(3)], [1])
    assert store.pins() == [pinned(2, until=7.0), pinned(3)]


@pytest.mark.parametrize(
    "values", [{"until": -1.0}, {"until": math.nan}, {"actor": ""}, {"reason": "\n"}, {"selector": {}}]
)
def test_a_pin_is_checked_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=name):
        pinned(1, **values)


# Settings


def test_settings_are_set_replaced_and_taken_away(stores: Stores) -> None:
    store = stores.reopened(StateLimits(max_settings=2))
    store.set_setting("a", [1, 2.0, "x"])
    store.set_setting("b.c_1", False)
    with pytest.raises(StateFull, match="more than 2"):
        store.set_setting("c", 1)
    store.set_setting("a", 0)
    store.set_setting("b.c_1", None)
    store.set_setting("never", None)
    store.set_setting("c", {})
    store = stores.reopened()
    assert [store.setting(name) for name in ("a", "b.c_1", "c", "never")] == [0, None, {}, None]


@pytest.mark.parametrize("value", [b"", {"x": b"y"}, math.nan, "x" * 4095, (1,), {1: 2}, object(), "\ud800", 1 << 64])
def test_a_setting_is_small_plain_json(store: StateStore, value: object) -> None:
    with pytest.raises(ValueError):
        store.set_setting("a", value)
    assert store.setting("a") is None
    with pytest.raises(ValueError):
        did(detail={"value": value})


@pytest.mark.parametrize("name", ["", "A", "1", "a b", "a\n", "x" * 65, None])
def test_a_setting_has_a_name(store: StateStore, name: Any) -> None:
    with pytest.raises(ValueError, match="name"):
        store.set_setting(name, 1)
    with pytest.raises(ValueError, match="name"):
        store.setting(name)


# Audit


def test_the_audit_is_read_in_pages_by_action_and_actor(stores: Stores) -> None:
    store = stores.store
    store.invalidate([made(1)], audit=[did("invalidate"), did("pin", actor="bob")])
    store.record(did("pin"))
    store.record(did("invalidate", actor="bob"))
    store = stores.reopened()
    assert [number for number, _ in store.audit(None, 10)] == [4, 3, 2, 1]
    assert [number for number, _ in store.audit(4, 2)] == [3, 2]
    assert [number for number, _ in store.audit(None, 10, action="pin")] == [3, 2]
    assert [number for number, _ in store.audit(None, 10, actor="bob")] == [4, 2]
    assert store.audit(4, 10, action="pin", actor="bob") == [(2, did("pin", actor="bob"))]
    assert store.audit(None, 10, actor="carol") == []
    for wrong in ({"action": ""}, {"actor": "\ud800"}, {"limit": 0}, {"before": 0}):
        with pytest.raises(ValueError):
            store.audit(**{"before": None, "limit": 1, **wrong})


def test_the_audit_keeps_the_newest_and_no_id_comes_twice(stores: Stores) -> None:
    store = stores.reopened(StateLimits(audit_rows=3))
    for number in range(1, 6):
        store.record(did(detail={"number": number}))
    store.invalidate([], audit=[did("a"), did("b")])
    assert [number for number, _ in store.audit(None, 10)] == [7, 6, 5]
    store = stores.reopened(StateLimits(audit_rows=1))
    store.record(did())
    assert [number for number, _ in store.audit(None, 10)] == [8]


@pytest.mark.parametrize(
    "values",
    [{"at": -1}, {"actor": ""}, {"role": "x" * 33}, {"action": "x" * 65}, {"outcome": "x" * 513}, {"detail": [1]}],
)
def test_an_audit_record_is_checked_by_name(values: dict[str, Any]) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=name):
        AuditRecord(**{"at": 1.0, "actor": "a", "role": "r", "action": "a", "detail": {}, "outcome": "o", **values})


# Lifecycle


CALLS: list[Callable[[StateStore], object]] = [
    lambda store: store.begin_term(99, 1),
    lambda store: store.settle_terms(),
    lambda store: store.invalidate([made(store.head + 1)]),
    lambda store: store.complete([1], 1.0),
    lambda store: store.forget([1]),
    lambda store: store.held(),
    lambda store: store.pending(),
    lambda store: store.invalidation(1),
    lambda store: store.page(None, 1),
    lambda store: store.by_idempotency_key("k"),
    lambda store: store.add_scopes([scope("new")]),
    lambda store: store.scopes(),
    lambda store: store.setting("a"),
    lambda store: store.set_setting("a", 1),
    lambda store: store.record(did()),
    lambda store: store.audit(None, 1),
]


def test_nothing_is_done_after_close(store: StateStore) -> None:
    filled(store)
    assert store.still_owner()
    store.close()
    store.close()
    assert not store.still_owner()
    assert store.head == 3
    for call in CALLS:
        with pytest.raises(LifecycleError, match="closed"):
            call(store)


@pytest.mark.parametrize("name", ["history", "max_held", "max_scopes", "max_settings", "max_pins", "audit_rows"])
def test_a_limit_is_a_number_of_rows(name: str) -> None:
    for wrong in (0, 10_000_001, 1.5):
        with pytest.raises(ValueError, match=name):
            StateLimits(**{name: wrong})


def test_other_threads_read_while_one_writes(store: StateStore) -> None:
    store.invalidate([made(1), made(2)], audit=[did()])
    over = threading.Event()
    faults: list[BaseException] = []

    def read() -> None:
        try:
            while not over.is_set():
                (newest, *_) = store.page(None, 5)
                assert newest.number <= store.head
                assert len(store.held()) % 2 == 0, "whole batches"
                assert store.audit(None, 5)
                assert store.still_owner()
        except BaseException as error:  # noqa: BLE001 - a test that hides nothing
            faults.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(3, 41, 2):
        store.invalidate([made(number), made(number + 1)], audit=[did()])
    over.set()
    for reader in readers:
        reader.join()
    assert faults == []
    assert numbers(store.page(None, 1)) == [40]
