"""A cluster whose parts are processes of their own on ports that stay, so that each can be killed, stopped, restarted.

The memory lies with `remote`; engines attach to `near`, which lends none, or embedded: each part can be missed alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.fault_load import READY_SECONDS, Options
from mmcache.cli.child import Child
from mmcache.cli.ports import LOOPBACK
from mmcache.config import without_settings
from mmcache.store.launch import (
    master_command,
    master_is_ready,
    mooncake_environment,
    owner_command,
    port_answers,
    rpc_answers,
    segments,
)

PARTS = ("master", "remote", "near", "controller")
START_SECONDS = 60.0
_POLL_SECONDS = 0.01
_PORTS = range(15_000, 32_000)


class Part:
    """One process of the cluster; it dies with this one. Started, again and again, from the main thread."""

    def __init__(self, name: str, command: Sequence[str], ready: Callable[[], bool], folder: Path) -> None:
        self._name = name
        self._command = command
        self._ready = ready
        self._folder = folder
        self._environment = without_settings(mooncake_environment(os.environ))
        self.start()

    def start(self) -> None:
        """Start it, and return when it serves."""
        self.launch()
        deadline = time.monotonic() + START_SECONDS
        while not self.serves():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the {self._name} does not serve:\n{self.child.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def launch(self) -> None:
        """Start it without waiting."""
        self.child = Child(self._name, self._command, directory=self._folder, environment=self._environment)

    def serves(self) -> bool:
        """Whether it answers. Raises RuntimeError if it has ended by itself."""
        if self.child.status is not None:
            raise RuntimeError(f"the {self._name} {self.child.describe_end()}:\n{self.child.log_tail()}")
        return self._ready()

    def kill(self) -> None:
        """SIGKILL, also while it is stopped; idempotent."""
        self.child.kill()

    def stop(self) -> None:
        """SIGSTOP, and return when all of its threads stand still."""
        os.kill(self.child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.child.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        os.kill(self.child.pid, signal.SIGCONT)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, none of those that the kernel gives to connections: a client that looks for a dead
    part would be given that part's port for its own end sooner or later, and connect to itself."""
    ports: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server((LOOPBACK, port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"no {count} free ports among {_PORTS}")


class FaultCluster:
    """The parts, by name; a context manager that ends them all.

    Args:
        segment_bytes: what the remote owner lends.
        via: given `master` or `controller` and its address, the address under which others shall reach it.
    """

    def __init__(self, segment_bytes: int, *, via: Callable[[str, str], str] = lambda _, address: address) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mmcache-benchmark-")
        self.folder = Path(self._folder.name)
        self.parts: dict[str, Part] = {}
        ports = free_ports(5)
        master, metrics, remote, self._near, control = (f"{LOOPBACK}:{port}" for port in ports)
        self._master, self._control = via("master", master), via("controller", control)
        controller = [sys.executable, "-m", "mmcache.cli.main", "controller", "--bind", f"tcp://{control}"]
        try:
            self._start(
                "master",
                master_command(rpc_port=ports[0], metrics_port=ports[1]),
                lambda: master_is_ready(metrics),
            )
            self._start(
                "remote",
                owner_command(master=master, port=ports[2], segment_bytes=segment_bytes),
                lambda: bool(segments(metrics)) and rpc_answers(remote),
            )
            self._start(
                "near",
                owner_command(master=self._master, port=ports[3], segment_bytes=0),
                lambda: rpc_answers(self._near),
            )
            self._start("controller", controller, lambda: port_answers(control))
        except BaseException:
            self.close()
            raise

    def config(self, attach: str) -> Path:
        """A client's configuration file."""
        path = self.folder / f"client-{attach}.yaml"
        store = {"master": self._master, "sidecar": self._near, "attach": attach}
        path.write_text(json.dumps({"store": store, "control": {"address": f"tcp://{self._control}"}}))
        return path

    def close(self) -> None:
        """End every part."""
        for part in self.parts.values():
            part.kill()
        self._folder.cleanup()

    def __enter__(self) -> FaultCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, name: str, command: Sequence[str], ready: Callable[[], bool]) -> None:
        self.parts[name] = Part(name, command, ready, self.folder)


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
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
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
