"""S3-FIFO's small queue before a main part in which entries stay by what they save: uses times encode time per byte."""

from __future__ import annotations

import math
from array import array
from typing import Final

from mmcache.controller.eviction.s3fifo import SMALL, SmallFirst

MOST_USES: Final = 3
LEAST_COST_MS: Final = 0.001
MOST_COST_MS: Final = 3_600_000.0
MOST_OCTAVES: Final = 4
"""An entry's encode time per byte counts for at most 2**4 times, and for at least 2**-4 of, what is usual."""
STEP: Final = 1 / 64
"""By how many octaves each insertion moves what is usual."""
LEVELS: Final = 2 * MOST_OCTAVES + MOST_USES.bit_length()


class S3Cost(SmallFirst):
    """S3-FIFO's small queue, and twice its ghosts; one use is enough to stay. In the main part the least value goes.

    An entry's value is its uses times its encode time per byte, in powers of two. As in GreedyDual, its rank is its
    value plus the rank of the last victim at the time of its last use. So ranks grow, and what is not used any more is
    overtaken by what is, the sooner the less value it has. Within one value, ranks are in the order of use: there is a
    queue for each power of two, and the victim is one of their fronts.

    Costs are what publishers say, so none is taken at its word. One that is not a positive, finite number is unknown,
    and counts as usual; others are taken for a microsecond at least and an hour at most. What is usual is the running
    median of encode time per byte over all that was inserted, and an entry counts between 1/16 and 16 times of that.
    So whoever lies gets at most 16 times as long as an honest entry to be used again, and moves the median no further
    than anybody's entry does: by a 64th of an octave.
    """

    GHOSTS = 2

    def __init__(self) -> None:
        super().__init__(1 + LEVELS)
        self._rank = array("q", [0]) * (1 + LEVELS)
        """Rank of each entry in the main part, by slot. One is a 16th of the value of one use at the median."""
        self._octaves = bytearray(1 + LEVELS)
        """Encode time per byte of each against the median, in octaves, from 0 for 1/16 to 8 for 16 times, by slot."""
        self._age = 0
        """Rank of the last victim from the main part."""
        self._median: float | None = None
        """Of the logarithm to base 2 of milliseconds per byte."""

    def _revalue(self, slot: int, cost_ms: float) -> None:
        if slot == len(self._octaves):
            self._octaves.append(0)
            self._rank.append(0)
        octaves = MOST_OCTAVES
        if 0.0 < cost_ms < math.inf:
            density = math.log2(max(LEAST_COST_MS, min(cost_ms, MOST_COST_MS)) / self._queues.nbytes[slot])
            if self._median is None:
                self._median = density
            octaves += max(-MOST_OCTAVES, min(round(density - self._median), MOST_OCTAVES))
            self._median += STEP if density > self._median else -STEP
        self._octaves[slot] = octaves

    def _access(self, slot: int, count: int) -> None:
        uses = self._queues.uses
        uses[slot] = min(uses[slot] + count, MOST_USES)
        if self._queues.queue[slot] != SMALL and not self._queues.is_aside(slot):
            self._rank_anew(slot)

    def _used_enough(self, slot: int) -> bool:
        return self._queues.uses[slot] > 0

    def _promote(self, slot: int) -> None:
        self._queues.uses[slot] = max(self._queues.uses[slot], 1)
        self._rank_anew(slot)

    def _put_back(self, slot: int) -> None:
        if self._queues.queue[slot] == SMALL:
            super()._put_back(slot)
        else:
            self._rank_anew(slot)

    def _rank_anew(self, slot: int) -> None:
        """Put an entry where its uses and its cost place it now."""
        level = self._octaves[slot] + self._queues.uses[slot].bit_length() - 1
        self._rank[slot] = self._age + (1 << level)
        self._queues.move(slot, 1 + level)

    def _choose_from_main(self, *, last: bool) -> int | None:
        rank = self._rank
        victim, least = -1, 0
        for queue in range(1, 1 + LEVELS):
            front = self._queues.first(queue)
            if front != queue and (victim < 0 or rank[front] < least):
                victim, least = front, rank[front]
        self._age = max(self._age, least)
        return victim
