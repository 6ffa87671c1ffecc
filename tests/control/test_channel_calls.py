"""Calls of the channel against a scripted controller: what is sent, in which order answers come back, how calls end."""

from __future__ import annotations

import time

import pytest
from scripted_controller import LINEAGE, Stage, key, soon, stage

from mmcache.control import exchange
from mmcache.control.calls import Call
from mmcache.control.channel import CommitEntry
from mmcache.control.messages import (
    AbortReason,
    Acquired,
    Commit,
    CommitStatus,
    Committed,
    Found,
    Granted,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Hit,
    Invalidated,
    Lookup,
    Refused,
    Report,
    Unclaimed,
)
from mmcache.control.replica import Replica
from mmcache.control.session import SessionView
from mmcache.errors import ControllerUnavailable, DeadlineExceeded
from mmcache.selector import Selector


def entry(name: str, token: int = 0) -> CommitEntry:
    return CommitEntry(key(name), 0, token, 4096, 1.5, b"info")


def hit(revision: int) -> Hit:
    return Hit(0, revision, 4096, b"info")


def test_answers_come_in_the_order_of_the_keys_whatever_their_scopes_and_batches(staged: Stage) -> None:
    keys = [key(f"hash{number}", model=f"model{number % 3}") for number in range(300)]
    looking = staged.call(staged.channel.lookup, keys, deadline=soon())
    requests = [staged.controller.expect(Lookup) for _ in range(3)]
    number_of = {key.mm_digest: number for number, key in enumerate(keys)}
    for request in reversed(requests):
        digests = [digest for group in request.groups for digest in group.digests]
        staged.controller.answer(Found, request.request, [hit(number_of[digest]) for digest in digests])
    assert looking.result() == [hit(number) for number in range(300)]
    assert [request.request for request in requests] == sorted({request.request for request in requests})


def test_a_commit_carries_what_the_directory_needs_and_returns_a_status_each(staged: Stage) -> None:
    committing = staged.call(staged.channel.commit, [entry("a"), entry("b")], deadline=soon(), lineage=LINEAGE)
    commit = staged.controller.expect(Commit)
    [group] = commit.groups
    assert group.scope == key("a").scope
    assert [(sent.mm_hash, sent.nbytes, sent.cost_ms, sent.info) for sent in group.entries] == [
        ("a", 4096, 1.5, b"info"),
        ("b", 4096, 1.5, b"info"),
    ]
    staged.controller.answer(Committed, commit.request, [CommitStatus.STORED, CommitStatus.DUPLICATE])
    assert committing.result() == [CommitStatus.STORED, CommitStatus.DUPLICATE]


def test_a_controller_of_another_lineage_is_not_told_of_an_entry(staged: Stage) -> None:
    with pytest.raises(ControllerUnavailable, match="lineage"):
        staged.channel.commit([entry("a")], deadline=soon(), lineage="before")


def test_an_invalidation_is_not_asked_for_in_another_lineage_than_it_is_named_by() -> None:
    sent: list[object] = []
    requests = exchange.Exchange(sent.append)
    requests.begin(SessionView(1, 2, 10.0, Replica("after"), 0.0))
    call: Call[Invalidated] = Call(1)
    requests.invalidate(call, Selector(), "", "once", "before")
    with pytest.raises(ControllerUnavailable, match="lineage"):
        call.wait(soon())
    assert not sent


def test_a_report_names_the_promise(staged: Stage) -> None:
    staged.channel.report([(key("a"), 7)])
    [missing] = staged.controller.expect(Report).entries
    assert (missing.scope, missing.digest, missing.revision) == (key("a").scope, key("a").mm_digest, 7)


def test_a_call_that_ends_at_its_deadline_is_forgotten_and_its_late_answer_is_ignored(staged: Stage) -> None:
    with pytest.raises(DeadlineExceeded):
        staged.channel.lookup([key("a")], deadline=time.monotonic() + 0.3)
    late = staged.controller.expect(Lookup)
    wait_until_answers(staged)
    looking = staged.call(staged.channel.lookup, [key("b")], deadline=soon())
    request = staged.controller.expect(Lookup)
    assert list(staged.channel._link.exchange._requests) == [request.request]
    staged.controller.answer(Found, late.request, [hit(1)])
    staged.controller.answer(Found, request.request, [None])
    assert looking.result() == [None]
    assert staged.counters.snapshot()["control.unasked"] == 1


def wait_until_answers(staged: Stage) -> None:
    """Have the scripted controller answer heartbeats until calls are made again."""
    deadline = soon()
    while staged.channel.in_doubt and time.monotonic() < deadline:
        assert staged.controller.receive(patience_s=0.01) is None
    assert not staged.channel.in_doubt


def test_after_a_call_in_vain_calls_end_at_once_until_the_controller_gives_a_sign_of_life() -> None:
    with stage(ttl_ms=600_000) as staged:  # whose heartbeats go minutes apart, but for the doubt
        staged.controller.answer_heartbeats = False
        with pytest.raises(DeadlineExceeded):
            staged.channel.lookup([key("a")], deadline=time.monotonic() + 0.3)
        staged.controller.expect(Lookup)
        for _ in range(1000):
            with pytest.raises(ControllerUnavailable, match="did not answer in time"):
                staged.channel.lookup([key("a")], deadline=soon())
        assert staged.counters.snapshot()["breaker.controller"] == 1
        first, second = staged.controller.expect(Heartbeat), staged.controller.expect(Heartbeat)
        assert second.number == first.number + 1
        staged.controller.answer_heartbeats = True
        staged.controller.send(HeartbeatAnswer(first.term, first.session, first.number, 0))
        wait_until_answers(staged)
        looking = staged.call(staged.channel.lookup, [key("b")], deadline=soon())
        staged.controller.answer(Found, staged.controller.expect(Lookup).request, [None])
        assert looking.result() == [None]


def test_a_call_that_was_answered_late_though_others_were_heard_raises_no_doubt(staged: Stage) -> None:
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=time.monotonic() + 0.5)
    staged.controller.expect(Lookup)
    other = staged.call(staged.channel.lookup, [key("b")], deadline=soon())
    staged.controller.answer(Found, staged.controller.expect(Lookup).request, [None])
    assert other.result() == [None]
    with pytest.raises(DeadlineExceeded):
        looking.result()
    assert not staged.channel.in_doubt


def test_a_deadline_that_has_passed_asks_nothing(staged: Stage) -> None:
    with pytest.raises(DeadlineExceeded):
        staged.channel.lookup([key("a")], deadline=time.monotonic() - 1)
    assert staged.controller.receive(patience_s=0.05) is None


@pytest.mark.parametrize("frames", [(b"",), (b"garbage",), (b"\xc1" * 100,), (b"one", b"two")])
def test_malformed_frames_are_counted_and_the_session_goes_on(staged: Stage, frames: tuple[bytes, ...]) -> None:
    staged.controller.send_frame(*frames)
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=soon())
    staged.controller.answer(Found, staged.controller.expect(Lookup).request, [None])
    assert looking.result() == [None]
    assert staged.counters.snapshot()["control.malformed"] == 1


def test_an_answer_of_another_session_is_nobodys(staged: Stage) -> None:
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=soon())
    request = staged.controller.expect(Lookup)
    staged.controller.send(Found(request.term, request.session + 1, request.request, [hit(1)]))
    staged.controller.send(Found(request.term + 1, request.session, request.request, [hit(2)]))
    staged.controller.answer(Found, request.request, [hit(3)])
    assert looking.result() == [hit(3)]


@pytest.mark.parametrize("results", [[], [hit(1), hit(2)]])
def test_an_answer_of_another_length_fails_its_call(staged: Stage, results: list[Hit]) -> None:
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=soon())
    staged.controller.answer(Found, staged.controller.expect(Lookup).request, results)
    with pytest.raises(ControllerUnavailable, match="length"):
        looking.result()


def test_an_answer_of_another_kind_is_ignored(staged: Stage) -> None:
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=soon())
    request = staged.controller.expect(Lookup).request
    staged.controller.answer(Committed, request, [CommitStatus.STORED])
    staged.controller.answer(Acquired, request, [Unclaimed("x")])
    staged.controller.answer(Found, request, [None])
    assert looking.result() == [None]


def test_a_refused_request_says_why(staged: Stage) -> None:
    looking = staged.call(staged.channel.lookup, [key("a")], deadline=soon())
    staged.controller.send(Refused(staged.controller.expect(Lookup).request, "too many of them"))
    with pytest.raises(ControllerUnavailable, match="too many of them"):
        looking.result()


def test_more_requests_than_are_allowed_fail_at_once(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MAX_REQUESTS", 2)
    looking = [staged.call(staged.channel.lookup, [key(name)], deadline=soon()) for name in "ab"]
    requests = [staged.controller.expect(Lookup).request for _ in "ab"]
    with pytest.raises(ControllerUnavailable, match="overloaded"):
        staged.channel.lookup([key("c")], deadline=soon())
    for request in requests:
        staged.controller.answer(Found, request, [None])
    assert [call.result() for call in looking] == [[None], [None]]


def test_without_a_session_calls_fail_at_once_and_say_why(staged: Stage) -> None:
    staged.controller.send(HelloAgain("another world"))
    staged.controller.expect(Hello)  # not answered
    for call in (
        lambda: staged.channel.lookup([key("a")], deadline=soon()),
        lambda: staged.channel.commit([entry("a")], deadline=soon()),
        lambda: staged.channel.acquire([key("a")], wait_s=1.0, deadline=soon()),
    ):
        with pytest.raises(ControllerUnavailable, match="another world"):
            call()
    staged.channel.abort([1], AbortReason.FAILED)
    staged.channel.report([(key("a"), 1)])
    assert staged.controller.receive(patience_s=0.05) is None


def test_a_claim_of_an_earlier_session_is_not_presented_in_a_later_one(staged: Stage) -> None:
    """The controller may have started anew and given the same token to another name."""
    acquiring = staged.acquire(key("a"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [Granted(0, 1, 10_000)])
    [old] = acquiring.result().answers
    staged.controller.send(HelloAgain("restarted"))
    staged.controller.welcome()
    again = staged.controller.expect_acquire()
    staged.controller.answer(Acquired, again.request, [Unclaimed("claimed")])
    acquiring = staged.acquire(key("b"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [Granted(0, 1, 10_000)])
    [new] = acquiring.result().answers

    staged.channel.abort([old.token], AbortReason.FAILED)
    committing = staged.call(staged.channel.commit, [entry("a", old.token), entry("b", new.token)], deadline=soon())
    commit = staged.controller.expect(Commit)
    assert [sent.token for sent in commit.groups[0].entries] == [0, 1]
    staged.controller.answer(Committed, commit.request, [CommitStatus.STORED] * 2)
    assert committing.result() == [CommitStatus.STORED] * 2
