"""Entries on their way out of the store, and what may be believed of their names meanwhile. A state machine, no I/O.

An evicted name comes back with its next publication, under the same generation: unlike an outdated one. So a removal
must not take what was published after it was decided on. An entry is first *chosen*: whoever asks for it now has it
kept. Then it is *out*: its removal has been sent, and until its outcome is known, nobody is to compute it. And for a
while after it has *left*, a commit is believed only with a claim from after that: any other may be of the bytes that
were removed.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from mmcache.store.base import Outcome

WAIT_S: Final = 1.0
"""So long an outcome is worth waiting for: it is a matter of milliseconds, unless the store hangs."""
DOUBTED_S: Final = 10.0
"""After an entry has left: longer than a commit is under way."""
MOST_DOUBTED: Final = 200_000
MOST_TRIES: Final = 10
FIRST_PAUSE_S: Final = 1.0
MOST_PAUSE_S: Final = 60.0
LEASE_MARGIN_S: Final = 1.0
_UNKNOWN: Final = frozenset({Outcome.UNAVAILABLE, Outcome.TIMED_OUT})


class Reason(enum.Enum):
    """Why an entry is to go."""

    WATERMARK = "watermark"
    QUOTA = "quota"
    """Its tenant or its model had borrowed the room."""
    AGE = "age"


class Fate(enum.Enum):
    """What is known of a removal."""

    STAYS = "stays"
    """There is none, or it was refused: for a reader's lease, say."""
    GONE = "gone"
    OUT = "out"
    """The outcome is about to be known."""
    UNSURE = "unsure"
    """The outcome is not known, and may not be for long."""


class News(NamedTuple):
    """What became of the removal of this generation of a name: STAYS, GONE or UNSURE."""

    name: bytes
    generation: int
    fate: Fate


class _Leaving(NamedTuple):
    generation: int
    nbytes: int
    """0 once it is not in the directory any more."""
    reason: Reason
    tries: int = 0


class Evictions:
    """All that are chosen, out, or have left lately.

    Args:
        lease_ms: the store's read lease: an entry that is leased when it is to go is left alone for so long.
        counts: where to count what becomes of them.
    """

    def __init__(self, *, lease_ms: int, counts: Counter[str]) -> None:
        self._rest_s = lease_ms / 1000 + LEASE_MARGIN_S
        self._counts = counts
        self._chosen: OrderedDict[bytes, _Leaving] = OrderedDict()
        self._out: dict[bytes, _Leaving] = {}
        self._wait_until: float | None = None
        """Until when the outcome of what is out is worth waiting for."""
        self._unsure: dict[bytes, _Leaving] = {}
        """To be sent again."""
        self._resting: list[tuple[float, bytes]] = []
        """A heap: until when they cannot be removed."""
        self._left: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Until when they are doubted, and the generation."""
        self._news: list[News] = []
        self._silences = 0
        self._paused_until = 0.0
        self.nbytes = 0
        """Of all that are in the directory, and chosen or out."""

    def __len__(self) -> int:
        return len(self._chosen) + len(self._out) + len(self._unsure)

    @property
    def busy(self) -> bool:
        """Whether any name is not simply there, or not: `fate`, `keep` and `doubts` have something to say."""
        return bool(self._chosen or self._out or self._unsure or self._left)

    @property
    def chosen(self) -> int:
        """How many wait for their removal to be sent."""
        return len(self._chosen)

    def choose(self, name: bytes, generation: int, nbytes: int, reason: Reason) -> None:
        """An entry is to go. It is neither chosen nor out."""
        self._chosen[name] = _Leaving(generation, nbytes, reason)
        self.nbytes += nbytes

    def rest(self, name: bytes, until: float) -> None:
        """It cannot be removed before then, and is not to be chosen."""
        heapq.heappush(self._resting, (until, name))

    def leaves(self, name: bytes) -> bool:
        """Whether the entry that the directory has is chosen or out; of an older generation another may be out."""
        tables = (self._chosen, self._out, self._unsure)
        return any((leaving := table.get(name)) is not None and leaving.nbytes for table in tables)

    def keep(self, name: bytes) -> int:
        """It is wanted. Returns its bytes where it was chosen, and is not any more; else 0."""
        chosen = self._chosen.pop(name, None)
        if chosen is None:
            return 0
        self._counts["eviction.cancelled"] += 1
        self.nbytes -= chosen.nbytes
        return chosen.nbytes

    def forget(self, name: bytes) -> int:
        """It is not in the directory any more; a removal that is out stays out. Returns its bytes, if it was to go."""
        nbytes = 0
        for table in (self._chosen, self._out, self._unsure):
            if (leaving := table.get(name)) is not None:
                nbytes += leaving.nbytes  # an older generation, which has none any more, may be out besides
                table[name] = leaving._replace(nbytes=0)
        self._chosen.pop(name, None)
        self.nbytes -= nbytes
        return nbytes

    def fate(self, name: bytes, generation: int, now: float) -> Fate:
        """OUT, UNSURE, or STAYS."""
        leaving = self._out.get(name)
        if leaving is not None and leaving.generation == generation:
            return Fate.OUT if self._wait_until is not None and now < self._wait_until else Fate.UNSURE
        leaving = self._unsure.get(name)
        return Fate.UNSURE if leaving is not None and leaving.generation == generation else Fate.STAYS

    def doubts(self, name: bytes, generation: int, now: float) -> bool:
        """Whether a commit, unless by a claim that is live now, may be of bytes that were or will be removed."""
        if self.fate(name, generation, now) is not Fate.STAYS:
            return True
        until, left = self._left.get(name, (0.0, -1))
        return left == generation and now < until

    def trust(self, name: bytes) -> None:
        """It has been published again since it left."""
        self._left.pop(name, None)

    def take(self, most: int, now: float) -> list[tuple[bytes, int]]:
        """Removals to send now, each a name and its generation. `done` follows, or their outcome is not known."""
        if self._out:
            self._lose(self._out, now)
        if now < self._paused_until:
            return []
        for table in (self._unsure, self._chosen):
            for name in list(islice(table, most - len(self._out))):
                if name not in self._out:  # an older generation goes first
                    self._out[name] = table.pop(name)
        self._wait_until = now + WAIT_S if self._out else None
        return [(name, leaving.generation) for name, leaving in self._out.items()]

    def done(self, outcomes: Sequence[Outcome], now: float) -> None:
        """What came of what was taken, in that order. Raises ValueError for another number of them."""
        if len(outcomes) != len(self._out):
            raise ValueError(f"outcomes: {len(outcomes)} for {len(self._out)} removals")
        out, self._out, self._wait_until = self._out, {}, None
        unknown: dict[bytes, _Leaving] = {}
        for (name, leaving), outcome in zip(out.items(), outcomes, strict=True):
            if outcome in _UNKNOWN:
                unknown[name] = leaving
            elif outcome is Outcome.OK or outcome is Outcome.NOT_FOUND:
                self.nbytes -= leaving.nbytes
                self._counts[f"evicted.{leaving.reason.value}"] += 1
                self._left.pop(name, None)
                self._left[name] = now + DOUBTED_S, leaving.generation
                self._news.append(News(name, leaving.generation, Fate.GONE))
            else:
                self._counts[f"eviction.{outcome.value}"] += 1
                self._stays(name, leaving, now)
        while len(self._left) > MOST_DOUBTED:
            self._left.popitem(last=False)
        if unknown:
            self._lose(unknown, now)
        elif out:
            self._silences = 0

    def tick(self, now: float) -> Iterator[bytes]:
        """Names that stayed in the store and may be chosen again by now."""
        if self._wait_until is not None and now >= self._wait_until:
            self._wait_until = None
            self._news += [News(name, leaving.generation, Fate.UNSURE) for name, leaving in self._out.items()]
        while self._left and next(iter(self._left.values()))[0] <= now:
            self._left.popitem(last=False)
        while self._resting and self._resting[0][0] <= now:
            _, name = heapq.heappop(self._resting)
            if not self.leaves(name):
                yield name

    @property
    def has_news(self) -> bool:
        """Whether there is something to take."""
        return bool(self._news)

    def take_news(self) -> list[News]:
        """What has become known since it was last asked for."""
        news, self._news = self._news, []
        return news

    def next_deadline(self) -> float | None:
        """When `tick` has something to do that somebody waits for."""
        return self._wait_until

    def _stays(self, name: bytes, leaving: _Leaving, now: float) -> None:
        self.nbytes -= leaving.nbytes
        self.rest(name, now + self._rest_s)
        self._news.append(News(name, leaving.generation, Fate.STAYS))

    def _lose(self, out: dict[bytes, _Leaving], now: float) -> None:
        """The outcome of these is not known. They are sent again, and given up after so many tries."""
        self._out, self._wait_until = {}, None
        for name, leaving in out.items():
            self._counts["eviction.unknown"] += 1
            if leaving.tries + 1 < MOST_TRIES:
                self._unsure[name] = leaving._replace(tries=leaving.tries + 1)
                self._news.append(News(name, leaving.generation, Fate.UNSURE))
            else:
                self._stays(name, leaving, now)
        self._paused_until = now + min(FIRST_PAUSE_S * 2 ** min(self._silences, 10), MOST_PAUSE_S)
        self._silences += 1
