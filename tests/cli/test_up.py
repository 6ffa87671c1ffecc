"""`mmcache up` while all goes well: ready when everything serves, one at a time, and nothing left at the end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
import urllib.request

import pytest
import torch
from cluster import wait_until
from commands import run
from up_process import PARTS, Up, mmcache, runs

from mmcache import EmbeddingKey, MMCache
from mmcache.config import load
from mmcache.store.launch import port_answers, segments


def test_the_ready_file_names_living_processes_that_answer(running):
    ready = json.loads(running.ready_file.read_text())
    assert set(ready["pids"]) == {*PARTS, "up"}
    assert all(runs(pid) for pid in ready["pids"].values())
    assert ready["pids"]["up"] == running.process.pid
    assert set(ready["addresses"]) == {"master", "metrics", "sidecar", "control", "admin"}
    for address in ready["addresses"].values():
        place = address.removeprefix("tcp://").removeprefix("http://")
        assert place.startswith("127.0.0.1:")
        assert port_answers(place)
    assert [segment.size_bytes for segment in segments(ready["addresses"]["metrics"])] == [64 << 20]


def test_the_client_file_is_all_that_a_client_needs(running):
    ready = json.loads(running.ready_file.read_text())
    settings = load(ready["client_config"], environ={})
    assert settings.store.master == ready["addresses"]["master"]
    assert settings.store.sidecar == ready["addresses"]["sidecar"]
    assert settings.control.address == ready["addresses"]["control"]
    assert settings.control.admin == ready["addresses"]["admin"]
    assert run("sessions", "--json", config=ready["client_config"]).status == 0


def test_settings_of_the_environment_reach_the_controller_but_addresses_do_not(running):
    assert load(running.state / "client.yaml", environ={}).controller.session_ttl == 2.0  # and it is up all the same


def test_before_the_ready_file_an_object_went_into_the_store_and_back(running):
    metrics = json.loads(running.ready_file.read_text())["addresses"]["metrics"]
    with urllib.request.urlopen(f"http://{metrics}/get_segments_detail", timeout=5) as answer:
        assert json.load(answer)["segments"][0]["allocator_used_bytes"] >= 4096


def test_clients_connect_by_its_path_and_by_the_environment(running, monkeypatch):
    path = json.loads(running.ready_file.read_text())["client_config"]
    key = EmbeddingKey("encoder", "1", "photograph")
    with MMCache.connect(path, strict=True) as writer:
        assert writer.put(key, torch.arange(12.0)).status == "stored"
    monkeypatch.setenv("MMCACHE_CONFIG", path)
    with MMCache.connect(strict=True) as reader:
        embedding = reader.get(key)
    assert embedding is not None
    assert (embedding.source, embedding.tensor.tolist()) == ("store", [float(number) for number in range(12)])


def test_a_second_up_on_the_directory_refuses_at_once_and_names_the_first(running):
    command, environment = mmcache("up", "--state-dir", str(running.state))
    second = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert second.returncode == 1
    assert "in use by another" in second.stderr
    assert f"pid {running.process.pid}" in second.stderr
    assert all(runs(pid) for pid in running.pids.values())


@pytest.mark.parametrize("ask", [Up.press_ctrl_c, lambda process: process.send(signal.SIGTERM)], ids=["ctrl-c", "term"])
def test_a_request_to_end_ends_all_and_frees_the_directory(up, ask):
    process = up()
    address = process.wait_ready()["addresses"]["control"]
    ask(process)
    status, out, _ = process.wait_end()
    assert status == 0
    assert address in out
    assert not process.ready_file.exists()
    assert (process.state / "lock").read_text() == ""


def test_ctrl_c_while_it_starts_ends_all(up):
    process = up()
    wait_until((process.state / "master.log").exists, timeout=20, what="the master's start")
    process.press_ctrl_c()
    status, _, err = process.wait_end()
    assert (status, err) == (128 + signal.SIGINT, "")
    assert not process.ready_file.exists()


def test_ports_that_were_asked_for_are_used(up):
    with socket.socket() as one, socket.socket() as other:
        for listener in (one, other):
            listener.bind(("127.0.0.1", 0))
        master, control = one.getsockname()[1], other.getsockname()[1]
    process = up("--master-port", str(master), "--control-port", str(control))
    addresses = process.wait_ready()["addresses"]
    assert addresses["master"] == f"127.0.0.1:{master}"
    assert addresses["control"] == f"tcp://127.0.0.1:{control}"
    began = time.monotonic()
    process.send(signal.SIGINT)
    process.send(signal.SIGINT)  # the second one does not wait for a graceful end, and does not disturb it either
    assert process.wait_end()[0] == 0
    assert time.monotonic() - began < 10
