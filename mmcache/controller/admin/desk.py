"""What the API's answers are made of: the core by way of its mailbox, the state store, the tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

from mmcache.control.messages import Invalidated, PinAnswer, Progress, Refused
from mmcache.controller.admin import problems
from mmcache.controller.admin.engine_caches import EngineCaches
from mmcache.controller.admin.tokens import Tokens
from mmcache.controller.announcements import Asked
from mmcache.controller.core import ControllerCore
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.pinning import PinAsked, UnpinAsked
from mmcache.controller.state.base import StateStore

Result = TypeVar("Result")
_CALL_TIMEOUT_S: Final = 10.0
"""A core that has not looked at a call for so long is not well."""
_CLOCK_WAS_SET_S: Final = 0.5
"""A difference that no measurement makes."""


class Desk:
    """For coroutines of one event loop.

    Args:
        mailbox: of the controller.
        store: its state. Reads only, on other threads: they may wait for a write.
        tokens: who may come.
        master: `host:port` of the store's master.
        engines: those whose caches can be cleared.
        checks_hosts: whether requests must name this machine as their host: see `access`.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        store: StateStore,
        tokens: Tokens,
        *,
        master: str,
        engines: EngineCaches,
        checks_hosts: bool = False,
    ) -> None:
        self.mailbox = mailbox
        self.store = store
        self.tokens = tokens
        self.master = master
        self.engines = engines
        self.checks_hosts = checks_hosts

    async def call(self, read: Callable[[ControllerCore, float], Result], timeout: float = _CALL_TIMEOUT_S) -> Result:
        """What a function reads of the core; see `Mailbox.call`. Raises Problem when there is no answer in time."""
        return await _answer(self.mailbox.call(read), timeout)

    async def read(self, function: Callable[[StateStore], Result]) -> Result:
        """What a function reads of the state store."""
        return await asyncio.to_thread(function, self.store)

    async def invalidate(self, asked: Sequence[Asked]) -> int:
        """Make invalidations, all at once; returns the last one's number when it is durable. Raises Problem if not."""
        future = self.mailbox.ask(lambda core, request, _: core.ask(request, asked))
        message = await _answer(future, _CALL_TIMEOUT_S)
        if isinstance(message, Refused):
            if message.reason.startswith("overloaded"):
                raise problems.overloaded(message.reason)
            raise problems.no_room(message.reason)
        if not isinstance(message, Invalidated):
            raise TypeError(f"an invalidation was answered with {type(message).__name__}")
        return message.number

    async def ask_pins(self, asked: PinAsked | UnpinAsked) -> PinAnswer:
        """Pin or unpin; what is answered is durable. Raises Problem if it is not done."""
        future = self.mailbox.ask(lambda core, request, _: core.ask_pins(request, asked))
        message = await _answer(future, _CALL_TIMEOUT_S)
        if isinstance(message, Refused):
            if message.reason.startswith("overloaded"):
                raise problems.overloaded(message.reason)
            raise problems.Problem(422, "invalid", message.reason)
        if not isinstance(message, PinAnswer):
            raise TypeError(f"a pin was answered with {type(message).__name__}")
        if message.refusal:
            raise problems.Problem(409, "pin-refused", message.refusal)
        return message

    async def follow(self, number: int, wait_s: float) -> Progress:
        """How far an invalidation is: at once if it is complete, or when it is, or after so many seconds."""
        wait_ms = round(wait_s * 1000)
        future = self.mailbox.ask(lambda core, request, now: core.follow(request, number, wait_ms, now))
        message = await _answer(future, wait_s + _CALL_TIMEOUT_S)
        if isinstance(message, Progress):
            return message
        if isinstance(message, Refused) and message.reason.startswith("overloaded"):
            raise problems.overloaded(message.reason)
        raise problems.Problem(404, "no-such-invalidation", f"there is no invalidation {number} yet")


class UnixOffset:
    """What to add to a time of the core's clock for seconds since 1970.

    The same until the system's clock is set. Measured anew each time it would be another by some microseconds, and what
    one answer says of an entry's time would not find that entry when it is asked for.
    """

    def __init__(self) -> None:
        self._offset: float | None = None

    def __call__(self) -> float:
        """As it was last measured; see the class."""
        measured = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._offset is None or abs(measured - self._offset) > _CLOCK_WAS_SET_S:
            self._offset = measured
        return self._offset


unix_offset: Final = UnixOffset()


async def _answer(future: Future[Result], timeout: float) -> Result:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
    except asyncio.TimeoutError as error:
        detail = f"the controller has not answered within {timeout:g} s; what was asked for may happen still"
        raise problems.Problem(504, "no-answer", detail) from error
