"""Shell completion: scripts for the shells, commands and options when they ask, and nothing heavy on the way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

HEAVY = {"torch", "zmq", "mooncake", "transformers", "numpy", "safetensors"}
SCRIPT = Path(sys.executable).with_name("mmcache")  # the name that a shell completes


def complete(**environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT], env={**os.environ, **environ}, capture_output=True, text=True, timeout=20, check=False
    )


@pytest.mark.parametrize(
    ("shell", "line"),
    [
        ("bash", "complete -o default -F _mmcache_completion mmcache"),
        ("zsh", "compdef _mmcache_completion mmcache"),
        ("fish", "complete --command mmcache"),
    ],
)
def test_each_shell_gets_its_script(shell: str, line: str) -> None:
    ended = complete(_MMCACHE_COMPLETE=f"source_{shell}")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert line in ended.stdout


def test_the_script_for_bash_is_sound() -> None:
    script = complete(_MMCACHE_COMPLETE="source_bash").stdout
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=20)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("mmcache st", {"stats"}),
        ("mmcache inv", {"invalidate", "invalidations"}),
        ("mmcache doctor --", {"--config", "--wait", "--json", "--help"}),
    ],
)
def test_commands_and_options_are_completed(words: str, expected: set[str]) -> None:
    ended = complete(_MMCACHE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(len(words.split(" ")) - 1))
    assert ended.returncode == 0, ended.stderr
    assert set(ended.stdout.split()) == expected


def test_help_offers_it_and_lists_every_command() -> None:
    words = run("--help").out
    commands = ("up", "controller", "demo", "put", "get", "lookup", "invalidate", "stats", "doctor")
    commands += ("top", "sessions", "entries", "invalidations", "audit")
    assert all(word in words for word in ("--install-completion", "--show-completion", *commands))


@pytest.mark.parametrize(
    "command",
    ["put", "get", "lookup", "invalidate", "sessions", "entries", "invalidations", "audit", "stats", "doctor", "demo"],
)
def test_the_help_of_each_command_documents_its_exit_status(command: str) -> None:
    ran = run(command, "--help")
    assert ran.status == 0
    assert "Exits with 0 if" in ran.out or "Exits with 0 for" in ran.out
    assert "2 for a wrong option" in " ".join(ran.out.split())


def test_neither_completing_nor_importing_the_commands_loads_anything_heavy() -> None:
    program = (
        f"import sys, atexit; atexit.register(lambda: print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr));"
    )
    program += "from mmcache.cli.main import app; sys.argv = ['mmcache']; app()"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "_MMCACHE_COMPLETE": "complete_bash", "COMP_WORDS": "mmcache ", "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.stderr == "[]\n"
    assert {"put", "doctor", "up"} <= set(ended.stdout.split())
