"""The controller's decisions, without I/O: a message or the passing of time in, messages to connections out.

Directory, claims, sessions and invalidations are its parts; this file is what messages mean to them. It answers each
message from the state alone, not from a memory of requests, and so that sending one again changes nothing. What must be
durable before anyone is told of it, `take_writes` tells, and `written` acts on.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from mmcache.control.messages import (
    MAX_BATCH,
    MAX_FIGURES,
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    PROTOCOL_VERSION,
    Abandon,
    AbandonReason,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    Applied,
    ClientMessage,
    Commit,
    CommitStatus,
    Committed,
    ControllerMessage,
    Figures,
    Follow,
    Found,
    Goodbye,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Hit,
    Inspect,
    Invalidate,
    KeyGroup,
    Leave,
    Lookup,
    Refused,
    Renew,
    Renewed,
    Report,
    Resend,
    Resolved,
    Unclaimed,
    Welcome,
)
from mmcache.controller.abandonments import Abandonments, abandonment
from mmcache.controller.announcements import LOCAL_PEER, Announcements, Asked
from mmcache.controller.answers import RESULT_BYTES, SURE_TO_FIT, batched, count_results, cut
from mmcache.controller.claims import ASK_AGAIN, Claims, Wake
from mmcache.controller.directory import Directory
from mmcache.controller.durable import MAX_TERMS, Past, ToWrite
from mmcache.controller.followers import LOCAL, Follower
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.removals import Removals
from mmcache.controller.sessions import Session, Sessions
from mmcache.controller.views import Views
from mmcache.key import DIGEST_BYTES, Scope, mm_digest

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
        self._scopes = {scope.digest: scope for scope in past.scopes}
        self._new_scopes: list[Scope] = []
        self._counts: Counter[str] = Counter()
        self.removals = Removals(
            lineage=past.lineage, lease_ms=limits.lease_ms, most=limits.max_removals, counts=self._counts
        )
        self._directory = Directory(max_entries=limits.max_entries, removals=self.removals)
        self._claims = Claims(
            claim_ms=limits.claim_ms,
            hold_ms=limits.hold_ms,
            max_claims=limits.max_claims,
            max_holds=limits.max_holds,
            max_waiters=limits.max_waiters,
            max_waiters_per_session=limits.max_waiters_per_session,
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
        self._abandonments = Abandonments(at_once=limits.max_abandonments, every_ms=limits.abandonment_ms)
        self.views = Views(
            self._sessions, self._directory, self._invalidations, self._scopes, term=term, lineage=past.lineage
        )
        self._settled = -math.inf  # what was due by then is over
        self._later: Effects = []
        """What the message at hand brings about besides its answer."""

    def handle(self, peer: bytes, message: ClientMessage, now: float) -> Effects:
        """Act on a message. What was due before it came is settled before it is read."""
        effects = self.tick(now) if now > self._settled else []
        if self.went_back:
            return [*effects, (peer, self._refused(0, "went_back", self.went_back))]
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

    def take_writes(self) -> ToWrite | None:
        """What must be durable before the effects of the last messages are sent; None: nothing.

        Then comes `written` or `not_written`. What is there besides invalidations is told once only.
        """
        announcements = self._announcements
        scopes, self._new_scopes = self._new_scopes, []
        todo = ToWrite(
            scopes,
            self._invalidations.head + 1,
            tuple(announcements.asked),
            announcements.take_completed(),
            announcements.take_forgotten(),
            self._settled_before,
        )
        self._settled_before = False
        return todo if any((todo.scopes, todo.asked, todo.completed, todo.forgotten, todo.settled)) else None

    def written(self, now: float) -> Effects:
        """It is durable."""
        if not self._announcements.asked:
            return []
        self.count("invalidation", len(self._announcements.asked))
        self._abandonments.take()
        effects = list(self._announcements.written(now))
        wakes = self._claims.outdate(self._generation_of)
        self._directory.outdate()
        return effects + self._resolved(wakes)

    def not_written(self, reason: str) -> Effects:
        """Nothing of what was asked for is durable, or going to be."""
        effects = list(self._announcements.refused(reason))
        wakes: list[Wake] = []
        for session, token in self._abandonments.take():
            wakes += self._claims.give_up(session, token, AbortReason.HELD, self._settled) or ()
        return effects + self._resolved(wakes)

    def malformed(self, peer: bytes, reason: str, now: float) -> Effects:
        """A peer sent what is no message. Its session, if it has one, goes on."""
        effects = self.tick(now)
        effects.append((peer, self._refused(0, "malformed", reason)))
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
            wakes += self._claims.end(numbers, now)
            self._announcements.end(numbers)
        if self._strangers_until is not None and now >= self._strangers_until:
            self._strangers_until = None
            self._settled_before = True
            self._invalidations.strangers_have_ended()
            effects += self._announcements.complete(now)
        if settled:
            effects += self._announcements.heard(settled, now)
        effects += self._announcements.expire(now)
        wakes += self._claims.expire(now)
        self.count("entry.outdated", self._directory.sweep(self._generation_of, SWEPT_AT_ONCE))
        self._settled = now
        return effects + self._resolved(wakes) if wakes else effects

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, at the latest; None: not before another message."""
        deadlines = (
            self._sessions.next_deadline(),
            self._claims.next_deadline(),
            self._announcements.next_deadline(),
            self._strangers_until,
            self._settled if self._directory.sweeping else None,
        )
        return min((due for due in deadlines if due is not None), default=None)

    def stats(self) -> dict[str, int]:
        """Sizes of the tables now, and counts since the start."""
        return {
            "sessions": len(self._sessions),
            "entries": len(self._directory),
            "claims": len(self._claims),
            "waiters": self._claims.waiting,
            "holds": self._claims.held,
            "invalidations": len(self._invalidations.table),
            "invalidations_pending": len(self._invalidations.pending),
            "head": self._invalidations.head,
            "removals": len(self.removals),
            **dict(sorted(self._counts.items())),
        }

    def count(self, word: str, number: int = 1) -> None:
        """Count something; only the program's own words, so that there are few."""
        if number:
            self._counts[word] += number

    def _hello(self, peer: bytes, hello: Hello, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        if hello.version != PROTOCOL_VERSION:
            reason = f"protocol version {hello.version}; this controller speaks {PROTOCOL_VERSION}"
            return self._refused(0, "version", reason), ()
        head = self._invalidations.head
        resumes = hello.lineage == self.lineage and hello.applied > 0
        if resumes:
            most = self._past_heads.get(hello.term, head if hello.term == self.term else None)
            if most is None and self._forgot_terms:
                resumes = False
            elif most is None or hello.applied > most:
                self._go_back(hello.applied, hello.name)
                return self._refused(0, "went_back", self.went_back), ()
        wakes: Sequence[Wake] = ()
        earlier = self._sessions.at(peer)
        if earlier is not None:
            self._counts["session.replaced"] += 1
            wakes = self._end(earlier, now)
        if self._sessions.full:
            return self._refused(0, "sessions", "there are as many sessions as this controller allows"), wakes
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
                return self._acquire(session, message, now)
            case Commit():
                return self._commit(session, message, now)
            case Heartbeat():
                return self._heartbeat(session, message, now), ()
            case Applied():
                self._acknowledged(session, message.applied, now)
                return None, ()
            case Renew():
                lost = self._claims.renew(session.number, message.tokens, now)
                self.count("claim.renewed", len(message.tokens) - len(lost))
                self.count("claim.lost", len(lost))
                return Renewed(self.term, session.number, message.request, self.limits.claim_ms, lost), ()
            case Lookup():
                return self._lookup(session, message), ()
            case Inspect():
                figures = dict(itertools.islice(self.stats().items(), MAX_FIGURES))  # the tables' sizes come first
                return Figures(self.term, session.number, message.request, figures), ()
            case Abort():
                return None, self._abort(session, message, now)
            case Leave():
                self._claims.leave(session.number, message.request)
                return None, ()
            case Report():
                self._report(message)
                return None, ()
            case Abandon():
                return None, self._abandon(session, message, now)
            case Invalidate():
                if not message.idempotency.isprintable():  # the state store takes no other
                    reason = "an idempotency key may hold printable characters only"
                    return self._refused(message.request, "malformed", reason), ()
                asked = Asked(message.selector, message.reason, session.name, message.idempotency)
                return self._announcements.ask(Follower(session.number, message.request), asked), ()
            case Follow():
                follower = Follower(session.number, message.request)
                return self._announcements.follow(follower, message.number, message.wait_ms, now), ()
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

    def _acquire(self, session: Session, acquire: Acquire, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        names, generations = self._names(acquire.groups)
        if len(names) > MAX_BATCH:
            return self._refused(acquire.request, "batch", f"more than {MAX_BATCH} keys"), ()
        if not self._remember(group.scope for group in acquire.groups):
            return self._refused(acquire.request, "scopes", "there are as many scopes as this controller allows"), ()
        known: Sequence[Hit | Unclaimed | None] = self._directory.find(names, generations)
        if self._abandonments:  # their keys are about to have other names
            known = [ASK_AGAIN if name in self._abandonments else hit for name, hit in zip(names, known, strict=True)]
        results = self._claims.acquire(
            names,
            known,
            generations,
            session.number,
            acquire.request,
            wait_until=now + acquire.wait_ms / 1000,
            now=now,
        )
        count_results(self._counts, "acquire", results)
        follows = cut(results, session.number, acquire.request) if len(results) > SURE_TO_FIT else ()
        return Acquired(self.term, session.number, acquire.request, results), follows

    def _commit(self, session: Session, commit: Commit, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        if sum(len(group.entries) for group in commit.groups) > MAX_BATCH:
            return self._refused(commit.request, "batch", f"more than {MAX_BATCH} entries"), ()
        if not self._remember(group.scope for group in commit.groups):
            return self._refused(commit.request, "scopes", "there are as many scopes as this controller allows"), ()
        table = self._invalidations.table
        results: list[CommitStatus] = []
        wakes: list[Wake] = []
        for group in commit.groups:
            scope = group.scope.digest
            for entry in group.entries:
                digest = mm_digest(entry.mm_hash)
                name = scope + digest
                generation = table.generation(group.scope, digest)
                hit: Hit | None = None
                if entry.generation == generation:
                    hit, new = self._directory.enter(name, entry, session.name, now)
                    found = CommitStatus.STORED if new else CommitStatus.DUPLICATE
                    status = CommitStatus.REFUSED if hit is None else found
                elif entry.generation < generation:
                    status = CommitStatus.OUTDATED
                    self.removals.add(name, entry.generation)
                else:
                    status = CommitStatus.REFUSED
                results.append(status)
                if hit is not None:
                    wakes += self._claims.committed(name, hit)
                elif self._claims.token_of(name) == entry.token:
                    full = entry.generation == generation
                    reason = AbortReason.NO_ROOM if full else AbortReason.FAILED
                    wakes += self._claims.give_up(session.number, entry.token, reason, now) or ()
        stored = results.count(CommitStatus.STORED)
        self.count("commit.stored", stored)
        if stored < len(results):
            for status in (CommitStatus.DUPLICATE, CommitStatus.OUTDATED, CommitStatus.REFUSED):
                self.count(f"commit.{status.name.lower()}", results.count(status))
        return Committed(self.term, session.number, commit.request, results), wakes

    def _abort(self, session: Session, abort: Abort, now: float) -> list[Wake]:
        wakes: list[Wake] = []
        for token in abort.tokens:
            woken = self._claims.give_up(session.number, token, abort.reason, now)
            self._counts["abort.stale" if woken is None else f"abort.{abort.reason.name.lower()}"] += 1
            wakes += woken or ()
        return wakes

    def _report(self, report: Report) -> None:
        for missing in report.entries:
            dropped = self._directory.drop(missing.scope.digest + missing.digest, missing.revision)
            self._counts["missing.dropped" if dropped else "missing.stale"] += 1

    def _abandon(self, session: Session, abandon: Abandon, now: float) -> list[Wake]:
        """Have names invalidated that are of no use. The claims on them end then, and whoever waits asks again.

        An entry that no reader can verify, since the readers are broken, comes back here under each new name. So there
        is a bound: beyond it dead writers' names are held for their time, and corrupt ones stay as they are.
        """
        wakes: list[Wake] = []
        for entry in abandon.entries:
            digest = mm_digest(entry.mm_hash)
            name = entry.scope.digest + digest
            held = entry.reason is AbandonReason.HELD
            claim = (session.number, entry.token) if held else None
            if entry.generation != self._invalidations.table.generation(entry.scope, digest) or (
                held and not self._claims.has(session.number, entry.token, name)
            ):
                self._counts["abandon.stale"] += 1
            elif name in self._abandonments:
                self._counts["abandon.repeated"] += 1
                self._abandonments.add(name, claim)
            elif self._abandonments.may(now) and self._announcements.make(abandonment(entry, session.name)):
                self._counts[f"abandon.{entry.reason.name.lower()}"] += 1
                self._abandonments.add(name, claim)
            else:
                self._counts["abandon.refused"] += 1
                if held:
                    wakes += self._claims.give_up(session.number, entry.token, AbortReason.HELD, now) or ()
        return wakes

    def _lookup(self, session: Session, lookup: Lookup) -> ControllerMessage:
        names, generations = self._names(lookup.groups)
        if len(names) > MAX_BATCH:
            return self._refused(lookup.request, "batch", f"more than {MAX_BATCH} keys")
        found = self._directory.find(names, generations)
        if len(found) > SURE_TO_FIT:
            info = sum(len(hit.info) for hit in found if hit is not None)
            if info + RESULT_BYTES * (len(found) + 1) > MAX_MESSAGE_BYTES:
                return self._refused(lookup.request, "answer", "larger than a message; ask for fewer keys")
        self._counts["lookup"] += len(found)
        return Found(self.term, session.number, lookup.request, found)

    def _end(self, session: Session, now: float, *, knows: bool = False) -> Sequence[Wake]:
        self._sessions.end(session, knows=knows)
        self._announcements.end([session.number])
        if knows:
            self._later += self._announcements.heard([session], now)
        return self._claims.end([session.number], now)

    def _names(self, groups: Iterable[KeyGroup]) -> tuple[list[bytes], Sequence[int]]:
        """The names of keys, and their generations, in the order of their results."""
        table = self._invalidations.table
        names: list[bytes] = []
        generations: list[int] = []
        for group in groups:
            scope = group.scope.digest
            names += [scope + digest for digest in group.digests]
            if table.head:
                generations += [table.generation(group.scope, digest) for digest in group.digests]
        return names, generations if table.head else [0] * len(names)

    def _generation_of(self, name: bytes) -> int:
        return self._invalidations.table.generation(self._scopes[name[:DIGEST_BYTES]], name[DIGEST_BYTES:])

    def _remember(self, scopes: Iterable[Scope]) -> bool:
        """Know these scopes by their digests from now on. False if that are too many."""
        known = self._scopes
        for scope in scopes:
            if scope.digest not in known:
                if len(known) >= self.limits.max_scopes:
                    return False
                known[scope.digest] = scope
                self._new_scopes.append(scope)
        return True

    def _resolved(self, wakes: Sequence[Wake]) -> Effects:
        count_results(self._counts, "resolved", [wake.result for wake in wakes])
        return [
            (self._sessions.peer_of(session), Resolved(self.term, session, request, results))
            for session, request, results in batched(wakes)
        ]

    def _refused(self, request: int, word: str, reason: str) -> Refused:
        self._counts[f"refused.{word}"] += 1
        return Refused(request, reason[:MAX_REASON])
