"""The `mooncake` package, imported when it is first needed, and this process's clients of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final, Protocol

from mmcache.errors import StoreUnavailable
from mmcache.store.launch import mooncake_environment, mooncake_folder, rpc_answers


class Binding(Protocol):
    """What we call of `mooncake.store.MooncakeDistributedStore`. Codes: see `outcomes`."""

    def setup(
        self,
        hostname: str,
        metadata: str,
        segment_bytes: int,
        local_buffer_bytes: int,
        protocol: str,
        devices: str,
        master: str,
        /,
    ) -> int:
        """Become a client in this process. Holds the GIL throughout."""

    def setup_dummy(self, mem_pool_bytes: int, local_buffer_bytes: int, address: str, /) -> int:
        """Attach to the `mooncake_client` at `address`. Holds the GIL throughout: 30 s when that process hangs."""

    def alloc_from_mem_pool(self, nbytes: int, /) -> int:
        """Address of memory that the `mooncake_client` can be made to share; 0 on failure. It is never unmapped."""

    def register_buffer(self, address: int, nbytes: int, /) -> int:
        """Register memory of our own, or share what `alloc_from_mem_pool` gave."""

    def health_check(self) -> int:
        """0 while the last ping was answered. Asks nobody."""

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Sizes or codes. Of equal names only one buffer is filled."""

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], /) -> list[int]:
        """Codes; 0 also when another writer holds the name and nothing was stored."""

    def batch_is_exist(self, names: list[str], /) -> list[int]:
        """1, 0 or a code; takes a lease."""

    def batch_remove(self, names: list[str], /) -> list[int]:
        """Codes."""

    def get_size(self, name: str, /) -> int:
        """Bytes or a code; takes a lease."""

    def close(self) -> int:
        """End it. Holds the GIL for about a second."""


class TransferBinding(Protocol):
    """What we call of `mooncake.engine.TransferEngine`. Codes: 0, or something else."""

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str, /) -> int:
        """Be able to reach others."""

    def register_memory(self, address: int, nbytes: int, /) -> int:
        """Allow memory of our own to be read into; TCP does not ask for it."""

    def batch_transfer_async_read(
        self, endpoint: str, addresses: list[int], remote_addresses: list[int], sizes: list[int], /
    ) -> int:
        """Begin to read from another process's memory; returns its number, 0 or -1 as of 64 bits: it could not begin.

        It refuses what is not lent.
        """

    def get_batch_transfer_status(self, numbers: list[int], /) -> int:
        """Wait for these, a core busy with it, and forget them. 0: all was read; else nobody knows what was."""


_GLOG_FATAL: Final = 3
_QUIET: Final = not {"MC_LOG_LEVEL", "GLOG_minloglevel"} & os.environ.keys()
"""Unless the user asked for Mooncake's log."""
_CLIENT_DEFAULTS: Final = {
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # of 20, over which `setup` would hold the GIL for two minutes
}
_STOPS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FIRST_PING_PAUSE_S: Final = 0.002
_RETURN_TIMEOUT_S: Final = 0.5
_CALM_TIMEOUT_S: Final = 3.0
_CALM_PAUSE_S: Final = 0.05
_allocating: Final = threading.Lock()

_sidecars: list[tuple[Binding, str]] = []
"""Of the clients of this process, those that are attached to a `mooncake_client`, with its address."""
_kept: list[Binding] = []
"""Clients of this process that are set up. Each is held by a reference that is only given back when it has ended, so
that no destructor runs under a call that hangs, nor when an interpreter ends that could not end it: it would wait for a
process that hangs, and in a forked child for ever."""


def set_up_embedded(*, hostname: str, metadata: str, protocol: str, devices: str, master: str) -> Binding:
    """A client in this process that lends no memory to the store.

    Raises:
        StoreUnavailable: the set-up failed, or Mooncake is not installed; the message says which.
    """
    client = _new_client()
    code = client.setup(hostname, metadata, 0, 0, protocol, devices, master)
    _quieten("mooncake.store")
    if code != 0:
        raise StoreUnavailable(f"the set-up as a client of the master at {master} failed (Mooncake's code {code})")
    _keep(client)
    return client


def attach_to_sidecar(address: str, *, region_bytes: int) -> Binding:
    """A client of the `mooncake_client` at `host:port`. It refuses every call until `wait_for_ping`.

    Raises:
        StoreUnavailable: attaching failed, or Mooncake is not installed; the message says which.
    """
    client = _new_client()
    with _allocating:
        _wait_for_calm()
        code = client.setup_dummy(region_bytes, 0, address)
    _quieten("mooncake.store")
    if code != 0:
        raise StoreUnavailable(f"attaching to the mooncake_client at {address} failed (Mooncake's code {code})")
    _keep(client)
    _sidecars.append((client, address))
    return client


def wait_for_ping(client: Binding, address: str, *, timeout: float) -> None:
    """Wait until the `mooncake_client` has answered for the first time: for a few milliseconds, where it is well.

    Raises: StoreUnavailable, after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while client.health_check() != 0:
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"the mooncake_client at {address} let us attach, but answers no ping")
        time.sleep(_FIRST_PING_PAUSE_S)


def allocate_shared(client: Binding, nbytes: int) -> int:
    """Address of memory that can be shared with the `mooncake_client`; 0 on failure. Raises StoreUnavailable."""
    with _allocating:
        _wait_for_calm()
        return client.alloc_from_mem_pool(nbytes)


def _wait_for_calm() -> None:
    """Wait while a client of this process is about to reach its `mooncake_client` again. Raises StoreUnavailable.

    Each client, on a thread of its own, then walks through all shared memory of the process, in a vector that it does
    not lock: to allocate meanwhile was seen to crash the process.
    """
    deadline = time.monotonic() + _CALM_TIMEOUT_S
    for client, address in list(_sidecars):
        while client.health_check() != 0 and rpc_answers(address, timeout=_RETURN_TIMEOUT_S):
            if time.monotonic() > deadline:
                raise StoreUnavailable(f"another attachment of this process is still being renewed at {address}")
            time.sleep(_CALM_PAUSE_S)


def end(client: Binding) -> None:
    """Close a client that nothing uses any more. Holds the GIL for about a second."""
    client.close()
    _sidecars[:] = [kept for kept in _sidecars if kept[0] is not client]
    if client in _kept:
        _kept.remove(client)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(client))


def _keep(client: Binding) -> None:
    _kept.append(client)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))  # what ends with the interpreter would not hold it for long


def prepare_for_exit() -> None:
    """To be called when the interpreter begins to end: what hangs in Mooncake must neither keep nor abort the process.

    Where a client could not be ended, Mooncake's own exit handler would wait half a minute for a process that hangs:
    so the process ends without it. And a thread whose call ends only then is ended, before Python 3.14, where it asks
    for the GIL, in a destructor that must not be left like that, for which the C++ runtime would abort: it stands still
    instead.
    """
    if not _kept:
        return
    with contextlib.suppress(OSError, AttributeError):  # where the C library has no on_exit, all is as it was
        libc = ctypes.CDLL(None)
        libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
        standard = ctypes.CDLL("libstdc++.so.6")
        standard._ZSt13set_terminatePFvvE(ctypes.cast(libc.pause, ctypes.c_void_p))


os.register_at_fork(after_in_child=prepare_for_exit)


def new_transfer_engine() -> TransferBinding:
    """One that is not initialised. Raises StoreUnavailable: Mooncake cannot be imported."""
    with _importing():
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    transfer_engine: TransferBinding = TransferEngine()
    _quieten("mooncake.engine")
    return transfer_engine


def _new_client() -> Binding:
    with _importing():
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
    client: Binding = MooncakeDistributedStore()
    _quieten("mooncake.store")
    return client


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    mooncake_folder()  # a clear error when the package is not there at all
    for name, value in mooncake_environment(_CLIENT_DEFAULTS).items():
        os.environ.setdefault(name, value)  # for good: some are read at the first transfer only
    try:
        with _signals_later():
            yield
    except ImportError as error:
        raise StoreUnavailable(_explain(error)) from error


@contextlib.contextmanager
def _signals_later() -> Iterator[None]:
    """Call handlers of signals that ask a process to end after the block, not within it.

    What one raises while Mooncake is imported becomes an ImportError, and no later import succeeds in this process.
    """
    if threading.current_thread() is not threading.main_thread():  # others run no handlers
        yield
        return
    handlers = {number: handler for number in _STOPS if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for stop, frame in came:
            handlers[signal.Signals(stop)](stop, frame)


def _quieten(extension: str) -> None:
    """Log nothing below FATAL: every failure comes back as a code, and to Mooncake a buffer too small is an ERROR.

    No variable says that, and the first set-up resets glog's own, so that its flag is set before and after.
    """
    if not _QUIET:
        return
    with contextlib.suppress(OSError, ValueError):  # a build without that symbol only logs more
        ctypes.c_int.in_dll(
            ctypes.CDLL(sys.modules[extension].__file__), "_ZN3fLI17FLAGS_minloglevelE"
        ).value = _GLOG_FATAL


def _explain(error: ImportError) -> str:
    message = str(error)
    if "libcuda" in message or "libcudart" in message:
        return f"the installed Mooncake needs CUDA ({message}); without a GPU install 'mmcache[cpu]' instead"
    if any(library in message for library in ("libibverbs", "librdmacm", "libnuma")):
        return f"Mooncake needs a system library ({message}): apt-get install libibverbs1 librdmacm1 libnuma1"
    return f"Mooncake cannot be imported: {message}"
