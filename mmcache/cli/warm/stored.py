"""Whether the store has an entry whole, asked of the store itself.

The controller's directory may name for a while what the store lost, and a store that lost all is why one imports.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from mmcache.config import Settings
from mmcache.errors import StoreUnavailable
from mmcache.store.mooncake import MooncakeStore

_REGION_BYTES = 1 << 16


class Stored:
    """A context manager; attached to the store from the first question on."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._store: MooncakeStore | None = None

    def __enter__(self) -> Stored:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self._store.close()

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Of each object by its name, in bytes; None where the store does not have it, or cannot tell."""
        if not names:
            return []
        try:
            if self._store is None:
                timeout = self._settings.client.connect_timeout
                self._store = MooncakeStore.from_settings(
                    self._settings.store, region_bytes=_REGION_BYTES, timeout=timeout
                )
            return self._store.sizes(names, deadline=time.monotonic() + self._settings.client.read_timeout)
        except StoreUnavailable:
            return [None] * len(names)
