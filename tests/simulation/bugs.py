"""Deliberate bugs in the real code, each small, that schedules must find: what they do not find, they do not check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import msgspec

from mmcache.control import session as client_session
from mmcache.control.generations import GenerationTable
from mmcache.control.messages import Commit, CommitStatus, HeartbeatAnswer, Hello, Hit, Invalidated, Push
from mmcache.controller.announcements import Announcements, Asked
from mmcache.controller.capacity.evictions import WAIT_S, Evictions, Fate
from mmcache.controller.capacity.room import Room
from mmcache.controller.capacity.shares import Shares
from mmcache.controller.claims import REMOVING, Claims
from mmcache.controller.core import ControllerCore
from mmcache.controller.entries import Entries
from mmcache.controller.followers import Follower
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.reconciliation import Reconciliation
from mmcache.controller.sessions import Sessions
from mmcache.key import mm_digest
from mmcache.selector import Selector
from mmcache.store.base import Outcome

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


def _whoever_asks_keeps_nothing() -> Replacement:
    return Evictions, "keep", lambda self, name: 0


def _commits_of_what_is_out_are_believed() -> Replacement:
    real = Evictions.doubts

    def doubts(self: Evictions, name: bytes, generation: int, now: float) -> bool:
        return self.fate(name, generation, now) is Fate.STAYS and real(self, name, generation, now)

    return Evictions, "doubts", doubts


def _commits_of_what_has_left_are_believed() -> Replacement:
    real = Evictions.done

    def done(self: Evictions, outcomes: Sequence[Outcome], now: float) -> None:
        real(self, outcomes, now)
        self._left.clear()

    return Evictions, "done", done


def _what_is_out_is_granted_at_once() -> Replacement:
    def despite_removal(self: Entries, name: bytes, known: Any, generation: int, now: float) -> Any:
        if isinstance(known, Hit):
            self.room.keep(name)
            known = known if self.room.evictions.fate(name, generation, now) is Fate.STAYS else None
        return known

    return Entries, "_despite_removal", despite_removal


def _whoever_waited_too_long_for_a_removal_computes() -> Replacement:
    real = Claims.settle

    def settle(self: Claims, name: bytes, result: Any, now: float) -> Any:
        return real(self, name, None if result is REMOVING else result, now)

    return Claims, "settle", settle


def _what_is_refused_is_taken_for_gone() -> Replacement:
    real = Evictions.done

    def done(self: Evictions, outcomes: Sequence[Outcome], now: float) -> None:
        real(self, [Outcome.OK if outcome is Outcome.LEASED else outcome for outcome in outcomes], now)

    return Evictions, "done", done


def _whoever_waits_for_a_removal_waits_on() -> Replacement:
    real = Evictions.tick

    def tick(self: Evictions, now: float) -> Iterator[bytes]:
        self._wait_until = None if self._wait_until is None else now + WAIT_S
        return real(self, now)

    return Evictions, "tick", tick


def _a_pin_takes_no_choice_back() -> Replacement:
    real = Room.pin

    def pin(self: Room, name: bytes, pinned: bool) -> None:
        with mock.patch.object(Evictions, "keep", return_value=0):
            real(self, name, pinned)

    return Room, "pin", pin


def _what_is_pinned_is_chosen_later() -> Replacement:
    real = Room.pin

    def pin(self: Room, name: bytes, pinned: bool) -> None:
        with mock.patch.object(Shares, "set_aside", return_value=True):
            real(self, name, pinned)

    return Room, "pin", pin


def _what_was_removed_is_read_back() -> Replacement:
    real = Reconciliation.read

    def read(self: Reconciliation, *rest: Any) -> bool:
        with mock.patch.object(Evictions, "doubts", return_value=False):
            return real(self, *rest)

    return Reconciliation, "read", read


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
    "whoever asks keeps nothing": _whoever_asks_keeps_nothing,
    "commits of what is out are believed": _commits_of_what_is_out_are_believed,
    "commits of what has left are believed": _commits_of_what_has_left_are_believed,
    "what is out is granted at once": _what_is_out_is_granted_at_once,
    "whoever waited too long for a removal computes": _whoever_waited_too_long_for_a_removal_computes,
    "what is refused is taken for gone": _what_is_refused_is_taken_for_gone,
    "whoever waits for a removal waits on": _whoever_waits_for_a_removal_waits_on,
    "a pin takes no choice back": _a_pin_takes_no_choice_back,
    "what is pinned is chosen later": _what_is_pinned_is_chosen_later,
    "what was removed is read back": _what_was_removed_is_read_back,
}


@contextmanager
def planted(bug: str) -> Iterator[None]:
    """While the code has a bug."""
    with ExitStack() as stack:
        if bug:
            place, name, replacement = BUGS[bug]()
            stack.enter_context(mock.patch.object(place, name, replacement))
        yield
