"""Memory of this process's own, for stores that do not share another's."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from typing import Final

from mmcache.errors import StoreUnavailable
from mmcache.store.base import Region

kept: Final[list[mmap.mmap]] = []
"""What stays mapped while the process lives, for tensors that are still held."""


_MADV_REMOVE: Final = 9
_libc: Final = ctypes.CDLL(None)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def release_pages(region: Region, but_for: Mapping[int, int]) -> None:
    """Let go of the pages of a shared mapping, but for some extents (bytes by offset). It stays mapped, with zeros."""
    start = 0
    for offset, nbytes in [*sorted(but_for.items()), (region.nbytes // mmap.PAGESIZE * mmap.PAGESIZE, 0)]:
        if offset > start:
            _libc.madvise(region.address + start, offset - start, _MADV_REMOVE)
        start = offset + nbytes


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
