"""`mmcache up` when something goes wrong: it says what, ends everything, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from cluster import wait_until
from up_process import PARTS, mmcache, runs


@pytest.mark.parametrize("part", PARTS)
def test_the_death_of_a_part_ends_all_with_its_name_status_and_log(up, part):
    process = up()
    pid = process.wait_ready()["pids"][part]
    os.kill(pid, signal.SIGKILL)
    status, _, err = process.wait_end()
    assert status == 1
    assert f"the {part} (pid {pid}) was ended by SIGKILL" in err
    assert f"{part}.log ends with" in err
    assert not process.ready_file.exists()


def test_sigkill_of_up_leaves_no_child_and_no_lock(up):
    first = up()
    pids = first.wait_ready()["pids"]
    first.send(signal.SIGKILL)
    first.process.wait()
    wait_until(lambda: not any(map(runs, pids.values())), timeout=5, what="the end of all parts")
    assert first.ready_file.exists()  # nobody was there to remove it
    second = up()
    assert second.wait_ready()["pids"]["up"] == second.process.pid


def refused(*arguments: str) -> tuple[int, str]:
    command, environment = mmcache("up", *arguments)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    return ended.returncode, ended.stderr


def test_a_segment_larger_than_the_memory_that_is_available_is_refused_before_anything_starts(tmp_path):
    status, err = refused("--state-dir", str(tmp_path / "state"), "--segment", "16TiB")
    assert status == 2
    assert re.search(r"--segment 16TiB is more than the [0-9.]+ GiB of memory that are available", err)
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("option", ["--master-port", "--metrics-port", "--owner-port", "--control-port"])
def test_a_port_that_is_in_use_is_refused_by_its_option(tmp_path, option):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        status, err = refused("--state-dir", str(tmp_path), option, str(port))
    assert (status, f"port {port} ({option}) cannot be had: Address already in use" in err) == (1, True)
    assert not (tmp_path / "master.log").exists()


def test_a_wrong_setting_is_refused_with_file_and_line_before_anything_starts(tmp_path):
    config = tmp_path / "mmcache.yaml"
    config.write_text("controller:\n  claim_timout: 1s\n")
    status, err = refused("-c", str(config), "--state-dir", str(tmp_path / "state"))
    assert status == 2
    assert f"{config}:2: unknown setting controller.claim_timout; did you mean controller.claim_timeout?" in err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("setting", ["metadata: etcd", "protocol: rdma", "devices: mlx5_0", "hostname: 10.0.0.1"])
def test_a_setting_that_one_machine_contradicts_is_refused_before_anything_starts(tmp_path, setting):
    config = tmp_path / "mmcache.yaml"
    config.write_text(f"store: {{{setting}}}\n")
    status, err = refused("-c", str(config), "--state-dir", str(tmp_path / "state"))
    assert status == 2
    name, value = setting.split(": ")
    assert f"store.{name} is '{value}': a cluster on this machine alone" in err
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--segment", "lots"), "--segment must be bytes or a size such as 64MiB"),
        (("--segment", "1MiB"), "--segment must be 16,777,216 to"),
        (("--ready-file", "/dev/../nowhere/ready.json"), "the ready file's directory /nowhere is not there"),
        (("--ready-file", "/dev/../dev"), "the ready file /dev is a directory"),
        (("--state-dir", "/dev/../dev/null"), "state directory /dev/null is not a directory"),
        (("--state-dir", "/dev/null/state"), "state directory /dev/null/state cannot be used: Not a directory"),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options, message):
    status, err = refused("--state-dir", str(tmp_path), *options)
    assert status != 0
    assert message in err
