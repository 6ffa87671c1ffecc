"""The caches of the engines that the configuration names, cleared for an invalidation that is complete."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from typing import Final

from mmcache.config import EnginesSettings
from mmcache.engines import ClearedEngine, clear, not_cleared, token_of
from mmcache.errors import ConfigError

_MOST_AT_ONCE: Final = 4

_log = logging.getLogger(__name__)


class EngineCaches:
    """For coroutines of one event loop. Engines are asked on threads, so that they hold nothing up."""

    def __init__(self, settings: EnginesSettings) -> None:
        self._settings = settings
        self._free = threading.BoundedSemaphore(_MOST_AT_ONCE)

    @property
    def urls(self) -> tuple[str, ...]:
        """Of the engines."""
        return self._settings.urls

    async def clear(self) -> list[ClearedEngine]:
        """Clear all of them; takes little more than `engines.timeout`. Never raises for what an engine does."""
        if not self._free.acquire(blocking=False):
            return self.leave("too many are clearing them already; send it again, with an Idempotency-Key")
        future: Future[list[ClearedEngine]] = Future()
        future.set_running_or_notify_cancel()  # from here on it is answered, whether anybody waits or not
        try:
            threading.Thread(target=self._run, args=(future,), name="mmcache-clear", daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            return self.leave(str(error))
        return await asyncio.wrap_future(future)

    def leave(self, why: str) -> list[ClearedEngine]:
        """What is told of engines that were not asked."""
        return not_cleared(self.urls, why)

    def _run(self, future: Future[list[ClearedEngine]]) -> None:
        try:
            token = token_of(self._settings)
            cleared = clear(self.urls, timeout=self._settings.timeout, token=token)
        except ConfigError as error:  # the token's file has changed
            cleared = self.leave(str(error))
        except BaseException as error:  # noqa: BLE001 (whatever it is, the coroutine is told)
            future.set_exception(error)
            return
        finally:
            self._free.release()
        for engine in cleared:
            failures = "; ".join(f"{one.endpoint}: {one.detail}" for one in engine.results if not one.ok)
            if failures:
                _log.warning("caches of the engine %s were not cleared: %s", engine.url, failures)
            else:
                _log.info("caches of the engine %s were cleared", engine.url)
        future.set_result(cleared)
