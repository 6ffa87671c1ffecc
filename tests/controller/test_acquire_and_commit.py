"""Who gets a claim, who waits, and what a commit does about both."""

from __future__ import annotations

import math

import msgspec
import pytest
from controller_driver import SCOPE, TERM, World, digests

from mmcache.control.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    Acquire,
    Acquired,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Granted,
    Hit,
    KeyGroup,
    Lookup,
    MalformedMessage,
    Refused,
    Resolved,
    Unclaimed,
    Waiting,
    decode_from_client,
    encode,
)
from mmcache.key import MM_HASH_MAX_BYTES, Scope
from mmcache.selector import Selector


def test_the_first_who_asks_computes_and_the_others_get_the_entry() -> None:
    world = World()
    encoder, other, third = world.client("encoder"), world.client("other"), world.client("third")
    token = encoder.claim("a")
    assert token > 0
    assert other.acquire("a") == [Waiting()]
    assert third.acquire("b", "a")[1] == Waiting()
    assert encoder.commit("a", tokens=[token]) == [CommitStatus.STORED]
    hit = Hit(0, 1, 5000, b"i")
    assert other.resolved() == [(1, 0, hit)]
    assert third.resolved() == [(1, 1, hit)]
    assert encoder.resolved() == []
    assert other.acquire("a") == [hit]
    assert world.stats("claims", "waiters", "entries") == (1, 0, 1)


def test_results_stand_in_the_order_of_the_digests_across_groups() -> None:
    world = World()
    client = world.client("c")
    client.put("a", "d")
    groups = [
        KeyGroup(SCOPE, digests("a", "b")),
        KeyGroup(Scope("other", "siglip", "v1", None, "image"), digests("a")),
        KeyGroup(SCOPE, digests("c", "d")),
    ]
    answer = client.ask(Acquire(TERM, client.session, 50, 0, groups))
    assert isinstance(answer, Acquired)
    assert [type(result) for result in answer.results] == [Hit, Granted, Granted, Granted, Hit]


def test_a_retried_acquire_gets_the_same_claim_with_the_time_that_is_left() -> None:
    world = World(claim_ms=10_000, ttl_ms=60_000)
    client = world.client("c")
    (first,) = client.acquire("a", request=9)
    world.advance(4.0)
    (again,) = client.acquire("a", request=9)
    assert isinstance(first, Granted)
    assert isinstance(again, Granted)
    assert (again.token, again.claim_ms) == (first.token, 6000)
    assert world.stats("claims") == (1,)


def test_a_retried_acquire_waits_once_and_keeps_its_place_and_deadline() -> None:
    world = World(ttl_ms=60_000)
    encoder, first, second = world.client("encoder"), world.client("first"), world.client("second")
    token = encoder.claim("a")
    assert first.acquire("a", request=3, wait_ms=2000) == [Waiting()]
    assert second.acquire("a", request=3, wait_ms=9000) == [Waiting()]
    world.advance(1.5)
    assert first.acquire("a", request=3, wait_ms=2000) == [Waiting()]
    assert world.stats("waiters") == (2,)
    world.advance(0.6)
    assert world.stats("waiters") == (1,)
    encoder.commit("a", tokens=[token])
    assert first.resolved() == []
    assert len(second.resolved()) == 1


def test_a_retry_that_lost_its_claim_meanwhile_waits_no_longer_than_the_rest_of_its_request() -> None:
    world = World(ttl_ms=60_000, claim_ms=4000)
    encoder, client = world.client("encoder"), world.client("c")
    token = encoder.claim("a")
    waiting, granted = client.acquire("a", "b", request=3, wait_ms=6000)
    assert (waiting, type(granted)) == (Waiting(), Granted)
    encoder.acquire("b")
    world.advance(3.0)
    encoder.renew(token)
    world.advance(1.1)  # b has passed to the encoder
    assert client.acquire("a", "b", request=3, wait_ms=6000) == [Waiting(), Waiting()]
    assert world.stats("waiters") == (2,)
    world.advance(2.0)
    assert world.stats("waiters") == (0,)


def test_a_retry_after_a_lost_resolution_tells_it_again() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a", request=4)
    encoder.goodbye()
    ((_, _, granted),) = waiter.resolved()
    assert isinstance(granted, Granted)
    assert granted.token != token
    assert waiter.acquire("a", request=4) == [granted]


def test_another_request_of_the_session_that_computes_waits_like_anyone() -> None:
    client = World().client("c")
    token = client.claim("a")
    assert client.acquire("a", request=8) == [Waiting()]
    client.commit("a", tokens=[token])
    assert [(request, position) for request, position, _ in client.resolved()] == [(8, 0)]


def test_a_key_twice_in_one_acquire_is_claimed_once() -> None:
    first, second = World().client("c").acquire("a", "a")
    assert isinstance(first, Granted)
    assert first == second


def test_a_key_twice_in_one_acquire_is_awaited_once_and_told_at_both_places() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.claim("a")
    for _ in range(2):
        assert waiter.acquire("a", "b", "a", request=2)[::2] == [Waiting(), Waiting()]
    assert world.stats("waiters") == (1,)
    encoder.goodbye()
    first, second = waiter.resolved()
    assert [first[:2], second[:2]] == [(2, 0), (2, 2)]
    assert isinstance(first[2], Granted)
    assert first[2] == second[2]


def test_who_does_not_wait_is_told_that_another_computes() -> None:
    world = World()
    world.client("encoder").claim("a")
    assert world.client("c").acquire("a", wait_ms=0) == [Unclaimed("claimed")]
    assert world.stats("waiters") == (0,)


def test_a_commit_without_a_claim_is_accepted_and_ends_the_claim_of_another() -> None:
    world = World()
    encoder, waiter, publisher = world.client("encoder"), world.client("waiter"), world.client("publisher")
    token = encoder.claim("a")
    waiter.acquire("a")
    publisher.put("a")
    assert [type(result) for _, _, result in waiter.resolved()] == [Hit]
    assert encoder.renew(token) == [token]
    assert encoder.commit("a", tokens=[token]) == [CommitStatus.DUPLICATE]
    assert world.stats("claims", "waiters", "entries") == (0, 0, 1)


def test_a_commit_after_its_claim_has_passed_on_is_accepted_and_ends_the_new_claim() -> None:
    world = World(claim_ms=1000)
    slow, heir, waiter = world.client("slow"), world.client("heir"), world.client("waiter")
    token = slow.claim("a")
    heir.acquire("a")
    waiter.acquire("a")
    world.advance(1.1)
    ((_, _, granted),) = heir.resolved()
    assert isinstance(granted, Granted)
    assert slow.commit("a", tokens=[token]) == [CommitStatus.STORED]
    assert len(waiter.resolved()) == 1
    assert heir.renew(granted.token) == [granted.token]
    assert heir.commit("a", tokens=[granted.token]) == [CommitStatus.DUPLICATE]


def test_a_retried_commit_changes_nothing_but_the_word() -> None:
    world = World()
    client = world.client("c")
    token = client.claim("a")
    assert client.commit("a", tokens=[token]) == [CommitStatus.STORED]
    assert client.commit("a", tokens=[token]) == [CommitStatus.DUPLICATE]
    assert world.stats("claims", "entries") == (0, 1)


def test_a_commit_of_an_older_generation_is_outdated() -> None:
    world = World()
    encoder = world.client("encoder")
    token = encoder.claim("a")
    encoder.invalidate(Selector(mm_hash="a"))
    assert encoder.commit("a", tokens=[token], generation=0) == [CommitStatus.OUTDATED]
    assert world.stats("entries") == (0,)


def test_a_commit_from_the_future_is_refused_and_the_next_waiter_computes() -> None:
    world = World()
    encoder, waiter, stranger = world.client("encoder"), world.client("waiter"), world.client("stranger")
    token = encoder.claim("a")
    waiter.acquire("a")
    assert stranger.commit("a", tokens=[token], generation=1) == [CommitStatus.REFUSED]
    assert waiter.resolved() == []
    assert encoder.commit("a", tokens=[token], generation=1) == [CommitStatus.REFUSED]
    assert [type(result) for _, _, result in waiter.resolved()] == [Granted]


def test_a_token_of_another_name_ends_no_claim() -> None:
    world = World()
    client = world.client("c")
    token, other = client.claim("a"), client.claim("b")
    assert client.commit("b", "c", tokens=[token, token], generation=1) == [CommitStatus.REFUSED] * 2
    assert client.renew(token, other) == []


def test_a_full_directory_refuses_and_releases_the_waiters() -> None:
    world = World(max_entries=1)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.put("full")
    token = encoder.claim("a")
    waiter.acquire("a")
    assert encoder.commit("full", "a", tokens=[0, token]) == [CommitStatus.DUPLICATE, CommitStatus.REFUSED]
    assert waiter.resolved() == [(1, 0, Unclaimed("no_room"))]
    assert world.stats("claims", "entries", "commit.refused") == (0, 1, 1)


def test_full_tables_leave_keys_unclaimed_and_are_counted() -> None:
    world = World(max_claims=2, max_waiters=3, max_waiters_per_session=2)
    encoder, one, two = world.client("encoder"), world.client("one"), world.client("two")
    assert [type(answer) for answer in encoder.acquire("a", "b", "c")] == [Granted, Granted, Unclaimed]
    assert one.acquire("a", "b", "c") == [Waiting(), Waiting(), Unclaimed("overloaded")]
    assert one.acquire("a") == [Unclaimed("overloaded")]
    assert two.acquire("a", "b") == [Waiting(), Unclaimed("overloaded")]
    assert world.stats("claims", "waiters", "acquire.overloaded") == (2, 3, 4)
    one.goodbye()
    assert two.acquire("b") == [Waiting()]


def test_more_keys_than_a_message_may_hold_are_refused_and_nothing_is_claimed() -> None:
    world = World()
    client = world.client("c")
    groups = [KeyGroup(SCOPE, digests("a")), KeyGroup(SCOPE, digests("b") * MAX_BATCH)]
    entries = [Commitment("b", 0, 0, 1, 0.0, b"")] * MAX_BATCH
    commit = Commit(TERM, client.session, 12, [CommitGroup(SCOPE, entries), CommitGroup(SCOPE, entries[:1])])
    for request in (Acquire(TERM, client.session, 10, 0, groups), Lookup(TERM, client.session, 11, groups), commit):
        answer = client.ask(request)
        assert isinstance(answer, Refused)
        assert answer.request == request.request
    assert world.stats("claims", "entries", "refused.batch") == (0, 0, 3)


def test_hits_that_do_not_fit_into_one_message_follow_in_others() -> None:
    world = World()
    client = world.client("c")
    names = [f"k{i}" for i in range(600)]
    client.put(*names[:200], info=bytes(4096))
    client.put(*names[200:400], info=bytes(4096))
    client.put(*names[400:], info=bytes(4096))
    effects = world.core.handle(client.peer, client.acquire_message(*names), world.now)
    assert max(len(encode(message)) for _, message in effects) <= MAX_MESSAGE_BYTES
    acquired, *rest = (message for _, message in effects)
    assert isinstance(acquired, Acquired)
    told = [i for i, result in enumerate(acquired.results) if isinstance(result, Hit)]
    for message in rest:
        assert isinstance(message, Resolved)
        told += [position for position, result in message.results if isinstance(result, Hit)]
    assert told == list(range(600))
    assert len(rest) >= 2


def test_an_answer_to_a_lookup_that_does_not_fit_is_refused() -> None:
    client = World().client("c")
    names = [f"k{i}" for i in range(300)]
    client.put(*names[:200], info=bytes(4096))
    client.put(*names[200:], info=bytes(4096))
    answer = client.ask(Lookup(TERM, client.session, 77, [KeyGroup(SCOPE, digests(*names))]))
    assert isinstance(answer, Refused)
    assert answer.request == 77


def test_one_commit_tells_each_waiting_request_in_one_message() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    names = [f"k{i}" for i in range(20)]
    tokens = [answer.token for answer in encoder.acquire(*names) if isinstance(answer, Granted)]
    waiter.acquire(*names)
    encoder.commit(*names, tokens=tokens)
    assert len(waiter.inbox) == 1
    assert [position for _, position, _ in waiter.resolved()] == list(range(20))


def test_lookup_tells_what_is_there_and_claims_nothing() -> None:
    world = World()
    client = world.client("c")
    client.put("a")
    assert client.lookup("b", "a") == [None, Hit(0, 1, 5000, b"i")]
    assert world.stats("claims") == (0,)


def test_a_missing_entry_is_dropped_only_at_the_revision_that_was_promised() -> None:
    world = World()
    client = world.client("c")
    client.put("a")
    (old,) = client.lookup("a")
    assert old is not None
    assert client.commit("a") == [CommitStatus.DUPLICATE]  # seen in the store again: the report is overtaken
    client.report("a", old.revision)
    (new,) = client.lookup("a")
    assert new is not None
    assert new.revision > old.revision
    client.report("a", new.revision)
    assert client.lookup("a") == [None]
    client.report("a", new.revision)
    assert isinstance(client.acquire("a")[0], Granted)
    assert world.stats("missing.dropped", "missing.stale", "entries") == (1, 2, 0)


def test_a_duplicate_leaves_what_the_first_said_of_the_entry() -> None:
    client = World().client("c")
    client.put("a", info=b"first")
    client.commit("a", info=b"second")
    (hit,) = client.lookup("a")
    assert hit is not None
    assert hit.info == b"first"


@pytest.mark.parametrize(
    ("field", "value"),
    [("mm_hash", ""), ("mm_hash", "é" * (MM_HASH_MAX_BYTES // 2 + 1)), ("cost_ms", math.inf), ("cost_ms", -1.0)],
)
def test_a_commitment_that_cannot_be_shown_is_not_taken(field: str, value: object) -> None:
    entry = {"mm_hash": "a", "generation": 0, "token": 0, "nbytes": 1, "cost_ms": 1.0, "info": b""}

    def frame() -> bytes:
        return msgspec.msgpack.encode([5, 1, 1, 1, [[SCOPE, [list(entry.values())]]]])

    assert isinstance(decode_from_client(frame()), Commit)
    entry[field] = value
    with pytest.raises(MalformedMessage):
        decode_from_client(frame())
