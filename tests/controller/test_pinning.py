"""Pins, as sessions ask for them: what they keep, how much of it, and until when."""

from __future__ import annotations

import itertools
import math
import time

import pytest
from controller_driver import LINEAGE, SCOPE, TERM, Client, World
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mmcache.control.messages import (
    Commit,
    CommitGroup,
    Commitment,
    Invalidate,
    Pin,
    PinAnswer,
    PinnedKeys,
    PinSubject,
    Refused,
    Unpin,
)
from mmcache.controller.durable import Past
from mmcache.controller.pinned import PinnedEntries
from mmcache.controller.pins import MAX_TTL_S, Pins
from mmcache.controller.pins import Pin as PinRow
from mmcache.controller.renewals import Renewals
from mmcache.key import EmbeddingKey, Scope, mm_digest
from mmcache.selector import Selector
from mmcache.store.base import Outcome

OTHER = Scope("default", "whisper", "v1", None, "audio")
CAPACITY = 1_000_000


def answered(client: Client, message: Pin | Unpin) -> PinAnswer:
    """The answer, which comes once what matches was counted."""
    client.tell(message)
    client.world.advance(0.0)
    (answer,) = [one for one in client.inbox if isinstance(one, PinAnswer | Refused)]
    client.inbox.remove(answer)
    assert isinstance(answer, PinAnswer)
    return answer


def subject(*selectors: Selector) -> PinSubject:
    """A selector, or keys."""
    if len(selectors) == 1 and len(selectors[0].fields()) < 6:
        return PinSubject(selectors[0], [])
    keys = [selector.key() for selector in selectors]
    return PinSubject(None, [PinnedKeys(key.scope, [key.mm_hash]) for key in keys])


def pin(client: Client, *selectors: Selector, ttl_s: float = 100.0, reason: str = "") -> PinAnswer:
    request = next(client.requests)
    return answered(client, Pin(TERM, client.session, request, subject(*selectors), round(ttl_s * 1000), reason))


def unpin(client: Client, *selectors: Selector, ids: tuple[int, ...] = ()) -> list[int]:
    request = next(client.requests)
    answer = answered(client, Unpin(TERM, client.session, request, list(ids), subject(*selectors)))
    assert not answer.refusal
    return answer.ids


def put(client: Client, scope: Scope, *mm_hashes: str, nbytes: int = 5000, generation: int = 0) -> None:
    entries = [Commitment(mm_hash, generation, 0, nbytes, 1.0, b"") for mm_hash in mm_hashes]
    client.ask(Commit(TERM, client.session, next(client.requests), [CommitGroup(scope, entries)]))


def invalidate(client: Client, selector: Selector) -> None:
    client.ask(Invalidate(TERM, client.session, next(client.requests), selector, "", ""))
    client.world.advance(0.0)


def pinned(world: World) -> PinnedEntries:
    return world.core.pinning.pinned


def names(world: World) -> set[bytes]:
    return set(pinned(world)._nbytes_of)


def name(scope: Scope, mm_hash: str) -> bytes:
    return scope.digest + mm_digest(mm_hash)


def world_with_room(past: Past = Past(LINEAGE), capacity: int = CAPACITY, **limits: int) -> World:  # noqa: B008
    world = World(past, ttl_ms=86_400_000, **limits)
    pinned(world).set_capacity(capacity)
    world.advance(0.0)
    return world


def test_what_is_pinned_is_what_matches_now_and_later_until_the_time_is_over() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "a", "b")
    put(client, OTHER, "c")
    answer = pin(client, Selector(model=SCOPE.model), ttl_s=60.0)
    assert (answer.refusal, answer.ids, answer.entries, answer.nbytes, answer.left_ms) == ("", [1], 2, 10_000, 60_000)
    assert names(world) == {name(SCOPE, "a"), name(SCOPE, "b")}
    put(client, SCOPE, "later", nbytes=77)
    assert names(world) == {name(SCOPE, "a"), name(SCOPE, "b"), name(SCOPE, "later")}
    assert world.stats("pins", "entries_pinned", "bytes_pinned") == (1, 3, 10_077)
    client.report("a", pinned(world)._directory.entry(name(SCOPE, "a")).hit.revision)  # type: ignore[union-attr]
    assert name(SCOPE, "a") not in names(world)
    world.advance(59.0)
    assert len(names(world)) == 2
    world.advance(1.1)
    assert world.stats("pins", "entries_pinned", "bytes_pinned") == (0, 0, 0)
    assert [list(todo.over) for todo in world.durable if todo.over] == [[1]]


def test_the_same_selector_is_the_same_pin_for_longer_and_never_for_less() -> None:
    world = world_with_room()
    client, selector = world.client("c"), Selector(lora=None)
    assert pin(client, selector, ttl_s=60.0).ids == [1]
    shorter = pin(client, selector, ttl_s=10.0)
    assert (shorter.ids, shorter.left_ms) == ([1], 60_000)
    longer = pin(client, selector, ttl_s=90.0)
    assert (longer.ids, longer.left_ms) == ([1], 90_000)
    assert pin(client, Selector(modality="audio"), ttl_s=1.0).ids == [2]
    world.advance(80.0)
    assert world.stats("pins") == (1,)
    world.advance(11.0)
    assert world.stats("pins") == (0,)
    assert pin(client, selector).ids == [3], "no id comes twice"


def test_pins_end_by_id_or_by_exactly_their_selector() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "a", "b")
    wide, narrow = Selector(model=SCOPE.model), Selector.of(SCOPE, "a")
    assert [pin(client, one).ids for one in (wide, narrow)] == [[1], [2]]
    assert unpin(client, Selector(model=SCOPE.model, lora=None), ids=(7,)) == []
    assert unpin(client, wide) == [1]
    assert names(world) == {name(SCOPE, "a")}
    assert unpin(client, narrow, ids=(2, 2)) == [2]
    assert names(world) == set()


def test_more_than_a_share_of_the_store_is_not_pinned_and_the_figures_are_told() -> None:
    world = world_with_room(capacity=40_000)
    client = world.client("c")
    put(client, SCOPE, "a", "b", "c")
    assert pin(client, Selector(mm_hash="a")).ids == [1]
    refused = pin(client, Selector(tenant="default"))
    for figure in (
        "15,000 bytes would be pinned",
        "3 entries",
        "5,000 bytes are pinned already",
        "At most 10,000",
        "40,000",
    ):
        assert figure in refused.refusal
    assert (refused.ids, world.stats("pins", "pin.refused")) == ([], (1, 1))
    assert pin(client, Selector(mm_hash="b")).ids == [2]
    assert pin(client, Selector(mm_hash="not there yet")).ids == [3]
    put(client, SCOPE, "not there yet")
    assert world.stats("bytes_pinned", "pin.no_room") == (10_000, 1)


def test_before_the_capacity_is_known_nothing_is_pinned_and_what_was_is_once_it_is() -> None:
    world = World(Past(LINEAGE, pins=[PinRow(4, Selector(model=SCOPE.model), 2000.0, "", "n")], last_pin=6))
    client = world.client("c")
    put(client, SCOPE, "a")
    assert "not known yet" in pin(client, Selector(model="m")).refusal
    assert names(world) == set()
    pinned(world).set_capacity(CAPACITY)
    world.advance(0.0)
    assert names(world) == {name(SCOPE, "a")}
    assert pin(client, Selector(model="m")).ids == [7]


def test_a_pin_whose_end_was_not_written_ends_again_beside_a_later_one_of_the_same_selector() -> None:
    selector = Selector(model=SCOPE.model)
    world = World(
        Past(LINEAGE, pins=[PinRow(1, selector, 900.0, "", "n"), PinRow(2, selector, 2000.0, "", "n")], last_pin=2)
    )
    client = world.client("c")
    pinned(world).set_capacity(CAPACITY)
    put(client, SCOPE, "a")
    world.advance(0.0)
    assert (world.stats("pins"), names(world)) == ((1,), {name(SCOPE, "a")})
    assert pin(client, selector).ids == [2], "the later one is found by its selector"
    assert unpin(client, selector) == [2]
    world.advance(0.0)
    assert (world.stats("pins"), names(world)) == ((0,), set())


def test_when_the_store_becomes_smaller_so_does_what_is_pinned() -> None:
    world = world_with_room(capacity=100_000)
    client = world.client("c")
    put(client, SCOPE, "a", "b", "c", "d")
    pin(client, Selector(model=SCOPE.model))
    pinned(world).set_capacity(50_000)
    world.advance(0.0)
    assert len(names(world)) == 2
    pinned(world).set_capacity(100_000)
    world.advance(0.0)
    assert len(names(world)) == 4


def test_an_invalidation_beats_a_pin_and_what_is_published_then_is_pinned_again() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "a", "b")
    pin(client, Selector(model=SCOPE.model))
    invalidate(client, Selector(mm_hash="a"))
    assert names(world) == {name(SCOPE, "b")}
    put(client, SCOPE, "a", generation=1, nbytes=123)
    assert world.stats("bytes_pinned") == (5123,)
    client.ask(Invalidate(TERM, client.session, next(client.requests), Selector(mm_hash="b"), "", ""))
    put(client, SCOPE, "b", generation=2, nbytes=200)  # in the place of what no sweep has come to
    assert world.stats("bytes_pinned", "entries_pinned") == (323, 2)


def test_a_large_directory_is_looked_at_in_pieces_while_others_are_served() -> None:
    world = world_with_room(capacity=1 << 40)
    client, other = world.client("c"), world.client("d")
    for start in range(0, 6000, 3000):
        put(client, SCOPE, *(f"{number}" for number in range(start, start + 3000)))
    request = next(client.requests)
    client.tell(Pin(TERM, client.session, request, subject(Selector(model=SCOPE.model)), 1000, ""))
    assert client.inbox == []
    assert other.lookup("17") != [None]
    assert client.inbox == []
    world.advance(0.0)
    (answer,) = client.inbox
    assert isinstance(answer, PinAnswer)
    assert (answer.entries, len(names(world))) == (6000, 6000)


def test_without_room_to_write_it_is_refused_and_nothing_is_pinned() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "a")
    world.disk_full = True
    assert pin(client, Selector(model=SCOPE.model)).refusal == "the disk is full"
    world.disk_full = False
    assert (world.stats("pins"), names(world)) == ((0,), set())
    assert pin(client, Selector(model=SCOPE.model)).ids == [1]


def test_an_invalidation_that_comes_with_it_is_written_by_itself() -> None:
    world = world_with_room()
    client = world.client("c")
    messages = [
        Pin(TERM, client.session, 90, subject(Selector(model="m")), 1000, ""),
        Invalidate(TERM, client.session, 91, Selector(model="m"), "", ""),
    ]
    effects = [effect for one in messages for effect in world.core.handle(client.peer, one, world.now)]
    effects += world.core.tick(world.now + 0.1)
    world.deliver(effects + world.write())
    assert [(bool(todo.asked), todo.pins is not None) for todo in world.durable[-2:]] == [(True, False), (False, True)]


def test_who_asks_too_much_at_once_is_refused() -> None:
    world = world_with_room(max_pins=2)
    client = world.client("c")
    keys = [Selector.of(SCOPE, mm_hash) for mm_hash in "abc"]
    assert "at most 2" in pin(client, *keys).refusal
    assert pin(client, *keys[:2]).ids == [1, 2]
    for _ in range(65):
        client.tell(Pin(TERM, client.session, next(client.requests), subject(keys[0]), 1000, ""))
    assert isinstance(client.inbox[0], Refused)
    assert "overloaded" in client.inbox[0].reason
    world.advance(0.0)
    assert len(client.inbox) == 65


@pytest.mark.parametrize(
    ("what", "word"),
    [
        (PinSubject(None, []), "neither a selector nor keys"),
        (PinSubject(Selector(), []), "every entry"),
        (PinSubject(Selector(model="m"), [PinnedKeys(SCOPE, ["a"])]), "each must name one key"),
        (subject(Selector.of(SCOPE, "a"), Selector.of(SCOPE, "a")), "twice"),
        (PinSubject(None, [PinnedKeys(SCOPE, ["a"] * 4096), PinnedKeys(OTHER, ["a"])]), "more than 4096 keys"),
    ],
)
def test_what_is_no_pin_is_refused(what: PinSubject, word: str) -> None:
    world = world_with_room()
    client = world.client("c")
    client.tell(Pin(TERM, client.session, 9, what, 1000, ""))
    (refused,) = client.inbox
    assert isinstance(refused, Refused)
    assert (refused.request, word in refused.reason) == (9, True)


def test_a_session_that_is_over_hears_nothing_and_its_pin_is_made() -> None:
    world = world_with_room()
    client = world.client("c")
    client.tell(Pin(TERM, client.session, 9, subject(Selector(model="m")), 1000, ""))
    client.goodbye()
    world.advance(0.0)
    assert (client.inbox, world.stats("pins")) == ([], (1,))


def test_what_the_store_lost_is_forgotten_and_what_nobody_knows_is_due_again() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "there", "lost", "unknown", "again", "computed")
    pin(client, Selector(model=SCOPE.model))
    kept = pinned(world)
    due = kept.take_due(world.now, 10)
    items = ("there", "lost", "unknown", "again", "computed")
    by_name = {one.name: one for one in due}
    due = [by_name[name(SCOPE, item)] for item in items]
    assert len(by_name) == len(items)
    assert kept.take_due(world.now, 10) == []
    put(client, SCOPE, "again")  # which is news of it
    world.core._entries.claims.token_of = lambda one: 1 if one == name(SCOPE, "computed") else None  # type: ignore[method-assign]
    lost = Outcome.NOT_FOUND
    assert kept.renewed(due, [Outcome.OK, lost, Outcome.UNAVAILABLE, lost, lost]) is False
    assert names(world) == {name(SCOPE, item) for item in ("there", "unknown", "again", "computed")}
    assert world.stats("pin.renewed", "pin.lost", "pin.not_renewed") == (1, 1, 1)
    assert [one.name for one in kept.take_due(world.now, 10)] == [name(SCOPE, "unknown")]
    kept.not_renewed(due)
    assert len(kept.take_due(world.now, 10)) == 4, "of what is there still"
    with pytest.raises(ValueError, match="outcomes: 1 for 5"):
        kept.renewed(due, [Outcome.OK])


def test_what_was_invalidated_gets_no_new_lease() -> None:
    world = world_with_room()
    client = world.client("c")
    put(client, SCOPE, "a", "b")
    pin(client, Selector(model=SCOPE.model))
    client.ask(Invalidate(TERM, client.session, next(client.requests), Selector(mm_hash="a"), "", ""))
    assert [one.name for one in pinned(world).take_due(world.now, 10)] == [name(SCOPE, "b")], "before any sweep"


@given(
    names=st.integers(0, 12),
    most=st.integers(1, 5),
    failures=st.lists(st.booleans(), min_size=1, max_size=8),
    gone=st.sets(st.integers(0, 12)),
)
def test_each_name_is_due_at_once_and_then_every_so_often(
    names: int, most: int, failures: list[bool], gone: set[int]
) -> None:
    """A thread that takes what is due, a batch at a time, and tells of some batches that nothing came of them."""
    renewals, now = Renewals(8.0), 0.0
    renewed: dict[bytes, float] = {}
    for number in range(names):
        renewals.add(b"%d" % number)
    fails = itertools.cycle([*failures, False])
    for turn in range(40):
        now = turn * 1.0
        if turn == 10:
            for number in gone:
                renewals.discard(b"%d" % number)
                renewed.pop(b"%d" % number, None)
        while taken := renewals.take(now, most):
            assert len(taken) <= most
            assert all(now - renewed.get(one, -math.inf) >= 8.0 for one in taken)
            if next(fails):
                renewals.failed(taken)
                continue
            renewed.update(dict.fromkeys(taken, now))
        assert all(now - at <= 8.0 for at in renewed.values())
        left = names if turn < 10 else sum(number not in gone for number in range(names))
        assert len(renewed) == len(renewals) == left


def test_to_ask_whether_a_key_is_pinned_takes_microseconds() -> None:
    """Not by a clock: it looks at one dict for each set of fields, whatever the number of pins."""
    pins = Pins(10_000, [PinRow(n, Selector.of(SCOPE, f"{n}"), 1.0, "", "n") for n in range(1, 10_001)], 10_000)
    digests = [mm_digest(f"{number}") for number in range(0, 20_000, 2)]
    began = time.perf_counter()
    assert sum(pins.covers(SCOPE, digest) for digest in digests) == 5_000
    assert time.perf_counter() - began < 5.0, "which 10,000 times 10,000 comparisons would take"


MODELS = {"a": SCOPE, "b": OTHER}
ITEMS = ["x", "y", "z"]
selectors = st.sampled_from(
    [
        Selector(model=SCOPE.model),
        Selector(lora=None),
        Selector(tenant="nobody"),
        *(Selector(mm_hash=item) for item in ITEMS),
        *(Selector.of(scope, item) for scope in MODELS.values() for item in ITEMS),
    ]
)


class AgainstModel(RuleBasedStateMachine):
    """A dict of pins and one of entries say what is to be kept, whatever happens and however often it starts anew."""

    @initialize(roomy=st.booleans())
    def begin(self, roomy: bool) -> None:
        self.roomy = roomy
        self.capacity = 1 << 40 if roomy else 400
        self.pins: dict[Selector, tuple[int, float]] = {}
        self.entries: dict[bytes, tuple[EmbeddingKey, int]] = {}
        self.generations: dict[bytes, int] = {}
        self.rows: dict[int, PinRow] = {}
        self.last = 0
        self.world = world_with_room(capacity=self.capacity)
        self.client = self.world.client("c")
        self.seen = 0

    @rule(scope=st.sampled_from([*MODELS.values()]), item=st.sampled_from(ITEMS), nbytes=st.integers(1, 60))
    def publish(self, scope: Scope, item: str, nbytes: int) -> None:
        key = name(scope, item)
        put(self.client, scope, item, nbytes=nbytes, generation=self.generations.get(key, 0))
        if key not in self.entries:
            fields = {field: getattr(scope, field) for field in scope.__struct_fields__}
            self.entries[key] = (EmbeddingKey(**fields, mm_hash=item), nbytes)

    @rule(scope=st.sampled_from([*MODELS.values()]), item=st.sampled_from(ITEMS))
    def lose(self, scope: Scope, item: str) -> None:
        entry = pinned(self.world)._directory.entry(name(scope, item))
        if entry is not None:
            pinned(self.world)._directory.drop(name(scope, item), entry.hit.revision)
        self.entries.pop(name(scope, item), None)

    @rule(item=st.sampled_from(ITEMS))
    def invalidate(self, item: str) -> None:
        invalidate(self.client, Selector(mm_hash=item))
        (head,) = self.world.stats("head")
        for scope in MODELS.values():
            self.generations[name(scope, item)] = head
            self.entries.pop(name(scope, item), None)

    @rule(selector=selectors, ttl=st.integers(1, 50))
    def pin(self, selector: Selector, ttl: int) -> None:
        matching = {key: nbytes for key, (one, nbytes) in self.entries.items() if selector.matches(one)}
        before = names(self.world)
        new = sum(nbytes for key, nbytes in matching.items() if key not in before)
        room = self.capacity // 4 - pinned(self.world).nbytes
        answer = pin(self.client, selector, ttl_s=ttl)
        assert bool(answer.refusal) is (new > room)
        if answer.refusal:
            return
        known, until = self.pins.get(selector, (0, 0.0))
        self.last = max(self.last, known or self.last + 1)
        self.pins[selector] = known or self.last, max(until, self.world.now + ttl)
        assert answer.ids == [self.pins[selector][0]]
        assert (answer.entries, answer.nbytes) == (len(matching), sum(matching.values()))
        assert matching.keys() <= names(self.world)

    @rule(selector=selectors)
    def unpin(self, selector: Selector) -> None:
        known = self.pins.pop(selector, None)
        assert unpin(self.client, selector) == ([] if known is None else [known[0]])

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.world.advance(seconds)
        self.pins = {selector: pin for selector, pin in self.pins.items() if pin[1] > self.world.now}

    @rule(lost=st.booleans())
    def restart(self, lost: bool) -> None:
        self.take_rows()
        rows = sorted(self.rows.values())
        now = self.world.now
        held = list(self.world.core._invalidations.table.invalidations())
        head = self.world.core._invalidations.head
        past = Past(LINEAGE, head=head, held=held, scopes=[*MODELS.values()], pins=rows, last_pin=self.last)
        self.world = World(past, ttl_ms=86_400_000)
        self.world.now = now
        self.client = self.world.client("c")
        self.seen = 0
        pinned(self.world).set_capacity(self.capacity)
        entries, self.entries = self.entries, {}
        if lost:
            return
        for key, (one, nbytes) in entries.items():
            put(self.client, one.scope, one.mm_hash, nbytes=nbytes, generation=self.generations.get(key, 0))
            self.entries[key] = (one, nbytes)

    def take_rows(self) -> None:
        """What the state store has."""
        for todo in self.world.durable[self.seen :]:
            for over in todo.over:
                self.rows.pop(over, None)
            if todo.pins is not None:
                self.rows.update((pin.id, pin) for pin in todo.pins.put)
                for number in todo.pins.drop:
                    del self.rows[number]
        self.seen = len(self.world.durable)

    @invariant()
    def holds(self) -> None:
        self.world.advance(0.0)
        pins = self.world.core.pinning.pins
        assert {pin.selector: (pin.id, pin.until) for pin in pins.page(None, 100)} == self.pins
        self.take_rows()
        assert {row.selector: (row.id, row.until) for row in self.rows.values()} == self.pins
        covered = {
            key: nbytes
            for key, (one, nbytes) in self.entries.items()
            if any(selector.matches(one) for selector in self.pins)
        }
        found = names(self.world)
        assert found <= covered.keys()
        assert pinned(self.world).nbytes == sum(covered[key] for key in found) <= self.capacity // 4
        assert len(pinned(self.world).renewals) == len(found)
        if self.roomy:
            assert found == covered.keys()


AgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAgainstModel = AgainstModel.TestCase


def test_the_longest_time_is_that_of_the_messages() -> None:
    from mmcache.control.messages import MAX_PIN_MS

    assert MAX_TTL_S * 1000 == MAX_PIN_MS
