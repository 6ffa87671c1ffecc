"""What goes wrong in a schedule, and how often. Most schedules lack most faults, so that each meets few others."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

FAULTS = (
    "client is stopped",
    "client dies",
    "client leaves",
    "connection breaks",
    "connection stalls",
    "controller dies",
    "controller is stopped",
    "entries are evicted",
    "database goes back",
    "database is lost",
)
_DRASTIC = {"database goes back": 0.25, "database is lost": 0.25}
"""How often these are possible at all, since hardly anything is promised across them."""


class Weather(NamedTuple):
    """Probabilities where nothing else is said; times are the world's seconds.

    Args:
        slow, slow_s: a message takes an exponential time of this mean.
        lost, repeated: of a single message, without a word to anybody.
        unsendable: the controller cannot send a message, and knows it.
        gathered: messages that have come are handled together with others that come soon.
        hesitates: the controller, between two steps of its loop; it may be killed there.
        pauses, pause_s: a caller, between two steps of a call, for an exponential time of this mean.
        fails: an encoder, which then gives its claim up.
        put_nothing: a put stores nothing and says that it did.
        full, before, after: of a write: there is no room, or it fails before it took effect, or after.
        every_s: between faults, on average.
        faults: those that occur.
        drift: whether clocks do.
        stale: of a client, that it serves what is stale.
        clients, ttl_ms, budget, per_push: how many there are; TTL; generations held; invalidations a push.
    """

    slow: float
    slow_s: float
    lost: float
    repeated: float
    unsendable: float
    gathered: float
    hesitates: float
    pauses: float
    pause_s: float
    fails: float
    put_nothing: float
    full: float
    before: float
    after: float
    every_s: float
    faults: tuple[str, ...]
    drift: bool
    stale: float
    clients: int
    ttl_ms: int
    budget: int
    per_push: int

    def calm(self) -> Weather:
        """Nothing goes wrong any more."""
        fine = dict.fromkeys(
            ("slow", "lost", "repeated", "unsendable", "hesitates", "pauses", "fails", "put_nothing"), 0.0
        )
        return self._replace(**fine, full=0.0, before=0.0, after=0.0, faults=())

    @property
    def without_faults(self) -> bool:
        """Whether nothing goes wrong at all."""
        return self.calm() == self


def any_weather(random: Random) -> Weather:
    """One in twelve is calm throughout."""

    def some(most: float) -> float:
        return most * random.random() ** 2 if random.random() < 0.5 else 0.0

    weather = Weather(
        slow=some(0.5),
        slow_s=random.choice((0.05, 0.3, 1.5)),
        lost=some(0.2),
        repeated=some(0.3),
        unsendable=some(0.1),
        gathered=some(0.6),
        hesitates=some(0.2),
        pauses=some(0.6),
        pause_s=random.choice((0.2, 1.0, 3.0)),
        fails=some(0.5),
        put_nothing=some(0.4),
        full=some(0.4),
        before=some(0.3),
        after=some(0.3),
        every_s=random.choice((0.5, 1.0, 3.0)),
        faults=tuple(fault for fault in FAULTS if random.random() < _DRASTIC.get(fault, 0.5)),
        drift=random.random() < 0.7,
        stale=random.choice((0.0, 0.0, 0.0, 0.4)),
        clients=random.choice((2, 3, 3, 4)),
        ttl_ms=random.choice((1_000, 2_000, 3_000)),
        budget=random.choice((3, 5, 1000)),
        per_push=random.choice((1, 2, 512)),
    )
    return weather.calm() if random.random() < 1 / 12 else weather
