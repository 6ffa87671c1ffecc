"""What the demo's processes do with a request: encode through the cache, read from it, or encode without it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmcache.cli.demo.photographs import open_photograph
from mmcache.cli.demo.protocol import Command, Encode, Missed, Read, RequestAnswer, Served, Source
from mmcache.hashing import hash_tensor
from mmcache.key import EmbeddingKey

if TYPE_CHECKING:
    import torch

    from mmcache import MMCache
    from mmcache.cli.demo.tower import VisionTower


class Role(Protocol):
    """One kind of process. `answer` is called from several threads at once."""

    def answer(self, command: Command) -> RequestAnswer:
        """Serves one request; whatever it raises is reported as `Failed`."""

    def close(self) -> Mapping[str, int]:
        """Lets go of the cache and says what it counted."""


class Encoder:
    """Has photographs encoded at most once in the cluster, here or elsewhere."""

    def __init__(self, tower: VisionTower, cache: MMCache, *, timeout_s: float) -> None:
        self._tower = tower
        self._cache = cache
        self._timeout_s = timeout_s
        self._alone = threading.Lock()  # one photograph at a time, as on a device

    def answer(self, command: Command) -> RequestAnswer:
        """Raises TypeError for anything but `Encode`."""
        if not isinstance(command, Encode):
            raise TypeError(f"an encoder cannot {type(command).__name__}")
        encode_ms: float | None = None

        def encode() -> torch.Tensor:
            nonlocal encode_ms
            photograph = open_photograph(Path(command.path))
            with self._alone:
                started = time.perf_counter()
                embedding = self._tower.encode(photograph)
                encode_ms = (time.perf_counter() - started) * 1e3
            return embedding

        key = self._tower.key(command.mm_hash)
        started = time.perf_counter()
        embedding = self._cache.get_or_compute(key, encode, timeout=self._timeout_s)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        return _served(command.request, embedding.tensor, key, embedding.source, elapsed_ms, encode_ms)

    def close(self) -> Mapping[str, int]:
        """The cache's counters."""
        return _close(self._cache)


class Prefill:
    """Reads embeddings by the keys that it is sent."""

    def __init__(self, cache: MMCache, *, timeout_s: float) -> None:
        self._cache = cache
        self._timeout_s = timeout_s

    def answer(self, command: Command) -> RequestAnswer:
        """Raises TypeError for anything but `Read`."""
        if not isinstance(command, Read):
            raise TypeError(f"a prefill process cannot {type(command).__name__}")
        started = time.perf_counter()
        embedding = self._cache.get(command.key, timeout=self._timeout_s)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if embedding is None:
            return Missed(command.request, command.key)
        return _served(command.request, embedding.tensor, embedding.key, embedding.source, elapsed_ms, None)

    def close(self) -> Mapping[str, int]:
        """The cache's counters."""
        return _close(self._cache)


class Reference:
    """Encodes directly, with no cache anywhere near: what every embedding must equal bit by bit."""

    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower

    def answer(self, command: Command) -> RequestAnswer:
        """Raises TypeError for anything but `Encode`."""
        if not isinstance(command, Encode):
            raise TypeError(f"the reference cannot {type(command).__name__}")
        photograph = open_photograph(Path(command.path))
        started = time.perf_counter()
        embedding = self._tower.encode(photograph)
        encode_ms = (time.perf_counter() - started) * 1e3
        key = self._tower.key(command.mm_hash)
        return _served(command.request, embedding, key, "computed", encode_ms, encode_ms)

    def close(self) -> Mapping[str, int]:
        """Nothing was counted."""
        return {}


def _served(
    request: int, tensor: torch.Tensor, key: EmbeddingKey, source: Source, elapsed_ms: float, encode_ms: float | None
) -> Served:
    return Served(
        request=request,
        key=key,
        source=source,
        elapsed_ms=elapsed_ms,
        encode_ms=encode_ms,
        nbytes=tensor.nbytes,
        digest=hash_tensor(tensor),
    )


def _close(cache: MMCache) -> Mapping[str, int]:
    counters = {name: value for name, value in cache.stats().items() if isinstance(value, int)}
    cache.close()
    return counters
