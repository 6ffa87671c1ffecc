"""A cluster on loopback whose parts can be killed, stopped, continued and started again, each on a port of its own.

    with Parts(owner_bytes=1 << 30) as parts:
        cache = MMCache.connect(parts.config)
        parts.master.kill()
        parts.master.start()
        with parts.owner.stopped():
            cache.get(key)

Its processes die with the thread that started them, however that ends: use it from the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmcache.cli.child import Child
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

PARTS = ("master", "owner", "sidecar", "controller")
START_SECONDS = 60.0
_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Below the ports that the system gives to outgoing connections: one of those would keep a part from coming back, and
a client that looks for a dead part would connect to itself sooner or later."""


class Part:
    """One process of the cluster. Idempotent where that makes sense, so that a random schedule needs no bookkeeping.

    Args:
        command: its command line, the same at each start.
        ready: whether it serves. Asked while it is waited for; says False while it does not.
        environment: besides this process's.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        address: str,
        folder: Path,
        ready: Callable[[], bool],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.address = address
        self.starts = 0
        self.is_stopped = False
        self._command = list(command)
        self._folder = folder
        self._environment = without_settings(mooncake_environment({**os.environ, **(environment or {})}))
        self._ready = ready
        self._child: Child | None = None

    def __repr__(self) -> str:
        state = "stopped" if self.is_stopped else "alive" if self.alive else "dead"
        return f"<{self.name} at {self.address}, {state}>"

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        return self._started().pid

    @property
    def alive(self) -> bool:
        """Whether its process runs, or is stopped."""
        return self._child is not None and self._child.status is None

    @property
    def ready(self) -> bool:
        """Whether it serves now. Takes up to a second when it does not."""
        return self.alive and not self.is_stopped and self._ready()

    @property
    def log(self) -> Path:
        """What it wrote since it was started last."""
        return self._started().log

    def launch(self) -> None:
        """Start it, unless it is alive, and do not wait until it serves."""
        if not self.alive:
            self.starts += 1
            self.is_stopped = False
            name = f"{self.name}-{self.starts}"
            self._child = Child(name, self._command, directory=self._folder, environment=self._environment)

    def start(self, timeout: float = START_SECONDS) -> None:
        """Start it, unless it is alive, and wait until it serves. Raises SystemExit when it ends, or does not serve."""
        self.launch()
        self.wait_ready(timeout)

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Wait until it serves. Raises SystemExit when it ends, or does not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._ready():
            if not self.alive or time.monotonic() > deadline:
                child = self._started()
                raise SystemExit(f"the {self.name} does not serve: it {child.describe_end()}\n{child.log_tail()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """SIGSTOP it, and return when all of its threads stand still."""
        if self.alive and not self.is_stopped:
            os.kill(self.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            self.is_stopped = True

    def resume(self) -> None:
        """SIGCONT it."""
        if self.alive and self.is_stopped:
            os.kill(self.pid, signal.SIGCONT)
        self.is_stopped = False

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stopped for the length of a `with` block."""
        self.stop()
        try:
            yield
        finally:
            self.resume()

    def kill(self) -> None:
        """SIGKILL it, also while it is stopped, and reap it."""
        if self._child is not None:
            self._child.kill()
            self.is_stopped = False

    def terminate(self, timeout: float = 5.0) -> None:
        """SIGTERM it and wait until it has ended, which a stopped one does not; after `timeout` seconds kill it."""
        if self._child is not None:
            self._child.terminate()
            deadline = time.monotonic() + timeout
            while self.alive and time.monotonic() < deadline:
                time.sleep(0.02)
            self.kill()

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError(f"the {self.name} was never started")
        return self._child


class Parts:
    """Master, memory owner, sidecar and controller; a context manager that ends them all, on every path.

    Args:
        owner_bytes: what the owner, a `mooncake_client` that nobody attaches to, lends to the store; 0: there is none.
        sidecar_bytes: what the sidecar lends; 0: it only serves the engines of this machine.
        client, controller, store: settings of those sections, besides the addresses.
        master_options: for the master's command line.
        environment: for all parts, besides this process's.
        via: given `master` or `controller` and its address, the address under which sidecar and clients reach it.
        folder: where logs and configuration files go; by default a temporary one, which goes with the cluster.

    Attributes:
        config: a client's configuration file; `config_for` makes others.
        parts: all of them by their names in `PARTS`; also the attributes `master`, `owner`, `sidecar` and `controller`.
    """

    def __init__(
        self,
        *,
        owner_bytes: int = 1 << 30,
        sidecar_bytes: int = 0,
        client: Mapping[str, Any] | None = None,
        controller: Mapping[str, Any] | None = None,
        store: Mapping[str, Any] | None = None,
        master_options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        via: Callable[[str, str], str] = lambda _, address: address,
        folder: Path | None = None,
    ) -> None:
        if not owner_bytes + sidecar_bytes:
            raise ValueError("nobody lends any memory")
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="mmcache-benchmark-")
        self.folder = (folder or Path(self._temporary.name if self._temporary else "")).absolute()
        master, metrics, owner, sidecar, control = (f"{_HOST}:{port}" for port in free_ports(5))
        self.metrics = metrics
        via_master, via_control = via("master", master), via("controller", control)
        self._environment = environment
        lease_s = float((store or {}).get("lease", 10.0))
        self._sections: dict[str, dict[str, Any]] = {
            "store": {"metrics": metrics, **(store or {}), "master": via_master, "sidecar": sidecar},
            "control": {"address": f"tcp://{via_control}"},
            "client": dict(client or {}),
            "controller": {**(controller or {}), "bind": f"tcp://{control}"},
        }
        self.config = self.config_for("auto")
        lent = [nbytes for nbytes in (owner_bytes, sidecar_bytes) if nbytes]
        self.master = self._part(
            "master",
            [*_master(master, metrics, lease_s), *master_options],
            master,
            lambda: master_is_ready(metrics),
        )
        self.owner = self._part(
            "owner",
            owner_command(master=master, port=_port(owner), segment_bytes=owner_bytes),
            owner,
            # A master that was restarted knows no segments for a second; one that is gone, none at all.
            lambda: rpc_answers(owner) and len(segments(metrics)) >= len(lent),
        )
        self.sidecar = self._part(
            "sidecar",
            owner_command(master=via_master, port=_port(sidecar), segment_bytes=sidecar_bytes),
            sidecar,
            # Without memory of its own it serves whether or not the master answers.
            lambda: rpc_answers(sidecar) and (not sidecar_bytes or bool(segments(metrics))),
        )
        self.controller = self._part(
            "controller",
            [sys.executable, "-m", "mmcache.cli", "controller", "-c", str(self.config)],
            control,
            lambda: port_answers(control),
        )
        everybody = (self.master, self.sidecar, self.owner, self.controller)
        self.parts = {part.name: part for part in everybody if owner_bytes or part is not self.owner}

    def config_for(self, attach: str) -> Path:
        """The configuration file of a client that attaches so: `auto`, `sidecar` or `embedded`."""
        path = self.folder / f"client-{attach}.yaml"
        sections = {**self._sections, "store": {**self._sections["store"], "attach": attach}}
        path.write_text(json.dumps(sections, indent=2))  # JSON is YAML
        return path

    def start(self) -> None:
        """Start all of them, and wait until they serve."""
        for part in self.parts.values():
            part.start()

    def heal(self, timeout: float = START_SECONDS) -> None:
        """Continue and start whatever is stopped or dead, and wait until all of them serve.

        Parts that have ended by themselves while they are waited for, as an owner may that finds no master, are started
        again. Raises SystemExit when that is of no use within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            for part in self.parts.values():
                part.resume()
                part.launch()
            if all(part.ready for part in self.parts.values()):
                return
            if time.monotonic() > deadline:
                raise SystemExit(f"the cluster does not come back: {list(self.parts.values())}; logs: {self.folder}")
            time.sleep(0.1)

    def end(self) -> None:
        """Kill all of them; idempotent."""
        for part in self.parts.values():
            part.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Parts:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _part(self, name: str, command: Sequence[str], address: str, ready: Callable[[], bool]) -> Part:
        return Part(name, command, address=address, folder=self.folder, ready=ready, environment=self._environment)


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of loopback that were free a moment ago."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(_PORTS, 200):
            if len(ports) == count:
                return ports
            probe = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind((_HOST, port))
                ports.append(port)
    raise SystemExit("there are no free ports")


def _master(address: str, metrics: str, lease_s: float) -> list[str]:
    return master_command(rpc_port=_port(address), metrics_port=_port(metrics), lease_ms=round(lease_s * 1000))


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
