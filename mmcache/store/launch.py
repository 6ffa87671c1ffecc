"""How the store's own processes are started on a node, and how to tell that they can serve.

Two binaries of the `mooncake` wheel: `mooncake_master` (metadata) and `mooncake_client` (owns memory that it lends to
the store, and serves it to the engines of its node). Nothing here starts a process: callers get command lines, an
environment, and questions that answer at once.

What no setting of this wheel changes: `mooncake_client`, and an embedded client, also listen on two ports of the
transfer engine's own choosing (a handshake and a data port), and these bind to every interface; `MC_TCP_BIND_ADDRESS`
only changes what is advertised. The master's two ports and `mooncake_client`'s own one do keep to `host`. Shared memory
is handed over through an abstract Unix socket named by that port, so an engine and its `mooncake_client` must share a
network namespace.
"""

from __future__ import annotations

import enum
import http.client
import importlib.util
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from mmcache.errors import ConfigError, StoreUnavailable

RELEASE_TIMEOUT_S: Final = 3600
"""How long the master keeps the memory of a put that never ended. Verification by `prefix` assumes that no writer
outlives it: with a short one, a writer that resumed was seen to overwrite other objects."""

CLIENT_TTL_S: Final = 3
"""How long the master believes a silent owner of memory to be alive. Until then it gives that owner's memory to puts,
each of which fails after up to a second: with the master's default of 10, engines could publish next to nothing for 7
to 8 s after an owner had been killed and started again. An owner that lives, but is silent for longer, loses what it
held."""

_MAX_ANSWER_BYTES: Final = 16 * 2**20

MIN_SEGMENT_BYTES: Final = 16 * 2**20
"""An owner of less refuses to start; one of nothing (0) only serves its node's engines."""

_DEFAULTS: Final[Mapping[str, str]] = {
    # A batch that meets a full queue fails, rather than waits; ours are bounded by the callers.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    # A transfer whose peer hangs is torn down, and its connection closed, long before the 30 s after which an engine's
    # call to its sidecar gives up by itself, without telling whether bytes may still land.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "3000",
    "MC_LOG_LEVEL": "WARNING",
    "MC_YLT_LOG_LEVEL": "WARN",
    "GLOG_minloglevel": "1",
}


class Segment(msgspec.Struct, frozen=True):
    """Memory that one process lends to the store, as the master sees it."""

    segment_name: str
    """What `ReplicateConfig.preferred_segment` takes."""
    size_bytes: int
    allocator_used_bytes: int = 0


class Memory(NamedTuple):
    """Of all segments together, in bytes."""

    capacity: int
    used: int


class _Segments(msgspec.Struct):
    segments: list[Segment]


class _Health(msgspec.Struct):
    service_ready: bool = False


def mooncake_folder() -> Path:
    """Where the `mooncake` package lies, without importing it (its libraries take half a second and log).

    Raises:
        StoreUnavailable: it is not installed; the message says what to install.
    """
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        raise StoreUnavailable("Mooncake is not installed: pip install 'mmcache[cpu]' (or [cuda12], [cuda13])")
    return Path(spec.origin).parent


def _binary(name: str) -> str:
    path = mooncake_folder() / name
    if not os.access(path, os.X_OK):
        raise StoreUnavailable(f"the installed mooncake package has no executable {name} ({path})")
    return str(path)


def master_command(*, rpc_port: int, metrics_port: int, host: str = "127.0.0.1", lease_ms: int = 10_000) -> list[str]:
    """The command line of a master.

    Args:
        rpc_port: where clients and owners of memory connect.
        metrics_port: its HTTP port (`/metrics`, `/health`, …), which asks nobody for credentials.
        host: the interface that both bind to.
        lease_ms: the read lease, `store.lease` of every client.
    """
    return [
        _binary("mooncake_master"),
        f"--rpc_address={host}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={host}",
        f"--metrics_port={metrics_port}",
        f"--default_kv_lease_ttl={lease_ms}",
        f"--put_start_release_timeout_sec={RELEASE_TIMEOUT_S}",
        f"--client_ttl={CLIENT_TTL_S}",
        "--enable_metric_reporting=false",
    ]


def owner_command(
    *,
    master: str,
    port: int,
    segment_bytes: int,
    host: str = "127.0.0.1",
    threads: int = 2,
    protocol: str = "tcp",
) -> list[str]:
    """The command line of a process that owns `segment_bytes` of the store's memory.

    Args:
        master: the master's `host:rpc_port`.
        port: where the engines of this node attach; `host:port` is their `store.sidecar`.
        segment_bytes: memory to lend, in bytes: 0, or at least `MIN_SEGMENT_BYTES`.
        host: this node's name in the store; other nodes must reach it.
        threads: threads that serve attached engines.
        protocol: `tcp` or `rdma`.

    Raises:
        ConfigError: `segment_bytes` is too small.
    """
    if segment_bytes < 0 or 0 < segment_bytes < MIN_SEGMENT_BYTES:
        raise ConfigError(f"a segment has at least {MIN_SEGMENT_BYTES} bytes (16 MiB), or 0, not {segment_bytes}")
    return [
        _binary("mooncake_client"),
        f"--master_server_address={master}",
        "--metadata_server=P2PHANDSHAKE",
        f"--host={host}",
        f"--port={port}",
        f"--global_segment_size={segment_bytes}",
        f"--threads={threads}",
        f"--protocol={protocol}",
    ]


def mooncake_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what these processes, and clients in engines, need; what `base` sets already stays."""
    return {**_DEFAULTS, **base}


def _connect(address: str, timeout: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout)
    except (ValueError, OverflowError) as error:
        raise OSError(f"{address!r} is not host:port") from error


def port_answers(address: str, *, timeout: float = 1.0) -> bool:
    """Whether something accepts connections at `host:port` within `timeout` seconds."""
    try:
        with _connect(address, timeout):
            return True
    except OSError:
        return False


class Answer(enum.Enum):
    """What comes of speaking to a process: it may run, hang, or not be there."""

    RUNS = "runs"
    HANGS = "hangs"
    GONE = "gone"


def rpc_answers(address: str, *, timeout: float = 1.0) -> bool:
    """Whether a Mooncake process (a master, or an owner on its own port) runs at `host:port`; see `speak`."""
    return speak(address, timeout=timeout) is Answer.RUNS


def speak(address: str, *, timeout: float = 1.0) -> Answer:
    """Whether a Mooncake process (a master, or an owner on its own port) runs at `host:port`, not only listens.

    The kernel accepts connections for a process that hangs, and attaching to such a one holds Python's GIL for 30
    seconds. Mooncake's RPC servers hang up on a header that is none, so a few bytes tell, in under a millisecond.
    """
    try:
        with _connect(address, timeout) as connection:
            connection.settimeout(timeout)
            connection.sendall(bytes(64))
            connection.recv(1)
            return Answer.RUNS
    except ConnectionResetError:  # hung up while bytes of ours were unread
        return Answer.RUNS
    except TimeoutError:
        return Answer.HANGS
    except OSError:
        return Answer.GONE


def _ask(metrics: str, path: str, timeout: float) -> bytes | None:
    host, _, port = metrics.rpartition(":")
    try:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)  # knows no proxies
        try:
            connection.request("GET", path)
            return connection.getresponse().read(_MAX_ANSWER_BYTES)
        finally:
            connection.close()
    except (OSError, ValueError, OverflowError, http.client.HTTPException):
        return None


def master_is_ready(metrics: str, *, timeout: float = 1.0) -> bool:
    """Whether the master with the metrics port at `host:port` serves."""
    answer = _ask(metrics, "/health", timeout)
    try:
        return answer is not None and msgspec.json.decode(answer, type=_Health).service_ready
    except msgspec.MsgspecError:
        return False


def segments(metrics: str, *, timeout: float = 1.0) -> list[Segment]:
    """The segments that the master with the metrics port at `host:port` knows; empty while it does not answer."""
    return _segments(metrics, timeout) or []


def memory(metrics: str, *, timeout: float = 1.0) -> Memory | None:
    """What the store has, and has used; None while its master does not answer."""
    known = _segments(metrics, timeout)
    if known is None:
        return None
    return Memory(sum(one.size_bytes for one in known), sum(one.allocator_used_bytes for one in known))


def _segments(metrics: str, timeout: float) -> list[Segment] | None:
    answer = _ask(metrics, "/get_segments_detail", timeout)
    try:
        return None if answer is None else msgspec.json.decode(answer, type=_Segments).segments
    except msgspec.MsgspecError:
        return None
