"""What this process knows of the store's health, so that a call that would fail costs microseconds and no thread.

Two things are remembered: that the store as a whole does not answer (a breaker, closed again by a probe on a thread of
its own: no caller is ever the one who tries), and, for seconds, the names of single objects that could not be read:
with one of several owners gone the store answers, but not for what that owner holds.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from mmcache.client.attachment import Attacher, Attachment
from mmcache.client.breaker import PATIENCE_S, Breaker
from mmcache.errors import LifecycleError, PoolExhausted, StoreUnavailable
from mmcache.metrics import Counters
from mmcache.store.base import Outcome

_log = logging.getLogger(__name__)

UNANSWERED: Final = frozenset({Outcome.UNAVAILABLE, Outcome.TRANSFER_FAILED, Outcome.TIMED_OUT})
"""Outcomes that a store gives which, or a part of which, does not answer."""
FORGET_AFTER_S: Final = 2.0
"""How long a name is not read again that could not be read."""
MAX_NAMES: Final = 65_536
CANARY_BYTES: Final = 4096
CANARY_DEADLINE_S: Final = 5.0
CANARY_TRIES: Final = 10
CANARY_PAUSE_S: Final = 0.05
"""Each connection of the store that broke in an outage spoils one call after it, at once: so a probe tries again."""
MAX_PROBES: Final = 4
"""Most probes at once."""


class StoreHealth:
    """Told of every call's end; says which calls are worth making. Thread-safe."""

    def __init__(self, attacher: Attacher, counters: Counters) -> None:
        self.open = False
        """Whether the store is taken to be down: do not call it."""
        self.unreachable: OrderedDict[str, float] = OrderedDict()
        """Until when names are not to be read that could not be read. For looking whether there are any."""
        self._attacher = attacher
        self._counters = counters
        self._breaker = Breaker(random=random.random)
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        self._closing = False
        self._probing = 0
        self._thread: threading.Thread | None = None

    def unreachable_among(self, names: Iterable[str]) -> set[str]:
        """Those of these names that are not worth a read now."""
        now = time.monotonic()
        with self._lock:
            found = {name for name in names if (until := self.unreachable.get(name)) is not None and now < until}
            while self.unreachable and next(iter(self.unreachable.values())) <= now:
                self.unreachable.popitem(last=False)
        return found

    def remember(self, names: Iterable[str]) -> None:
        """These could not be read, though others may be."""
        until = time.monotonic() + FORGET_AFTER_S
        with self._lock:
            for name in names:
                self.unreachable[name] = until
                self.unreachable.move_to_end(name)
            while len(self.unreachable) > MAX_NAMES:
                self.unreachable.popitem(last=False)

    def forgive(self, names: Iterable[str]) -> None:
        """These could be read after all, if late."""
        with self._lock:
            for name in names:
                self.unreachable.pop(name, None)

    def ended(self, outcomes: Sequence[Outcome], began: float) -> None:
        """A call that began then got these answers, one an object."""
        unanswered = sum(outcome is not Outcome.OK and outcome in UNANSWERED for outcome in outcomes)
        if not unanswered:
            self._breaker.succeeded()
        elif all(outcome is Outcome.TIMED_OUT for outcome in outcomes):
            self.timed_out(began)
        elif unanswered == len(outcomes):
            self.failed(began)

    def timed_out(self, began: float, names: Sequence[str] = (), late: Sequence[float] = ()) -> None:
        """A call that began then, a read of these names, had not ended at its deadline.

        Args:
            late: when those calls began that nobody waits for any more, and that have not ended either: one caller's
                deadline may be too short to tell anything, but not what became of its call since.
        """
        if time.monotonic() - began >= PATIENCE_S:
            self.remember(names)
        self._judge(lambda now: self._breaker.unanswered([began, *late], now))

    def failed(self, began: float) -> None:
        """A call that began then got no answer at all."""
        self._judge(lambda now: self._breaker.failed(began, now))

    def _judge(self, opens: Callable[[float], bool]) -> None:
        with self._lock:
            if self._closing or not opens(time.monotonic()):
                return
            self.open = True
            self._counters.add("breaker", reason="store")
            self._opened.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._schedule_probes, name="mmcache-health", daemon=True)
                self._thread.start()
        _log.warning("the store does not answer; reads miss and publications are dropped until it does")

    def _schedule_probes(self) -> None:
        """While the breaker is open, begin a probe whenever one is due: each on a thread of its own, for it may hang.

        With one of several owners stopped, the canary of one probe may be given to that one, and hang, and the next to
        another.
        """
        with self._lock:
            while not self._closing:
                now = time.monotonic()
                if now < self._breaker.probe_at:
                    self._opened.wait(min(self._breaker.probe_at - now, threading.TIMEOUT_MAX))
                    continue
                self._breaker.probe_begins(now)
                if self._probing < MAX_PROBES:
                    self._probing += 1
                    threading.Thread(target=self._run_probe, args=(now,), name="mmcache-probe", daemon=True).start()

    def _run_probe(self, began: float) -> None:
        attachment = self._attacher.current
        answered = attachment is not None and self._probe(attachment)
        with self._lock:
            self._probing -= 1
            closed = answered and self._breaker.probe_answered(began, time.monotonic())
            self.open = self._breaker.open
        if closed:
            _log.info("the store answers again")
        elif not answered:
            self._counters.add("breaker", reason="probe_failed")

    def _probe(self, attachment: Attachment) -> bool:
        """Publish something small, which takes all that reads and publications do. No room for it is an answer too."""
        try:
            if not attachment.store.reachable():
                return False
            for _ in range(CANARY_TRIES):
                outcome = self._publish_canary(attachment)
                if outcome not in UNANSWERED or self._closing:
                    break
                time.sleep(CANARY_PAUSE_S)
        except (StoreUnavailable, LifecycleError) as error:
            self._attacher.failed(attachment, error)
            return False
        except Exception:  # noqa: BLE001 - a fault of ours must not leave the breaker open for good
            _log.exception("the probe of the store failed")
            self._counters.add("internal_error", reason="probe")
            return True
        return outcome not in UNANSWERED

    def _publish_canary(self, attachment: Attachment) -> Outcome:
        """Put zeros under a name that nobody asks for. They stay until the store evicts them: confirmed is leased."""
        store, pool = attachment
        name = f"mmc1.probe.{secrets.token_hex(16)}"
        deadline = time.monotonic() + CANARY_DEADLINE_S
        try:
            block = pool.allocate(CANARY_BYTES, deadline=0.0)
        except PoolExhausted:  # all of it is in use: ask at least for what needs no memory
            return store.remove([name], deadline=deadline)[0]
        settled = True
        try:
            pool.view(block)[:] = bytes(CANARY_BYTES)
            [(outcome, settled)] = store.put_from([name], [block.address], [CANARY_BYTES], deadline=deadline)
        finally:  # what a store raises, it raises before anything is sent
            self._attacher.give_back(attachment, block, settled=settled)
        return outcome

    def close(self, deadline: float) -> None:
        """Begin no more probes; one that hangs ends with its call. Idempotent."""
        with self._lock:
            self._closing = True
            self._opened.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
