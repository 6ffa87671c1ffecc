"""Durable state on SQLite: one file, one owner, one commit for each write."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from mmcache.controller.state import database, rows
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
from mmcache.controller.state.draft import Draft, find
from mmcache.controller.state.ownership import Ownership
from mmcache.controller.state.rows import Held, Row, State
from mmcache.errors import LifecycleError
from mmcache.key import Scope
from mmcache.selector import Selector

_COMMITS_PER_CHECKPOINT: Final = 128
"""So many commits are a few megabytes of `-wal`."""


class SqliteStateStore(StateStore):
    """See `StateStore`. One connection, one lock: a read of a page takes a millisecond or two, a write one fsync.

    Beside the file lie `-wal` (what was written last: a part of the database), `.lock` (which is never removed) and,
    after a crash, `-shm`.
    """

    def __init__(
        self, path: Path, ownership: Ownership, connection: sqlite3.Connection, state: State, limits: StateLimits
    ) -> None:
        self._path = path
        self._ownership = ownership
        self._connection = connection
        self._state = state
        self._limits = limits
        self._lock = threading.RLock()
        self._begun = self._closed = False
        self._fault: str | None = None
        """Why nothing may be written or read any more."""

    @classmethod
    def open(cls, path: Path, limits: StateLimits | None = None) -> SqliteStateStore:
        """Open a database, which is made, for this user only, if there is none. Reads all of it.

        Args:
            path: the file, on a local file system, in a directory that exists; no symbolic link.
            limits: bounds.

        Raises:
            StateInUse: another process has it.
            StateUnusable: it cannot be made or opened, is damaged, or of a version that is not known. It was left as
                it is.
        """
        path = Path(path)
        database.exists(path)
        ownership = Ownership.take(path)
        try:
            if not database.exists(path):
                database.make(path)
            state = database.inspect(path, ownership.found)
            connection = database.connect(path)
            try:
                ownership.watch(path)
                ownership.watch(database.wal_of(path))
                state = database.upgrade(path, connection, state)
                ownership.note(state.lineage, state.commits)
                return cls(path, ownership, connection, state, limits or StateLimits())
            except BaseException:
                connection.close()
                raise
        except BaseException:
            ownership.release()
            raise

    @property
    def lineage(self) -> str:
        """See `StateStore`."""
        return self._state.lineage

    @property
    def head(self) -> int:
        """See `StateStore`."""
        return self._state.head

    @property
    def previous_ttl_ms(self) -> int | None:
        """See `StateStore`."""
        state = self._state
        return state.earlier_ttl_ms if self._begun else _larger(state.earlier_ttl_ms, state.ttl_ms)

    def begin_term(self, term: int, ttl_ms: int) -> None:
        """See `StateStore`."""
        check_term(term, ttl_ms)
        with self._reading():
            if term == self._state.term:
                raise ValueError(f"term {term} was begun before")
            with self._writing() as draft:
                draft.state.earlier_ttl_ms = _larger(draft.state.earlier_ttl_ms, draft.state.ttl_ms)
                draft.state.term, draft.state.ttl_ms = term, ttl_ms
            self._begun = True

    def settle_terms(self) -> None:
        """See `StateStore`."""
        with self._reading():
            if not self._begun:
                raise ValueError("no term was begun")
            if self._state.earlier_ttl_ms is not None:
                with self._writing() as draft:
                    draft.state.earlier_ttl_ms = None

    def still_owner(self) -> bool:
        """See `StateStore`."""
        return self._fault is None and self._ownership.holds()

    def invalidate(
        self, batch: Sequence[Invalidation], *, forget: Iterable[int] = (), audit: Sequence[AuditRecord] = ()
    ) -> None:
        """See `StateStore`."""
        with self._reading():
            for key in check_batch(batch, self.head):
                if (earlier := self.by_idempotency_key(key)) is not None:
                    raise ValueError(f"idempotency key {key!r} is that of {earlier.number}")
            forgotten = check_numbers(forget, self.head + len(batch))
            new = {invalidation.number: invalidation for invalidation in batch}
            old = [known.invalidation for number in forgotten if (known := self._find(number)) and known.held]
            old += [new[number] for number in forgotten if number in new]
            if batch and self._state.held + len(batch) - len(old) > self._limits.max_held:
                raise StateFull(f"more than {self._limits.max_held} invalidations would be held")
            if not (batch or old or audit):
                return
            with self._writing() as draft:
                for invalidation in batch:
                    draft.put("invalidations", rows.invalidation_row(invalidation, held=True))
                for invalidation in old:
                    draft.put("invalidations", rows.invalidation_row(invalidation, held=False))
                draft.state.head += len(batch)
                draft.state.held += len(batch) - len(old)
                draft.state.forgotten += len(old)
                self._drop_history(draft)
                self._record(draft, audit)

    def complete(self, numbers: Iterable[int], at: float) -> None:
        """See `StateStore`."""
        check_time("at", at)
        with self._reading():
            found = [known for number in check_numbers(numbers, self.head) if (known := self._find(number))]
            ended = [known for known in found if known.invalidation.completed_at is None]
            if ended:
                with self._writing() as draft:
                    for invalidation, held in ended:
                        complete = msgspec.structs.replace(invalidation, completed_at=at)
                        draft.put("invalidations", rows.invalidation_row(complete, held=held))

    def forget(self, numbers: Iterable[int]) -> None:
        """See `StateStore`."""
        self.invalidate((), forget=numbers)

    def held(self) -> list[tuple[int, Selector]]:
        """See `StateStore`."""
        with self._reading():
            found = self._invalidations("WHERE held = 1 ORDER BY number")
            return [(invalidation.number, invalidation.selector) for invalidation in found]

    def pending(self) -> list[Invalidation]:
        """See `StateStore`."""
        with self._reading():
            return self._invalidations("WHERE completed_at IS NULL ORDER BY number")

    def invalidation(self, number: int) -> Invalidation | None:
        """See `StateStore`."""
        check_number("number", number, 1)
        with self._reading():
            known = self._find(number)
            return None if known is None else known.invalidation

    def page(self, before: int | None, limit: int) -> list[Invalidation]:
        """See `StateStore`."""
        below = check_page(before, limit)
        with self._reading():
            return self._invalidations("WHERE number < ? ORDER BY number DESC LIMIT ?", below, limit)

    def by_idempotency_key(self, key: str) -> Invalidation | None:
        """See `StateStore`."""
        check_text("idempotency_key", key, 128)
        with self._reading():
            return next(iter(self._invalidations("WHERE idempotency_key = ?", key)), None)

    @property
    def last_pin(self) -> int:
        """See `StateStore`."""
        return self._state.last_pin

    def change_pins(
        self, put: Sequence[PinRecord], drop: Iterable[int] = (), *, audit: Sequence[AuditRecord] = ()
    ) -> None:
        """See `StateStore`."""
        with self._reading():
            last = check_pins(put, self.last_pin)
            new = {pin.id: pin for pin in put}
            dropped = [number for number in check_numbers(drop, last) if number not in new]
            gone = [number for number in dropped if self._row("pins", number) is not None]
            added = sum(self._row("pins", number) is None for number in new)
            if added and self._count("pins") + added - len(gone) > self._limits.max_pins:
                raise StateFull(f"there would be more than {self._limits.max_pins} pins")
            if not (new or gone or audit):
                return
            with self._writing() as draft:
                for number in gone:
                    draft.drop("pins", number)
                for pin in new.values():
                    draft.put("pins", rows.pin_row(pin))
                draft.state.last_pin = last
                self._record(draft, audit)

    def pins(self) -> list[PinRecord]:
        """See `StateStore`."""
        with self._reading():
            return [rows.read_pin(row) for row in self._connection.execute("SELECT * FROM pins ORDER BY id")]

    def add_scopes(self, scopes: Iterable[Scope]) -> None:
        """See `StateStore`."""
        with self._reading():
            new = {scope.digest: scope for scope in scopes}
            for digest in [digest for digest in new if self._row("scopes", digest) is not None]:
                del new[digest]
            if not new:
                return
            if self._count("scopes") + len(new) > self._limits.max_scopes:
                raise StateFull(f"more than {self._limits.max_scopes} scopes would be known")
            with self._writing() as draft:
                for scope in new.values():
                    draft.put("scopes", rows.scope_row(scope))

    def scopes(self) -> dict[bytes, Scope]:
        """See `StateStore`."""
        with self._reading():
            return {row[0]: rows.read_scope(row) for row in self._connection.execute("SELECT * FROM scopes")}

    def setting(self, name: str) -> Any:
        """See `StateStore`."""
        check_setting_name(name)
        with self._reading():
            row = self._row("settings", name)
            return None if row is None else rows.read_setting(row)[1]

    def set_setting(self, name: str, value: object) -> None:
        """See `StateStore`."""
        check_setting_name(name)
        to_json(name, value)
        with self._reading():
            known = self._row("settings", name)
            if value is None and known is None:
                return
            if known is None and self._count("settings") >= self._limits.max_settings:
                raise StateFull(f"more than {self._limits.max_settings} settings would be set")
            with self._writing() as draft:
                if value is None:
                    draft.drop("settings", name)
                else:
                    draft.put("settings", rows.setting_row(name, value))

    def record(self, record: AuditRecord) -> None:
        """See `StateStore`."""
        self.invalidate((), audit=[record])

    def audit(
        self, before: int | None, limit: int, *, action: str | None = None, actor: str | None = None
    ) -> list[tuple[int, AuditRecord]]:
        """See `StateStore`."""
        wanted: dict[str, str | int] = {"id < ?": check_page(before, limit)}
        if action is not None:
            check_text("action", action, 64)
            wanted["action = ?"] = action
        if actor is not None:
            check_text("actor", actor, 128)
            wanted["actor = ?"] = actor
        query = f"SELECT * FROM audit WHERE {' AND '.join(wanted)} ORDER BY id DESC LIMIT ?"  # noqa: S608 - names of our own
        with self._reading():
            return [rows.read_audit(row) for row in self._connection.execute(query, (*wanted.values(), limit))]

    def close(self) -> None:
        """See `StateStore`."""
        with self._lock:
            self._closed = True
            self._connection.close()
            self._ownership.release()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """The lock. What SQLite cannot read, or is not what was written, is the end of the store."""
        with self._lock:
            if self._closed:
                raise LifecycleError(f"{self._path} is closed")
            if self._fault is not None:
                raise StateLost(f"{self._path} is lost since {self._fault}; the controller must stop")
            try:
                yield
            except (sqlite3.Error, rows.DamagedRow) as error:
                raise self._lose(f"it cannot be read: {error}") from error

    @contextmanager
    def _writing(self) -> Iterator[Draft]:
        """One transaction, within `_reading`: durable after the block, or not there and the store goes on, or lost."""
        if not self._ownership.holds():
            raise self._lose("it, its -wal or its .lock was moved, replaced or removed")
        draft = Draft(self._connection, msgspec.structs.replace(self._state))
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield draft
            draft.finish()
            self._connection.execute("COMMIT")
            self._state = draft.state
        except sqlite3.Error as error:
            if database.is_full(error) and self._rolled_back():
                raise StateFull(f"{self._path} has no room: {error}. Nothing was written; make room") from error
            raise self._lose(f"a write failed: {error}") from error
        except BaseException:  # an interrupt may come on either side of the commit
            self._lose("a write was interrupted")
            raise
        self._ownership.note(self.lineage, self._state.commits)
        if self._state.commits % _COMMITS_PER_CHECKPOINT == 0:
            self._checkpoint()

    def _rolled_back(self) -> bool:
        """End a transaction for which there was no room. True if all is as it was before.

        SQLite gives up at the first page that does not fit into the `-wal`, before the one that would make a commit
        of them. What it wrote is overwritten by the next transaction, and is nothing to whoever opens the file.
        """
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            return self._row("state", 1) == rows.state_row(self._state)
        except sqlite3.Error:
            return False

    def _lose(self, fault: str) -> StateLost:
        """From now nothing is written or read; returns the error to raise."""
        if self._fault is None:
            self._fault = fault
        return StateLost(f"{self._path} is lost since {fault}; the controller must stop")

    def _checkpoint(self) -> None:
        """Copy what is in the `-wal` to its place. The commit before it is durable without, so it raises nothing."""
        try:
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            if not database.is_full(error):  # then it all stays in the -wal
                self._lose(f"a checkpoint failed: {error}")

    def _row(self, table: str, key: object) -> Row | None:
        return find(self._connection, "*", table, key)

    def _find(self, number: int) -> Held | None:
        row = self._row("invalidations", number)
        return None if row is None else rows.read_invalidation(row)

    def _invalidations(self, where: str, *values: object) -> list[Invalidation]:
        found = self._connection.execute(f"SELECT * FROM invalidations {where}", values)  # noqa: S608 - names of our own
        return [rows.read_invalidation(row).invalidation for row in found]

    def _count(self, table: str) -> int:
        (count,) = self._connection.execute(f"SELECT count(*) FROM {table}").fetchone()  # noqa: S608 - names of our own
        return int(count)

    def _drop_history(self, draft: Draft) -> None:
        surplus = draft.state.forgotten - self._limits.history
        if surplus > 0:
            query = "SELECT number FROM invalidations WHERE held = 0 ORDER BY number LIMIT ?"
            for (number,) in self._connection.execute(query, (surplus,)).fetchall():
                draft.drop("invalidations", number)
            draft.state.forgotten = self._limits.history

    def _record(self, draft: Draft, records: Sequence[AuditRecord]) -> None:
        if records:
            (newest,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM audit").fetchone()
            for number, record in enumerate(records, newest + 1):
                draft.put("audit", rows.audit_row(number, record))
            surplus = newest + len(records) - self._limits.audit_rows
            for (number,) in self._connection.execute("SELECT id FROM audit WHERE id <= ?", (surplus,)).fetchall():
                draft.drop("audit", number)


def _larger(left: int | None, right: int | None) -> int | None:
    return max((value for value in (left, right) if value is not None), default=None)
