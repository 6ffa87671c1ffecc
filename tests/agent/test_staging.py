"""The memory that workers, scheduler and agent share: one file, soon without a name, refused where anything is odd."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmcache.agent import staging as staging_module
from mmcache.agent.staging import HEADER_BYTES, MAX_WORKERS, Staging
from mmcache.errors import ConfigError, StoreUnavailable

NBYTES = 1 << 20


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that no other test uses, in a folder of this test's own."""
    monkeypatch.setattr(staging_module, "FOLDER", str(tmp_path))
    return f"engine-{secrets.token_hex()}"


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_what_one_writes_all_others_see(name: str) -> None:
    workers = [Staging.open_as_worker(name, NBYTES, rank) for rank in (0, 1)]
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    agent = Staging.open_as_agent(os.dup(scheduler.descriptor), NBYTES)
    agent.block(NBYTES - 4, 4)[:] = b"last"
    for other in (*workers, scheduler):
        assert bytes(other.block(NBYTES - 4, 4)) == b"last"
    assert not any(scheduler.block(0, NBYTES - 4))
    for one in (*workers, scheduler, agent):
        one.close()


def test_the_name_is_taken_away_and_the_memory_stays(name: str, tmp_path: Path) -> None:
    worker = Staging.open_as_worker(name, NBYTES, 0)
    [path] = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert name not in path.name, "whatever is in it"
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    assert not list(tmp_path.iterdir())
    scheduler.block(0, 3)[:] = b"yes"
    assert bytes(worker.block(0, 3)) == b"yes"
    assert os.fstat(scheduler.descriptor).st_blocks * 512 >= HEADER_BYTES + NBYTES, "its pages are reserved"


def test_the_scheduler_sees_which_workers_have_mapped_it(name: str) -> None:
    Staging.open_as_worker(name, NBYTES, 1)
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    assert scheduler.workers_mapped(0)
    assert not scheduler.workers_mapped(2)
    late = Staging.open_as_worker(name, NBYTES, 0)  # it finds no name, and makes another file
    assert not scheduler.workers_mapped(2)
    late.close()


def test_two_engines_of_one_name_that_start_together_do_not_share_it(name: str) -> None:
    first = Staging.open_as_worker(name, NBYTES, 0)
    with pytest.raises(ConfigError, match="engine_id"):
        Staging.open_as_worker(name, NBYTES, 0)
    first.close()  # as one that died before its scheduler came
    Staging.open_as_worker(name, NBYTES, 0).close()


def test_all_workers_are_counted(name: str) -> None:
    for rank in (2, 0, MAX_WORKERS - 1, 1):
        Staging.open_as_worker(name, NBYTES, rank)
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    assert scheduler.workers_mapped(3)
    assert not scheduler.workers_mapped(4)
    assert scheduler.epoch == 0, "ranks and words do not overlap"
    for rank in (-1, MAX_WORKERS):
        with pytest.raises(StoreUnavailable, match="staging memory serves"):
            Staging.open_as_worker(name, NBYTES, rank)


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, -1), (0, NBYTES + 1), (NBYTES, 1), (1 << 62, 1 << 62)])
def test_a_block_that_does_not_lie_within_is_refused(name: str, offset: int, nbytes: int) -> None:
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    with pytest.raises(ValueError, match="no block"):
        scheduler.block(offset, nbytes)


@pytest.mark.parametrize("nbytes", [0, -4096, 4095, 4097])
def test_a_size_that_is_not_of_whole_pages_is_refused(name: str, nbytes: int) -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        Staging.open_as_worker(name, nbytes, 0)


def test_a_file_of_another_size_is_refused(name: str) -> None:
    Staging.open_as_worker(name, NBYTES, 0)
    with pytest.raises(StoreUnavailable, match=f"has {HEADER_BYTES + NBYTES} bytes, not {HEADER_BYTES + 2 * NBYTES}"):
        Staging.open_as_scheduler(name, 2 * NBYTES)


def test_a_link_under_its_name_is_not_followed(name: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"")
    os.symlink(target, staging_module._path(name))
    with pytest.raises(StoreUnavailable, match="cannot open"):
        Staging.open_as_worker(name, NBYTES, 0)
    assert not target.stat().st_size


def test_a_file_of_another_user_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Staging.open_as_worker(name, NBYTES, 0)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreUnavailable, match="another user"):
        Staging.open_as_scheduler(name, NBYTES)


def test_no_descriptor_is_left_of_what_was_refused(name: str) -> None:
    Staging.open_as_worker(name, NBYTES, 0)
    before = os.listdir("/proc/self/fd")
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            Staging.open_as_scheduler(name, 2 * NBYTES)
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_what_is_staged_is_fresh_in_its_epoch_and_until_its_time(name: str) -> None:
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    agent = Staging.open_as_agent(os.dup(scheduler.descriptor), NBYTES)
    assert not scheduler.is_fresh(0), "not before an agent says so"
    agent.set_epoch(7)
    agent.set_fresh_until(now() + 60.0)
    assert scheduler.epoch == 7
    assert scheduler.is_fresh(7)
    assert not scheduler.is_fresh(6)
    agent.set_fresh_until(now() - 0.001)
    assert not scheduler.is_fresh(7)
    agent.set_fresh_until(0.0)
    assert not scheduler.is_fresh(7)
    agent.set_fresh_until(now() + 60.0)
    agent.set_epoch(8)
    assert not scheduler.is_fresh(7)


def test_closing_is_idempotent_and_a_block_outlives_it(name: str) -> None:
    scheduler = Staging.open_as_scheduler(name, NBYTES)
    block = scheduler.block(0, 4)
    scheduler.close()
    scheduler.close()
    block[:] = b"here"
    assert bytes(block) == b"here"
    assert scheduler.descriptor == -1


def _in_tiny_folder(folder: Path, program: str) -> str:
    """What a program prints that finds 256 KiB of shared memory."""
    source = f"from mmcache.agent import staging; staging.FOLDER = {str(folder)!r}; from pathlib import Path\n{program}"
    mount = f'mount -t tmpfs -o size=256k tmpfs {folder} && exec {sys.executable} -c "$0"'
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("no unshare on this machine")
    command = [unshare, "--user", "--map-root-user", "--mount", "sh", "-c", mount, source]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts of our own here: {done.stderr.strip()}")
    assert done.returncode == 0, done
    return done.stdout


def test_where_there_is_no_room_for_it_the_message_says_what_to_do(tmp_path: Path) -> None:
    out = _in_tiny_folder(
        tmp_path,
        """
worker = staging.Staging.open_as_worker("x", 1 << 20, 0)
try:
    staging.Staging.open_as_scheduler("x", 1 << 20)
except staging.StoreUnavailable as error:
    print(error, list(Path(staging.FOLDER).iterdir()))
""",
    )
    assert "no room for 1 MiB" in out
    assert "--shm-size" in out
    assert out.endswith("[]\n"), "and nothing is left of it"


def test_a_worker_that_finds_no_room_at_all_is_told_and_not_killed(tmp_path: Path) -> None:
    out = _in_tiny_folder(
        tmp_path,
        """
try:
    with open(staging.FOLDER + "/full", "wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
except OSError:
    pass
try:
    staging.Staging.open_as_worker("x", 1 << 20, 0)
except staging.StoreUnavailable as error:
    print(error)
""",
    )
    assert "No space left" in out
