"""One block of a pool, its states, and the local entry that it can be."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from mmcache.errors import MMCacheError


class BlockStateError(MMCacheError, RuntimeError):
    """A block was asked for what its state forbids (released twice, trimmed once ready, …): a fault in the caller."""


class BlockState(enum.Enum):
    """filling → ready → freed; filling → freed; either of the first two → quarantined, which is for good."""

    FILLING = "filling"
    READY = "ready"
    FREED = "freed"
    QUARANTINED = "quarantined"


class Block:
    """A part of a pool's region. Everything here is the pool's to change, and for others to read."""

    __slots__ = ("address", "exports", "holds", "name", "nbytes", "offset", "reserved", "state")

    def __init__(self, address: int, offset: int, nbytes: int, reserved: int) -> None:
        self.address = address
        """Where it starts, in this process."""
        self.offset = offset
        """Where it starts, in bytes from the start of the region."""
        self.nbytes = nbytes
        """Usable bytes: what was asked for, or trimmed to."""
        self.reserved = reserved
        """Bytes that it takes up in the pool."""
        self.state = BlockState.FILLING
        self.holds = 1
        """Holds that somebody must end by name (`unhold`, `release`)."""
        self.exports = 0
        """Holds that end with an exported object."""
        self.name: str | None = None
        """The name under which the local table keeps it."""

    def __repr__(self) -> str:
        return (
            f"<Block {self.address:#x} {self.nbytes} bytes {self.state.value}"
            f" holds={self.holds} exports={self.exports} name={self.name!r}>"
        )


class ReadyEntry(NamedTuple):
    """What a ready block holds."""

    name: str | None
    """Its store name, under which the local table keeps it; None if it does not."""
    block: Block
    value: Any
    """What the caller keeps with it, as it was given (plain data: it is dropped under the pool's lock)."""
