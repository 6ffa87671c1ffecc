"""Keeps calls out of a library that crashes before set-up, after close, and in a forked child."""

from __future__ import annotations

import os
import threading
import time

from mmcache.errors import LifecycleError


class CallGate:
    """Open from construction to `close`, in this process only: every call below runs `with gate:`.

    Raises:
        LifecycleError: on entering after `close`, or in a child after fork.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process = os.getpid()
        self._inside = 0
        self._closed = False
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)

    def check(self) -> None:
        """Raise as entering would."""
        if os.getpid() != self._process:  # before the lock, which another thread may have held at the fork
            raise LifecycleError(
                f"the {self._what} was attached in process {self._process} and cannot be used in its forked child "
                f"{os.getpid()}: attach after fork"
            )
        if self._closed:
            raise LifecycleError(f"the {self._what} is closed")

    def __enter__(self) -> None:
        self.check()
        with self._lock:
            if self._closed:
                self.check()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._closed:
                self._left.notify_all()

    @property
    def empty(self) -> bool:
        """Whether it is closed, with nobody inside."""
        return self._closed and not self._inside

    def close(self, *, wait_s: float) -> bool:
        """Let nobody in any more and wait for those inside; whether they came out. Idempotent; False after fork."""
        if os.getpid() != self._process:
            return False
        deadline = time.monotonic() + wait_s
        with self._lock:
            self._closed = True
            while self._inside and (remaining := deadline - time.monotonic()) > 0:
                self._left.wait(remaining)
            return not self._inside
