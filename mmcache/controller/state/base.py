"""What every state store is: lineage, term, invalidations, pins, scopes, settings, audit, durable before they are told.

A controller that starts finds what the one before it had told anyone, or refuses to serve. All tables are bounded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from mmcache.controller.state.checks import check_number, check_text, check_time, to_json
from mmcache.errors import MMCacheError
from mmcache.key import Scope
from mmcache.selector import Selector


class StateUnusable(MMCacheError):
    """A state store cannot be opened, and was left as it is. The message names the file, and says what to do."""


class StateInUse(StateUnusable):
    """Another process has it; the message says which."""


class StateLost(MMCacheError):
    """What is durable is in doubt, or the store is no longer this process's own: the controller must stop.

    Each later call raises it too. What the failed write was to change is there at the next start, or is not.
    """


class StateFull(MMCacheError):
    """There is no room for what was to be written, on the disk or in its table. Nothing changed; the store goes on."""


class StateLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of the tables, in rows. Raises ValueError for one that is not from 1 to 10 million."""

    history: int = 10_000
    """Of invalidations that are held no longer; beyond it the oldest go, whether complete or not."""
    max_held: int = 250_000
    max_scopes: int = 65_536
    max_settings: int = 256
    max_pins: int = 10_000
    audit_rows: int = 100_000
    """Beyond it the oldest go."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_number(name, getattr(self, name), 1, 10_000_000)


class Invalidation(msgspec.Struct, frozen=True, kw_only=True):
    """One number of the sequence.

    Args:
        number: from 1 up.
        selector: what it is for.
        reason: for people; up to 512 printable characters.
        actor: who asked for it; 1 to 128 printable characters.
        at: when, in seconds since 1970. For people: nothing is decided by it.
        idempotency_key: what the actor called the request, 1 to 128 printable characters; None if it did not.
        completed_at: when it was complete, in seconds since 1970; None until then.

    Raises:
        ValueError: something is not what it must be; the message names it.
    """

    number: int
    selector: Selector
    reason: str
    actor: str
    at: float
    idempotency_key: str | None = None
    completed_at: float | None = None

    def __post_init__(self) -> None:
        check_number("number", self.number, 1)
        if type(self.selector) is not Selector:
            raise ValueError(f"selector must be a Selector, not {type(self.selector).__name__}")
        check_text("reason", self.reason, 512, empty=True)
        check_text("actor", self.actor, 128)
        check_time("at", self.at)
        if self.idempotency_key is not None:
            check_text("idempotency_key", self.idempotency_key, 128)
        if self.completed_at is not None:
            check_time("completed_at", self.completed_at)


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be kept, and until when.

    Args:
        id: from 1 up.
        selector: what it is for.
        until: in seconds since 1970.
        reason: for people; up to 512 printable characters.
        actor: who asked for it first; 1 to 128 printable characters.

    Raises:
        ValueError: something is not what it must be; the message names it.
    """

    id: int
    selector: Selector
    until: float
    reason: str
    actor: str

    def __post_init__(self) -> None:
        check_number("id", self.id, 1)
        if type(self.selector) is not Selector:
            raise ValueError(f"selector must be a Selector, not {type(self.selector).__name__}")
        check_time("until", self.until)
        check_text("reason", self.reason, 512, empty=True)
        check_text("actor", self.actor, 128)


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody did, or was refused.

    Args:
        at: when, in seconds since 1970.
        actor: who; 1 to 128 printable characters.
        role: as what; 1 to 32 printable characters.
        action: 1 to 64 printable characters, such as `invalidate`.
        detail: small plain data of at most 4,096 bytes in JSON.
        outcome: 1 to 512 printable characters.

    Raises:
        ValueError: something is not what it must be; the message names it.
    """

    at: float
    actor: str
    role: str
    action: str
    detail: dict[str, Any]
    outcome: str

    def __post_init__(self) -> None:
        check_time("at", self.at)
        check_text("actor", self.actor, 128)
        check_text("role", self.role, 32)
        check_text("action", self.action, 64)
        check_text("outcome", self.outcome, 512)
        if type(self.detail) is not dict:
            raise ValueError(f"detail must be a dict, not {type(self.detail).__name__}")
        to_json("detail", self.detail)


def check_batch(batch: Sequence[Invalidation], head: int) -> set[str]:
    """Invalidations to come right after `head`. Returns their idempotency keys."""
    keys: set[str] = set()
    for number, invalidation in enumerate(batch, head + 1):
        if invalidation.number != number:
            raise ValueError(f"invalidation {invalidation.number} comes where {number} does")
        if invalidation.completed_at is not None:
            raise ValueError(f"invalidation {number} is complete before it was made")
        if (key := invalidation.idempotency_key) is not None:
            if key in keys:
                raise ValueError(f"idempotency key {key!r} comes twice")
            keys.add(key)
    return keys


def check_pins(put: Sequence[PinRecord], last: int) -> int:
    """Pins to be put, of which those after the first `last` ids are new, in succession. Returns the last id then."""
    for pin in put:
        if pin.id > last + 1:
            raise ValueError(f"pin {pin.id} comes where {last + 1} does")
        last = max(last, pin.id)
    return last


class StateStore(ABC):
    """The durable state of one lineage, with one owner.

    What a call has written is durable when it returns, all of it or nothing. Any thread may make any call; a call
    waits for another thread's, but for the properties and `still_owner`, which wait for nothing. Only one thread may
    write: whoever reads `head` to number what comes next must be alone in it.

    Raises (every method but the properties, `still_owner` and `close`):
        ValueError: an argument is not what it must be. Nothing changed.
        StateFull: from a write, there is no room. Nothing changed.
        StateLost: the controller must stop.
        LifecycleError: it is closed.
    """

    @property
    @abstractmethod
    def lineage(self) -> str:
        """16 lower-case hex digits, random, made together with the store."""

    @property
    @abstractmethod
    def head(self) -> int:
        """The number of the last invalidation, 0 before the first. It never falls, whatever is forgotten."""

    @property
    @abstractmethod
    def previous_ttl_ms(self) -> int | None:
        """The largest TTL of terms before this one whose sessions may still live; None if there are none.

        Before `begin_term` the term that is stored is one of them. They are all the terms since the last that was
        alone for so long that it could call `settle_terms`.
        """

    @abstractmethod
    def begin_term(self, term: int, ttl_ms: int) -> None:
        """Begin a term. Until then nobody may be told of it.

        Args:
            term: random, positive, of at most 63 bits; ValueError if it is that of the term before.
            ttl_ms: its sessions', 1 to a day.
        """

    @abstractmethod
    def settle_terms(self) -> None:
        """All sessions of earlier terms are over: only this term's TTL counts at the next start.

        Raises ValueError before `begin_term`.
        """

    @abstractmethod
    def still_owner(self) -> bool:
        """Whether a write could still succeed: the lock is held, the file is in its place, and no write has failed.

        Costs a few system calls, no writing.
        """

    @abstractmethod
    def invalidate(
        self, batch: Sequence[Invalidation], *, forget: Iterable[int] = (), audit: Sequence[AuditRecord] = ()
    ) -> None:
        """Add invalidations, and with them forget others and record what was done: all of it or nothing.

        Args:
            batch: numbered head + 1, head + 2, …; not yet complete; each with an idempotency key that is not known.
            forget: as in `forget`; may name numbers of the batch.
            audit: as in `record`.
        """

    @abstractmethod
    def complete(self, numbers: Iterable[int], at: float) -> None:
        """Mark invalidations as complete, each by itself. One that is complete already, or gone, stays as it is.

        Args:
            numbers: up to the head.
            at: in seconds since 1970.
        """

    @abstractmethod
    def forget(self, numbers: Iterable[int]) -> None:
        """Hold these no longer, since later ones cover them: from now they are history. Says nothing to one that is.

        Args:
            numbers: up to the head.
        """

    @abstractmethod
    def held(self) -> list[tuple[int, Selector]]:
        """All that a `GenerationTable` needs to become what it was, in order."""

    @abstractmethod
    def pending(self) -> list[Invalidation]:
        """All that are not complete, in order."""

    @abstractmethod
    def invalidation(self, number: int) -> Invalidation | None:
        """The one with this number; None if it is gone or never was."""

    @abstractmethod
    def page(self, before: int | None, limit: int) -> list[Invalidation]:
        """The newest first, held or not, with numbers below `before`; up to `limit`, which is up to 1,000."""

    @abstractmethod
    def by_idempotency_key(self, key: str) -> Invalidation | None:
        """The one that was asked for with this key; None if it is gone or never was."""

    @property
    @abstractmethod
    def last_pin(self) -> int:
        """The id of the newest pin, 0 before the first. It never falls, whatever is dropped."""

    @abstractmethod
    def change_pins(
        self, put: Sequence[PinRecord], drop: Iterable[int] = (), *, audit: Sequence[AuditRecord] = ()
    ) -> None:
        """Add pins, change some, drop others, and record what was done: all of it or nothing.

        Args:
            put: with ids last_pin + 1, + 2, … where they are new; another takes the place of the one with its id.
            drop: ids up to the last; says nothing to one that is gone.
            audit: as in `record`.
        """

    @abstractmethod
    def pins(self) -> list[PinRecord]:
        """All of them, in the order of their ids, whether their time is over or not."""

    @abstractmethod
    def add_scopes(self, scopes: Iterable[Scope]) -> None:
        """Remember scopes. Writes nothing where all are known."""

    @abstractmethod
    def scopes(self) -> dict[bytes, Scope]:
        """All scopes by their digests."""

    @abstractmethod
    def setting(self, name: str) -> Any:
        """The value of a setting; None if it is not set."""

    @abstractmethod
    def set_setting(self, name: str, value: object) -> None:
        """Set it, or with None take it away.

        Args:
            name: such as `eviction.high_watermark`; up to 64 characters.
            value: plain data of at most 4,096 bytes in JSON.
        """

    @abstractmethod
    def record(self, record: AuditRecord) -> None:
        """Record what somebody did."""

    @abstractmethod
    def audit(
        self, before: int | None, limit: int, *, action: str | None = None, actor: str | None = None
    ) -> list[tuple[int, AuditRecord]]:
        """The newest first, each with its id, which grows with each record and is never used again.

        Args:
            before: ids below this; None for the newest.
            limit: up to 1,000.
            action, actor: only records with these.
        """

    @abstractmethod
    def close(self) -> None:
        """Give it up. Idempotent."""
