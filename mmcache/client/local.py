"""What this process holds already: tensors over ready blocks, and the sizes that reads may expect."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from mmcache.client.results import DEFAULT_TENSOR, Embedding, Source
from mmcache.entry import PREFIX_BYTES, EntryHeader, lay_out
from mmcache.errors import CorruptEntry, InvalidEntry
from mmcache.key import EmbeddingKey, Scope
from mmcache.memory.host import dtype_name, dtype_of, tensor_maker
from mmcache.memory.pool import Block, Export

Like = torch.Tensor | Mapping[str, torch.Tensor]
"""What an entry's tensors must look like: only names, shapes and dtypes count, so tensors on the meta device serve."""


class Expectation:
    """The shapes and dtypes that a reader says its entries have, and the size that follows from them."""

    __slots__ = ("_tensors", "object_bytes")

    def __init__(self, like: Like) -> None:
        tensors = {DEFAULT_TENSOR: like} if isinstance(like, torch.Tensor) else dict(like)
        if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise InvalidEntry("like must be a tensor, or a mapping of names to tensors")
        layout = [(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()]
        _, payload_bytes = lay_out(layout)
        self._tensors = {name: (dtype, shape) for name, dtype, shape in layout}
        self.object_bytes = PREFIX_BYTES + payload_bytes

    def check(self, entry: LocalEntry) -> None:
        """Raises CorruptEntry with reason `unexpected` when the entry is not what its reader can use."""
        if entry.tensors != self._tensors:
            raise CorruptEntry("unexpected", f"the entry has {entry.tensors}, its reader expects {self._tensors}")


class LocalEntry:
    """What a ready block of the pool holds: all that a hit needs, worked out once.

    Raises CorruptEntry with reason `unsupported` for a dtype that this torch lacks.
    """

    __slots__ = ("_makers", "_meta", "tensors")

    def __init__(self, header: EntryHeader, block: Block) -> None:
        self._meta = MappingProxyType(header.meta)
        self._makers: list[tuple[str, Callable[[Export], torch.Tensor]]] = []
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        """Their dtypes and shapes by name."""
        try:
            for spec in header.tensors:
                make = tensor_maker(
                    block, offset=PREFIX_BYTES + spec.offset, dtype=dtype_of(spec.dtype), shape=spec.shape
                )
                self._makers.append((spec.name, make))
                self.tensors[spec.name] = spec.dtype, spec.shape
        except InvalidEntry as error:
            raise CorruptEntry("unsupported", str(error)) from error

    def embedding(self, export: Export, key: EmbeddingKey, source: Source, expect: Expectation | None) -> Embedding:
        """Tensors over its exported block, which hold it from here on. Raises what `Expectation.check` raises."""
        if expect is not None:
            expect.check(self)
        tensors = {}
        for name, make in self._makers:
            tensors[name] = make(export)
        return Embedding(key, MappingProxyType(tensors), self._meta, source)


class ExpectedSizes:
    """Guesses an object's size in bytes from what its name or its scope had before. Thread-safe, bounded.

    A scope's guess is the second largest of its last 16 sizes: nearly all of its entries fit, and one giant among them
    does not make every read of its scope reserve a giant's room.
    """

    _LAST = 16

    def __init__(self, *, default_bytes: int, max_names: int = 65_536, max_scopes: int = 1_024) -> None:
        self._default_bytes = default_bytes
        self._max_names = max_names
        self._max_scopes = max_scopes
        self._names: OrderedDict[str, int] = OrderedDict()
        self._scopes: OrderedDict[Scope, deque[int]] = OrderedDict()
        self._lock = threading.Lock()

    def guess(self, name: str, key: EmbeddingKey) -> int:
        """Bytes that will probably do for this object."""
        if (known := self._names.get(name)) is not None:
            return known
        with self._lock:
            if (last := self._scopes.get(key.scope)) is None:
                return self._default_bytes
            return sorted(last)[-2:][0]

    def learn(self, name: str, key: EmbeddingKey, nbytes: int) -> None:
        """An object of this name had `nbytes`."""
        if self._names.get(name) == nbytes:
            return
        scope = key.scope
        with self._lock:
            self._names[name] = nbytes
            self._names.move_to_end(name)
            if len(self._names) > self._max_names:
                self._names.popitem(last=False)
            if (last := self._scopes.get(scope)) is None:
                last = self._scopes[scope] = deque(maxlen=self._LAST)
            last.append(nbytes)
            self._scopes.move_to_end(scope)
            if len(self._scopes) > self._max_scopes:
                self._scopes.popitem(last=False)
