"""Deliberate bugs in the real code, each small, that schedules must find: what they do not find, they do not check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from mmcache.control import session as client_session
from mmcache.control.generations import GenerationTable
from mmcache.control.messages import Commit, CommitStatus, HeartbeatAnswer, Hello, Invalidated, Push
from mmcache.controller.announcements import Announcements, Asked
from mmcache.controller.claims import Claims
from mmcache.controller.core import ControllerCore
from mmcache.controller.entries import Entries
from mmcache.controller.followers import Follower
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.reconciliation import Reconciliation
from mmcache.controller.sessions import Sessions
from mmcache.key import mm_digest
from mmcache.selector import Selector

Replacement = tuple[type, str, Any]


def _nobody_silent_is_awaited() -> Replacement:
    real = Invalidations.apply

    def apply(self: Invalidations, first: int, selectors: Iterable[Selector], _: object) -> int:
        return real(self, first, selectors, ())

    return Invalidations, "apply", apply


def _strangers_are_forgotten() -> Replacement:
    real = ControllerCore.__init__

    def init(self: ControllerCore, limits: Any, *, past: Any, **rest: Any) -> None:
        real(self, limits, past=past._replace(strangers_until=None), **rest)

    return ControllerCore, "__init__", init


def _fresh_from_the_answer_on() -> Replacement:
    real = client_session.Session._answered

    def answered(self: client_session.Session, answer: HeartbeatAnswer, now: float) -> Any:
        if answer.number in self._unanswered:
            self._unanswered[answer.number] = now
        return real(self, answer, now)

    return client_session.Session, "_answered", answered


def _drift_is_forgotten() -> Replacement:
    real = Sessions.__init__

    def init(self: Sessions, *, ttl_s: float, **rest: Any) -> None:
        real(self, ttl_s=ttl_s / 1.05, **rest)

    return Sessions, "__init__", init


def _old_generations_are_committed() -> Replacement:
    real = Entries.commit

    def commit(self: Entries, session: Any, message: Commit, now: float) -> Any:
        answer, wakes = real(self, session, message, now)
        entries = [(group.scope.digest, entry) for group in message.groups for entry in group.entries]
        for place, (scope, entry) in enumerate(entries):
            name = scope + mm_digest(entry.mm_hash)
            if entry.generation < self.generation_of(name):
                hit, _ = self.directory.enter(name, entry, session.name, now)
                wakes = [*wakes, *self.claims.committed(name, hit)]
                answer.results[place] = CommitStatus.STORED
        return answer, wakes

    return Entries, "commit", commit


def _whoever_ended_is_settled() -> Replacement:
    real = ControllerCore._end

    def end(self: ControllerCore, session: Any, now: float, *, knows: bool = False) -> Any:
        return real(self, session, now, knows=True)

    return ControllerCore, "_end", end


def _gaps_are_skipped() -> Replacement:
    real = client_session.Session._pushed

    def pushed(self: client_session.Session, push: Push, now: float) -> Any:
        return real(self, msgspec.structs.replace(push, after=min(push.after, self._received)), now)

    return client_session.Session, "_pushed", pushed


def _what_is_not_covered_is_forgotten() -> Replacement:
    real = GenerationTable._covered

    def covered(self: GenerationTable, number: int, selector: Selector) -> bool:
        """Also by one that gives the same fields, whatever their values."""
        given = selector.fields().keys()
        alike = any(later > number and other.fields().keys() == given for later, other in self.invalidations())
        return alike or real(self, number, selector)

    return GenerationTable, "_covered", covered


def _numbers_are_told_before_they_are_durable() -> Replacement:
    real = Announcements.ask

    def ask(self: Announcements, asker: Follower, asked: Asked) -> Any:
        answer = real(self, asker, asked)
        if answer is None:
            number = self._invalidations.head + len(self._asked)
            return Invalidated(self._term, asker.session, asker.request, number)
        return answer

    return Announcements, "ask", ask


def _numbers_alone_tell_of_an_older_copy() -> Replacement:
    """Whatever term a client comes from, it may have heard of all that there is by now."""
    real = ControllerCore._hello

    def hello(self: ControllerCore, peer: bytes, message: Hello, now: float) -> Any:
        return real(self, peer, msgspec.structs.replace(message, term=self.term), now)

    return ControllerCore, "_hello", hello


def _acknowledged_before_it_counts() -> Replacement:
    """The client says that it has applied what it was told of, not what it has."""
    real = client_session.Session._answered

    def answered(self: client_session.Session, answer: HeartbeatAnswer, now: float) -> Any:
        effects = real(self, answer, now)
        self._replica.head = max(self._replica.head, answer.head)
        return effects

    return client_session.Session, "_answered", answered


def _claims_outlive_their_generation() -> Replacement:
    return Claims, "outdate", lambda self, generation_of: []


def _claims_pass_on_while_they_live() -> Replacement:
    real = Claims.renew

    def renew(self: Claims, session: int, tokens: Iterable[int], now: float) -> list[int]:
        tokens = list(tokens)
        lost = real(self, session, tokens, now)
        for token in tokens:
            if token in self._by_token:
                self._by_token[token].due = now + 0.1
        return lost

    return Claims, "renew", renew


def _whatever_is_not_known_is_removed() -> Replacement:
    def saw_unknown(self: Reconciliation, name: bytes, generation: int) -> None:
        self._removals.add(name, generation)

    return Reconciliation, "_saw_unknown", saw_unknown


def _what_came_later_is_judged_by_a_listing() -> Replacement:
    real = Reconciliation.begin

    def begin(self: Reconciliation) -> None:
        real(self)
        self._before = 1 << 62

    return Reconciliation, "begin", begin


BUGS: dict[str, Callable[[], Replacement]] = {
    "nobody silent is awaited": _nobody_silent_is_awaited,
    "strangers are forgotten": _strangers_are_forgotten,
    "fresh from the answer on": _fresh_from_the_answer_on,
    "drift is forgotten": _drift_is_forgotten,
    "old generations are committed": _old_generations_are_committed,
    "whoever ended is settled": _whoever_ended_is_settled,
    "gaps are skipped": _gaps_are_skipped,
    "what is not covered is forgotten": _what_is_not_covered_is_forgotten,
    "numbers are told before they are durable": _numbers_are_told_before_they_are_durable,
    "numbers alone tell of an older copy": _numbers_alone_tell_of_an_older_copy,
    "acknowledged before it counts": _acknowledged_before_it_counts,
    "claims outlive their generation": _claims_outlive_their_generation,
    "claims pass on while they live": _claims_pass_on_while_they_live,
    "whatever is not known is removed": _whatever_is_not_known_is_removed,
    "what came later is judged by a listing": _what_came_later_is_judged_by_a_listing,
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """While the code has a bug."""
    with ExitStack() as stack:
        if bug:
            place, name, replacement = BUGS[bug]()
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield
