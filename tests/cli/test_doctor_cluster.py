"""`mmcache doctor` on clusters that serve, that do not, and on listeners that only pretend."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from cluster import MooncakeProcesses, free_port
from commands import Ran, run
from serving import Serving
from test_doctor_machine import shows
from up_process import Up, mmcache

from mmcache.cli.doctor import network
from mmcache.cli.doctor.children import Ended
from mmcache.cli.doctor.examination import wait_for_cluster
from mmcache.cli.doctor.finding import Status
from mmcache.config import Settings, StoreSettings, load
from mmcache.control.messages import PROTOCOL_VERSION, HelloAgain, Refused, Welcome, encode


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving(segment_bytes=64 << 20) as cluster:
        cluster.config = cluster.write_config("client.yaml", metrics=cluster.store.metrics)
        yield cluster


@pytest.fixture
def silent() -> Iterator[str]:
    """Accepts connections, as the kernel does for a process that hangs, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def statuses(ran: Ran, section: str = "cluster") -> dict[str, str]:
    return {finding["name"]: finding["status"] for finding in ran.json["findings"][section]}


def test_a_cluster_that_serves_passes_every_check(serving: Serving) -> None:
    ran = run("doctor", "--json", config=serving.config)
    assert (ran.status, ran.json["ok"]) == (0, True)
    assert statuses(ran) == dict.fromkeys(["master", "sidecar", "controller", "master metrics", "put and read"], "ok")
    assert statuses(ran, "software")["mooncake import"] == "ok"
    assert "through the sidecar" in ran.json["findings"]["cluster"][-1]["detail"]


def test_people_get_a_line_for_each_check_and_what_to_do_for_each_that_fails(silent: str) -> None:
    ran = run("doctor", MMCACHE_STORE__MASTER=silent, MMCACHE_CONTROL__ADDRESS=f"tcp://127.0.0.1:{free_port()}")
    assert ran.status == 1
    assert f"failing  master            {silent} accepts connections and does not answer" in ran.out
    assert "→ It hangs, is stopped, or is no Mooncake process" in ran.out
    assert "→ Start `mmcache controller` there, or correct control.address." in ran.out
    assert "not tried: no answer from the master" in ran.out


def test_without_a_configuration_it_looks_at_the_machine_alone() -> None:
    ran = run("doctor", "--json")
    assert ran.json["findings"].keys() == {"machine", "software"}
    assert "No configuration, so no cluster was looked at: give --config FILE" in run("doctor").out


def test_a_wrong_configuration_is_one_of_the_findings(tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text("control:\n  address: nowhere\n")
    ran = run("doctor", "-c", config, "--json")
    assert ran.status == 1
    [finding] = ran.json["findings"]["cluster"]
    assert finding["name"] == "configuration"
    assert f"{config}:2: control.address must be tcp://HOST:PORT" in finding["detail"]


@pytest.mark.parametrize("options", [("--wait", "5"), ("--wait", "0"), ("--wait", "soon")])
def test_a_wait_without_a_configuration_or_for_no_time_is_refused(options: tuple[str, ...]) -> None:
    assert run("doctor", *options).status == 2


def test_wait_ends_as_soon_as_the_cluster_serves(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("master", "metrics", "owner", "control")}
    config = tmp_path / "client.yaml"
    config.write_text(
        f"store: {{master: '127.0.0.1:{ports['master']}', sidecar: '127.0.0.1:{ports['owner']}'}}\n"
        f"control: {{address: 'tcp://127.0.0.1:{ports['control']}'}}\n"
    )
    command, environment = mmcache("doctor", "--wait", "120", "--json", "-c", str(config))
    waiting = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    up = Up(tmp_path / "state", *[word for name, port in ports.items() for word in (f"--{name}-port", str(port))])
    try:
        out, _ = waiting.communicate(timeout=110)
        assert waiting.returncode == 0, out
        assert statuses(Ran(0, out, ""))["put and read"] == "ok"
        assert all(status == "ok" for status in statuses(Ran(0, out, "")).values())
    finally:
        waiting.kill()
        up.close()


def test_wait_that_is_over_says_what_still_fails(serving: Serving) -> None:
    with serving.store.master.stopped():
        ran = run("doctor", "--wait", "2", "--json", config=serving.config)
    assert ran.status == 1
    assert statuses(ran)["master"] == statuses(ran)["put and read"] == "failing"
    assert (statuses(ran)["controller"], statuses(ran)["sidecar"]) == ("ok", "ok")
    told = re.search(r"The cluster did not serve within (\d+\.\d) s\. (.*)", ran.err)
    assert told is not None
    assert float(told[1]) >= 2.0
    assert f"master: {serving.store.master.address} accepts connections and does not answer" in told[2]
    assert "put and read: not tried: no answer from the master" in told[2]
    assert "sidecar" not in told[2]


def test_a_wait_tells_what_it_waits_for_and_since_when(serving: Serving) -> None:
    said: list[str] = []
    with serving.store.master.stopped():
        wait_for_cluster(load(serving.config), 1.0, progress=said.append)
    assert re.match(r"waited \d+ of 1 s; master: \S+ accepts connections and does not answer", said[0])
    assert said[-1].endswith("put and read: not tried: no answer from the master")


def test_a_controller_that_is_stopped_does_not_keep_the_store_from_being_tried(serving: Serving) -> None:
    process = serving.controller.process
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        ran = run("doctor", "--json", config=serving.config)
    finally:
        process.send_signal(signal.SIGCONT)
    assert ran.status == 1
    assert (statuses(ran)["controller"], statuses(ran)["put and read"]) == ("failing", "ok")


def test_a_store_that_nobody_lends_memory_fails_the_probe_with_what_to_do() -> None:
    with MooncakeProcesses() as store:
        store.start_master()
        ran = run("doctor", "--json", MMCACHE_STORE__MASTER=store.master.address)
    [finding] = [finding for finding in ran.json["findings"]["cluster"] if finding["name"] == "put and read"]
    assert finding["status"] == "failing"
    assert "no_space" in finding["detail"]
    assert "start a mooncake_client with a segment" in finding["advice"]


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Starts what answers one hello over ZMQ with some bytes; returns its address."""
    asked = threading.Event()  # a connection that closed before its answer was read would take it along
    with zmq.Context() as context, ThreadPoolExecutor(1) as threads:

        def start(answer: bytes) -> str:
            router = context.socket(zmq.ROUTER)
            port = router.bind_to_random_port("tcp://127.0.0.1")

            def serve() -> None:
                with router:
                    if router.poll(20_000):
                        peer, _ = router.recv_multipart()
                        router.send_multipart([peer, answer])
                        asked.wait(20)

            threads.submit(serve)
            return f"tcp://127.0.0.1:{port}"

        yield start
        asked.set()


def welcome(version: int) -> Welcome:
    return Welcome(version, 1, 1, 5000, 0, "lineage", 10_000, 30_000, 0)


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        (encode(welcome(PROTOCOL_VERSION)), Status.OK, (f"protocol {PROTOCOL_VERSION}",)),
        (encode(welcome(9)), Status.FAILING, (f"speaks protocol 9, this mmcache {PROTOCOL_VERSION}", "same release")),
        (encode(Refused(0, "protocol version 1; this speaks 2")), Status.FAILING, ("this speaks 2", "same release")),
        (encode(HelloAgain("?")), Status.FAILING, ("answers a hello with HelloAgain",)),
        (b"HTTP/1.1 200 OK", Status.FAILING, ("answers no hello", "is no controller")),
    ],
    ids=["welcome", "another protocol", "refused", "hello again", "no message"],
)
def test_what_answers_a_hello_is_told_apart(
    answering: Callable[[bytes], str], answer: bytes, status: Status, words: tuple[str, ...]
) -> None:
    shows(network.controller(answering(answer), timeout=20.0), status, *words)


def test_a_port_that_only_listens_is_told_from_one_that_nobody_has(silent: str) -> None:
    free = f"127.0.0.1:{free_port()}"
    for name, found in (
        ("does not answer", network.mooncake_process("master", silent, "store.master", timeout=0.2)),
        ("answers no hello", network.controller(f"tcp://{silent}", timeout=0.2)),
        ("nobody accepts connections", network.mooncake_process("master", free, "store.master")),
        ("nobody accepts connections", network.controller(f"tcp://{free}")),
    ):
        shows(found, Status.FAILING, name)


def test_metrics() -> None:
    shows(network.metrics(None), Status.OK, "store.metrics is not set")
    shows(network.metrics(f"127.0.0.1:{free_port()}"), Status.WARNING, "correct store.metrics")


def test_what_the_probe_said_becomes_advice() -> None:
    local = Settings()
    sidecar = Settings(store=StoreSettings(sidecar="127.0.0.1:1"))
    remote = Settings(store=StoreSettings(master="10.0.0.5:50051"))
    shows(network.store(Ended(0, "attached as embedded"), local), Status.OK, "an embedded client")
    shows(network.store(Ended(0, "attached as embedded"), sidecar), Status.WARNING, "start the mooncake_client")
    shows(network.store(Ended(None, ""), local), Status.FAILING, "did not end in time", "logs")
    for said, settings, advice in (
        ("Version mismatch: server=0.4 client=0.3", local, "same release of Mooncake"),
        ("StoreUnavailable: Mooncake is not installed", local, "checks of the wheel"),
        ("attaching to the mooncake_client at 127.0.0.1:1 failed", sidecar, "network namespace"),
        ("the set-up as a client of the master failed", remote, "store.hostname is loopback"),
    ):
        shows(network.store(Ended(1, said), settings), Status.FAILING, said, advice)
