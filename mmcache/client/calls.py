"""The client's I/O threads: calls that may hang run there, and their caller waits no longer than its deadline.

A caller that gives up does not get its buffers back: it leaves a disposal with the call, which runs when the call has
really ended, or at once if it never began.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from mmcache.errors import DeadlineExceeded, LifecycleError, StoreUnavailable

_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)

OVERDUE_SECONDS = 0.5
"""A call that runs so long after its caller's deadline counts as stuck."""


class Overloaded(StoreUnavailable):
    """Too many calls wait for the store already; this one was not queued."""


class Call(Generic[_Result]):
    """One piece of work that was handed to an I/O thread."""

    __slots__ = (
        "_disposal",
        "_done",
        "_error",
        "_lock",
        "_refused",
        "_result",
        "_started",
        "_work",
        "began",
        "publishes",
    )

    def __init__(self, work: Callable[[], _Result], *, publishes: bool = False) -> None:
        self.began = time.monotonic()
        self.publishes = publishes
        self._work: Callable[[], _Result] | None = work
        self._lock = threading.Lock()
        self._done = threading.Lock()  # held until the call has ended: cheaper to wait on than an Event
        self._done.acquire()
        self._started = self._refused = False
        self._result: _Result | None = None
        self._error: BaseException | None = None
        self._disposal: Callable[[_Result | None, bool], None] | None = None

    def wait(self, deadline: float) -> _Result:
        """The result. Raises what the work raised, or DeadlineExceeded; then `abandon` must follow."""
        if not self._done.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise DeadlineExceeded("the store did not answer in time")
        self._done.release()
        if (error := self._error) is not None:
            self._error = None  # else it holds, by way of this frame, all that its callers do, until a collection
            try:
                raise error
            finally:
                del error
        return self._result  # type: ignore[return-value]

    def abandon(self, disposal: Callable[[_Result | None, bool], None]) -> None:
        """Hand over what must happen when the call has ended: `disposal(result or None, whether it ever began)`."""
        with self._lock:
            if self._started and self._work is not None:
                self._disposal = disposal
                return
            self._work = None
        self._dispose(disposal)

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._started and self._work is not None

    def run(self) -> None:
        """On an I/O thread: do the work, unless its caller has left before it began."""
        with self._lock:
            work = self._work
            if work is None:
                return
            self._started = True
        try:
            self._result = work()
        except BaseException as error:  # noqa: BLE001 - it is raised in the waiting caller
            self._error = error
            self._refused = isinstance(error, StoreUnavailable)
        with self._lock:
            self._work = None
            disposal, self._disposal = self._disposal, None
        self._done.release()
        if disposal is not None:
            self._dispose(disposal)

    def _dispose(self, disposal: Callable[[_Result | None, bool], None]) -> None:
        # A store that is unavailable says so before it touches anything.
        began = self._started and not self._refused
        try:
            disposal(self._result, began)
        except Exception:  # noqa: BLE001 - on an I/O thread nobody else would hear of it, and the thread must go on
            _log.exception("what a call used could not be given back")
        self._result = self._error = None  # they may hold the caller's tensors


class HandOff(Generic[_Result]):
    """Work on an I/O thread whose caller waits for it until a deadline.

    When the caller gets no result, `dispose(late result or None, whether the work ever began)` runs exactly once, when
    the work has really ended, to give back what it used.
    """

    __slots__ = ("_dispose", "_threads", "call")

    def __init__(
        self, threads: IoThreads, call: Call[_Result], dispose: Callable[[_Result | None, bool], None]
    ) -> None:
        self.call = call
        self._threads = threads
        self._dispose = dispose

    def result(self, deadline: float) -> _Result:
        """Wait for the result.

        Raises:
            DeadlineExceeded: the work goes on, or will be skipped.
            StoreUnavailable: refused before any transfer began. And whatever else the work raises.
        """
        try:
            return self.call.wait(deadline)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for it no more."""
        self._threads.left(self.call)
        self.call.abandon(self._dispose)


class IoThreads:
    """Up to `count` daemon threads with a bounded queue: a call that hangs must not keep the process from ending.

    Somebody waits for a read, so publications stand back: reads are begun first, publications never take the last
    thread (unless it is the only one), and those that do not fit into half of the queue are refused.
    """

    def __init__(self, count: int, *, name: str = "mmcache-io", max_pending: int = 1024) -> None:
        self._turns: SimpleQueue[bool] = SimpleQueue()
        """One for each call that is queued; False: end the thread."""
        self._reads: deque[Call[Any]] = deque()
        self._publications: deque[Call[Any]] = deque()
        self._publishing = 0
        self._count = count
        self._name = name
        self._max_pending = max_pending
        self._closed = False
        self._left: dict[Call[Any], float] = {}
        self._idle = 0
        """Threads that wait for a turn which nobody has counted on yet."""
        self._starting = threading.Lock()
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[[], _Result]) -> Call[_Result]:
        """Queue work. Raises Overloaded when too much is queued already, LifecycleError after close."""
        call = Call(work)
        self._enqueue(call)
        return call

    def hand_off(
        self,
        work: Callable[[], _Result],
        dispose: Callable[[_Result | None, bool], None],
        *,
        publishes: bool = False,
    ) -> HandOff[_Result]:
        """Queue work that uses something which `dispose` gives back; see `HandOff`. Raises as `submit` does."""
        hand_off = HandOff(self, Call(work, publishes=publishes), dispose)
        try:
            self._enqueue(hand_off.call)
        except BaseException:  # an interrupt, even: it may be queued, or running
            hand_off.drop()
            raise
        return hand_off

    def perform(
        self,
        work: Callable[[], _Result],
        *,
        deadline: float,
        dispose: Callable[[_Result | None, bool], None],
        publishes: bool = False,
    ) -> _Result:
        """Hand work off and wait for its result."""
        return self.hand_off(work, dispose, publishes=publishes).result(deadline)

    def _enqueue(self, call: Call[_Result]) -> None:
        with self._starting:
            if self._closed:
                raise LifecycleError("the cache is closed")
            most = self._max_pending // 2 if call.publishes else self._max_pending
            if len(self._reads) + len(self._publications) >= max(1, most):
                raise Overloaded(f"{most} calls are waiting for the store already")
            if self._left and self._stuck():  # no thread would get to this one; it would only wait for its deadline
                raise Overloaded(f"all {self._count} threads wait for calls that are overdue")
            (self._publications if call.publishes else self._reads).append(call)
            self._turns.put(True)
            if self._idle:
                self._idle -= 1
                return
        if len(self._threads) < self._count:
            self._start_thread()

    def left(self, call: Call[Any]) -> None:
        """Its caller waits for this call no more, though it may run on."""
        with self._starting:
            self._left[call] = time.monotonic() + OVERDUE_SECONDS

    def late(self) -> list[float]:
        """When those calls were handed over that nobody waits for any more, and that still run."""
        with self._starting:
            return [call.began for call in self._left if call.running]

    def _stuck(self) -> bool:
        """Whether every thread has been at a call for long that nobody waits for any more."""
        for call in [call for call in self._left if not call.running]:
            del self._left[call]
        now = time.monotonic()
        return sum(due <= now for due in self._left.values()) >= self._count

    def _start_thread(self) -> None:
        with self._starting:
            if len(self._threads) < self._count and not self._closed:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread to give: those that run must do
                    if not self._threads:
                        raise
                else:
                    self._threads.append(thread)

    def _run(self) -> None:
        while self._turns.get():
            call = self._next(None)
            while call is not None:
                call.run()
                # After a publication another can begin, which had its turn when there was no thread for it.
                call = self._next(call) if call.publishes else None
            with self._starting:
                self._idle += 1

    def _next(self, ended: Call[Any] | None) -> Call[Any] | None:
        """The call whose turn it is; None if it has begun already, or is a publication that has to wait."""
        with self._starting:
            if ended is not None:
                self._publishing -= 1
            if self._reads:
                return self._reads.popleft()
            if not self._publications or self._publishing >= max(1, self._count - 1):
                return None
            self._publishing += 1
            return self._publications.popleft()

    def close(self, deadline: float) -> bool:
        """Let the threads end; True if all did before the deadline."""
        with self._starting:
            self._closed = True
            threads = [thread for thread in self._threads if thread is not threading.current_thread()]
        for _ in threads:
            self._turns.put(False)
        for thread in threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
