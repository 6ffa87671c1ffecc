"""Many schedules, on several processes: which of them is the first to fail, and what happened in all."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .bugs import planted
from .checker import Violation
from .world import World

_PART = 25


class Played(NamedTuple):
    """Some schedules that were played.

    Args:
        schedules, events: how many there were.
        counts: what happened in them.
        seed, failure: of the one that failed, after which no others were played; None and empty if none did.
    """

    schedules: int
    events: int
    counts: Counter[str]
    seed: int | None = None
    failure: str = ""


def replay(seed: int, bug: str = "") -> str:
    """The command that plays a schedule again, with all that happens in it."""
    return f"python -m tests.simulation.replay {seed} --verbose" + (f" --bug '{bug}'" if bug else "")


def play(seeds: Iterable[int], bug: str = "") -> Played:
    """Play schedules here, up to the first that fails; what the code raises is a failure too."""
    schedules = events = 0
    counts: Counter[str] = Counter()
    with planted(bug), _quiet():
        for seed in seeds:
            world = World(seed)
            failure = ""
            try:
                world.run()
            except Violation as violation:
                failure = str(violation)
            except Exception as error:  # noqa: BLE001 - it is told with its seed
                failure = f"{type(error).__name__}: {error}"
            schedules += 1
            events += world.events.count
            counts.update(world.counts)
            if failure:
                return Played(schedules, events, counts, seed, failure)
    return Played(schedules, events, counts)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Sessions that are lost are no news here."""
    logger = logging.getLogger("mmcache")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def play_all(first: int, schedules: int | None, *, jobs: int) -> Iterator[Played]:
    """Play schedules from a seed on, in parts, in order; None: without end. After a failure come no more."""
    ends = (
        itertools.count(first + _PART, _PART)
        if schedules is None
        else range(first + _PART, first + schedules + _PART, _PART)
    )
    last = None if schedules is None else first + schedules
    parts = (range(end - _PART, end if last is None else min(end, last)) for end in ends)
    if jobs == 1:
        played = map(play, parts)
        yield from _until_failure(played)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # `imap` reads its argument to the end at once, so that without an end it is given rounds
        while round_of := list(itertools.islice(parts, 8 * jobs)):
            for one in pool.imap(play, round_of):
                yield one
                if one.seed is not None:
                    return


def _until_failure(played: Iterable[Played]) -> Iterator[Played]:
    for one in played:
        yield one
        if one.seed is not None:
            return
