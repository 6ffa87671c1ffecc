"""The demo's own cluster: `mmcache up` as a child, in a directory that goes away."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

from mmcache.cli.child import Child
from mmcache.cli.demo.errors import DemoError
from mmcache.config import without_settings

SEGMENT: Final = "512MiB"
START_S: Final = 90.0
STOP_S: Final = 30.0
"""`mmcache up` ends three processes; after this it is killed, and they with it."""
_POLL_S: Final = 0.05


class DemoCluster:
    """A cluster that serves within a `with` block.

    Raises:
        DemoError: on entry, it does not start.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.client_file = directory / "cluster" / "client.yaml"

    def check(self) -> None:
        """Raises DemoError, with the reason from its log, if it has ended."""
        if self._child.status is not None:
            tail = f":\n{self._child.log_tail()}" if self._child.log.stat().st_size else ""
            raise DemoError(f"mmcache {self._child.name} {self._child.describe_end()}{tail}")

    def __enter__(self) -> DemoCluster:
        ready = self._directory / "ready.json"
        command = [sys.executable, "-m", "mmcache.cli", "up", "--segment", SEGMENT]
        command += ["--state-dir", str(self.client_file.parent), "--ready-file", str(ready)]
        self._child = Child("up", command, directory=self._directory, environment=without_settings(os.environ))
        try:
            deadline = time.monotonic() + START_S
            while not ready.exists():
                self.check()
                if time.monotonic() > deadline:
                    raise DemoError(f"mmcache up was not ready within {START_S:g} s:\n{self._child.log_tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._child.terminate()
        deadline = time.monotonic() + STOP_S
        while self._child.status is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._child.kill()
