"""Who is there: sessions by connection, when each is over, and which invalidations each may not heed yet.

A client trusts its session for a TTL from the sending of a heartbeat that was answered, and only while it has applied
all invalidations that the answer named. So a session is settled for an invalidation when it has acknowledged it, or a
TTL and the drift bound after the last answer that named an earlier head, however the session ended meanwhile. Only its
own goodbye, sent once it trusts itself no more, settles it sooner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from mmcache.control.messages import Hello
from mmcache.controller.deadlines import Deadlines

DRIFT_BOUND: Final = 0.05
"""Most by which the rates of the clocks here and at the client differ; a session lives here that much longer."""
EVERYTHING: Final = 1 << 63
"""Above every number of an invalidation."""


class Session:
    """One client's session. `number` is random; `name`, `host` and `pid` are labels for people.

    `answers` are the heads that it was told of and may still act on, each with when it was told last.
    """

    __slots__ = (
        "acknowledged",
        "answers",
        "counted",
        "host",
        "name",
        "number",
        "peer",
        "pid",
        "pushed",
        "serves_stale",
    )

    def __init__(self, number: int, peer: bytes, hello: Hello, *, head: int, now: float) -> None:
        self.number = number
        self.peer = peer
        self.name = hello.name
        self.host = hello.host
        self.pid = hello.pid
        self.serves_stale = hello.serves_stale
        self.acknowledged = 0
        self.answers = deque([(head, now)])
        self.pushed = 0
        """Up to where invalidations were pushed to it."""
        self.counted = head
        """`settled`, as the invalidations that wait for it have it."""

    @property
    def settled(self) -> int:
        """The last invalidation against which it serves nothing."""
        return max(self.acknowledged, self.answers[0][0]) if self.answers else EVERYTHING


class Sessions:
    """Live sessions, at most one a connection, and those that ended but whose clients may not know yet.

    A session lives for its TTL and the drift bound after its last answered heartbeat, so it never ends here before it
    has ended at the client. `random_session` returns positive integers of at most 63 bits.
    """

    def __init__(self, *, ttl_s: float, max_sessions: int, random_session: Callable[[], int]) -> None:
        self._lifetime = ttl_s * (1 + DRIFT_BOUND)
        self._max_sessions = max_sessions
        self._random_session = random_session
        self._by_peer: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._ended: dict[int, Session] = {}
        self._deadlines: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def full(self) -> bool:
        """Whether no further session fits. Those that have ended count too, where they are as many as may be alive."""
        live = len(self._by_number)
        return live >= self._max_sessions or live + len(self._ended) >= 2 * self._max_sessions

    def live(self) -> Iterator[Session]:
        """All that have not ended."""
        return iter(self._by_number.values())

    def all(self) -> Iterator[Session]:
        """Also those that have ended, and whose clients may not know."""
        yield from self._by_number.values()
        yield from self._ended.values()

    def begin(self, peer: bytes, hello: Hello, head: int, now: float) -> Session:
        """Open a session for a connection that has none; the caller has asked whether it is `full`."""
        if peer in self._by_peer or self.full:
            raise RuntimeError("a session was begun where there is one, or where none fits")
        number = self._random_session()
        while number in self._by_number or number in self._ended:
            number = self._random_session()
        session = Session(number, peer, hello, head=head, now=now)
        self._by_peer[peer] = self._by_number[number] = session
        self._deadlines.set(number, now + self._lifetime)
        return session

    def at(self, peer: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_peer.get(peer)

    def find(self, number: int) -> Session | None:
        """A live session."""
        return self._by_number.get(number)

    def peer_of(self, number: int) -> bytes:
        """The connection of a live session."""
        return self._by_number[number].peer

    def keep(self, session: Session, head: int, now: float) -> None:
        """A heartbeat of it is answered now, with this head."""
        if session.answers[-1][0] == head:
            session.answers.pop()
        session.answers.append((head, now))
        self._deadlines.set(session.number, session.answers[0][1] + self._lifetime)

    def settles_by(self, session: Session, number: int) -> float:
        """When it is settled for an invalidation, if it is never heard of again."""
        told = [at for head, at in session.answers if head < number]
        return told[-1] + self._lifetime if told and session.acknowledged < number else 0.0

    def trusted_until(self, session: Session) -> float:
        """When its client cannot trust it any more, if it is never heard of again."""
        return session.answers[-1][1] + self._lifetime if session.answers else 0.0

    def end(self, session: Session, *, knows: bool = False) -> None:
        """End a live session. Unless its client `knows`, it is remembered until that cannot trust it any more."""
        del self._by_peer[session.peer], self._by_number[session.number]
        if knows:
            session.answers.clear()
            self._deadlines.discard(session.number)
        else:
            self._ended[session.number] = session

    def expire(self, now: float) -> tuple[list[Session], list[Session]]:
        """What time alone has brought: live sessions that are over, and all that are settled for more than before."""
        over: list[Session] = []
        settled: list[Session] = []
        for number in self._deadlines.pop_due(now):
            live = self._by_number.get(number)
            session = self._ended[number] if live is None else live
            settled.append(session)
            answers = session.answers
            while answers and answers[0][1] + self._lifetime <= now:
                answers.popleft()
            if answers:
                self._deadlines.set(number, answers[0][1] + self._lifetime)
            elif live is not None:
                del self._by_peer[session.peer], self._by_number[number]
                over.append(session)
            else:
                del self._ended[number]
        return over, settled

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next, unless a session is kept meanwhile."""
        return self._deadlines.next()
