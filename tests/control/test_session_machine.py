"""The session as a machine: what it sends when, and when it may be trusted."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Applied,
    Committed,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Push,
    Refused,
    Resend,
    Welcome,
)
from mmcache.control.replica import Replica
from mmcache.control.session import (
    BACKOFF_MOST_S,
    HELLO_PATIENCE_S,
    Began,
    Connect,
    Deliver,
    Effect,
    Lost,
    Outdated,
    Phase,
    Send,
    Session,
)
from mmcache.key import EmbeddingKey
from mmcache.metrics import Counters
from mmcache.selector import Selector

HELLO = Hello(PROTOCOL_VERSION, "test", "host", 1)
TTL_S = 4.0


def welcome(
    *,
    term: int = 1,
    session: int = 2,
    head: int = 0,
    after: int = 0,
    ttl_ms: int = 4000,
    version: int = PROTOCOL_VERSION,
) -> Welcome:
    return Welcome(version, term, session, ttl_ms, head, "lineage", 10_000, 30_000, after)


def greeting_session(now: float = 100.0) -> Session:
    session = Session(HELLO, random=lambda: 1.0, counters=Counters())
    assert session.start(now) == [Connect()]
    assert session.connected(now) == [Send(HELLO)]
    return session


def open_session(now: float = 100.0, *, head: int = 0) -> Session:
    session = greeting_session(now)
    session.received(welcome(head=head), now)
    return session


def is_fresh(session: Session, now: float) -> bool:
    return session.view is not None and now < session.view.fresh_until


def test_a_session_is_fresh_for_its_ttl_from_the_sending_of_the_hello() -> None:
    session = greeting_session(100.0)
    [began] = session.received(welcome(), 101.5)
    assert isinstance(began, Began)
    assert began.view.fresh_until == 100.0 + TTL_S


def test_an_answer_renews_from_the_sending_of_its_heartbeat_not_from_its_arrival() -> None:
    session = open_session(100.0)
    [beat] = session.tick(101.0)
    assert beat == Send(Heartbeat(1, 2, 1, 0))
    session.received(HeartbeatAnswer(1, 2, 1, 0), 103.9)
    assert session.view is not None
    assert session.view.fresh_until == 101.0 + TTL_S


def test_a_late_answer_to_an_older_heartbeat_does_not_shorten_freshness() -> None:
    session = open_session(100.0)
    session.tick(101.0)
    session.tick(102.0)
    session.received(HeartbeatAnswer(1, 2, 2, 0), 102.1)
    session.received(HeartbeatAnswer(1, 2, 1, 0), 102.2)
    assert session.view is not None
    assert session.view.fresh_until == 102.0 + TTL_S


def test_an_answer_that_names_a_later_head_ends_freshness_at_once() -> None:
    session = open_session(100.0, head=5)
    session.tick(101.0)
    session.received(HeartbeatAnswer(1, 2, 1, 6), 101.1)
    assert session.view is None


def test_a_session_that_stays_behind_is_given_up() -> None:
    session = open_session(100.0, head=5)
    now = 101.0
    while session.phase is Phase.OPEN and now < 110.0:
        for effect in session.tick(now):
            if isinstance(effect, Send) and isinstance(effect.message, Heartbeat):
                session.received(HeartbeatAnswer(1, 2, effect.message.number, 6), now)
        now = session.next_deadline() or now
    assert session.phase is Phase.BACKING_OFF
    assert now < 101.0 + TTL_S


def test_heartbeats_go_out_every_quarter_of_the_ttl_with_growing_numbers() -> None:
    session = open_session(100.0)
    sent = []
    for _ in range(4):
        now = session.next_deadline()
        assert now is not None
        [effect] = session.tick(now)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Heartbeat)
        sent.append((now, effect.message.number))
        session.received(HeartbeatAnswer(1, 2, effect.message.number, 0), now)
    assert sent == [(101.0, 1), (102.0, 2), (103.0, 3), (104.0, 4)]


def test_a_session_without_answers_is_lost_soon_after_it_stopped_being_fresh() -> None:
    session = open_session(100.0)
    effects: list[Effect] = []
    now = 100.0
    while not any(isinstance(effect, Lost) for effect in effects):
        now = session.next_deadline() or now
        effects += session.tick(now)
    assert 100.0 + TTL_S < now <= 100.0 + 2 * TTL_S


def test_heartbeats_whose_answers_are_lost_are_not_remembered_for_ever() -> None:
    session = open_session(100.0)
    for turn in range(100):
        now = session.next_deadline() or 0.0
        [effect] = session.tick(now)
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Heartbeat)
        if turn % 3 == 0:
            session.received(HeartbeatAnswer(1, 2, effect.message.number, 0), now)
    assert len(session._unanswered) <= 4


@pytest.mark.parametrize("gap", [TTL_S, TTL_S * 10])
def test_a_process_that_was_stopped_for_longer_than_the_ttl_wakes_up_not_fresh(gap: float) -> None:
    session = open_session(100.0)
    session.tick(101.0)
    now = 101.0 + gap
    assert not is_fresh(session, now)
    session.received(HeartbeatAnswer(1, 2, 1, 0), now)  # it had come while the process was stopped
    assert not is_fresh(session, now)


def test_hello_again_ends_a_session_and_the_next_hello_needs_a_new_connection() -> None:
    session = open_session(100.0)
    assert session.received(HelloAgain("restarted"), 101.0) == [Lost("hello_again")]
    assert session.connected(101.0) == []
    now = session.next_deadline()
    assert now is not None
    assert session.tick(now) == [Connect()]
    assert session.connected(now) == [Send(msgspec.structs.replace(HELLO, lineage="lineage", term=1))]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Refused(0, "full"), "refused"),
        (HelloAgain("who?"), "hello_again"),
        (welcome(version=PROTOCOL_VERSION + 1), "version"),
        (welcome(ttl_ms=10), "ttl"),
    ],
)
def test_a_hello_that_opens_no_session_is_repeated_with_growing_pauses(
    message: Refused | HelloAgain | Welcome, reason: str
) -> None:
    session = greeting_session(100.0)
    now = 100.0
    pauses = []
    for _ in range(8):
        assert session.received(message, now) == [Lost(reason)]
        due = session.next_deadline()
        assert due is not None
        pauses.append(due - now)
        now = due
        assert session.tick(now) == [Connect()]
        assert session.connected(now) == [Send(HELLO)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(BACKOFF_MOST_S)


def test_a_session_that_ends_before_its_first_answer_does_not_reset_the_pauses() -> None:
    session = greeting_session(100.0)
    pauses = []
    for _ in range(3):
        session.received(welcome(), 100.0)
        session.received(HelloAgain("no"), 100.0)
        due = session.next_deadline()
        assert due is not None
        pauses.append(due - 100.0)
        session.tick(due)
        session.connected(100.0)
    assert pauses[0] < pauses[1] < pauses[2]


def test_pauses_grow_no_longer_than_a_part_of_the_time_to_live_of_the_last_session() -> None:
    session = greeting_session(100.0)
    session.received(welcome(ttl_ms=1000), 100.0)
    now = 100.0
    for _ in range(8):
        session.disconnected("x", "x", now)
        due = session.next_deadline()
        assert due is not None
        pause, now = due - now, due
        session.tick(now)
    assert pause == pytest.approx(0.25)


def test_pauses_are_jittered() -> None:
    session = Session(HELLO, random=lambda: 0.25)
    session.start(0.0)
    session.disconnected("x", "x", 0.0)
    quarter = session.next_deadline()
    assert quarter is not None
    other = Session(HELLO, random=lambda: 0.5)
    other.start(0.0)
    other.disconnected("x", "x", 0.0)
    assert other.next_deadline() == pytest.approx(2 * quarter)


def test_an_unanswered_hello_is_given_up() -> None:
    session = greeting_session(100.0)
    assert session.tick(100.0 + HELLO_PATIENCE_S / 2) == []
    assert session.tick(100.0 + HELLO_PATIENCE_S) == [Lost("no_welcome")]
    session.received(welcome(), 103.0)
    assert session.view is None, "a welcome to a hello that was given up opened a session"


@pytest.mark.parametrize(
    "message",
    [Committed(9, 2, 1, []), Committed(1, 9, 1, []), HeartbeatAnswer(9, 2, 1, 0), HeartbeatAnswer(1, 9, 1, 0)],
)
def test_messages_of_another_term_or_session_are_ignored_and_counted(message: Committed | HeartbeatAnswer) -> None:
    counters = Counters()
    session = Session(HELLO, random=lambda: 1.0, counters=counters)
    session.start(100.0)
    session.connected(100.0)
    session.received(welcome(), 100.0)
    session.tick(101.0)
    before = session.view
    assert session.received(message, 101.0) == []
    assert session.view == before
    assert counters.snapshot()[f"control.ignored.{type(message).__name__}"] == 1


def test_messages_of_the_session_are_delivered() -> None:
    session = open_session()
    assert session.received(Committed(1, 2, 7, []), 100.0) == [Deliver(Committed(1, 2, 7, []))]
    assert session.received(Refused(7, "no"), 100.0) == [Deliver(Refused(7, "no"))]


def test_a_closed_session_says_goodbye_once_and_does_nothing_more() -> None:
    session = open_session()
    assert session.close() == [Send(Goodbye(1, 2))]
    assert session.view is None
    assert session.close() == []
    assert session.next_deadline() is None
    assert session.tick(1e9) == []
    assert session.received(welcome(), 101.0) == []


def test_a_push_that_does_not_follow_is_asked_for_again_and_nothing_is_fresh_meanwhile() -> None:
    session = open_session(100.0)
    one, two = (Selector.exactly(key_of(number)) for number in (1, 2))
    assert session.received(Push(1, 2, 1, 2, True, [(2, two)]), 100.5) == [Send(Resend(1, 2, 0))]
    assert session.view is None
    assert session.received(Push(1, 2, 1, 2, True, [(2, two)]), 100.5) == [], "it was asked for just now"
    both = Push(1, 2, 0, 2, True, [(1, one), (2, two)])
    assert session.received(both, 100.6) == [Outdated([one, two]), Send(Applied(1, 2, 2))]
    assert is_fresh(session, 101.0)
    assert not any(isinstance(effect, Send) for effect in session.received(both, 100.7)), "it is known already"


def test_a_last_push_that_was_lost_is_asked_for_once_a_heartbeat_tells_of_it() -> None:
    session = open_session(100.0)
    [sent] = session.tick(101.3)
    assert isinstance(sent, Send)
    assert isinstance(sent.message, Heartbeat)
    assert session.received(HeartbeatAnswer(1, 2, sent.message.number, 1), 101.4) == [Send(Resend(1, 2, 0))]
    assert session.view is None
    one = Selector.exactly(key_of(1))
    assert session.received(Push(1, 2, 0, 1, True, [(1, one)]), 101.5) == [Outdated([one]), Send(Applied(1, 2, 1))]
    assert is_fresh(session, 101.6)


def test_a_part_of_a_table_is_not_acknowledged_before_the_last_is_there() -> None:
    session = greeting_session(100.0)
    one, two = (Selector.exactly(key_of(number)) for number in (1, 2))
    session.received(welcome(head=2), 100.0)
    assert session.received(Push(1, 2, 0, 1, False, [(1, one)]), 100.1) == [Outdated([one])]
    assert session.view is None
    assert session.received(Push(1, 2, 1, 2, True, [(2, two)]), 100.2) == [Outdated([two]), Send(Applied(1, 2, 2))]
    assert is_fresh(session, 101.0)


def key_of(number: int) -> EmbeddingKey:
    return EmbeddingKey("model", "1", f"item-{number}")


class AnySchedule(RuleBasedStateMachine):
    """Time, answers and pushes in any order, losses and restarts; a model of what the controller has answered.

    Invalidation number N is of key N alone, so that a client heeds it if, and only if, that key's generation is N.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.session = Session(HELLO, random=lambda: 0.5)
        self.numbers = 0
        self.hello: Hello | None = None
        self.hello_sent: float | None = None
        self.connections = 0
        self.hellos = 0
        self.open: Welcome | None = None
        self.beats: dict[int, float] = {}
        self.proven = 0.0
        self.head = 0
        self.told = 0
        self.pushed = 0
        self.pushes: list[Push] = []
        self.outdated = 0
        self.perform(self.session.start(self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Connect):
                self.connections += 1
            elif isinstance(effect, Began):
                assert self.open is not None
                assert (effect.view.term, effect.view.session) == (self.open.term, self.open.session)
            elif isinstance(effect, Outdated) and effect.selectors is not None:
                self.outdated = max(int(str(one.mm_hash).removeprefix("item-")) for one in effect.selectors)
            elif isinstance(effect, Lost):
                self.open = None
                self.hello_sent = None
                self.beats.clear()
                self.pushes.clear()
            elif isinstance(effect, Send) and isinstance(effect.message, Hello):
                self.hellos += 1
                self.hello, self.hello_sent = effect.message, self.now
                self.heeds(effect.message.applied)
                assert self.hellos <= self.connections, "a hello over a connection that had one before"
            elif isinstance(effect, Send) and isinstance(effect.message, Heartbeat):
                assert self.open is not None
                assert effect.message.number not in self.beats
                self.heeds(effect.message.applied)
                self.beats[effect.message.number] = self.now
            elif isinstance(effect, Send) and isinstance(effect.message, Applied):
                self.heeds(effect.message.applied)
                assert self.outdated >= effect.message.applied, "acknowledged before anybody here was told"
            elif isinstance(effect, Send) and isinstance(effect.message, Resend):
                self.push(effect.message.after, self.head)

    def heeds(self, number: int, replica: Replica | None = None) -> None:
        """What the client says to heed, it must, and all that it was told of while it is fresh."""
        for each in range(1, number + 1):
            key = key_of(each)
            assert (replica or self.session._replica).generation(key.scope, key.mm_digest) == each

    def push(self, after: int, through: int) -> None:
        """All of it in one or two messages, which may be lost or late."""
        assert self.open is not None
        middle = (after + through) // 2
        for start, end in ((after, middle), (middle, through)) if middle > after else ((after, through),):
            invalidations = [(each, Selector.exactly(key_of(each))) for each in range(start + 1, end + 1)]
            message = Push(self.open.term, self.open.session, start, end, end == through, invalidations)
            self.pushes.append(message)
        self.pushed = through

    @precondition(lambda self: self.open is not None)
    @rule()
    def invalidate(self) -> None:
        self.head += 1
        self.push(self.pushed, self.head)

    @precondition(lambda self: self.pushes)
    @rule(data=st.data(), lost=st.sampled_from([False, False, True]))
    def push_arrives(self, data: st.DataObject, lost: bool) -> None:
        push = self.pushes.pop(data.draw(st.sampled_from([0, 0, 0, len(self.pushes) - 1])))
        if not lost:
            self.perform(self.session.received(push, self.now))

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 2.5, 7.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def tick_when_due(self) -> None:
        due = self.session.next_deadline()
        assert due is not None
        self.now = max(self.now, due)
        self.perform(self.session.tick(self.now))
        after = self.session.next_deadline()
        assert after is not None
        assert after > self.now, "a tick that leaves its deadline in the past would spin"

    @rule()
    def tick(self) -> None:
        self.perform(self.session.tick(self.now))

    @precondition(lambda self: self.session.phase is Phase.CONNECTING)
    @rule()
    def connected(self) -> None:
        self.perform(self.session.connected(self.now))

    @precondition(lambda self: self.hello_sent is not None and self.open is None)
    @rule(resumes=st.booleans())
    def welcome(self, resumes: bool) -> None:
        self.numbers += 1
        assert self.hello_sent is not None
        assert self.hello is not None
        after = self.hello.applied if resumes and self.hello.lineage else 0
        self.open = welcome(term=self.numbers % 3, session=self.numbers, head=self.head, after=after)
        self.proven, self.told, self.pushed = self.hello_sent, self.head, after
        self.perform(self.session.received(self.open, self.now))
        if after < self.head:
            self.push(after, self.head)

    @precondition(lambda self: self.beats)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        assert self.open is not None
        number = data.draw(st.sampled_from(sorted(self.beats)))
        self.told = self.head
        self.proven = max(self.proven, self.beats[number])
        self.perform(
            self.session.received(HeartbeatAnswer(self.open.term, self.open.session, number, self.head), self.now)
        )

    @rule(number=st.integers(0, 5), session=st.integers(0, 5))
    def stray_answer(self, number: int, session: int) -> None:
        if self.open is None or session != self.open.session:
            self.perform(self.session.received(HeartbeatAnswer(0, session, number, 0), self.now))

    @rule()
    def hello_again(self) -> None:
        self.perform(self.session.received(HelloAgain("no"), self.now))

    @rule()
    def disconnected(self) -> None:
        self.perform(self.session.disconnected("broken", "broken", self.now))

    @invariant()
    def never_fresh_beyond_what_was_answered(self) -> None:
        if not hasattr(self, "open"):
            return
        view = self.session.view
        if view is None:
            return
        assert view.fresh_until <= self.proven + TTL_S
        self.heeds(self.told, view.replica)

    @invariant()
    def tables_are_bounded(self) -> None:
        assert len(self.session._unanswered) <= 5


AnySchedule.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnySchedule = AnySchedule.TestCase
