"""`mmcache up`: a cluster on this machine, for as long as the command runs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, cast

import psutil
import typer
from rich.console import Console

from mmcache.cli.cluster import Cluster, StopRequested, check_settings
from mmcache.cli.errors import ClusterError, PartEnded, reported
from mmcache.cli.ports import Ports
from mmcache.cli.signals import Signals
from mmcache.cli.state_directory import StateDirectory, default_state_directory, remove, write_whole
from mmcache.config import CONFIG_VARIABLE, Settings, load
from mmcache.errors import ConfigError
from mmcache.setting_kinds import BadValue, Size

_PORT_TRIES: Final = 5
"""Fresh sets of free ports, when another process takes one before its part does."""
_SEGMENT: Final = Size(least=16 << 20)


def _port(whose: str) -> Any:
    return typer.Option(min=0, max=65_535, metavar="PORT", help=f"{whose}; 0: a free one.", show_default=False)


def up(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            metavar="FILE",
            help="Settings for the controller and clients. Addresses in it are replaced.",
        ),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="For client.yaml and logs. Default: mmcache below XDG_STATE_HOME."),
    ] = None,
    segment: Annotated[str, typer.Option(metavar="SIZE", help="Memory lent to the store.")] = "512MiB",
    ready_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Is there, as JSON with addresses and pids, while everything can serve."),
    ] = None,
    master_port: Annotated[int, _port("The master's")] = 0,
    metrics_port: Annotated[int, _port("The master's for HTTP")] = 0,
    owner_port: Annotated[int, _port("The owner's")] = 0,
    control_port: Annotated[int, _port("The controller's")] = 0,
    admin_port: Annotated[int, _port("The controller's for its admin API (HTTP)")] = 0,
) -> None:
    """Start a cluster on this machine: master, memory, controller.

    A Mooncake master, an owner of memory, and the controller listen on loopback until Ctrl-C. The state directory gets
    client.yaml, for MMCache.connect or MMCACHE_CONFIG. Nothing is restarted: when a part ends by itself, the others are
    ended too and the status is 1. The controller serves its admin API where mmcache[controller] is installed.

    Settings come from --config and, overriding it, from MMCACHE_<SECTION>__<SETTING> in the environment. MMCACHE_CONFIG
    is for clients and not read here. Those of a store that spans machines (store.metadata, protocol, devices, hostname)
    are refused.

    Ports are free ones, others at each start, unless they are given. With --master-port, --owner-port and
    --control-port fixed, clients that keep running come back after a restart of this command.
    """
    with reported("up"):
        asked = Ports(
            master=master_port,
            metrics=metrics_port,
            owner=owner_port,
            control=control_port,
            admin=_port_of_api(admin_port),
        )
        settings = _settings(config)
        segment_bytes = _segment_bytes(segment)
        directory = default_state_directory(os.environ) if state_dir is None else state_dir
        with Signals() as signals, StateDirectory(directory) as state:
            if ready_file is not None:
                _prepare(ready_file)
            try:
                cluster = start_cluster(settings, state.path, segment_bytes, asked, signals)
            except StopRequested as stop:
                raise typer.Exit(128 + stop.signal) from None
            with cluster, _announced(cluster, ready_file):
                typer.echo(_summary(cluster, segment))
                cluster.supervise()
                typer.echo("Ending.")


def _port_of_api(port: int) -> int | None:
    """The port to ask for; None where the API could not run and was not asked for."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing and port:
        raise ConfigError(f"--admin-port: {missing[0]} is not installed: pip install 'mmcache[controller]'")
    return None if missing else port


def _settings(config: Path | None) -> Settings:
    # MMCACHE_CONFIG is for clients: it may well name the file that we are about to write.
    settings = load(config, environ={name: value for name, value in os.environ.items() if name != CONFIG_VARIABLE})
    check_settings(settings)
    return settings


def _segment_bytes(text: str) -> int:
    try:
        nbytes = cast(int, _SEGMENT.check_text(text))
    except BadValue as error:
        raise ConfigError(f"--segment {error}") from error
    available = psutil.virtual_memory().available  # the owner's memory is anonymous: /dev/shm does not count
    if nbytes > available:
        raise ConfigError(f"--segment {text} is more than the {available / 2**30:.1f} GiB of memory that are available")
    return nbytes


def start_cluster(settings: Settings, directory: Path, segment_bytes: int, asked: Ports, signals: Signals) -> Cluster:
    """A cluster whose parts all serve; a port that was free and is not any more costs another try."""
    console = Console(stderr=True)
    for tries_left in reversed(range(_PORT_TRIES)):
        ports = asked.choose()
        with console.status("starting") as status:
            cluster = Cluster(
                settings,
                directory,
                segment_bytes=segment_bytes,
                ports=ports,
                environ=os.environ,
                signals=signals,
                progress=status.update,
            )
            try:
                cluster.start()
                return cluster
            except PartEnded:
                if not tries_left or not asked.lost(ports):
                    raise
    raise AssertionError("the last try returns or raises")


def _prepare(ready_file: Path) -> None:
    """Remove what an earlier run that was killed left, and refuse early what could not be written later."""
    directory = ready_file.parent.resolve()
    if not directory.is_dir():
        raise ClusterError(f"the ready file's directory {directory} is not there")
    if ready_file.is_dir():
        raise ClusterError(f"the ready file {directory / ready_file.name} is a directory")
    remove(ready_file)


@contextlib.contextmanager
def _announced(cluster: Cluster, ready_file: Path | None) -> Iterator[None]:
    """The ready file is there within a `with` block."""
    if ready_file is None:
        yield
        return
    ready = {
        "addresses": cluster.addresses._asdict(),
        "pids": {**cluster.pids, "up": os.getpid()},
        "client_config": str(cluster.client_file),
    }
    write_whole(ready_file, json.dumps(ready, indent=2) + "\n")
    try:
        yield
    finally:
        remove(ready_file)


def _summary(cluster: Cluster, segment: str) -> str:
    addresses, pids = cluster.addresses, cluster.pids
    admin = addresses.admin or "none: pip install 'mmcache[controller]'"
    return "\n".join(
        [
            "mmcache is up; Ctrl-C ends it.",
            f"  controller  {addresses.control}  (pid {pids['controller']})",
            f"  admin API   {admin}",
            f"  master      {addresses.master}, metrics at http://{addresses.metrics}/metrics  (pid {pids['master']})",
            f"  owner       {addresses.sidecar}, lends {segment}  (pid {pids['owner']})",
            f"  clients     MMCACHE_CONFIG={cluster.client_file}",
        ]
    )
