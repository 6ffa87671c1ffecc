"""One small tree of errors. By default a client turns all but bad input into misses and drops; `strict=True` raises."""

from __future__ import annotations


class MMCacheError(Exception):
    """Anything that mmcache raises on purpose."""


class ConfigError(MMCacheError, ValueError):
    """A setting is unknown, ill-typed or impossible; the message names it in full, with its file and line."""


class InvalidKey(MMCacheError, ValueError):
    """A field of an `EmbeddingKey` is empty, too long or outside its alphabet; the message names the field."""


class InvalidEntry(MMCacheError, ValueError):
    """What was to be published cannot be an entry (tensor on the meta device, metadata too large, …)."""


CORRUPT_REASONS = frozenset(
    {"magic", "version", "prefix_checksum", "metadata", "identity", "length", "layout", "payload_checksum"}
)


class CorruptEntry(MMCacheError):
    """Bytes under one of our names are not the entry that they should be.

    `reason` is a short word for counters: one of `CORRUPT_REASONS`; or, of an entry that is sound, `unexpected` where
    it has not the shapes and dtypes that its reader asked for, `unsupported` where its reader's torch lacks a dtype.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class PoolExhausted(MMCacheError):
    """The registered pool cannot hold what was asked, ever (`fits` False) or before the deadline (`fits` True)."""

    def __init__(self, message: str, *, fits: bool) -> None:
        super().__init__(message)
        self.fits = fits


class DeadlineExceeded(MMCacheError, TimeoutError):
    """A call reached its deadline."""


class StoreUnavailable(MMCacheError):
    """The Mooncake Store, or this process's attachment to it, cannot serve."""


class ControllerUnavailable(MMCacheError):
    """No fresh session with the controller."""


class PinRefused(MMCacheError):
    """The controller does not keep what was to be pinned; the message has the figures, and says what to do."""


class LifecycleError(MMCacheError, RuntimeError):
    """A call before set-up, after close, or in a child after fork."""


class EntryDropped(MMCacheError):
    """With `strict=True`: an embedding was not published. `reason` is the word that `PutResult.reason` carries."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
