"""What goes wrong in a schedule, and how often. Most schedules lack most faults, so that each meets few others."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from mmcache.capacity_rules import AgeRule, Quota
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.eviction import POLICIES

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

CAPACITIES = (400, 400, 500, 600, 800, 10_000)
"""Bytes: hardly any evictions with the last."""


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
        hangs: the reaper's child, before or after one removal; or it is lost there.
        full, before, after: of a write: there is no room, or it fails before it took effect, or after.
        every_s: between faults, on average.
        faults: those that occur.
        drift: whether clocks do.
        stale: of a client, that it serves what is stale.
        clients, ttl_ms, budget, per_push: how many there are; TTL; generations held; invalidations a push.
        capacity, lease_ms, rules, pins: bytes of the store; its read lease; what stays in it; whether operators pin.
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
    hangs: float
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
    capacity: int
    lease_ms: int
    rules: CapacityRules
    pins: bool

    def calm(self) -> Weather:
        """Nothing goes wrong any more."""
        fine = dict.fromkeys(
            ("slow", "lost", "repeated", "unsendable", "hesitates", "pauses", "fails", "put_nothing", "hangs"), 0.0
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
        hangs=some(1.0),
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
        capacity=random.choice(CAPACITIES),
        lease_ms=random.choice((50, 200, 1_000)),
        rules=_any_rules(random),
        pins=random.random() < 0.4,
    )
    return weather.calm() if random.random() < 1 / 12 else weather


def _any_rules(random: Random) -> CapacityRules:
    high = random.choice((0.3, 0.5, 0.8))
    return CapacityRules(
        policy=random.choice(list(POLICIES)),
        high=high,
        low=high * random.choice((0.4, 0.8, 1.0)),
        quotas=random.choice(
            (
                (),
                (Quota("model", "n", None, 0.3),),
                (Quota("model", "m", 150, None), Quota("tenant", "default", None, 0.5)),
                (Quota("model", "m", None, 0.9), Quota("model", "n", 400, None)),
            )
        ),
        ages=random.choice(((), (), (), (AgeRule({}, 4.0),), (AgeRule({"model": "m"}, 1.5),))),
    )
