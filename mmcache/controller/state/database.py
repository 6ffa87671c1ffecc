"""The database file of a controller's state: made whole, looked at before it is believed, opened for one owner.

Opening changes nothing in a file that is refused, nor in the `-wal` beside it: it is looked at through a read-only
connection first, since to close one that may write is to write what SQLite made of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from mmcache.controller.state.base import StateInUse, StateUnusable
from mmcache.controller.state.draft import Draft
from mmcache.controller.state.ownership import Note
from mmcache.controller.state.rows import (
    APPLICATION_ID,
    SCHEMA,
    SCHEMA_VERSION,
    SCHEMAS,
    UPGRADE,
    DamagedRow,
    State,
    read_all,
    state_row,
)

_MAGIC: Final = b"SQLite format 3\0"
_HEADER_BYTES: Final = 100
_USER_VERSION_AT: Final = 60
_APPLICATION_ID_AT: Final = 68
_BUSY_S: Final = 1.0
"""How long to wait for another program, such as one that makes a copy."""
_SETTINGS: Final = {
    "locking_mode": "exclusive",  # first of all: then no other program reads or writes it, by whatever path
    "journal_mode": "wal",
    "synchronous": 2,  # FULL: a commit is on the disk when it returns
    "cell_size_check": 1,
    "wal_autocheckpoint": 0,  # which hides its failures
    "journal_size_limit": 16 << 20,
}


def is_full(error: sqlite3.Error) -> bool:
    """Whether SQLite says that there is no room (SQLITE_FULL; before Python 3.11 only the text tells)."""
    return str(error) == "database or disk is full"


def exists(path: Path) -> bool:
    """Whether there is something at `path`. Raises StateUnusable if a database can neither be nor be made there."""
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise StateUnusable(f"{path} cannot be made: there is no directory {path.parent}. Make it") from error
        for left in _siblings(path):
            if os.path.lexists(left):
                raise StateUnusable(
                    f"{path} is gone, but {left.name}, a part of it, is still beside it. Put the database back, or move"
                    " that away too"
                ) from error
        return False
    except OSError as error:
        raise StateUnusable(f"{path} cannot be opened: {error.strerror}") from error
    if stat.S_ISLNK(status.st_mode):
        raise StateUnusable(f"{path} is a symbolic link. Give the path of the file itself: its locks lie beside it")
    if not stat.S_ISREG(status.st_mode):
        raise StateUnusable(f"{path} is not a file. Give the path of a file, which is made if it is not there")
    return True


def make(path: Path) -> None:
    """Make a new database, with a new lineage: all of it, or nothing. Raises StateUnusable."""
    draft = path.with_name(path.name + ".new")
    try:
        for left in (draft, *_siblings(draft)):  # of a start that was killed
            left.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        with contextlib.closing(_connect(draft, "rw")) as connection:
            connection.execute("BEGIN")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            for statement in SCHEMA:
                connection.execute(statement)
            row = state_row(State(lineage=secrets.token_hex(8)))
            connection.execute(f"INSERT INTO state VALUES ({', '.join('?' * len(row))})", row)  # noqa: S608
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = wal")
        draft.rename(path)
        _sync(path.parent)
    except (OSError, sqlite3.Error) as error:
        for left in (draft, *_siblings(draft)):
            with contextlib.suppress(OSError):
                left.unlink()
        reason = error.strerror if isinstance(error, OSError) else error
        raise StateUnusable(
            f"{path} cannot be made: {reason}. It needs a directory where this user may make files, and room there"
        ) from error


def inspect(path: Path, note: Note) -> State:
    """Read all of a database, and change nothing.

    Args:
        path: the file, which exists.
        note: what its last owner wrote beside it.

    Raises:
        StateUnusable: it is no database of this program's, or damaged, or has lost what was durable in it.
    """
    _check_header(path)
    with _named(path), contextlib.closing(_connect(path, _look_only(path))) as connection:
        faults = [text for (text,) in connection.execute("PRAGMA integrity_check(3)")]
        if faults != ["ok"]:
            raise StateUnusable(_damaged(path, "; ".join(map(str, faults))))
        found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        (version,) = connection.execute("PRAGMA user_version").fetchone()  # the header's may be older than the -wal's
        if version not in SCHEMAS or found != SCHEMAS[version]:
            raise StateUnusable(_damaged(path, "its tables are not those of this version"))
        try:
            state = read_all(connection)
        except DamagedRow as error:
            raise StateUnusable(_damaged(path, str(error))) from error
    if note.lineage == state.lineage and note.commits > state.commits:
        lost = f"{state.commits} transactions are in it, of {note.commits} that were durable"
        raise StateUnusable(_damaged(path, f"{lost}: its -wal was lost or damaged, or an older copy was put back"))
    return state


def connect(path: Path) -> sqlite3.Connection:
    """Open a database that was looked at, for this process alone. Raises StateUnusable."""
    with _named(path):
        connection = _connect(path, "rw")
        try:
            for name, value in _SETTINGS.items():
                connection.execute(f"PRAGMA {name} = {value}").fetchall()
                (found,) = connection.execute(f"PRAGMA {name}").fetchone()
                if found != value:
                    raise StateUnusable(
                        f"{path} cannot be used: SQLite has {found} for {name}, where {value} is needed"
                    )
            # After a failed fsync the system may show what is not on the disk. What is copied now is written anew.
            busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            if busy:
                raise StateInUse(_in_use(path))
        except BaseException:
            connection.close()
            raise
    return connection


def upgrade(path: Path, connection: sqlite3.Connection, state: State) -> State:
    """Make one of an earlier version, which was looked at, one of this; returns its state. Raises StateUnusable.

    All of it or nothing: an earlier mmcache refuses it from then on, and else opens it as it was.
    """
    with _named(path):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == SCHEMA_VERSION:
            return state
        connection.execute("BEGIN IMMEDIATE")
        for statement in UPGRADE:
            connection.execute(statement)
        draft = Draft(connection, state)
        draft.finish()
        connection.execute("COMMIT")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return draft.state


def wal_of(path: Path) -> Path:
    """The file with what was written last."""
    return path.with_name(path.name + "-wal")


def _look_only(path: Path) -> str:
    """How to open a database so that no file is made beside it: `immutable` is one that has nothing in its `-wal`."""
    try:
        return "ro" if wal_of(path).stat().st_size else "ro&immutable=1"
    except FileNotFoundError:
        return "ro&immutable=1"
    except OSError as error:
        raise StateUnusable(f"{wal_of(path)} cannot be opened: {error.strerror}") from error


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    """A connection without transactions of its own, to a file that exists."""
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)


def _check_header(path: Path) -> None:
    """Raises StateUnusable for what is not even such a database, before SQLite touches it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            header = os.pread(descriptor, _HEADER_BYTES, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StateUnusable(
            f"{path} cannot be read and written: {error.strerror}. It must be a file that this user may read and write"
        ) from error
    if len(header) < _HEADER_BYTES or not header.startswith(_MAGIC):
        what = "is empty" if not header else "is no SQLite database"
        raise StateUnusable(_damaged(path, f"the file {what}"))
    (version,) = struct.unpack_from(">i", header, _USER_VERSION_AT)
    (application,) = struct.unpack_from(">I", header, _APPLICATION_ID_AT)
    if application != APPLICATION_ID:
        raise StateUnusable(
            f"{path} is the database of another program (application_id {application:#x}). Give another path"
        )
    if version > SCHEMA_VERSION:
        raise StateUnusable(
            f"{path} was written by a newer mmcache: its schema has version {version}, and this one knows"
            f" {SCHEMA_VERSION}. Start that version, or {_way_out(path)}"
        )
    if version < min(SCHEMAS):
        raise StateUnusable(_damaged(path, f"its schema has version {version}, which no mmcache has written"))


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What SQLite says becomes an error that names the file."""
    try:
        yield
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise StateInUse(_in_use(path)) from error
        if is_full(error):
            raise StateUnusable(f"{path} cannot be opened: {error}. Make room") from error
        raise StateUnusable(_damaged(path, str(error))) from error


def _damaged(path: Path, fault: str) -> str:
    return f"{path} is damaged: {fault}. It was left as it is; {_way_out(path)}"


def _way_out(path: Path) -> str:
    files = ", ".join(file.name for file in (path, *_siblings(path)))
    return (
        f"move away what there is of {files}: the next start makes a new database with a new lineage, under which"
        " nothing old is served and all entries are computed again"
    )


def _in_use(path: Path) -> str:
    return f"{path} is in use by another program, such as an SQLite shell or a copy that is being made. End that one"


def _siblings(path: Path) -> list[Path]:
    return [path.with_name(path.name + suffix) for suffix in ("-wal", "-shm", "-journal")]


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
