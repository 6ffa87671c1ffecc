"""A child process with a log, which dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from mmcache.cli import tether

_TAIL_BYTES: Final = 8192
_TAIL_LINES: Final = 20


class Child:
    """A running process. Start it from the main thread: it is killed when the thread that started it ends.

    It is the leader of a session of its own, so that Ctrl-C in a terminal reaches the parent only. It runs in
    `directory`, where its stderr goes to `NAME.log`, which is emptied first. So does its stdout and stdin is empty,
    unless `pipes` leads both to its parent.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str],
        pipes: bool = False,
    ) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        # -I -S: nothing but the standard library is wanted, and it starts in a few milliseconds.
        shim = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid())]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [*shim, *command],
                cwd=directory,  # not where the user happens to be: `python -m` looks for modules there first
                env=dict(environment),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Its process id, kept until it is reaped."""
        return self._process.pid

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that ended it."""
        return self._process.poll()

    def describe_end(self) -> str:
        """How it ended, for people."""
        status = self.status
        if status is None:
            return "still runs"
        if status >= 0:
            return f"ended with status {status}"
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"

    def log_tail(self) -> str:
        """The last lines of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]) or "(nothing)"

    def terminate(self) -> None:
        """Ask it to end; idempotent."""
        self._process.terminate()

    def kill(self) -> None:
        """End it at once, stopped or not, and reap it; idempotent."""
        self._process.kill()
        self._process.wait()
