"""What holds a block of a pool for as long as anything is made over its memory."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from mmcache.memory.block import Block

if TYPE_CHECKING:
    from mmcache.memory.pool import RegisteredPool


class Export(ctypes.Array[ctypes.c_ubyte]):
    """A writable buffer over a pool's whole region. It holds one block until it, and all made over it, is gone.

    Each pool has a subclass of its region's length (`export_type`); one for each block's length costs 8 µs to make.
    """

    _type_ = ctypes.c_ubyte
    _length_ = 0
    __slots__ = ("block", "pool")

    block: Block
    pool: RegisteredPool

    def __del__(self) -> None:
        self.pool._lock.defer(self.block)


def export_type(nbytes: int) -> type[Export]:
    """The type of exports of a region of so many bytes."""

    class RegionExport(Export):
        _length_ = nbytes
        __slots__ = ()

    return RegionExport
