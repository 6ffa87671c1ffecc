"""Between a core and its state store: what a term finds when it begins, and what it wants written."""

from __future__ import annotations

import logging
import secrets
from typing import Final

import msgspec

from mmcache.controller.announcements import MAX_REMEMBERED, Asked
from mmcache.controller.durable import MAX_TERMS, Past, PinsChange, ToWrite
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.pins import Pin
from mmcache.controller.sessions import DRIFT_BOUND
from mmcache.controller.state.base import AuditRecord, Invalidation, PinRecord, StateFull, StateLost, StateStore
from mmcache.key import mm_digest
from mmcache.selector import Selector

_log = logging.getLogger(__name__)

_PAGE: Final = 1000
_TERMS: Final = "terms"
_LONGEST_TOLD: Final = 256
"""Bytes of JSON of an mm_hash that an audit record tells as it is."""


class Recorder:
    """Writes one term. Times are seconds since 1970, and for people.

    Args:
        store: this process's own. Closed by whoever opened it.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def begin(self, limits: ControllerLimits, now: float, at: float) -> tuple[int, Past]:
        """Begin a term; returns its number, and what there was before. `now` is the core's clock, `at` the time.

        Raises StateLost, or StateFull.
        """
        store = self._store
        term = secrets.randbelow((1 << 62) - 1) + 1
        # A store that is new may stand for one that was lost, whose clients are there still.
        before_ms = max(limits.ttl_ms, store.previous_ttl_ms or 0)
        past = Past(
            lineage=store.lineage,
            head=store.head,
            held=store.held(),
            pending=[one.number for one in store.pending()],
            scopes=list(store.scopes().values()),
            remembered=self._remembered(),
            terms=add_term(store, term),
            strangers_until=now + before_ms / 1000 * (1 + DRIFT_BOUND),
            pins=pins_of(store, now, at),
            last_pin=store.last_pin,
        )
        store.begin_term(term, limits.ttl_ms)
        return term, past

    def write(self, todo: ToWrite, at: float) -> None:
        """Make it durable. Raises StateFull, after which nothing of what was asked for is, or StateLost."""
        store = self._store
        if todo.scopes:
            try:
                store.add_scopes(todo.scopes)
            except StateFull as error:  # a scope that is not known again costs computations, and nothing else
                _log.warning("scopes are not remembered: %s", error)
        if todo.asked:
            batch = [
                Invalidation(
                    number=number,
                    selector=one.selector,
                    reason=_printable(one.reason),
                    actor=_printable(one.actor),
                    at=at,
                    idempotency_key=self._new_key(one.idempotency),
                )
                for number, one in enumerate(todo.asked, todo.first)
            ]
            audit = [_audit(one, number, at) for number, one in enumerate(todo.asked, todo.first) if one.role]
            store.invalidate(batch, forget=todo.forgotten, audit=audit)
        elif todo.pins is not None:
            write_pins(store, todo.pins, at)
        try:  # what was asked for is durable by now, so that nothing else may be taken for a refusal of it
            if todo.forgotten and not todo.asked:
                store.forget(todo.forgotten)
            if todo.completed:
                store.complete(todo.completed, at)
            if todo.settled:
                store.settle_terms()
            if todo.over:
                store.change_pins((), todo.over)
        except StateFull as error:
            _log.warning("it is not remembered what is complete or over: %s", error)

    def check(self) -> None:
        """Raise StateLost where a write could not succeed any more: nobody may be told that a term goes on."""
        if not self._store.still_owner():
            raise StateLost("the controller's state was taken away, replaced, or could not be written")

    def _remembered(self) -> list[tuple[str, int]]:
        """Oldest first."""
        remembered: list[tuple[str, int]] = []
        before: int | None = None
        while len(remembered) < MAX_REMEMBERED and (page := self._store.page(before, _PAGE)):
            remembered += [(one.idempotency_key, one.number) for one in page if one.idempotency_key is not None]
            before = page[-1].number
        return remembered[MAX_REMEMBERED - 1 :: -1] if len(remembered) > MAX_REMEMBERED else remembered[::-1]

    def _new_key(self, key: str) -> str | None:
        """None for one that an invalidation has which is too old for the core to remember."""
        return key if key and self._store.by_idempotency_key(key) is None else None


def add_term(store: StateStore, term: int) -> list[tuple[int, int]]:
    """Remember where a term begins; returns those before it as `Past` has them. One that never begins does no harm."""
    terms = [(number, head) for number, head in store.setting(_TERMS) or ()]
    store.set_setting(_TERMS, [[number, head] for number, head in (*terms[1 - MAX_TERMS :], (term, store.head))])
    return terms


def pins_of(store: StateStore, now: float, at: float) -> list[Pin]:
    """The pins of a store on a core's clock, which says `now` at the time `at`."""
    return [Pin(one.id, one.selector, now + one.until - at, one.reason, one.actor) for one in store.pins()]


def write_pins(store: StateStore, change: PinsChange, at: float) -> None:
    """Make a change of pins durable at the time `at`, which is when they were asked for."""
    put = [
        PinRecord(
            id=pin.id,
            selector=pin.selector,
            until=at + pin.until - change.now,
            reason=_printable(pin.reason),
            actor=_printable(pin.actor),
        )
        for pin in change.put
    ]
    audit = [_audit_of_pins(change, at)] if change.role and (put or change.drop) else []
    store.change_pins(put, change.drop, audit=audit)


def told(selector: Selector) -> dict[str, str | None]:
    """A selector's fields for an audit record, which has room for two. A long mm_hash is told by its digest."""
    fields = selector.fields()
    if (mm_hash := fields.get("mm_hash")) is not None and len(msgspec.json.encode(mm_hash)) > _LONGEST_TOLD:
        fields["mm_hash"] = f"blake2b-256:{mm_digest(mm_hash).hex()}"
    return fields


def _audit(asked: Asked, number: int, at: float) -> AuditRecord:
    """Of an invalidation."""
    return AuditRecord(
        at=at,
        actor=_printable(asked.actor),
        role=asked.role,
        action="invalidate",
        detail={"number": number, "selector": told(asked.selector), **asked.note},
        outcome="done",
    )


def _audit_of_pins(change: PinsChange, at: float) -> AuditRecord:
    """Of pins, or their end; of several, the record tells the first."""
    detail: dict[str, object] = {"pins": len(change.put) + len(change.drop)}
    if change.put:
        first = change.put[0]
        detail |= {"id": first.id, "selector": told(first.selector), "until": at + first.until - change.now}
    else:
        detail["id"] = change.drop[0]
    return AuditRecord(
        at=at,
        actor=_printable(change.actor),
        role=change.role,
        action="pin" if change.put else "unpin",
        detail=detail,
        outcome="done",
    )


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
