"""mmcache: a shared cache of multimodal embeddings for disaggregated serving, on Mooncake Store.

from mmcache import EmbeddingKey, MMCache

with MMCache.connect("client.yaml") as cache:
    embedding = cache.get_or_compute(key, lambda: encoder(image))
"""

from __future__ import annotations

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

from mmcache.errors import (
    ConfigError,
    ControllerUnavailable,
    CorruptEntry,
    DeadlineExceeded,
    EntryDropped,
    InvalidEntry,
    InvalidKey,
    LifecycleError,
    MMCacheError,
    PoolExhausted,
    StoreUnavailable,
)
from mmcache.key import EmbeddingKey, EncoderFingerprint
from mmcache.selector import Selector

if TYPE_CHECKING:
    from mmcache.client.aio import AsyncMMCache
    from mmcache.client.cache import MMCache
    from mmcache.client.invalidate import Invalidation
    from mmcache.client.results import Embedding, EntryInfo, Mark, PutResult

__version__ = _version("mmcache")

_LAZY = {
    "AsyncMMCache": "mmcache.client.aio",
    "Embedding": "mmcache.client.results",
    "EntryInfo": "mmcache.client.results",
    "Invalidation": "mmcache.client.invalidate",
    "MMCache": "mmcache.client.cache",
    "Mark": "mmcache.client.results",
    "PutResult": "mmcache.client.results",
}
"""Imported on first use: the controller and the command line have no need of torch."""


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from importlib import import_module  # noqa: PLC0415 - only where it is needed

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'mmcache' has no attribute {name!r}")


__all__ = [
    "AsyncMMCache",
    "ConfigError",
    "ControllerUnavailable",
    "CorruptEntry",
    "DeadlineExceeded",
    "Embedding",
    "EmbeddingKey",
    "EncoderFingerprint",
    "EntryDropped",
    "EntryInfo",
    "InvalidEntry",
    "InvalidKey",
    "Invalidation",
    "LifecycleError",
    "MMCache",
    "MMCacheError",
    "Mark",
    "PoolExhausted",
    "PutResult",
    "Selector",
    "StoreUnavailable",
    "__version__",
]
