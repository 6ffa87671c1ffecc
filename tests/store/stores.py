"""Stores to test: attached to a test's own processes."""

from __future__ import annotations

from collections.abc import Callable

from cluster import MooncakeProcesses

from mmcache.store.base import Store
from mmcache.store.mooncake import MooncakeStore

LEASE_S = 2.0
CAPACITY = 64 << 20
"""Of the worlds that the contract runs on."""

Attach = Callable[[], Store]


def mooncake_store(processes: MooncakeProcesses, kind: str, *, lease_s: float = 10.0) -> MooncakeStore:
    return MooncakeStore.attach(
        master=processes.master.address,
        sidecar=processes.owners[0].address if processes.owners else None,
        attach=kind,
        lease_s=lease_s,
        region_bytes=1 << 20,
    )
