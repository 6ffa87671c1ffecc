"""The three stores of the contract. On Mooncake, the memory is owned by a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from cluster import MooncakeProcesses
from stores import CAPACITY, LEASE_S, Attach, mooncake_store

from mmcache.store.base import Store
from mmcache.store.memory import MemoryStore, MemoryWorld


@pytest.fixture(scope="session", params=["memory", "sidecar", "embedded"])
def attach(request: pytest.FixtureRequest) -> Iterator[Attach]:
    """Attaches a store of each kind to one world of 64 MiB whose leases last two seconds; all end with the session."""
    with ExitStack() as stack:
        if request.param == "memory":
            world = MemoryWorld(capacity=CAPACITY, lease_s=LEASE_S)

            def build() -> Store:
                return MemoryStore(world)
        else:
            processes = stack.enter_context(MooncakeProcesses())
            processes.start_master(lease_ms=int(LEASE_S * 1000))
            processes.start_owner(CAPACITY)

            def build() -> Store:
                return mooncake_store(processes, request.param)

        def attach_for_the_session() -> Store:
            store = build()
            stack.callback(store.close)
            return store

        yield attach_for_the_session


@pytest.fixture(scope="session")
def store(attach: Attach) -> Store:
    """One of them, for tests that leave it as it was."""
    return attach()
