"""The cluster of a configuration: who listens, who really answers, and whether an object goes there and back."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from mmcache.cli.doctor.children import Ended, run_child
from mmcache.cli.doctor.finding import Finding, failing, ok, warning
from mmcache.cli.probe import STORE_ONLY
from mmcache.config import ControlSettings, Settings, to_yaml
from mmcache.control.messages import (
    PROTOCOL_VERSION,
    ControllerMessage,
    Goodbye,
    Hello,
    MalformedMessage,
    Refused,
    Welcome,
    decode_from_controller,
    encode,
)
from mmcache.errors import ConfigError
from mmcache.store.launch import master_is_ready, port_answers, rpc_answers

if TYPE_CHECKING:
    from mmcache.control.curve import BrokenOff, ClientKeys

ANSWER_S: Final = 2.0
"""How long each process has to accept a connection, and to answer."""
PROBE_S: Final = 25.0
"""Two transfers of 10 s at most, and the set-up."""
_LOOPBACK: Final = ("127.", "localhost", "[::1]")


def mooncake_process(name: str, address: str, setting: str, *, timeout: float = ANSWER_S) -> Finding:
    """A master or a sidecar: listens, and is not only a socket that the kernel holds for a process that hangs."""
    if not port_answers(address, timeout=timeout):
        return failing(name, f"nobody accepts connections at {address}", f"Start it there, or correct {setting}.")
    if not rpc_answers(address, timeout=timeout):
        advice = f"It hangs, is stopped, or is no Mooncake process: see its log, restart it, or correct {setting}."
        return failing(name, f"{address} accepts connections and does not answer", advice)
    return ok(name, f"answers at {address}")


def metrics(address: str | None, *, timeout: float = ANSWER_S) -> Finding:
    """The master's HTTP port, which only `mmcache stats` needs."""
    name = "master metrics"
    if address is None:
        return ok(name, "store.metrics is not set: mmcache stats cannot tell of segments")
    if not master_is_ready(address, timeout=timeout):
        advice = "See the master, if that does not answer either; else correct store.metrics."
        return warning(name, f"nobody at {address} says of a master that it is ready", advice)
    return ok(name, f"ready, says {address}")


def controller_of(settings: ControlSettings, *, timeout: float = ANSWER_S) -> Finding:
    """The controller of the settings, by the keys of the settings."""
    from mmcache.control.curve import client_keys  # noqa: PLC0415 - imports zmq: see `say_hello`

    try:
        keys = client_keys(settings)
    except ConfigError as error:
        return failing("controller", f"not asked: {error}", "Correct the file, or the setting.")
    return controller(settings.address, keys=keys, timeout=timeout)


def controller(address: str, *, keys: ClientKeys | None = None, timeout: float = ANSWER_S) -> Finding:
    """The controller: listens, takes our key, and welcomes a client that speaks our protocol."""
    name, endpoint = "controller", address.removeprefix("tcp://")
    if not port_answers(endpoint, timeout=timeout):
        advice = "Start `mmcache controller` there, or correct control.address."
        return failing(name, f"nobody accepts connections at {address}", advice)
    from mmcache.control.curve import BrokenOff  # noqa: PLC0415 - as above

    answer = say_hello(address, keys=keys, timeout=timeout)
    match answer:
        case Welcome(version=version) if version == PROTOCOL_VERSION:
            return ok(name, f"answers at {address}, protocol {version}")
        case Welcome(version=version):
            detail = f"{address} speaks protocol {version}, this mmcache {PROTOCOL_VERSION}"
            return failing(name, detail, "Install the same release of mmcache at both ends.")
        case Refused(reason=reason):
            advice = "Of another protocol: install the same release at both ends. Of sessions: raise max_sessions."
            return failing(name, f"{address} refuses us: {reason}", advice)
        case BrokenOff(trouble=trouble):
            return failing(name, trouble, "docs/operations.md, Keys, says what belongs where.")
        case None:
            advice = "It hangs, is stopped, or is no controller: see its log, restart it, or correct control.address."
            return failing(name, f"{address} accepts connections and answers no hello", advice)
        case _:
            detail = f"{address} answers a hello with {type(answer).__name__}"
            return failing(name, detail, "Install the same release of mmcache at both ends.")


def say_hello(address: str, *, keys: ClientKeys | None, timeout: float) -> ControllerMessage | BrokenOff | None:
    """What the controller answers to a hello; None: nothing that could be understood, in time."""
    import zmq  # noqa: PLC0415 - a doctor must be able to say that it is missing

    from mmcache.control.curve import Handshake  # noqa: PLC0415 - as above

    deadline = time.monotonic() + timeout

    def left_ms() -> int:
        return max(0, round(1000 * (deadline - time.monotonic())))

    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.set(zmq.LINGER, 0)
        peer.set(zmq.IMMEDIATE, 1)
        if keys is not None:
            keys.secure(peer)
        poller = zmq.Poller()
        with contextlib.closing(Handshake(peer, address, keys)) as handshake:
            poller.register(peer, zmq.POLLOUT)
            poller.register(handshake.events, zmq.POLLIN)
            peer.connect(address)
            while peer not in (ready := dict(poller.poll(left_ms()))):
                if not ready:
                    return None
                if (end := handshake.broken_off()) is not None:
                    return end
        peer.send(encode(Hello(PROTOCOL_VERSION, f"doctor:{os.getpid()}", socket.gethostname()[:512], os.getpid())))
        if not peer.poll(left_ms()):
            return None
        try:
            answer = decode_from_controller(peer.recv())
        except MalformedMessage:
            return None
        if isinstance(answer, Welcome):
            peer.set(zmq.LINGER, 200)
            peer.send(encode(Goodbye(answer.term, answer.session)))
        return answer


def run_probe(settings: Settings, *, timeout: float = PROBE_S) -> Ended:
    """A process that puts an object into the store and reads it back. What Mooncake logs is among its words."""
    command = [sys.executable, "-m", "mmcache.cli.probe", STORE_ONLY, "client.yaml"]
    files = {"client.yaml": to_yaml(settings)}
    return run_child(command, timeout=timeout, files=files, MC_LOG_LEVEL="ERROR", GLOG_minloglevel="2")


def store(ended: Ended, settings: Settings) -> Finding:
    """Whether an object went into the store and back, by what the probe said."""
    name = "put and read"
    if ended.status == 0:
        how = "the sidecar" if "attached as sidecar" in ended.output else "an embedded client"
        if settings.store.sidecar is not None and how != "the sidecar" and settings.store.attach != "embedded":
            advice = "Slower on this node: start the mooncake_client at store.sidecar, or leave the setting out."
            return warning(name, f"an object went there and back, but through {how}", advice)
        return ok(name, f"an object went there and back, through {how}")
    detail = "the probe did not end in time" if ended.status is None else ended.last_lines
    return failing(name, detail, _advice_for(ended, settings))


def _advice_for(ended: Ended, settings: Settings) -> str:
    output = ended.output
    if "ersion mismatch" in output:
        return "Install the same release of Mooncake on every node: its set-up refuses a master of another."
    if "no_space" in output:
        return "The store is full of leased objects, or nobody lends it memory: start a mooncake_client with a segment."
    if "not installed" in output or "cannot be imported" in output or "needs a system library" in output:
        return "See the checks of the wheel and of shared libraries."
    if "mooncake_client" in output and settings.store.sidecar is not None:
        return "The sidecar must run in this network namespace, and on this machine."
    if not settings.store.master.startswith(_LOOPBACK) and settings.store.hostname.startswith(_LOOPBACK):
        return "store.hostname is loopback, but the master is elsewhere: set it to an address that other nodes reach."
    return "See the logs of the master and of the owners of memory; a firewall must let their data ports through."


def unchecked(name: str, because: str) -> Finding:
    """A check that could only fail for a reason that another line has told."""
    return failing(name, f"not tried: {because}", "")
