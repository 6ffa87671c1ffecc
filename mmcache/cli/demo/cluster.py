"""The demo's own cluster: `mmcache up` as a child, in a directory that goes away."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
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


@contextlib.contextmanager
def start_cluster(directory: Path) -> Iterator[Path]:
    """A running cluster within the block; yields its client.yaml.

    Raises:
        DemoError: it does not start, or it ended while the block ran.
    """
    state, ready = directory / "cluster", directory / "ready.json"
    command = [sys.executable, "-m", "mmcache.cli.main", "up", "--segment", SEGMENT]
    command += ["--state-dir", str(state), "--ready-file", str(ready)]
    child = Child("up", command, directory=directory, environment=without_settings(os.environ))
    try:
        deadline = time.monotonic() + START_S
        while not ready.exists():
            _check(child, "before it was ready")
            if time.monotonic() > deadline:
                raise DemoError(f"mmcache up was not ready within {START_S:.0f} s:\n{child.log_tail()}")
            time.sleep(_POLL_S)
        try:
            yield state / "client.yaml"
        except DemoError:
            _check(child, "while the demo ran")  # then that is why
            raise
        _check(child, "while the demo ran")
    finally:
        child.terminate()
        deadline = time.monotonic() + STOP_S
        while child.status is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        child.kill()


def _check(child: Child, when: str) -> None:
    if child.status is not None:
        raise DemoError(f"mmcache up {child.describe_end()} {when}:\n{child.log_tail()}")
