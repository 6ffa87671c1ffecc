"""The `mooncake` package, imported when it is first needed, and this process's clients of it."""

from __future__ import annotations

import os
from typing import Any, Final, Protocol

from mmcache.errors import StoreUnavailable
from mmcache.store.launch import mooncake_environment, mooncake_folder


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

    def batch_get_replica_desc(self, names: list[str], /) -> dict[str, list[Any]]:
        """Where the objects are; always empty on an attached client."""

    def close(self) -> int:
        """End it. Holds the GIL for about a second."""


_CLIENT_DEFAULTS: Final = {
    "GLOG_minloglevel": "3",  # every code comes back typed; a log line for each miss helps nobody
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",  # of 20, over which `setup` would hold the GIL for two minutes
}

_kept: list[Binding] = []
"""Clients of this process that are not closed. Held here, so that no destructor runs under a call that hangs, nor in a
forked child, where it would hang itself."""


def new_client() -> Binding:
    """A client that is not set up yet. It is kept alive until `forget`.

    Raises:
        StoreUnavailable: the package or a library that it needs is missing; the message says which.
    """
    mooncake_folder()  # a clear error when the package is not there at all
    for name, value in mooncake_environment(_CLIENT_DEFAULTS).items():
        os.environ.setdefault(name, value)  # for good: some are read at the first transfer only
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415
    except ImportError as error:
        raise StoreUnavailable(_explain(error)) from error
    client: Binding = MooncakeDistributedStore()
    _kept.append(client)
    return client


def forget(client: Binding) -> None:
    """Let go of a client that was closed, or never set up."""
    _kept[:] = [kept for kept in _kept if kept is not client]


def _explain(error: ImportError) -> str:
    message = str(error)
    if "libcuda" in message or "libcudart" in message:
        return f"the installed Mooncake needs CUDA ({message}); without a GPU install 'mmcache[cpu]' instead"
    if any(library in message for library in ("libibverbs", "librdmacm", "libnuma")):
        return f"Mooncake needs a system library ({message}): apt-get install libibverbs1 librdmacm1 libnuma1"
    return f"Mooncake cannot be imported: {message}"
