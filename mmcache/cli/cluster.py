"""A cluster on this machine's loopback interface: mooncake_master, an owner of memory, the controller.

Each is a child process that dies with this one. Nothing is restarted: the end of one part is the end of all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from mmcache.cli.child import Child
from mmcache.cli.errors import ClusterError, PartEnded
from mmcache.cli.ports import LOOPBACK, Ports
from mmcache.cli.shortage import reason, shortages
from mmcache.cli.signals import STOPS, Signals
from mmcache.cli.state_directory import write_whole
from mmcache.config import Settings, StoreSettings, to_yaml, without_settings
from mmcache.errors import ConfigError
from mmcache.store.launch import (
    master_command,
    master_is_ready,
    mooncake_environment,
    owner_command,
    port_answers,
    rpc_answers,
    segments,
)

START_TIMEOUT_S: Final = 30.0
"""For each part, and for the proof that all of them serve."""
STOP_TIMEOUT_S: Final = 5.0
"""A part that has not ended so long after SIGTERM is killed."""
STATE_FILE: Final = "controller.db"
_POLL_S: Final = 0.02


class StopRequested(Exception):
    """A signal asked for the end; `signal` is its number."""

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class Addresses(NamedTuple):
    """Where the parts answer."""

    master: str
    metrics: str
    sidecar: str
    control: str
    admin: str | None
    """URL of the controller's admin API; None: there is none."""


class Cluster:
    """The processes of one cluster; a context manager that ends them all on every path.

    Args:
        settings: what clients and the controller shall use; the addresses in it are replaced. See `check_settings`.
        directory: where `client.yaml`, each part's log and the controller's state go; an absolute path.
        segment_bytes: memory that the owner lends to the store.
        ports: all of them chosen; without one for the admin API there is none.
        environ: the environment of the parts; settings in it are left out, since `settings` holds them already.
        progress: told what is being waited for.
    """

    def __init__(
        self,
        settings: Settings,
        directory: Path,
        *,
        segment_bytes: int,
        ports: Ports,
        environ: Mapping[str, str],
        signals: Signals,
        progress: Callable[[str], None],
    ) -> None:
        self.addresses = Addresses(
            master=f"{LOOPBACK}:{ports.master}",
            metrics=f"{LOOPBACK}:{ports.metrics}",
            sidecar=f"{LOOPBACK}:{ports.owner}",
            control=f"tcp://{LOOPBACK}:{ports.control}",
            admin=None if ports.admin is None else f"http://{LOOPBACK}:{ports.admin}",
        )
        self.client_file = directory / "client.yaml"
        self._settings = _at(self.addresses, settings, directory / STATE_FILE)
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._ports = ports
        self._environment = without_settings(mooncake_environment(environ))
        self._signals = signals
        self._progress = progress
        self._children: list[Child] = []

    @property
    def pids(self) -> dict[str, int]:
        """Process id by the part's name."""
        return {child.name: child.pid for child in self._children}

    def start(self) -> None:
        """Start every part and return when all of them serve. When it fails, none of them runs any more.

        Raises:
            PartEnded: one ended meanwhile.
            ClusterError: one did not serve within START_TIMEOUT_S.
            StopRequested: a signal came.
        """
        try:
            self._start_all()
        except BaseException:
            self.stop()
            raise

    def _start_all(self) -> None:
        write_whole(self.client_file, "# Written by `mmcache up` at each start.\n" + to_yaml(self._settings))
        addresses, ports = self.addresses, self._ports
        lease_ms = round(self._settings.store.lease * 1000)
        # The controller needs nobody to start, and Python takes the longest.
        controller = self._start("controller", self._python("mmcache.cli", "controller", "-c"))
        master = self._start(
            "master",
            master_command(rpc_port=ports.master, metrics_port=ports.metrics, host=LOOPBACK, lease_ms=lease_ms),
        )
        self._wait(master, lambda: master_is_ready(addresses.metrics))
        owner = self._start(
            "owner",
            owner_command(master=addresses.master, port=ports.owner, segment_bytes=self._segment_bytes, host=LOOPBACK),
        )
        self._wait(owner, lambda: bool(segments(addresses.metrics)) and rpc_answers(addresses.sidecar))
        self._wait(controller, lambda: port_answers(addresses.control.removeprefix("tcp://")))  # its API before that
        self._prove()

    def supervise(self) -> None:
        """Return when a signal asks for the end. Raises PartEnded when a part ends before that."""
        try:
            while True:
                self._check()
                self._pause(None)
        except StopRequested:
            return

    def stop(self) -> None:
        """End every part; idempotent."""
        # The master last: who lends memory takes leave of it.
        self._end([child for child in self._children if child.name != "master"])
        self._end([child for child in self._children if child.name == "master"])

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, name: str, command: list[str]) -> Child:
        child = self._child(name, command)
        self._children.append(child)
        return child

    def _child(self, name: str, command: list[str]) -> Child:
        try:
            return Child(name, command, directory=self._directory, environment=self._environment)
        except OSError as error:  # no room for its log, or no process to be had
            raise ClusterError(f"the {name} cannot be started: {error.filename or ''} {reason(error)}") from error

    def _python(self, module: str, *arguments: str) -> list[str]:
        """The command that runs a module of ours with the client file as its last argument."""
        return [sys.executable, "-m", module, *arguments, str(self.client_file)]

    def _prove(self) -> None:
        """Let a client of its own put, read and say hello; a process, so that whatever hangs can be ended."""
        self._progress("waiting for an embedding to go there and back")
        probe = self._child("probe", self._python("mmcache.cli.probe"))
        try:
            self._wait_until(lambda: probe.status is not None, what="the probe's end")
            if probe.status != 0:
                self._pause(0)  # see `_check`
                raise ClusterError(f"the cluster does not serve: the probe {probe.describe_end()}\n{probe.log_tail()}")
        finally:
            probe.kill()

    def _wait(self, child: Child, ready: Callable[[], bool]) -> None:
        self._progress(f"waiting for the {child.name}")
        self._wait_until(ready, what=f"the {child.name}")

    def _wait_until(self, ready: Callable[[], bool], *, what: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready():
            self._check()
            if time.monotonic() > deadline:
                raise ClusterError(f"waited {START_TIMEOUT_S:g} s for {what}; the logs are in {self._directory}")
            self._pause(_POLL_S)
        self._check()  # it may have been another process that answered

    def _check(self) -> None:
        """Raise PartEnded if a part has ended, or StopRequested if that was asked for."""
        for child in self._children:
            if child.status is not None:
                # Ctrl-C also strikes a child that has only just been forked: it is we who were meant.
                self._pause(0)
                ended = f"the {child.name} (pid {child.pid}) {child.describe_end()}"
                causes = "".join(f"\n{shortage}" for shortage in shortages(self._directory))
                raise PartEnded(f"{ended}; {child.log} ends with:\n{child.log_tail()}{causes}")

    def _pause(self, timeout: float | None) -> None:
        for number in self._signals.wait(timeout) & STOPS:
            raise StopRequested(number)

    def _end(self, children: list[Child]) -> None:
        """SIGTERM, then SIGKILL at STOP_TIMEOUT_S or with the next request to end."""
        for child in children:
            child.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(child.status is None for child in children) and (left := deadline - time.monotonic()) > 0:
            if self._signals.wait(left) & STOPS:
                break
        for child in children:
            child.kill()


def check_settings(settings: Settings) -> None:
    """Refuse settings of a store that spans machines, and keys of one end only. Raises ConfigError."""
    if (settings.controller.secret_key_file is None) != (settings.control.controller_key is None):
        raise ConfigError(
            "controller.secret_key_file and client_keys_file, control.controller_key and secret_key_file: a cluster "
            "needs all four, or none"
        )
    for name in ("metadata", "protocol", "devices", "hostname"):
        value, ours = getattr(settings.store, name), getattr(StoreSettings(), name)
        if value != ours:
            raise ConfigError(f"store.{name} is {value!r}: a cluster on this machine alone has {ours!r}; leave it out")


def _at(addresses: Addresses, settings: Settings, state: Path) -> Settings:
    """The settings with the cluster's own addresses, and a file for what outlives its controller."""
    return Settings(
        store=msgspec.structs.replace(
            settings.store, master=addresses.master, metrics=addresses.metrics, sidecar=addresses.sidecar
        ),
        control=msgspec.structs.replace(
            settings.control,
            address=addresses.control,
            admin=addresses.admin,
            secret_key_file=_absolute(settings.control.secret_key_file),
        ),
        client=settings.client,
        controller=msgspec.structs.replace(
            settings.controller,
            bind=addresses.control,
            state=settings.controller.state or str(state),
            admin=None if addresses.admin is None else addresses.admin.removeprefix("http://"),
            secret_key_file=_absolute(settings.controller.secret_key_file),
            client_keys_file=_absolute(settings.controller.client_keys_file),
        ),
        engines=settings.engines,
    )


def _absolute(path: str | None) -> str | None:
    """A file's path for parts that run elsewhere."""
    return None if path is None else str(Path(path).absolute())
