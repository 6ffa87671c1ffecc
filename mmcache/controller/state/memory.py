"""Durable state in this process's memory, for simulation, and as the model that another store is compared with."""

from __future__ import annotations

import copy
import enum
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from mmcache.controller.state.base import (
    AuditRecord,
    Invalidation,
    PinRecord,
    StateFull,
    StateLimits,
    StateLost,
    StateStore,
    check_batch,
    check_pins,
)
from mmcache.controller.state.checks import (
    check_number,
    check_numbers,
    check_page,
    check_setting_name,
    check_term,
    check_text,
    check_time,
    to_json,
)
from mmcache.errors import LifecycleError
from mmcache.key import Scope
from mmcache.selector import Selector


class Fault(enum.Enum):
    """How a write fails."""

    FULL = enum.auto()
    """There is no room."""
    BEFORE = enum.auto()
    """The store is lost, and what was written is not there at the next start."""
    AFTER = enum.auto()
    """The store is lost, and what was written is there at the next start."""


class _Contents(msgspec.Struct):
    term: int | None = None
    ttl_ms: int | None = None
    earlier_ttl_ms: int | None = None
    head: int = 0
    invalidations: dict[int, Invalidation] = {}
    held: dict[int, Selector] = {}
    pins: dict[int, PinRecord] = {}
    last_pin: int = 0
    scopes: dict[bytes, Scope] = {}
    settings: dict[str, str] = {}
    audit: dict[int, AuditRecord] = {}

    def copy(self) -> _Contents:
        copied = copy.copy(self)
        for name, value in msgspec.structs.asdict(self).items():
            if type(value) is dict:
                setattr(copied, name, value.copy())
        return copied


class MemoryStateStore(StateStore):
    """A state store that a simulation can break, and copy.

    Args:
        lineage: its lineage.
        limits: bounds.
    """

    def __init__(self, lineage: str, limits: StateLimits | None = None) -> None:
        self.fault: Fault | None = None
        """May be set: the next write fails so."""
        self.owner = True
        """May be set to False: somebody took the store away."""
        self._lineage = lineage
        self._limits = limits or StateLimits()
        self._contents = _Contents()
        self._begun = self._lost = self._closed = False

    def copy(self) -> MemoryStateStore:
        """What another process finds that opens it as it is now: at once, or later, restored from a copy."""
        copied = MemoryStateStore(self._lineage, self._limits)
        copied._contents = self._contents  # which a write replaces, and does not change
        return copied

    @property
    def lineage(self) -> str:
        """See `StateStore`."""
        return self._lineage

    @property
    def head(self) -> int:
        """See `StateStore`."""
        return self._contents.head

    @property
    def previous_ttl_ms(self) -> int | None:
        """See `StateStore`."""
        known = (self._contents.earlier_ttl_ms, None if self._begun else self._contents.ttl_ms)
        return max((ttl_ms for ttl_ms in known if ttl_ms is not None), default=None)

    def begin_term(self, term: int, ttl_ms: int) -> None:
        """See `StateStore`."""
        contents = self._read()
        check_term(term, ttl_ms)
        if term == contents.term:
            raise ValueError(f"term {term} was begun before")
        known = [ttl for ttl in (contents.earlier_ttl_ms, contents.ttl_ms) if ttl is not None]
        with self._write() as draft:
            draft.term, draft.ttl_ms, draft.earlier_ttl_ms = term, ttl_ms, max(known, default=None)
        self._begun = True

    def settle_terms(self) -> None:
        """See `StateStore`."""
        self._read()
        if not self._begun:
            raise ValueError("no term was begun")
        with self._write() as draft:
            draft.earlier_ttl_ms = None

    def still_owner(self) -> bool:
        """See `StateStore`."""
        return self.owner and not self._lost and not self._closed

    def invalidate(
        self, batch: Sequence[Invalidation], *, forget: Iterable[int] = (), audit: Sequence[AuditRecord] = ()
    ) -> None:
        """See `StateStore`."""
        contents = self._read()
        keys = check_batch(batch, contents.head)
        for known in contents.invalidations.values():
            if known.idempotency_key in keys:
                raise ValueError(f"idempotency key {known.idempotency_key!r} is that of {known.number}")
        forgotten = check_numbers(forget, contents.head + len(batch))
        with self._write() as draft:
            for invalidation in batch:
                draft.head = invalidation.number
                draft.invalidations[draft.head] = invalidation
                draft.held[draft.head] = invalidation.selector
            for number in forgotten:
                draft.held.pop(number, None)
            if batch and len(draft.held) > self._limits.max_held:
                raise StateFull(f"more than {self._limits.max_held} invalidations would be held")
            history = [number for number in draft.invalidations if number not in draft.held]
            for number in history[: max(0, len(history) - self._limits.history)]:
                del draft.invalidations[number]
            self._record(draft, audit)

    def complete(self, numbers: Iterable[int], at: float) -> None:
        """See `StateStore`."""
        contents = self._read()
        check_time("at", at)
        found = [contents.invalidations.get(number) for number in check_numbers(numbers, contents.head)]
        with self._write() as draft:
            for known in found:
                if known is not None and known.completed_at is None:
                    draft.invalidations[known.number] = msgspec.structs.replace(known, completed_at=at)

    def forget(self, numbers: Iterable[int]) -> None:
        """See `StateStore`."""
        self.invalidate((), forget=numbers)

    def held(self) -> list[tuple[int, Selector]]:
        """See `StateStore`."""
        return list(self._read().held.items())

    def pending(self) -> list[Invalidation]:
        """See `StateStore`."""
        return [known for known in self._read().invalidations.values() if known.completed_at is None]

    def invalidation(self, number: int) -> Invalidation | None:
        """See `StateStore`."""
        contents = self._read()
        check_number("number", number, 1)
        return contents.invalidations.get(number)

    def page(self, before: int | None, limit: int) -> list[Invalidation]:
        """See `StateStore`."""
        contents = self._read()
        below = check_page(before, limit)
        return [known for number, known in reversed(contents.invalidations.items()) if number < below][:limit]

    def by_idempotency_key(self, key: str) -> Invalidation | None:
        """See `StateStore`."""
        contents = self._read()
        check_text("idempotency_key", key, 128)
        return next((known for known in contents.invalidations.values() if known.idempotency_key == key), None)

    @property
    def last_pin(self) -> int:
        """See `StateStore`."""
        return self._contents.last_pin

    def change_pins(
        self, put: Sequence[PinRecord], drop: Iterable[int] = (), *, audit: Sequence[AuditRecord] = ()
    ) -> None:
        """See `StateStore`."""
        contents = self._read()
        last = check_pins(put, contents.last_pin)
        gone = check_numbers(drop, last)
        pins = {number: pin for number, pin in contents.pins.items() if number not in gone}
        pins |= {pin.id: pin for pin in put}
        if len(pins) > self._limits.max_pins and any(pin.id not in contents.pins for pin in put):
            raise StateFull(f"there would be more than {self._limits.max_pins} pins")
        with self._write() as draft:
            draft.pins, draft.last_pin = dict(sorted(pins.items())), last
            self._record(draft, audit)

    def pins(self) -> list[PinRecord]:
        """See `StateStore`."""
        return list(self._read().pins.values())

    def add_scopes(self, scopes: Iterable[Scope]) -> None:
        """See `StateStore`."""
        contents = self._read()
        new = {scope.digest: scope for scope in scopes if scope.digest not in contents.scopes}
        if not new:
            return
        if len(contents.scopes) + len(new) > self._limits.max_scopes:
            raise StateFull(f"more than {self._limits.max_scopes} scopes would be known")
        with self._write() as draft:
            draft.scopes.update(new)

    def scopes(self) -> dict[bytes, Scope]:
        """See `StateStore`."""
        return self._read().scopes.copy()

    def setting(self, name: str) -> Any:
        """See `StateStore`."""
        contents = self._read()
        check_setting_name(name)
        return msgspec.json.decode(contents.settings.get(name, "null"))

    def set_setting(self, name: str, value: object) -> None:
        """See `StateStore`."""
        contents = self._read()
        check_setting_name(name)
        encoded = to_json(name, value)
        if value is not None and name not in contents.settings and len(contents.settings) >= self._limits.max_settings:
            raise StateFull(f"more than {self._limits.max_settings} settings would be set")
        with self._write() as draft:
            if value is None:
                draft.settings.pop(name, None)
            else:
                draft.settings[name] = encoded

    def record(self, record: AuditRecord) -> None:
        """See `StateStore`."""
        self.invalidate((), audit=[record])

    def audit(
        self, before: int | None, limit: int, *, action: str | None = None, actor: str | None = None
    ) -> list[tuple[int, AuditRecord]]:
        """See `StateStore`."""
        contents = self._read()
        below = check_page(before, limit)
        for name, value, longest in (("action", action, 64), ("actor", actor, 128)):
            if value is not None:
                check_text(name, value, longest)
        found = [
            (number, record)
            for number, record in reversed(contents.audit.items())
            if number < below and action in (None, record.action) and actor in (None, record.actor)
        ]
        return found[:limit]

    def close(self) -> None:
        """See `StateStore`."""
        self._closed = True

    def _read(self) -> _Contents:
        if self._closed:
            raise LifecycleError("the state store is closed")
        if self._lost:
            raise StateLost("an earlier write failed")
        return self._contents

    @contextmanager
    def _write(self) -> Iterator[_Contents]:
        """A copy to change, which then takes effect."""
        if not self.owner:
            self._lost = True
            raise StateLost("the state store was taken away")
        draft = self._contents.copy()
        yield draft
        if draft == self._contents:
            return
        fault, self.fault = self.fault, None
        if fault is Fault.FULL:
            raise StateFull("no room")
        if fault is not Fault.BEFORE:
            self._contents = draft
        if fault is not None:
            self._lost = True
            raise StateLost("a write failed")

    def _record(self, draft: _Contents, records: Iterable[AuditRecord]) -> None:
        for record in records:
            draft.audit[max(draft.audit, default=0) + 1] = record
        while len(draft.audit) > self._limits.audit_rows:
            del draft.audit[next(iter(draft.audit))]
