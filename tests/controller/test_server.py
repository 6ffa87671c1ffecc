"""The server over real sockets: whatever one peer sends, the others are served."""

from __future__ import annotations

import errno
import os
import signal
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import zmq
from controller_driver import SCOPE, group

from mmcache.control.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Acquire,
    Acquired,
    ClientMessage,
    Commit,
    CommitGroup,
    Commitment,
    CommitStatus,
    Committed,
    ControllerMessage,
    Goodbye,
    Granted,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    HelloAgain,
    Hit,
    Refused,
    Resolved,
    Waiting,
    Welcome,
    decode_from_controller,
    encode,
)
from mmcache.controller import server as server_module
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.server import begin_term, serve, volatile_store

PATIENCE_MS = 20_000


class Running:
    """A server on a thread of this process, on a free port."""

    def __init__(self, **limits: int) -> None:
        self.core, recorder = begin_term(volatile_store(), ControllerLimits(**limits))
        self._stopped, self._stop = os.pipe()
        ready: list[str] = []
        bound = threading.Event()

        def tell(address: str) -> None:
            ready.append(address)
            bound.set()

        self._thread = threading.Thread(
            target=serve, args=("tcp://127.0.0.1:0", self.core, recorder), kwargs={"ready": tell, "stop": self._stopped}
        )
        self._thread.start()
        assert bound.wait(PATIENCE_MS / 1000)
        self.address = ready[0]

    def stop(self) -> dict[str, int]:
        """The core's statistics, when its thread has ended."""
        if self._thread.is_alive():
            os.write(self._stop, b"x")
            self._thread.join(PATIENCE_MS / 1000)
            assert not self._thread.is_alive()
        return self.core.stats()

    def close(self) -> None:
        self.stop()
        os.close(self._stop)
        os.close(self._stopped)


class Peer:
    """A client's socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, **options: int) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        for name, value in options.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)
        self.term = self.session = 0

    def send(self, message: ClientMessage) -> None:
        self.socket.send(encode(message))

    def receive(self) -> ControllerMessage:
        assert self.socket.poll(PATIENCE_MS), "no answer"
        return decode_from_controller(self.socket.recv())

    def ask(self, message: ClientMessage) -> ControllerMessage:
        self.send(message)
        return self.receive()

    def hello(self) -> Welcome:
        welcome = self.ask(Hello(PROTOCOL_VERSION, "test", "host", os.getpid()))
        assert isinstance(welcome, Welcome)
        self.term, self.session = welcome.term, welcome.session
        return welcome

    def heartbeat(self, number: int = 1) -> ControllerMessage:
        return self.ask(Heartbeat(self.term, self.session, number, 0))

    def acquire(self, *mm_hashes: str, request: int = 1) -> Acquired:
        answer = self.ask(Acquire(self.term, self.session, request, 60_000, group(*mm_hashes)))
        assert isinstance(answer, Acquired)
        return answer

    def commit(self, mm_hash: str, token: int = 0, info: bytes = b"info") -> ControllerMessage:
        entry = Commitment(mm_hash, 0, token, 4096, 1.0, info)
        return self.ask(Commit(self.term, self.session, 9, [CommitGroup(SCOPE, [entry])]))


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


Context = zmq.Context[zmq.Socket[bytes]]


def test_two_clients_compute_once_and_both_get_the_entry(server: Running, context: Context) -> None:
    encoder, waiter = Peer(context, server.address), Peer(context, server.address)
    assert encoder.hello().lineage == waiter.hello().lineage
    (granted,) = encoder.acquire("a").results
    assert isinstance(granted, Granted)
    assert waiter.acquire("b", "a").results[1] == Waiting()
    committed = encoder.commit("a", granted.token)
    assert isinstance(committed, Committed)
    assert committed.results == [CommitStatus.STORED]
    resolved = waiter.receive()
    assert isinstance(resolved, Resolved)
    assert resolved.results == [(1, Hit(0, 1, 4096, b"info"))]


def test_a_claim_passes_on_without_any_message_when_its_deadline_comes(context: Context) -> None:
    server = Running(claim_ms=200, ttl_ms=60_000)
    try:
        encoder, waiter = Peer(context, server.address), Peer(context, server.address)
        encoder.hello()
        waiter.hello()
        encoder.acquire("a")
        waiter.acquire("a")
        resolved = waiter.receive()
        assert isinstance(resolved, Resolved)
        assert isinstance(resolved.results[0][1], Granted)
    finally:
        server.close()


def test_garbage_is_refused_and_counted_and_the_sender_may_go_on(server: Running, context: Context) -> None:
    peer = Peer(context, server.address)
    peer.hello()
    hello = encode(Hello(PROTOCOL_VERSION, "n", "h", 1))
    garbage = [b"", b"\xc1", b"\x93\x01", b"\x00" * 5000, hello[:-1], hello + b"\x00", b"\x91" * 100_000, b"\xff" * 64]
    for frame in garbage:
        peer.socket.send(frame)
        assert isinstance(peer.receive(), Refused)
    for frames in ([b"", hello], [hello, hello], [b"x"] * 1000):
        peer.socket.send_multipart(frames)
        assert isinstance(peer.receive(), Refused)
    assert isinstance(peer.heartbeat(), HeartbeatAnswer)
    assert server.stop()["refused.malformed"] == len(garbage) + 3


def test_a_message_of_several_frames_shifts_no_message_behind_it(server: Running, context: Context) -> None:
    peer = Peer(context, server.address)
    peer.hello()
    for number in range(100):  # all under way at once, so that many are read together
        peer.send(Heartbeat(peer.term, peer.session, number, 0))
        peer.socket.send_multipart([b"x"] * (2 + number % 3))
    for number in range(100):
        answer = peer.receive()
        assert isinstance(answer, HeartbeatAnswer)
        assert answer.number == number
        assert isinstance(peer.receive(), Refused)
    assert server.stop()["refused.malformed"] == 100


def test_who_loses_a_message_gets_none_of_those_behind_it(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    core, recorder = begin_term(volatile_store())
    sent = []

    def deliver(_self: object, peer: bytes, frame: bytes) -> bool:
        sent.append((peer, frame))
        return peer != b"lost"

    monkeypatch.setattr(server_module._Server, "_deliver", deliver)
    server = server_module._Server(context.socket(zmq.ROUTER), context.socket(zmq.PAIR), core, recorder)
    for peer in (b"lost", b"other"):
        core.handle(peer, Hello(PROTOCOL_VERSION, "n", "h", 1), 1.0)
    first, second = Refused(1, "first"), Refused(2, "second")
    server._send([(b"lost", first), (b"other", first), (b"lost", second), (b"other", second)], 1.0)
    assert sent == [(b"lost", encode(first)), (b"other", encode(first)), (b"other", encode(second))]
    assert core.stats()["unreachable"] == core.stats()["sessions"] == 1


def test_another_version_is_refused(server: Running, context: Context) -> None:
    peer = Peer(context, server.address)
    assert isinstance(peer.ask(Hello(PROTOCOL_VERSION + 1, "n", "h", 1)), Refused)
    peer.hello()
    assert server.stop()["refused.version"] == 1


def test_a_frame_of_100_mb_ends_its_connection_and_no_other(server: Running, context: Context) -> None:
    other, sender = Peer(context, server.address), Peer(context, server.address)
    other.hello()
    sender.hello()
    sender.socket.send(bytes(100_000_000))
    sender.send(Heartbeat(sender.term, sender.session, 1, 0))  # comes over the next connection, which has no session
    assert isinstance(sender.receive(), HelloAgain)
    assert isinstance(other.heartbeat(), HeartbeatAnswer)
    stats = server.stop()
    assert stats["disconnected"] >= 1
    assert stats.get("refused.malformed", 0) == 0


def test_the_largest_frame_that_is_read_is_refused_like_any_garbage(server: Running, context: Context) -> None:
    peer = Peer(context, server.address)
    peer.hello()
    peer.socket.send(bytes(MAX_MESSAGE_BYTES))
    assert isinstance(peer.receive(), Refused)
    assert isinstance(peer.heartbeat(), HeartbeatAnswer)


def test_a_flood_of_garbage_does_not_keep_others_from_being_served(server: Running, context: Context) -> None:
    flooder, other = Peer(context, server.address), Peer(context, server.address)
    other.hello()
    flooding, over = threading.Event(), threading.Event()

    def flood() -> None:
        refusals = 0
        while not over.is_set():
            for _ in range(200):
                if flooder.socket.poll(0, zmq.POLLOUT):
                    flooder.socket.send(b"garbage")
            while flooder.socket.poll(0):
                flooder.socket.recv()
                refusals += 1
            if refusals > 1000:
                flooding.set()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        assert flooding.wait(PATIENCE_MS / 1000)
        for number in range(100):
            assert isinstance(other.heartbeat(number), HeartbeatAnswer)
    finally:
        over.set()
        thread.join()
    assert server.stop()["refused.malformed"] > 1000


def test_a_peer_that_does_not_read_loses_its_session_and_blocks_nobody(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(server_module._OPTIONS, zmq.SNDHWM, 4)
    server = Running()
    try:
        deaf, other = Peer(context, server.address, RCVHWM=1), Peer(context, server.address)
        deaf.hello()
        other.hello()
        other.commit("a", info=bytes(4096))
        question = Acquire(deaf.term, deaf.session, 1, 0, group(*["a"] * 250))  # answered by a megabyte
        for _ in range(60):
            deaf.send(question)
        for number in range(60):
            assert isinstance(other.heartbeat(number), HeartbeatAnswer)
        answer: ControllerMessage | None = None
        while not isinstance(answer, (HelloAgain, HeartbeatAnswer)):
            if not deaf.socket.poll(100):  # the answer to the last one may be among those that were lost
                deaf.send(Heartbeat(deaf.term, deaf.session, 1, 0))
            answer = deaf.receive()
        assert isinstance(answer, HelloAgain)
    finally:
        server.close()
    assert server.core.stats()["unreachable"] >= 1


def test_an_heir_whose_connection_is_gone_is_passed_over_at_once(server: Running, context: Context) -> None:
    encoder, heir, stayer = (Peer(context, server.address) for _ in range(3))
    for peer in (encoder, heir, stayer):
        peer.hello()
    encoder.acquire("a")
    heir.acquire("a")
    stayer.acquire("a")
    heir.socket.close()
    while True:  # until the server's side knows that the connection is gone
        late = Peer(context, server.address)
        late.hello()
        late.socket.close()
        if server.core.stats().get("disconnected"):
            break
    encoder.send(Goodbye(encoder.term, encoder.session))
    resolved = stayer.receive()
    assert isinstance(resolved, Resolved)
    assert isinstance(resolved.results[0][1], Granted)
    assert server.stop()["unreachable"] == 1


def test_an_address_in_use_is_an_error_that_names_it(server: Running) -> None:
    with pytest.raises(OSError) as raised:
        serve(server.address, *begin_term(volatile_store()))
    assert (raised.value.errno, raised.value.filename) == (errno.EADDRINUSE, server.address)


def test_each_start_has_a_lineage_and_a_term_of_its_own() -> None:
    cores = [begin_term(volatile_store())[0] for _ in range(20)]
    assert len({core.lineage for core in cores}) == len({core.term for core in cores}) == 20
    assert all(len(core.lineage) == 16 and 0 < core.term < 1 << 62 for core in cores)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_ends_cleanly_by_a_signal(number: signal.Signals, context: Context) -> None:
    code = (
        "from mmcache.controller.server import begin_term, serve, volatile_store\n"
        "serve('tcp://127.0.0.1:0', *begin_term(volatile_store()), ready=lambda address: print(address, flush=True))\n"
        "print('stopped')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        Peer(context, address).hello()
        process.send_signal(number)
        assert process.stdout.read() == "stopped\n"
        assert process.wait(PATIENCE_MS / 1000) == 0
    port = int(address.rpartition(":")[2])
    with sockets.create_server(("127.0.0.1", port)):
        pass  # the port is free again
