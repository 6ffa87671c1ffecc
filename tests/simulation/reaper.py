"""The controller's reaper: removes what the core gives it, and lists the store for the core to compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mmcache.control.messages import Commitment
from mmcache.controller.reaper.listing import records
from mmcache.controller.reconciliation import RECORD
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

from .clock import Thread
from .store import Publication, Removed

if TYPE_CHECKING:
    from mmcache.controller.core import ControllerCore
    from mmcache.controller.pinned import Due

    from .controller import Controller
    from .world import World

_IDLE_S = 0.3
_LIST_S = 2.0
_MEASURE_S = 1.0
_RENEW_S = 0.4
_HANGS_S = 3.0
"""So long an answer of the child's may take: longer than whoever waits for an outcome does."""
_AT_ONCE = 2
"""Entries that a sweep looks at in a turn."""


class Reaper:
    """One controller's; it ends with it."""

    def __init__(self, world: World, controller: Controller) -> None:
        self._world = world
        self._controller = controller
        self._began: dict[bytes, int] = {}
        """The revisions of entries when the listing began."""
        self._child = Thread()
        """What it does, it does also while the controller is stopped."""
        self._names: list[str] = []
        """The batch that it has, or had last."""
        self._outdated = 0
        """So many of them are of old generations; the others are evicted."""
        self._answered = False
        """Whether it is known what became of them."""
        self._after(world.random.expovariate(1 / _IDLE_S), self._take)
        self._after(world.random.random() * _MEASURE_S, self._measure)
        self._after(_RENEW_S, self._renew)
        self._after(world.random.expovariate(1 / _LIST_S), self._list)

    def _after(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        self._world.events.after(seconds, self._controller.thread, act, *arguments)

    def _soon(self, act: Callable[..., object], *arguments: object) -> None:
        """After as long as the store, or a busy controller, takes."""
        self._after(self._world.random.expovariate(20.0), act, *arguments)

    def end(self) -> None:
        """The kernel kills the child of a controller that ends."""
        self._child.alive = False

    # Removals

    def _take(self) -> None:
        core = self._controller.core
        nothing = core.removals._wanted and not len(core.removals) and not len(core.room.evictions)
        if nothing:
            self._after(_IDLE_S, self._take)
        else:
            self._controller.call(self._turn)

    def _tell(self, outcomes: list[Outcome], core: ControllerCore, now: float) -> None:
        """What came of the last batch."""
        evicted = slice(self._outdated, None)
        self._controller.removals.done(self._names[evicted], outcomes[evicted], lambda: core.removed(outcomes, now))
        self._soon(self._take)

    def _turn(self, core: ControllerCore, now: float) -> None:
        """Take the next batch. What nothing was told of is not known."""
        self._answered = False
        self._names = core.take_removals(now)
        self._outdated = core._removals_out
        self._controller.removals.sent(self._names[self._outdated :], now)
        if not self._names:
            self._after(_IDLE_S, self._take)
            return
        child = self._child
        self._events_of_child(child, self._remove, child, [])
        self._after(_HANGS_S, self._lose, child, self._names)

    def _lose(self, child: Thread, names: list[str]) -> None:
        """Kill a child that has not answered in time, or has ended by itself."""
        if child is self._child and names is self._names and not self._answered:
            self._world.say("reaper", "its child is lost")
            self._world.count("reaper's child lost")
            child.alive = False
            self._child = Thread()
            self._soon(self._take)

    def _remove(self, child: Thread, outcomes: list[Outcome]) -> None:
        """The child's next step: a removal, or the answer."""
        world, names = self._world, self._names
        if len(outcomes) == len(names):
            self._soon(self._answer, child, outcomes)
            return
        if world.chance(world.weather.hangs):
            match world.random.randrange(4):
                case 0:
                    child.alive = False
                    self._soon(self._lose, child, names)
                    return
                case 1:  # its last step was this removal
                    self._remove_one(names[len(outcomes)], evicts=len(outcomes) >= self._outdated)
                    child.alive = False
                    self._soon(self._lose, child, names)
                    return
                case 2:
                    unknown = world.random.choice((Outcome.UNAVAILABLE, Outcome.TIMED_OUT))
                    outcomes += [unknown] * (len(names) - len(outcomes))
                    self._soon(self._answer, child, outcomes)
                    return
                case _:
                    world.count("reaper's child hangs")
                    child.stopped_until = world.events.now + world.random.random() * 2 * _HANGS_S
        outcomes = [*outcomes, self._remove_one(names[len(outcomes)], evicts=len(outcomes) >= self._outdated)]
        self._events_of_child(child, self._remove, child, outcomes)

    def _events_of_child(self, child: Thread, act: Callable[..., object], *arguments: object) -> None:
        self._world.events.after(self._world.random.expovariate(40.0), child, act, *arguments)

    def _remove_one(self, name: str, *, evicts: bool) -> Outcome:
        world, controller = self._world, self._controller
        publication = world.store.objects.get(name)
        outcome = world.store.remove(name, Removed(controller.core.term, controller.now()), world.events.now)
        if outcome is Outcome.LEASED:
            world.count("removal refused for a lease")
        if publication is None or outcome is not Outcome.OK:
            return outcome
        current = world.checker.generation(publication.lineage, publication.key)
        if evicts:
            world.count("evicted")
            controller.removals.landed(name)
        elif publication.lineage == controller.core.lineage and publication.generation >= current:
            world.checker.fail(f"L3: {publication} is removed, and {current} is its key's generation")
        world.count("removed")
        world.say("reaper", f"removes {world.label(publication.key)} of generation {publication.generation}")
        return outcome

    def _answer(self, child: Thread, outcomes: list[Outcome]) -> None:
        if child is self._child:
            self._answered = True
            self._controller.call(partial(self._tell, outcomes))

    # How much room there is

    def _measure(self) -> None:
        store = self._world.store
        used = store.used
        self._controller.call(lambda core, now: core.measured(store.capacity, used, now))
        self._after(_MEASURE_S, self._measure)

    # Leases of what is pinned

    def _renew(self) -> None:
        if len(self._controller.core.pinning.pinned):
            self._controller.call(self._take_due)
        else:
            self._after(_RENEW_S, self._renew)

    def _take_due(self, core: ControllerCore, now: float) -> None:
        self._soon(self._renew_leases, core.pinning.pinned.take_due(now, _AT_ONCE))

    def _renew_leases(self, due: list[Due]) -> None:
        world, core = self._world, self._controller.core
        names = [store_name_of(one.name, lineage=core.lineage, generation=one.generation) for one in due]
        found = [world.store.read(name, world.events.now) is not None for name in names]
        unknown = world.chance(world.weather.hangs)
        outcomes = [Outcome.UNAVAILABLE if unknown else Outcome.OK if one else Outcome.NOT_FOUND for one in found]
        self._soon(self._controller.call, lambda core, _now: core.pinning.pinned.renewed(due, outcomes))
        self._after(_RENEW_S, self._renew)

    # Listings

    def _list(self) -> None:
        self._began = self._revisions()
        self._controller.core.reconciliation.begin()
        self._soon(self._listed)

    def _revisions(self) -> dict[bytes, int]:
        """By name, of the entries that the directory has now."""
        directory = self._controller.core._entries.directory
        entries = ((name, directory.entry(name)) for name in directory.names())
        return {name: entry.hit.revision for name, entry in entries if entry is not None}

    def _listed(self) -> None:
        """The master's list, of this moment."""
        text = "".join(f"{name}\n" for name in self._world.store.objects).encode()
        self._soon(self._saw, list(records([text[:100], text[100:]], self._controller.core.lineage)))

    def _saw(self, pieces: list[bytes]) -> None:
        world = self._world
        if not world.weather.without_faults and world.chance(0.1):
            world.say("reaper", "its list is cut off")
            self._after(world.random.expovariate(1 / _LIST_S), self._list)
        elif pieces:
            self._controller.core.reconciliation.saw(pieces[0])
            self._soon(self._saw, pieces[1:])
        else:
            self._soon(self._sweep)

    def _sweep(self) -> None:
        before = self._revisions()
        goes_on = self._controller.core.reconciliation.sweep(_AT_ONCE)
        for name in before.keys() - self._revisions().keys():
            self._world.count("entry lost")
            if before[name] != self._began.get(name):
                self._world.checker.fail("L3: an entry was forgotten that was published after the listing began")
        if goes_on:
            self._soon(self._sweep)
        else:
            self._world.count("listing")
            self._soon(self._take_unread)

    def _take_unread(self) -> None:
        records = self._controller.core.reconciliation.take_unread(_AT_ONCE)
        if records:
            self._soon(self._read, records)
        else:
            self._after(self._world.random.expovariate(1 / _LIST_S), self._list)

    def _read(self, records: bytes) -> None:
        """The objects of this moment."""
        core, objects = self._controller.core, self._world.store.objects
        names = [
            store_name_of(name, lineage=core.lineage, generation=generation)
            for name, generation in RECORD.iter_unpack(records)
        ]
        random, slow = self._world.random, self._world.chance(self._world.weather.hangs)
        seconds = random.random() * _HANGS_S if slow else random.expovariate(20.0)
        self._after(seconds, self._enter, records, [objects.get(name) for name in names])

    def _enter(self, records: bytes, publications: list[Publication | None]) -> None:
        reconciliation, now = self._controller.core.reconciliation, self._controller.now()
        for place, found in enumerate(publications):
            if found is not None:
                record = records[place * RECORD.size : (place + 1) * RECORD.size]
                item = self._world.items[found.key]
                entry = Commitment(found.key.mm_hash, found.generation, 0, item.nbytes, item.cost_ms, b"info")
                if reconciliation.read(record, entry, found.by, now, now):
                    self._world.count("entry found")
                    self._controller.removals.learned(*RECORD.unpack(record), now)
        self._take_unread()
