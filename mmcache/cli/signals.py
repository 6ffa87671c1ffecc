"""Signals that wake a wait, instead of an exception that strikes anywhere; and, for what is short, an orderly end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Final, NoReturn

STOPS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Each of these asks the process to end."""


def _note(number: int, frame: FrameType | None) -> None:
    """A handler must stand for Python to write the signal's number to the wake-up pipe."""


class Signals:
    """Within a `with` block, STOPS and SIGCHLD only wake `wait`. For the main thread, one at a time.

    A SIGHUP that was ignored (`nohup`) stays ignored.
    """

    def __enter__(self) -> Signals:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._previous = {
            number: signal.signal(number, _note)
            for number in (*STOPS, signal.SIGCHLD)
            if not (number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN)
        }
        self._previous_pipe = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_pipe)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout: float | None) -> frozenset[int]:
        """Signals that came since the last wait, as soon as there is one; none at all after `timeout` seconds."""
        arrivals = select.poll()
        arrivals.register(self._read, select.POLLIN)
        if not arrivals.poll(None if timeout is None else 1000 * timeout):
            return frozenset()
        return frozenset(os.read(self._read, 4096))


@contextlib.contextmanager
def orderly_end() -> Iterator[None]:
    """Within the block, signals that end a process raise SystemExit, so that what was begun is ended as well.

    Its status is 128 and the signal's number, also for Ctrl-C, and also when what the signal struck made an exception
    of its own of it, as modules in C do that are being imported. One that was ignored (`nohup`) stays ignored.
    """
    ends: list[int] = []

    def end(number: int, _: FrameType | None) -> NoReturn:
        ends.append(128 + number)
        sys.exit(ends[0])

    previous = {number: signal.signal(number, end) for number in STOPS if signal.getsignal(number) != signal.SIG_IGN}
    try:
        yield
    except Exception:
        if ends:
            sys.exit(ends[0])
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
