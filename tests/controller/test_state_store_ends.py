"""How a state store ends: killed, without room, after a write that failed. What it said is durable is there."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from state_stores import LINEAGE, did, filled, made, quick_folder, scope, seen

from mmcache.controller.state.base import StateFull, StateInUse, StateLost, StateStore
from mmcache.controller.state.memory import Fault, MemoryStateStore
from mmcache.controller.state.sqlite import SqliteStateStore

TIMEOUT_S = 120
PROGRAM = """
import itertools, sys
sys.path.insert(0, sys.argv[2])
from mmcache.controller.state.base import StateFull, StateLost
from mmcache.controller.state.sqlite import SqliteStateStore
from state_stores import did, made
store = SqliteStateStore.open(sys.argv[1])
"""
STREAM = """
print("open", flush=True)
while True:
    number = store.head + 1
    batch = [made(number + index, idempotency_key=f"k{number + index}") for index in range(number % 3 + 1)]
    store.invalidate(batch, forget=range(max(1, number - 9), number - 5), audit=[did()])
    print(store.head, flush=True)
"""


@pytest.fixture
def path() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder / "state.db"


def started(path: Path, program: str, within: list[str] | None = None) -> list[str]:
    return [*(within or []), sys.executable, "-c", PROGRAM + program, str(path), str(Path(__file__).parent)]


def writer(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(started(path, STREAM), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


def test_the_lock_ends_with_its_process(path: Path) -> None:
    with writer(path) as process:
        with pytest.raises(StateInUse, match=f"in use by process {process.pid} on "):
            SqliteStateStore.open(path)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(StateInUse, match=f"in use by process {process.pid} on "):
            SqliteStateStore.open(path)
        process.kill()
    SqliteStateStore.open(path).close()


def test_what_a_killed_process_said_is_durable_is_there(path: Path) -> None:
    head = 0
    for lines in (1, 7, 40, 200):
        with writer(path) as process:
            assert process.stdout is not None
            told = [process.stdout.readline() for _ in range(lines)]
            process.kill()
            told += process.stdout.readlines()
        last = int([line for line in told if line.endswith("\n")][-1])
        assert last > head
        store = SqliteStateStore.open(path)
        assert last <= store.head <= last + 3, "at most the batch that nobody was told of"
        head = store.head
        for number in range(1, head + 1):
            known = store.invalidation(number)
            assert known is not None
            assert (known.selector, known.idempotency_key) == (made(number).selector, f"k{number}")
        assert [number for number, _ in store.held()][-3:] == list(range(1, head + 1))[-3:]
        store.close()


# Without room


FILL = """
def fill():
    try:
        with open(sys.argv[1] + ".other", "wb", buffering=0) as other:
            while other.write(bytes(4096)):
                pass
    except OSError:
        pass

def until_full():
    for number in itertools.count(store.head + 1):
        try:
            store.invalidate([made(number, reason="x" * 500)], audit=[did()])
        except StateFull as error:
            assert store.head == number - 1, store.head
            assert store.invalidation(number) is None
            assert store.audit(None, 1)[0][0] == store.head
            assert store.still_owner()
            return error
"""


def on_a_small_disk(folder: Path, program: str) -> str:
    """What a program prints whose database is on a file system of 1 MiB. The folder above it outlives the program."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare on this machine")
    disk = folder / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs {disk} && exec "$@"'
    within = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    command = started(disk / "state.db", FILL + program, within)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts of our own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_on_a_full_disk_nothing_changes_and_it_goes_on_once_there_is_room(tmp_path: Path) -> None:
    out = on_a_small_disk(
        tmp_path,
        """
import os, shutil
for _ in range(3):
    store.invalidate([made(store.head + 1)], audit=[did()])
    fill()
    print(until_full())
    until_full()
    disk = os.path.dirname(sys.argv[1])
    shutil.copytree(disk, disk + "/../crashed", ignore=lambda *_: ["state.db.other"], dirs_exist_ok=True)
    os.unlink(sys.argv[1] + ".other")
head = store.head
store.invalidate([made(head + 1)])
store.close()
store = SqliteStateStore.open(sys.argv[1])
assert [known.number for known in store.page(None, 1000)] == list(range(head + 1, 0, -1))
print(head)
""",
    )
    assert out.count("has no room: database or disk is full. Nothing was written; make room") == 3
    store = SqliteStateStore.open(tmp_path / "crashed" / "state.db")  # as a kill would have left it, without room
    assert store.head == len(store.page(None, 1000)) == int(out.split()[-1])
    store.invalidate([made(store.head + 1)])
    store.close()


def test_a_full_disk_at_the_start_is_told_and_leaves_what_was_there(tmp_path: Path) -> None:
    out = on_a_small_disk(
        tmp_path,
        """
import os
from mmcache.controller.state.base import StateUnusable
fill()
try:
    SqliteStateStore.open(sys.argv[1] + ".second")
except StateUnusable as error:
    print(error)
print(sorted(os.listdir(os.path.dirname(sys.argv[1]))))
""",
    )
    assert "second cannot be made: " in out
    assert "and room there" in out
    assert "second.new" not in out


def test_without_room_for_its_pages_a_write_is_taken_back(path: Path) -> None:
    store = SqliteStateStore.open(path)
    filled(store)
    before = seen(store)
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
    batch = [made(number, reason="x" * 500) for number in range(4, 100)]
    with pytest.raises(StateFull, match="Nothing was written"):
        store.invalidate(batch, forget=[2], audit=[did()])
    assert seen(store) == before
    store._connection.execute("PRAGMA max_page_count = 100000").fetchall()
    store.invalidate(batch, forget=[2])
    store.close()
    store = SqliteStateStore.open(path)
    assert store.head == 99
    store.close()


# Lost


def assert_lost(store: StateStore) -> None:
    """Nothing is written or read any more."""
    assert not store.still_owner()
    for call in (
        lambda: store.invalidate([made(store.head + 1)]),
        lambda: store.begin_term(8, 1),
        lambda: store.complete([2], 1.0),
        lambda: store.add_scopes([scope("x")]),
        lambda: store.set_setting("x", 1),
        lambda: store.record(did()),
        store.held,
        lambda: store.by_idempotency_key("k"),
    ):
        with pytest.raises(StateLost):
            call()


class Faulty:
    """A connection that fails at a statement, before or after it is carried out."""

    def __init__(self, connection: sqlite3.Connection, statement: str, error: BaseException, *, after: bool) -> None:
        self._connection = connection
        self._statement = statement
        self._error = error
        self._after = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *values: Any) -> Any:
        fails = statement.startswith(self._statement)
        if fails and not self._after:
            raise self._error
        result = self._connection.execute(statement, *values)
        if fails:
            raise self._error
        return result


FULL = "database or disk is full"


@pytest.mark.parametrize("statement", ["BEGIN", "INSERT INTO invalidations", "DELETE FROM state", "COMMIT"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), KeyboardInterrupt(), MemoryError()])
def test_a_write_of_unknown_outcome_ends_the_store(
    path: Path, statement: str, after: bool, error: BaseException
) -> None:
    store = SqliteStateStore.open(path)
    filled(store)
    before = seen(store)
    real = store._connection
    store._connection = Faulty(real, statement, error, after=after)  # type: ignore[assignment]
    with pytest.raises(StateLost if isinstance(error, sqlite3.Error) else type(error)):
        store.invalidate([made(4)], forget=[2])
    store._connection = real
    assert store.head == 3, "nobody is told of it"
    assert_lost(store)
    store.close()
    store = SqliteStateStore.open(path)
    assert store.head == (4 if statement == "COMMIT" and after else 3)
    if store.head == 3:
        assert seen(store) == {**before, "previous_ttl_ms": 5000}
    store.close()


def test_one_said_to_be_full_that_is_not_rolled_back_ends_it(path: Path) -> None:
    store = SqliteStateStore.open(path)
    real = store._connection
    store._connection = Faulty(real, "COMMIT", sqlite3.OperationalError(FULL), after=True)  # type: ignore[assignment]
    with pytest.raises(StateLost):
        store.invalidate([made(1)])
    assert_lost(store)
    store._connection = real
    store.close()


def descriptor_of(path: Path) -> int:
    (found,) = [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == str(path)]
    return int(found)


def test_after_a_failed_fsync_nothing_is_written(path: Path) -> None:
    store = SqliteStateStore.open(path)
    filled(store)
    nowhere = os.open("/dev/null", os.O_RDWR)  # which takes what is written, and has no fsync
    os.dup2(nowhere, descriptor_of(path.with_name("state.db-wal")))
    os.close(nowhere)
    with pytest.raises(StateLost, match="a write failed: disk I/O error"):
        store.invalidate([made(4)])
    assert store.head == 3
    assert_lost(store)


def test_after_a_write_that_the_system_refused_nothing_is_written(path: Path) -> None:
    program = """
import resource
store.invalidate([made(1)])
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
for _ in range(2):
    try:
        store.invalidate([made(2)])
    except StateLost as error:
        print(error, store.head, store.still_owner())
"""
    done = subprocess.run(started(path, program), check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stdout.count("a write failed: disk I/O error; the controller must stop 1 False") == 2
    store = SqliteStateStore.open(path)
    assert store.head == 1
    store.invalidate([made(2)])
    store.close()


@pytest.mark.parametrize(("text", "goes_on"), [("disk I/O error", False), (FULL, True)])
def test_a_checkpoint_that_fails_undoes_no_commit(path: Path, text: str, goes_on: bool) -> None:
    store = SqliteStateStore.open(path)
    real = store._connection
    store._connection = Faulty(real, "PRAGMA wal_checkpoint", sqlite3.OperationalError(text), after=False)  # type: ignore[assignment]
    told = 0
    try:
        for number in range(1, 300):
            store.invalidate([made(number)])
            told = number
    except StateLost as error:
        assert "a checkpoint failed" in str(error)  # noqa: PT017 - only one of the two raises
    assert (told == 299) == goes_on
    assert told >= 100
    assert store.still_owner() is goes_on
    store._connection = real
    store.close()
    store = SqliteStateStore.open(path)
    assert store.head == told
    store.close()


def test_what_is_written_last_does_not_grow(path: Path) -> None:
    store = SqliteStateStore.open(path)
    for number in range(1, 600):
        store.invalidate([made(number, reason="x" * 500)], audit=[did()])
    assert path.with_name("state.db-wal").stat().st_size < 4 << 20
    store.close()


# In memory: what a simulation has it do


@pytest.mark.parametrize(("fault", "head"), [(Fault.BEFORE, 3), (Fault.AFTER, 4)])
def test_in_memory_a_write_is_lost_before_or_after_it_took_effect(fault: Fault, head: int) -> None:
    store = MemoryStateStore(LINEAGE)
    filled(store)
    store.fault = fault
    with pytest.raises(StateLost):
        store.invalidate([made(4)])
    assert_lost(store)
    assert store.copy().head == head


def test_in_memory_there_is_no_room_once() -> None:
    store = MemoryStateStore(LINEAGE)
    store.fault = Fault.FULL
    with pytest.raises(StateFull):
        store.invalidate([made(1)])
    assert store.still_owner()
    store.invalidate([made(1)])
    assert store.head == 1


def test_in_memory_an_older_copy_is_what_was() -> None:
    store = MemoryStateStore(LINEAGE)
    filled(store)
    older = store.copy()
    before = seen(older)
    changes: list[Callable[[StateStore], None]] = [
        lambda store: store.invalidate([made(4)], forget=[2]),
        lambda store: store.add_scopes([scope("x")]),
        lambda store: store.set_setting("a", None),
        lambda store: store.begin_term(9, 9),
    ]
    for change in changes:
        change(store)
    assert seen(older) == before
    assert older.lineage == store.lineage


def test_in_memory_one_that_was_taken_away_writes_nothing() -> None:
    store = MemoryStateStore(LINEAGE)
    store.owner = False
    assert not store.still_owner()
    with pytest.raises(StateLost):
        store.invalidate([made(1)])
    assert store.copy().head == 0
