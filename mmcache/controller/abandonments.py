"""Names that are of no use, and how many of them may be invalidated.

A dead writer holds a name for half a minute, and what is corrupt lies under it until the store forgets it. Another
generation is another name. But each costs everybody an invalidation, so that only some are made, however many clients
find a name to be of no use, and however often.
"""

from __future__ import annotations

from mmcache.control.messages import Abandoned, AbandonReason
from mmcache.controller.announcements import Asked
from mmcache.selector import Selector

_REASONS = {
    AbandonReason.HELD: "abandoned: a dead writer holds the name in the store",
    AbandonReason.CORRUPT: "abandoned: what the store has under the name is not the entry",
}


class Abandonments:
    """Those whose invalidation is asked for and not durable yet, and a token bucket for more. Times are seconds.

    Args:
        at_once: most at one time.
        every_ms: how long it takes until one more is possible.
    """

    def __init__(self, *, at_once: int, every_ms: int) -> None:
        self._at_once = at_once
        self._every_s = every_ms / 1000
        self._left = float(at_once)
        self._counted_at = 0.0
        self._claims: dict[bytes, tuple[int, int] | None] = {}
        """By name: the session and token of a claim that ends with it."""

    def __len__(self) -> int:
        return len(self._claims)

    def __contains__(self, name: bytes) -> bool:
        return name in self._claims

    def may(self, now: float) -> bool:
        """Whether there may be one more, which counts from now on."""
        gained = max(0.0, now - self._counted_at) / self._every_s
        self._left = min(float(self._at_once), self._left + gained)
        self._counted_at = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def add(self, name: bytes, claim: tuple[int, int] | None) -> None:
        """The name's invalidation is asked for; `claim`, a session and a token, ends with it."""
        self._claims[name] = claim or self._claims.get(name)

    def take(self) -> list[tuple[int, int]]:
        """They are durable by now, or will not be. Returns the claims."""
        claims = [claim for claim in self._claims.values() if claim is not None]
        self._claims.clear()
        return claims


def abandonment(entry: Abandoned, actor: str) -> Asked:
    """The invalidation that gives a key another name, and that needs no idempotency: its generation is another then."""
    return Asked(Selector.of(entry.scope, entry.mm_hash), _REASONS[entry.reason], actor, "")
