"""mmcache: a shared cache of multimodal embeddings for disaggregated serving, on Mooncake Store.

from mmcache import EmbeddingKey, MMCache

with MMCache.connect("client.yaml") as cache:
    embedding = cache.get_or_compute(key, lambda: encoder(image))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmcache.client.aio import AsyncMMCache
    from mmcache.client.cache import MMCache
    from mmcache.client.invalidate import Invalidation
    from mmcache.client.pins import Pinned
    from mmcache.client.results import Embedding, EntryInfo, Mark, PutResult
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
        PinRefused,
        PoolExhausted,
        StoreUnavailable,
    )
    from mmcache.key import EmbeddingKey, EncoderFingerprint
    from mmcache.selector import Selector

    __version__: str

_LAZY = {
    "AsyncMMCache": "mmcache.client.aio",
    "Embedding": "mmcache.client.results",
    "EmbeddingKey": "mmcache.key",
    "EncoderFingerprint": "mmcache.key",
    "EntryInfo": "mmcache.client.results",
    "Invalidation": "mmcache.client.invalidate",
    "MMCache": "mmcache.client.cache",
    "Mark": "mmcache.client.results",
    "Pinned": "mmcache.client.pins",
    "PutResult": "mmcache.client.results",
    "Selector": "mmcache.selector",
}
"""Imported on first use, and the errors as well: the controller and the command line have no need of torch, and the
command line is to be ready for Ctrl-C before anything else is imported."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - only where it is needed

        return version("mmcache")
    if name in __all__:
        from importlib import import_module  # noqa: PLC0415

        return getattr(import_module(_LAZY.get(name, "mmcache.errors")), name)
    raise AttributeError(f"module 'mmcache' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "PinRefused",
    "Pinned",
    "PoolExhausted",
    "PutResult",
    "Selector",
    "StoreUnavailable",
    "__version__",
]
