"""`mmcache up` on a machine that has run out of disk or memory: it says of what and what to do, and ends whole."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from cluster import wait_until
from up_process import START_TIMEOUT_S, mmcache

from mmcache import EmbeddingKey, MMCache

TIMEOUT_S = 60.0
GIB = 1 << 30
PAGE = mmap.PAGESIZE
"""What a file of a few bytes takes there."""
SMALL = ("--segment", "64MiB")


class Mark:
    """Finds processes that were started with it in their environment, and what those started."""

    def __init__(self) -> None:
        self.environ = {"FAULTS_MARK": secrets.token_hex(16)}

    def processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["environ"])
            if self.environ.items() <= (process.info["environ"] or {}).items()
        ]


class Disk:
    """A small file system of its own, which only commands that are run through it see, and what they start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.mkdir()
        self.mark = Mark()

    def command(self, options: str, *arguments: str, filled: bool = False) -> list[Any]:
        """Arguments for subprocess: `mmcache ARGUMENTS` with it mounted, and the names of the files that are left."""
        program, environment = mmcache(*arguments, **self.mark.environ)
        fill = f"cat /dev/zero > {self.path}/other 2> /dev/null;" if filled else ""
        run = f'{fill} "$@"; status=$?; echo left: $(ls -A {self.path}); exit $status'
        script = f"mount -t tmpfs -o {options} tmpfs {self.path} || exit; {run}"
        return [["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *program], environment]

    def run(self, options: str, *arguments: str, filled: bool = False) -> tuple[int, str, list[str]]:
        """Status, stderr and the names of the files that are left, of a command that ends by itself, and ends all."""
        command, environment = self.command(options, *arguments, filled=filled)
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert self.mark.processes() == []
        return ended.returncode, ended.stderr, ended.stdout.rpartition("left: ")[2].split()

    def up(self, options: str, *arguments: str, filled: bool = False) -> tuple[int, str, list[str]]:
        """An `up` with its state directory there."""
        return self.run(options, "up", *SMALL, "--state-dir", str(self.path), *arguments, filled=filled)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    disk = Disk(tmp_path / "disk")
    status, err, _ = disk.run("size=64k", "--version")
    if status:
        pytest.skip(f"file systems cannot be mounted here: {err.strip()}")
    yield disk
    for process in disk.mark.processes():  # only of a test that failed
        process.kill()


def test_a_disk_that_is_full_from_the_start_is_named_with_what_to_do(disk: Disk) -> None:
    status, err, left = disk.up(f"size={PAGE}", filled=True)
    assert status == 1
    assert f"state directory {disk.path} cannot be used: No space left on device; remove something there" in err
    assert "Traceback" not in err
    assert left == ["lock", "other"]


def test_a_disk_without_room_for_the_client_file_is_named_and_no_half_of_it_is_left(disk: Disk) -> None:
    status, err, left = disk.up(f"size={PAGE}")  # the page goes to the lock
    assert status == 1
    assert f"{disk.path / 'client.yaml'} cannot be written: No space left on device; remove something there" in err
    assert left == ["lock"]


def test_a_part_that_ends_since_it_cannot_write_its_log_is_told_with_the_full_disk(disk: Disk) -> None:
    status, err, left = disk.up(f"size={2 * PAGE}")  # for the lock and the client file
    assert status == 1
    assert f"the file system of {disk.path} is full (0 KiB left): remove something there, or choose another" in err
    assert "client.yaml" in left
    assert not [name for name in left if name.startswith(".")]


@pytest.mark.parametrize(("inodes", "part"), [(3, "controller"), (4, "master"), (5, "owner")])
def test_a_disk_without_a_file_for_a_part_is_named_and_the_parts_before_it_end(
    disk: Disk, inodes: int, part: str
) -> None:
    status, err, _ = disk.up(f"size=1m,nr_inodes={inodes}")
    assert status == 1
    assert f"the {part} cannot be started: {disk.path / part}.log" in err
    assert "No space left on device; remove something there" in err


def test_a_ready_file_that_cannot_be_written_ends_the_cluster(disk: Disk, tmp_path: Path) -> None:
    ready = disk.path / "ready.json"
    arguments = ("--state-dir", str(tmp_path / "state"), "--ready-file", str(ready))  # the last --state-dir counts
    status, err, left = disk.up(f"size={PAGE}", *arguments, filled=True)
    assert status == 1
    assert f"{ready} cannot be written: No space left on device; remove something there" in err
    assert left == ["other"]


def test_a_cluster_goes_on_serving_when_its_disk_fills_and_ends_well(disk: Disk, tmp_path: Path) -> None:
    ready, config = tmp_path / "ready.json", tmp_path / "client.yaml"
    command, environment = disk.command(
        "size=1m", "up", *SMALL, "--state-dir", str(disk.path), "--ready-file", str(ready)
    )
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, timeout=START_TIMEOUT_S, what="the ready file")
        assert process.poll() is None, process.communicate()
        told = json.loads(ready.read_text())
        inside = Path(f"/proc/{told['pids']['up']}/root{disk.path}")
        with pytest.raises(OSError, match="No space left"):
            (inside / "other").write_bytes(bytes(2 << 20))
        addresses = told["addresses"]
        config.write_text(
            json.dumps(
                {
                    "store": {"master": addresses["master"], "sidecar": addresses["sidecar"]},
                    "control": {"address": addresses["control"]},
                }
            )
        )
        for number in range(2):  # a session begins and ends, which the controller logs
            with MMCache.connect(config, strict=True, pool_bytes="4MiB", local_entries=False) as cache:
                key = EmbeddingKey("encoder", "1", f"item-{number}")
                assert cache.put(key, torch.full((8,), float(number))).status == "stored"
                found = cache.get(key)
                assert found is not None
                assert found.tensor.tolist() == [float(number)] * 8
        os.kill(told["pids"]["up"], signal.SIGTERM)
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert (process.returncode, err) == (0, "")
        assert "Ending." in out
    finally:
        process.kill()
        process.communicate()
    assert not ready.exists()


def limited(state: Path, segment: str, nbytes: int) -> str:
    """What an `up` says that fails because no process of it may have more than `nbytes` of addresses."""
    mark = Mark()
    command, environment = mmcache("up", "--segment", segment, "--state-dir", str(state), **mark.environ)
    ended = subprocess.run(
        ["prlimit", f"--as={nbytes}", *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert mark.processes() == []
    assert ended.returncode == 1
    assert f"a process may have {nbytes >> 20:,} MiB of addresses only (ulimit -v)" in ended.stderr
    assert "raise the limit" in ended.stderr
    return ended.stderr


def test_parts_that_get_no_memory_are_told_with_the_limit_and_end(tmp_path: Path) -> None:
    assert "log ends with:" in limited(tmp_path / "state", "16MiB", GIB // 2)


def test_an_owner_that_cannot_have_its_segment_is_told_with_the_limit(tmp_path: Path) -> None:
    """The machine has the memory, so `up` begins; but the limit, which parts inherit, keeps it from the owner."""
    if psutil.virtual_memory().available < 7 * GIB:
        pytest.skip("a segment of 6 GiB is more than the memory that is available: refused before anything starts")
    assert "the owner (pid" in limited(tmp_path / "state", "6GiB", 5 * GIB)
