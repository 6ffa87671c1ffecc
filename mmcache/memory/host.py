"""Host memory, and torch tensors that live in a pool's blocks."""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
from collections.abc import Callable, Sequence

import torch

from mmcache.entry import DTYPE_BYTES
from mmcache.errors import InvalidEntry, LifecycleError
from mmcache.memory.pool import Block, Export

# Older torch lacks some of the small floats.
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES if hasattr(torch, name)}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in the entry format, such as `bfloat16`. Raises: InvalidEntry if it has none (quantised)."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise InvalidEntry(f"a tensor of {dtype} cannot be an entry") from None


def dtype_of(name: str) -> torch.dtype:
    """The dtype of that name. Raises: InvalidEntry for a name that is unknown to the format or to this torch."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise InvalidEntry(f"torch {torch.__version__} has no dtype {name!r}") from None


class HostMemory:
    """Anonymous page-aligned memory of this process.

    It is unmapped when nothing refers to `mapping` any more, which a pool over it is given as its `owner`; so a tensor
    in it outlives `close`, and the pool.
    """

    def __init__(self, nbytes: int) -> None:
        self._mapping: mmap.mmap | None = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._nbytes = nbytes
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._mapping))

    @property
    def mapping(self) -> mmap.mmap:
        """What keeps the memory mapped while it is referred to. Raises: LifecycleError after close."""
        if self._mapping is None:
            raise LifecycleError("this memory is closed")
        return self._mapping

    @property
    def address(self) -> int:
        """Where it starts. Raises: LifecycleError after close."""
        self.mapping  # noqa: B018  refused after close
        return self._address

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._nbytes

    def close(self) -> None:
        """Give the memory up; idempotent. It goes at once, or with the last pool or tensor that is over it."""
        self._mapping = None


def tensor_maker(
    block: Block, *, offset: int, dtype: torch.dtype, shape: Sequence[int]
) -> Callable[[Export], torch.Tensor]:
    """What makes contiguous CPU tensors over the bytes from `offset` in a block, from exports of it, without a copy.

    All checks are made here, once. A tensor's storage holds the block: views and slices of it do too, after the tensor
    itself is gone. A tensor without elements holds nothing.

    Raises: ValueError if such a tensor does not lie within the block.
    """
    size = tuple(shape)
    count = math.prod(size)
    if offset < 0 or min(size, default=0) < 0 or offset + count * dtype.itemsize > block.nbytes:
        raise ValueError(f"a tensor of {dtype} and shape {size} at {offset} does not lie within {block}")
    if not count:
        return lambda _: torch.empty(size, dtype=dtype)
    flat = functools.partial(torch.frombuffer, dtype=dtype, count=count, offset=block.offset + offset)
    if len(size) == 1:
        return flat
    # In place (the size is the same): `view` would make a second tensor, for twice as much time.
    return (lambda export: flat(export).resize_(*size)) if size else (lambda export: flat(export).resize_(()))


def copy_into(view: memoryview, tensor: torch.Tensor) -> None:
    """Copy a dense tensor's bytes, in the order of its elements, into a writable view of exactly its size in bytes.

    One copy, whatever its strides and device, and bit for bit, whatever its dtype.

    Raises: ValueError if the sizes differ.
    """
    if view.nbytes != tensor.numel() * tensor.itemsize:
        raise ValueError(f"{tensor.numel() * tensor.itemsize} bytes of tensor do not fill {view.nbytes} bytes")
    if view.nbytes == 0:
        return
    bits = _BITS[tensor.itemsize]
    source = tensor.detach().resolve_conj().resolve_neg().view(bits)
    torch.frombuffer(view, dtype=bits).view(source.shape).copy_(source)
