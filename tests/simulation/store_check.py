"""What is wrong while nobody publishes: the directory must be what the store has, with the room that is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmcache.controller.capacity.room import MOST_BESIDES
from mmcache.store.allocation import allocated

if TYPE_CHECKING:
    from mmcache.controller.core import ControllerCore

    from .checker import Checker
    from .store import Store


def trouble(core: ControllerCore, store: Store, checker: Checker) -> str:
    """In a word; empty: nothing. It may take a while until that is so."""
    return _of_room(core, store) or _of_entries(core, store, checker)


def _of_room(core: ControllerCore, store: Store) -> str:
    room, directory = core.room, core._entries.directory
    if room.capacity != store.capacity:
        return "the controller does not know the store's capacity"
    if len(room.evictions):
        return f"L2: {len(room.evictions)} entries are on their way out"
    sizes = [entry.hit.nbytes for name in directory.names() if (entry := directory.entry(name)) is not None]
    counted = room._shares.nbytes, room._object_bytes
    if counted != (sum(map(allocated, sizes)), sum(sizes)):
        return f"entries of {sizes} bytes are counted as {counted}"
    besides = store.used - sum(sizes)  # the master does not tell what its allocator adds
    if sizes and counted[0] + min(besides, MOST_BESIDES * store.capacity) > room._rules.high * store.capacity:
        return f"L3: {counted[0]} and {besides} of the store's {store.capacity} bytes are used"
    leaving = room.evictions.nbytes, sum(group.leaving for group in room._shares._groups.values())
    return f"{leaving} bytes are taken to be on their way out" if any(leaving) else ""


def _of_entries(core: ControllerCore, store: Store, checker: Checker) -> str:
    known: set[bytes] = set()
    for one in store.objects.values():
        if one.lineage != core.lineage or one.key.scope.digest not in core._entries.scopes:
            continue
        generation = checker.generation(core.lineage, one.key)
        if one.generation < generation:
            return f"L3: the store still has {one}"
        if one.generation == generation:
            known.add(one.key.scope.digest + one.key.mm_digest)
    return "" if known == set(core._entries.directory.names()) else "the directory is not what the store has"
