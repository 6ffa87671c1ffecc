"""The controller's reaper: removes what the core gives it, and lists the store for the core to compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mmcache.control.messages import Commitment
from mmcache.controller.reaper.listing import records
from mmcache.controller.reconciliation import RECORD
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

from .store import Publication

if TYPE_CHECKING:
    from .controller import Controller
    from .world import World

_IDLE_S = 0.5
_LIST_S = 2.0
_AT_ONCE = 2
"""Entries that a sweep looks at in a turn."""


class Reaper:
    """One controller's; it ends with it."""

    def __init__(self, world: World, controller: Controller) -> None:
        self._world = world
        self._controller = controller
        self._began: dict[bytes, int] = {}
        """The revisions of entries when the listing began."""
        self._after(world.random.expovariate(1 / _IDLE_S), self._take)
        self._after(world.random.expovariate(1 / _LIST_S), self._list)

    def _after(self, seconds: float, act: Callable[..., object], *arguments: object) -> None:
        self._world.events.after(seconds, self._controller.thread, act, *arguments)

    def _soon(self, act: Callable[..., object], *arguments: object) -> None:
        """After as long as the store, or a busy controller, takes."""
        self._after(self._world.random.expovariate(20.0), act, *arguments)

    # Removals

    def _take(self) -> None:
        names = self._controller.core.take_removals(self._controller.now())
        if names:
            self._soon(self._remove, names)
        else:
            self._after(_IDLE_S, self._take)

    def _remove(self, names: list[str]) -> None:
        world = self._world
        if not world.weather.without_faults and world.chance(0.05):
            world.say("reaper", "its child is lost")
            self._soon(self._take)
            return
        outcomes = [self._remove_one(name) for name in names]
        self._soon(self._tell, outcomes)

    def _remove_one(self, name: str) -> Outcome:
        world, objects = self._world, self._world.store.objects
        publication = objects.get(name)
        if publication is None:
            return Outcome.NOT_FOUND
        if not world.weather.without_faults and world.chance(0.2):
            return Outcome.LEASED
        current = world.checker.generation(publication.lineage, publication.key)
        if publication.lineage == self._controller.core.lineage and publication.generation >= current:
            world.checker.fail(f"L3: {publication} is removed, and {current} is its key's generation")
        world.count("removed")
        world.say("reaper", f"removes {world.label(publication.key)} of generation {publication.generation}")
        del objects[name]
        return Outcome.OK

    def _tell(self, outcomes: list[Outcome]) -> None:
        self._controller.core.removed(outcomes, self._controller.now())
        self._take()

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
        self._soon(self._enter, records, [objects.get(name) for name in names])

    def _enter(self, records: bytes, publications: list[Publication | None]) -> None:
        reconciliation, now = self._controller.core.reconciliation, self._controller.now()
        for place, found in enumerate(publications):
            if found is not None:
                record = records[place * RECORD.size : (place + 1) * RECORD.size]
                entry = Commitment(found.key.mm_hash, found.generation, 0, 100, 1.0, b"info")
                if reconciliation.read(record, entry, found.by, now, now):
                    self._world.count("entry found")
        self._take_unread()
