"""What an item must be like: what its embedding is checked against before it is used, and before it is published."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmcache.agent.messages import Item
from mmcache.client.results import Embedding
from mmcache.entry import DTYPE_BYTES, PREFIX_BYTES
from mmcache.memory.host import dtype_name


def object_bytes(item: Item) -> int:
    """The size of an object that is as the item must be, or may be at most."""
    tensor = item.rows * max(item.widths) * DTYPE_BYTES[item.dtype] if item.widths else item.nbytes
    return PREFIX_BYTES + min(tensor, item.nbytes)


def fits(item: Item, shape: Sequence[int]) -> bool:
    """Whether an embedding of this shape is what the item must be, and fits its block."""
    if len(shape) != 2 or shape[0] != item.rows or (item.widths and shape[1] not in item.widths):
        return False
    return 0 < math.prod(shape) * DTYPE_BYTES[item.dtype] <= item.nbytes


def is_expected(embedding: Embedding, item: Item) -> bool:
    """Whether an entry is what the item must be."""
    if len(embedding.tensors) != 1:
        return False
    tensor = embedding.tensor
    return dtype_name(tensor.dtype) == item.dtype and fits(item, tensor.shape)
