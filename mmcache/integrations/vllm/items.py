"""The items that an engine's requests want: a state machine that does no I/O. Times are arguments, in seconds.

    ASKED ──► READY ◄─► LOADING                 another engine's bytes, by way of the staging memory
      ├─► WAITING ──► READY, GRANTED, MISSING   another engine encodes it
      ├─► GRANTED ──► SAVING ──► PUBLISHING     this engine encodes it, for all
      └─► MISSING                               this engine encodes it, for itself alone

An item is shared by all requests that want its key. Its block of the staging memory has up to two holders besides: the
agent, from `Ask` to its last word or its death, and a step that copies it, until it has returned from all workers. It
is freed when the item has ended and nobody holds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from mmcache.agent import messages
from mmcache.agent.messages import MAX_ITEMS, AgentMessage, Ask, Drop, Encoded, EngineMessage
from mmcache.integrations.vllm.item import Copy, Item, Phase, Resident, Wanted
from mmcache.key import EmbeddingKey
from mmcache.memory.extents import ExtentAllocator

GRACE_S: Final = 1.0
"""How much later than it should an agent may answer before its engine goes on without it."""
GRANT_PATIENCE_S: Final = 2.0
"""How long a grant is kept that no step uses: then others may have it."""
PASSING: Final = frozenset({"agent_died", "deadline", "not_asked"})
"""Reasons of a miss that say nothing of the item: one that must be had is asked for again."""
MAX_BLOCKS: Final = 4096
MAX_OBSERVATIONS: Final = 1024


class Verdict(NamedTuple):
    """What is to become of a request: whether it is to be deferred, and whether it is to fail: no way to its items."""

    deferred: bool
    unavailable: bool


class ItemTable:
    """All items of one engine.

    Args:
        staging_bytes: room for blocks.
        is_fresh: whether what was read in this epoch may be used now.
        loads: whether this engine's workers load. A pure producer's do not: it only needs to know that the bytes exist.
        saves: whether they save.
        fetch_s, wait_s: how long a read, and another engine's encoder, may take.
    """

    def __init__(
        self,
        staging_bytes: int,
        *,
        is_fresh: Callable[[int], bool],
        loads: bool,
        saves: bool,
        fetch_s: float,
        wait_s: float,
        counters: Counter[str] | None = None,
    ) -> None:
        self.outbox: list[EngineMessage] = []
        """To be sent, in order; the owner takes out what it has sent."""
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.load_seconds: list[float] = []
        """From asking for an item until it was here, of those that came since the owner last emptied it; bounded."""
        self._extents = ExtentAllocator(staging_bytes)
        self._is_fresh = is_fresh
        self.loads: Final = loads
        self._saves = saves
        self._fetch_s = fetch_s
        self._wait_s = wait_s
        self._items: dict[EmbeddingKey, Item] = {}
        self._blocks: dict[int, Item] = {}
        self._granted: dict[int, Item] = {}
        self._requests: dict[str, set[EmbeddingKey]] = {}
        self._first_seen: dict[str, float] = {}
        self._numbers = 0
        self._doubted = False
        self._copies: list[Item] = []
        self._steps: dict[int, list[Item]] = {}
        self._step = 0

    # What the engine's scheduler does

    def want(self, request: str, wanted: Sequence[Wanted], now: float, *, reachable: bool = True) -> Verdict:
        """The items that a request needs next: ask for what nobody asked for, and say whether to wait.

        To be called again while it is deferred, which ends by itself. With an agent that is not `reachable`, or that
        has not answered in time, nothing is asked for: what can be encoded is, and the rest waits for the agent.
        """
        since = self._first_seen.setdefault(request, now)
        patient = now < since + self._fetch_s
        asks = reachable and not self._doubted
        mine = self._requests.setdefault(request, set())
        for key in mine.difference([one.key for one in wanted]):
            if self._items[key].phase is Phase.READY:
                self._leave(request, key)
        waiting = any(item.phase is Phase.WAITING for item in map(self._find, wanted) if item is not None)
        pending = missing = False
        asked: list[Item] = []
        for one in wanted:
            if one.key is None:
                missing |= not one.encodable
                continue
            item = self._current(one)
            if item is None and waiting:  # what would be granted could not be used before that
                pending = True
                continue
            if item is None and asks:
                item = self._ask(one.key, one, now)
                if item is not None:
                    asked.append(item)
            if item is None and patient and (asks or not one.encodable):  # no room yet, or nobody to ask
                pending = True
                continue
            if item is None:
                self.counters["miss.not_asked"] += 1
                item = self._items[one.key] = Item(one.key, one, Phase.MISSING, requests=set(), now=now)
                item.source = "not_asked"
            item.requests.add(request)
            mine.add(one.key)
            if not one.encodable:
                item.dependents.add(request)
            if item.phase in (Phase.ASKED, Phase.WAITING) and now >= item.deadline:
                self._doubted |= item.phase is Phase.ASKED
                item = self._fail(item, "deadline")
            if item.phase in (Phase.ASKED, Phase.WAITING):
                pending = True
            elif item.phase is Phase.MISSING and not one.encodable and patient and _may_be_there(item, since):
                self._leave(request, one.key)
                pending = True
            elif item.phase is Phase.MISSING or item.wanted.rows != one.rows:
                missing |= not one.encodable
            elif item.phase is not Phase.READY:  # the engine may evict it before this request has it
                pending |= not one.encodable
        for start in range(0, len(asked), MAX_ITEMS):
            self.outbox.append(Ask([self._message(item) for item in asked[start : start + MAX_ITEMS]]))
        if waiting:
            self._give_back(request)
        return Verdict(pending or missing, missing)

    def has(self, wanted: Wanted) -> bool:
        """Whether its bytes are here, verified and current. A promise: they are loaded if the engine allocates it.

        Of what this engine cannot encode, whether they were current when `want` told not to wait: a second thought
        would have the engine encode nothing, which ends it.
        """
        item = self._current(wanted) if wanted.encodable else self._find(wanted)
        return item is not None and item.phase is Phase.READY and item.wanted.rows == wanted.rows

    def allocated(self, wanted: Wanted) -> None:
        """The engine has it in this step: it loads what `has` promised, and encodes what it did not."""
        item = self._find(wanted)
        if item is None or item.wanted.rows != wanted.rows:
            return
        if item.phase in (Phase.READY, Phase.GRANTED):
            item.wanted = wanted  # under this identifier: an adapter of two names has others, and the same key
        if item.phase is Phase.READY:
            self.counters[f"hit.{item.source}"] += 1
            if self.loads:
                self.counters["loaded_bytes"] += item.nbytes
                self._copy(item, Phase.LOADING)
            else:
                self._let_go(item)
        elif item.phase is Phase.GRANTED:
            self._copy(item, Phase.SAVING)
        elif item.phase in (Phase.ASKED, Phase.WAITING, Phase.MISSING):
            self._let_go(item)

    def build_step(
        self, resident: Mapping[str, Resident], now: float, *, reaches_workers: bool
    ) -> tuple[int, list[Copy], list[Copy]]:
        """The number of this step, and what its workers load and save: what was allocated, and what was granted and is
        `resident` (by identifier) since before this step, which the engine will not encode.

        What was allocated for a request that was preempted in the same pass vLLM takes to be there: it is loaded in the
        first step that `reaches_workers`.
        """
        for item in list(self._granted.values()):
            held = resident.get(item.wanted.identifier)
            if reaches_workers and held is not None and held.key == item.key and self._is_fresh(held.epoch):
                self._copy(item, Phase.SAVING)
            elif now >= item.since + GRANT_PATIENCE_S:
                self.counters["grant_unused"] += 1
                self._let_go(item)
        self._step += 1
        items: list[Item] = []
        if reaches_workers:
            items, self._copies = self._copies, items
        if items:
            self._steps[self._step] = items
        copies: dict[Phase, list[Copy]] = {Phase.LOADING: [], Phase.SAVING: []}
        for item in items:
            item.step = self._step
            wanted, nbytes = item.wanted, item.nbytes or item.wanted.nbytes
            copies[item.phase].append(
                Copy(item.number, wanted.identifier, item.offset, nbytes, wanted.rows, item.width, wanted.dtype)
            )
        return self._step, copies[Phase.LOADING], copies[Phase.SAVING]

    def steps_until(self, last: int) -> list[tuple[int, list[int]]]:
        """Steps up to this one that have not returned, with the numbers of what they copy."""
        return [(step, [item.number for item in items]) for step, items in self._steps.items() if step <= last]

    def step_returned(self, step: int, saved: dict[int, tuple[int, float]]) -> None:
        """All workers have done a step's copies; `saved` has width and cost in ms of each item that was saved."""
        for item in self._steps.pop(step, ()):
            item.step = -1
            result = saved.get(item.number)
            if item.phase is Phase.LOADING and item.dependents:
                self._set(item, Phase.READY)
            elif item.phase is not Phase.SAVING or not item.agent_holds:
                self._let_go(item)
            elif result is None or result[0] not in item.wanted.widths:
                self.counters["not_saved"] += 1
                self._let_go(item)
            else:
                width, cost_ms = result
                self._remove(item)
                item.phase = Phase.PUBLISHING
                item.width = width
                self.outbox.append(Encoded(item.number, [item.wanted.rows, width], item.wanted.dtype, cost_ms))

    def request_ended(self, request: str) -> None:
        """However it ended, or once it has all its items: it wants nothing any more."""
        self._first_seen.pop(request, None)
        for key in list(self._requests.get(request, ())):
            self._leave(request, key)
        self._requests.pop(request, None)

    @property
    def free_bytes(self) -> int:
        """Room for blocks that is left."""
        return self._extents.available

    # What the agent does

    def heard(self, message: AgentMessage, now: float) -> None:
        """One of its messages. What fits no item, or not its phase, is counted and changes nothing."""
        self._doubted = False
        if isinstance(message, messages.Started | messages.Figures):
            return
        item = self._blocks.get(message.number)
        if item is None or not item.agent_holds:
            self.counters["unexpected_message"] += 1
            return
        asked = item.phase in (Phase.ASKED, Phase.WAITING)
        if isinstance(message, messages.Waiting):
            if item.phase is Phase.ASKED:
                item.phase = Phase.WAITING
                item.deadline = now + self._wait_s + GRACE_S
                self.counters["wait"] += 1
        elif isinstance(message, messages.Granted):
            if asked and self._saves:
                self._set(item, Phase.GRANTED)
                item.since = now
                self.counters["granted"] += 1
        else:
            item.agent_holds = False
            if isinstance(message, messages.Ready) and asked:
                self._ready(item, message, now)
            elif isinstance(message, messages.Missing) and (asked or item.phase is Phase.GRANTED):
                self._fail(item, message.reason)
            elif item.phase is Phase.PUBLISHING:
                status = message.status if isinstance(message, messages.Published) else "dropped"
                self.counters[f"published.{status}"] += 1
                if status == "stored":
                    self.counters["published_bytes"] += item.nbytes
                item.phase = Phase.ENDED
            self._settle(item)

    def agent_died(self) -> None:
        """It can touch no block any more, will answer nothing, and has not read what is still to be sent."""
        self.outbox.clear()
        for item in list(self._blocks.values()):
            if not item.agent_holds:
                continue
            item.agent_holds = False
            if item.phase in (Phase.ASKED, Phase.WAITING, Phase.GRANTED):
                self._fail(item, "agent_died")
            elif item.phase is Phase.PUBLISHING:
                self.counters["published.dropped"] += 1
                item.phase = Phase.ENDED
            self._settle(item)

    # Inside

    def _find(self, wanted: Wanted) -> Item | None:
        return self._items.get(wanted.key) if wanted.key is not None else None

    def _current(self, wanted: Wanted) -> Item | None:
        """The item, unless what is staged for it is not what its key stands for any more."""
        item = self._find(wanted)
        if item is not None and item.phase is Phase.READY and not self._is_fresh(item.epoch):
            self.counters["stale"] += 1
            self._let_go(item)
            return None
        return item

    def _ask(self, key: EmbeddingKey, wanted: Wanted, now: float) -> Item | None:
        offset = self._extents.allocate(wanted.nbytes) if len(self._blocks) < MAX_BLOCKS else None
        if offset is None:
            return None
        item = Item(key, wanted, Phase.ASKED, requests=set(), now=now)
        self._numbers += 1
        item.number, item.offset, item.agent_holds = self._numbers, offset, True
        item.deadline = now + self._fetch_s + GRACE_S
        self._items[key] = self._blocks[item.number] = item
        return item

    def _message(self, item: Item) -> messages.Item:
        wanted = item.wanted
        return messages.Item(
            number=item.number,
            key=item.key,
            offset=item.offset,
            nbytes=wanted.nbytes,
            rows=wanted.rows,
            widths=list(wanted.widths),
            dtype=wanted.dtype,
            claim=self._saves and wanted.encodable,
            wait_s=self._wait_s,
        )

    def _ready(self, item: Item, message: messages.Ready, now: float) -> None:
        wanted = item.wanted
        rows, width = message.shape if len(message.shape) == 2 else (0, 0)
        if rows != wanted.rows or width not in wanted.widths or message.nbytes != rows * width * wanted.itemsize:
            self._fail(item, "unexpected")
            return
        self._set(item, Phase.READY)
        item.epoch = message.epoch
        item.width = width
        item.source = message.source
        if len(self.load_seconds) < MAX_OBSERVATIONS:
            self.load_seconds.append(now - item.since)

    def _copy(self, item: Item, phase: Phase) -> None:
        self._set(item, phase)
        self._copies.append(item)
        item.step = self._step + 1

    def _give_back(self, request: str) -> None:
        """Grants that only this request could use, which waits for another engine: that one may wait for them."""
        for key in list(self._requests[request]):
            item = self._items[key]
            if item.phase is Phase.GRANTED and item.requests == {request}:
                self.counters["grant_given_back"] += 1
                self._let_go(item)

    def _leave(self, request: str, key: EmbeddingKey) -> None:
        """A request wants this no more."""
        item = self._items[key]
        self._requests[request].discard(key)
        item.requests.discard(request)
        item.dependents.discard(request)
        if not item.requests and item.phase not in (Phase.LOADING, Phase.SAVING):
            self._let_go(item)

    def _fail(self, item: Item, reason: str) -> Item:
        """Its requests go on without it: what stands for the key now."""
        self.counters[f"miss.{reason}"] += 1
        missing = Item(item.key, item.wanted, Phase.MISSING, requests=item.requests, now=item.since)
        missing.source = reason
        item.requests = set()
        self._end(item)
        self._items[item.key] = missing
        return missing

    def _let_go(self, item: Item) -> None:
        """Nobody wants it any more; its key may be asked for anew."""
        self._remove(item)
        self._end(item)

    def _remove(self, item: Item) -> None:
        if self._items.get(item.key) is item:
            del self._items[item.key]
            for request in item.requests:
                self._requests[request].discard(item.key)
            item.requests = set()
            item.dependents = set()

    def _end(self, item: Item) -> None:
        """Tell the agent, if it does not know that yet; the block goes once nobody holds it."""
        if item.phase is not Phase.ENDED:
            self._set(item, Phase.ENDED)
            if item.agent_holds:
                self._drop(item.number)
        self._settle(item)

    def _drop(self, number: int) -> None:
        last = self.outbox[-1] if self.outbox else None
        if isinstance(last, Drop) and len(last.numbers) < MAX_ITEMS:
            last.numbers.append(number)
        else:
            self.outbox.append(Drop([number]))

    def _set(self, item: Item, phase: Phase) -> None:
        self._granted.pop(item.number, None)
        item.phase = phase
        if phase is Phase.GRANTED:
            self._granted[item.number] = item

    def _settle(self, item: Item) -> None:
        if item.phase is Phase.ENDED and not item.agent_holds and item.step < 0 and item.offset >= 0:
            self._extents.free(item.offset)
            item.offset = -1
            del self._blocks[item.number]


def _may_be_there(missed: Item, since: float) -> bool:
    """Whether a miss may be none for a request that came at `since`."""
    return missed.source in PASSING or missed.since < since
