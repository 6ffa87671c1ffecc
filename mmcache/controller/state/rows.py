"""The rows of a state database: what stands in their columns, each sealed with a checksum.

SQLite finds a broken page, but neither a value that became another nor a row that is gone. So each row ends with a
checksum of its table and its values, and the one row of `state` has the sum of all others'. A value that is not what
was written is then never believed: the database is damaged.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import xxhash

from mmcache.controller.state.base import AuditRecord, Invalidation, PinRecord
from mmcache.controller.state.checks import MAX_NUMBER, MAX_TTL_MS, check_number, check_setting_name, to_json
from mmcache.key import Scope
from mmcache.selector import Selector

Row = tuple[Any, ...]
Decoded = TypeVar("Decoded")

APPLICATION_ID: Final = 0x6D6D6331
"""`mmc1`: says in a file's header that the database is one of these."""
SCHEMA_VERSION: Final = 2
SCHEMA: Final = (
    "CREATE TABLE state (id INTEGER PRIMARY KEY, lineage TEXT, head INTEGER, term INTEGER, ttl_ms INTEGER,"
    " earlier_ttl_ms INTEGER, held INTEGER, forgotten INTEGER, commits INTEGER, total INTEGER, last_pin INTEGER,"
    " checksum INTEGER)",
    "CREATE TABLE pins (id INTEGER PRIMARY KEY, selector TEXT, until REAL, reason TEXT, actor TEXT, checksum INTEGER)",
    "CREATE TABLE invalidations (number INTEGER PRIMARY KEY, selector TEXT, reason TEXT, actor TEXT, at REAL,"
    " idempotency_key TEXT, completed_at REAL, held INTEGER, checksum INTEGER)",
    "CREATE UNIQUE INDEX by_idempotency_key ON invalidations (idempotency_key) WHERE idempotency_key IS NOT NULL",
    "CREATE INDEX history ON invalidations (number) WHERE held = 0",
    "CREATE TABLE scopes (digest BLOB PRIMARY KEY, fields TEXT, checksum INTEGER) WITHOUT ROWID",
    "CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT, checksum INTEGER) WITHOUT ROWID",
    "CREATE TABLE audit (id INTEGER PRIMARY KEY, at REAL, actor TEXT, role TEXT, action TEXT, detail TEXT,"
    " outcome TEXT, checksum INTEGER)",
)
"""The text is compared with what a database says of itself: each change of it needs another version."""
_STATE_1: Final = (
    "CREATE TABLE state (id INTEGER PRIMARY KEY, lineage TEXT, head INTEGER, term INTEGER, ttl_ms INTEGER,"
    " earlier_ttl_ms INTEGER, held INTEGER, forgotten INTEGER, commits INTEGER, total INTEGER, checksum INTEGER)"
)
SCHEMAS: Final = {1: frozenset({_STATE_1, *SCHEMA[2:]}), SCHEMA_VERSION: frozenset(SCHEMA)}
"""Of all versions that can be opened. Version 1 had no pins."""
UPGRADE: Final = ("DROP TABLE state", *SCHEMA[:2], f"PRAGMA user_version = {SCHEMA_VERSION}")
"""Makes version 2 of version 1, but for the row of `state`, which is to be written anew."""
KEYS: Final = {
    "invalidations": "number",
    "pins": "id",
    "scopes": "digest",
    "settings": "name",
    "audit": "id",
    "state": "id",
}
"""The tables, with the column that names a row."""

_LINEAGE_DIGITS: Final = 16
_msgpack: Final = msgspec.msgpack.Encoder()
_selector: Final = msgspec.json.Decoder(Selector)
_scope: Final = msgspec.json.Decoder(Scope)


class DamagedRow(Exception):
    """A row is not what was written. The text names it."""


class State(msgspec.Struct):
    """The row of `state`. Fields as in `StateStore`; `total` is the sum of the checksums of all other rows.

    One of version 1 lacks the last.
    """

    lineage: str
    head: int = 0
    term: int | None = None
    ttl_ms: int | None = None
    earlier_ttl_ms: int | None = None
    held: int = 0
    forgotten: int = 0
    commits: int = 0
    total: int = 0
    last_pin: int = 0

    def __post_init__(self) -> None:
        if len(self.lineage) != _LINEAGE_DIGITS or not set(self.lineage) <= set("0123456789abcdef"):
            raise ValueError(f"lineage cannot be {self.lineage!r}")
        for name in ("head", "held", "forgotten", "commits", "last_pin"):
            check_number(name, getattr(self, name), 0)
        check_number("total", self.total, -MAX_NUMBER - 1)
        if (self.term is None) is not (self.ttl_ms is None):
            raise ValueError("there is no term without a TTL")
        if self.term is not None:
            check_number("term", self.term, 1)
            check_number("ttl_ms", self.ttl_ms, 1, MAX_TTL_MS)
        if self.earlier_ttl_ms is not None:
            check_number("earlier_ttl_ms", self.earlier_ttl_ms, 1, MAX_TTL_MS)


class Held(NamedTuple):
    """A row of `invalidations`."""

    invalidation: Invalidation
    held: bool


def sealed(table: str, *values: object) -> Row:
    """A row, with its checksum."""
    return *values, _signed(xxhash.xxh3_64_intdigest(_msgpack.encode((table, *values))))


def added(total: int, checksum: int) -> int:
    """A sum of checksums, which stays within 64 bits."""
    return _signed(total + checksum)


def state_row(state: State) -> Row:
    """The row of `state`."""
    return sealed("state", 1, *(getattr(state, name) for name in State.__struct_fields__))


def invalidation_row(invalidation: Invalidation, *, held: bool) -> Row:
    """A row of `invalidations`."""
    completed_at = invalidation.completed_at
    return sealed(
        "invalidations",
        invalidation.number,
        msgspec.json.encode(invalidation.selector).decode(),
        invalidation.reason,
        invalidation.actor,
        _real(invalidation.at),
        invalidation.idempotency_key,
        None if completed_at is None else _real(completed_at),
        int(held),
    )


def pin_row(pin: PinRecord) -> Row:
    """A row of `pins`."""
    selector = msgspec.json.encode(pin.selector).decode()
    return sealed("pins", pin.id, selector, _real(pin.until), pin.reason, pin.actor)


def scope_row(scope: Scope) -> Row:
    """A row of `scopes`."""
    return sealed("scopes", scope.digest, msgspec.json.encode(scope).decode())


def setting_row(name: str, value: object) -> Row:
    """A row of `settings`."""
    return sealed("settings", name, to_json(name, value))


def audit_row(number: int, record: AuditRecord) -> Row:
    """A row of `audit`."""
    detail = to_json("detail", record.detail)
    return sealed("audit", number, _real(record.at), record.actor, record.role, record.action, detail, record.outcome)


def read_state(row: Row) -> State:
    """The row of `state`. Raises DamagedRow, as all of these do."""
    return _read("state", row, _state)


def read_invalidation(row: Row) -> Held:
    """A row of `invalidations`."""
    return _read("invalidations", row, _held)


def read_pin(row: Row) -> PinRecord:
    """A row of `pins`."""
    return _read("pins", row, _pin)


def read_scope(row: Row) -> Scope:
    """A row of `scopes`."""
    return _read("scopes", row, _checked_scope)


def read_setting(row: Row) -> tuple[str, Any]:
    """A row of `settings`: name and value."""
    return _read("settings", row, _setting)


def read_audit(row: Row) -> tuple[int, AuditRecord]:
    """A row of `audit`: its id and what it records."""
    return _read("audit", row, _audit)


def read_all(connection: sqlite3.Connection) -> State:
    """Read every row. Returns that of `state`, with which all others agree; else raises DamagedRow."""
    rows = connection.execute("SELECT * FROM state").fetchall()
    if [row[0] for row in rows] != [1]:
        raise DamagedRow(f"table state has {len(rows)} rows, not one that is numbered 1")
    state = read_state(rows[0])
    total = held = forgotten = 0
    readers: dict[str, Callable[[Row], object]] = {
        "invalidations": read_invalidation,
        "pins": read_pin,
        "scopes": read_scope,
        "settings": read_setting,
        "audit": read_audit,
    }
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version < SCHEMA_VERSION:
        del readers["pins"]
    for table, read in readers.items():
        for row in connection.execute(f"SELECT * FROM {table}"):  # noqa: S608 - names of our own
            found = read(row)
            total = added(total, row[-1])
            if isinstance(found, Held):
                held += found.held
                forgotten += not found.held
                if found.invalidation.number > state.head:
                    raise DamagedRow(f"row {row[0]} of table invalidations is beyond the head, {state.head}")
            elif isinstance(found, PinRecord) and found.id > state.last_pin:
                raise DamagedRow(f"row {row[0]} of table pins is beyond the last, {state.last_pin}")
    if (total, held, forgotten) != (state.total, state.held, state.forgotten):
        raise DamagedRow("rows are missing, or are older than others")
    return state


def _read(table: str, row: Row, decode: Callable[..., Decoded]) -> Decoded:
    *values, checksum = row
    if sealed(table, *values)[-1] != checksum:
        raise DamagedRow(f"row {row[0]!r} of table {table} does not have the checksum that it says")
    try:
        return decode(*values)
    except (ValueError, TypeError, msgspec.DecodeError) as error:  # sealed by something that is not this program
        raise DamagedRow(f"row {row[0]!r} of table {table} cannot be: {error}") from error


def _state(_: int, *values: Any) -> State:
    return State(*values)


def _held(
    number: int, selector: str, reason: str, actor: str, at: float, key: str, completed_at: float, held: int
) -> Held:
    check_number("held", held, 0, 1)
    invalidation = Invalidation(
        number=number,
        selector=_selector.decode(selector),
        reason=reason,
        actor=actor,
        at=at,
        idempotency_key=key,
        completed_at=completed_at,
    )
    return Held(invalidation, bool(held))


def _pin(number: int, selector: str, until: float, reason: str, actor: str) -> PinRecord:
    return PinRecord(id=number, selector=_selector.decode(selector), until=until, reason=reason, actor=actor)


def _checked_scope(digest: bytes, fields: str) -> Scope:
    scope = _scope.decode(fields)
    if scope.digest != digest:
        raise ValueError("the digest is not that of the fields")
    return scope


def _setting(name: str, value: str) -> tuple[str, Any]:
    check_setting_name(name)
    return name, msgspec.json.decode(value)


def _audit(
    number: int, at: float, actor: str, role: str, action: str, detail: str, outcome: str
) -> tuple[int, AuditRecord]:
    check_number("id", number, 1)
    decoded = msgspec.json.decode(detail)
    return number, AuditRecord(at=at, actor=actor, role=role, action=action, detail=decoded, outcome=outcome)


def _real(seconds: float) -> float:
    """As SQLite gives it back: it keeps -0.0 as 0."""
    return float(seconds) + 0.0


def _signed(number: int) -> int:
    """The low 64 bits, as SQLite's signed integer."""
    return ((number + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)
