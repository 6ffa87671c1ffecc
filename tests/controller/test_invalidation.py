"""What the core makes of invalidations: who is told, whom completion waits for, and what becomes of what they match."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from controller_driver import LINEAGE, TERM, World

from mmcache.control.messages import (
    INVALIDATED,
    MAX_PUSH,
    CommitStatus,
    Follow,
    Granted,
    Heartbeat,
    HeartbeatAnswer,
    Hit,
    Invalidated,
    Push,
    Refused,
    Resend,
    Unclaimed,
    Welcome,
)
from mmcache.controller import core
from mmcache.controller.announcements import Asked
from mmcache.controller.durable import MAX_TERMS, Past, ToWrite
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.recorder import Recorder, add_term
from mmcache.controller.server import volatile_store
from mmcache.controller.sessions import DRIFT_BOUND
from mmcache.controller.state.base import Invalidation, StateFull
from mmcache.selector import Selector

TTL = 5.0
LIFETIME = TTL * (1 + DRIFT_BOUND)
A, B = Selector(mm_hash="a"), Selector(mm_hash="b")


def number_of(answer: object) -> int:
    assert isinstance(answer, Invalidated)
    return answer.number


def test_it_is_complete_once_every_session_has_acknowledged_it() -> None:
    world = World()
    operator, reader, other = world.client("operator"), world.client("reader"), world.client("other")
    assert number_of(operator.invalidate(A)) == 1
    [push] = reader.pushes()
    assert push == Push(TERM, reader.session, 0, 1, True, [(1, A)])
    request = operator.follow(1, wait_ms=60_000)
    reader.apply(1)
    operator.apply(1)
    assert operator.progress() == []
    other.apply(1)
    assert operator.progress() == [(request, True, 0)]
    assert operator.progress() == []


def test_a_session_that_is_silent_is_awaited_until_it_must_have_ended() -> None:
    world = World()
    operator, silent = world.client("operator"), world.client("silent")
    world.advance(1.0)
    silent.heartbeat()
    world.advance(0.5)
    operator.heartbeat()
    operator.invalidate(A)
    operator.apply(1)
    operator.follow(1, wait_ms=60_000)
    world.advance(LIFETIME - 0.5 - 0.01)
    operator.heartbeat(applied=1)
    assert operator.progress() == []
    world.advance(0.02)
    assert [complete for _, complete, _ in operator.progress()] == [True]


def test_a_heartbeat_that_is_answered_with_the_new_head_prolongs_nothing() -> None:
    world = World()
    operator, behind = world.client("operator"), world.client("behind")
    operator.invalidate(A)
    operator.apply(1)
    operator.follow(1, wait_ms=60_000)
    for _ in range(4):
        world.advance(LIFETIME / 4 + 0.01)
        answer = behind.heartbeat(applied=0)
        assert isinstance(answer, HeartbeatAnswer)
        assert answer.head == 1
        operator.heartbeat(applied=1)
    assert [complete for _, complete, _ in operator.progress()] == [True], "it was told that it is behind"


@pytest.mark.parametrize("ends", ["another hello", "unreachable"])
def test_a_session_that_ended_otherwise_than_by_its_goodbye_is_awaited_still(ends: str) -> None:
    world = World()
    operator, gone = world.client("operator"), world.client("gone")
    if ends == "another hello":
        gone.hello()
    else:
        world.deliver(world.core.unreachable(gone.peer, world.now))
    operator.invalidate(A)
    operator.apply(1)
    gone.apply(1)  # whoever is there now is not who was there
    operator.follow(1, wait_ms=60_000)
    world.advance(LIFETIME - 0.01)
    operator.heartbeat(applied=1)
    assert operator.progress() == []
    world.advance(0.02)
    assert len(operator.progress()) == 1


def test_a_goodbye_settles_at_once() -> None:
    world = World()
    operator, leaving = world.client("operator"), world.client("leaving")
    operator.invalidate(A)
    operator.apply(1)
    request = operator.follow(1, wait_ms=60_000)
    leaving.goodbye()
    assert operator.progress() == [(request, True, 0)]


def test_who_waits_is_told_in_time_how_far_it_is_and_whom_it_waits_for() -> None:
    world = World()
    operator, silent = world.client("operator"), world.client("silent")
    world.client("stale").hello(serves_stale=True)
    operator.invalidate(A)
    operator.apply(1)
    operator.follow(1, wait_ms=1_000)
    operator.pushes()
    assert operator.inbox == []
    world.advance(1.0)
    [progress] = operator.inbox
    assert (progress.complete, progress.waiting, progress.unbound) == (False, 2, 1)  # type: ignore[union-attr]
    names = [(one.name, one.most_ms) for one in progress.awaited]  # type: ignore[union-attr]
    assert ("silent", round((LIFETIME - 1.0) * 1000)) in names
    assert silent.pushes()


def test_many_who_are_told_at_once_cost_one_walk_over_the_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    operator, _ = world.client("operator"), world.client("silent")
    operator.invalidate(A)
    for _ in range(50):
        operator.follow(1, wait_ms=1_000)
    operator.inbox.clear()
    walks = Mock(wraps=world.core._sessions.all)
    monkeypatch.setattr(world.core._sessions, "all", walks)
    world.advance(1.0)
    assert len(operator.inbox) == 50
    assert walks.call_count == 1


def test_what_others_are_awaited_for_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(dict[int, int]):
        looked_at = 0

        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                self.looked_at += 1
                yield number

    world = World()
    operator, _ = world.client("operator"), world.client("silent")
    for _ in range(100):
        operator.invalidate(A)
    counting = Counting(world.core._invalidations.pending)
    monkeypatch.setattr(world.core._invalidations, "_waiting", counting)
    operator.apply(99)
    operator.apply(100)
    assert set(counting.values()) == {1}, "of the silent one"
    assert counting.looked_at < 100


def test_sessions_that_serve_what_is_stale_are_not_awaited() -> None:
    world = World()
    operator, stale = world.client("operator"), world.client("stale")
    world.advance(LIFETIME)  # what it was before is forgotten
    operator.hello()
    stale.hello(serves_stale=True)
    operator.invalidate(A)
    operator.apply(1)
    operator.follow(1)
    assert [complete for _, complete, _ in operator.progress()] == [True]
    stale.apply(1)
    world.advance(2 * LIFETIME)


def test_nothing_is_told_or_counts_before_it_is_durable() -> None:
    world = World()
    operator, reader = world.client("operator"), world.client("reader")
    reader.put("a")
    world.disk_full = True
    answer = operator.invalidate(A)
    assert isinstance(answer, Refused)
    assert "disk" in answer.reason
    assert reader.pushes() == []
    assert isinstance(reader.acquire("a")[0], Hit)
    world.disk_full = False
    assert number_of(operator.invalidate(B)) == 1
    assert [(todo.first, [one.selector for one in todo.asked]) for todo in world.durable if todo.asked] == [(1, [B])]


def test_what_is_durable_is_not_refused_for_what_may_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    store = volatile_store()
    recorder = Recorder(store)
    recorder.begin(ControllerLimits(), 0.0, 1.0)

    def write(number: int, completed: int) -> None:
        asked = [Asked(A, "", "n", "")]
        recorder.write(ToWrite([], number, asked, [completed] if completed else [], [], settled=True), 1.0)

    write(1, 0)
    with monkeypatch.context() as patched:
        for name in ("complete", "settle_terms"):
            patched.setattr(store, name, Mock(side_effect=StateFull("no room")))
        write(2, 1)
    assert (store.head, len(store.pending())) == (2, 2)
    write(3, 2)
    assert [one.number for one in store.pending()] == [1, 3]


def test_what_was_asked_twice_is_made_once() -> None:
    world = World()
    operator = world.client("operator")
    assert number_of(operator.invalidate(A, "once")) == 1
    assert number_of(operator.invalidate(A, "once")) == 1
    assert number_of(operator.invalidate(A)) == 2
    later = World(Past(LINEAGE, head=2, held=[(1, A), (2, A)], remembered=[("once", 1)]))
    assert number_of(later.client("operator").invalidate(A, "once")) == 1


def test_several_that_were_asked_for_together_twice_are_made_once() -> None:
    world = World()
    several = [Asked(A, "", "operator", "", "operator"), Asked(B, "", "operator", "once", "operator")]
    assert world.core.ask(1, several) == world.core.ask(2, several) == []
    todo = world.core.take_writes()
    assert todo is not None
    assert list(todo.asked) == several
    told = [answer for _, answer in world.core.written(0.0)]
    assert [(answer.request, answer.number) for answer in told if isinstance(answer, Invalidated)] == [(1, 2), (2, 2)]
    [(_, again)] = world.core.ask(3, several)
    assert isinstance(again, Invalidated)
    assert again.number == 2
    assert world.core.stats()["head"] == 2


@pytest.mark.parametrize("idempotency", ["a\nb", "\0", "a\u200bb"])
def test_a_key_that_no_state_store_takes_is_refused(idempotency: str) -> None:
    world = World()
    assert isinstance(world.client("operator").invalidate(A, idempotency), Refused)
    assert not world.durable


def test_entries_of_an_old_generation_are_not_found() -> None:
    world = World()
    client = world.client("c")
    client.put("a")
    client.put("b")
    client.invalidate(A)
    (answer, hit) = client.acquire("a", "b")
    assert isinstance(answer, Granted)
    assert answer.generation == 1
    assert isinstance(hit, Hit)
    assert hit.generation == 0
    assert client.commit("a", tokens=[answer.token], generation=1) == [CommitStatus.STORED]
    (again,) = client.acquire("a")
    assert isinstance(again, Hit)
    assert again.generation == 1


def test_who_waits_for_what_is_of_an_old_generation_is_told_to_ask_again() -> None:
    world = World()
    encoder, waiter = world.client("encoder"), world.client("waiter")
    token = encoder.claim("a")
    kept = encoder.claim("b")
    waiter.acquire("a", "b")
    encoder.invalidate(A)
    assert len(waiter.pushes()) == 1
    assert waiter.resolved() == [(1, 0, Unclaimed(INVALIDATED))]
    assert encoder.renew(token, kept) == [token]
    (granted,) = waiter.acquire("a")
    assert isinstance(granted, Granted)
    assert granted.generation == 1
    assert encoder.commit("a", tokens=[token], generation=0) == [CommitStatus.OUTDATED]
    assert waiter.renew(granted.token) == [], "what is outdated ends nobody's claim"


def test_a_new_session_gets_all_that_counts_and_one_that_resumes_what_it_lacks() -> None:
    held = [(number, Selector(mm_hash=f"h{number}")) for number in range(1, MAX_PUSH + 3)]
    world = World(Past(LINEAGE, head=len(held), held=held))
    new = world.client("new")
    pushes = new.pushes()
    assert [push.whole for push in pushes] == [False, True]
    assert [item for push in pushes for item in push.invalidations] == held
    assert [(push.after, push.through) for push in pushes] == [(0, MAX_PUSH), (MAX_PUSH, len(held))]
    welcome = new.hello(lineage=LINEAGE, applied=len(held) - 1)
    assert isinstance(welcome, Welcome)
    assert (welcome.after, welcome.head) == (len(held) - 1, len(held))
    [push] = new.pushes()
    assert push.invalidations == held[-1:]
    other = new.hello(lineage="another", applied=3)
    assert isinstance(other, Welcome)
    assert other.after == 0


def test_what_was_lost_is_pushed_again() -> None:
    world = World()
    operator, reader = world.client("operator"), world.client("reader")
    operator.invalidate(A)
    operator.invalidate(B)
    reader.pushes()
    reader.tell(Resend(TERM, reader.session, 0))
    [push] = reader.pushes()
    assert push == Push(TERM, reader.session, 0, 2, True, [(1, A), (2, B)])


def test_after_a_restart_nothing_is_complete_until_the_sessions_before_must_have_ended() -> None:
    world = World(Past(LINEAGE, head=3, held=[(3, A)], pending=[2, 3], strangers_until=1000.0 + LIFETIME))
    operator = world.client("operator")
    operator.apply(3)
    operator.invalidate(B)
    operator.apply(4)
    for number in (2, 3, 4):
        operator.follow(number, wait_ms=60_000)
    operator.follow(1)
    assert [complete for _, complete, _ in operator.progress()] == [True]
    world.advance(LIFETIME - 0.01)
    operator.heartbeat(applied=4)
    assert operator.progress() == []
    world.advance(0.02)
    assert [complete for _, complete, _ in operator.progress()] == [True] * 3
    completed = [number for todo in world.durable for number in todo.completed]
    assert completed == [2, 3, 4]


@pytest.mark.parametrize("tells", ["hello", "heartbeat", "acknowledgement"])
def test_a_client_that_is_ahead_shows_that_the_database_went_back(tells: str) -> None:
    world = World(Past(LINEAGE, head=3, held=[(3, A)]))
    client, other = world.client("ahead"), world.client("other")
    match tells:
        case "hello":
            assert isinstance(client.hello(lineage=LINEAGE, applied=4), Refused)
        case "heartbeat":
            client.tell(Heartbeat(TERM, client.session, 1, 4))
        case _:
            client.apply(4)
    assert "older" in world.core.went_back
    assert isinstance(other.heartbeat(applied=3), Refused)


@pytest.mark.parametrize(
    ("term", "applied", "went_back"),
    [(1, 2, False), (1, 3, True), (2, 4, False), (2, 5, True), (3, 1, True), (TERM, 4, False), (TERM, 5, True)],
)
def test_a_number_that_its_term_cannot_have_reached_shows_it_too(term: int, applied: int, went_back: bool) -> None:
    """Though there is one of that number by now: what came after the older copy has numbers of what was lost."""
    world = World(Past(LINEAGE, head=4, held=[(4, A)], terms=[(1, 0), (2, 2)]))
    answer = world.client("c").hello(lineage=LINEAGE, applied=applied, term=term)
    assert bool(world.core.went_back) is went_back
    assert isinstance(answer, Refused if went_back else Welcome)


def test_a_client_of_a_term_that_is_forgotten_gets_everything_anew() -> None:
    terms = [(number, 4) for number in range(100, 100 + MAX_TERMS)]
    world = World(Past(LINEAGE, head=4, held=[(4, A)], terms=terms))
    answer = world.client("c").hello(lineage=LINEAGE, applied=3, term=99)
    assert isinstance(answer, Welcome)
    assert answer.after == 0


def test_it_is_remembered_where_the_last_terms_began() -> None:
    store = volatile_store()
    for number in range(1, MAX_TERMS + 10):
        before = add_term(store, number << 56)
    assert [term >> 56 for term, _ in before] == list(range(9, MAX_TERMS + 9))
    store.invalidate([Invalidation(number=1, selector=A, reason="", actor="a", at=0.0)])
    add_term(store, 1)
    assert add_term(store, 2)[-2:] == [(MAX_TERMS + 9 << 56, 0), (1, 1)]


def test_a_number_from_the_future_is_refused() -> None:
    world = World()
    client = world.client("c")
    answer = client.ask(Follow(TERM, client.session, 77, 1, 0))
    assert isinstance(answer, Refused)
    assert answer.request == 77


def test_followers_are_bounded_and_end_with_their_session() -> None:
    world = World(max_followers=1)
    operator, other = world.client("operator"), world.client("other")
    operator.invalidate(A)
    operator.follow(1, wait_ms=60_000)
    assert isinstance(other.ask(Follow(TERM, other.session, 5, 1, 60_000)), Refused)
    operator.hello()
    other.follow(1, wait_ms=60_000)


def test_what_later_ones_cover_is_forgotten_and_a_full_table_is_made_coarser() -> None:
    world = World(max_invalidations=10)
    operator, reader = world.client("operator"), world.client("reader")
    for number in range(11):
        operator.invalidate(Selector(model="m", mm_hash=f"item-{number}"))
    wide = Selector(model="m")
    assert world.core.stats()["head"] == 12, "the last one brought another about"
    assert reader.pushes()[-1].invalidations == [(12, wide)]
    assert world.core.stats()["invalidations"] == 1
    assert sorted(number for todo in world.durable for number in todo.forgotten) == list(range(1, 12))
    assert number_of(operator.invalidate(A)) == 13


def test_entries_of_an_old_generation_make_room_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SWEPT_AT_ONCE", 3)
    world = World(max_entries=10)
    client = world.client("c")
    client.put(*[f"item-{number}" for number in range(10)])
    client.invalidate(Selector(mm_hash="item-0"))
    client.invalidate(Selector(mm_hash="item-9"))  # while the first is being swept
    world.advance(0.1)
    assert world.stats("entries", "entry.outdated") == (8, 2)
    client.invalidate(Selector())
    world.advance(0.1)
    assert client.commit("new", tokens=[0], generation=3) == [CommitStatus.STORED]
    assert world.stats("entries") == (1,)
