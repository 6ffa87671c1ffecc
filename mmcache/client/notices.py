"""Tells callers' functions what was invalidated, on a thread of its own: none of them can hold up a session."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from mmcache.metrics import Counters
from mmcache.selector import Selector

OnInvalidate = Callable[[Sequence[Selector]], object]

MAX_WAITING: Final = 1024
"""Selectors that no function was told of yet; more than that become one that matches everything."""

_log = logging.getLogger(__name__)


class Notices:
    """Of one client. The thread is there once there is a function to call."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._changed = threading.Condition()
        self._functions: tuple[OnInvalidate, ...] = ()
        self._waiting: deque[Selector] = deque()
        self._closed = False

    def add(self, function: OnInvalidate) -> None:
        """Call it from now on."""
        with self._changed:
            starts = not self._functions
            self._functions += (function,)
        if starts:
            threading.Thread(target=self._run, name="mmcache-notices", daemon=True).start()

    def tell(self, selectors: Sequence[Selector] | None) -> None:
        """Something is outdated; None: everything. Does not wait."""
        with self._changed:
            if not self._functions:
                return
            self._waiting.extend([Selector()] if selectors is None else selectors)
            if len(self._waiting) > MAX_WAITING:
                self._waiting = deque([Selector()])
            self._changed.notify_all()

    def close(self) -> None:
        """Call nothing any more. Does not wait for a function that runs."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                selectors, functions = list(self._waiting), self._functions
                self._waiting.clear()
            for function in functions:
                try:
                    function(selectors)
                except Exception as error:  # noqa: BLE001 - a caller's function must not silence the others; counted
                    self._counters.add("on_invalidate_failed", reason=type(error).__name__)
                    _log.exception("a function that was to hear of invalidations failed")
