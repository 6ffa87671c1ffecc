"""`mmcache keys new`: whole pairs that the settings take, nothing overwritten, nothing left of what was interrupted."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
import zmq
from commands import run
from up_process import mmcache

from mmcache.config import ControllerSettings, ControlSettings
from mmcache.control.curve import client_keys
from mmcache.controller.admission import Admission
from mmcache.curve import read_keys, read_secret_key

INTERRUPTED_WHILE_WRITING = """
import os, runpy, signal, sys

def interrupt(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".secret"):
        os.kill(os.getpid(), signal.SIGINT)

sys.argv = ["mmcache", *sys.argv[1:]]
sys.addaudithook(interrupt)
runpy.run_module("mmcache.cli", run_name="__main__")
"""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_two_files_that_the_settings_take(tmp_path: Path) -> None:
    umask = os.umask(0o077)
    try:
        ran = run("keys", "new", "--out", tmp_path, "--name", "controller", "--json")
    finally:
        os.umask(umask)
    assert ran.status == 0
    public, secret = tmp_path / "controller.public", tmp_path / "controller.secret"
    assert ran.json == {
        "public_key": next(iter(read_keys(public, "x"))),
        "public_key_file": str(public),
        "secret_key_file": str(secret),
    }
    assert (mode(public), mode(secret)) == (0o644, 0o600)
    assert zmq.curve_public(read_secret_key(secret, "x").encode()).decode() == ran.json["public_key"]
    assert run("keys", "new", "--out", tmp_path, "--name", "client").status == 0
    admission = Admission.of(
        ControllerSettings(secret_key_file=str(secret), client_keys_file=str(tmp_path / "client.public"))
    )
    keys = client_keys(
        ControlSettings(controller_key=ran.json["public_key"], secret_key_file=str(tmp_path / "client.secret"))
    )
    assert admission is not None
    assert keys is not None
    assert admission.public_key == keys.controller
    assert list(read_keys(tmp_path / "client.public", "x").items()) == [(keys.public.decode(), "client")]
    assert read_secret_key(tmp_path / "client.secret", "x") not in repr(keys)


def test_what_it_prints_can_be_pasted_and_has_no_secret(tmp_path: Path) -> None:
    folder = tmp_path / "a folder: {odd}"
    folder.mkdir()
    ran = run("keys", "new", "--out", folder, "--name", "it")
    secret = read_secret_key(folder / "it.secret", "x")
    assert secret not in ran.out + ran.err
    lines = [line.strip() for line in ran.out.splitlines()]
    controller, control, own = (
        yaml.safe_load(line) for line in lines if line.startswith(("controller: {", "control: {"))
    )
    assert controller["controller"]["secret_key_file"] == own["control"]["secret_key_file"] == str(folder / "it.secret")
    assert control["control"]["controller_key"] in (folder / "it.public").read_text()
    [line] = [line for line in lines if line.startswith("cat ")]
    subprocess.run(line.replace("FILE", "listed"), shell=True, cwd=tmp_path, check=True, timeout=20)
    assert list(read_keys(tmp_path / "listed", "x").values()) == ["it"]


@pytest.mark.parametrize("there", ["it.secret", "it.public"])
def test_what_is_there_is_never_overwritten_and_no_half_of_a_pair_left(tmp_path: Path, there: str) -> None:
    for make in (
        lambda path: path.write_text("precious"),
        lambda path: path.symlink_to(tmp_path / "nowhere"),
        lambda path: path.mkdir(),
    ):
        path = tmp_path / there
        make(path)
        before = os.lstat(path)
        ran = run("keys", "new", "--out", tmp_path, "--name", "it")
        assert ran.status == 1
        assert ran.err == f"mmcache keys new: {path} is there already and stays: give another --name or --out\n"
        assert os.listdir(tmp_path) == [there]
        assert os.lstat(path) == before
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", ["", ".hidden", "../up", "a/b", "-x", "n" * 65, "caf\u00e9", "a\nb"])
def test_a_name_that_is_none_for_a_file_is_refused(tmp_path: Path, name: str) -> None:
    ran = run("keys", "new", "--out", tmp_path, f"--name={name}")
    assert (ran.status, os.listdir(tmp_path)) == (2, [])
    assert "--name" in ran.err


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    ran = run("keys", "new", "--out", tmp_path / "missing", "--name", "it")
    assert (ran.status, ran.err) == (2, f"mmcache keys new: --out: {tmp_path / 'missing'} is no directory\n")


def test_no_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = run("keys", "new", "--out", tmp_path, "--name", "it")
    assert (ran.status, os.listdir(tmp_path)) == (1, [])
    assert "it.secret cannot be written: No space left on device" in ran.err


def test_ctrl_c_while_they_are_written_leaves_whole_files(tmp_path: Path) -> None:
    _, environment = mmcache()
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_WRITING, "keys", "new", "--out", str(tmp_path), "--name", "it"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGINT, "")
    [public] = read_keys(tmp_path / "it.public", "x")
    assert zmq.curve_public(read_secret_key(tmp_path / "it.secret", "x").encode()).decode() == public
