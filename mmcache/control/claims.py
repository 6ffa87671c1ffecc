"""The claims that this client holds: numbers of its own for them, and when they are to be renewed.

No I/O and no clock; times are seconds on one monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mmcache.control.calls import Acquisition

SHORTEST_ROUND_S: Final = 0.01


class HeldClaim(NamedTuple):
    """One claim: the controller's token, whose it is, until when it is renewed, and when it has lapsed for sure."""

    token: int
    owner: Acquisition
    renew_until: float
    over_at: float


class HeldClaims:
    """Claims of the present session.

    The controller's tokens grow within its term, and the next term's may repeat them. So callers get numbers instead,
    that are never used twice: one from an earlier session means nothing, rather than another's claim.

    All claims are renewed together, in rounds a third of the shortest claim apart: none waits longer than that third.
    """

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._claims: dict[int, HeldClaim] = {}
        self._by_token: dict[int, int] = {}
        self._interval = 0.0
        self._round_at: float | None = None

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, token: int) -> bool:
        """Whether the controller's `token` is held."""
        return token in self._by_token

    def hold(self, token: int, owner: Acquisition, *, claim_s: float, renew_until: float, now: float) -> int:
        """Take over a claim; returns the number that stands for it here. One that is held keeps number and owner."""
        number = self._by_token.get(token)
        if number is not None:
            return number
        number = next(self._numbers)
        self._by_token[token] = number
        self._claims[number] = HeldClaim(token, owner, renew_until, renew_until + claim_s)
        third = max(claim_s / 3, SHORTEST_ROUND_S)
        self._interval = min(self._interval, third) if self._interval else third
        self._round_at = min(self._round_at, now + third) if self._round_at is not None else now + third
        return number

    def end(self, number: int) -> int:
        """Hold a claim no longer; returns the controller's token, or 0 if it was not held."""
        claim = self._claims.pop(number, None)
        if claim is None:
            return 0
        del self._by_token[claim.token]
        return claim.token

    def due(self, now: float) -> list[int]:
        """The tokens to renew, once a round. Past its `renew_until` a claim is held until it has lapsed by itself."""
        if self._round_at is None or now < self._round_at:
            return []
        for number in [number for number, claim in self._claims.items() if claim.over_at <= now]:
            self.end(number)
        self._round_at = now + self._interval if self._claims else None
        return [claim.token for claim in self._claims.values() if claim.renew_until > now]

    def lost(self, tokens: Iterable[int]) -> int:
        """The controller does not have these any more. Returns how many were still held."""
        numbers = [number for token in tokens if (number := self._by_token.get(token)) is not None]
        for number in numbers:
            self.end(number)
        return len(numbers)

    def clear(self) -> list[HeldClaim]:
        """The session is over, and so are they all."""
        claims = list(self._claims.values())
        self._claims.clear()
        self._by_token.clear()
        self._interval = 0.0
        self._round_at = None
        return claims

    def next_deadline(self) -> float | None:
        """When the next round of renewals is due."""
        return self._round_at
