"""What the client's calls return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec
import torch

from mmcache.entry import TensorSpec
from mmcache.key import EmbeddingKey

Source = Literal["local", "store", "computed"]
PutStatus = Literal["stored", "duplicate", "dropped"]

DEFAULT_TENSOR = "embedding"
"""The name of an entry's tensor when it has but one and the caller gave none."""


class Embedding(msgspec.Struct, frozen=True, eq=False):
    """One entry, whole and verified.

    Its tensors may be shared with other callers in this process, so they are to be read, not written. Each lives as
    long as anything refers to its storage, this object or not.

    Attributes:
        key: the key it was asked for by.
        tensors: the entry's named tensors, at their published dtypes and shapes.
        meta: the metadata that its publisher gave.
        source: `local` (this process had it), `store` (read from the store) or `computed` (by this very call).
    """

    key: EmbeddingKey
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, object]
    source: Source

    @property
    def tensor(self) -> torch.Tensor:
        """The first tensor, which in most entries is the only one."""
        return next(iter(self.tensors.values()))

    def __repr__(self) -> str:
        tensors = ", ".join(f"{name}: {tuple(t.shape)} {t.dtype}" for name, t in self.tensors.items())
        return f"Embedding({self.key.mm_hash[:16]!r}, {tensors}, source={self.source!r})"


class PutResult(NamedTuple):
    """What became of a put: `stored`, `duplicate` (it was there already), or `dropped` with the reason in a word."""

    status: PutStatus
    reason: str = ""

    @property
    def readable(self) -> bool:
        """Whether other processes can read the entry now."""
        return self.status != "dropped"


class Mark(NamedTuple):
    """A point in the sequence of invalidations, which `MMCache.mark` makes: what follows it, a mark does not know.

    `number` is -1 where there was no fresh session: everything may have been invalidated since.
    """

    lineage: str
    number: int

    def covers(self, lineage: str, generation: int) -> bool:
        """Whether a key of this generation was the same at the mark already."""
        return lineage == self.lineage and generation <= self.number


class EntryInfo(NamedTuple):
    """What the controller's directory knows of an entry."""

    key: EmbeddingKey
    nbytes: int
    generation: int
    tensors: tuple[TensorSpec, ...]
    meta: Mapping[str, object]
