"""What goes over the socket between engine and agent, from either side: garbage, too much, and its end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from cluster import wait_until
from engines import PATIENCE_S, SOON_S, STAGING_BYTES, LinkedEngine
from serving import Serving

from mmcache.agent import child, link
from mmcache.agent.link import AgentLink
from mmcache.agent.messages import (
    MAX_MESSAGE_BYTES,
    Drop,
    Figures,
    Granted,
    Missing,
    Started,
    decode_agent_message,
    encode,
)
from mmcache.agent.staging import Staging


@pytest.fixture(scope="module")
def shared(serving: Serving) -> Iterator[LinkedEngine]:
    """One that no test breaks."""
    with LinkedEngine(serving.config) as engine:
        yield engine


def test_the_agent_ignores_what_is_no_message(shared: LinkedEngine) -> None:
    packets = [b"", b"\x00", b"garbage", secrets.token_bytes(1000), bytes(MAX_MESSAGE_BYTES + 1), encode(Started(1))]
    agent = shared.link._keeper.agent
    assert agent is not None
    for packet in packets:
        assert agent.send(packet)
    shared.expect(shared.ask("after garbage"), Granted)
    deadline = time.monotonic() + PATIENCE_S
    while shared.figures.get("agent.malformed") != len(packets):
        assert time.monotonic() < deadline, shared.figures.get("agent.malformed")
        shared.pump(0.1)


def test_a_message_that_cannot_be_sent_is_refused_and_nothing_else_happens(shared: LinkedEngine) -> None:
    one = shared
    assert not one.send(Drop([1 << 70]))  # type: ignore[list-item]
    assert not one.send(Drop([object()]))  # type: ignore[list-item]
    assert not one.send(Drop(list(range(10**6, 10**6 + MAX_MESSAGE_BYTES))))
    assert one.counters.snapshot()["link.unsendable"] == 3
    one.expect(one.ask("after the unsendable"), Granted)


def test_an_agent_that_does_not_read_is_not_waited_for(shared: LinkedEngine) -> None:
    agent = psutil.Process(shared.pid)
    agent.suspend()
    sent = 0
    while shared.send(Drop(list(range(60)))):
        sent += 1
        assert sent < 100_000
    assert shared.link.agent_lives
    agent.resume()
    shared.expect(shared.ask("after a standstill"), Granted)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AgentLink, socket.socket]]:
    """A link whose agent is a process that does nothing, and the agent's end of the socket, for the test to use."""
    ends: list[socket.socket] = []

    def start(descriptor: int, *_: object) -> subprocess.Popen[bytes]:
        ends.append(socket.socket(fileno=os.dup(descriptor)))
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)

    monkeypatch.setattr(child, "_start", start)
    name = secrets.token_hex()
    staging = Staging.open_as_scheduler(name, 1 << 20)
    scripted = AgentLink(staging, None, None)
    assert not scripted.start(0.0)
    wait_until(lambda: bool(ends), timeout=SOON_S, what="the start")
    ends[0].send(encode(Started(1)))
    wait_until(lambda: scripted.agent_lives, timeout=SOON_S, what="the agent")
    yield scripted, ends[0]
    monkeypatch.setattr(link, "END_PATIENCE_S", 0.1)
    scripted.close()
    for end in ends:
        end.close()
    staging.close()


def test_the_link_ignores_what_is_no_message(scripted: tuple[AgentLink, socket.socket]) -> None:
    one, end = scripted
    packets = [b"", b"\xc1", secrets.token_bytes(100), bytes(MAX_MESSAGE_BYTES + 1), encode(Drop([1]))]
    for packet in packets:
        end.send(packet)
    end.send(encode(Missing(1, "absent")))
    assert one.wait(SOON_S)
    assert one.receive() == [Missing(1, "absent")]
    assert one.agent_lives
    assert one._keeper._counters.snapshot()["link.malformed"] == len(packets)


def test_all_that_an_agent_said_comes_before_its_death(scripted: tuple[AgentLink, socket.socket]) -> None:
    one, end = scripted
    for number in range(1, 60):
        end.send(encode(Missing(number, "absent")))
    agent = one._keeper.agent
    assert agent is not None
    os.kill(agent.pid, signal.SIGKILL)
    end.close()
    wait_until(lambda: one._keeper.agent is not agent, timeout=SOON_S, what="the burial")
    assert not one.take_death(), "there is something to be received"
    assert one.wait(0.0)
    assert [message.number for message in one.receive() if isinstance(message, Missing)] == list(range(1, 60))
    assert one.take_death()


def test_an_agent_that_closes_its_end_is_ended(
    scripted: tuple[AgentLink, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "END_PATIENCE_S", 0.1)
    one, end = scripted
    end.close()
    agent = one._keeper.agent
    assert agent is not None
    assert one.wait(SOON_S)
    assert one.receive() == []
    assert not one.agent_lives
    wait_until(one.take_death, timeout=SOON_S, what="its death")
    assert agent.status == -signal.SIGTERM


def test_waiting_ends_with_what_comes_and_at_its_time(scripted: tuple[AgentLink, socket.socket]) -> None:
    one, end = scripted
    assert not one.wait(0.0)
    assert not one.wait(0.01)
    timer = threading.Timer(0.05, lambda: end.send(encode(Missing(1, "absent"))))
    timer.start()
    assert one.wait(SOON_S)
    assert one.receive() == [Missing(1, "absent")]
    timer.join()


def test_an_agent_alone_ends_when_its_socket_does(serving: Serving) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    staging = Staging.open_as_scheduler(secrets.token_hex(), STAGING_BYTES)
    command = [sys.executable, "-m", "mmcache.agent.process", "--socket", str(theirs.fileno())]
    command += ["--staging", str(staging.descriptor), "--staging-bytes", str(STAGING_BYTES), "--name", "alone"]
    with theirs:
        agent = subprocess.Popen(
            [*command, "--config", str(serving.config)], pass_fds=(theirs.fileno(), staging.descriptor)
        )
    try:
        ours.settimeout(PATIENCE_S)
        while not isinstance(message := decode_agent_message(ours.recv(MAX_MESSAGE_BYTES)), Started):
            assert isinstance(message, Figures), "it is heard of while it starts"
        assert message.pid == agent.pid
        ours.close()
        assert agent.wait(SOON_S) == 0
    finally:
        agent.kill()
        agent.wait()
        staging.close()


def test_an_agent_whose_parent_has_ended_already_does_not_serve(serving: Serving) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    staging = Staging.open_as_scheduler(secrets.token_hex(), STAGING_BYTES)
    command = [sys.executable, "-m", "mmcache.agent.process", "--socket", str(theirs.fileno())]
    command += ["--staging", str(staging.descriptor), "--staging-bytes", str(STAGING_BYTES), "--parent", "1"]
    with ours, theirs:
        agent = subprocess.run(command, check=False, pass_fds=(theirs.fileno(), staging.descriptor), timeout=SOON_S)
    assert agent.returncode == 0
    staging.close()
