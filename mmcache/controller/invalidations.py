"""The sequence of invalidations: what counts, which are complete, and how many sessions those wait for that are not.

An invalidation is complete when every session is settled for it (see `sessions`). After a restart those of the term
before are not known, so nothing completes until all of them must have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from mmcache.control.generations import GenerationTable
from mmcache.control.messages import MAX_PUSH, Push
from mmcache.controller.sessions import Session
from mmcache.selector import Selector

_COMPACT_AT: Final = 1024


class Invalidations:
    """One term's.

    Args:
        budget: how many the generation table may hold before the oldest are replaced by coarser ones.
        held: those of earlier terms that count, in order.
        head: the last number of earlier terms.
        pending: numbers of earlier terms that were not complete.
        strangers: whether sessions of the term before may live still.
    """

    def __init__(
        self, *, budget: int, held: Iterable[tuple[int, Selector]], head: int, pending: Iterable[int], strangers: bool
    ) -> None:
        self.table = GenerationTable(budget)
        for number, selector in held:
            self.table.apply(number, selector)
        self.head = head
        self._budget = budget
        self._compact_at = _COMPACT_AT
        self._strangers = strangers
        self._waiting = {number: int(strangers) for number in sorted(pending)}
        """By number of each that is not complete: for how many sessions it waits."""

    @property
    def pending(self) -> Mapping[int, int]:
        """Those that are not complete, with how many sessions each waits for."""
        return self._waiting

    def apply(self, first: int, selectors: Iterable[Selector], sessions: Iterable[Session]) -> int:
        """These are durable, from this number on. Returns the new head."""
        if first != self.head + 1:
            raise ValueError(f"invalidation {first} comes after {self.head}")
        before = self.head
        for selector in selectors:
            self.head += 1
            self.table.apply(self.head, selector)
        waiting = int(self._strangers) + sum(not session.serves_stale for session in sessions)
        for number in range(before + 1, self.head + 1):
            self._waiting[number] = waiting
        return self.head

    def compact(self) -> list[int]:
        """Forget, where the table has grown, what later ones cover; returns the numbers that were forgotten."""
        if len(self.table) <= min(self._compact_at, self._budget):
            return []
        forgotten = self.table.compact()
        self._compact_at = 2 * len(self.table) + _COMPACT_AT
        return forgotten

    def coarser(self) -> Selector | None:
        """What to invalidate for the table to fit its budget again; None if it does."""
        return self.table.coarser() if len(self.table) > self._budget else None

    def heard(self, session: Session) -> None:
        """It may be settled for more than before."""
        settled = session.settled
        if session.counted >= settled:
            return
        if not session.serves_stale:
            for number in range(session.counted + 1, min(settled, self.head) + 1):  # few, however many wait for others
                if number in self._waiting:
                    self._waiting[number] -= 1
        session.counted = settled

    def strangers_have_ended(self) -> None:
        """No session of an earlier term can be alive."""
        if self._strangers:
            self._strangers = False
            for number in self._waiting:
                self._waiting[number] -= 1

    def take_complete(self) -> list[int]:
        """Those that are complete and were not before."""
        complete = []
        for number, waiting in self._waiting.items():  # in order, and no later one is complete before an earlier one
            if waiting:
                break
            complete.append(number)
        for number in complete:
            del self._waiting[number]
        return complete

    def pushes(self, after: int, term: int, session: int) -> Iterator[Push]:
        """All that counts and comes after a number, for one session."""
        later = [item for item in self.table.invalidations() if item[0] > after]
        for start in range(0, max(1, len(later)), MAX_PUSH):
            part = later[start : start + MAX_PUSH]
            whole = start + MAX_PUSH >= len(later)
            through = self.head if whole else part[-1][0]
            yield Push(term, session, after, through, whole, part)
            after = through
