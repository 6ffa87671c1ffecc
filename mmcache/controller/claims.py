"""Who computes what, and who waits for it.

A name that is computed has exactly one claim. Its waiters stand in line: when the claim ends without an entry, the
first that is still there gets a claim of its own, and the rest wait on. So nobody waits for a name without a claim,
and a wait ends with the claim, with its own deadline, when its request leaves, or with its session.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec

from mmcache.control.messages import (
    CLAIMED,
    INVALIDATED,
    AbortReason,
    Answer,
    Granted,
    Hit,
    Resolution,
    Unclaimed,
    Waiting,
)
from mmcache.controller.deadlines import Deadlines

WAITING: Final = Waiting()
NOT_WAITING: Final = Unclaimed(CLAIMED)
HELD: Final = Unclaimed("held")
"""A dead writer holds the name in the store."""
NO_ROOM: Final = Unclaimed("no_room")
"""Who computed found no room for the entry, or the directory is full."""
ASK_AGAIN: Final = Unclaimed(INVALIDATED)
"""What was computed is of an old generation."""
REMOVING: Final = Unclaimed("removing")
"""It is being removed from the store, and nobody knows yet whether it is gone."""
OVERLOADED: Final = Unclaimed("overloaded")
"""A table of the controller is full."""


_NOBODY: Final = 0
"""The session of a claim that is nobody's."""


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


class _Party:
    """What one session has here: its claims, its waiting requests, and on how many names these wait in all."""

    __slots__ = ("session", "tokens", "waiting", "waits")

    def __init__(self, session: int) -> None:
        self.session = session
        self.tokens: set[int] = set()
        self.waits: dict[int, _Wait] = {}
        self.waiting = 0


class _Claim(msgspec.Struct, gc=False, eq=False):
    """The right to compute one name, and the line of those who wait for it.

    `gc=False`: nothing that a claim refers to refers back, and the collector need not walk half a million of them.
    """

    name: bytes
    generation: int
    token: int
    party: _Party
    request: int
    due: float
    waits: OrderedDict[_Wait, None] | None = None
    """Made by the first waiter; pops its first in O(1)."""


class Claims:
    """Claims, waits and holds. Sessions are numbers; the caller ends each with `end` or `expire`.

    All claims live equally long from when they were granted or last renewed, and so do all holds: in that order they
    are due, and an `OrderedDict` keeps it in O(1). Waits end when their requests say.

    Times are seconds and never go back. Tokens grow within the term and are never 0. Methods that end waits return them
    as wakes.
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
        self._claim_s = claim_ms / 1000
        self._hold_s = hold_ms / 1000
        self._max_claims = max_claims
        self._max_holds = max_holds
        self._max_waiters = max_waiters
        self._max_waiters_per_session = max_waiters_per_session
        self._by_name: dict[bytes, _Claim] = {}
        self._by_token: OrderedDict[int, _Claim] = OrderedDict()
        self._parties: dict[int, _Party] = {}
        self._waiting = 0
        self._tokens = itertools.count(1)
        self._holds: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Until when, and the generation that is held."""
        self._wait_deadlines: Deadlines[tuple[int, int]] = Deadlines()  # by session and request

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
        self,
        names: Sequence[bytes],
        known: Sequence[Hit | Unclaimed | None],
        generations: Sequence[int],
        session: int,
        request: int,
        *,
        wait_until: float,
        now: float,
    ) -> list[Answer]:
        """Answer for each name with what is known; where that is nothing, with a claim, or a wait until `wait_until`.

        If that is past, nobody waits. A request that has a claim, or waits already, is told so again: a retry neither
        claims nor waits twice.
        """
        by_name, holds, party = self._by_name, self._holds, self._party(session)
        answers: list[Answer] = []
        for name, answer, generation in zip(names, known, generations, strict=True):
            if answer is not None:
                answers.append(answer)
            elif (claim := by_name.get(name)) is not None:
                answers.append(self._join(claim, party, request, len(answers), wait_until=wait_until, now=now))
            elif name in holds:
                answers.append(HELD)
            elif len(by_name) >= self._max_claims:
                answers.append(OVERLOADED)
            else:
                answers.append(self._grant(name, generation, party, request, now))
        return answers

    def renew(self, session: int, tokens: Iterable[int], now: float) -> list[int]:
        """Let claims of a session run for their full time again; returns those that it does not have (any more)."""
        due = now + self._claim_s
        lost = []
        for token in tokens:
            claim = self._by_token.get(token)
            if claim is None or claim.party.session != session:
                lost.append(token)
            else:
                claim.due = due
                self._by_token.move_to_end(token)
        return lost

    def has(self, session: int, token: int, name: bytes) -> bool:
        """Whether this is a live claim of the session, on this name."""
        claim = self._by_token.get(token)
        return claim is not None and claim.party.session == session and claim.name == name

    def token_of(self, name: bytes) -> int | None:
        """The live claim on a name."""
        claim = self._by_name.get(name)
        return None if claim is None else claim.token

    def reserve(self, name: bytes, generation: int) -> bool:
        """Let whoever asks for a name wait, though nobody computes it, until it is settled. False: there is no room."""
        if name not in self._by_name:
            if len(self._by_name) >= self._max_claims:
                return False
            nobody = self._party(_NOBODY)
            self._by_name[name] = _Claim(name, generation, next(self._tokens), nobody, 0, math.inf)
        return True

    def settle(self, name: bytes, result: Hit | Unclaimed | None, now: float) -> Sequence[Wake]:
        """All who wait for a name that is reserved get this result; None: the first of them gets a claim."""
        claim = self._by_name.get(name)
        if claim is None or claim.party.session != _NOBODY:
            return ()
        return self._pass_on(claim, now) if result is None else self._release(claim, result)

    def committed(self, name: bytes, hit: Hit) -> Sequence[Wake]:
        """The name has an entry now: whoever computed or held it, that is over, and all who waited get the entry."""
        if name in self._holds:
            del self._holds[name]
        claim = self._by_name.get(name)
        return () if claim is None else self._release(claim, hit)

    def give_up(self, session: int, token: int, reason: AbortReason, now: float) -> Sequence[Wake] | None:
        """End a claim of a session without an entry. None: the session does not have that claim (any more)."""
        claim = self._by_token.get(token)
        if claim is None or claim.party.session != session:
            return None
        if reason is AbortReason.NO_ROOM:
            return self._release(claim, NO_ROOM)
        if reason is AbortReason.HELD:
            if len(self._holds) < self._max_holds:
                self._holds[claim.name] = now + self._hold_s, claim.generation
            return self._release(claim, HELD)
        return self._pass_on(claim, now)

    def outdate(self, generation_of: Callable[[bytes], int]) -> list[Wake]:
        """End the claims, waits and holds of names whose generation is another by now. All others keep theirs."""
        for name in [name for name, (_, generation) in self._holds.items() if generation != generation_of(name)]:
            del self._holds[name]
        wakes: list[Wake] = []
        for claim in [claim for claim in self._by_name.values() if claim.generation != generation_of(claim.name)]:
            wakes += self._release(claim, ASK_AGAIN)
        return wakes

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
        wakes: list[Wake] = []
        for party in parties:
            for token in sorted(party.tokens):
                wakes += self._pass_on(self._by_token[token], now)
        for session in sessions:
            self._parties.pop(session, None)
        return wakes

    def expire(self, now: float) -> list[Wake]:
        """End the waits, holds and claims that are due. Waits first, so that no claim passes to one that is over."""
        self._expire_waits(now)
        while self._holds and next(iter(self._holds.values()))[0] <= now:
            self._holds.popitem(last=False)
        wakes: list[Wake] = []
        while self._by_token and (claim := next(iter(self._by_token.values()))).due <= now:
            wakes += self._pass_on(claim, now)
        return wakes

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        deadlines = [claim.due for claim in itertools.islice(self._by_token.values(), 1)]
        deadlines += [due for due, _ in itertools.islice(self._holds.values(), 1)]
        if (due := self._wait_deadlines.next()) is not None:
            deadlines.append(due)
        return min(deadlines, default=None)

    def _party(self, session: int) -> _Party:
        party = self._parties.get(session)
        if party is None:
            party = self._parties[session] = _Party(session)
        return party

    def _grant(self, name: bytes, generation: int, party: _Party, request: int, now: float) -> Granted:
        token = next(self._tokens)
        claim = _Claim(name, generation, token, party, request, now + self._claim_s)
        self._by_name[name] = self._by_token[token] = claim
        party.tokens.add(token)
        return Granted(generation, token, self._claim_ms)

    def _end(self, claim: _Claim) -> None:
        del self._by_name[claim.name]
        if claim.party.session != _NOBODY:
            del self._by_token[claim.token]
            claim.party.tokens.remove(claim.token)

    def _pass_on(self, claim: _Claim, now: float) -> Sequence[Wake]:
        """End a claim; the first in its line gets the next one, and the rest of the line."""
        self._end(claim)
        if not claim.waits:
            return ()
        wait, _ = claim.waits.popitem(last=False)
        granted = self._grant(claim.name, claim.generation, self._parties[wait.session], wait.request, now)
        self._by_name[claim.name].waits = claim.waits
        return self._woken(wait, claim.name, granted)

    def _release(self, claim: _Claim, result: Resolution) -> Sequence[Wake]:
        """End a claim; all of its line get the same result."""
        self._end(claim)
        if not claim.waits:
            return ()
        return [wake for wait in claim.waits for wake in self._woken(wait, claim.name, result)]

    def _join(
        self, claim: _Claim, party: _Party, request: int, position: int, *, wait_until: float, now: float
    ) -> Granted | Waiting | Unclaimed:
        """Answer a request for a name that has a claim: it is this request's own, or there is a line to stand in."""
        if claim.party is party and claim.request == request:
            return Granted(claim.generation, claim.token, max(1, int((claim.due - now) * 1000)))
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
            wait = party.waits[request] = _Wait(party.session, request)
            self._wait_deadlines.set((party.session, request), wait_until)
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
