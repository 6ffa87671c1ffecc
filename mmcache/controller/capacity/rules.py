"""What an operator has said about room."""

from __future__ import annotations

import msgspec

from mmcache.capacity_rules import AgeRule, Quota
from mmcache.controller.eviction import DEFAULT, PolicyName


class CapacityRules(msgspec.Struct, frozen=True, kw_only=True):
    """Watermarks are parts of the store's capacity. Raises ValueError for what cannot be."""

    policy: PolicyName = DEFAULT
    high: float = 0.9
    low: float = 0.85
    quotas: tuple[Quota, ...] = ()
    ages: tuple[AgeRule, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= 1:
            raise ValueError(f"watermarks cannot be {self.low} and {self.high}")
