"""The claims that this client holds: numbers of its own for them, and when they are to be renewed.

A claim outlives its session: it is what is being computed here, to be claimed again in the next one.

No I/O and no clock; times are seconds on one monotonic clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from mmcache.control.calls import Acquisition
    from mmcache.key import Scope

SHORTEST_ROUND_S: Final = 0.01


class Subject(NamedTuple):
    """What a claim is of: a key's scope and digest, at one generation of one lineage."""

    scope: Scope
    digest: bytes
    generation: int
    lineage: str


class HeldClaim(NamedTuple):
    """One claim: the controller's token, whose it is, until when it is renewed, and when it has lapsed for sure.

    `token` is 0 while the present session has not granted it: the one that did is over.
    """

    token: int
    owner: Acquisition
    subject: Subject
    renew_until: float
    over_at: float


class HeldClaims:
    """What is being computed under claims, of the present session or earlier ones.

    The controller's tokens grow within its term, and the next term's may repeat them. So callers get numbers instead,
    that are never used twice, and that stay the same when another session grants the same claim under another token.

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

    def hold(
        self, token: int, owner: Acquisition, subject: Subject, *, claim_s: float, renew_until: float, now: float
    ) -> int:
        """Take over a claim; returns the number that stands for it here. One that is held keeps number and owner."""
        number = self._by_token.get(token)
        if number is not None:
            return number
        number = next(self._numbers)
        self._by_token[token] = number
        self._claims[number] = HeldClaim(token, owner, subject, renew_until, renew_until + claim_s)
        self._renew_within(claim_s / 3, now)
        return number

    def end(self, number: int) -> int:
        """Hold a claim no longer; returns the controller's token, or 0 if the present session has none for it."""
        claim = self._claims.pop(number, None)
        if claim is None:
            return 0
        self._by_token.pop(claim.token, None)
        return claim.token

    def due(self, now: float) -> list[int]:
        """The tokens to renew, once a round. Past its `renew_until` a claim is held until it has lapsed by itself."""
        if self._round_at is None or now < self._round_at:
            return []
        for number in [number for number, claim in self._claims.items() if claim.over_at <= now]:
            self.end(number)
        self._round_at = now + self._interval if self._claims else None
        return [claim.token for claim in self._claims.values() if claim.token and claim.renew_until > now]

    def lost(self, tokens: Iterable[int]) -> int:
        """The controller does not have these any more. Returns how many were still held."""
        numbers = [number for token in tokens if (number := self._by_token.get(token)) is not None]
        for number in numbers:
            self.end(number)
        return len(numbers)

    def session_lost(self) -> list[HeldClaim]:
        """The session is over, and with it all tokens. Returns the claims, as they were."""
        claims = list(self._claims.values())
        self._by_token.clear()
        self._claims = {number: claim._replace(token=0) for number, claim in self._claims.items()}
        return claims

    def to_claim_again(self, lineage: str, now: float) -> dict[int, HeldClaim]:
        """At the beginning of a session: what it is to grant again. What is of another lineage is held no longer."""
        for number in [number for number, claim in self._claims.items() if claim.subject.lineage != lineage]:
            self.end(number)
        return {number: claim for number, claim in self._claims.items() if claim.renew_until > now}

    def regain(self, number: int, token: int, generation: int, *, claim_s: float, now: float) -> bool:
        """The present session has granted it again. False: it is not held any more, or was of another generation."""
        claim = self._claims.get(number)
        if claim is None or claim.token or token in self._by_token:
            return False
        if claim.subject.generation != generation:
            self.end(number)
            return False
        self._claims[number] = claim._replace(token=token, over_at=claim.renew_until + claim_s)
        self._by_token[token] = number
        self._renew_within(claim_s / 3, now)
        return True

    def clear(self) -> None:
        """There will be no other session."""
        self._claims.clear()
        self._by_token.clear()
        self._round_at = None

    def next_deadline(self) -> float | None:
        """When the next round of renewals is due."""
        return self._round_at

    def _renew_within(self, third: float, now: float) -> None:
        third = max(third, SHORTEST_ROUND_S)
        self._interval = min(self._interval, third) if self._interval else third
        self._round_at = min(self._round_at, now + third) if self._round_at is not None else now + third
