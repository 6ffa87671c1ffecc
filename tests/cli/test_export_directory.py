"""A directory of exports: files are whole or not there, one export at a time, and no room is no harm."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mmcache.cli.errors import InputError
from mmcache.cli.warm.directory import ExportDirectory, NotWritten, files_in

NAME = "mmc1.abc.0.0.0"


def test_a_file_appears_whole_in_place_of_what_was_there_and_no_draft_stays(tmp_path: Path) -> None:
    with ExportDirectory(tmp_path / "out") as target:
        target.add(NAME, b"one")
        target.add(NAME, b"two")
        assert not target.holds(NAME)  # it is no export
    [path] = (tmp_path / "out").iterdir()
    assert path.read_bytes() == b"two"
    assert list(files_in(tmp_path / "out")) == [path]


def test_two_exports_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    with ExportDirectory(tmp_path), pytest.raises(InputError, match="another export is writing there"):
        ExportDirectory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with ExportDirectory(tmp_path):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_a_killed_export_left_goes_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.draft").touch()
    (tmp_path / ".profile").touch()
    (tmp_path / f"{NAME}.safetensors").touch()
    with ExportDirectory(tmp_path):
        assert set(os.listdir(tmp_path)) == {".profile", f"{NAME}.safetensors"}


def test_files_of_another_world_are_not_mixed_with_ours(tmp_path: Path) -> None:
    (tmp_path / "mmc1.abc.0.0.0.safetensors").touch()
    (tmp_path / "notes.txt").touch()
    with ExportDirectory(tmp_path) as target:
        target.check_lineage("abc")
        with pytest.raises(InputError, match="which is no entry of this controller"):
            target.check_lineage("ab")


def test_a_file_that_the_system_does_not_take_is_not_there_and_the_message_says_what_to_do(tmp_path: Path) -> None:
    """As by ENOSPC, in a process that may write little."""
    program = f"""
import resource, sys
from pathlib import Path
from mmcache.cli.warm.directory import ExportDirectory, NotWritten
with ExportDirectory(Path({str(tmp_path)!r})) as target:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    target.add("mmc1.abc.0.0.1", b"x" * 1000)
    try:
        target.add("mmc1.abc.0.0.2", b"x" * 10_000)
    except NotWritten as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "an entry cannot be written: File too large; what is there already stays. Make room" in done.stdout
    assert os.listdir(tmp_path) == ["mmc1.abc.0.0.1.safetensors"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_without_room_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExportDirectory(tmp_path) as target:
        left = os.statvfs(tmp_path)
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((left[0], 4096, *left[2:4], 100, *left[5:])))
        with pytest.raises(NotWritten, match=r"has 400 KiB left, too little for the next entry of 1 KiB"):
            target.add(NAME, b"x" * 1024)
    assert os.listdir(tmp_path) == []
