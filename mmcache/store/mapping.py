"""Memory of this process's own, for stores that do not share another's."""

from __future__ import annotations

import ctypes
import mmap
from typing import Final

from mmcache.errors import StoreUnavailable
from mmcache.store.base import Region

kept: Final[list[mmap.mmap]] = []
"""What stays mapped while the process lives, for tensors that are still held."""


def map_region(nbytes: int) -> tuple[Region, mmap.mmap]:
    """Anonymous page-aligned memory, which is there for as long as its mapping is referred to.

    Raises:
        StoreUnavailable: there is not so much of it.
    """
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, OverflowError) as error:
        raise StoreUnavailable(f"no {nbytes} bytes of memory: {error}") from error
    return Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes), memory
