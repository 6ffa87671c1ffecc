"""What `mmcache up` is made of: tethered children, ports, signals, the state directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from up_process import runs

from mmcache.cli import cluster, tether
from mmcache.cli.child import Child
from mmcache.cli.errors import ClusterError, PartEnded
from mmcache.cli.ports import Ports
from mmcache.cli.signals import Signals
from mmcache.cli.state_directory import StateDirectory, default_state_directory, write_whole
from mmcache.cli.up import start_cluster
from mmcache.config import Settings


def tethered(parent: int, *command: str) -> subprocess.CompletedProcess[str]:
    shim = [sys.executable, "-I", "-S", tether.__file__, str(parent)]
    return subprocess.run([*shim, *command], capture_output=True, text=True, timeout=20, check=False)


def test_a_tethered_command_runs_only_below_the_parent_that_was_named():
    assert tethered(os.getpid(), "/bin/echo", "here").stdout == "here\n"
    orphan = tethered(os.getpid() + 1, "/bin/echo", "here")
    assert (orphan.returncode, orphan.stdout) == (1, "")
    assert "has ended" in orphan.stderr


def test_a_command_that_is_not_there_is_named():
    assert "cannot execute /nowhere/master: No such file" in tethered(os.getpid(), "/nowhere/master").stderr


def test_a_child_tells_how_it_ended_and_the_end_of_its_log(tmp_path):
    script = "import sys; print(*range(5000), sep='\\n'); sys.exit(3)"
    child = Child("part", [sys.executable, "-c", script], directory=tmp_path, environment={})
    child._process.wait(20)
    assert child.describe_end() == "ended with status 3"
    assert child.log_tail().splitlines() == [str(number) for number in range(4980, 5000)]
    child.terminate()  # both are harmless after the end
    child.kill()


def test_a_child_leads_a_session_of_its_own_so_that_ctrl_c_does_not_reach_it(tmp_path):
    child = Child("part", ["/bin/sleep", "60"], directory=tmp_path, environment={})
    try:
        assert os.getsid(child.pid) == child.pid
    finally:
        child.kill()
    assert child.describe_end() == "was ended by SIGKILL"


def test_chosen_ports_are_distinct_and_those_asked_for_stay():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        asked = listener.getsockname()[1]
    chosen = Ports(owner=asked, admin=0).choose()
    assert chosen.owner == asked
    assert len(set(chosen)) == 5
    assert Ports(owner=asked).choose().admin is None
    with pytest.raises(ClusterError, match="--metrics-port"):
        Ports(master=asked, metrics=asked).choose()


def test_only_a_port_that_was_free_to_choose_can_be_lost():
    chosen = Ports().choose()
    assert not Ports().lost(chosen)
    with socket.create_server(("127.0.0.1", chosen.metrics)):
        assert Ports().lost(chosen)
        assert not Ports(metrics=chosen.metrics).lost(chosen)


def test_a_free_port_that_another_process_takes_meanwhile_costs_another_try(tmp_path, monkeypatch):
    choose = Ports.choose
    chosen: list[Ports] = []
    taken: list[socket.socket] = []

    def choose_and_lose_the_first(asked: Ports) -> Ports:
        chosen.append(choose(asked))
        if len(chosen) == 1:
            taken.append(socket.create_server(("127.0.0.1", chosen[0].master)))
        return chosen[-1]

    monkeypatch.setattr(Ports, "choose", choose_and_lose_the_first)
    try:
        with Signals() as signals, start_cluster(Settings(), tmp_path, 16 << 20, Ports(), signals) as started:
            assert started.addresses.master == f"127.0.0.1:{chosen[1].master}"
    finally:
        taken[0].close()


def test_a_part_that_cannot_start_is_not_tried_again(tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(cluster, "master_command", lambda **_: tries.append(1) or ["/bin/false"])
    with Signals() as signals, pytest.raises(PartEnded, match=r"the master .* ended with status 1"):
        start_cluster(Settings(), tmp_path, 16 << 20, Ports(), signals)
    assert len(tries) == 1


def test_a_part_that_does_not_serve_in_time_is_named_and_nothing_goes_on_running(tmp_path, monkeypatch):
    started: list[int] = []
    start = cluster.Cluster._child

    def start_and_note(self: cluster.Cluster, name: str, command: list[str]) -> Child:
        child = start(self, name, command)
        started.append(child.pid)
        return child

    monkeypatch.setattr(cluster.Cluster, "_child", start_and_note)
    monkeypatch.setattr(cluster, "master_command", lambda **_: ["/bin/sleep", "60"])
    monkeypatch.setattr(cluster, "START_TIMEOUT_S", 0.2)
    with Signals() as signals, pytest.raises(ClusterError, match=r"waited 0\.2 s for the master"):
        start_cluster(Settings(), tmp_path, 16 << 20, Ports(), signals)
    assert len(started) == 2
    assert not any(map(runs, started))


def test_signals_wake_the_wait_and_are_told_once():
    with Signals() as signals:
        assert signals.wait(0) == frozenset()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.wait(10) | signals.wait(0) == {signal.SIGTERM, signal.SIGINT}
        assert signals.wait(0) == frozenset()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_hangup_that_was_ignored_stays_ignored():
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.wait(0.05) == frozenset()
    finally:
        signal.signal(signal.SIGHUP, earlier)


def test_the_state_directory_is_for_one_at_a_time(tmp_path):
    path = tmp_path / "deep" / "state"
    with StateDirectory(path):
        assert path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(ClusterError, match=f"pid {os.getpid()}"), StateDirectory(path):
            pass
    with StateDirectory(path):
        pass


def test_the_default_state_directory_follows_xdg_but_not_a_relative_one(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(default_state_directory({"XDG_STATE_HOME": "/state"})) == "/state/mmcache"
    for unset in ({}, {"XDG_STATE_HOME": ""}, {"XDG_STATE_HOME": "state"}):
        assert str(default_state_directory(unset)) == "/home/someone/.local/state/mmcache"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    target = tmp_path / "ready.json"
    write_whole(target, json.dumps(1))
    assert os.listdir(tmp_path) == ["ready.json"]
    (tmp_path / "directory").mkdir()
    with pytest.raises(ClusterError, match="cannot be written"):
        write_whole(tmp_path / "directory", "text")
    assert sorted(os.listdir(tmp_path)) == ["directory", "ready.json"]
