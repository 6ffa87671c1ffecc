"""What a controller keeps on disk, as its server would: the core's wishes written to a state store, and its past."""

from __future__ import annotations

from mmcache.controller.durable import Past, ToWrite
from mmcache.controller.recorder import add_term, pins_of, write_pins
from mmcache.controller.sessions import DRIFT_BOUND
from mmcache.controller.state.base import Invalidation
from mmcache.controller.state.memory import MemoryStateStore
from mmcache.selector import Selector


class Disk:
    """One database, and whoever has opened it last.

    Args:
        lineage: made together with it.
        before_ttl_ms: the TTL of whoever was here before it; None: nobody was.
    """

    def __init__(self, lineage: str, before_ttl_ms: int | None) -> None:
        self.lineage = lineage
        self._before_ttl_ms = before_ttl_ms
        self.state = MemoryStateStore(lineage)

    def restore(self, copy: MemoryStateStore) -> None:
        """An older copy is put in its place."""
        self.state = copy

    def open(self, *, term: int, ttl_ms: int, now: float, at: float) -> Past:
        """Begin a term, on a clock that says `now` at the time `at`."""
        self.state = state = self.state.copy()
        known = self._before_ttl_ms if state.previous_ttl_ms is None else state.previous_ttl_ms
        past = Past(
            lineage=state.lineage,
            head=state.head,
            held=state.held(),
            pending=[one.number for one in state.pending()],
            scopes=list(state.scopes().values()),
            remembered=[
                (one.idempotency_key, one.number)
                for one in reversed(state.page(None, 1000))
                if one.idempotency_key is not None
            ],
            terms=add_term(state, term),
            strangers_until=None if known is None else now + known / 1000 * (1 + DRIFT_BOUND),
            pins=pins_of(state, now, at),
            last_pin=state.last_pin,
        )
        state.begin_term(term, ttl_ms)
        return past

    def write(self, todo: ToWrite, at: float) -> list[tuple[int, Selector]]:
        """Write all of it at this time; returns the numbers of what was asked for. Raises StateFull or StateLost.

        What may be lost comes first, so that whatever fails, it is not known to be the invalidations alone.
        """
        state = self.state
        state.add_scopes(todo.scopes)
        if todo.completed:
            state.complete(todo.completed, at)
        batch = [
            Invalidation(
                number=number,
                selector=one.selector,
                reason=one.reason,
                actor=one.actor,
                at=at,
                idempotency_key=one.idempotency or None,
            )
            for number, one in enumerate(todo.asked, todo.first)
        ]
        if batch or todo.forgotten:
            state.invalidate(batch, forget=todo.forgotten)
        if todo.over:
            state.change_pins((), todo.over)
        if todo.pins is not None:
            write_pins(state, todo.pins, at)
        return [(one.number, one.selector) for one in batch]
