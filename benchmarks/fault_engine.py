"""Engines under load as processes of their own, which do and tell what they are asked."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fault_load import READY_SECONDS, Options
from mmcache.config import without_settings


class Engine:
    """The other end of a `benchmarks.fault_load` process; a context manager that ends it.

    Args:
        within: the beginning of its command line, for an engine in a namespace.
    """

    def __init__(self, config: Path, options: Options, *, within: Sequence[str] = ()) -> None:
        self._log = config.with_suffix(f".{time.monotonic_ns()}.log")
        command = [*within, sys.executable, "-m", "benchmarks.fault_load", str(config)]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, msgspec.json.encode(options).decode()],
                cwd=Path(__file__).parents[1],
                env=without_settings(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._unread = b""

    def wait_ready(self) -> dict[str, Any]:
        """Return once all of its calls succeed."""
        ready = self._read(READY_SECONDS + 30.0)
        if not ready["ready"]:
            raise RuntimeError(f"its calls do not succeed: {ready['stats']}\n{self.log}")
        return ready

    def ask(self, do: str, *, within_seconds: float, **arguments: Any) -> dict[str, Any]:
        """Have it do what a command of `benchmarks.fault_load` says; its answer."""
        self.tell(do, **arguments)
        return self.hear(within_seconds)

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask without waiting for the answer, which `hear` returns."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, within_seconds: float) -> dict[str, Any]:
        """The next answer."""
        return self._read(within_seconds)

    @property
    def log(self) -> str:
        """The end of what it wrote to stderr."""
        return self._log.read_text(errors="replace")[-4000:]

    def _read(self, seconds: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        descriptor, deadline = self.process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._unread:
            arrivals = select.poll()  # select() knows no descriptor beyond 1023
            arrivals.register(descriptor, select.POLLIN)
            if not arrivals.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"an engine did not answer within {seconds:g} s\n{self.log}")
            read = os.read(descriptor, 1 << 20)
            if not read:
                raise RuntimeError(f"an engine ended with {self.process.wait(10)}\n{self.log}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """End it, whatever it is doing."""
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
