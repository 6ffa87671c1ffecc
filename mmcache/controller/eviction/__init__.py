"""Which entry goes when room is needed: policies behind one contract. Plain classes; they remove nothing themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from mmcache.controller.eviction.lru import LeastRecentlyUsed
from mmcache.controller.eviction.policy import Policy
from mmcache.controller.eviction.s3cost import S3Cost
from mmcache.controller.eviction.s3fifo import S3Fifo

PolicyName = Literal["lru", "s3fifo", "s3cost"]
POLICIES: Final[dict[PolicyName, Callable[[], Policy]]] = {"lru": LeastRecentlyUsed, "s3fifo": S3Fifo, "s3cost": S3Cost}
DEFAULT: Final[PolicyName] = "s3cost"

__all__ = ["DEFAULT", "POLICIES", "LeastRecentlyUsed", "Policy", "PolicyName", "S3Cost", "S3Fifo"]
