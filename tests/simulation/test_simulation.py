"""All that the protocol promises holds in every schedule, and schedules find the bugs that would break it."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from .bugs import BUGS
from .schedules import play, play_all, replay
from .world import World

SCHEDULES = 2000
SEEN = 2
"""How often everything that can happen is to have happened at least, a hundred schedules."""
pytestmark = pytest.mark.timeout(1800)
"""Half a minute and more of nothing but computing: a machine that has other things to do as well may take long."""
RARE = {"database found to have gone back", "put invalidated", "unpin refused", "write failed", "write without room"}


def test_whatever_goes_wrong_all_that_is_promised_holds() -> None:
    counts: Counter[str] = Counter()
    for played in play_all(0, SCHEDULES, jobs=min(2, os.cpu_count() or 1)):
        assert played.seed is None, f"{played.failure}\n{replay(played.seed)}"
        counts.update(played.counts)
    assert min(counts[what] for what in counts if what not in RARE) > SCHEDULES / 100 * SEEN, "a vacuous simulation"
    assert counts["hit"] > 10 * SCHEDULES
    assert counts["invalidation complete"] > 2 * SCHEDULES
    assert counts["evicted"] > 2 * SCHEDULES


@pytest.mark.parametrize("bug", BUGS)
def test_a_deliberate_bug_is_found(bug: str) -> None:
    played = play(range(SCHEDULES), bug)
    assert played.seed is not None
    assert not played.failure.startswith(("AttributeError", "TypeError")), "the bug fits the code no more"


def test_a_seed_makes_the_same_schedule_each_time() -> None:
    first, second = World(8, verbose=True), World(8, verbose=True)
    first.run()
    second.run()
    assert first.trace == second.trace
    assert len(first.trace) > 100
