"""Publishes what the engine has encoded, from its blocks, in batches of what has come meanwhile."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from typing import Final

import torch

from mmcache.agent.expectation import fits
from mmcache.agent.messages import Encoded, Published
from mmcache.agent.staging import Staging
from mmcache.agent.table import MAX_ITEMS, Table, Wanted
from mmcache.client.calls import IoThreads, Overloaded
from mmcache.client.compute import settle_claims
from mmcache.client.publish import Publication, Publisher, dropped
from mmcache.client.results import PutResult
from mmcache.control.channel import ControlChannel
from mmcache.control.messages import AbortReason
from mmcache.errors import InvalidEntry, LifecycleError
from mmcache.memory.host import dtype_of
from mmcache.metrics import Counters

_log = logging.getLogger(__name__)

PUBLISHERS: Final = 2
MAX_PUBLICATIONS: Final = 16
"""Most entries published in one batch."""


class Publications:
    """Ends every item that it takes with `Published`, and its claim with it."""

    def __init__(
        self,
        *,
        table: Table,
        staging: Staging,
        publisher: Publisher,
        channel: ControlChannel,
        counters: Counters,
        publish_timeout: float,
    ) -> None:
        self._table = table
        self._staging = staging
        self._publisher = publisher
        self._channel = channel
        self._counters = counters
        self._publish_timeout = publish_timeout
        self._threads = IoThreads(PUBLISHERS, name="mmcache-agent-publish", max_pending=MAX_ITEMS)
        self._queue: deque[tuple[Wanted, Encoded]] = deque()
        self._queue_lock = threading.Lock()

    def take(self, message: Encoded) -> None:
        """On the thread that receives: a granted item is to be published. Any other is counted."""
        wanted = self._table.begin_publishing(message.number)
        if wanted is None:
            self._counters.add("agent.unasked")
            return
        with self._queue_lock:
            self._queue.append((wanted, message))
        try:
            self._threads.submit(self._publish)
        except (Overloaded, LifecycleError):
            with self._queue_lock:
                if (wanted, message) not in self._queue:  # a publisher has taken it along
                    return
                self._queue.remove((wanted, message))
            self._give_up(wanted, dropped("overloaded"))

    def _publish(self) -> None:
        """Publish what has been encoded so far, in one batch."""
        batch = self._next()
        try:
            prepared = [(wanted, item) for wanted, encoded in batch if (item := self._prepare(wanted, encoded))]
            publications = [item for _, item in prepared]
            if not publications:
                return
            results = self._publisher.publish(publications, deadline=time.monotonic() + self._publish_timeout)
            settle_claims(self._channel, publications, results)
            for (wanted, _), result in zip(prepared, results, strict=True):
                self._end(wanted, result)
        except Exception as error:  # noqa: BLE001 - no item may end the agent; counted and logged
            self._counters.add("agent.internal_error", reason=type(error).__name__)
            _log.error("the agent failed to publish", exc_info=error)
            for wanted, _ in batch:
                self._give_up(wanted, dropped("failed"))

    def _next(self) -> list[tuple[Wanted, Encoded]]:
        """Some items of distinct names in one lineage; none when another thread took what this one was called for."""
        batch: list[tuple[Wanted, Encoded]] = []
        lineage = ""
        names: set[str] = set()
        with self._queue_lock:
            for entry in list(self._queue):
                target = entry[0].name
                lineage = lineage or target.lineage
                if len(batch) < MAX_PUBLICATIONS and target.name not in names and target.lineage == lineage:
                    names.add(target.name)
                    batch.append(entry)
                    self._queue.remove(entry)
        return batch

    def _prepare(self, wanted: Wanted, encoded: Encoded) -> Publication | None:
        """The publication of what is in an item's block; if it is not what was asked for, it is dropped."""
        item, claim = wanted.item, wanted.claim
        try:
            if claim is None or encoded.dtype != item.dtype or not fits(item, encoded.shape):
                raise InvalidEntry("it is not what the item must be")
            dtype = dtype_of(encoded.dtype)
            view = self._staging.block(item.offset, math.prod(encoded.shape) * dtype.itemsize)
            tensor = torch.frombuffer(view, dtype=dtype).view(encoded.shape)
            return self._publisher.prepare(claim.target, tensor, token=claim.token, cost_ms=encoded.cost_ms)
        except (InvalidEntry, ValueError):
            self._give_up(wanted, dropped("invalid"))
            return None

    def _give_up(self, wanted: Wanted, result: PutResult) -> None:
        if wanted.claim is not None:
            self._channel.abort([wanted.claim.token], AbortReason.FAILED)
        self._end(wanted, result)

    def _end(self, wanted: Wanted, result: PutResult) -> None:
        if self._table.end(wanted, Published(wanted.item.number, result.status, result.reason)):
            self._counters.add("agent.published", reason=result.reason or result.status)
