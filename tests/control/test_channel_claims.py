"""Claims and waits of the channel: each has an end, whoever goes away and whenever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scripted_controller import LINEAGE, ScriptedController, Stage, key, soon

from mmcache.control.batches import key_batches
from mmcache.control.channel import Acquisition, CommitEntry, SessionView
from mmcache.control.exchange import Exchange
from mmcache.control.messages import (
    Abort,
    AbortReason,
    Acquired,
    Commit,
    CommitStatus,
    Committed,
    Granted,
    HelloAgain,
    Hit,
    Leave,
    Refused,
    Renew,
    Renewed,
    Report,
    Resolved,
    Unclaimed,
    Waiting,
)
from mmcache.control.replica import Replica
from mmcache.errors import ControllerUnavailable, DeadlineExceeded

HIT = Hit(0, 1, 4096, b"info")
LONG_MS = 3_600_000


def granted(token: int, claim_ms: int = LONG_MS) -> Granted:
    return Granted(0, token, claim_ms)


def acquire(staged: Stage, *results: Any, wait_s: float = 20.0, **kwargs: float) -> tuple[Acquisition, int]:
    """An acquisition with these answers, and the number of its request."""
    keys = [key(f"hash{number}") for number in range(len(results))]
    acquiring = staged.acquire(*keys, wait_s=wait_s, **kwargs)
    request = staged.controller.expect_acquire().request
    staged.controller.answer(Acquired, request, list(results))
    return acquiring.result(), request


def nothing_is_sent(controller: ScriptedController) -> bool:
    return controller.receive(patience_s=0.05) is None


def wait_until_applied(staged: Stage) -> None:
    """The channel has read what was sent to it before this: it answers what was sent last."""
    staged.controller.answer(Resolved, 1 << 40, [(0, granted(1 << 40))])
    while isinstance(message := staged.controller.receive(), Renew):
        pass
    assert isinstance(message, Abort)
    assert message.tokens == [1 << 40]


def test_answers_and_resolutions_carry_the_index_of_their_key(staged: Stage) -> None:
    keys = [key("a", model="m1"), key("b", model="m2"), key("c", model="m1"), key("d", model="m2")]
    acquiring = staged.acquire(*keys)
    request = staged.controller.expect_acquire()
    assert [group.digests for group in request.groups] == [
        [keys[0].mm_digest, keys[2].mm_digest],
        [keys[1].mm_digest, keys[3].mm_digest],
    ]
    assert 15_000 < request.wait_ms <= 20_000
    staged.controller.answer(Acquired, request.request, [HIT, Waiting(), Waiting(), Unclaimed("full")])
    acquisition = acquiring.result()
    assert acquisition.answers == [HIT, Waiting(), Waiting(), Unclaimed("full")]
    staged.controller.answer(Resolved, request.request, [(2, HIT)])
    assert acquisition.resolutions(soon()) == [(1, HIT)]
    staged.controller.answer(Resolved, request.request, [(1, Unclaimed("no_room"))])
    assert acquisition.resolutions(soon()) == [(2, Unclaimed("no_room"))]
    assert acquisition.resolutions(soon()) == [], "waited though nothing does any more"
    acquisition.leave()
    assert nothing_is_sent(staged.controller)


def test_resolutions_end_at_their_deadline_and_at_the_end_of_the_wait(staged: Stage) -> None:
    acquisition, _ = acquire(staged, Waiting())
    assert acquisition.resolutions(time.monotonic() + 0.02) == []
    acquisition, _ = acquire(staged, Waiting(), wait_s=0.05)
    assert acquisition.resolutions(soon()) == []


def test_a_committed_claim_is_sent_with_the_controllers_token_and_is_over(staged: Stage) -> None:
    acquisition, _ = acquire(staged, granted(77))
    [answer] = acquisition.answers
    committing = staged.call(
        staged.channel.commit, [CommitEntry(key("hash0"), 0, answer.token, 1, 1.0, b"")], deadline=soon()
    )
    commit = staged.controller.expect(Commit)
    assert commit.groups[0].entries[0].token == 77
    staged.controller.answer(Committed, commit.request, [CommitStatus.STORED])
    committing.result()
    staged.channel.abort([answer.token], AbortReason.FAILED)
    assert nothing_is_sent(staged.controller)


def test_an_abort_says_why_once(staged: Stage) -> None:
    acquisition, _ = acquire(staged, granted(5), granted(6))
    tokens = [answer.token for answer in acquisition.answers]
    staged.channel.abort(tokens, AbortReason.NO_ROOM)
    staged.channel.abort(tokens, AbortReason.FAILED)
    abort = staged.controller.expect_abort()
    assert (abort.reason, abort.tokens) == (AbortReason.NO_ROOM, [5, 6])
    assert nothing_is_sent(staged.controller)


def test_grants_that_come_after_the_calls_deadline_are_given_back(staged: Stage) -> None:
    with pytest.raises(DeadlineExceeded):
        staged.channel.acquire([key("a"), key("b")], wait_s=20.0, deadline=time.monotonic() + 0.3)
    request = staged.controller.expect_acquire().request
    assert staged.controller.expect(Leave).request == request
    staged.controller.answer(Acquired, request, [granted(5), HIT])
    abort = staged.controller.expect_abort()
    assert (abort.reason, abort.tokens) == (AbortReason.UNWANTED, [5])


def test_the_grants_in_a_part_of_the_answer_are_given_back_when_the_rest_is_refused(staged: Stage) -> None:
    acquiring = staged.acquire(*(key(f"hash{number}") for number in range(129)))
    first, second = (staged.controller.expect_acquire().request for _ in range(2))
    staged.controller.answer(Acquired, first, [granted(5), *[HIT] * 127])
    staged.controller.send(Refused(second, "no"))
    with pytest.raises(ControllerUnavailable):
        acquiring.result()
    assert staged.controller.expect_abort().tokens == [5]


def test_leaving_ends_the_waits_and_gives_back_what_was_not_collected(staged: Stage) -> None:
    acquisition, request = acquire(staged, granted(5), Waiting(), Waiting())
    staged.controller.answer(Resolved, request, [(1, granted(6))])
    wait_until_applied(staged)
    with acquisition:
        pass
    assert staged.controller.expect(Leave).request == request
    assert staged.controller.expect_abort().tokens == [6], "5 was seen by the caller, and is its own to end"
    staged.controller.answer(Resolved, request, [(2, granted(7))])
    assert staged.controller.expect_abort().tokens == [7]
    assert acquisition.resolutions(soon()) == []


def test_leaving_wakes_another_thread_that_waits(staged: Stage) -> None:
    acquisition, _ = acquire(staged, Waiting())
    waiting = staged.call(acquisition.resolutions, soon())
    acquisition.leave()
    assert waiting.result() == []


def test_a_grant_that_comes_once_the_wait_is_over_is_given_back(staged: Stage) -> None:
    acquisition, request = acquire(staged, Waiting(), wait_s=0.05)
    assert acquisition.resolutions(soon()) == []
    staged.controller.answer(Resolved, request, [(0, granted(5))])
    assert staged.controller.expect_abort().tokens == [5]
    assert acquisition.resolutions(soon()) == []


def test_grants_that_nobody_asked_for_are_given_back(staged: Stage) -> None:
    acquisition, request = acquire(staged, HIT)
    staged.controller.answer(Resolved, request, [(0, granted(5))])
    assert staged.controller.expect_abort().tokens == [5]
    staged.controller.answer(Resolved, request + 1000, [(0, granted(6))])
    assert staged.controller.expect_abort().tokens == [6]
    staged.controller.answer(Acquired, request + 1000, [granted(7)])
    assert staged.controller.expect_abort().tokens == [7]
    assert acquisition.resolutions(soon()) == []


def test_a_repeated_answer_neither_grants_twice_nor_takes_the_grant_away(staged: Stage) -> None:
    acquisition, request = acquire(staged, granted(5), Waiting())
    staged.controller.answer(Acquired, request, [granted(5), Waiting()])
    staged.controller.answer(Resolved, request, [(1, HIT)])
    assert acquisition.resolutions(soon()) == [(1, HIT)]
    staged.controller.answer(Resolved, request, [(1, granted(5))])
    staged.channel.abort([acquisition.answers[0].token], AbortReason.FAILED)
    abort = staged.controller.expect_abort()
    assert (abort.reason, abort.tokens) == (AbortReason.FAILED, [5])


def test_an_acquire_of_the_wrong_length_gives_its_grants_back(staged: Stage) -> None:
    acquiring = staged.acquire(key("a"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [granted(5), granted(6)])
    with pytest.raises(ControllerUnavailable):
        acquiring.result()
    assert staged.controller.expect_abort().tokens == [5, 6]


def test_claims_are_renewed_until_they_are_committed_or_lost(staged: Stage) -> None:
    acquisition, _ = acquire(staged, granted(5, 300), granted(6, 300))
    for _ in range(2):
        renew = staged.controller.expect(Renew)
        assert renew.tokens == [5, 6]
        staged.controller.answer(Renewed, renew.request, 300, [])
    first, second = (answer.token for answer in acquisition.answers)
    committing = staged.call(staged.channel.commit, [CommitEntry(key("hash0"), 0, first, 1, 1.0, b"")], deadline=soon())
    while isinstance(message := staged.controller.receive(), Renew):
        pass
    assert isinstance(message, Commit)
    staged.controller.answer(Committed, message.request, [CommitStatus.STORED])
    committing.result()
    renew = staged.controller.expect(Renew)
    assert renew.tokens == [6]
    staged.controller.answer(Renewed, renew.request, 300, [6])
    wait_until_applied(staged)
    staged.channel.abort([second], AbortReason.FAILED)
    assert staged.controller.receive(patience_s=0.3) is None, "a lost claim was renewed, or given up"
    assert not acquisition.lost


def test_a_claim_is_not_renewed_for_longer_than_asked(staged: Stage) -> None:
    acquire(staged, granted(5, 150), renew_for_s=0.01)
    assert staged.controller.receive(patience_s=0.3) is None


def test_claims_that_were_pushed_are_renewed_too(staged: Stage) -> None:
    _, request = acquire(staged, Waiting())
    staged.controller.answer(Resolved, request, [(0, granted(5, 90))])
    assert staged.controller.expect(Renew).tokens == [5]


def test_a_lost_session_wakes_all_who_wait(staged: Stage) -> None:
    waiter, _ = acquire(staged, Waiting())
    holder, _ = acquire(staged, granted(5))
    waiting = [staged.call(waiter.resolutions, soon()) for _ in range(2)]
    asking = staged.acquire(key("b"))
    committing = staged.call(staged.channel.commit, [CommitEntry(key("c"), 0, 0, 1, 1.0, b"")], deadline=soon())
    staged.controller.receive()
    staged.controller.receive()
    staged.controller.send(HelloAgain("restarted"))
    assert [waiter.result() for waiter in waiting] == [[], []]
    assert waiter.lost
    assert holder.lost
    for call in (asking, committing):
        with pytest.raises(ControllerUnavailable, match="hello_again"):
            call.result()
    staged.controller.welcome()
    assert staged.channel.wait_fresh(20.0) is not None
    staged.controller.expect_acquire()
    waiter.leave()
    staged.channel.abort([holder.answers[0].token], AbortReason.FAILED)
    assert nothing_is_sent(staged.controller), "something of the old session was said in the new one"


def lose_session(staged: Stage, *, lineage: str = LINEAGE) -> None:
    staged.controller.send(HelloAgain("restarted"))
    staged.controller.welcome(lineage=lineage)
    assert staged.channel.wait_fresh(20.0) is not None


def test_what_is_computed_is_claimed_again_first_of_all_and_goes_on_under_its_new_token(staged: Stage) -> None:
    holder, _ = acquire(staged, granted(5), HIT, granted(6), renew_for_s=60.0)
    lose_session(staged)
    again = staged.controller.expect_acquire()
    assert [group.digests for group in again.groups] == [[key("hash0").mm_digest, key("hash2").mm_digest]]
    assert 50_000 < again.wait_ms <= 60_000
    staged.controller.answer(Acquired, again.request, [granted(1, 300), granted(2, 300)])
    renew = staged.controller.expect(Renew)
    assert renew.tokens == [1, 2]
    staged.controller.answer(Renewed, renew.request, LONG_MS, [])
    first, second = holder.answers[0].token, holder.answers[2].token
    staged.channel.abort([second], AbortReason.FAILED)
    while isinstance(message := staged.controller.receive(), Renew):
        pass
    assert isinstance(message, Abort)
    assert message.tokens == [2]
    committing = staged.call(staged.channel.commit, [CommitEntry(key("hash0"), 0, first, 1, 1.0, b"")], deadline=soon())
    while isinstance(message := staged.controller.receive(), Renew):
        pass
    assert isinstance(message, Commit)
    assert message.groups[0].entries[0].token == 1
    staged.controller.answer(Committed, message.request, [CommitStatus.STORED])
    committing.result()
    assert staged.counters.snapshot()["control.claim_kept"] == 2


def test_what_another_computes_meanwhile_is_ours_again_when_that_gives_it_up(staged: Stage) -> None:
    holder, _ = acquire(staged, granted(5), granted(6), granted(7))
    lose_session(staged)
    again = staged.controller.expect_acquire()
    staged.controller.answer(Acquired, again.request, [Waiting(), Unclaimed("held"), HIT])
    staged.controller.answer(Resolved, again.request, [(0, granted(1))])
    wait_until_applied(staged)
    staged.channel.abort([answer.token for answer in holder.answers], AbortReason.FAILED)
    assert staged.controller.expect_abort().tokens == [1]
    assert nothing_is_sent(staged.controller)


@pytest.mark.parametrize("ended", [False, True])
def test_what_nobody_computes_any_more_or_is_outdated_is_given_back(staged: Stage, *, ended: bool) -> None:
    holder, _ = acquire(staged, granted(5))
    lose_session(staged)
    again = staged.controller.expect_acquire()
    if ended:
        staged.channel.abort([holder.answers[0].token], AbortReason.FAILED)
        staged.channel.report([(key("hash0"), 1)])
        staged.controller.expect(Report)
    staged.controller.answer(Acquired, again.request, [Granted(0 if ended else 3, 1, LONG_MS)])
    abort = staged.controller.expect_abort()
    assert (abort.reason, abort.tokens) == (AbortReason.UNWANTED, [1])


def test_what_is_outdated_does_not_take_the_claim_of_its_successor(staged: Stage) -> None:
    acquire(staged, granted(5))
    _, request = acquire(staged, Waiting())
    staged.controller.answer(Resolved, request, [(0, Granted(3, 6, LONG_MS))])  # 5 has ended meanwhile
    wait_until_applied(staged)
    lose_session(staged)
    again = staged.controller.expect_acquire()
    assert again.groups[0].digests == [key("hash0").mm_digest] * 2
    staged.controller.answer(Acquired, again.request, [Granted(3, 1, LONG_MS)] * 2)
    assert nothing_is_sent(staged.controller)
    lose_session(staged)
    assert staged.controller.expect_acquire().groups[0].digests == [key("hash0").mm_digest]


def test_in_another_lineage_nothing_is_claimed_again(staged: Stage) -> None:
    holder, _ = acquire(staged, granted(5))
    lose_session(staged, lineage="another")
    assert nothing_is_sent(staged.controller)
    staged.channel.abort([holder.answers[0].token], AbortReason.FAILED)
    assert nothing_is_sent(staged.controller)


def test_what_is_claimed_again_and_answered_with_nonsense_is_given_back(staged: Stage) -> None:
    acquire(staged, granted(5))
    lose_session(staged)
    again = staged.controller.expect_acquire()
    staged.controller.answer(Acquired, again.request, [granted(1), granted(2)])
    assert staged.controller.expect_abort().tokens == [1, 2]
    lose_session(staged)
    again = staged.controller.expect_acquire()
    staged.controller.send(Refused(again.request, "no"))
    lose_session(staged)
    staged.controller.expect_acquire()


def test_a_wait_for_what_was_claimed_before_ends_with_its_time() -> None:
    """No caller would leave it, and the controller ends it without a word."""
    sent: list[Any] = []
    requests = Exchange(sent.append)
    began = time.monotonic()
    acquisition = Acquisition(1, wait_s=0.0, renew_for_s=60.0, check=lambda: None, leave=lambda _: None)
    requests.begin(SessionView(1, 2, 10.0, Replica("a"), 0.0))
    requests.acquire(acquisition, key_batches([key("a")]))
    requests.received(Acquired(1, 2, sent[-1].request, [granted(5)]), began)
    requests.lost("restart")
    requests.begin(SessionView(1, 3, 10.0, Replica("a"), 0.0))
    again = sent[-1].request
    requests.received(Acquired(1, 3, again, [Waiting()]), began)
    requests.tick(began + 30.0)
    assert requests._waits
    requests.tick(began + 60.0 + (time.monotonic() - began))
    assert not requests._waits
    requests.received(Resolved(1, 3, again, [(0, granted(9))]), began + 61.0)
    assert sent[-1] == Abort(1, 3, AbortReason.UNWANTED, [9])


def test_resolutions_that_came_before_the_loss_are_not_lost(staged: Stage) -> None:
    acquisition, request = acquire(staged, Waiting(), Waiting())
    staged.controller.answer(Resolved, request, [(1, HIT)])
    staged.controller.send(HelloAgain("restarted"))
    staged.controller.welcome()
    assert acquisition.resolutions(soon()) == [(1, HIT)]
    assert acquisition.resolutions(soon()) == []
    assert acquisition.lost
