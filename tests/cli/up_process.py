"""Real `mmcache up` processes, and what to ask of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
from cluster import wait_until

PARTS = ("master", "owner", "controller")
START_TIMEOUT_S = 40.0
END_TIMEOUT_S = 20.0


def runs(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped by somebody."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def mmcache(*arguments: str, **environ: str) -> list[Any]:
    """Arguments for subprocess: the command, and an environment in which only `environ` sets anything of ours."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MMCACHE_")}
    return [[sys.executable, "-m", "mmcache.cli", *arguments], {**inherited, **environ}]


class Up:
    """One `mmcache up` with a ready file, in a state directory."""

    def __init__(self, state: Path, *options: str, **environ: str) -> None:
        self.state = state
        self.ready_file = state.with_name(f"{state.name}-ready.json")
        paths = ("--state-dir", str(state), "--ready-file", str(self.ready_file))
        command, environment = mmcache("up", "--segment", "64MiB", *paths, *options, **environ)
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # its own foreground, for `press_ctrl_c`
        )
        self.pids: dict[str, int] = {}

    def wait_ready(self) -> dict[str, Any]:
        """What the ready file says, once this process wrote it."""

        def ready() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"up ended with {self.process.returncode}: {self.process.communicate()}")
            with contextlib.suppress(FileNotFoundError):
                self.pids = json.loads(self.ready_file.read_text())["pids"]
            return self.pids.get("up") == self.process.pid

        wait_until(ready, timeout=START_TIMEOUT_S, what="the ready file")
        return json.loads(self.ready_file.read_text())

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_end(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr, once it and every part has ended."""
        out, err = self.process.communicate(timeout=END_TIMEOUT_S)
        wait_until(lambda: not any(map(runs, self.pids.values())), timeout=5, what=f"the end of {self.pids}")
        return self.process.returncode, out, err

    def close(self) -> None:
        self.process.kill()  # its parts die with it
        self.process.communicate()
