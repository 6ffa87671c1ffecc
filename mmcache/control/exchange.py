"""Requests, waits and claims of one session: who asked what, who still waits, and what ends when the session does.

Requests and waits end. What is being computed is claimed again in the next session, at once, so that whoever asks for
it meanwhile waits for it, as before.

Everything here belongs to the channel's thread. It does no I/O but `send`, which never blocks; times are seconds of
`time.monotonic()`. What nobody wants any more is given back at once, so that no other client waits for it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from mmcache.control.batches import CommitBatch, KeyBatch, digest_batches
from mmcache.control.calls import Acquisition, Call
from mmcache.control.claims import HeldClaims, Subject
from mmcache.control.messages import (
    MAX_BATCH,
    Abandon,
    Abandoned,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    Answer,
    ClientMessage,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    Figures,
    Follow,
    Found,
    Granted,
    Hit,
    Inspect,
    Invalidate,
    Invalidated,
    KeyGroup,
    Leave,
    Lookup,
    Missing,
    Pin,
    PinAnswer,
    PinSubject,
    Progress,
    Refused,
    Renew,
    Renewed,
    Report,
    Resolution,
    Resolved,
    Unpin,
    Waiting,
)
from mmcache.key import Scope
from mmcache.selector import Selector

if TYPE_CHECKING:
    from mmcache.control.session import SessionView
    from mmcache.metrics import Counters

_log = logging.getLogger(__name__)

MAX_REQUESTS: Final = 4096
"""Most requests that are unanswered or wait."""
MAX_CLAIMS: Final = 65_536
_DAY_MS: Final = 86_400_000


_Tokened = TypeVar("_Tokened", Commitment, Abandoned)
_Answer = Acquired | Committed | Found | Figures | Renewed | Invalidated | Progress | PinAnswer


class _Request(NamedTuple):
    """A request without an answer yet; results go to `call`, at `indices`. Renewals have no call.

    An acquire without a call is for claims of an earlier session, and `indices` are their numbers. `groups` are what an
    acquire is for.
    """

    answer: type[_Answer]
    call: Call[Any] | None
    indices: Sequence[int]
    groups: Sequence[KeyGroup]


class _Wait(NamedTuple):
    """An answered acquire of which some keys still wait: the index of each by its position in the request.

    Without an acquisition it is for claims of an earlier session, as in `_Request`.
    """

    acquisition: Acquisition | None
    index_at: dict[int, int]
    groups: Sequence[KeyGroup]
    until: float


class Exchange:
    """What happens within a session. One after another can begin and be lost.

    Args:
        send: takes a message for the present connection. If it cannot be sent, the session is lost soon after.
        counters: counts what came unasked, was given back, refused or lost.
    """

    def __init__(self, send: Callable[[ClientMessage], None], *, counters: Counters | None = None) -> None:
        self._send = send
        self._counters = counters
        self._session: tuple[int, int] | None = None
        self._lineage = ""
        self._last_request = 0  # grows on across sessions, so that nothing of one can be taken for another's
        self._requests: dict[int, _Request] = {}
        self._waits: dict[int, _Wait] = {}
        self._again_until: dict[int, float] = {}
        """Until when each acquire for claims of an earlier session may wait: it has no caller who would leave."""
        self._claims = HeldClaims()

    # The session's coming and going

    def begin(self, view: SessionView) -> None:
        """There is a session: before anything else, claim again what is being computed."""
        self._session = view.term, view.session
        self._lineage = view.lineage
        self._claim_again(time.monotonic())

    def lost(self, reason: str) -> None:
        """The session is over: everyone who waits is told at once."""
        self._session = None
        for request in self._requests.values():
            if request.call is not None:
                request.call.fail(f"the session with the controller was lost ({reason})")
        for wait in self._waits.values():
            if wait.acquisition is not None:
                wait.acquisition.end()
        for claim in self._claims.session_lost():
            claim.owner.end()
        self._requests.clear()
        self._waits.clear()
        self._again_until.clear()

    def close(self) -> None:
        """There will be no other session."""
        self.lost("closed")
        self._claims.clear()

    # What callers ask; each runs on the channel's thread

    def acquire(self, acquisition: Acquisition, batches: Sequence[KeyBatch]) -> None:
        """Ask who computes these."""
        if not self._accepts(acquisition, len(batches), claims=sum(len(batch.indices) for batch in batches)):
            return
        acquisition.lineage = self._lineage
        wait_ms = int(min(_DAY_MS, max(0.0, acquisition.wait_until - time.monotonic()) * 1000))
        for groups, indices in batches:
            term, session, number = self._open(Acquired, acquisition, indices, groups)
            self._send(Acquire(term, session, number, wait_ms, groups))

    def lookup(self, call: Call[Hit | None], batches: Sequence[KeyBatch]) -> None:
        """Ask what the directory knows of these."""
        if not self._accepts(call, len(batches)):
            return
        for groups, indices in batches:
            term, session, number = self._open(Found, call, indices)
            self._send(Lookup(term, session, number, groups))

    def invalidate(
        self, call: Call[Invalidated], selector: Selector, reason: str, idempotency: str, lineage: str
    ) -> None:
        """Ask for an invalidation, whose number is one result."""
        if self._accepts(call, 1, lineage=lineage):
            self._send(Invalidate(*self._open(Invalidated, call, (0,)), selector, reason, idempotency))

    def follow(self, call: Call[Progress], number: int, wait_ms: int, lineage: str) -> None:
        """Ask to be told when an invalidation is complete, or how far it is after a while."""
        if self._accepts(call, 1, lineage=lineage):
            self._send(Follow(*self._open(Progress, call, (0,)), number, wait_ms))

    def pin(self, call: Call[PinAnswer], subject: PinSubject, ttl_ms: int, reason: str, lineage: str) -> None:
        """Ask for pins, whose ids and figures are one result."""
        if self._accepts(call, 1, lineage=lineage):
            self._send(Pin(*self._open(PinAnswer, call, (0,)), subject, ttl_ms, reason))

    def unpin(self, call: Call[PinAnswer], ids: list[int], subject: PinSubject, lineage: str) -> None:
        """Ask for the end of pins; those that ended are one result."""
        if self._accepts(call, 1, lineage=lineage):
            self._send(Unpin(*self._open(PinAnswer, call, (0,)), ids, subject))

    def inspect(self, call: Call[Figures]) -> None:
        """Ask for the controller's figures, which are one result."""
        if self._accepts(call, 1):
            self._send(Inspect(*self._open(Figures, call, (0,))))

    def commit(self, call: Call[CommitStatus], batches: Sequence[CommitBatch], lineage: str | None) -> None:
        """Announce entries. From here on their claims are renewed no longer, whatever comes of it."""
        if not self._accepts(call, len(batches), lineage=lineage):
            return
        for groups, indices in batches:
            term, session, number = self._open(Committed, call, indices)
            own = [CommitGroup(group.scope, [self._with_token(entry) for entry in group.entries]) for group in groups]
            self._send(Commit(term, session, number, own))

    def abort(self, tokens: Sequence[int], reason: AbortReason) -> None:
        """Give up claims. Those that are not held any more need no message."""
        self._give_back([token for number in tokens if (token := self._claims.end(number))], reason)

    def report(self, batches: Sequence[list[Missing]]) -> None:
        """Tell of entries that the directory promised and that are not there."""
        if self._session is not None:
            for missing in batches:
                self._send(Report(*self._session, missing))

    def abandon(self, batches: Sequence[list[Abandoned]], lineage: str) -> None:
        """Tell of names that are of no use, and end the claims on them. Those of another lineage nobody uses."""
        for batch in batches:
            own = [self._with_token(entry) for entry in batch]
            if self._session is not None and lineage == self._lineage:
                self._send(Abandon(*self._session, own))

    def leave(self, acquisition: Acquisition) -> None:
        """Its caller is gone, before or after the answers: end its waits, and give back what it never saw."""
        for number in acquisition.requests:
            unanswered, waiting = self._requests.pop(number, None), self._waits.pop(number, None)
            if (unanswered or waiting) and self._session is not None:
                self._send(Leave(*self._session, number))
        uncollected = acquisition.take_uncollected()
        self._count("control.grant_unwanted", len(uncollected))
        self.abort(uncollected, AbortReason.UNWANTED)

    def forget(self, call: Call[Any]) -> None:
        """Its caller is gone: nobody needs the answers."""
        for number in call.requests:
            self._requests.pop(number, None)

    # What the controller says, and time

    def received(self, message: _Answer | Resolved | Refused, now: float) -> None:
        """A message of the present session."""
        if isinstance(message, Resolved):
            self._resolved(message, now)
            return
        request = self._requests.get(message.request)
        if isinstance(message, Refused):
            self._count("control.refused")
            if request is None:
                _log.warning("the controller refused a message that has no answer: %s", message.reason)
                return
            del self._requests[message.request]
            if request.call is not None:
                request.call.fail(f"the controller refused: {message.reason}")
            return
        if request is None or type(message) is not request.answer:
            self._count("control.unasked")
            if isinstance(message, Acquired):
                self._unwanted(answer for answer in message.results if isinstance(answer, Granted))
            return
        del self._requests[message.request]
        if isinstance(message, Renewed):
            self._count("control.claim_lost", self._claims.lost(message.lost))
        elif isinstance(message, Figures | Invalidated | Progress | PinAnswer):
            if request.call is not None:
                request.call.deliver(request.indices, [message])
        elif len(message.results) != len(request.indices):
            self._count("control.unasked")
            if request.call is not None:
                request.call.fail("the controller's answer has another length than the question")
            if isinstance(message, Acquired):
                self._unwanted(answer for answer in message.results if isinstance(answer, Granted))
        elif isinstance(message, Acquired):
            self._acquired(message, request, now)
        elif request.call is not None:
            request.call.deliver(request.indices, message.results)

    def tick(self, now: float) -> None:
        """Renew the claims that are due, and end the waits of no caller that are over."""
        for number in [number for number, until in self._again_until.items() if until <= now]:
            self._end_again(number)
        tokens = self._claims.due(now)
        for start in range(0, len(tokens), MAX_BATCH):
            term, session, number = self._open(Renewed, None, ())
            self._send(Renew(term, session, number, tokens[start : start + MAX_BATCH]))

    def next_deadline(self) -> float | None:
        """When `tick` has something to do next."""
        deadlines = (self._claims.next_deadline(), min(self._again_until.values(), default=None))
        return min((due for due in deadlines if due is not None), default=None)

    def _acquired(self, message: Acquired, request: _Request, now: float) -> None:
        acquisition = request.call
        if not isinstance(acquisition, Acquisition | None):
            raise TypeError("an acquire was sent for what is no acquisition")
        results = message.results
        index_at = {
            position: index for position, index in enumerate(request.indices) if isinstance(results[position], Waiting)
        }
        if index_at:
            until = acquisition.wait_until if acquisition is not None else self._again_until[message.request]
            self._waits[message.request] = _Wait(acquisition, index_at, request.groups, until)
        if acquisition is None:
            unwanted: list[Granted] = []
            for position, number in enumerate(request.indices):
                if not isinstance(answer := results[position], Waiting):
                    unwanted += self._claimed_again(number, answer, now)
            self._unwanted(unwanted)  # at last: one grant is the answer to all who claim a name
            if not index_at:
                self._end_again(message.request)
            return
        answers: list[Answer] = [
            self._hold(answer, acquisition, _key_at(request.groups, position), now)
            if isinstance(answer, Granted)
            else answer
            for position, answer in enumerate(results)
        ]
        acquisition.deliver(request.indices, answers)

    def _resolved(self, message: Resolved, now: float) -> None:
        wait = self._waits.get(message.request)
        resolved: list[tuple[int, Resolution]] = []
        unwanted: list[Granted] = []
        for position, result in message.results:
            if wait is None or position not in wait.index_at:
                if isinstance(result, Granted):
                    unwanted.append(result)
            elif wait.acquisition is None:
                unwanted += self._claimed_again(wait.index_at.pop(position), result, now)
            elif not isinstance(result, Granted):
                resolved.append((wait.index_at.pop(position), result))
            elif now < wait.until:
                held = self._hold(result, wait.acquisition, _key_at(wait.groups, position), now)
                resolved.append((wait.index_at.pop(position), held))
            else:  # its caller computes for itself by now
                unwanted.append(result)
        if wait is not None:
            if not wait.index_at:
                del self._waits[message.request]
                self._again_until.pop(message.request, None)
            if wait.acquisition is not None:
                wait.acquisition.resolve(resolved)
        self._unwanted(unwanted)

    def _claim_again(self, now: float) -> None:
        """Ask for what earlier sessions were granted; and stand in line where another has it, perhaps such a session.

        No caller waits for the answers. They decide under which tokens claims go on, and whether at all.
        """
        before = len(self._claims)
        held = self._claims.to_claim_again(self._lineage, now)
        self._count("control.claim_lost", before - len(self._claims))
        numbers, claims = list(held), list(held.values())
        for groups, indices in digest_batches([(claim.subject.scope, claim.subject.digest) for claim in claims]):
            wait_ms = int(min(_DAY_MS, 1000 * max(claims[index].renew_until - now for index in indices)))
            opened = self._open(Acquired, None, [numbers[index] for index in indices], groups)
            self._again_until[self._last_request] = now + wait_ms / 1000
            self._send(Acquire(*opened, wait_ms, groups))

    def _end_again(self, number: int) -> None:
        """An acquire for claims of an earlier session is over: of what comes for it still, a claim is given back."""
        self._again_until.pop(number, None)
        self._requests.pop(number, None)
        self._waits.pop(number, None)

    def _claimed_again(self, number: int, answer: Answer, now: float) -> list[Granted]:
        """Go on with a claim of an earlier session; returns what was granted for one that does not go on."""
        if not isinstance(answer, Granted):  # it is published here without a claim, if nobody was faster
            self._count("control.claim_lost")
        elif self._claims.regain(number, answer.token, answer.generation, claim_s=answer.claim_ms / 1000, now=now):
            self._count("control.claim_kept")
        else:
            return [answer]
        return []

    def _accepts(self, call: Call[Any], messages: int, *, claims: int = 0, lineage: str | None = None) -> bool:
        """Whether a call can be sent; else it fails here and now."""
        if self._session is None:
            call.fail("there is no session with the controller")
        elif lineage is not None and lineage != self._lineage:
            call.fail("the controller has begun a new lineage; names of the one before mean nothing to it")
        elif not self._has_room(messages, claims):
            self._count("control.overloaded")
            call.fail("overloaded: this client has as many requests under way, or holds as many claims, as it may")
        else:
            return True
        return False

    def _has_room(self, messages: int, claims: int) -> bool:
        if len(self._claims) + claims > MAX_CLAIMS:
            return False
        if len(self._requests) + len(self._waits) + messages > MAX_REQUESTS:
            now = time.monotonic()  # waits that are over at the controller, of callers who have not left yet
            for number in [number for number, wait in self._waits.items() if wait.until <= now]:
                del self._waits[number]
        return len(self._requests) + len(self._waits) + messages <= MAX_REQUESTS

    def _open(
        self,
        answer: type[_Answer],
        call: Call[Any] | None,
        indices: Sequence[int],
        groups: Sequence[KeyGroup] = (),
    ) -> tuple[int, int, int]:
        """A new request: term, session and its number."""
        if self._session is None:
            raise RuntimeError("a request without a session")
        self._last_request += 1
        self._requests[self._last_request] = _Request(answer, call, indices, groups)
        if call is not None:
            call.requests.append(self._last_request)
        return *self._session, self._last_request

    def _hold(self, granted: Granted, acquisition: Acquisition, key: tuple[Scope, bytes], now: float) -> Granted:
        """Hold a claim; returns it with our number for it, as callers see it."""
        number = self._claims.hold(
            granted.token,
            acquisition,
            Subject(*key, granted.generation, self._lineage),
            claim_s=granted.claim_ms / 1000,
            renew_until=now + acquisition.renew_for_s,
            now=now,
        )
        return Granted(granted.generation, number, granted.claim_ms)

    def _with_token(self, entry: _Tokened) -> _Tokened:
        """The entry with the controller's token for its claim, which ends here; 0 if it is not held any more."""
        return msgspec.structs.replace(entry, token=self._claims.end(entry.token)) if entry.token else entry

    def _unwanted(self, grants: Iterable[Granted]) -> None:
        """Claims that nobody here waits for. One that is held was granted twice over, and is wanted."""
        tokens = [granted.token for granted in grants if granted.token not in self._claims]
        self._count("control.grant_unwanted", len(tokens))
        self._give_back(tokens, AbortReason.UNWANTED)

    def _give_back(self, tokens: Sequence[int], reason: AbortReason) -> None:
        if self._session is None:
            return
        for start in range(0, len(tokens), MAX_BATCH):
            self._send(Abort(*self._session, reason, list(tokens[start : start + MAX_BATCH])))

    def _count(self, name: str, n: int = 1) -> None:
        if self._counters is not None and n:
            self._counters.add(name, n)


def _key_at(groups: Sequence[KeyGroup], position: int) -> tuple[Scope, bytes]:
    """The scope and digest at a position of a request."""
    for scope, digests in ((group.scope, group.digests) for group in groups):
        if position < len(digests):
            return scope, digests[position]
        position -= len(digests)
    raise IndexError("the request has no such position")
