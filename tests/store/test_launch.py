"""The store's own processes: their command lines and environment, and the questions about them."""

from __future__ import annotations

import socket
import threading

import psutil
import pytest
from cluster import MooncakeProcesses, free_port

from mmcache.errors import ConfigError
from mmcache.store.launch import (
    MIN_SEGMENT_BYTES,
    master_command,
    master_is_ready,
    mooncake_environment,
    owner_command,
    port_answers,
    rpc_answers,
    segments,
)


def test_the_ports_that_we_choose_are_on_loopback_only(mooncake: MooncakeProcesses) -> None:
    master, owner = mooncake.master, mooncake.owners[0]
    listening = {
        f"127.0.0.1:{connection.laddr.port}": connection.laddr.ip
        for part in (master, owner)
        for connection in psutil.Process(part.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    chosen = {master.address, mooncake.metrics, owner.address}
    assert {address: listening[address] for address in chosen} == dict.fromkeys(chosen, "127.0.0.1")
    assert len(listening) == len(chosen) + 2, "the owner's two engine ports, which nothing binds to loopback"


def test_segments_tell_what_an_owner_lends(mooncake: MooncakeProcesses) -> None:
    assert [segment.size_bytes for segment in segments(mooncake.metrics)] == [256 << 20]


def test_the_master_keeps_the_memory_of_a_put_that_never_ended_for_an_hour() -> None:
    assert "--put_start_release_timeout_sec=3600" in master_command(rpc_port=1, metrics_port=2)


def test_the_memory_of_a_dead_owner_is_given_up_within_seconds() -> None:
    assert "--client_ttl=3" in master_command(rpc_port=1, metrics_port=2)


def test_a_hanging_process_accepts_but_does_not_answer() -> None:
    with MooncakeProcesses() as processes:
        master = processes.start_master()
        assert port_answers(master.address)
        assert rpc_answers(master.address)
        with master.stopped():
            assert port_answers(master.address, timeout=0.2)
            assert not rpc_answers(master.address, timeout=0.2)
            assert not master_is_ready(processes.metrics, timeout=0.2)
        assert rpc_answers(master.address)


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ":", "[::1"])
def test_an_address_that_is_none_answers_nothing(address: str) -> None:
    assert not port_answers(address, timeout=0.2)
    assert not rpc_answers(address, timeout=0.2)
    assert not master_is_ready(address, timeout=0.2)
    assert segments(address, timeout=0.2) == []


def test_a_dead_port_answers_nothing() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert not port_answers(address)
    assert not rpc_answers(address)
    assert not master_is_ready(address)


def test_another_servers_answer_is_not_taken_for_a_masters() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n<html>{}")

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert not master_is_ready(address)
        assert segments(address) == []
        thread.join(10)


def test_the_users_variables_win() -> None:
    environment = mooncake_environment({"MC_RPC_TIMEOUT_MS": "77", "PATH": "/bin"})
    assert environment["MC_RPC_TIMEOUT_MS"] == "77"
    assert environment["PATH"] == "/bin"
    assert environment["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"


@pytest.mark.parametrize("nbytes", [-1, 1, MIN_SEGMENT_BYTES - 1])
def test_a_segment_that_mooncake_would_die_of_is_refused(nbytes: int) -> None:
    with pytest.raises(ConfigError, match=str(nbytes)):
        owner_command(master="127.0.0.1:1", port=2, segment_bytes=nbytes)
    assert f"--global_segment_size={MIN_SEGMENT_BYTES}" in owner_command(
        master="127.0.0.1:1", port=2, segment_bytes=MIN_SEGMENT_BYTES
    )
