"""One key, published again and again by some processes, while others push it out of a tiny segment.

The controller is this process's own, so that each of its decisions is seen where it is made: an entry's revision when
its removal is decided, and when the removal has been carried out. The key is old after a moment, too, so that it is
chosen far more often than in any real cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest import mock

from benchmarks.capacity_load import embedding_of, is_of, key_of
from benchmarks.capacity_watch import objects_of
from benchmarks.crew import Wire, crew
from benchmarks.parts import Parts
from mmcache import EmbeddingKey, MMCache
from mmcache.capacity_rules import AgeRule
from mmcache.config import load as load_settings
from mmcache.controller.capacity import evictions, room
from mmcache.controller.capacity.evictions import Evictions, Reason
from mmcache.controller.capacity.rules import CapacityRules
from mmcache.controller.core import ControllerCore
from mmcache.controller.directory import Directory
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.reaper.service import Reaper
from mmcache.controller.server import begin_term, serve, volatile_store
from mmcache.key import store_name_of
from mmcache.store.base import Outcome

PROCESSES: Final = 8
PUBLISHERS: Final = 4
"""So many of them publish the key; the others take its room."""
SEGMENT_BYTES: Final = 64 << 20
HIGH, LOW = 0.25, 0.2
"""So that a burst is far from what the store would evict by itself."""
LIST_EVERY_S: Final = 1.0
NBYTES: Final = 256 << 10
LEASE_S: Final = 0.2
"""What clients are told: a read that takes longer is void."""
MASTERS_LEASE_MS: Final = 20
"""Else what was just committed would be leased, and so be kept whatever the controller does."""
DOUBTED_S: Final = 3.0
"""For so long after a removal a publication without a claim is refused, whose bytes then keep the key readable, so that
it is not removed again meanwhile. Ten seconds, as usual, would be half of the race."""
AGE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5
"""Of each process that publishes the key, after each time."""
TRIES: Final = 5
"""A busy machine may read more slowly than its lease lasts."""
FILLS_A_SECOND: Final = 10.0
"""Of each process."""
CHECK_S: Final = 0.25
ITEM: Final = 7
KEY: Final = EmbeddingKey("benchmark", "raced", f"item-{ITEM}")
_RACED: Final = KEY.scope.digest + KEY.mm_digest
_TURN_S: Final = 30.0
_Result = TypeVar("_Result")


class Witness(Evictions):
    """Evictions of which each is held against what the directory says once it is carried out."""

    def __init__(self, directory: Directory, *, lease_ms: int, counts: Counter[str]) -> None:
        super().__init__(lease_ms=lease_ms, counts=counts)
        self.removed = 0
        """How often the raced key's bytes were removed."""
        self.wronged: list[str] = []
        """Entries, of any key, that had been committed after it was decided that they were to go, and went."""
        self._rest_s = lease_ms / 1000  # what a reader keeps is chosen again at once
        self._directory = directory
        self._decided: dict[bytes, int] = {}
        self.history: defaultdict[bytes, list[str]] = defaultdict(list)
        """What became of each name, for people."""

    def choose(self, name: bytes, generation: int, nbytes: int, reason: Reason) -> None:
        entry = self._directory.entry(name)
        assert entry is not None
        self._decided[name] = entry.hit.revision
        self._note(name, f"revision {entry.hit.revision} chosen: {reason.value}")
        super().choose(name, generation, nbytes, reason)

    def done(self, outcomes: Sequence[Outcome], now: float) -> None:
        for name, outcome in zip(self._out, outcomes, strict=True):
            self._note(name, outcome.value)
            if outcome in {Outcome.OK, Outcome.NOT_FOUND}:
                self.removed += name == _RACED
                entry = self._directory.entry(name)
                if entry is not None and entry.hit.revision != self._decided[name]:
                    self.wronged.append(entry.mm_hash)
        super().done(outcomes, now)

    def take(self, most: int, now: float) -> list[tuple[bytes, int]]:
        taken = super().take(most, now)
        for name, _ in taken:
            self._note(name, "sent")
        return taken

    def _note(self, name: bytes, what: str) -> None:
        self.history[name].append(f"{time.monotonic():.3f} {what}")


class Controller:
    """A controller of this process's; a context manager."""

    def __init__(self, config: Path) -> None:
        settings = load_settings(config)
        lease_ms = round(settings.store.lease * 1000)
        rules = CapacityRules(high=HIGH, low=LOW, ages=(AgeRule({"version": KEY.version}, AGE_S),))
        self._core, recorder = begin_term(volatile_store(), ControllerLimits(lease_ms=lease_ms, capacity=rules))
        self.witness = Witness(self._core.room._directory, lease_ms=lease_ms, counts=self._core._counts)
        self._core.room.evictions = self.witness
        self._stop = os.eventfd(0)
        self._mailbox = Mailbox()
        self._reaper = Reaper(settings.store, self._mailbox, list_every_s=LIST_EVERY_S)
        self._thread = threading.Thread(
            target=serve,
            args=(settings.controller.bind, self._core, recorder),
            kwargs={"mailbox": self._mailbox, "stop": self._stop},
            name="capacity-controller",
            daemon=True,
        )

    def figures(self) -> dict[str, int]:
        """What it counts."""
        return self._call(lambda core: core.stats())

    def settled(self) -> dict[str, tuple[str, int]]:
        """Entries that are not on their way out: mm_hash and revision, by the store's names."""
        return self._call(_settled)

    def history(self, name: str) -> list[str]:
        """What became of a name of the store's."""
        _, _, scope, item, _ = name.split(".")
        return self._call(lambda _: list(self.witness.history[bytes.fromhex(scope + item)]))

    def _call(self, function: Callable[[ControllerCore], _Result]) -> _Result:
        return self._mailbox.call(lambda core, _: function(core)).result(_TURN_S)

    def __enter__(self) -> Controller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join(_TURN_S)  # which closes the mailbox
        self._reaper.close()
        os.close(self._stop)


def _settled(core: ControllerCore) -> dict[str, tuple[str, int]]:
    directory, going = core.room._directory, core.room.evictions
    return {
        store_name_of(name, lineage=core.lineage, generation=entry.hit.generation): (entry.mm_hash, entry.hit.revision)
        for name in directory.names()
        if (entry := directory.entry(name)) is not None and not going.leaves(name)
    }


def compete(wire: Wire, number: int, config: str, seconds: float) -> None:
    """One of the processes: publishes the key over and over, or what takes its room; then reads what it is told."""
    random_ = random.Random(number)
    tensor = embedding_of(ITEM, NBYTES)
    counts: Counter[str] = Counter()
    with MMCache.connect(config, local_entries=False, pool_bytes=16 << 20, name=f"race-{number}") as cache:
        wire.tell(ready=True)
        wire.hear()
        began = time.monotonic()
        for turn in itertools.count():
            if time.monotonic() > began + seconds:
                break
            try:
                if number >= PUBLISHERS:
                    item = 1000 + number + PROCESSES * turn
                    result = cache.put(key_of(item), embedding_of(item, NBYTES))
                    counts[f"filled.{result.reason or result.status}"] += 1
                    time.sleep(max(0.0, began + turn / FILLS_A_SECOND - time.monotonic()))
                    continue
                if number % 2:
                    if cache.get(KEY) is not None:
                        result = cache.put(KEY, tensor)
                        counts[f"put.{result.reason or result.status}"] += 1
                else:
                    embedding = cache.get_or_compute(KEY, lambda: tensor)
                    counts[embedding.source] += 1
                    counts["wrong"] += not is_of(embedding.tensor, ITEM, NBYTES)
            except Exception as error:  # noqa: BLE001 - what may not happen: it is reported, and the race goes on
                counts[f"error {error!r}"] += 1
            time.sleep(random_.uniform(0.0, LONGEST_PAUSE_S))
        wire.tell(counts=counts)
        unreadable = []
        for mm_hash in wire.hear()["read"]:
            item = int(mm_hash.removeprefix("item-"))
            key = KEY if item == ITEM else key_of(item)
            found = next((found for _ in range(TRIES) if (found := cache.get(key)) is not None), None)
            if found is None or not is_of(found.tensor, item, NBYTES):
                unreadable.append(mm_hash)
        wire.tell(unreadable=unreadable)


def race(seconds: float) -> dict[str, Any]:
    """Have them race, and look all the while whether the directory promises what is not there."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(room, "LEAST_PASS_S", AGE_S))
        stack.enter_context(mock.patch.object(evictions, "DOUBTED_S", DOUBTED_S))
        options = (f"--default_kv_lease_ttl={MASTERS_LEASE_MS}",)
        parts = Parts(owner_bytes=0, sidecar_bytes=SEGMENT_BYTES, store={"lease": LEASE_S}, master_options=options)
        del parts.parts["controller"]  # it is ours
        stack.enter_context(parts)
        controller = stack.enter_context(Controller(parts.config))
        workers = stack.enter_context(crew(PROCESSES, compete, str(parts.config), seconds))
        for worker in workers:
            worker.hear()
        for worker in workers:
            worker.tell(go=True)
        false: list[str] = []
        checks = 0
        ended = time.monotonic() + seconds
        while time.monotonic() < ended:
            false += _false(controller, parts.metrics)
            checks += 1
            time.sleep(CHECK_S)
        counts: Counter[str] = sum((Counter(worker.hear()["counts"]) for worker in workers), Counter())
        promised = controller.settled()
        for worker in workers:
            worker.tell(read=sorted(mm_hash for mm_hash, _ in promised.values()))
        unreadable = {mm_hash for worker in workers for mm_hash in worker.hear()["unreadable"]}
        still = controller.settled()
        figures = controller.figures()
        return {
            "removed": controller.witness.removed,
            "wronged": controller.witness.wronged,
            "checks": checks,
            "false": false + _false(controller, parts.metrics),
            "entries": len(promised),
            "unreadable": [name for name, one in promised.items() if one[0] in unreadable and still.get(name) == one],
            "failures": sum(number for word, number in counts.items() if word.startswith(("wrong", "error"))),
            "counts": dict(counts),
            "controller": {name: n for name, n in figures.items() if name.startswith(("evict", "commit", "missing"))},
        }


def _false(controller: Controller, metrics: str) -> list[str]:
    """Entries that are settled before and after the store was asked, and that it has no bytes of."""
    began = time.monotonic()
    before = controller.settled()
    objects = objects_of(metrics)
    after = controller.settled()
    false = [name for name, entry in before.items() if after.get(name) == entry and name not in objects]
    return [
        f"{name} {before[name]} seen {began:.3f} to {time.monotonic():.3f}: {controller.history(name)}"
        for name in false
    ]
