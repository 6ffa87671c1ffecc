"""The scheduler's side: what vLLM's hooks mean for the table of items. It never waits, but for `IDLE_WAIT_S`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from mmcache.agent import messages
from mmcache.agent.link import AgentLink
from mmcache.agent.staging import Staging
from mmcache.integrations.vllm.item import Resident, Wanted
from mmcache.integrations.vllm.items import ItemTable
from mmcache.integrations.vllm.worker import Report, Step
from mmcache.key import EmbeddingKey

_log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.002
"""How long a step that runs nothing waits for the agent, while a request is deferred; else vLLM would spin."""


MAX_RESIDENT: Final = 1 << 16
"""Most identifiers that are remembered as held by the engine, of which it does not tell when its cache is reset."""


class Position(Protocol):
    """A `PlaceholderRange` of vLLM's."""

    offset: int
    length: int


class Feature(Protocol):
    """A `MultiModalFeatureSpec` of vLLM's."""

    identifier: str
    modality: str
    mm_position: Position


class Request(Protocol):
    """What is used of vLLM's `Request`."""

    request_id: str
    mm_features: Sequence[Feature]
    ec_transfer_params: Mapping[str, Any] | None


class _Seen(NamedTuple):
    """A request's items, in order; `last` is the position behind the last of them."""

    wanted: list[Wanted]
    last: int


class SchedulerSide:
    """One engine.

    Args:
        staging: the memory that its workers map; None if it could not be had: then nothing is loaded or saved.
        link: to its agent; None without that memory.
        table: of its items.
        describe: what a request wants of the cache, item by item; None while that is not known yet.
        can_encode: whether this engine has all that a request's items need to be encoded here.
        workers: how many workers load.
        reports: how many of them report each step that they have done to the scheduler. 0: vLLM drops what
            they report, as its first model runner does for a pure producer. Then the staging memory tells what the
            first worker has done, which alone has anything to copy.
    """

    def __init__(
        self,
        *,
        staging: Staging | None,
        link: AgentLink | None,
        table: ItemTable,
        describe: Callable[[Request], list[Wanted] | None],
        can_encode: Callable[[Request], bool],
        workers: int,
        reports: int,
    ) -> None:
        self.figures: dict[str, float] = {}
        """What the agent last told of its client."""
        self._staging = staging
        self._link = link
        self._table = table
        self._describe = describe
        self._can_encode = can_encode
        self._workers = workers
        self._reports = reports
        self._mapped = False
        self._requests: dict[str, _Seen] = {}
        self._asking: _Seen | None = None
        self._deferred_since: dict[str, float] = {}
        self._resident: dict[str, Resident] = {}
        """By identifier, what the engine holds. It may hold less, when its cache was reset: `has` then tells."""
        self._allocated: dict[str, Resident] = {}
        self._undescribed = False
        """Whether a request was deferred since the last step because what it wants is not known yet."""
        self._unavailable: set[str] = set()
        self._returned: dict[int, Report] = {}

    def ensure_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether a request can be scheduled: False defers it."""
        self._asking = None  # `has` speaks for no other request if this fails
        seen = self._requests.get(request.request_id)
        if seen is None or len(seen.wanted) != len(request.mm_features):
            wanted = self._describe(request)
            if wanted is None:
                self._undescribed = True
                return False
            seen = _Seen(self._unambiguous(wanted), max((item.end for item in wanted), default=0))
            self._requests[request.request_id] = seen
        self._asking = seen
        if num_computed_tokens >= seen.last:
            self._table.request_ended(request.request_id)
            return True
        # What the engine holds it may evict for this very request: only what it can encode may be left to it. And where
        # it encodes for others alone, what counts is what they find.
        needed = [
            item
            for item in seen.wanted
            if item.end > num_computed_tokens
            and not (item.encodable and self._table.loads and item.identifier in self._resident)
        ]
        if not needed:
            return True
        now = time.monotonic()
        self._hear(now)
        verdict = self._table.want(request.request_id, needed, now, reachable=self._serves())
        self._send()
        if verdict.unavailable:
            self._unavailable.add(request.request_id)
        if verdict.deferred:
            self._deferred_since.setdefault(request.request_id, now)
        elif (since := self._deferred_since.pop(request.request_id, None)) is not None:
            self._table.counters["deferred_ms"] += round((now - since) * 1000.0)
        return not verdict.deferred

    def available_without(self, request: Request) -> bool:
        """`ensure_available` after a fault: the engine encodes, or, what it cannot encode, fails."""
        self._asking = None
        if self._can_encode(request):
            return True
        self._unavailable.add(request.request_id)
        return False

    def has(self, identifier: str) -> bool:
        """Whether the request that was last asked about can load this item, which the engine does not hold."""
        self._resident.pop(identifier, None)
        for item in self._asking.wanted if self._asking is not None else ():
            if item.identifier == identifier:
                return self._table.has(item)
        return False

    def allocated(self, request: Request, index: int) -> None:
        """The engine loads or encodes it in this step, and holds it then."""
        seen = self._requests.get(request.request_id)
        wanted = seen.wanted[index] if seen is not None and index < len(seen.wanted) else None
        epoch = self._staging.epoch if self._staging is not None else -1
        self._allocated[request.mm_features[index].identifier] = Resident(wanted.key if wanted else None, epoch)
        if wanted is not None:
            self._table.allocated(wanted)

    def build_step(self, *, freed: Sequence[str], reaches_workers: bool) -> Step:
        """What the workers copy in this step. `freed` is what the engine holds no longer."""
        for identifier in freed:
            self._resident.pop(identifier, None)
        if not reaches_workers and (self._deferred_since or self._undescribed):
            self._send()
            self._wait()
        self._undescribed = False
        now = time.monotonic()
        self._hear(now)
        number, loads, saves = self._table.build_step(self._resident, now, reaches_workers=reaches_workers)
        self._resident |= self._allocated  # what this step loads or encodes is there from the next one on
        self._allocated.clear()
        while len(self._resident) > MAX_RESIDENT:
            del self._resident[next(iter(self._resident))]
        self._send()
        return Step(number, tuple(loads), tuple(saves))

    def step_returned(self, report: Report) -> None:
        """Workers have done a step's copies; once all of them have, its blocks are free."""
        if not self._reports:
            return
        if (earlier := self._returned.pop(report.step, None)) is not None:
            report = earlier.merged(report)
        if report.workers < self._reports:
            self._returned[report.step] = report
            return
        self._table.step_returned(report.step, report.saved)
        self._send()

    def request_finished(self, request_id: str) -> None:
        """However it ended: its claims, waits and blocks are given up."""
        self._requests.pop(request_id, None)
        self._deferred_since.pop(request_id, None)
        self._unavailable.discard(request_id)  # another may have its name by the time that it is told
        self._table.request_ended(request_id)
        self._send()

    def take_unavailable(self) -> set[str]:
        """Requests that can never be served, each told once. vLLM asks whenever a step has returned."""
        if not self._reports:
            self._look_for_returned()
        unavailable, self._unavailable = self._unavailable, set()
        return unavailable

    def take_counts(self) -> dict[str, float | list[float]]:
        """What was counted and observed since the last call."""
        table = self._table
        counts: dict[str, float | list[float]] = {}
        if table.counters:  # not in most steps, of which there are hundreds a second while a request is deferred
            counts.update(table.counters)
            table.counters.clear()
        if table.load_seconds:
            counts["load_s"], table.load_seconds = table.load_seconds, []
        return counts

    def close(self) -> None:
        """End the agent. Idempotent."""
        if self._link is not None:
            self._link.close()
        if self._staging is not None:
            self._staging.close()

    def _unambiguous(self, wanted: list[Wanted]) -> list[Wanted]:
        """Without keys where one identifier is that of several things, such as a client's for an image and a video.

        For vLLM they are one: what it asks about by one of them it may allocate for another.
        """
        things: dict[str, tuple[EmbeddingKey | None, int]] = {}
        mixed = set()
        for item in wanted:
            if things.setdefault(item.identifier, (item.key, item.rows)) != (item.key, item.rows):
                mixed.add(item.identifier)
        if not mixed:
            return wanted
        self._table.counters["not_shared.ambiguous"] += sum(item.identifier in mixed for item in wanted)
        return [item._replace(key=None) if item.identifier in mixed else item for item in wanted]

    def _serves(self) -> bool:
        """Whether items can be asked for: workers and agent are there."""
        if not self._mapped and self._staging is not None:
            self._mapped = self._staging.workers_mapped(self._workers)
        return self._mapped and self._link is not None and self._link.agent_lives

    def _look_for_returned(self) -> None:
        if self._staging is None:
            return
        for step, numbers in self._table.steps_until(self._staging.done_step):
            found = ((number, self._staging.saved(number)) for number in numbers)
            self._table.step_returned(step, {number: result for number, result in found if result is not None})
        self._send()

    def _wait(self) -> None:
        if self._link is not None:
            self._link.wait(IDLE_WAIT_S)
        else:
            time.sleep(IDLE_WAIT_S)

    def _hear(self, now: float) -> None:
        if self._link is None:
            return
        for message in self._link.receive():
            if isinstance(message, messages.Figures):
                self.figures = message.figures
            self._table.heard(message, now)
        if self._link.take_death():
            self._table.agent_died()

    def _send(self) -> None:
        """What cannot be sent now stays, in order."""
        outbox = self._table.outbox
        sent = 0
        while sent < len(outbox) and self._link is not None and self._link.send(outbox[sent]):
            sent += 1
        del outbox[:sent]
