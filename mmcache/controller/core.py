"""The controller's decisions, without I/O: a message or the passing of time in, messages to connections out.

Sessions, entries and invalidations are its parts; this file is what messages mean to them. It answers each
message from the state alone, not from a memory of requests, and so that sending one again changes nothing. What must be
durable before anyone is told of it, `take_writes` tells, and `written` acts on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from mmcache.control.messages import (
    MAX_FIGURES,
    PROTOCOL_VERSION,
    Abandon,
    Abort,
    Acquire,
    Applied,
    ClientMessage,
    Commit,
    ControllerMessage,
    Figures,
    Follow,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Inspect,
    Invalidate,
    Leave,
    Lookup,
    Pin,
    Renew,
    Report,
    Resend,
    Resolved,
    Unpin,
    Used,
    Welcome,
)
from mmcache.controller.announcements import LOCAL_PEER, Announcements, Asked
from mmcache.controller.answers import batched, count_results, refused
from mmcache.controller.claims import Wake
from mmcache.controller.durable import MAX_TERMS, Past, ToWrite
from mmcache.controller.entries import Entries
from mmcache.controller.followers import LOCAL, Follower
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.pinning import Answers, PinAsked, Pinning, UnpinAsked
from mmcache.controller.reconciliation import Reconciliation
from mmcache.controller.removals import BATCH, Removals
from mmcache.controller.sessions import Session, Sessions
from mmcache.controller.views import Views
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

Effects = list[tuple[bytes, ControllerMessage]]
"""Messages to send, in order, each with the routing id of its connection."""
_SessionMessage = (
    Acquire
    | Heartbeat
    | Renew
    | Commit
    | Abort
    | Leave
    | Report
    | Lookup
    | Inspect
    | Goodbye
    | Applied
    | Resend
    | Invalidate
    | Follow
    | Abandon
    | Used
    | Pin
    | Unpin
)


SWEPT_AT_ONCE: Final = 1000
"""Entries that are looked at between two bursts of messages, after an invalidation: for a millisecond or two."""


class ControllerCore:
    """All that a controller knows and decides within one term.

    Times are seconds on one clock that counts suspension and never goes back. Peers are routing ids.

    Args:
        limits: times and bounds.
        term: random, of this start of the controller.
        past: what is durable of the terms before.
        random_session: returns random positive integers of at most 63 bits.
    """

    def __init__(self, limits: ControllerLimits, *, term: int, past: Past, random_session: Callable[[], int]) -> None:
        self.limits = limits
        self.term = term
        self.lineage = past.lineage
        self.went_back = ""
        """Why no more can be served: the database is older than what was told to a client. Empty if it is not."""
        ends = [*(head for _, head in past.terms[1:]), past.head]
        self._past_heads = dict(zip((term for term, _ in past.terms), ends, strict=False))
        """The last number that anyone can have heard of in each earlier term."""
        self._forgot_terms = len(past.terms) >= MAX_TERMS
        self._strangers_until = past.strangers_until
        self._settled_before = False
        """Whether the sessions of earlier terms have ended since it was last told."""
        self._counts: Counter[str] = Counter()
        self.removals = Removals(
            lineage=past.lineage, lease_ms=limits.lease_ms, most=limits.max_removals, counts=self._counts
        )
        self._sessions = Sessions(
            ttl_s=limits.ttl_ms / 1000, max_sessions=limits.max_sessions, random_session=random_session
        )
        self._invalidations = Invalidations(
            budget=limits.max_invalidations,
            held=past.held,
            head=past.head,
            pending=past.pending,
            strangers=past.strangers_until is not None,
        )
        self._announcements = Announcements(
            self._invalidations,
            self._sessions,
            term=term,
            max_followers=limits.max_followers,
            remembered=past.remembered,
        )
        self._entries = Entries(
            limits,
            term=term,
            scopes=past.scopes,
            invalidations=self._invalidations,
            announcements=self._announcements,
            removals=self.removals,
            counts=self._counts,
        )
        self.room = self._entries.room
        self.pinning = Pinning(limits, self._entries, term=term, past=past, counts=self._counts)
        self.room.is_pinned = self.pinning.pinned.is_pinned
        self.pinning.pinned.on_change = self.room.pin
        self.reconciliation = Reconciliation(self._entries, self.removals, self._counts)
        self.views = Views(
            self._sessions,
            self._entries.directory,
            self._invalidations,
            self._entries.scopes,
            self._entries.accounts,
            term=term,
            lineage=past.lineage,
        )
        self._settled = -math.inf  # what was due by then is over
        self._removals_out = 0
        """How many of the batch that is out are of old generations; the others are evicted."""
        self._wakes: list[Wake] = []
        """That removals have brought about, for the next tick."""
        self._later: Effects = []
        """What the message at hand brings about besides its answer."""

    def handle(self, peer: bytes, message: ClientMessage, now: float) -> Effects:
        """Act on a message. What was due before it came is settled before it is read."""
        effects = self.tick(now) if now > self._settled else []
        if self.went_back:
            return [*effects, (peer, refused(self._counts, 0, "went_back", self.went_back))]
        answer, wakes = self._hello(peer, message, now) if isinstance(message, Hello) else self._act(peer, message, now)
        if answer is not None:
            effects.append((peer, answer))
        effects += self._later
        self._later = []
        if wakes:
            effects += self._resolved(wakes)
        return effects

    def ask(self, request: int, asked: Sequence[Asked]) -> Effects:
        """Make invalidations for the controller's own process, which is `LOCAL_PEER` and needs no session.

        Among these effects, or those of `written` or `not_written`, is the answer: Invalidated (the last), or Refused.
        """
        answer = self._announcements.ask(Follower(LOCAL, request), *asked)
        return [] if answer is None else [(LOCAL_PEER, answer)]

    def follow(self, request: int, number: int, wait_ms: int, now: float) -> Effects:
        """Follow an invalidation for the controller's own process. The answer, then or later: Progress or Refused."""
        answer = self._announcements.follow(Follower(LOCAL, request), number, wait_ms, now)
        return [] if answer is None else [(LOCAL_PEER, answer)]

    def ask_pins(self, request: int, asked: PinAsked | UnpinAsked) -> Effects:
        """Pin or unpin for the controller's own process. The answer, then or later: PinAnswer or Refused."""
        answer = self.pinning.ask(Follower(LOCAL, request), asked)
        return [] if answer is None else [(LOCAL_PEER, answer)]

    def take_writes(self) -> ToWrite | None:
        """What must be durable before the effects of the last messages are sent; None: nothing.

        Then comes `written` or `not_written`. What is there besides invalidations is told once only.
        """
        announcements = self._announcements
        todo = ToWrite(
            self._entries.take_new_scopes(),
            self._invalidations.head + 1,
            tuple(announcements.asked),
            announcements.take_completed(),
            announcements.take_forgotten(),
            self._settled_before,
            None if announcements.asked else self.pinning.take(self._settled),
            self.pinning.take_over(),
        )
        self._settled_before = False
        return todo if any((todo.scopes, *todo[2:])) else None

    def measured(self, capacity: int, used: int, now: float) -> bool:
        """What the store's master says of its memory, in bytes; returns whether much is lost that should be there."""
        self.pinning.pinned.set_capacity(capacity or None)
        return self.room.measured(capacity, used, now)

    def take_removals(self, now: float) -> list[str]:
        """The store's names of the next batch to be removed; none: nothing is to be done now. `removed` follows."""
        evictions = self.room.evictions
        outdated = self.removals.take(now, BATCH // 2 if len(evictions) else BATCH)
        self._removals_out = len(outdated)
        evicted = evictions.take(BATCH - len(outdated), now)
        self._wakes += self._entries.settle_removals(now)
        return outdated + [
            store_name_of(name, lineage=self.lineage, generation=generation) for name, generation in evicted
        ]

    def removed(self, outcomes: Sequence[Outcome], now: float) -> None:
        """What became of the batch, name by name."""
        self.removals.done(outcomes[: self._removals_out], now)
        self.room.evictions.done(outcomes[self._removals_out :], now)
        self._removals_out = 0
        self._wakes += self._entries.settle_removals(now)

    def written(self, now: float) -> Effects:
        """It is durable."""
        effects = self._answered(self.pinning.written())
        if not self._announcements.asked:
            return effects
        self.count("invalidation", len(self._announcements.asked))
        effects += self._announcements.written(now)
        return effects + self._resolved(self._entries.outdate())

    def not_written(self, reason: str) -> Effects:
        """Nothing of what was asked for is durable, or going to be."""
        effects = [*self._announcements.refused(reason), *self._answered(self.pinning.not_written(reason))]
        return effects + self._resolved(self._entries.not_abandoned(self._settled))

    def malformed(self, peer: bytes, reason: str, now: float) -> Effects:
        """A peer sent what is no message. Its session, if it has one, goes on."""
        effects = self.tick(now)
        effects.append((peer, refused(self._counts, 0, "malformed", reason)))
        return effects

    def unreachable(self, peer: bytes, now: float) -> Effects:
        """A message to a peer could not be sent. The client of a session that lost one must start anew: end it."""
        self._counts["unreachable"] += 1
        effects = self.tick(now)
        session = self._sessions.at(peer)
        if session is not None:
            effects += self._resolved(self._end(session, now))
        return effects

    def tick(self, now: float) -> Effects:
        """End what is due."""
        over, settled = self._sessions.expire(now)
        wakes: list[Wake] = []
        effects: Effects = []
        if over:
            self._counts["session.expired"] += len(over)
            numbers = [session.number for session in over]
            wakes += self._entries.claims.end(numbers, now)
            self._announcements.end(numbers)
        if self._strangers_until is not None and now >= self._strangers_until:
            self._strangers_until = None
            self._settled_before = True
            self._invalidations.strangers_have_ended()
            effects += self._announcements.complete(now)
        if settled:
            effects += self._announcements.heard(settled, now)
        effects += self._announcements.expire(now)
        wakes += self._entries.claims.expire(now)
        self._entries.sweep(SWEPT_AT_ONCE)
        self.room.tick(now)
        wakes += [wake for wake in self._wakes if self._sessions.find(wake.session) is not None]
        wakes += self._entries.settle_removals(now)
        self._wakes = []
        effects += self._answered(self.pinning.tick(SWEPT_AT_ONCE, now))
        self._settled = now
        return effects + self._resolved(wakes) if wakes else effects

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, at the latest; None: not before another message."""
        deadlines = (
            self._sessions.next_deadline(),
            self._entries.claims.next_deadline(),
            self._announcements.next_deadline(),
            self._strangers_until,
            self.room.next_deadline(self._settled),
            self.pinning.pins.next_deadline(),
            self._settled if self._entries.directory.sweeping or self.pinning.busy or self._wakes else None,
        )
        return min((due for due in deadlines if due is not None), default=None)

    def stats(self) -> dict[str, int]:
        """Sizes of the tables now, and counts since the start."""
        return {
            "sessions": len(self._sessions),
            "entries": len(self._entries.directory),
            "claims": len(self._entries.claims),
            "waiters": self._entries.claims.waiting,
            "holds": self._entries.claims.held,
            "invalidations": len(self._invalidations.table),
            "invalidations_pending": len(self._invalidations.pending),
            "head": self._invalidations.head,
            "removals": len(self.removals),
            **self.room.sizes(),
            **self.pinning.sizes(),
            **self.reconciliation.found,
            **self._entries.accounts.figures(),
            **dict(sorted(self._counts.items())),
        }

    def count(self, word: str, number: int = 1) -> None:
        """Count something; only the program's own words, so that there are few."""
        if number:
            self._counts[word] += number

    def _hello(self, peer: bytes, hello: Hello, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        if hello.version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.version}; this controller speaks {PROTOCOL_VERSION}"
            return refused(self._counts, 0, "version", reason), ()
        head = self._invalidations.head
        resumes = hello.lineage == self.lineage and hello.applied > 0
        if resumes:
            most = self._past_heads.get(hello.term, head if hello.term == self.term else None)
            if most is None and self._forgot_terms:
                resumes = False
            elif most is None or hello.applied > most:
                self._go_back(hello.applied, hello.name)
                return refused(self._counts, 0, "went_back", self.went_back), ()
        wakes: Sequence[Wake] = ()
        earlier = self._sessions.at(peer)
        if earlier is not None:
            self._counts["session.replaced"] += 1
            wakes = self._end(earlier, now)
        if self._sessions.full:
            return refused(self._counts, 0, "sessions", "there are as many sessions as this controller allows"), wakes
        session = self._sessions.begin(peer, hello, head, now)
        self._counts["session.begun"] += 1
        session.pushed = after = hello.applied if resumes else 0
        if after < head:
            self._later += self._announcements.push(session, after)
        limits = self.limits
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            term=self.term,
            session=session.number,
            ttl_ms=limits.ttl_ms,
            head=head,
            lineage=self.lineage,
            lease_ms=limits.lease_ms,
            hold_ms=limits.hold_ms,
            after=after,
            min_embeddings=limits.min_embeddings,
            max_bytes=limits.max_bytes,
        )
        return welcome, wakes

    def _act(
        self, peer: bytes, message: _SessionMessage, now: float
    ) -> tuple[ControllerMessage | None, Sequence[Wake]]:
        """Act on a message within a session: its answer, where it has one, and the waits that it ended."""
        session = self._sessions.at(peer)
        if session is None or message.session != session.number or message.term != self.term:
            self._counts["hello_again"] += 1
            return HelloAgain("no such session in this term over this connection"), ()
        match message:
            case Acquire():
                return self._entries.acquire(session, message, now)
            case Commit():
                return self._entries.commit(session, message, now)
            case Heartbeat():
                return self._heartbeat(session, message, now), ()
            case Applied():
                self._acknowledged(session, message.applied, now)
                return None, ()
            case Renew():
                return self._entries.renew(session, message, now), ()
            case Lookup():
                return self._entries.lookup(session, message, now), ()
            case Inspect():
                figures = dict(itertools.islice(self.stats().items(), MAX_FIGURES))  # the tables' sizes come first
                return Figures(self.term, session.number, message.request, figures), ()
            case Abort():
                return None, self._entries.abort(session, message, now)
            case Leave():
                self._entries.claims.leave(session.number, message.request)
                return None, ()
            case Report():
                self._entries.report(message)
                return None, ()
            case Used():
                self._entries.used(message)
                return None, ()
            case Abandon():
                return None, self._entries.abandon(session, message, now)
            case Invalidate():
                if not message.idempotency.isprintable():  # the state store takes no other
                    reason = "an idempotency key may hold printable characters only"
                    return refused(self._counts, message.request, "malformed", reason), ()
                asked = Asked(message.selector, message.reason, session.name, message.idempotency)
                return self._announcements.ask(Follower(session.number, message.request), asked), ()
            case Follow():
                follower = Follower(session.number, message.request)
                return self._announcements.follow(follower, message.number, message.wait_ms, now), ()
            case Pin() | Unpin():
                return self.pinning.said(session, message), ()
            case Resend():
                self._counts["resent"] += 1
                after = min(message.after, session.pushed)
                self._later += self._announcements.push(session, after)
                return None, ()
            case Goodbye():
                self._counts["session.left"] += 1
                return None, self._end(session, now, knows=True)

    def _heartbeat(self, session: Session, heartbeat: Heartbeat, now: float) -> ControllerMessage | None:
        if not self._acknowledged(session, heartbeat.applied, now):
            return None
        head = self._invalidations.head
        self._sessions.keep(session, head, now)
        self._later += self._announcements.heard([session], now)
        return HeartbeatAnswer(self.term, session.number, heartbeat.number, head)

    def _acknowledged(self, session: Session, applied: int, now: float) -> bool:
        """It heeds all invalidations up to this one. False if there is none of that number."""
        if applied > self._invalidations.head:
            self._go_back(applied, session.name)
            return False
        if applied > session.acknowledged:
            session.acknowledged = applied
            self._later += self._announcements.heard([session], now)
        return True

    def _go_back(self, applied: int, name: str) -> None:
        self.went_back = (
            f"the client {name!r} has heard of invalidation {applied}, which is none of the {self._invalidations.head} "
            "here: the database is older than it was"
        )

    def _end(self, session: Session, now: float, *, knows: bool = False) -> Sequence[Wake]:
        self._sessions.end(session, knows=knows)
        self._announcements.end([session.number])
        if knows:
            self._later += self._announcements.heard([session], now)
        return self._entries.claims.end([session.number], now)

    def _answered(self, answers: Answers) -> Effects:
        """Answers that came later; those of sessions that are over go nowhere."""
        effects: Effects = []
        for asker, answer in answers:
            if asker.session == LOCAL:
                effects.append((LOCAL_PEER, answer))
            elif (session := self._sessions.find(asker.session)) is not None:
                effects.append((session.peer, answer))
        return effects

    def _resolved(self, wakes: Sequence[Wake]) -> Effects:
        count_results(self._counts, "resolved", [wake.result for wake in wakes])
        return [
            (self._sessions.peer_of(session), Resolved(self.term, session, request, results))
            for session, request, results in batched(wakes)
        ]
