"""However much a choice has to look at, a tick does not hold up the messages that come after it."""

from __future__ import annotations

from collections import Counter

import pytest

from mmcache.capacity_rules import Quota
from mmcache.control.messages import Commitment
from mmcache.controller.capacity.room import CHOSEN_AT_ONCE, LOOKED_AT_ONCE, Room
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.directory import Directory
from mmcache.controller.eviction import PolicyName
from mmcache.controller.eviction.policy import MOST_PASSED_OVER
from mmcache.controller.removals import Removals
from mmcache.key import Scope

NBYTES = 1 << 14
LATER = 100.0
"""When no publisher's lease holds any more."""


def full_room(*, policy: PolicyName, tenants: int, models: int, entries: int, uses: int) -> Room:
    """Each tenant and each model has a quota, and the entries are theirs in turn; the store is full of them."""
    quotas = [Quota("tenant", f"t{number}", None, 1 / tenants) for number in range(tenants)]
    quotas += [Quota("model", f"m{number}", None, 1 / models) for number in range(models)]
    scopes = [Scope(f"t{one}", f"m{other}", "v", None, "image") for one in range(tenants) for other in range(models)]
    scopes = scopes or [Scope("t", "m", "v", None, "image")]
    counts: Counter[str] = Counter()
    directory = Directory(max_entries=1 << 20, removals=Removals(lineage="l", lease_ms=1, most=1, counts=counts))
    rules = CapacityRules(policy=policy, quotas=tuple(quotas))
    room = Room(rules, directory, {scope.digest: scope for scope in scopes}, lease_ms=1000, counts=counts)
    for number in range(entries):
        name = scopes[number % len(scopes)].digest + number.to_bytes(32, "big")
        directory.enter(name, Commitment(str(number), 0, 0, NBYTES, 1.0, b""), "p", 0.0)
        room.accessed(name, uses)
    room.measured(entries * NBYTES, entries * NBYTES, LATER)
    return room


def ticks(room: Room) -> list[int]:
    """How many were chosen at each, until there is room."""
    chosen: list[int] = []
    while True:
        before = room.evictions.chosen
        room.tick(LATER)
        chosen.append(room.evictions.chosen - before)
        if room.next_deadline(LATER) is None:
            return chosen
        assert len(chosen) < 10_000, "it never ends"


@pytest.mark.parametrize("policy", ["s3cost", "s3fifo"])
def test_where_each_choice_goes_past_many_that_were_used_a_tick_makes_few(policy: PolicyName) -> None:
    entries = 16 * CHOSEN_AT_ONCE
    room = full_room(policy=policy, tenants=0, models=0, entries=entries, uses=3)
    chosen = ticks(room)
    assert chosen[0] <= LOOKED_AT_ONCE // MOST_PASSED_OVER
    assert sum(chosen) >= entries * 0.15  # down to the low watermark all the same


def test_where_each_choice_compares_many_groups_a_tick_makes_few() -> None:
    room = full_room(policy="lru", tenants=32, models=32, entries=2048, uses=0)
    chosen = ticks(room)
    assert max(chosen) <= 1
    assert sum(chosen) >= 2048 * 0.15


def test_where_choices_are_cheap_a_tick_makes_many() -> None:
    room = full_room(policy="s3cost", tenants=0, models=0, entries=8 * CHOSEN_AT_ONCE, uses=0)
    assert ticks(room)[0] == CHOSEN_AT_ONCE
