"""What is asked and told of invalidations: who asked for one, who is to hear of it, and who waits for its end.

An invalidation is asked for, then durable, and only then pushed: nobody hears of a number that a crash could take back.
Sessions ask, and so does the controller's own process for its operators (`LOCAL`).
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mmcache.control.messages import (
    MAX_PUSH,
    Awaited,
    ControllerMessage,
    Invalidated,
    Progress,
    Push,
    Refused,
)
from mmcache.controller.followers import LOCAL, Follower, Followers
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.sessions import Session, Sessions
from mmcache.selector import Selector

MAX_ASKED: Final = 1024
"""Most invalidations that are asked for and not durable yet: more than come between two writes."""
MAX_REMEMBERED: Final = 10_000
"""Of how many invalidations it is remembered who asked for them, so that asking once more makes no other."""
MAX_AWAITED: Final = 100
"""Most sessions that a progress names."""
LOCAL_PEER: Final = b""
"""Where messages to `LOCAL` go: no connection has an empty routing id."""

Addressed = Iterator[tuple[bytes, ControllerMessage]]
"""Messages, each with the routing id of its connection."""


class Asked(NamedTuple):
    """An invalidation that is to become durable under the next number.

    Args:
        idempotency: asking with it once more makes no other; empty if it has none.
        role: as what the actor asked. What is asked in a role is also recorded for an audit; empty: a session asked.
        note: what that record says besides number and selector: small plain data.
    """

    selector: Selector
    reason: str
    actor: str
    idempotency: str
    role: str = ""
    note: Mapping[str, Any] = {}


class _Standing(NamedTuple):
    """How the sessions stand to what was invalidated, taken once for all who are told of it at a time."""

    unbound: int
    behind: Sequence[Session]
    """Those that are not settled for all of it."""


class Announcements:
    """All of one term. Methods return messages with the connections that they are for.

    Args:
        term: the controller's.
        remembered: numbers of earlier invalidations by their idempotency keys.
    """

    def __init__(
        self,
        invalidations: Invalidations,
        sessions: Sessions,
        *,
        term: int,
        max_followers: int,
        remembered: Iterable[tuple[str, int]] = (),
    ) -> None:
        self._invalidations = invalidations
        self._sessions = sessions
        self._term = term
        self._followers = Followers(max_followers)
        self._asked: list[Asked] = []
        self._askers: list[list[Follower]] = []
        self._numbers: OrderedDict[str, int] = OrderedDict(itertools.islice(remembered, MAX_REMEMBERED))
        self._completed: list[int] = []
        self._forgotten: list[int] = []

    # What is asked

    def ask(self, asker: Follower, *asked: Asked) -> ControllerMessage | None:
        """Make one or several, which become durable together. The answer is that to the last of them: now, or then.

        If the last was asked for before, by its idempotency key, so were those that came with it: none is made again.
        """
        key = asked[-1].idempotency
        if key and (number := self._numbers.get(key)) is not None:
            return Invalidated(self._term, asker.session, asker.request, number)
        for earlier, askers in zip(self._asked, self._askers, strict=True):
            if key and earlier.idempotency == key:
                askers.append(asker)
                return None
        if len(self._asked) + len(asked) > MAX_ASKED:
            return Refused(asker.request, "overloaded: too many invalidations at once")
        self._asked += asked
        self._askers += [[] for _ in asked]
        self._askers[-1].append(asker)
        return None

    def make(self, asked: Asked) -> bool:
        """Make an invalidation that nobody asked for by a request. False: there are too many at once."""
        if len(self._asked) >= MAX_ASKED:
            return False
        self._asked.append(asked)
        self._askers.append([])
        return True

    def follow(self, follower: Follower, number: int, wait_ms: int, now: float) -> ControllerMessage | None:
        """Tell of an invalidation: now if it is complete, else when it is, or after the time that it may take."""
        if number > self._invalidations.head:
            return Refused(follower.request, f"there is no invalidation {number} yet")
        if number not in self._invalidations.pending or not wait_ms:
            return self._progress(follower, number, self._standing(), now)
        if self._followers.full:
            return Refused(follower.request, "overloaded: too many wait for invalidations")
        self._followers.add(follower, number, now + wait_ms / 1000)
        return None

    # What is durable

    @property
    def asked(self) -> Sequence[Asked]:
        """What is to become durable, in this order, under the numbers that follow the head."""
        return self._asked

    def take_completed(self) -> list[int]:
        """What has become complete since the last call."""
        completed, self._completed = self._completed, []
        return completed

    def take_forgotten(self) -> list[int]:
        """What does not count any more, since later ones cover it, since the last call."""
        forgotten, self._forgotten = self._forgotten, []
        return forgotten

    def written(self, now: float) -> Addressed:
        """What was asked for is durable, and counts from now on: tell everybody."""
        invalidations = self._invalidations
        asked, askers = self._asked, self._askers
        self._asked, self._askers = [], []
        before = invalidations.head
        invalidations.apply(before + 1, [one.selector for one in asked], self._sessions.all())
        numbered = list(enumerate((one.selector for one in asked), before + 1))
        for number, (one, waiting) in enumerate(zip(asked, askers, strict=True), before + 1):
            if one.idempotency:
                self._numbers[one.idempotency] = number
                if len(self._numbers) > MAX_REMEMBERED:
                    self._numbers.popitem(last=False)
            for peer, asker in self._present(waiting):
                yield peer, Invalidated(self._term, asker.session, asker.request, number)
        for session in self._sessions.live():
            if session.pushed == before:
                for start in range(0, len(numbered), MAX_PUSH):
                    part = numbered[start : start + MAX_PUSH]
                    session.pushed = part[-1][0]
                    # Nothing among them is left out, so each part is whole.
                    yield session.peer, Push(self._term, session.number, part[0][0] - 1, session.pushed, True, part)
            else:
                yield from self.push(session, session.pushed)
        self._forgotten += invalidations.compact()
        if (wider := invalidations.coarser()) is not None:
            self._asked.append(Asked(wider, "there were too many invalidations", "mmcache", ""))
            self._askers.append([])
        yield from self.complete(now)

    def refused(self, reason: str) -> Addressed:
        """What was asked for could not be written, and is not going to be."""
        askers, self._asked, self._askers = self._askers, [], []
        for peer, asker in self._present(itertools.chain(*askers)):
            yield peer, Refused(asker.request, reason)

    # What is pushed, and completion

    def push(self, session: Session, after: int) -> Addressed:
        """All that counts and comes after a number, for a session that has all up to it."""
        for message in self._invalidations.pushes(after, self._term, session.number):
            session.pushed = message.through
            yield session.peer, message

    def heard(self, sessions: Iterable[Session], now: float) -> Addressed:
        """These may be settled for more than before."""
        for session in sessions:
            self._invalidations.heard(session)
        yield from self.complete(now)

    def complete(self, now: float) -> Addressed:
        """Tell of those that are complete by now."""
        complete = self._invalidations.take_complete()
        if not complete:
            return
        self._completed += complete
        yield from self._progresses(self._followers.take(complete), now)

    def expire(self, now: float) -> Addressed:
        """Tell those who have waited for long enough how far it is."""
        yield from self._progresses(self._followers.expire(now), now)

    def end(self, sessions: Iterable[int]) -> None:
        """These sessions wait for nothing any more. What they asked for is made all the same."""
        if len(self._followers):
            self._followers.end(sessions)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return self._followers.next_deadline()

    def _progresses(self, waited: Sequence[tuple[Follower, int]], now: float) -> Addressed:
        if not waited:
            return
        standing = self._standing()
        for follower, number in waited:
            for peer, _ in self._present([follower]):
                yield peer, self._progress(follower, number, standing, now)

    def _standing(self) -> _Standing:
        unbound = 0
        behind: list[Session] = []
        for session in self._sessions.all():
            if session.serves_stale:
                unbound += 1
            elif self._invalidations.pending and session.settled < self._invalidations.head:
                behind.append(session)
        return _Standing(unbound, behind)

    def _progress(self, follower: Follower, number: int, standing: _Standing, now: float) -> Progress:
        waiting = self._invalidations.pending.get(number, 0)
        awaited: list[Awaited] = []
        if waiting:
            unsettled = (session for session in standing.behind if session.settled < number)
            for session in itertools.islice(unsettled, MAX_AWAITED):
                left_ms = math.ceil((self._sessions.settles_by(session, number) - now) * 1000)
                awaited.append(Awaited(session.name, session.host, max(0, left_ms)))
        return Progress(
            self._term, follower.session, follower.request, number, not waiting, waiting, standing.unbound, awaited
        )

    def _present(self, followers: Iterable[Follower]) -> Iterator[tuple[bytes, Follower]]:
        for follower in followers:
            if follower.session == LOCAL:
                yield LOCAL_PEER, follower
            elif (session := self._sessions.find(follower.session)) is not None:
                yield session.peer, follower
