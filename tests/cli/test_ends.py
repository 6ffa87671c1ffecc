"""How a command ends that is interrupted, or whose output nobody takes: without a traceback, and with a status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import KEY
from serving import Serving
from up_process import mmcache

from mmcache.cli.signals import orderly_end

INTERRUPTED = (128 + signal.SIGINT, "")
INTERRUPTED_AT_IMPORT = """
import os, signal, subprocess, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == {module!r} and bool(arguments[1]) is {loading}:
        {how}

{before}
sys.argv = ["mmcache", *sys.argv[1:]]
import runpy, mmcache
sys.addaudithook(interrupt)
runpy.run_module("mmcache.cli", run_name="__main__")
"""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        yield cluster


def interrupted(
    *arguments: str, module: str, loading: bool = False, how: str = "", before: str = ""
) -> tuple[int, str]:
    """Status and stderr of a command that gets SIGINT when it begins to import a module."""
    program = INTERRUPTED_AT_IMPORT.format(
        module=module, loading=loading, how=how or "os.kill(os.getpid(), signal.SIGINT)", before=before
    )
    _, environment = mmcache()
    ended = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (("--help",), "mmcache.cli.doctor.command"),  # of the command line
        (("controller", "--bind", "tcp://127.0.0.1:0"), "mmcache.controller.server"),  # of commands
        (("stats",), "mmcache.cli.stats.observer"),
        (("get", *KEY, "--mm-hash", "00"), "mmcache.cli.entries.connection"),
    ],
)
def test_ctrl_c_while_modules_are_imported_ends_a_command_without_a_word(arguments, module) -> None:
    assert interrupted(*arguments, module=module) == INTERRUPTED


def test_nothing_is_imported_before_a_command_is_ready_for_ctrl_c() -> None:
    """Only Python's own modules: each takes time, in which Ctrl-C is still a traceback."""
    program = "import sys, mmcache.cli.__main__; print(*{name.partition('.')[0] for name in sys.modules})"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(ended.stdout.split())
    assert not loaded & {"msgspec", "typer", "click", "rich", "yaml", "numpy", "torch", "email", "socket", "hashlib"}


def test_ctrl_c_while_mooncake_is_loaded_ends_a_command_and_is_not_blamed_on_the_store(serving: Serving) -> None:
    assert (
        interrupted(
            *("stats", "-c", str(serving.config)),
            module="mooncake.store",
            loading=True,
            # From outside, to arrive while C code is at work: that turns it into an ImportError.
            before="other = subprocess.Popen(['sh', '-c', 'read line; kill -INT $PPID'], stdin=subprocess.PIPE)",
            how="other.stdin.write(b'now\\n'); other.stdin.flush()",
        )
        == INTERRUPTED
    )


def test_a_command_that_a_signal_struck_ends_by_it_whatever_became_of_its_exception() -> None:
    def struck() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit:
            raise ImportError("initialization failed") from None

    with pytest.raises(SystemExit) as ended, orderly_end():
        struck()
    assert ended.value.code == 128 + signal.SIGTERM


def test_a_reader_that_leaves_ends_a_command_without_a_word(serving: Serving) -> None:
    command, environment = mmcache("stats", "--watch", "0.1", "-c", str(serving.config))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE
        said = process.stderr.read()  # of Mooncake's, for one, on a busy machine
        assert not [word for word in (b"Traceback", b"Error", b"Broken pipe", b"mmcache:") if word in said]


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("stats", "--json"), ("doctor",), ("stats",)])
def test_nobody_to_read_the_output_is_no_traceback(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command, environment = mmcache(*arguments)
    try:
        ended = subprocess.run(
            command, env=environment, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("--version",), ("stats", "--json"), ("stats",), ("controller", "--bind", "tcp://127.0.0.1:0")],
)
def test_a_full_disk_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    command, environment = mmcache(*arguments)
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, last) == (1, "mmcache: cannot write the output: No space left on device")
    assert "Traceback" not in ended.stderr


def test_a_closed_output_is_none() -> None:
    command, environment = mmcache("--version")
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(shell, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
