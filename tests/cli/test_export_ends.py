"""An export that is interrupted, is killed or finds no room leaves no partial file, and goes on from there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import wait_until
from commands import run
from serving import Serving, key_of
from up_process import mmcache

from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.directory import files_in
from mmcache.cli.warm.transfers import AT_ONCE

TOKEN = "viewer-" + "v" * 20
COUNT = 12
TIMEOUT_S = 90

GATED = """
import os, pathlib, sys, time
from mmcache.cli.__main__ import main
gate, after, real, calls = pathlib.Path(sys.argv.pop(1)), int(sys.argv.pop(1)), os.{call}, []
def gated(*arguments, **more):
    calls.append(1)
    while len(calls) > after and not gate.exists():
        time.sleep(0.01)
    return real(*arguments, **more)
os.{call} = gated
main()
"""
"""The command with a file system that stands still, from some call on, until a file is there."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20, admin_tokens=f"- {{name: grafana, role: viewer, token: {TOKEN}}}") as cluster:
        cache = cluster.connect(local_entries=False)
        for number in range(COUNT):  # of 64 KiB
            assert cache.put(key_of(number), torch.full((1 << 14,), float(number))).readable
        yield cluster


def command(serving: Serving, *arguments: str | Path) -> list[Any]:
    """Arguments for subprocess."""
    return mmcache(*map(str, arguments), **settings_of(serving))


def settings_of(serving: Serving) -> dict[str, str]:
    return {
        "MMCACHE_CONFIG": str(serving.config),
        "MMCACHE_CONTROL__ADMIN": serving.controller.admin,
        "MMCACHE_TOKEN": TOKEN,
    }


def whole(directory: Path) -> int:
    """How many files there are, each of which is whole; and there is nothing else."""
    paths = list(files_in(directory))
    assert sorted(path.name for path in paths) == sorted(os.listdir(directory))
    for path in paths:
        peek = embedding_file.peek(path)
        assert peek.record is not None
        embedding_file.read(path, peek.record)
    return len(paths)


class Gated:
    """An export that stands still while it writes its first files."""

    def __init__(self, serving: Serving, directory: Path, gate: Path) -> None:
        [_, _, _, *arguments], environment = command(serving, "export", directory, "--json")
        program = [sys.executable, "-c", GATED.format(call="fsync"), str(gate), "0", *arguments]
        self._gate = gate
        self.process = subprocess.Popen(
            program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            wait_until(lambda: drafts(directory) == AT_ONCE, timeout=TIMEOUT_S, what="files that are being written")
        except BaseException:
            self.process.kill()
            raise

    def __enter__(self) -> Gated:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def open(self) -> None:
        self._gate.touch()


def drafts(directory: Path) -> int:
    return drafts_among(os.listdir(directory)) if directory.exists() else 0


def finish(serving: Serving, directory: Path, *, exported: int) -> None:
    """The same export once more does the rest."""
    done = run("export", directory, "--json", **settings_of(serving))
    assert done.status == 0, done.err
    told = done.json
    assert (told["complete"], told["exported"], told["there_already"]) == (True, exported, COUNT - exported)
    assert whole(directory) == COUNT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_says_what_is_done_and_leaves_no_partial_file(
    serving: Serving, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    with Gated(serving, out, tmp_path / "gate") as export:
        export.process.send_signal(number)
        export.open()
        told, err = export.process.communicate(timeout=TIMEOUT_S)
    assert export.process.returncode == 128 + number
    assert "Traceback" not in err
    summary = json.loads(told)
    assert (summary["complete"], summary["exported"]) == (False, whole(out))
    assert AT_ONCE <= summary["exported"] < COUNT
    finish(serving, out, exported=COUNT - summary["exported"])


def test_an_export_that_was_killed_leaves_nothing_that_lasts(serving: Serving, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Gated(serving, out, tmp_path / "gate") as export:
        export.process.kill()
        export.process.communicate(timeout=TIMEOUT_S)
    assert drafts(out) == AT_ONCE
    assert list(files_in(out)) == []
    finish(serving, out, exported=COUNT)


def test_a_directory_without_room_ends_it_and_with_room_it_goes_on(serving: Serving, tmp_path: Path) -> None:
    """On file systems of their own: most of one is taken by something else, and of the other all inodes but a few."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", TWICE_ON_FULL_DISKS, str(tmp_path)],
        env={
            **os.environ,
            **settings_of(serving),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        check=False,
    )
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "left, too little for the next entry of 64." in told["space"][0][2]
    assert "an entry cannot be written: No space left on device; what is there already stays" in told["inodes"][0][2]
    for (status, out, err, left), (status_then, out_then, _, left_then) in told.values():
        first, second = json.loads(out), json.loads(out_then)
        assert (status, first["complete"]) == (1, False)
        assert "Make room, or export less (--limit-bytes), and run it again: it goes on where it ended" in err
        assert 0 < first["exported"] < COUNT
        assert (len(left), drafts_among(left)) == (first["exported"], 0)
        assert (status_then, second["complete"]) == (0, True)
        assert (second["exported"], second["there_already"]) == (COUNT - first["exported"], first["exported"])
        assert (len(left_then), drafts_among(left_then)) == (COUNT, 0)


TWICE_ON_FULL_DISKS = """
import json, os, pathlib, subprocess, sys
from commands import run

def export(disk):
    ran = run("export", disk / "out", "--json", **{
        name: value for name, value in os.environ.items() if name.startswith("MMCACHE_")
    })
    return ran.status, ran.out, ran.err, os.listdir(disk / "out")

def mount(name, options):
    disk = pathlib.Path(sys.argv[1], name)
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk]).returncode:
        sys.exit(77)
    return disk

space, inodes = mount("space", "size=4m"), mount("inodes", "size=64m,nr_inodes=6")
(space / "other").write_bytes(bytes(2_900_000))
first = export(space), export(inodes)
(space / "other").unlink()
subprocess.run(["mount", "-o", "remount,nr_inodes=100", inodes], check=True)
print(json.dumps({"space": (first[0], export(space)), "inodes": (first[1], export(inodes))}))
"""


def drafts_among(names: list[str]) -> int:
    return sum(name.endswith(".draft") for name in names)
