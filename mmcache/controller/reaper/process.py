"""The reaper's child: `python -m mmcache.controller.reaper.process`, started by `child`, for one controller.

A client of the store that lends no memory. It is a process because Mooncake holds the interpreter's lock for seconds
while it attaches, and because a crash in its native code ends the process: neither may be the controller's. It never
ends in order: it has nothing to say goodbye to, and its parent, or the kernel in its name, kills it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from mmcache.controller.reaper.describing import Describer
from mmcache.controller.reaper.listing import listing
from mmcache.controller.reaper.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    Attach,
    Attached,
    Describe,
    Failed,
    List,
    Listed,
    Remove,
    Removed,
    Renew,
    Renewed,
    decode_to_child,
    encode,
)
from mmcache.errors import MMCacheError

if TYPE_CHECKING:
    from mmcache.config import StoreSettings
    from mmcache.store.mooncake import MooncakeStore

ATTACH_TIMEOUT_S: Final = 3.0
"""How long the master, and a sidecar, have to show that they run."""
REMOVE_TIMEOUT_S: Final = 5.0
RENEW_TIMEOUT_S: Final = 5.0
LIST_TIMEOUT_S: Final = 5.0
"""For each piece of the list of names."""
_REGION_BYTES: Final = 1 << 16
"""What an attachment to a sidecar is told of memory that is never allocated."""
_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one controller until it ends. Returns the exit status: 1 where the store could not be attached to."""
    parser = argparse.ArgumentParser(prog="mmcache.controller.reaper.process", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of a SOCK_SEQPACKET socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the controller")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s mmcache reaper {os.getpid()} %(levelname)s %(name)s: %(message)s"
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's business
    if not _tie_to(options.parent):
        return 0
    try:
        return _serve(socket.socket(fileno=options.socket))
    except OSError as error:
        _log.info("the controller has gone: %s", error.strerror)
        return 0


def _serve(connection: socket.socket) -> int:
    store: MooncakeStore | None = None
    describer: Describer | None = None
    while packet := connection.recv(MAX_MESSAGE_BYTES):
        match decode_to_child(packet):
            case List() as asked:
                _list(connection, asked)
            case Attach(settings) if store is None:
                try:
                    store = _attach(settings)
                except MMCacheError as error:
                    connection.send(encode(Failed(str(error)[:MAX_REASON])))
                    return 1
                describer = Describer(settings)
                connection.send(encode(Attached(store.kind)))
            case Remove(number, names) if store is not None:
                outcomes = store.remove(names, deadline=time.monotonic() + REMOVE_TIMEOUT_S)
                connection.send(encode(Removed(number, outcomes)))
            case Renew(number, names) if store is not None:
                outcomes = store.renew(names, deadline=time.monotonic() + RENEW_TIMEOUT_S)
                connection.send(encode(Renewed(number, outcomes)))
            case Describe() as asked if describer is not None:
                _describe(connection, describer, asked)
            case message:
                raise TypeError(f"{type(message).__name__} at the wrong time")
    return 0


def _attach(settings: StoreSettings) -> MooncakeStore:
    from mmcache.store.mooncake import MooncakeStore  # noqa: PLC0415 (tied to the controller first)

    # No bytes are moved: whichever way reaches the master will do, and none needs RDMA.
    settings = msgspec.structs.replace(settings, attach="auto", protocol="tcp", devices="")
    return MooncakeStore.from_settings(settings, region_bytes=_REGION_BYTES, timeout=ATTACH_TIMEOUT_S)


def _list(connection: socket.socket, asked: List) -> None:
    try:
        for records in listing(asked.metrics, asked.lineage, timeout=LIST_TIMEOUT_S):
            connection.send(encode(Listed(asked.number, records, last=False)))
        connection.send(encode(Listed(asked.number, b"", last=True)))
    except MMCacheError as error:
        connection.send(encode(Failed(str(error)[:MAX_REASON])))


def _describe(connection: socket.socket, describer: Describer, asked: Describe) -> None:
    try:
        for described in describer.describe(_with_further(connection, asked)):
            connection.send(encode(described))
    except MMCacheError as error:
        connection.send(encode(Failed(str(error)[:MAX_REASON])))


def _with_further(connection: socket.socket, asked: Describe) -> Iterator[Describe]:
    """This one, and what has come meanwhile each time that another is looked for."""
    yield asked
    with contextlib.suppress(BlockingIOError):
        while packet := connection.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT):
            match decode_to_child(packet):
                case Describe() as further:
                    yield further
                case message:
                    raise TypeError(f"{type(message).__name__} at the wrong time")


def _tie_to(parent: int) -> bool:
    """Have the kernel kill this process when the thread that started it ends; False if its process has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:  # the end of the socket will tell as well
        _log.warning("cannot be tied to the controller: %s", os.strerror(ctypes.get_errno()))
    return os.getppid() == parent


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # Mooncake's own exit handler would wait for a store that hangs
