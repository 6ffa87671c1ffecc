"""A real store for tests: `mooncake_master` and owners of memory on loopback, ended by process id."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.parts import free_ports
from mmcache.store.launch import (
    master_command,
    master_is_ready,
    mooncake_environment,
    owner_command,
    port_answers,
    rpc_answers,
    segments,
)

START_TIMEOUT_S = 90.0
LEAST_PATIENCE_S = 60.0
_PORT_TRIES = 5
NO_VARIABLES: Mapping[str, str] = {}


def free_port() -> int:
    """A TCP port that was free a moment ago, of those that the system gives to no outgoing connection."""
    return free_ports(1)[0]


def wait_until(condition: Callable[[], bool], *, timeout: float, what: str) -> None:
    """Return once `condition()` holds; AssertionError naming `what` when it does not within `timeout` seconds.

    Nothing is shown by its taking long but that the machine is busy, so that it may take a minute at least.
    """
    timeout = max(timeout, LEAST_PATIENCE_S)
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout} s"
        time.sleep(0.01)


class Part:
    """One process of the store, with its log."""

    def __init__(
        self, name: str, command: list[str], address: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.address = address
        self.log = folder / f"{name}.log"
        self._command = command
        self._environment = mooncake_environment({**os.environ, **environment})
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """SIGSTOP it for the length of a `with` block."""
        self.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # until all of its threads stand still
        try:
            yield
        finally:
            self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, also while it is stopped; idempotent."""
        self.process.kill()
        self.process.wait()


class Owner(Part):
    """A `mooncake_client`; `address` is what a client takes as its sidecar."""

    segment_name: str = ""
    """What `ReplicateConfig.preferred_segment` takes."""


class MooncakeProcesses:
    """A master and any number of owners; a context manager that ends them all.

        with MooncakeProcesses() as store:
            store.start_master()
            owner = store.start_owner(64 << 20)

    `master.address` is where clients connect, `metrics` its HTTP port.
    """

    master: Part
    metrics: str

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mmcache-test-")
        self.parts: list[Part] = []
        self.owners: list[Owner] = []

    def start_master(self, *, lease_ms: int = 10_000, options: tuple[str, ...] = ()) -> Part:
        for _ in range(_PORT_TRIES):
            rpc_port, metrics_port = free_port(), free_port()
            command = master_command(rpc_port=rpc_port, metrics_port=metrics_port, lease_ms=lease_ms)
            command.append("--client_ttl=10")  # the last one counts: tests stop owners for seconds
            part = Part(f"master-{len(self.parts)}", [*command, *options], f"127.0.0.1:{rpc_port}", self._path, {})
            self.parts.append(part)
            self.metrics = f"127.0.0.1:{metrics_port}"

            def serves(address: str = part.address) -> bool:
                return master_is_ready(self.metrics) and rpc_answers(address)

            if self._wait_ready(part, serves):
                self.master = part
                return part
        raise AssertionError("no master came up\n" + self.logs())

    def start_owner(
        self, segment_bytes: int = 256 << 20, *, threads: int = 2, environment: Mapping[str, str] = NO_VARIABLES
    ) -> Owner:
        """Start a `mooncake_client`; with a segment of 0 bytes it only serves clients that attach to it."""
        for _ in range(_PORT_TRIES):
            known = {segment.segment_name for segment in segments(self.metrics)}
            port = free_port()
            command = owner_command(master=self.master.address, port=port, segment_bytes=segment_bytes, threads=threads)
            owner = Owner(f"owner-{len(self.parts)}", command, f"127.0.0.1:{port}", self._path, environment)
            self.parts.append(owner)

            def mounted(owner: Owner = owner, known: set[str] = known) -> bool:
                new = [segment.segment_name for segment in segments(self.metrics) if segment.segment_name not in known]
                if new:
                    owner.segment_name = new[0]
                return (bool(new) or not segment_bytes) and port_answers(owner.address)

            if self._wait_ready(owner, mounted):
                self.owners.append(owner)
                return owner
        raise AssertionError("no owner came up\n" + self.logs())

    def restart(self, part: Part) -> None:
        """Start a part that was killed, on its own port again."""
        part.start()
        assert self._wait_ready(part, lambda: port_answers(part.address)), "its port was taken meanwhile"

    @property
    def pids(self) -> dict[str, int]:
        return {part.name: part.pid for part in self.parts if part.alive}

    def logs(self) -> str:
        """The end of each part's log, for a failing test."""
        return "\n".join(f"--- {part.name}\n{part.log.read_text(errors='replace')[-4000:]}" for part in self.parts)

    def stop(self) -> None:
        """End all of them; idempotent."""
        for part in self.parts:
            part.process.kill()  # nothing to save, and a graceful end takes seconds
        for part in self.parts:
            part.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> MooncakeProcesses:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            print(self.logs(), file=sys.stderr)  # pytest shows it with the failure
        self.stop()

    @property
    def _path(self) -> Path:
        return Path(self._folder.name)

    def _wait_ready(self, part: Part, ready: Callable[[], bool]) -> bool:
        """False when the part died, as it does when its port was taken meanwhile."""
        wait_until(lambda: ready() or not part.alive, timeout=START_TIMEOUT_S, what=f"start of {part.name}")
        return part.alive
