"""The controller's decisions, without I/O: a message or the passing of time in, messages to connections out.

Directory, claims and sessions are its parts; this file is what the messages mean to them. It answers each message
from the state alone, not from a memory of requests, and so that sending one again changes nothing.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from mmcache.control.messages import (
    MAX_BATCH,
    MAX_FIGURES,
    MAX_INFO_BYTES,
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    Answer,
    ClientMessage,
    Commit,
    CommitStatus,
    Committed,
    ControllerMessage,
    Figures,
    Found,
    Goodbye,
    Granted,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Hit,
    Inspect,
    KeyGroup,
    Leave,
    Lookup,
    Refused,
    Renew,
    Renewed,
    Report,
    Resolution,
    Resolved,
    Unclaimed,
    Welcome,
)
from mmcache.controller.claims import WAITING, Claims, Wake
from mmcache.controller.directory import Directory
from mmcache.controller.sessions import Session, Sessions
from mmcache.key import mm_digest

Effects = list[tuple[bytes, ControllerMessage]]
"""Messages to send, in order, each with the routing id of its connection."""
_SessionMessage = Acquire | Heartbeat | Renew | Commit | Abort | Leave | Report | Lookup | Inspect | Goodbye

_GENERATION: Final = 0
"""The generation of every key: nothing invalidates yet."""
_HEAD: Final = 0
"""The newest number of the invalidation sequence."""
_MAX_REASON: Final = 512
_RESULT_BYTES: Final = 64
"""More than any result takes on the wire, besides its info; likewise the head of a message."""
_SURE_TO_FIT: Final = MAX_MESSAGE_BYTES // (_RESULT_BYTES + MAX_INFO_BYTES) - 1
"""As many results fit into a message, however large."""


class ControllerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds, and the bounds of the controller's tables. Beyond a bound there is no service, no growth.

    Raises ValueError for a limit that is not positive, or a time longer than a day.
    """

    ttl_ms: int = 5_000
    """How long a client's session is fresh after a heartbeat that was answered."""
    claim_ms: int = 10_000
    """How long a claim lives that is not renewed."""
    lease_ms: int = 10_000
    """The store's read lease, for the clients to know."""
    hold_ms: int = 30_000
    """How long the store keeps a dead writer's name: `put_start_discard_timeout_sec` of its master."""
    max_sessions: int = 10_000
    max_entries: int = 2_000_000
    max_claims: int = 500_000
    max_holds: int = 100_000
    max_waiters: int = 1_000_000
    """Most waits in all: each name of each waiting request is one."""
    max_waiters_per_session: int = 65_536

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value < 1 or (name.endswith("_ms") and value > 86_400_000):
                raise ValueError(f"{name} cannot be {value}")


class ControllerCore:
    """All that a controller knows and decides within one term.

    Times are seconds on one clock that counts suspension and never goes back. Peers are routing ids.

    Args:
        limits: times and bounds.
        term: random, of this start of the controller.
        lineage: made together with the controller's database; a part of every name in the store.
        random_session: returns random positive integers of at most 63 bits.
    """

    def __init__(self, limits: ControllerLimits, *, term: int, lineage: str, random_session: Callable[[], int]) -> None:
        self.limits = limits
        self.term = term
        self.lineage = lineage
        self._directory = Directory(max_entries=limits.max_entries)
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
        self._counts: Counter[str] = Counter()
        self._settled = -math.inf  # what was due by then is over

    def handle(self, peer: bytes, message: ClientMessage, now: float) -> Effects:
        """Act on a message. What was due before it came is settled before it is read."""
        effects = self.tick(now) if now > self._settled else []
        answer, wakes = self._hello(peer, message, now) if isinstance(message, Hello) else self._act(peer, message, now)
        if answer is not None:
            effects.append((peer, answer))
        if wakes:
            effects += self._resolved(wakes)
        return effects

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
        over = self._sessions.expire(now)
        wakes: list[Wake] = []
        if over:
            self._counts["session.expired"] += len(over)
            wakes += self._claims.end([session.number for session in over], now)
        wakes += self._claims.expire(now)
        self._settled = now
        return self._resolved(wakes) if wakes else []

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next, at the latest; None: not before another message."""
        deadlines = (self._sessions.next_deadline(), self._claims.next_deadline())
        return min((due for due in deadlines if due is not None), default=None)

    def stats(self) -> dict[str, int]:
        """Sizes of the tables now, and counts since the start."""
        return {
            "sessions": len(self._sessions),
            "entries": len(self._directory),
            "claims": len(self._claims),
            "waiters": self._claims.waiting,
            "holds": self._claims.held,
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
        wakes: Sequence[Wake] = ()
        earlier = self._sessions.at(peer)
        if earlier is not None:
            self._counts["session.replaced"] += 1
            wakes = self._end(earlier, now)
        if self._sessions.full:
            return self._refused(0, "sessions", "there are as many sessions as this controller allows"), wakes
        session = self._sessions.begin(peer, hello, now)
        self._counts["session.begun"] += 1
        limits = self.limits
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            term=self.term,
            session=session.number,
            ttl_ms=limits.ttl_ms,
            head=_HEAD,
            lineage=self.lineage,
            lease_ms=limits.lease_ms,
            hold_ms=limits.hold_ms,
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
                self._sessions.keep(session, now)
                return HeartbeatAnswer(self.term, session.number, message.number, _HEAD), ()
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
            case Goodbye():
                self._counts["session.left"] += 1
                return None, self._end(session, now)

    def _acquire(self, session: Session, acquire: Acquire, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        names = _names(acquire.groups)
        if len(names) > MAX_BATCH:
            return self._refused(acquire.request, "batch", f"more than {MAX_BATCH} keys"), ()
        results = self._claims.acquire(
            names,
            self._directory.find(names),
            _GENERATION,
            session.number,
            acquire.request,
            wait_until=now + acquire.wait_ms / 1000,
            now=now,
        )
        self._count_results("acquire", results)
        follows = _cut(results, session.number, acquire.request) if len(results) > _SURE_TO_FIT else ()
        return Acquired(self.term, session.number, acquire.request, results), follows

    def _commit(self, session: Session, commit: Commit, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        if sum(len(group.entries) for group in commit.groups) > MAX_BATCH:
            return self._refused(commit.request, "batch", f"more than {MAX_BATCH} entries"), ()
        results: list[CommitStatus] = []
        wakes: list[Wake] = []
        for group in commit.groups:
            scope = group.scope.digest
            for entry in group.entries:
                name = scope + mm_digest(entry.mm_hash)
                hit: Hit | None = None
                if entry.generation == _GENERATION:
                    hit, new = self._directory.enter(name, entry, session.name, now)
                    found = CommitStatus.STORED if new else CommitStatus.DUPLICATE
                    status = CommitStatus.REFUSED if hit is None else found
                else:
                    status = CommitStatus.OUTDATED if entry.generation < _GENERATION else CommitStatus.REFUSED
                results.append(status)
                if hit is not None:
                    wakes += self._claims.committed(name, hit)
                elif self._claims.token_of(name) == entry.token:
                    full = entry.generation == _GENERATION
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

    def _lookup(self, session: Session, lookup: Lookup) -> ControllerMessage:
        names = _names(lookup.groups)
        if len(names) > MAX_BATCH:
            return self._refused(lookup.request, "batch", f"more than {MAX_BATCH} keys")
        found = self._directory.find(names)
        if len(found) > _SURE_TO_FIT:
            info = sum(len(hit.info) for hit in found if hit is not None)
            if info + _RESULT_BYTES * (len(found) + 1) > MAX_MESSAGE_BYTES:
                return self._refused(lookup.request, "answer", "larger than a message; ask for fewer keys")
        self._counts["lookup"] += len(found)
        return Found(self.term, session.number, lookup.request, found)

    def _end(self, session: Session, now: float) -> Sequence[Wake]:
        self._sessions.end(session)
        return self._claims.end([session.number], now)

    def _resolved(self, wakes: Sequence[Wake]) -> Effects:
        """One message for each request that has waits ended, or more where they would be too large."""
        batches: dict[tuple[int, int], list[list[tuple[int, Resolution]]]] = {}
        sizes: dict[tuple[int, int], int] = {}
        self._count_results("resolved", [wake.result for wake in wakes])
        for session, request, position, result in wakes:
            size = _RESULT_BYTES + (len(result.info) if isinstance(result, Hit) else 0)
            waiter = (session, request)
            chunks = batches.setdefault(waiter, [])
            if not chunks or sizes[waiter] + size > MAX_MESSAGE_BYTES:
                chunks.append([])
                sizes[waiter] = _RESULT_BYTES
            chunks[-1].append((position, result))
            sizes[waiter] += size
        return [
            (self._sessions.peer_of(session), Resolved(self.term, session, request, results))
            for (session, request), chunks in batches.items()
            for results in chunks
        ]

    def _refused(self, request: int, word: str, reason: str) -> Refused:
        self._counts[f"refused.{word}"] += 1
        return Refused(request, reason[:_MAX_REASON])

    def _count_results(self, what: str, results: Iterable[Answer]) -> None:
        hits = granted = 0
        for result in results:
            if (kind := type(result)) is Hit:  # nearly all are one of two, and isinstance is slow to say no
                hits += 1
            elif kind is Granted:
                granted += 1
            else:
                self._counts[f"{what}.{result.reason if isinstance(result, Unclaimed) else 'waiting'}"] += 1
        self.count(f"{what}.hit", hits)
        self.count(f"{what}.granted", granted)


def _names(groups: Iterable[KeyGroup]) -> list[bytes]:
    """The names of keys, in the order of their results."""
    names: list[bytes] = []
    for group in groups:
        scope = group.scope.digest
        names += [scope + digest for digest in group.digests]
    return names


def _cut(results: list[Answer], session: int, request: int) -> list[Wake]:
    """Take out of an answer the hits that would make it too large: they follow at once, as if waited for."""
    room = MAX_MESSAGE_BYTES - _RESULT_BYTES * (len(results) + 1)
    follows = []
    for position, result in enumerate(results):
        if isinstance(result, Hit):
            room -= len(result.info)
            if room < 0:
                follows.append(Wake(session, request, position, result))
                results[position] = WAITING
    return follows
