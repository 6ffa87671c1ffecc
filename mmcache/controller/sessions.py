"""Who is there: sessions by connection, and when each is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from mmcache.control.messages import Hello
from mmcache.controller.deadlines import Deadlines

DRIFT_BOUND: Final = 0.05
"""Most by which the rates of the clocks here and at the client differ; a session lives here that much longer."""


class Session(NamedTuple):
    """One client's session. `number` is random; `name`, `host` and `pid` are labels for people."""

    number: int
    peer: bytes
    name: str
    host: str
    pid: int


class Sessions:
    """Live sessions, at most one a connection.

    A session lives for its TTL and the drift bound after its last answered heartbeat, so it never ends here before it
    has ended at the client. `random_session` returns positive integers of at most 63 bits.
    """

    def __init__(self, *, ttl_s: float, max_sessions: int, random_session: Callable[[], int]) -> None:
        self._lifetime = ttl_s * (1 + DRIFT_BOUND)
        self._max_sessions = max_sessions
        self._random_session = random_session
        self._by_peer: dict[bytes, Session] = {}
        self._by_number: dict[int, Session] = {}
        self._deadlines: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def full(self) -> bool:
        """Whether no further session fits."""
        return len(self._by_number) >= self._max_sessions

    def begin(self, peer: bytes, hello: Hello, now: float) -> Session:
        """Open a session for a connection that has none; the caller has asked whether it is `full`."""
        if peer in self._by_peer or self.full:
            raise RuntimeError("a session was begun where there is one, or where none fits")
        number = self._random_session()
        while number in self._by_number:
            number = self._random_session()
        session = Session(number, peer, hello.name, hello.host, hello.pid)
        self._by_peer[peer] = self._by_number[number] = session
        self._deadlines.set(number, now + self._lifetime)
        return session

    def at(self, peer: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_peer.get(peer)

    def peer_of(self, number: int) -> bytes:
        """The connection of a live session."""
        return self._by_number[number].peer

    def keep(self, session: Session, now: float) -> None:
        """A heartbeat of it is answered now."""
        self._deadlines.set(session.number, now + self._lifetime)

    def end(self, session: Session) -> None:
        """Remove a live session."""
        del self._by_peer[session.peer], self._by_number[session.number]
        self._deadlines.discard(session.number)

    def expire(self, now: float) -> list[Session]:
        """Remove and return the sessions that are over."""
        over = [self._by_number[number] for number in self._deadlines.pop_due(now)]
        for session in over:
            self.end(session)
        return over

    def next_deadline(self) -> float | None:
        """When the next session is over, unless it is kept."""
        return self._deadlines.next()
