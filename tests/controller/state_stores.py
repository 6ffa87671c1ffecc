"""State stores for the tests of their contract: what is put into them, and all that can be seen of one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmcache.controller.state.base import AuditRecord, Invalidation, PinRecord, StateLimits, StateStore
from mmcache.controller.state.memory import MemoryStateStore
from mmcache.controller.state.sqlite import SqliteStateStore
from mmcache.key import Scope
from mmcache.selector import Selector

LINEAGE = "0123456789abcdef"
_IN_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def quick_folder() -> Iterator[Path]:
    """A folder on which fsync costs nothing, where there is one: most tests write often and lose no power."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None) as folder:
        yield Path(folder)


def made(number: int, **values: Any) -> Invalidation:
    """An invalidation of the model with its number."""
    plain = {"selector": Selector(model=f"m{number}"), "reason": "new weights", "actor": "ann", "at": 1.5}
    return Invalidation(number=number, **{**plain, **values})


def pinned(number: int, **values: Any) -> PinRecord:
    """A pin of the model with its id."""
    plain = {"selector": Selector(model=f"m{number}"), "until": 1e9, "reason": "popular", "actor": "ann"}
    return PinRecord(id=number, **{**plain, **values})


def did(action: str = "invalidate", **values: Any) -> AuditRecord:
    plain = {"at": 2.0, "actor": "ann", "role": "operator", "detail": {"number": 1}, "outcome": "done"}
    return AuditRecord(action=action, **{**plain, **values})


def scope(model: str) -> Scope:
    return Scope("tenant", model, "1", None, "image")


class SqliteStores:
    """A path, and the store that is open there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.db"
        self.store = SqliteStateStore.open(self.path)

    def reopened(self, limits: StateLimits | None = None) -> StateStore:
        self.store.close()
        self.store = SqliteStateStore.open(self.path, limits)
        return self.store


class MemoryStores:
    """What lies in memory, and the store that is open there."""

    def __init__(self) -> None:
        self.store = MemoryStateStore(LINEAGE)

    def reopened(self, limits: StateLimits | None = None) -> StateStore:
        self.store.close()
        self.store = self.store.copy()
        self.store._limits = limits or StateLimits()
        return self.store


Stores = SqliteStores | MemoryStores


def seen(store: StateStore) -> dict[str, Any]:
    """All that a store tells, but its lineage."""
    return {
        "head": store.head,
        "previous_ttl_ms": store.previous_ttl_ms,
        "held": store.held(),
        "pending": store.pending(),
        "page": store.page(None, 1000),
        "last_pin": store.last_pin,
        "pins": store.pins(),
        "scopes": store.scopes(),
        "settings": {name: store.setting(name) for name in ("a", "b", "c")},
        "audit": store.audit(None, 1000),
    }


def filled(store: StateStore) -> None:
    """Put something into every table."""
    store.begin_term(7, 5000)
    store.invalidate([made(1), made(2, idempotency_key="once")], audit=[did()])
    store.invalidate([made(3, selector=Selector(lora=None, mm_hash="é\x00\n"))], forget=[1])
    store.complete([1, 3], 9.0)
    store.add_scopes([scope("a"), scope("b")])
    store.set_setting("a", {"high": 0.9, "names": ["x", None, True]})
    store.change_pins([pinned(1), pinned(2, selector=Selector(lora=None, mm_hash="é\x00\n"))])
    store.change_pins([pinned(1, until=2e9)], [2])
    store.change_pins([pinned(3)])
    store.record(did("pin", detail={}, outcome="refused"))
