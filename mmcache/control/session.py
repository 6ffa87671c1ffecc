"""The client's half of a session with the controller: a state machine that does no I/O.

    IDLE ──► CONNECTING ──► GREETING ──► OPEN
                 ▲              │          │
                 └─ BACKING_OFF ◄──────────┘          CLOSED from everywhere

Its owner calls it with what happened and performs the effects that it returns, in order. Times are seconds on
CLOCK_BOOTTIME (it counts suspension) and arguments throughout.

Freshness: the controller may forget a session, and tell others that it did, its TTL after the last heartbeat that it
answered. It answers later than the heartbeat was sent, so a client that counts from the sending stops trusting its
session first. A new session needs a new connection, so that no answer to an earlier hello can open it.

Invalidations are applied in succession only. Each is acknowledged once it counts here, which is what lets the
controller say that it is complete: whoever keeps what it may concern is told before (`Outdated`).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Acquired,
    Applied,
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
    Invalidated,
    PinAnswer,
    Progress,
    Push,
    Refused,
    Renewed,
    Resend,
    Resolved,
    Welcome,
)
from mmcache.control.replica import Replica
from mmcache.selector import Selector

if TYPE_CHECKING:
    from mmcache.metrics import Counters

CONNECT_PATIENCE_S: Final = 2.0
HELLO_PATIENCE_S: Final = 2.0
HEARTBEATS_PER_TTL: Final = 4
IN_DOUBT_S: Final = 0.25
"""Between heartbeats while a caller has waited in vain."""
RESEND_PATIENCE_S: Final = 0.25
"""How long what was asked for again may take, before it is asked for once more."""
SHORTEST_TTL_S: Final = 0.05
"""A welcome with a shorter TTL would have us do nothing but heartbeats; it is not accepted."""
BACKOFF_BASE_S: Final = 0.1
BACKOFF_MOST_S: Final = 2.0
BACKOFF_MOST_TTL: Final = 0.25
"""Nor more than this part of the last session's TTL: a controller that comes back is to have its clients soon."""


class SessionView(NamedTuple):
    """What a caller may rely on while CLOCK_BOOTTIME is below `fresh_until`. All times are seconds."""

    term: int
    session: int
    lease_s: float
    """The store's read lease."""
    replica: Replica
    """Generations, up to all that the controller named. It goes on with the invalidations that come."""
    fresh_until: float
    min_embeddings: int = 0
    """What has fewer is not to be published."""
    max_bytes: int = (1 << 63) - 1
    """Nor is what has more, with its prefix."""

    @property
    def lineage(self) -> str:
        """Made together with the controller's database; a part of every name in the store."""
        return self.replica.lineage


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


class Outdated(NamedTuple):
    """What these match is not what it was. None: that holds for everything, since the lineage is another one."""

    selectors: Sequence[Selector] | None


class Deliver(NamedTuple):
    """A message of this session that is not the session's own business."""

    message: Acquired | Resolved | Renewed | Committed | Found | Figures | Refused | Invalidated | Progress | PinAnswer


Effect = Connect | Send | Began | Lost | Outdated | Deliver


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
        """The session as of its last answered heartbeat, fresh before its `fresh_until` only, also when it is lost.

        None before the first, and while one is behind the invalidation sequence.
        """
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
        self._replica = Replica("")
        self._term = 0
        """The last whose welcome was accepted; 0 before the first."""
        self._received = 0
        """Up to where pushes came in succession. All of it counts only where the last of them was whole."""
        self._head = 0
        self._missed_at: float | None = None
        """When it was asked to push again what a push did not follow."""
        self._fresh_until = 0.0
        self._behind_since: float | None = None
        self._number = 0
        self._in_doubt = False
        self._opened: SessionView | None = None
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
        replica = self._replica
        earlier = {"lineage": replica.lineage, "applied": replica.head, "term": self._term}
        return [Send(msgspec.structs.replace(self._hello, **earlier))]

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
            case Push():
                if self._is_ours(message.term, message.session):
                    return self._pushed(message, now)
            case HeartbeatAnswer():
                if self._is_ours(message.term, message.session):
                    return self._answered(message, now)
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
        replica = self._replica
        resumes = welcome.lineage == replica.lineage and welcome.after == replica.head
        if not (resumes or welcome.after == 0) or welcome.after > welcome.head:
            return self._give_up("after", "the controller's welcome does not fit what was asked for", now)
        self.phase = Phase.OPEN
        self._welcome = welcome
        self._term = welcome.term
        self._ttl = welcome.ttl_ms / 1000
        outdated: list[Effect] = []
        if not resumes:
            outdated = [Outdated(None)] if replica.lineage else []
            replica = self._replica = Replica(welcome.lineage)
        self._received = replica.head
        self._head = welcome.head
        self._missed_at = None
        self._behind_since = now if replica.head < welcome.head else None
        self._fresh_until = self._hello_sent + self._ttl
        self._number = 0
        self._in_doubt = False
        self._unanswered.clear()
        self._act_at = self._hello_sent + self._ttl / HEARTBEATS_PER_TTL
        self._count("control.session")
        view = SessionView(
            term=welcome.term,
            session=welcome.session,
            lease_s=welcome.lease_ms / 1000,
            replica=replica,
            fresh_until=self._fresh_until,
            min_embeddings=welcome.min_embeddings,
            max_bytes=welcome.max_bytes,
        )
        self._opened = view
        self.view = view if self._behind_since is None else None
        return [*outdated, Began(view)]

    def _pushed(self, push: Push, now: float) -> list[Effect]:
        """Apply what follows what is there; ask for what was lost before it, once and then again after a while."""
        replica, welcome = self._replica, self._welcome
        if welcome is None or push.through < push.after:
            return []
        self._head = max(self._head, push.through)
        if push.after > self._received:
            self._fall_behind(now)
            return self._ask_again(welcome, now)
        if push.through <= self._received and not push.whole:
            return []
        replica.apply(push.invalidations)
        self._received = max(self._received, push.through)
        if self._behind_since is not None:
            self._behind_since = now  # it moves
        effects: list[Effect] = []
        if push.invalidations:
            effects.append(Outdated([selector for _, selector in push.invalidations]))
        if push.whole and push.through > replica.head:
            replica.head = push.through
            effects.append(Send(Applied(welcome.term, welcome.session, replica.head)))
            if replica.head >= self._head:
                self._missed_at = self._behind_since = None
                self._show()
            else:
                self._fall_behind(now)
        return effects

    def _ask_again(self, welcome: Welcome, now: float) -> list[Effect]:
        """What follows `_received` was lost: ask for it, once and then again after a while."""
        if self._missed_at is not None and now < self._missed_at + RESEND_PATIENCE_S:
            return []
        self._count("control.gap")
        self._missed_at = now
        return [Send(Resend(welcome.term, welcome.session, self._received))]

    def _fall_behind(self, now: float) -> None:
        if self._behind_since is None:
            self._behind_since = now
        self.view = None

    def _show(self) -> None:
        self.view = self._opened._replace(fresh_until=self._fresh_until) if self._opened is not None else None

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
        return Heartbeat(welcome.term, welcome.session, self._number, self._replica.head)

    def _answered(self, answer: HeartbeatAnswer, now: float) -> list[Effect]:
        self._head = max(self._head, answer.head)  # believed even of an answer that proves nothing else
        effects: list[Effect] = []
        if self._replica.head < self._head:
            self._fall_behind(now)
            if self._welcome is not None and self._received < answer.head:  # pushes come before what names them
                effects = self._ask_again(self._welcome, now)
        sent = self._unanswered.pop(answer.number, None)
        if sent is None:
            self._count("control.ignored", "HeartbeatAnswer")
            return effects
        self._failures = 0
        self._in_doubt = False
        self._fresh_until = max(self._fresh_until, sent + self._ttl)
        if self.view is not None:
            self._show()
        return effects

    def _lost_at(self) -> float:
        """Long after it stopped being fresh: the controller has forgotten it too, or will not be heard again."""
        stale_since = self._fresh_until if self._behind_since is None else min(self._fresh_until, self._behind_since)
        return stale_since + self._ttl / 2

    def _give_up(self, reason: str, trouble: str, now: float) -> list[Effect]:
        """Leave this connection, and try anew after a pause that grows and that no two clients share.

        What was fresh stays so for its time: the controller waits for that, however a session ends.
        """
        was_open = self.phase is Phase.OPEN
        self.phase = Phase.BACKING_OFF
        self.trouble = trouble
        self._welcome = self._opened = None
        most = min(BACKOFF_MOST_S, self._ttl * BACKOFF_MOST_TTL) if self._ttl else BACKOFF_MOST_S
        pause = min(most, BACKOFF_BASE_S * 2.0 ** min(self._failures, 10))
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
