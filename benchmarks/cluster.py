"""The cluster that a benchmark measures: `mmcache up` as a child, with the memory in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mmcache.config import without_settings

START_SECONDS = 60.0


class Cluster(NamedTuple):
    """Where it answers; `config` is a client's configuration file."""

    config: Path
    master: str
    sidecar: str
    control: str
    pids: dict[str, int]


@contextlib.contextmanager
def cluster(segment: str) -> Iterator[Cluster]:
    """A cluster whose owner lends `segment` (such as `2GiB`), for the length of a `with` block."""
    with tempfile.TemporaryDirectory(prefix="mmcache-benchmark-") as folder:
        ready = Path(folder) / "ready.json"
        command = [sys.executable, "-m", "mmcache.cli", "up", "--segment", segment]
        command += ["--state-dir", str(Path(folder) / "state"), "--ready-file", str(ready)]
        up = subprocess.Popen(command, env=without_settings(os.environ), stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready.exists():
                if up.poll() is not None:
                    raise SystemExit(f"mmcache up ended with {up.returncode}")
                if time.monotonic() > deadline:
                    raise SystemExit(f"mmcache up was not ready within {START_SECONDS:g} s")
                time.sleep(0.05)
            told = json.loads(ready.read_text())
            addresses = told["addresses"]
            yield Cluster(
                Path(told["client_config"]),
                addresses["master"],
                addresses["sidecar"],
                addresses["control"],
                told["pids"],
            )
        finally:
            up.terminate()
            up.wait(30)
