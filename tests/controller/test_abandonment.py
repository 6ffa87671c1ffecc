"""Names that are of no use: a dead writer holds them, or what lies there is corrupt. Each gets another, in a bound."""

from __future__ import annotations

import msgspec
import pytest
from controller_driver import SCOPE, TERM, World
from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.messages import (
    Abandon,
    Abandoned,
    AbandonReason,
    CommitStatus,
    Granted,
    Hit,
    MalformedMessage,
    Unclaimed,
    decode_from_client,
    encode,
)
from mmcache.controller.abandonments import Abandonments
from mmcache.key import MM_HASH_MAX_BYTES
from mmcache.selector import Selector

EXACTLY_A = Selector.of(SCOPE, "a")


def test_a_name_that_a_dead_writer_holds_is_invalidated_alone_and_whoever_waits_asks_again() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    other = encoder.claim("b")
    waiter.acquire("a")
    encoder.abandon("a", token=token)
    [push] = waiter.pushes()
    assert push.invalidations == [(1, EXACTLY_A)]
    assert waiter.resolved() == [(1, 0, Unclaimed("invalidated"))]
    assert world.stats("claims", "holds", "abandon.held", "invalidation") == (1, 0, 1, 1)
    [granted] = waiter.acquire("a")
    assert isinstance(granted, Granted)
    assert granted.generation == 1
    assert waiter.commit("a", tokens=[granted.token], generation=1) == [CommitStatus.STORED]
    assert encoder.renew(token, other) == [token]


def test_who_abandons_and_why_is_written_down() -> None:
    world = World()
    client = world.client("reader")
    client.abandon("a")
    [written] = world.durable
    [asked] = written.asked
    assert (asked.selector, asked.actor, asked.idempotency, asked.role) == (EXACTLY_A, "reader", "", "")
    assert asked.reason == "abandoned: what the store has under the name is not the entry"


def test_a_corrupt_entry_is_promised_no_more_and_computed_anew() -> None:
    world = World()
    reader, other = world.client("reader"), world.client("other")
    reader.put("a", "b")
    reader.abandon("a")
    [granted, hit] = other.acquire("a", "b")
    assert isinstance(granted, Granted)
    assert granted.generation == 1
    assert isinstance(hit, Hit)
    assert world.stats("abandon.corrupt") == (1,)


def test_what_several_find_to_be_of_no_use_is_invalidated_once() -> None:
    world = World()
    clients = [world.client(f"reader {number}") for number in range(3)]
    for client in clients[:2]:
        client.abandon("a", mm_hashes=["a"])
    message = encode(Abandon(TERM, clients[2].session, [Abandoned(SCOPE, "a", 1, 0, AbandonReason.CORRUPT)] * 2))
    for _ in range(2):  # both before anything is written
        world.deliver(world.core.handle(clients[2].peer, decode_from_client(message), world.now))
    world.deliver(world.write())
    assert world.stats("invalidation", "abandon.corrupt", "abandon.repeated", "abandon.stale") == (2, 2, 4, 2)


def test_nobody_gets_a_claim_on_a_name_that_is_about_to_be_another() -> None:
    world = World()
    reader = world.client("reader")
    reader.put("a")
    abandon = Abandon(TERM, reader.session, [Abandoned(SCOPE, "a", 0, 0, AbandonReason.CORRUPT)])
    effects = world.core.handle(reader.peer, abandon, world.now)
    effects += world.core.handle(reader.peer, reader.acquire_message("a", "b"), world.now)
    world.deliver(effects + world.write())
    acquired, _ = reader.inbox
    assert acquired.results[0] == Unclaimed("invalidated")  # type: ignore[union-attr]
    assert isinstance(acquired.results[1], Granted)  # type: ignore[union-attr]


def test_a_dead_writer_is_believed_in_only_when_told_by_who_has_the_claim() -> None:
    world = World()
    encoder, other = world.client("encoder"), world.client("other")
    token, another = encoder.claim("a"), encoder.claim("b")
    for client, claim in ((other, token), (encoder, another), (encoder, 99)):
        client.abandon("a", token=claim)
    encoder.tell(Abandon(TERM, encoder.session, [Abandoned(SCOPE, "a", 0, 0, AbandonReason.HELD)]))
    encoder.abandon("a", 5, token=token)
    assert world.stats("abandon.stale", "invalidation", "claims") == (5, 0, 2)


def test_readers_that_find_every_entry_corrupt_cause_no_endless_series_of_invalidations() -> None:
    """As broken ones do: each new name is corrupt to them as well."""
    world = World(max_abandonments=3, abandonment_ms=1000, ttl_ms=60_000)
    reader, generation = world.client("reader"), 0
    for _ in range(100):
        generation = world.core.stats()["head"]
        reader.abandon("a", generation)
    assert world.stats("head", "abandon.corrupt", "abandon.refused") == (3, 3, 97)
    world.advance(10.0)
    for _ in range(100):
        reader.abandon("a", world.core.stats()["head"])
    assert world.stats("head") == (6,), "what was not used is not saved up beyond the bound"
    for _ in range(50):
        world.advance(0.1)
        reader.abandon("a", world.core.stats()["head"])
    assert world.stats("head") in [(10,), (11,)]


def test_beyond_the_bound_a_dead_writers_name_is_held_for_its_time() -> None:
    world = World(max_abandonments=1, hold_ms=30_000, ttl_ms=60_000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.abandon("x")
    waiter.pushes()
    token = encoder.claim("a")
    waiter.acquire("a")
    encoder.abandon("a", token=token)
    assert waiter.resolved() == [(1, 0, Unclaimed("held"))]
    assert waiter.acquire("a") == [Unclaimed("held")]
    assert world.stats("abandon.refused", "holds", "claims") == (1, 1, 0)
    world.advance(30.1)
    waiter.claim("a")


def test_where_nothing_can_be_written_a_dead_writers_name_is_held_for_its_time() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a")
    world.disk_full = True
    encoder.abandon("a", token=token)
    assert waiter.resolved() == [(1, 0, Unclaimed("held"))]
    assert world.stats("holds", "claims", "invalidation") == (1, 0, 0)
    token = encoder.claim("c")
    held = Abandon(TERM, encoder.session, [Abandoned(SCOPE, "c", 0, token, AbandonReason.HELD)])
    corrupt = Abandon(TERM, encoder.session, [Abandoned(SCOPE, "c", 0, 0, AbandonReason.CORRUPT)])
    for abandon in (held, corrupt):
        world.deliver(world.core.handle(encoder.peer, abandon, world.now))
    world.deliver(world.write())
    assert world.stats("holds", "claims") == (2, 0), "whoever else found it to be of no use"
    encoder.abandon("b")
    world.disk_full = False
    assert isinstance(waiter.acquire("b")[0], Granted), "nothing of it is awaited any more"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mm_hash", ""),
        ("mm_hash", "é" * (MM_HASH_MAX_BYTES // 2 + 1)),
        ("generation", -1),
        ("token", -1),
        ("reason", 3),
        ("reason", "held"),
    ],
)
def test_what_cannot_be_abandoned_is_no_message(field: str, value: object) -> None:
    fields = {"scope": SCOPE, "mm_hash": "a", "generation": 0, "token": 0, "reason": 1, field: value}
    frame = msgspec.msgpack.encode([16, 1, 1, [list(fields.values())]])
    with pytest.raises(MalformedMessage):
        decode_from_client(frame)
    good = [SCOPE, "a", 0, 0, 1]
    assert isinstance(decode_from_client(msgspec.msgpack.encode([16, 1, 1, [good]])), Abandon)
    with pytest.raises(MalformedMessage, match="4096"):
        decode_from_client(msgspec.msgpack.encode([16, 1, 1, [good] * 4097]))


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(0, 20)), max_size=30), st.integers(1, 5))
def test_in_no_span_of_time_are_there_more_than_the_bound(asked: list[tuple[float, int]], at_once: int) -> None:
    bound, now = Abandonments(at_once=at_once, every_ms=2000), 50.0
    made: list[float] = []
    for pause, count in asked:
        now += pause
        made += [now for _ in range(count) if bound.may(now)]
    for first, began in enumerate(made):
        for last in range(first, len(made)):
            assert last - first + 1 <= at_once + (made[last] - began) / 2.0 + 1e-6
    now += 2.0 * at_once + 0.001  # for what sums of times are rounded by
    assert [bound.may(now) for _ in range(at_once + 1)] == [True] * at_once + [False]
