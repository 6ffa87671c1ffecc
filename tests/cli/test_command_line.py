"""The command itself: quick help, and `mmcache controller` alone."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import uuid
from importlib.metadata import version

import zmq
from up_process import mmcache

from mmcache.control.messages import PROTOCOL_VERSION, Hello, Welcome, decode_from_controller, encode


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = mmcache(*arguments)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)


def test_help_names_the_commands_and_version_says_which():
    assert all(command in run("--help").stdout for command in ("up", "controller", "demo"))
    assert run("--version").stdout == f"mmcache {version('mmcache')}\n"


def test_the_help_of_up_says_what_it_reads_and_how_clients_outlive_it():
    words = " ".join(run("up", "--help").stdout.split())
    assert "MMCACHE_CONFIG is for clients and not read here" in words
    assert "Ports are free ones, others at each start, unless they are given" in words
    assert "clients that keep running come back after a restart" in words


def test_help_loads_nothing_heavy():
    heavy = "{'torch', 'zmq', 'mooncake', 'transformers', 'numpy'}"
    program = f"import sys, mmcache.cli.main; print(sorted({heavy} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20, check=True)
    assert loaded.stdout == "[]\n"


def test_the_controller_alone_serves_as_its_file_says_until_sigterm(tmp_path):
    config = tmp_path / "mmcache.yaml"
    config.write_text("controller: {bind: 'tcp://127.0.0.1:0', session_ttl: 1500ms}\nstore: {lease: 7s}\n")
    command, environment = mmcache("controller", "-c", str(config))
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    try:
        address = process.stdout.readline().removeprefix("controller at ").strip()
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(address)
            peer.send(encode(Hello(PROTOCOL_VERSION, f"test-{uuid.uuid4()}", "here", 1)))
            assert peer.poll(10_000)
            welcome = decode_from_controller(peer.recv())
        assert isinstance(welcome, Welcome)
        assert (welcome.ttl_ms, welcome.lease_ms) == (1500, 7000)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_controller_that_cannot_listen_says_where(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        address = f"tcp://127.0.0.1:{busy.getsockname()[1]}"
        ended = run("controller", "--bind", address)
    assert ended.returncode == 1
    assert ended.stderr == f"mmcache controller: cannot listen at {address}: Address already in use\n"


def test_a_wrong_bind_is_refused_by_its_option():
    ended = run("controller", "--bind", "127.0.0.1:7710")
    assert ended.returncode == 2
    assert "--bind: controller.bind must be tcp://HOST:PORT" in ended.stderr


def test_a_controller_refuses_a_wrong_setting_with_its_line(tmp_path):
    config = tmp_path / "mmcache.yaml"
    config.write_text("controller:\n  session_ttl: never\n")
    ended = run("controller", "-c", str(config))
    assert ended.returncode == 2
    assert f"{config}:2: controller.session_ttl must be a duration" in ended.stderr
