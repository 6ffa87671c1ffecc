"""`mmcache stats`: figures of a cluster that serves, and what is wrong with one that does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from cluster import MooncakeProcesses, free_port, wait_until
from commands import run
from serving import Serving, key_of
from up_process import mmcache

from mmcache.cli.stats.observer import Observer
from mmcache.config import load
from mmcache.store.launch import segments


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        cluster.config = cluster.write_config("client.yaml", metrics=cluster.store.metrics)
        yield cluster


def test_the_file_that_up_writes_is_enough_to_tell_of_every_part(running) -> None:
    ran = run("stats", "--json", config=running.state / "client.yaml")
    assert (ran.status, ran.json["serves"]) == (0, True)
    assert ran.json["controller"]["figures"]["sessions"] == 1
    store = ran.json["store"]
    assert (store["attachment"], store["capacity_bytes"], len(store["segments"])) == ("sidecar", 64 << 20, 1)


def test_the_figures_count_what_clients_do(serving: Serving) -> None:
    import torch

    cache = serving.connect()
    assert cache.put(key_of("counted"), torch.zeros(1 << 20)).status == "stored"
    report = run("stats", "--json", config=serving.config).json
    assert report["controller"]["figures"]["commit.stored"] == 1
    assert report["controller"]["figures"]["entries"] == 1
    assert report["store"]["used_bytes"] >= 4 << 20


def test_people_get_tables_and_the_verdict(serving: Serving) -> None:
    ran = run("stats", config=serving.config)
    assert ran.status == 0
    assert "A client could serve from here." in ran.out
    for word in ("sessions", "waiters", "segment", "64 MiB"):
        assert word in ran.out


def test_without_the_metrics_port_the_segments_are_unknown_and_all_else_is_told(serving: Serving) -> None:
    ran = run("stats", config=serving.config, MMCACHE_STORE__METRICS="")
    assert (ran.status, "segments unknown: store.metrics is not set" in ran.out) == (0, True)
    wrong = f"127.0.0.1:{free_port()}"
    ran = run("stats", config=serving.config, MMCACHE_STORE__METRICS=wrong)
    assert (ran.status, f"no master answers at store.metrics, {wrong}" in ran.out) == (0, True)


def test_with_nobody_there_it_says_so_of_each_end_and_exits_with_1() -> None:
    master, control = f"127.0.0.1:{free_port()}", f"tcp://127.0.0.1:{free_port()}"
    ran = run("stats", "--json", MMCACHE_STORE__MASTER=master, MMCACHE_CONTROL__ADDRESS=control)
    assert (ran.status, ran.json["serves"]) == (1, False)
    assert f"no Mooncake master answers at {master}" in ran.json["store"]["trouble"]
    assert f"nobody accepts connections at {control}" in ran.json["controller"]["trouble"]
    assert not ran.json["controller"]["fresh"]


def test_a_controller_that_is_stopped_costs_the_session_and_nothing_else(serving: Serving) -> None:
    process = serving.controller.process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        ran = run("stats", "--json", config=serving.config)
    finally:
        process.send_signal(signal.SIGCONT)
    assert (ran.status, ran.json["serves"], ran.json["controller"]["fresh"]) == (1, False, False)
    assert ran.json["store"]["attached"]


def test_an_owner_that_is_stopped_is_named_once_the_master_counts_its_memory_no_more() -> None:
    with MooncakeProcesses() as store:
        store.start_master(options=("--client_ttl=1",))
        owner = store.start_owner(64 << 20)
        environ = {
            "MMCACHE_STORE__MASTER": store.master.address,
            "MMCACHE_STORE__METRICS": store.metrics,
            "MMCACHE_STORE__SIDECAR": owner.address,
            "MMCACHE_CONTROL__ADDRESS": f"tcp://127.0.0.1:{free_port()}",
        }
        with owner.stopped():
            wait_until(lambda: not segments(store.metrics), timeout=30, what="the end of the master's patience")
            ran = run("stats", "--json", **environ)
            told = run("stats", **environ).out
    trouble = ran.json["store"]["memory_trouble"]
    assert f"sidecar: {owner.address} accepts connections and does not answer" in trouble
    assert trouble in told
    assert "lends" not in told


def test_where_no_memory_is_counted_and_nobody_here_is_silent_both_reasons_are_told() -> None:
    with MooncakeProcesses() as store:
        store.start_master()
        ran = run(
            *("stats", "--json"),
            MMCACHE_STORE__MASTER=store.master.address,
            MMCACHE_STORE__METRICS=store.metrics,
            MMCACHE_CONTROL__ADDRESS=f"tcp://127.0.0.1:{free_port()}",
        )
    assert ran.json["store"]["attached"]
    assert ran.json["store"]["memory_trouble"].startswith("start a mooncake_client; one that is stopped")


def test_a_part_that_stops_between_two_looks_is_named(serving: Serving) -> None:
    with Observer(load(serving.config)) as observer:
        assert observer.look().store.attached
        with serving.sidecar.stopped():
            store = observer.look().store
        assert not store.attached
        assert "attached, but sidecar: " in store.trouble
        assert "master: " not in store.trouble


def test_watch_looks_again_over_one_session_until_ctrl_c_and_ends_it(serving: Serving) -> None:
    command, environment = mmcache("stats", "--watch", "0.1", "--json", "-c", str(serving.config))
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        looks = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    begun = [look["controller"]["figures"]["session.begun"] for look in looks]
    assert begun == [begun[0]] * 3
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    last = looks[-1]["controller"]["figures"]
    after = run("stats", "--json", config=serving.config).json["controller"]["figures"]
    assert after["sessions"] == last["sessions"]  # its own is gone, and there is the one that asked now
    assert after["session.left"] > last["session.left"]
    assert after.get("session.expired") == last.get("session.expired")
