"""Who wants to be told when an invalidation is complete, or at a time of its own how far it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from mmcache.controller.deadlines import Deadlines

LOCAL: Final = 0
"""Stands for the controller's own process where it asks something itself: no session has this number."""


class Follower(NamedTuple):
    """One request of one session, or of `LOCAL`."""

    session: int
    request: int


class Followers:
    """Requests that wait for invalidations; at most `most` of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._number_of: dict[Follower, int] = {}
        self._of: dict[int, set[Follower]] = {}
        self._deadlines: Deadlines[Follower] = Deadlines()

    def __len__(self) -> int:
        return len(self._number_of)

    @property
    def full(self) -> bool:
        """Whether no further one fits."""
        return len(self._number_of) >= self._most

    def add(self, follower: Follower, number: int, until: float) -> None:
        """It waits for an invalidation until then. The caller has asked whether there is room."""
        self._forget(follower)
        self._number_of[follower] = number
        self._of.setdefault(number, set()).add(follower)
        self._deadlines.set(follower, until)

    def take(self, numbers: Iterable[int]) -> list[tuple[Follower, int]]:
        """Those that wait for these invalidations; they wait no longer."""
        taken = [(follower, number) for number in numbers for follower in sorted(self._of.get(number, ()))]
        for follower, _ in taken:
            self._forget(follower)
        return taken

    def expire(self, now: float) -> list[tuple[Follower, int]]:
        """Those that have waited for as long as they wanted to."""
        over = [(follower, self._number_of[follower]) for follower in self._deadlines.pop_due(now)]
        for follower, _ in over:
            self._forget(follower)
        return over

    def end(self, sessions: Iterable[int]) -> None:
        """These sessions are over."""
        gone = set(sessions)
        for follower in [follower for follower in self._number_of if follower.session in gone]:
            self._forget(follower)

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return self._deadlines.next()

    def _forget(self, follower: Follower) -> None:
        number = self._number_of.pop(follower, None)
        if number is not None:
            self._deadlines.discard(follower)
            self._of[number].discard(follower)
            if not self._of[number]:
                del self._of[number]
