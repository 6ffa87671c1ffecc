"""Who computes what, and who waits for it.

A name that is computed has exactly one claim. Its waiters stand in line: when the claim ends without an entry, the
first that is still there gets a claim of its own, and the rest wait on. So nobody waits for a name without a claim,
and a wait ends with the claim, with its own deadline, when its request leaves, or with its session.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from mmcache.control.messages import CLAIMED, AbortReason, Granted, Hit, Resolution, Unclaimed, Waiting
from mmcache.controller.deadlines import Deadlines

WAITING: Final = Waiting()
NOT_WAITING: Final = Unclaimed(CLAIMED)
HELD: Final = Unclaimed("held")
"""A dead writer holds the name in the store."""
NO_ROOM: Final = Unclaimed("no_room")
"""Who computed found no room for the entry, or the directory is full."""
OVERLOADED: Final = Unclaimed("overloaded")
"""A table of the controller is full."""


class Wake(NamedTuple):
    """The end of one wait: `position` of acquire `request` of `session` has this result."""

    session: int
    request: int
    position: int
    result: Resolution


class _Wait:
    """One acquire that waits: its names, with the positions at which each stands in the request (nearly always one)."""

    __slots__ = ("positions", "request", "session")

    def __init__(self, session: int, request: int) -> None:
        self.session = session
        self.request = request
        self.positions: dict[bytes, list[int]] = {}


class _Claim:
    """The right to compute one name, and the line of those who wait for it."""

    __slots__ = ("generation", "name", "request", "session", "token", "waits")

    def __init__(self, name: bytes, generation: int, token: int, session: int, request: int) -> None:
        self.name = name
        self.generation = generation
        self.token = token
        self.session = session
        self.request = request
        self.waits: OrderedDict[_Wait, None] | None = None  # made by the first waiter; pops its first in O(1)


class _Party:
    """What one session has here: its claims, its waiting requests, and on how many names these wait in all."""

    __slots__ = ("tokens", "waiting", "waits")

    def __init__(self) -> None:
        self.tokens: set[int] = set()
        self.waits: dict[int, _Wait] = {}
        self.waiting = 0


class Claims:
    """Claims, waits and holds. Sessions are numbers; the caller ends each with `end` or `expire`.

    Times are seconds. Tokens grow within the term and are never 0. Methods that end waits return them as wakes.
    """

    def __init__(
        self,
        *,
        claim_ms: int,
        hold_ms: int,
        max_claims: int,
        max_holds: int,
        max_waiters: int,
        max_waiters_per_session: int,
    ) -> None:
        self._claim_ms = claim_ms
        self._hold_ms = hold_ms
        self._max_claims = max_claims
        self._max_holds = max_holds
        self._max_waiters = max_waiters
        self._max_waiters_per_session = max_waiters_per_session
        self._by_name: dict[bytes, _Claim] = {}
        self._by_token: dict[int, _Claim] = {}
        self._parties: dict[int, _Party] = {}
        self._waiting = 0
        self._tokens = itertools.count(1)
        self._claim_deadlines: Deadlines[int] = Deadlines()
        self._wait_deadlines: Deadlines[tuple[int, int]] = Deadlines()  # by session and request
        self._holds: Deadlines[bytes] = Deadlines()

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def waiting(self) -> int:
        """How many waits there are, one for each name of each request."""
        return self._waiting

    @property
    def held(self) -> int:
        """How many names are held."""
        return len(self._holds)

    def acquire(
        self, name: bytes, generation: int, session: int, request: int, position: int, *, wait_until: float, now: float
    ) -> Granted | Waiting | Unclaimed:
        """Claim a name that the directory does not have, or wait for it until `wait_until`; past: do not wait.

        A request that has the claim, or waits already, is told so again: a retry neither claims nor waits twice.
        """
        claim = self._by_name.get(name)
        if claim is None:
            if name in self._holds:
                return HELD
            if len(self._by_name) >= self._max_claims:
                return OVERLOADED
            return self._grant(name, generation, session, request, now)
        if claim.session == session and claim.request == request:
            left_ms = max(1, int((self._claim_deadlines[claim.token] - now) * 1000))
            return Granted(claim.generation, claim.token, left_ms)
        return self._wait_for(claim, session, request, position, wait_until=wait_until, now=now)

    def renew(self, session: int, tokens: Iterable[int], now: float) -> list[int]:
        """Let claims of a session run for their full time again; returns those that it does not have (any more)."""
        due = now + self._claim_ms / 1000
        lost = []
        for token in tokens:
            claim = self._by_token.get(token)
            if claim is None or claim.session != session:
                lost.append(token)
            else:
                self._claim_deadlines.set(token, due)
        return lost

    def token_of(self, name: bytes) -> int | None:
        """The live claim on a name."""
        claim = self._by_name.get(name)
        return None if claim is None else claim.token

    def committed(self, name: bytes, hit: Hit) -> list[Wake]:
        """The name has an entry now: whoever computed or held it, that is over, and all who waited get the entry."""
        self._holds.discard(name)
        claim = self._by_name.get(name)
        return [] if claim is None else self._release(claim, hit)

    def give_up(self, session: int, token: int, reason: AbortReason, now: float) -> list[Wake] | None:
        """End a claim of a session without an entry. None: the session does not have that claim (any more)."""
        claim = self._by_token.get(token)
        if claim is None or claim.session != session:
            return None
        if reason is AbortReason.NO_ROOM:
            return self._release(claim, NO_ROOM)
        if reason is AbortReason.HELD:
            if len(self._holds) < self._max_holds:
                self._holds.set(claim.name, now + self._hold_ms / 1000)
            return self._release(claim, HELD)
        return self._pass_on(claim, now)

    def leave(self, session: int, request: int) -> None:
        """The request waits no longer, for nothing."""
        party = self._parties.get(session)
        wait = party.waits.get(request) if party is not None else None
        if wait is not None:
            self._drop(wait)

    def end(self, sessions: Sequence[int], now: float) -> list[Wake]:
        """These sessions are over, all at once: none of them inherits a claim of another."""
        parties = [party for session in sessions if (party := self._parties.get(session)) is not None]
        for party in parties:
            for wait in list(party.waits.values()):
                self._drop(wait)
        self._expire_waits(now)
        wakes = []
        for party in parties:
            for token in sorted(party.tokens):
                wakes += self._pass_on(self._by_token[token], now)
        for session in sessions:
            self._parties.pop(session, None)
        return wakes

    def expire(self, now: float) -> list[Wake]:
        """End the waits, holds and claims that are due. Waits first, so that no claim passes to one that is over."""
        self._expire_waits(now)
        self._holds.pop_due(now)
        wakes = []
        for token in self._claim_deadlines.pop_due(now):
            wakes += self._pass_on(self._by_token[token], now)
        return wakes

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        deadlines = (self._claim_deadlines.next(), self._wait_deadlines.next(), self._holds.next())
        return min((due for due in deadlines if due is not None), default=None)

    def _party(self, session: int) -> _Party:
        party = self._parties.get(session)
        if party is None:
            party = self._parties[session] = _Party()
        return party

    def _grant(self, name: bytes, generation: int, session: int, request: int, now: float) -> Granted:
        if name in self._by_name:
            raise RuntimeError("a name was granted that has a claim")
        token = next(self._tokens)
        self._by_name[name] = self._by_token[token] = _Claim(name, generation, token, session, request)
        self._party(session).tokens.add(token)
        self._claim_deadlines.set(token, now + self._claim_ms / 1000)
        return Granted(generation, token, self._claim_ms)

    def _end(self, claim: _Claim) -> None:
        del self._by_name[claim.name], self._by_token[claim.token]
        self._parties[claim.session].tokens.discard(claim.token)
        self._claim_deadlines.discard(claim.token)

    def _pass_on(self, claim: _Claim, now: float) -> list[Wake]:
        """End a claim; the first in its line gets the next one, and the rest of the line."""
        self._end(claim)
        if not claim.waits:
            return []
        wait, _ = claim.waits.popitem(last=False)
        granted = self._grant(claim.name, claim.generation, wait.session, wait.request, now)
        self._by_name[claim.name].waits = claim.waits
        return self._woken(wait, claim.name, granted)

    def _release(self, claim: _Claim, result: Resolution) -> list[Wake]:
        """End a claim; all of its line get the same result."""
        self._end(claim)
        wakes: list[Wake] = []
        for wait in claim.waits or ():
            wakes += self._woken(wait, claim.name, result)
        return wakes

    def _wait_for(
        self, claim: _Claim, session: int, request: int, position: int, *, wait_until: float, now: float
    ) -> Waiting | Unclaimed:
        party = self._party(session)
        wait = party.waits.get(request)
        if wait is not None and (positions := wait.positions.get(claim.name)) is not None:
            if position > positions[-1]:  # the key stands twice in the request; a retry only repeats positions
                positions.append(position)
            return WAITING
        if wait_until <= now:
            return NOT_WAITING
        if self._waiting >= self._max_waiters or party.waiting >= self._max_waiters_per_session:
            return OVERLOADED
        if wait is None:
            wait = party.waits[request] = _Wait(session, request)
            self._wait_deadlines.set((session, request), wait_until)
        wait.positions[claim.name] = [position]
        party.waiting += 1
        self._waiting += 1
        if claim.waits is None:
            claim.waits = OrderedDict()
        claim.waits[wait] = None
        return WAITING

    def _woken(self, wait: _Wait, name: bytes, result: Resolution) -> list[Wake]:
        """Take a name, whose line the wait has left, out of the wait."""
        positions = wait.positions.pop(name)
        self._forget(wait, 1)
        return [Wake(wait.session, wait.request, position, result) for position in positions]

    def _drop(self, wait: _Wait) -> None:
        """Take a wait out of all lines, without a word: its client knows."""
        for name in wait.positions:
            waits = self._by_name[name].waits
            if waits is None:
                raise RuntimeError("a request waits for a claim that does not know it")
            del waits[wait]
        count = len(wait.positions)
        wait.positions.clear()
        self._forget(wait, count)

    def _forget(self, wait: _Wait, names: int) -> None:
        """Account for names that a wait has lost; without any, it is over."""
        party = self._parties[wait.session]
        party.waiting -= names
        self._waiting -= names
        if not wait.positions:
            del party.waits[wait.request]
            self._wait_deadlines.discard((wait.session, wait.request))

    def _expire_waits(self, now: float) -> None:
        for session, request in self._wait_deadlines.pop_due(now):
            self._drop(self._parties[session].waits[request])
