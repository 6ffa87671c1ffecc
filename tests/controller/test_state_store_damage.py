"""A state database that is damaged, foreign or not to be had is refused by name, and left as it was.

Whatever becomes of its bytes: what is opened is what was written, or it is not opened.
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from state_stores import did, filled, made, pinned, quick_folder, seen

from mmcache.controller.state import database, rows
from mmcache.controller.state.base import StateInUse, StateLost, StateUnusable
from mmcache.controller.state.draft import Draft
from mmcache.controller.state.ownership import Note
from mmcache.controller.state.sqlite import SqliteStateStore


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a database that holds something, and was closed."""
    path = tmp_path / "state.db"
    store = SqliteStateStore.open(path)
    filled(store)
    store.close()
    return path


@pytest.fixture
def crashed(tmp_path: Path, path: Path) -> Path:
    """The same, with a `-wal` that it needs: as its process left it that was killed."""
    store = SqliteStateStore.open(path)
    store.invalidate([made(4), made(5)], audit=[did()])
    store.complete([4], 3.0)
    folder = tmp_path / "crashed"
    folder.mkdir()
    for file in tmp_path.glob("state.db*"):
        shutil.copy(file, folder)
    store.close()
    return folder / path.name


def files(path: Path) -> dict[str, bytes]:
    """What SQLite calls the database: `-shm` is a scratchpad, and the lock is ours."""
    found = {file.name: file.read_bytes() for file in path.parent.glob(path.name + "*") if file.is_file()}
    return {name: content for name, content in found.items() if not name.endswith(("-shm", ".lock"))}


def refusal(path: Path) -> str:
    """Why it is not opened; and it is as it was, and can be tried again."""
    before = files(path)
    with pytest.raises(StateUnusable) as refused:
        SqliteStateStore.open(path)
    assert files(path) == before
    assert str(path) in str(refused.value)
    with pytest.raises(StateUnusable) as again:
        SqliteStateStore.open(path)
    assert str(again.value) == str(refused.value)
    return str(refused.value)


def sql(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_what_was_made_is_a_private_file_of_this_schema(tmp_path: Path) -> None:
    path = tmp_path / "a ?#%é.db"
    SqliteStateStore.open(path).close()
    assert sorted(file.name for file in tmp_path.iterdir() if "-shm" not in file.name) == [
        path.name,
        f"{path.name}.lock",
    ]
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert connection.execute("PRAGMA user_version").fetchone() == (rows.SCHEMA_VERSION,)
    assert connection.execute("PRAGMA application_id").fetchone() == (rows.APPLICATION_ID,)
    connection.close()


def test_each_commit_is_on_the_disk_and_nobody_else_has_the_file(path: Path) -> None:
    store = SqliteStateStore.open(path)
    for name, value in {"synchronous": 2, "journal_mode": "wal", "locking_mode": "exclusive"}.items():
        assert store._connection.execute(f"PRAGMA {name}").fetchone() == (value,)
    other = sqlite3.connect(path, timeout=0)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("SELECT * FROM state")
    other.close()
    store.close()


def test_one_that_was_moved_away_is_followed_by_one_of_another_lineage(path: Path) -> None:
    store = SqliteStateStore.open(path)
    lineage = store.lineage
    store.close()
    path.rename(path.with_name("moved"))
    store = SqliteStateStore.open(path)
    assert store.lineage != lineage
    assert (store.head, store.previous_ttl_ms, store.scopes()) == (0, None, {})
    store.close()
    path.unlink()
    path.with_name("moved").rename(path)
    store = SqliteStateStore.open(path)  # though the lock's file tells of another by now
    assert (store.lineage, store.head) == (lineage, 3)
    store.close()


def test_a_start_that_was_killed_while_it_made_one_leaves_nothing_in_the_way(tmp_path: Path) -> None:
    for name in ("state.db.new", "state.db.new-journal", "state.db.new-wal"):
        (tmp_path / name).write_bytes(b"half of it")
    SqliteStateStore.open(tmp_path / "state.db").close()
    assert not list(tmp_path.glob("*.new*"))


# What is no such database


@pytest.mark.parametrize("content", [b"", b"x", b"garbage" * 1000, b"SQLite format 3\0", bytes(8192)])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.db"
    path.write_bytes(content)
    text = refusal(path)
    assert "is empty" in text if not content else "is no SQLite database" in text
    assert "move away what there is of state.db, state.db-wal, state.db-shm, state.db-journal" in text
    assert "new lineage" in text


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    sql(path, "CREATE TABLE bookmarks (a)", "PRAGMA journal_mode = wal")
    assert "database of another program (application_id 0x0)" in refusal(path)
    sql(path, "PRAGMA application_id = 305419896")
    assert "application_id 0x12345678" in refusal(path)


@pytest.mark.parametrize(
    ("version", "says"),
    [
        (3, "written by a newer mmcache"),
        (1, "its tables are not those of this version"),
        (0, "version 0, which no mmcache"),
        (-1, "version -1"),
    ],
)
def test_another_version_is_refused(path: Path, version: int, says: str) -> None:
    sql(path, f"PRAGMA user_version = {version}")
    assert says in refusal(path)


VERSION_1 = (
    "CREATE TABLE state (id INTEGER PRIMARY KEY, lineage TEXT, head INTEGER, term INTEGER, ttl_ms INTEGER,"
    " earlier_ttl_ms INTEGER, held INTEGER, forgotten INTEGER, commits INTEGER, total INTEGER, checksum INTEGER)"
)


@pytest.fixture
def first_version(path: Path) -> Path:
    """Of a database of version 1, as mmcache wrote them before it had pins."""
    store = SqliteStateStore.open(path)
    store.change_pins([], [1, 3])
    store.close()
    connection = sqlite3.connect(path, isolation_level=None)
    *state, _last_pin, _checksum = connection.execute("SELECT * FROM state").fetchone()
    for statement in ("DROP TABLE pins", "DROP TABLE state", VERSION_1, "PRAGMA user_version = 1"):
        connection.execute(statement)
    connection.execute(f"INSERT INTO state VALUES ({', '.join('?' * 11)})", rows.sealed("state", *state))
    connection.close()
    return path


def header_version(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[60:64], "big")


def test_one_of_the_first_version_becomes_one_of_this_and_keeps_all(first_version: Path) -> None:
    path = first_version
    assert header_version(path) == 1
    store = SqliteStateStore.open(path)
    assert (store.head, store.last_pin, store.pins(), len(store.page(None, 10))) == (3, 0, [], 3)
    assert header_version(path) == rows.SCHEMA_VERSION
    before = seen(store)
    store.change_pins([pinned(1)])
    store.close()
    store = SqliteStateStore.open(path)
    assert seen(store) == {**before, "last_pin": 1, "pins": [pinned(1)]}
    store.close()


def test_one_that_was_killed_once_it_was_upgraded_is_whole(first_version: Path, tmp_path: Path) -> None:
    """Its file is of the first version still; what its `-wal` says counts."""
    state = database.inspect(first_version, Note(0, ""))
    connection = sqlite3.connect(first_version, isolation_level=None)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("BEGIN")
    for statement in rows.UPGRADE:
        connection.execute(statement)
    Draft(connection, state).finish()
    connection.execute("COMMIT")
    killed = tmp_path / "killed"
    killed.mkdir()
    for file in tmp_path.glob("state.db*"):
        shutil.copy(file, killed)
    connection.close()
    assert header_version(killed / "state.db") == 1
    store = SqliteStateStore.open(killed / "state.db")
    assert (store.head, store.pins()) == (3, [])
    store.close()


def test_a_damaged_one_of_the_first_version_is_left_as_it_is(first_version: Path) -> None:
    sql(first_version, "DELETE FROM audit WHERE id = 1")
    assert "rows are missing" in refusal(first_version)
    assert header_version(first_version) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TABLE more (a)",
        "DROP INDEX history",
        "CREATE TRIGGER t AFTER INSERT ON audit BEGIN DELETE FROM invalidations; END",
    ],
)
def test_other_tables_are_refused(path: Path, statement: str) -> None:
    sql(path, statement)
    assert "its tables are not those of this version" in refusal(path)


def test_what_is_no_file_of_its_own_is_refused(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    assert "symbolic link" in refusal(link)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    assert "symbolic link" in refusal(tmp_path / "dangling")
    assert "is not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    assert "is not a file" in refusal(tmp_path / "fifo")
    assert "there is no directory" in refusal(tmp_path / "missing" / "state.db")
    assert not (tmp_path / "missing").exists()
    (tmp_path / "other.lock").symlink_to(path)
    assert "other.lock cannot be opened" in refusal(tmp_path / "other")
    assert "cannot be opened: File name too long" in refusal(tmp_path / ("x" * 300))


def opened_elsewhere(within: list[str], path: Path) -> str:
    """Why another process cannot open it; nothing if it can."""
    program = """
import sys
from mmcache.controller.state.sqlite import SqliteStateStore
from mmcache.controller.state.base import StateUnusable
try:
    SqliteStateStore.open(sys.argv[1])
except StateUnusable as error:
    print(error)
"""
    command = [*within, sys.executable, "-c", program, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def without_rights(path: Path) -> str:
    """Why the owner of a file cannot open it who is not almighty, as root is."""
    if os.geteuid() != 0:
        return opened_elsewhere([], path)
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--user", "true"], check=False, capture_output=True).returncode:
        pytest.skip("root is almighty on this machine")
    return opened_elsewhere([unshare, "--user"], path)


def test_what_may_not_be_read_or_written_is_refused_with_what_it_needs(tmp_path: Path, path: Path) -> None:
    for mode in (0o400, 0o200, 0):
        path.chmod(mode)
        assert f"{path} cannot be read and written: Permission denied" in without_rights(path)
    path.chmod(0o600)
    tmp_path.chmod(0o500)
    try:
        assert "cannot be opened: Permission denied. It must be a file" in without_rights(tmp_path / "new.db")
    finally:
        tmp_path.chmod(0o700)
    assert without_rights(path) == ""


# What was one


def test_one_without_its_last_transactions_is_refused(crashed: Path) -> None:
    wal = crashed.with_name(crashed.name + "-wal")
    whole = wal.read_bytes()
    for length in (0, 31, len(whole) // 2, len(whole) - 1):
        wal.write_bytes(whole[:length])
        assert "of 12 that were durable: its -wal was lost" in refusal(crashed)
    wal.unlink()
    assert "10 transactions are in it, of 12 that were durable" in refusal(crashed)
    wal.write_bytes(whole)
    store = SqliteStateStore.open(crashed)
    assert store.head == 5
    store.close()


def test_an_older_copy_that_is_put_back_beside_its_lock_is_refused(path: Path) -> None:
    older = path.read_bytes()
    store = SqliteStateStore.open(path)
    store.invalidate([made(4)])
    store.close()
    path.write_bytes(older)
    assert "or an older copy was put back" in refusal(path)


def test_a_lock_that_says_nothing_hides_nothing_else(crashed: Path) -> None:
    lock = crashed.with_name(crashed.name + ".lock")
    for content in (b"", b"\xff\xfe", b"{}", b'{"pid":"x"}', bytes(256), b"[" * 300):
        lock.write_bytes(content)
        store = SqliteStateStore.open(crashed)
        assert store.head == 5
        store.close()


def test_a_part_of_one_without_the_rest_is_not_made_new(crashed: Path) -> None:
    crashed.unlink()
    text = refusal(crashed)
    assert f"{crashed} is gone, but state.db-wal, a part of it, is still beside it" in text


@pytest.mark.parametrize(
    ("statement", "row"),
    [
        ("UPDATE invalidations SET held = 0 WHERE number = 2", "row 2 of table invalidations"),
        ('UPDATE invalidations SET selector = \'{"model":"m9"}\' WHERE number = 2', "row 2 of table invalidations"),
        ("UPDATE invalidations SET number = 9 WHERE number = 2", "row 9 of table invalidations"),
        ("UPDATE invalidations SET actor = x'ff' WHERE number = 3", "row 3 of table invalidations"),
        ("UPDATE pins SET until = until + 1 WHERE id = 1", "row 1 of table pins"),
        ("DELETE FROM pins WHERE id = 1", "rows are missing"),
        ("UPDATE state SET last_pin = 2", "row 1 of table state"),
        ("UPDATE scopes SET fields = replace(fields, 'tenant', 'other')", "of table scopes"),
        ("UPDATE settings SET value = '1'", "row 'a' of table settings"),
        ("UPDATE audit SET outcome = 'done' WHERE id = 2", "row 2 of table audit"),
        ("UPDATE state SET head = 2", "row 1 of table state"),
        ("UPDATE state SET earlier_ttl_ms = 1", "row 1 of table state"),
        ("DELETE FROM state", "table state has 0 rows"),
        ("INSERT INTO state SELECT 2, lineage, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 FROM state", "table state has 2 rows"),
        ("DELETE FROM invalidations WHERE number = 2", "rows are missing"),
        ("DELETE FROM scopes", "rows are missing"),
        ("DELETE FROM settings", "rows are missing"),
        ("DELETE FROM audit WHERE id = 1", "rows are missing"),
    ],
)
def test_a_row_that_is_not_what_was_written_is_named(path: Path, statement: str, row: str) -> None:
    sql(path, statement)
    text = refusal(path)
    assert row in text
    assert "is damaged" in text


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            ("invalidations", 2, '{"mdoel":"m"}', "", "ann", 1.0, None, None, 1),
            "row 2 of table invalidations cannot be",
        ),
        (("invalidations", 2, "{}", "", "", 1.0, None, None, 1), "actor must not be empty"),
        (("invalidations", 2, "{}", "", "ann", 1.0, None, None, 2), "held must be"),
        (("invalidations", 2, "{}", b"x", "ann", 1.0, None, None, 1), "reason must be a str"),
        (("settings", "a", "{"), "row 'a' of table settings cannot be"),
        (("settings", "A", "1"), "setting's name"),
        (("audit", 1, 1.0, "ann", "operator", "pin", "[]", "done"), "detail must be a dict"),
        (("pins", 1, "{}", 1e12, "", "ann"), "until must be"),
        (("pins", 1, '{"modle":"m"}', 1.0, "", "ann"), "row 1 of table pins cannot be"),
        (("pins", 4, "{}", 1.0, "", "ann"), "row 4 of table pins is beyond the last, 3"),
        (("scopes", b"digest", '["t","m","1",null,"image"]'), "digest is not that of the fields"),
        (("state", 1, "x" * 16, 3, 1, 1, None, 0, 0, 9, 0, 3), "lineage cannot be"),
        (("state", 1, "0" * 16, -3, 1, 1, None, 0, 0, 9, 0, 3), "head must be"),
        (("state", 1, "0" * 16, 3, 1, None, None, 0, 0, 9, 0, 3), "no term without a TTL"),
        (("state", 1, "0" * 16, 3, 1, 0, None, 0, 0, 9, 0, 3), "ttl_ms must be"),
    ],
)
def test_a_row_that_cannot_be_is_refused_though_it_is_sealed(path: Path, row: tuple[str, object], says: str) -> None:
    table, *values = row
    sealed = rows.sealed(table, *values)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"DELETE FROM {table} WHERE {rows.KEYS[table]} = ?", (sealed[0],))
    connection.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(sealed))})", sealed)
    connection.close()
    assert says in refusal(path)


def test_a_number_beyond_the_head_is_refused(path: Path) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    row = rows.invalidation_row(made(4), held=True)
    connection.execute(f"INSERT INTO invalidations VALUES ({', '.join('?' * len(row))})", row)
    connection.close()
    assert "row 4 of table invalidations is beyond the head, 3" in refusal(path)


def test_truncated_anywhere_it_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in sorted({*range(0, len(whole), 4096), 1, 99, 100, 5000, len(whole) - 1}):
        path.write_bytes(whole[:length])
        assert "is damaged" in refusal(path)


def damaged_anywhere(path: Path, file: Path, damage: Callable[[bytearray, random.Random], None], tries: int) -> int:
    """How often a damaged file was refused; when it was not, all that is seen is what was written."""
    folder = path.parent
    kept = {name: (folder / name).read_bytes() for name in os.listdir(folder) if not name.endswith("-shm")}
    store = SqliteStateStore.open(path)
    written = seen(store)
    store.close()
    refused = 0
    for seed in range(tries):
        for left in folder.iterdir():
            left.unlink()
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        content = bytearray(kept[file.name])
        damage(content, random.Random(seed))
        file.write_bytes(content)
        before = files(path)
        try:
            store = SqliteStateStore.open(path)
        except StateUnusable:
            refused += 1
            assert files(path) == before, f"seed {seed}"
        else:
            assert seen(store) == written, f"seed {seed}"
            store.invalidate([made(store.head + 1)])
            store.close()
    return refused


def flip_a_bit(content: bytearray, chosen: random.Random) -> None:
    used = [position for position, byte in enumerate(content) if byte]
    content[chosen.choice(used)] ^= 1 << chosen.randrange(8)


def write_garbage(content: bytearray, chosen: random.Random) -> None:
    start = chosen.randrange(len(content))
    length = min(chosen.choice([16, 512, 4096]), len(content) - start)
    content[start : start + length] = chosen.randbytes(length)


def lose_a_page(content: bytearray, chosen: random.Random) -> None:
    start = 4096 * chosen.randrange(len(content) // 4096)
    content[start : start + 4096] = bytes(4096)


@pytest.mark.parametrize("damage", [flip_a_bit, write_garbage, lose_a_page])
def test_whatever_its_bytes_are_nothing_is_seen_that_was_not_written(path: Path, damage: Callable[..., None]) -> None:
    assert damaged_anywhere(path, path, damage, 60) > 5


@pytest.mark.parametrize("damage", [flip_a_bit, write_garbage, lose_a_page])
def test_nor_whatever_those_of_its_wal_are(crashed: Path, damage: Callable[..., None]) -> None:
    assert damaged_anywhere(crashed, crashed.with_name(crashed.name + "-wal"), damage, 40) > 20


def test_a_page_that_is_found_broken_later_ends_the_store(path: Path) -> None:
    store = SqliteStateStore.open(path)
    assert store.scopes()
    content = bytearray(path.read_bytes())
    for start in range(4096, len(content), 4096):
        content[start : start + 4096] = b"x" * 4096
    store._connection.execute("PRAGMA shrink_memory")
    path.write_bytes(content)
    with pytest.raises(StateLost, match="cannot be read"):
        seen(store)
    assert not store.still_owner()
    with pytest.raises(StateLost, match="controller must stop"):
        store.invalidate([made(4)])
    store.close()
    refusal(path)


# One owner


def test_a_second_open_is_told_who_has_it(path: Path) -> None:
    store = SqliteStateStore.open(path)
    for _ in range(2):
        with pytest.raises(StateInUse, match=f"in use by process {os.getpid()} on .*Stop that one"):
            SqliteStateStore.open(path)
    store.invalidate([made(4)])
    assert store.still_owner()
    store.close()
    SqliteStateStore.open(path).close()


def test_a_program_that_has_it_open_is_waited_for_and_named(path: Path) -> None:
    shell = sqlite3.connect(path, isolation_level=None)
    shell.execute("BEGIN")
    shell.execute("SELECT * FROM state").fetchall()
    with pytest.raises(StateInUse, match="such as an SQLite shell"):
        SqliteStateStore.open(path)
    shell.close()
    SqliteStateStore.open(path).close()


@pytest.mark.parametrize("suffix", ["", "-wal", ".lock"])
@pytest.mark.parametrize("replaced", [False, True])
def test_it_is_no_owner_once_a_file_is_not_in_its_place(path: Path, suffix: str, replaced: bool) -> None:
    store = SqliteStateStore.open(path)
    assert store.still_owner()
    file = path.with_name(path.name + suffix)
    if replaced:
        shutil.copy(file, path.with_name("copy"))
        path.with_name("copy").replace(file)
    else:
        file.rename(path.with_name("moved"))
    assert not store.still_owner()
    with pytest.raises(StateLost, match="moved, replaced or removed"):
        store.invalidate([made(4)])
    store.close()


def test_the_same_file_by_another_name_has_one_owner(path: Path) -> None:
    store = SqliteStateStore.open(path)
    os.link(path, path.with_name("other.db"))
    assert "in use by another program" in opened_elsewhere([], path.with_name("other.db"))
    store.invalidate([made(4)])
    store.close()
