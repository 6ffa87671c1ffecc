"""The client's half of a session with the controller: a state machine that does no I/O.

    IDLE ──► CONNECTING ──► GREETING ──► OPEN
                 ▲              │          │
                 └─ BACKING_OFF ◄──────────┘          CLOSED from everywhere

Its owner calls it with what happened and performs the effects that it returns, in order. Times are seconds on
CLOCK_BOOTTIME (it counts suspension) and arguments throughout.

Freshness: the controller may forget a session, and tell others that it did, its TTL after the last heartbeat that it
answered. It answers later than the heartbeat was sent, so a client that counts from the sending stops trusting its
session first. A new session needs a new connection, so that no answer to an earlier hello can open it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Acquired,
    ClientMessage,
    Committed,
    ControllerMessage,
    Figures,
    Found,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Refused,
    Renewed,
    Resolved,
    Welcome,
)

if TYPE_CHECKING:
    from mmcache.metrics import Counters

CONNECT_PATIENCE_S: Final = 2.0
HELLO_PATIENCE_S: Final = 2.0
HEARTBEATS_PER_TTL: Final = 4
IN_DOUBT_S: Final = 0.25
"""Between heartbeats while a caller has waited in vain."""
SHORTEST_TTL_S: Final = 0.05
"""A welcome with a shorter TTL would have us do nothing but heartbeats; it is not accepted."""
BACKOFF_BASE_S: Final = 0.1
BACKOFF_MOST_S: Final = 2.0


class SessionView(NamedTuple):
    """What a caller may rely on while CLOCK_BOOTTIME is below `fresh_until`. All times are seconds."""

    term: int
    session: int
    lineage: str
    lease_s: float
    """The store's read lease."""
    head: int
    """Newest number of the invalidation sequence that the controller named; all up to it are applied."""
    fresh_until: float


class Connect(NamedTuple):
    """Close the connection, if there is one, and open another; then call `connected`."""


class Send(NamedTuple):
    """Send this over the connection."""

    message: ClientMessage


class Began(NamedTuple):
    """There is a session: its term and number go into every message."""

    view: SessionView


class Lost(NamedTuple):
    """The session is over, and so are all requests, waits and claims in it. Close the connection."""

    reason: str
    """A short word for counters."""


class Deliver(NamedTuple):
    """A message of this session that is not the session's own business."""

    message: Acquired | Resolved | Renewed | Committed | Found | Figures | Refused


Effect = Connect | Send | Began | Lost | Deliver


class Phase(enum.Enum):
    """Where a session stands."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    OPEN = "open"
    BACKING_OFF = "backing_off"
    CLOSED = "closed"


class Session:
    """One session after another with one controller.

    Args:
        hello: opens each of them.
        random: returns numbers from 0 to below 1, for jitter.
        counters: counts sessions begun and lost, failed hellos, and messages that were ignored.
    """

    def __init__(self, hello: Hello, *, random: Callable[[], float], counters: Counters | None = None) -> None:
        self.phase = Phase.IDLE
        self.trouble = "not started"
        """Why there is no session, for people; of an open session, the last trouble."""
        self.view: SessionView | None = None
        """The session as of its last answered heartbeat, fresh only before its `fresh_until`; None without a session
        and while it is behind the invalidation sequence."""
        self._hello = hello
        self._random = random
        self._counters = counters
        self._failures = 0
        """Sessions that failed since one last had a heartbeat answered; they space out the next attempts."""
        self._act_at: float | None = None
        """When `tick` has something to do: give up waiting, connect again, or send a heartbeat."""
        self._hello_sent = 0.0
        self._welcome: Welcome | None = None
        self._ttl = 0.0
        self._applied = 0
        self._head = 0
        self._fresh_until = 0.0
        self._behind_since: float | None = None
        self._number = 0
        self._in_doubt = False
        self._unanswered: dict[int, float] = {}
        """When each heartbeat was sent whose answer could still prove something; at most a TTL's worth."""

    def start(self, now: float) -> list[Effect]:
        """Begin to look for a session."""
        if self.phase is not Phase.IDLE:
            raise RuntimeError(f"a session is started once, not when it is {self.phase.value}")
        return self._connect(now)

    def connected(self, now: float) -> list[Effect]:
        """The connection that was asked for can take a message, which is sent at once: freshness counts from now."""
        if self.phase is not Phase.CONNECTING:
            return []
        self.phase = Phase.GREETING
        self._hello_sent = now
        self._act_at = now + HELLO_PATIENCE_S
        return [Send(self._hello)]

    def disconnected(self, reason: str, trouble: str, now: float) -> list[Effect]:
        """The connection failed, or whoever uses it did. Another connection could not carry this session on."""
        if self.phase in (Phase.CONNECTING, Phase.GREETING, Phase.OPEN):
            return self._give_up(reason, trouble, now)
        return []

    def received(self, message: ControllerMessage, now: float) -> list[Effect]:
        """A message came over the present connection."""
        match message:
            case Welcome():
                return self._welcomed(message, now)
            case HelloAgain():
                if self.phase in (Phase.GREETING, Phase.OPEN):
                    return self._give_up("hello_again", f"the controller asks for another hello: {message.reason}", now)
            case Refused():
                if self.phase is Phase.GREETING:
                    return self._give_up("refused", f"the controller refuses: {message.reason}", now)
                if self.phase is Phase.OPEN:
                    return [Deliver(message)]
            case HeartbeatAnswer():
                if self._is_ours(message.term, message.session):
                    self._answered(message, now)
                    return []
            case _:
                if self._is_ours(message.term, message.session):
                    return [Deliver(message)]
        self._count("control.ignored", type(message).__name__)
        return []

    def tick(self, now: float) -> list[Effect]:
        """Do what is due."""
        due = self.next_deadline()
        if due is None or now < due:
            return []
        match self.phase:
            case Phase.CONNECTING:
                return self._give_up("no_connection", "nobody accepts a connection", now)
            case Phase.GREETING:
                return self._give_up("no_welcome", "the hello was not answered", now)
            case Phase.BACKING_OFF:
                return self._connect(now)
            case _:
                if now >= self._lost_at():
                    return self._give_up("not_fresh", "heartbeats were not answered in time", now)
                return [Send(self._heartbeat(now))]

    def doubt(self, now: float) -> None:
        """A caller had no answer in time: send a heartbeat now, and more soon, until one is answered."""
        self._in_doubt = True
        if self.phase is Phase.OPEN:
            self._act_at = now

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        if self.phase is Phase.OPEN and self._act_at is not None:
            return min(self._act_at, self._lost_at())
        return self._act_at

    def close(self) -> list[Effect]:
        """End it for good. The goodbye may be sent only once nobody takes the session for fresh any more."""
        welcome, is_open = self._welcome, self.phase is Phase.OPEN
        self.phase = Phase.CLOSED
        self.trouble = "closed"
        self.view = None
        self._act_at = None
        return [Send(Goodbye(welcome.term, welcome.session))] if welcome is not None and is_open else []

    def _connect(self, now: float) -> list[Effect]:
        self.phase = Phase.CONNECTING
        self._act_at = now + CONNECT_PATIENCE_S
        return [Connect()]

    def _welcomed(self, welcome: Welcome, now: float) -> list[Effect]:
        if self.phase is not Phase.GREETING:
            self._count("control.ignored", "Welcome")
            return []
        if welcome.version != PROTOCOL_VERSION:
            trouble = f"the controller speaks protocol {welcome.version}, this client {PROTOCOL_VERSION}"
            return self._give_up("version", trouble, now)
        if welcome.ttl_ms < SHORTEST_TTL_S * 1000:
            return self._give_up("ttl", f"the controller allows sessions {welcome.ttl_ms} ms only", now)
        self.phase = Phase.OPEN
        self._welcome = welcome
        self._ttl = welcome.ttl_ms / 1000
        self._applied = self._head = welcome.head
        self._behind_since = None
        self._fresh_until = self._hello_sent + self._ttl
        self._number = 0
        self._in_doubt = False
        self._unanswered.clear()
        self._act_at = self._hello_sent + self._ttl / HEARTBEATS_PER_TTL
        self._count("control.session")
        self.view = SessionView(
            term=welcome.term,
            session=welcome.session,
            lineage=welcome.lineage,
            lease_s=welcome.lease_ms / 1000,
            head=welcome.head,
            fresh_until=self._fresh_until,
        )
        return [Began(self.view)]

    def _heartbeat(self, now: float) -> Heartbeat:
        welcome = self._welcome
        if welcome is None:
            raise RuntimeError("a heartbeat without a session")
        self._number += 1
        self._unanswered[self._number] = now
        for number, sent in list(self._unanswered.items()):
            if sent + self._ttl > now:
                break
            del self._unanswered[number]
        interval = self._ttl / HEARTBEATS_PER_TTL
        self._act_at = now + (min(interval, IN_DOUBT_S) if self._in_doubt else interval)
        return Heartbeat(welcome.term, welcome.session, self._number, self._applied)

    def _answered(self, answer: HeartbeatAnswer, now: float) -> None:
        self._head = max(self._head, answer.head)  # believed even of an answer that proves nothing else
        if self._applied < self._head and self._behind_since is None:
            self._behind_since = now
            self.view = None
        sent = self._unanswered.pop(answer.number, None)
        if sent is None:
            self._count("control.ignored", "HeartbeatAnswer")
            return
        self._failures = 0
        self._in_doubt = False
        self._fresh_until = max(self._fresh_until, sent + self._ttl)
        if self.view is not None:
            self.view = self.view._replace(fresh_until=self._fresh_until)

    def _lost_at(self) -> float:
        """Long after it stopped being fresh: the controller has forgotten it too, or will not be heard again."""
        stale_since = self._fresh_until if self._behind_since is None else min(self._fresh_until, self._behind_since)
        return stale_since + self._ttl / 2

    def _give_up(self, reason: str, trouble: str, now: float) -> list[Effect]:
        """Leave this connection, and try anew after a pause that grows and that no two clients share."""
        was_open = self.phase is Phase.OPEN
        self.phase = Phase.BACKING_OFF
        self.trouble = trouble
        self.view = None
        self._welcome = None
        pause = min(BACKOFF_MOST_S, BACKOFF_BASE_S * 2.0 ** min(self._failures, 10))
        self._failures += 1
        self._act_at = now + pause * self._random()
        self._count("control.lost" if was_open else "control.hello_failed", reason)
        return [Lost(reason)]

    def _is_ours(self, term: int, session: int) -> bool:
        welcome = self._welcome
        return self.phase is Phase.OPEN and welcome is not None and (term, session) == (welcome.term, welcome.session)

    def _count(self, name: str, reason: str = "") -> None:
        if self._counters is not None:
            self._counters.add(name, reason=reason)
