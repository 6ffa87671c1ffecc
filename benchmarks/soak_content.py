"""What each key of the soak must hold, so that any process can check every byte of any tensor, at the cost of a memcmp.

A key is a number. Its tensors are windows of one long random text that all processes derive from the same seed; two
keys look at different places, so that a tensor of another key, a torn one, or one that was written over differs.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from mmcache import Embedding, EmbeddingKey

KIB, MIB = 1 << 10, 1 << 20
_TEXT_BYTES = 32 * MIB
_LONGEST = 8 * MIB
_ALIGNMENT = 64
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
_SIZES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 2 * MIB, 4 * MIB, _LONGEST)
_WEIGHTS = (4, 4, 4, 4, 4, 4, 2, 1, 1)

_text = np.random.default_rng(20).integers(0, 256, _TEXT_BYTES, dtype=np.uint8)
_whole = torch.from_numpy(_text)
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Spec(NamedTuple):
    """One tensor of an entry, and where in the text its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def key_of(number: int) -> EmbeddingKey:
    return EmbeddingKey("soak", "1", f"item-{number}")


@lru_cache(maxsize=4096)
def specs(number: int) -> tuple[Spec, ...]:
    """The tensors of a key: mostly one of some common size, now and then of an odd one, or three of them."""
    choose = random.Random(number)
    dtype = choose.choice(_DTYPES)
    nbytes = choose.choices(_SIZES, _WEIGHTS)[0]
    if choose.random() < 0.2:
        nbytes = choose.randrange(KIB, 2 * MIB)
    count = 3 if choose.random() < 0.1 else 1
    elements = max(1, nbytes // count // dtype.itemsize)
    shape = (elements // 64, 64) if elements % 64 == 0 else (elements,)
    places = (_TEXT_BYTES - _LONGEST) // _ALIGNMENT
    names = ("embedding", "deepstack_0", "deepstack_1")[:count]
    return tuple(Spec(name, dtype, shape, choose.randrange(places) * _ALIGNMENT) for name in names)


def layout(number: int) -> tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]:
    """What a reader may say of the key's entry with `like`."""
    return tuple((spec.name, spec.dtype, spec.shape) for spec in specs(number))


def like(number: int) -> dict[str, torch.Tensor]:
    return {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs(number)}


def nbytes_of(number: int) -> int:
    return sum(spec.nbytes for spec in specs(number))


def tensors(number: int) -> dict[str, torch.Tensor]:
    """What an encoder makes of the key. Views of the text: not to be written."""
    return {
        spec.name: _whole[spec.offset : spec.offset + spec.nbytes].view(spec.dtype).view(spec.shape)
        for spec in specs(number)
    }


def metadata(number: int) -> dict[str, object]:
    return {"number": number}


def fault(number: int, embedding: Embedding) -> str | None:
    """What is wrong with an embedding of this key, in a few words; None when every byte is right."""
    if embedding.key != key_of(number):
        return f"has the key {embedding.key}"
    if embedding.meta.get("number") != number:
        return f"has the metadata {dict(embedding.meta)}"
    return fault_of(number, embedding.tensors)


def fault_of(number: int, found: Mapping[str, torch.Tensor]) -> str | None:
    """The same of its tensors alone."""
    expected = specs(number)
    if [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()] != list(layout(number)):
        return f"has {[(name, t.dtype, tuple(t.shape)) for name, t in found.items()]}, not {layout(number)}"
    base = _text.ctypes.data
    for spec in expected:
        tensor = found[spec.name]
        if not tensor.is_contiguous() or _libc.memcmp(tensor.data_ptr(), base + spec.offset, spec.nbytes) != 0:
            return f"{spec.name} has wrong bytes: {_where(tensor, spec)}"
    return None


def _where(tensor: torch.Tensor, spec: Spec) -> str:
    found = tensor.contiguous().view(-1).view(torch.uint8)
    wrong = (found != _whole[spec.offset : spec.offset + spec.nbytes]).nonzero().view(-1)
    if not len(wrong):
        return "none any more: it changed while it was looked at"
    return f"{len(wrong)} of {spec.nbytes}, from byte {int(wrong[0])} to {int(wrong[-1])}"
