"""This process's attachment to the store, and the pool that is registered with it."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from mmcache.client.calls import Overloaded
from mmcache.errors import LifecycleError, MMCacheError, StoreUnavailable
from mmcache.memory.pool import Block, RegisteredPool
from mmcache.metrics import Counters
from mmcache.store.base import Store

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Between tries to attach, give or take half of it, so that a fleet does not try in step."""
SHORTEST_LIFE_SECONDS = 30.0
"""An attachment is not replaced for its quarantined memory before that: each keeps that until its client has ended."""
MAX_ENDING = 8
"""With so many clients that have not ended yet, none is replaced for its quarantined memory, for the same reason."""


class Attachment(NamedTuple):
    """A store and the pool in its memory; they belong together."""

    store: Store
    pool: RegisteredPool


class Attacher:
    """Attaches to the store when it can, at once or later in the background, and owns the attachment.

    Args:
        attach: builds and attaches a store; called on a thread of its own when the first try failed.
        pool_bytes: size of the one region that is registered.
    """

    def __init__(self, attach: Callable[[], Store], *, pool_bytes: int, counters: Counters) -> None:
        self._attach = attach
        self._pool_bytes = pool_bytes
        self._counters = counters
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._attached_at = 0.0
        self._worn_out: Attachment | None = None
        self._ending: weakref.WeakSet[Store] = weakref.WeakSet()
        """Those that were lost. A client that has ended keeps 24 MiB for as long as anybody knows it."""
        self.current: Attachment | None = None
        self.last_error: Exception | None = None

    def start(self, timeout: float) -> Attachment | None:
        """Attach within `timeout` seconds if the store answers; otherwise go on trying in the background."""
        first_try_ended = threading.Event()
        self._try_in_background(first_try_ended)
        first_try_ended.wait(timeout)
        return self.current

    def require(self) -> Attachment:
        """The attachment. Raises StoreUnavailable while there is none."""
        if (attachment := self.current) is None:
            raise StoreUnavailable(f"not attached to the store: {self.last_error or 'still trying'}")
        return attachment

    def give_back(self, attachment: Attachment, block: Block, *, settled: bool) -> None:
        """End a block whose transfer ended: released, or quarantined if the transfer may yet touch it.

        Quarantined memory is of no more use; when it is over a quarter of the pool, the attachment is replaced.
        """
        pool = attachment.pool
        if settled:
            pool.release(block)
            return
        pool.quarantine(block)
        self._counters.add("quarantined")
        if pool.quarantined * 4 <= pool.capacity:
            return
        with self._lock:
            if self.current is not attachment or self._worn_out is attachment:
                return
            self._worn_out = attachment
            patience = self._attached_at + SHORTEST_LIFE_SECONDS - time.monotonic()

        def replace() -> None:
            ended = self._closing.wait(max(0.0, patience))
            while not ended and self._count_ending() >= MAX_ENDING and self.current is attachment:
                ended = self._closing.wait(RETRY_SECONDS)
            if not ended:
                self.lost(attachment)

        threading.Thread(target=replace, name="mmcache-replace", daemon=True).start()

    def failed(self, attachment: Attachment, error: MMCacheError) -> None:
        """A call through this attachment failed; if it is of no more use, attach anew.

        It still is when the call was only not queued, or was refused because it is being closed or replaced already.
        """
        gone = isinstance(error, StoreUnavailable) and not isinstance(error, Overloaded)
        if gone or attachment.pool.broken:
            self.lost(attachment)

    def lost(self, attachment: Attachment) -> None:
        """This attachment is of no more use: attach anew, with fresh memory.

        What was handed out of the old memory stays valid.
        """
        with self._lock:
            if self.current is not attachment or self._closing.is_set():
                return
            self.current = self._worn_out = None  # nothing here may keep its memory
            self._ending.add(attachment.store)
        self._counters.add("attachment_lost")
        _log.warning("the attachment to the store is gone; attaching anew")
        attachment.pool.close()
        self._try_in_background(threading.Event(), before=attachment.store.close)

    def _count_ending(self) -> int:
        """How many of those that were lost have not ended."""
        return sum(not store.ended for store in list(self._ending))

    def _try_in_background(self, first_try_ended: threading.Event, before: Callable[[], None] | None = None) -> None:
        self._thread = threading.Thread(
            target=self._keep_trying, args=(first_try_ended, before), name="mmcache-attach", daemon=True
        )
        self._thread.start()

    def _keep_trying(self, first_try_ended: threading.Event, before: Callable[[], None] | None) -> None:
        if before is not None:
            before()
        while not self._closing.is_set():
            try:
                self._try()
                self.last_error = None
                first_try_ended.set()
                return
            except Exception as error:  # noqa: BLE001 - whatever the library raises, this thread must go on trying
                if self.last_error is None and not self._closing.is_set():
                    _log.warning("cannot attach to the store, reads will miss until it answers: %s", error)
                self.last_error = error.with_traceback(None)  # whose frames hold a client and its memory
                self._counters.add("attach_failed", reason=type(error).__name__)
            first_try_ended.set()
            self._closing.wait(RETRY_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 - no secret

    def _try(self) -> None:
        store = self._attach()
        try:
            region = store.allocate_region(self._pool_bytes)
            pool = RegisteredPool(region.address, region.nbytes)
            weakref.finalize(pool, store.give_back, region, pool.quarantined_extents).atexit = False
        except BaseException:
            store.close()
            raise
        with self._lock:
            if self._closing.is_set():
                store.close()
                raise LifecycleError("closed while attaching")
            self._attached_at = time.monotonic()
            self.current = Attachment(store, pool)
        _log.info("attached to the store as %s", store.kind)

    def close(self, deadline: float) -> None:
        """Detach. Idempotent."""
        self._closing.set()
        with self._lock:
            attachment, self.current = self.current, None
        if attachment is not None:
            attachment.pool.close()  # nobody waits for room any more
            attachment.store.close()
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, deadline - time.monotonic()))
