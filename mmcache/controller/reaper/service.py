"""The reaper's thread: takes names from the core, has a child remove them, and tells the core what came of it.

From time to time it has the child list what the store has, for the core to compare the directory with, and between all
that renew the leases of what is pinned. The thread and
its child may stand still, hang or die; the controller's own loop only carries out short calls of it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import select
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final, TypeVar

from mmcache.config import StoreSettings
from mmcache.controller.core import ControllerCore
from mmcache.controller.mailbox import Mailbox, MailboxClosed, MailboxFull
from mmcache.controller.reaper.child import ChildLost, ReaperChild, Stopped
from mmcache.controller.reaper.messages import Description
from mmcache.controller.reaper.renewing import Renewing
from mmcache.controller.reconciliation import MOST_RECORDS, RECORD
from mmcache.controller.removals import BATCH
from mmcache.errors import StoreUnavailable
from mmcache.store import launch
from mmcache.store.base import Outcome

IDLE_S: Final = 0.1
"""Between two looks at whether there is anything to remove."""
PACE_S: Final = 0.05
"""Between two batches, so that the master has time for those who wait: 5,000 names a second at most."""
MEASURE_EVERY_S: Final = 1.0
"""Between two questions how much of the store is used."""
LIST_AGAIN_S: Final = 5.0
"""Between two listings, at least, where the store uses less than it should."""
FIRST_LISTING_S: Final = 1.0
"""After the start, while which clients come back."""
MUCH_LOST: Final = 0.05
"""Of the entries: more is worth a line in the log."""
READ_S: Final = 0.5
"""So long, and a little more, what the directory lacks is read before it is the turn of removals."""
BEGIN_ANEW_S: Final = 5.0
"""After a failure that nobody has thought of."""
_TURN_TIMEOUT_S: Final = 30.0
_END_PATIENCE_S: Final = 5.0

_REMOVES: Final = "removes what nobody reads"
_LISTS: Final = "lists what the store has"
_MEASURES: Final = "measures how much room the store has"
_RENEWS: Final = "renews the leases of what is pinned"
_MEANWHILE: Final = {
    _RENEWS: "the store may evict it",
    _REMOVES: "only the store's eviction frees room",
    _LISTS: "the directory does not know what the store has lost",
    _MEASURES: "nothing is evicted but by the store itself",
}
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class Reaper:
    """Removes until it is closed; a context manager. Starts its child when there is something to do.

    Args:
        settings: where the store is. Without `metrics` nothing is listed.
        mailbox: of the controller. Close it first: then this ends at once.
        list_every_s: how often the store's names are listed.
    """

    def __init__(self, settings: StoreSettings, mailbox: Mailbox, list_every_s: float) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._list_every_s = list_every_s
        self._list_at = time.monotonic() + min(list_every_s, FIRST_LISTING_S)
        self._listed_at = -math.inf
        self._measure_at = 0.0
        self._reads = False
        """Whether there may be more of the last listing to read."""
        self._child: ReaperChild | None = None
        self._attached = False
        self._events: Counter[str] = Counter()
        self._scaled = False
        """Whether the quotas were more than the capacity when it was measured last."""
        self._troubles: dict[str, str] = {}
        """What was logged last of removals, listings and renewals, and is so still."""
        self._renewing = Renewing(self._in_core, self._attached_child, settings.lease)
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="mmcache-reaper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it, and its child. Idempotent."""
        if self._closed:
            return
        self._closed = True
        os.eventfd_write(self._stop, 1)
        self._thread.join(_END_PATIENCE_S)
        if self._thread.is_alive():
            _log.warning("the reaper does not end; it goes with the process")
        else:
            os.close(self._stop)

    def __enter__(self) -> Reaper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        with contextlib.suppress(Stopped, MailboxClosed):
            while True:
                try:
                    self._reap()
                except (Stopped, MailboxClosed):
                    raise
                except Exception:  # noqa: BLE001 (whatever it is, without a reaper only the store's own eviction is left)
                    _log.exception("the reaper failed; it begins anew in %g s", BEGIN_ANEW_S)
                finally:
                    self._end_child()
                self._wait(BEGIN_ANEW_S)

    def _reap(self) -> None:
        metrics = self._settings.metrics
        while True:
            names = self._take()
            if names and (outcomes := self._remove(names)) is not None:
                self._tell(outcomes)  # before the store is measured: what it gave up must not count as room twice
            self._renew()
            if metrics is not None and time.monotonic() >= self._measure_at:
                self._measure(metrics)
            if metrics is not None and (self._reads or time.monotonic() >= self._list_at):
                self._look(metrics)
            self._wait(0.0 if self._reads else PACE_S if names else min(IDLE_S, self._renewing.every_s))

    def _measure(self, metrics: str) -> None:
        """Tell the core how much of the store is used. If that is less than it should be, it is time for a listing."""
        self._measure_at = time.monotonic() + MEASURE_EVERY_S
        memory = launch.memory(metrics)
        if memory is None:
            self._complain(_MEASURES, "gets no answer from the store's master")
            return
        try:
            lost, scaled = self._in_core(functools.partial(_measured, memory))
        except (MailboxFull, FutureTimeout) as error:
            self._complain(_MEASURES, f"failed: {error or 'the controller has no time'}")
            return
        self._all_is_well(_MEASURES)
        if scaled and not self._scaled:
            _log.warning(
                "the quotas (controller.quotas) are more together than the store's %.3g GiB: each counts for less, in "
                "proportion. Lower them, or lend the store more memory",
                memory.capacity / 2**30,
            )
        self._scaled = scaled
        if lost:
            self._list_at = min(self._list_at, self._listed_at + LIST_AGAIN_S)

    def _take(self) -> list[str]:
        """The next batch. Where the last one's outcome was not told of, the core sees that it is not known."""
        events, self._events = self._events, Counter()
        try:
            return self._in_core(functools.partial(_taken, events))
        except (MailboxFull, FutureTimeout) as error:  # what was taken all the same is lost, which the core will see
            _log.warning("the controller has no time for its reaper: %s", error or "no answer")
            return []

    def _tell(self, outcomes: list[Outcome]) -> None:
        try:
            self._in_core(functools.partial(_told, outcomes))
        except (MailboxFull, FutureTimeout) as error:
            _log.warning("the controller has no time for its reaper: %s", error or "no answer")

    def _remove(self, names: list[str]) -> list[Outcome] | None:
        """What became of each; None: that is not known."""
        nobody = [Outcome.UNAVAILABLE] * len(names)
        try:
            child = self._attached_child()
        except (OSError, StoreUnavailable, ChildLost) as error:
            self._complain(_REMOVES, f"cannot reach the store: {error}")
            self._end_child()
            return nobody
        try:
            outcomes = child.remove(names)
        except ChildLost as error:
            self._complain(_REMOVES, f"lost its child: it {error}")
            self._end_child()
            return None
        if outcomes == nobody:  # a new child may find another way
            self._complain(_REMOVES, "gets no answer from the store")
            self._end_child()
        else:
            self._all_is_well(_REMOVES)
        return outcomes

    def _look(self, metrics: str) -> None:
        """Compare the directory with what the store has, or go on with it. Where that fails, it stays as it is."""
        try:
            if not self._reads:
                self._list(metrics)
            self._reads = self._read()
        except StoreUnavailable as error:
            self._complain(_LISTS, f"failed: {error}")
            self._reads = False
        except (OSError, ChildLost, MailboxFull, FutureTimeout) as error:
            self._complain(_LISTS, f"failed: {error or 'the controller has no time'}")
            self._end_child()  # it may have more to tell of the same list
            self._reads = False
        else:
            self._all_is_well(_LISTS)
        if not self._reads:
            self._listed_at = time.monotonic()
            self._list_at = self._listed_at + self._list_every_s

    def _list(self, metrics: str) -> None:
        child = self._started_child()
        entries, before = self._in_core(_lost)
        for records in child.names(metrics, self._in_core(_begin)):
            self._in_core(functools.partial(_saw, records))
        while self._in_core(_sweep):
            self._renew()
        lost = self._in_core(_lost)[1] - before
        if lost > MUCH_LOST * entries:
            _log.warning(
                "the store has lost %d of %d entries: it evicted them by itself, or who had lent the memory is gone, "
                "or its master was started anew. `mmcache stats` shows its segments",
                lost,
                entries,
            )

    def _read(self) -> bool:
        """Have the directory learn what it lacks; returns whether there may be more."""
        until = time.monotonic() + READ_S
        first = self._in_core(_take_unread)
        if not first:
            return False
        child, lineage = self._attached_child(), self._in_core(_lineage)
        for records, described in child.describe(self._unread(first, until), lineage):
            self._in_core(functools.partial(_enter, records, described, time.time()))
        return time.monotonic() >= until

    def _unread(self, first: bytes, until: float) -> Iterator[bytes]:
        records = first
        while records:
            yield records
            records = b"" if time.monotonic() >= until else self._in_core(_take_unread)

    def _renew(self) -> None:
        """Renew what is due; where that fails, it is due still."""
        try:
            answered = self._renewing.turn()
        except (OSError, StoreUnavailable, ChildLost, MailboxFull, FutureTimeout) as error:
            self._complain(_RENEWS, f"failed: {error or 'the controller has no time'}")
            self._end_child()
        else:
            if answered:
                self._all_is_well(_RENEWS)
            else:
                self._complain(_RENEWS, "gets no answer from the store")

    def _in_core(self, call: Callable[[ControllerCore, float], _Result]) -> _Result:
        return self._mailbox.call(call).result(_TURN_TIMEOUT_S)

    def _complain(self, what: str, trouble: str) -> None:
        """Log what is wrong, once for as long as it stays the same."""
        if trouble != self._troubles.get(what):
            _log.warning("the reaper, which %s, %s. It tries again; meanwhile %s", what, trouble, _MEANWHILE[what])
        self._troubles[what] = trouble

    def _all_is_well(self, what: str) -> None:
        if self._troubles.pop(what, None) is not None:
            _log.info("the reaper %s again", what)

    def _attached_child(self) -> ReaperChild:
        child = self._started_child()
        if not self._attached:
            try:
                kind = child.attach()
            except StoreUnavailable:  # with which it ends
                self._end_child()
                raise
            self._attached = True
            _log.info("the reaper's child, pid %d, is attached to the store: %s", child.pid, kind)
        return child

    def _started_child(self) -> ReaperChild:
        if self._child is None:
            self._child = ReaperChild(self._settings, self._stop)
            self._attached = False
            self._events["reaper.started"] += 1
        return self._child

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            self._events["reaper.ended"] += 1
            child.kill()

    def _wait(self, seconds: float) -> None:
        """Raises Stopped once it is to end."""
        stopped = select.poll()
        stopped.register(self._stop, select.POLLIN)
        if stopped.poll(seconds * 1000):
            raise Stopped("the controller is ending")


def _taken(events: Counter[str], core: ControllerCore, now: float) -> list[str]:
    for word, number in events.items():
        core.count(word, number)
    return core.take_removals(now)


def _told(outcomes: list[Outcome], core: ControllerCore, now: float) -> None:
    core.removed(outcomes, now)


def _begin(core: ControllerCore, _now: float) -> str:
    core.reconciliation.begin()
    return core.lineage


def _measured(memory: launch.Memory, core: ControllerCore, now: float) -> tuple[bool, bool]:
    lost = core.measured(memory.capacity, memory.used, now)
    return lost, core.room.scaled


def _lineage(core: ControllerCore, _now: float) -> str:
    return core.lineage


def _lost(core: ControllerCore, _now: float) -> tuple[int, int]:
    """How many entries there are, and how many were lost so far."""
    stats = core.stats()
    return stats["entries"], stats.get("entry.lost", 0)


def _saw(records: bytes, core: ControllerCore, _now: float) -> None:
    core.reconciliation.saw(records)


def _take_unread(core: ControllerCore, _now: float) -> bytes:
    return core.reconciliation.take_unread(BATCH)


def _enter(records: bytes, described: list[Description | None], clock: float, core: ControllerCore, now: float) -> None:
    """`clock`: seconds since the epoch, now."""
    for place, one in enumerate(described):
        if one is not None:
            age = max(0.0, clock - one.created_ns / 1e9)
            start = place * RECORD.size
            core.reconciliation.read(records[start : start + RECORD.size], one.entry, one.producer, now - age, now)


def _sweep(core: ControllerCore, _now: float) -> bool:
    return core.reconciliation.sweep(MOST_RECORDS)
