"""How long things last at a controller, and how many of each it keeps."""

from __future__ import annotations

from typing import Final

import msgspec

from mmcache.controller.capacity.rules import CapacityRules

MOST_BYTES: Final = 1 << 48


class ControllerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Times in milliseconds, and the bounds of the controller's tables. Beyond a bound there is no service, no growth.

    Raises ValueError for a limit that is not positive, a time longer than a day, or a share that is not 0 to 1.
    """

    ttl_ms: int = 5_000
    """How long a client's session is fresh after a heartbeat that was answered."""
    claim_ms: int = 10_000
    """How long a claim lives that is not renewed."""
    lease_ms: int = 10_000
    """The store's read lease, for the clients to know."""
    hold_ms: int = 30_000
    """How long the store keeps a dead writer's name: `put_start_discard_timeout_sec` of its master."""
    max_sessions: int = 10_000
    max_entries: int = 2_000_000
    max_claims: int = 500_000
    max_holds: int = 100_000
    max_waiters: int = 1_000_000
    """Most waits in all: each name of each waiting request is one."""
    max_waiters_per_session: int = 65_536
    max_scopes: int = 65_536
    max_invalidations: int = 100_000
    """Of which a generation table is made; beyond it the oldest are replaced by coarser ones."""
    max_followers: int = 10_000
    """Most requests that wait for an invalidation to be complete."""
    max_removals: int = 2_000_000
    """Most names whose bytes are to be given back; the store's eviction takes what is beyond it."""

    max_abandonments: int = 100
    """Most names at once that clients find to be of no use and that are invalidated for it."""
    abandonment_ms: int = 6_000
    """And then one more in so long: each is an invalidation that everybody hears of, and has a place in the table."""
    capacity: CapacityRules = CapacityRules()
    """What stays in the store."""
    min_embeddings: int = 0
    """What is smaller is not worth publishing; for the clients to know."""
    max_bytes: int = MOST_BYTES
    """Nor is what is larger."""

    pinned_share: float = 0.25
    """How much of the store's capacity pins may keep, 0 to 1."""
    max_pins: int = 10_000
    max_pinned: int = 100_000
    """Most entries that are pinned: the lease of each is renewed again and again."""

    def __post_init__(self) -> None:
        if self.min_embeddings < 0:
            raise ValueError(f"min_embeddings cannot be {self.min_embeddings}")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.endswith("_share"):
                if not 0.0 <= value <= 1.0:  # nor is NaN
                    raise ValueError(f"{name} cannot be {value}")
            elif name not in ("capacity", "min_embeddings") and (
                value < 1 or (name.endswith("_ms") and value > 86_400_000)
            ):
                raise ValueError(f"{name} cannot be {value}")
