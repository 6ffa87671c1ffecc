"""The reaper's thread: takes names from the core, has a child remove them, and tells the core what came of it.

The thread and its child may stand still, hang or die; the controller's own loop only carries out short calls of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import Counter
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final

from mmcache.config import StoreSettings
from mmcache.controller.core import ControllerCore
from mmcache.controller.mailbox import Mailbox, MailboxClosed, MailboxFull
from mmcache.controller.reaper.child import ChildLost, ReaperChild, Stopped
from mmcache.errors import StoreUnavailable
from mmcache.store.base import Outcome

IDLE_S: Final = 0.5
"""Between two looks at whether there is anything to remove."""
PACE_S: Final = 0.05
"""Between two batches, so that the master has time for those who wait: 5,000 names a second at most."""
_TURN_TIMEOUT_S: Final = 30.0
_END_PATIENCE_S: Final = 5.0

_log = logging.getLogger(__name__)


class Reaper:
    """Removes until it is closed; a context manager. Starts its child when there is something to remove.

    Args:
        settings: where the store is.
        mailbox: of the controller. Close it first: then this ends at once.
    """

    def __init__(self, settings: StoreSettings, mailbox: Mailbox) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._child: ReaperChild | None = None
        self._events: Counter[str] = Counter()
        self._trouble = ""
        """What was logged last and is so still; empty: all is well."""
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
        try:
            with contextlib.suppress(Stopped, MailboxClosed):
                self._reap()
        except Exception:  # noqa: BLE001 (whatever it is, the controller goes on, and the store's eviction takes all)
            _log.exception("the reaper has ended: bytes of what was invalidated are left to the store's eviction")
        finally:
            self._end_child()

    def _reap(self) -> None:
        outcomes: list[Outcome] | None = None
        while True:
            names = self._turn(outcomes)
            outcomes = self._remove(names) if names else None
            self._wait(PACE_S if names else IDLE_S)

    def _turn(self, outcomes: list[Outcome] | None) -> list[str]:
        """Tell the core what came of the last batch, None: that is not known, and take the next one."""
        events, self._events = self._events, Counter()

        def turn(core: ControllerCore, now: float) -> list[str]:
            for word, number in events.items():
                core.count(word, number)
            if outcomes is not None:
                core.removals.done(outcomes, now)
            return core.removals.take(now)

        try:
            return self._mailbox.call(turn).result(_TURN_TIMEOUT_S)
        except (MailboxFull, FutureTimeout) as error:  # what was taken all the same is lost, which the core will see
            _log.warning("the controller has no time for its reaper: %s", error or "no answer")
            return []

    def _remove(self, names: list[str]) -> list[Outcome] | None:
        """What became of each; None: that is not known."""
        nobody = [Outcome.UNAVAILABLE] * len(names)
        try:
            if self._child is None:
                self._child = ReaperChild(self._settings, self._stop)
                self._events["reaper.started"] += 1
                kind = self._child.attach()
                _log.info("the reaper's child, pid %d, is attached to the store: %s", self._child.pid, kind)
        except (OSError, StoreUnavailable, ChildLost) as error:
            self._complain(f"cannot reach the store: {error}")
            self._end_child()
            return nobody
        try:
            outcomes = self._child.remove(names)
        except ChildLost as error:
            self._complain(f"lost its child: it {error}")
            self._end_child()
            return None
        if outcomes == nobody:  # a new child may find another way
            self._complain("gets no answer from the store")
            self._end_child()
        elif self._trouble:
            _log.info("the reaper removes again")
            self._trouble = ""
        return outcomes

    def _complain(self, trouble: str) -> None:
        """Log what is wrong, once for as long as it stays the same."""
        if trouble != self._trouble:
            _log.warning("the reaper %s. It tries again; meanwhile only the store's eviction frees room", trouble)
        self._trouble = trouble

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
