"""Looks that are too risky for this process, taken in a child: what hangs there, GIL and all, is killed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from mmcache.cli.child import Child
from mmcache.config import without_settings

_POLL_S: Final = 0.01
_LAST_LINES: Final = 3


class Ended(NamedTuple):
    """How a child ended: its exit status, None if it was killed at its deadline, and all that it said."""

    status: int | None
    output: str

    @property
    def last_lines(self) -> str:
        """The end of what it said, on one line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return " / ".join(lines[-_LAST_LINES:]) or "it said nothing"


def run_child(
    command: Sequence[str], *, timeout: float, files: Mapping[str, str] | None = None, **environ: str
) -> Ended:
    """Run a command for at most `timeout` seconds in a directory of its own, which first gets `files`.

    Its environment is ours without our settings, and with `environ`.
    """
    with tempfile.TemporaryDirectory(prefix="mmcache-doctor-") as folder:
        for name, text in (files or {}).items():
            (Path(folder) / name).write_text(text)
        environment = {**without_settings(os.environ), **environ}
        child = Child("child", command, directory=Path(folder), environment=environment)
        try:
            deadline = time.monotonic() + timeout
            while (status := child.status) is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            return Ended(status, child.log_tail())
        finally:
            child.kill()
