"""How claims, waits and sessions end, and who inherits."""

from __future__ import annotations

import pytest
from controller_driver import LINEAGE, TERM, World

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Abort,
    AbortReason,
    Acquire,
    ClientMessage,
    Commit,
    CommitStatus,
    Goodbye,
    Granted,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Leave,
    Lookup,
    Refused,
    Renew,
    Report,
    Unclaimed,
    Waiting,
    Welcome,
    decode_from_controller,
    encode,
)
from mmcache.controller.durable import Past
from mmcache.controller.limits import MOST_BYTES, ControllerLimits


@pytest.mark.parametrize("reason", [AbortReason.FAILED, AbortReason.UNWANTED])
def test_a_claim_given_up_passes_to_the_next_in_line_and_the_rest_wait_on(reason: AbortReason) -> None:
    world = World()
    encoder, first, second = world.client("encoder"), world.client("first"), world.client("second")
    token = encoder.claim("a")
    first.acquire("a")
    second.acquire("a")
    encoder.abort(reason, token)
    ((_, _, granted),) = first.resolved()
    assert isinstance(granted, Granted)
    assert (granted.token > token, granted.claim_ms) == (True, 10_000)
    assert second.resolved() == []
    first.commit("a", tokens=[granted.token])
    assert len(second.resolved()) == 1


def test_an_abort_for_want_of_room_releases_all_waiters_and_leaves_the_name_free() -> None:
    world = World()
    encoder, first, second = world.client("encoder"), world.client("first"), world.client("second")
    token = encoder.claim("a")
    first.acquire("a")
    second.acquire("a")
    encoder.abort(AbortReason.NO_ROOM, token)
    assert first.resolved() == second.resolved() == [(1, 0, Unclaimed("no_room"))]
    assert world.stats("claims", "waiters", "abort.no_room") == (0, 0, 1)
    first.claim("a")


def test_a_name_held_by_a_dead_writer_is_claimed_by_nobody_for_its_time() -> None:
    world = World(hold_ms=30_000, ttl_ms=60_000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a")
    encoder.abort(AbortReason.HELD, token)
    assert waiter.resolved() == [(1, 0, Unclaimed("held"))]
    world.advance(29.9)
    assert waiter.acquire("a", "b")[0] == Unclaimed("held")
    assert world.stats("holds", "acquire.held") == (1, 1)
    world.advance(0.2)
    assert world.stats("holds") == (0,)
    waiter.claim("a")


def test_an_entry_that_is_committed_ends_the_hold_on_its_name() -> None:
    world = World(ttl_ms=60_000)
    client = world.client("c")
    client.abort(AbortReason.HELD, client.claim("a"))
    client.put("a")
    (hit,) = client.lookup("a")
    assert hit is not None
    client.report("a", hit.revision)
    client.claim("a")
    assert world.stats("holds") == (0,)


def test_holds_are_bounded() -> None:
    world = World(max_holds=1)
    client = world.client("c")
    client.abort(AbortReason.HELD, client.claim("a"), client.claim("b"))
    assert world.stats("holds") == (1,)
    client.claim("b")


def test_an_abort_of_a_claim_that_is_not_ones_own_is_counted_and_nothing_else() -> None:
    world = World()
    encoder, other = world.client("encoder"), world.client("other")
    token = encoder.claim("a")
    other.abort(AbortReason.HELD, token, 12345)
    assert encoder.renew(token) == []
    encoder.abort(AbortReason.FAILED, token, token)
    assert world.stats("abort.stale", "abort.failed", "claims", "holds") == (3, 1, 0, 0)


def test_a_claim_that_is_not_renewed_passes_on_at_its_deadline() -> None:
    world = World(claim_ms=4000, ttl_ms=60_000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a")
    world.advance(3.9)
    assert waiter.resolved() == []
    world.advance(0.2)
    ((_, _, granted),) = waiter.resolved()
    assert isinstance(granted, Granted)
    assert encoder.renew(token) == [token]


def test_a_renewed_claim_lives_for_its_full_time_again() -> None:
    world = World(claim_ms=4000, ttl_ms=60_000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a")
    for _ in range(4):
        world.advance(3.0)
        assert encoder.renew(token, 999) == [999]
    assert waiter.resolved() == []
    world.advance(3.9)
    assert world.stats("claims", "claim.renewed", "claim.lost") == (1, 4, 4)
    world.advance(0.2)
    assert len(waiter.resolved()) == 1


def test_claims_pass_on_in_the_order_in_which_they_were_granted_or_last_renewed() -> None:
    world = World(claim_ms=4000, ttl_ms=60_000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    first, _, third = (encoder.claim(name) for name in "abc")
    waiter.acquire("a", "b", "c")
    world.advance(1.0)
    encoder.renew(third)
    world.advance(1.0)
    encoder.renew(first)
    ends = []
    for _ in range(3):
        due = world.core.next_deadline()
        assert due is not None
        world.advance(due - world.now)
        ends += [(position, world.now - 1000.0) for _, position, _ in waiter.resolved()]
    assert ends == [(1, 4.0), (2, 5.0), (0, 6.0)]


def test_holds_end_one_by_one_as_they_began() -> None:
    world = World(hold_ms=5000, ttl_ms=60_000)
    client = world.client("c")
    for name in "ab":
        client.abort(AbortReason.HELD, client.claim(name))
        world.advance(1.0)
    world.advance(3.0)
    assert client.acquire("a", "b")[1] == Unclaimed("held")
    assert world.stats("holds", "claims") == (1, 1)
    world.advance(1.0)
    assert world.stats("holds") == (0,)


def test_a_claim_is_renewed_by_its_own_session_only() -> None:
    world = World(claim_ms=2000)
    encoder, other = world.client("encoder"), world.client("other")
    token = encoder.claim("a")
    world.advance(1.5)
    assert other.renew(token) == [token]
    world.advance(1.0)
    assert encoder.renew(token) == [token]


def test_a_message_that_comes_after_a_deadline_finds_it_passed_though_no_tick_came() -> None:
    world = World(claim_ms=1000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    waiter.acquire("a")
    world.now += 1.5
    assert encoder.renew(token) == [token]
    assert len(waiter.resolved()) == 1


def test_a_waiter_that_left_is_skipped() -> None:
    world = World()
    encoder, leaver, stayer = world.client("encoder"), world.client("leaver"), world.client("stayer")
    token = encoder.claim("a")
    leaver.acquire("a", "b", request=5)
    stayer.acquire("a")
    leaver.leave(5)
    leaver.leave(5)
    leaver.leave(99)
    assert world.stats("waiters") == (1,)
    encoder.abort(AbortReason.FAILED, token)
    assert leaver.resolved() == []
    assert [type(result) for _, _, result in stayer.resolved()] == [Granted]


def test_leaving_ends_all_waits_of_that_request_and_of_no_other() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.acquire("a", "b", "c")
    waiter.acquire("a", "b", request=5)
    waiter.acquire("b", "c", request=6)
    waiter.leave(5)
    assert world.stats("waiters") == (2,)
    encoder.goodbye()
    assert [(request, position) for request, position, _ in waiter.resolved()] == [(6, 0), (6, 1)]


def test_a_waiter_whose_deadline_has_passed_is_skipped_even_at_the_same_moment() -> None:
    world = World(claim_ms=2000, ttl_ms=60_000)
    encoder, hasty, patient = world.client("encoder"), world.client("hasty"), world.client("patient")
    encoder.claim("a")
    hasty.acquire("a", wait_ms=2000)
    patient.acquire("a", wait_ms=9000)
    world.now += 2.0
    world.deliver(world.core.tick(world.now))
    assert hasty.resolved() == []
    assert len(patient.resolved()) == 1


def test_a_session_without_heartbeats_ends_after_its_ttl_and_the_drift_bound() -> None:
    world = World(ttl_ms=5000)
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.claim("a")
    waiter.acquire("a")
    for number in range(4):
        world.advance(1.25)
        waiter.heartbeat(number)
    assert waiter.resolved() == []
    assert world.stats("sessions") == (2,)
    world.advance(0.3)
    assert world.stats("sessions", "session.expired") == (1, 1)
    assert [type(result) for _, _, result in waiter.resolved()] == [Granted]


def test_an_answered_heartbeat_keeps_a_session_and_repeats_its_number() -> None:
    world = World(ttl_ms=5000)
    client = world.client("c")
    world.advance(5.2)
    assert client.heartbeat(42) == HeartbeatAnswer(TERM, client.session, 42, 0)
    world.advance(5.2)
    assert isinstance(client.heartbeat(43), HeartbeatAnswer)
    world.advance(5.3)
    assert isinstance(client.heartbeat(44), HelloAgain)


def test_sessions_that_end_together_inherit_nothing_from_each_other() -> None:
    world = World(ttl_ms=1000, claim_ms=10_000)
    gone = [world.client(f"gone{i}") for i in range(3)]
    gone[0].claim("a")
    gone[1].acquire("a")
    gone[2].acquire("a")
    world.now += 0.5
    stayer = world.client("stayer")
    stayer.acquire("a")
    world.now += 0.6
    world.deliver(world.core.tick(world.now))
    assert [client.inbox for client in gone] == [[], [], []]
    ((_, _, granted),) = stayer.resolved()
    assert isinstance(granted, Granted)
    assert granted.token == 2
    assert world.stats("sessions", "claims", "waiters") == (1, 1, 0)


def test_goodbye_ends_claims_and_waits_at_once_and_is_not_inherited_by_itself() -> None:
    world = World()
    leaver, other = world.client("leaver"), world.client("other")
    leaver.claim("a")
    other.claim("b")
    leaver.acquire("a", "b", request=7)
    leaver.goodbye()
    assert leaver.inbox == []
    assert world.stats("sessions", "claims", "waiters", "session.left") == (1, 1, 0, 1)
    other.claim("a")


def test_a_second_hello_over_a_connection_replaces_its_session() -> None:
    world = World(max_sessions=2)
    client, other = world.client("c"), world.client("other")
    token = client.claim("a")
    other.acquire("a")
    earlier = client.session
    client.hello()
    assert client.session != earlier
    assert len(other.resolved()) == 1
    assert isinstance(client.ask(Renew(TERM, earlier, 9, [token])), HelloAgain)
    assert world.stats("sessions", "session.replaced") == (2, 1)


def test_a_peer_that_cannot_be_reached_loses_its_session_and_its_heir_may_be_next() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    encoder.claim("a")
    waiter.acquire("a")
    world.deliver(world.core.unreachable(encoder.peer, world.now))
    assert len(waiter.resolved()) == 1
    assert isinstance(encoder.heartbeat(), HelloAgain)
    assert world.core.unreachable(b"nobody", world.now) == []
    assert world.stats("sessions", "unreachable") == (1, 2)


def test_the_welcome_carries_what_a_session_needs() -> None:
    world = World(ttl_ms=1, lease_ms=2, hold_ms=3)
    client = world.client("c")
    welcome = client.ask(Hello(PROTOCOL_VERSION, "n", "h", 1))
    assert isinstance(welcome, Welcome)
    assert welcome == Welcome(PROTOCOL_VERSION, TERM, welcome.session, 1, 0, LINEAGE, 2, 3, 0, 0, MOST_BYTES)


def test_a_hello_in_another_version_is_refused_and_hurts_no_session() -> None:
    world = World()
    client = world.client("c")
    answer = client.ask(Hello(PROTOCOL_VERSION + 1, "n", "h", 1))
    assert isinstance(answer, Refused)
    assert f"version {PROTOCOL_VERSION + 1}" in answer.reason
    assert isinstance(client.heartbeat(), HeartbeatAnswer)
    assert world.stats("refused.version") == (1,)


def test_more_sessions_than_allowed_are_refused() -> None:
    world = World(max_sessions=1)
    client = world.client("c")
    late = world.client("late")
    assert late.session == 0
    assert isinstance(late.ask(Hello(PROTOCOL_VERSION, "late", "h", 1)), Refused)
    client.goodbye()
    assert isinstance(late.ask(Hello(PROTOCOL_VERSION, "late", "h", 1)), Welcome)
    assert world.stats("refused.sessions") == (2,)


@pytest.mark.parametrize("wrong", ["term", "session", "peer"])
def test_a_wrong_term_session_or_connection_is_told_to_say_hello_again(wrong: str) -> None:
    world = World()
    client = world.client("c")
    token = client.claim("a")
    sender = world.client("other") if wrong == "peer" else client
    term, session = TERM + (wrong == "term"), client.session + 50 * (wrong == "session")
    messages: list[ClientMessage] = [
        Heartbeat(term, session, 1, 0),
        Acquire(term, session, 5, 0, []),
        Renew(term, session, 6, [token]),
        Commit(term, session, 7, []),
        Abort(term, session, AbortReason.FAILED, [token]),
        Leave(term, session, 1),
        Report(term, session, []),
        Lookup(term, session, 8, []),
        Goodbye(term, session),
    ]
    for message in messages:
        assert isinstance(sender.ask(message), HelloAgain)
    assert client.renew(token) == []
    assert world.stats("hello_again") == (len(messages),)


def test_what_is_malformed_is_refused_with_a_bounded_reason_and_counted() -> None:
    world = World()
    client = world.client("c")
    ((peer, refused),) = world.core.malformed(b"stranger", "x" * 5000, world.now)
    assert peer == b"stranger"
    assert decode_from_controller(encode(refused)) == Refused(0, "x" * 512)
    assert isinstance(client.heartbeat(), HeartbeatAnswer)
    assert world.stats("refused.malformed") == (1,)


def test_random_session_numbers_are_drawn_until_one_is_free() -> None:
    from mmcache.controller.core import ControllerCore

    numbers = iter([5, 5, 5, 6])
    core = ControllerCore(ControllerLimits(), term=1, past=Past("a"), random_session=numbers.__next__)
    sessions = []
    for peer in (b"a", b"b"):
        ((_, welcome),) = core.handle(peer, Hello(PROTOCOL_VERSION, "n", "h", 1), 0.0)
        assert isinstance(welcome, Welcome)
        sessions.append(welcome.session)
    assert sessions == [5, 6]


def test_limits_that_make_no_sense_are_refused_by_name() -> None:
    for wrong in ({"max_claims": 0}, {"ttl_ms": -1}, {"hold_ms": 90_000_000}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ControllerLimits(**wrong)


def test_who_gave_a_claim_up_may_still_commit_and_end_the_claim_of_its_heir() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    assert waiter.acquire("a") == [Waiting()]
    encoder.abort(AbortReason.FAILED, token)
    assert encoder.commit("a", tokens=[token]) == [CommitStatus.STORED]
    assert [type(result).__name__ for _, _, result in waiter.resolved()] == ["Granted"]
    assert world.stats("claims") == (0,)
