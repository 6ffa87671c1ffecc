"""Proves that a cluster serves, and exits with 0 or a reason: an object goes into the store and comes back whole, and
the controller opens a session. `python -m mmcache.cli.probe [--store-only] CLIENT_YAML`; its caller sets the deadline.

Prints how it attached to the store.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import time
from typing import Final

from mmcache.config import ControlSettings, StoreSettings, load
from mmcache.control.channel import ControlChannel
from mmcache.control.curve import client_keys
from mmcache.errors import ControllerUnavailable, MMCacheError, StoreUnavailable
from mmcache.store.base import Outcome
from mmcache.store.mooncake import MooncakeStore

STORE_ONLY: Final = "--store-only"
_NBYTES: Final = 4096
_TIMEOUT_S: Final = 10.0


def main() -> None:
    """Prove it, or exit with the reason."""
    try:
        *options, path = sys.argv[1:]
        settings = load(path, environ={})
        _prove_store(settings.store)
        if STORE_ONLY not in options:
            _prove_controller(settings.control)
    except MMCacheError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _prove_store(settings: StoreSettings) -> None:
    """Put random bytes and read them back. They stay until the store evicts them: the read has leased them."""
    store = MooncakeStore.from_settings(settings, region_bytes=2 * _NBYTES, timeout=_TIMEOUT_S)
    print(f"attached as {store.kind}", flush=True)
    with contextlib.closing(store):
        region = store.allocate_region(2 * _NBYTES)
        source, target = region.address, region.address + _NBYTES
        name, content = f"probe.{secrets.token_hex(16)}", secrets.token_bytes(_NBYTES)
        ctypes.memmove(source, content, _NBYTES)
        deadline = time.monotonic() + _TIMEOUT_S
        put = store.put_from([name], [source], [_NBYTES], deadline=deadline)[0]
        if put.outcome is not Outcome.OK:
            raise StoreUnavailable(f"a put into the store ended as {put.outcome.value}")
        read = store.read_into([name], [target], [_NBYTES], deadline=deadline)[0]
        if read.outcome is not Outcome.OK or ctypes.string_at(target, _NBYTES) != content:
            raise StoreUnavailable(f"a read from the store ended as {read.outcome.value}, or with other bytes")


def _prove_controller(settings: ControlSettings) -> None:
    channel = ControlChannel(settings.address, name=f"probe:{os.getpid()}", keys=client_keys(settings))
    with contextlib.closing(channel):
        channel.start()
        if channel.wait_fresh(_TIMEOUT_S) is None:
            raise ControllerUnavailable(f"the controller at {settings.address} opened no session: {channel.trouble}")


if __name__ == "__main__":
    main()
