"""How other threads of the controller's process reach its core, which only the server's thread may touch.

They leave calls here; the server carries them out between two bursts of messages, and hands back what comes of them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple, TypeVar

from mmcache.control.messages import ControllerMessage, Invalidated, PinAnswer, Progress, Refused
from mmcache.controller.core import ControllerCore, Effects
from mmcache.errors import MMCacheError

Result = TypeVar("Result")
Outcome = Invalidated | Progress | PinAnswer | Refused
"""How what was asked of the core ends."""

MOST_CALLS: Final = 1024
"""Calls that wait for the server's thread, or for what they asked for, in all."""
_TURN: Final = 16
"""Most calls that are carried out before messages are looked at again."""


class MailboxFull(MMCacheError):
    """As many calls are under way as may be; try again later."""


class MailboxClosed(MMCacheError):
    """The controller has ended, or is about to: the call was not carried out, or its outcome is not known."""


class _Call(NamedTuple):
    future: Future[Any]
    read: Callable[[ControllerCore, float], Any] | None
    ask: Callable[[ControllerCore, int, float], Effects] | None


class Mailbox:
    """Calls to the thread of one server. Whoever makes it closes it; so does the server when it ends.

    Any thread may call, ask and close; the rest is the server's. `fileno` is readable while calls wait.
    """

    def __init__(self, *, most: int = MOST_CALLS) -> None:
        self._most = most
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._waiting: deque[_Call] = deque()
        self._asked: dict[int, Future[Any]] = {}
        self._requests = itertools.count(1)
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._asked)

    def call(self, read: Callable[[ControllerCore, float], Result]) -> Future[Result]:
        """Have a function called that brings about no messages. It gets the core and its time, and must take a few
        milliseconds.

        Raises MailboxFull or MailboxClosed, and so may the future, besides what the function raises.
        """
        future: Future[Result] = Future()
        self._leave(_Call(future, read, None))
        return future

    def ask(self, ask: Callable[[ControllerCore, int, float], Effects]) -> Future[Outcome]:
        """Have a function called that asks the core for something under the number that it is given.

        Its effects are written and sent like those of messages. The future has the answer, which may take as long as
        the question says. Raises as `call` does.
        """
        future: Future[Outcome] = Future()
        self._leave(_Call(future, None, ask))
        return future

    def close(self) -> None:
        """Fail all that is under way, and whatever comes. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            futures = [call.future for call in self._waiting if call.future.set_running_or_notify_cancel()]
            futures += self._asked.values()
            self._waiting.clear()
            self._asked.clear()
            os.close(self._wake)
        for future in futures:
            future.set_exception(MailboxClosed("the controller is ending"))

    # For the server

    def fileno(self) -> int:
        """What is readable while calls wait."""
        return self._wake

    def serve(self, core: ControllerCore, now: float) -> Effects:
        """Carry out some calls; returns what is to be written and sent."""
        effects: Effects = []
        for call in self._take():
            try:
                if call.ask is not None:
                    request = next(self._requests)
                    self._asked[request] = call.future
                    effects += call.ask(core, request, now)
                elif call.read is not None:
                    call.future.set_result(call.read(core, now))
            except Exception as error:  # noqa: BLE001 (whatever it is, it is the caller's)
                self._end(call.future, error)
        return effects

    def deliver(self, message: ControllerMessage) -> None:
        """What a message tells to whoever asked under its number."""
        if isinstance(message, Outcome):
            future = self._asked.pop(message.request, None)
            if future is not None:
                future.set_result(message)

    def _leave(self, call: _Call) -> None:
        with self._lock:
            if self._closed:
                raise MailboxClosed("the controller is ending")
            if len(self) >= self._most:
                raise MailboxFull(f"overloaded: {self._most} calls are under way")
            self._waiting.append(call)
            os.eventfd_write(self._wake, 1)

    def _take(self) -> list[_Call]:
        """The next calls that nobody has given up."""
        with self._lock:
            os.eventfd_read(self._wake)
            calls = [self._waiting.popleft() for _ in range(min(_TURN, len(self._waiting)))]
            if self._waiting:
                os.eventfd_write(self._wake, 1)
        return [call for call in calls if call.future.set_running_or_notify_cancel()]

    def _end(self, future: Future[Any], error: Exception) -> None:
        for request in [request for request, asked in self._asked.items() if asked is future]:
            del self._asked[request]
        future.set_exception(error)
