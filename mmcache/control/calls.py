"""Where a caller and the channel's thread meet: a call that waits for its answers, and an acquisition that may go on.

The channel's thread delivers and never waits; callers wait, each with a deadline.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, TypeVar, cast

from mmcache.control.messages import Answer, Granted, Resolution, Waiting
from mmcache.errors import ControllerUnavailable, DeadlineExceeded

Result = TypeVar("Result")


class Call(Generic[Result]):
    """One caller that waits for `size` results, which may come in several messages."""

    def __init__(self, size: int) -> None:
        self.requests: list[int] = []
        """Numbers of the requests that it was sent as; the channel's thread alone uses them."""
        self._changed = threading.Condition(threading.Lock())
        self._results: list[Result | None] = [None] * size
        self._missing = size
        self._failure: str | None = None

    def deliver(self, indices: Sequence[int], results: Sequence[Result]) -> None:
        """Channel's side: these results belong at these places."""
        with self._changed:
            for index, result in zip(indices, results, strict=True):
                self._results[index] = result
            self._missing -= len(indices)
            if not self._missing:
                self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """Channel's side: there will be no (further) answer."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def wait(self, deadline: float) -> list[Result]:
        """Caller's side: all results. Raises DeadlineExceeded or ControllerUnavailable."""
        with self._changed:
            while self._missing:
                if self._failure is not None:
                    raise ControllerUnavailable(self._failure)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceeded("the controller did not answer in time")
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
            return cast("list[Result]", self._results)  # none is missing; None may be a result


class Acquisition(Call[Answer]):
    """What came of asking for the right to compute some keys. Leaving the context ends its waits.

    The claims in `answers` and in what `resolutions` returned are the caller's to commit or abort. Those that come when
    the caller waits no longer are given back unasked.
    """

    def __init__(
        self,
        size: int,
        *,
        wait_s: float,
        renew_for_s: float,
        check: Callable[[], None],
        leave: Callable[[Acquisition], None],
    ) -> None:
        super().__init__(size)
        self.answers: list[Answer] = []
        """One for each key, in order. A token in it stands for that claim in this channel and is never used again."""
        self.lineage = ""
        """Of the controller that answers: the generations in its answers are of this one."""
        self.lost = False
        """Whether the session ended meanwhile, and with it all waits. Claims are asked for again in the next one."""
        self.wait_until = time.monotonic() + wait_s
        self.renew_for_s = renew_for_s
        self._check = check
        self._leave = leave
        self._left = False
        self._waiting = 0
        self._resolved: deque[tuple[int, Resolution]] = deque()

    def resolutions(self, deadline: float) -> list[tuple[int, Resolution]]:
        """Wait until some of the waits end; returns pairs of the key's index and its result.

        Returns [] when none will or none did: at the deadline or once `wait_s` is over, after `leave`, when nothing
        waits (any more), and at once when the session is lost (then `lost` is True).
        """
        self._check()
        until = min(deadline, self.wait_until)
        with self._changed:
            while not (self._left or self._resolved or self.lost) and self._waiting:
                remaining = until - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
            if self._left:
                return []
            resolved = list(self._resolved)
            self._resolved.clear()
            return resolved

    def leave(self) -> None:
        """Stop waiting, for all keys that still do. Idempotent."""
        self._check()
        with self._changed:
            if self._left:
                return
            self._left = True
            self._changed.notify_all()
        self._leave(self)

    def deliver(self, indices: Sequence[int], results: Sequence[Answer]) -> None:
        """Channel's side: the answers to one of its requests."""
        self._waiting += sum(isinstance(result, Waiting) for result in results)
        super().deliver(indices, results)

    def resolve(self, resolved: Sequence[tuple[int, Resolution]]) -> None:
        """Channel's side: these waits ended."""
        with self._changed:
            self._resolved.extend(resolved)
            self._waiting -= len(resolved)
            self._changed.notify_all()

    def end(self) -> None:
        """Channel's side: the session is lost."""
        with self._changed:
            self.lost = True
            self._changed.notify_all()

    def take_uncollected(self) -> list[int]:
        """Channel's side, once the caller has left: tokens of the claims that it was given and never saw."""
        with self._changed:
            unseen: list[object] = [result for _, result in self._resolved]
            if not self.answers:
                unseen += self._results
            self._resolved.clear()
            return [result.token for result in unseen if isinstance(result, Granted)]

    def __enter__(self) -> Acquisition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
