"""A controller that says what a test tells it to, over a real socket, and a channel that speaks to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import zmq

from mmcache.control.channel import ControlChannel
from mmcache.control.messages import (
    PROTOCOL_VERSION,
    Abort,
    Acquire,
    ClientMessage,
    ControllerMessage,
    Heartbeat,
    HeartbeatAnswer,
    Hello,
    Welcome,
    decode_from_client,
    encode,
)
from mmcache.key import EmbeddingKey
from mmcache.metrics import Counters

PATIENCE_S = 20.0
TERM = 11
LINEAGE = "a1"

_Message = TypeVar("_Message", bound=ClientMessage)
_Result = TypeVar("_Result")


def key(mm_hash: str, *, model: str = "siglip") -> EmbeddingKey:
    return EmbeddingKey(model=model, version="v1", mm_hash=mm_hash)


def soon() -> float:
    """A deadline that only a fault lets pass."""
    return time.monotonic() + PATIENCE_S


class ScriptedController:
    """Reads what clients send, one message at a time, and sends what it is told to.

    Heartbeats are answered on the way, unless `answer_heartbeats` is False, and never returned unless asked for.
    """

    def __init__(self, *, ttl_ms: int = 5000, address: str = "tcp://127.0.0.1:0") -> None:
        self.ttl_ms = ttl_ms
        self.answer_heartbeats = True
        self.session = 100
        self.peer = b""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(address)
        self.address: str = self._socket.get_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def receive(self, patience_s: float = PATIENCE_S) -> ClientMessage | None:
        """The next message; None after `patience_s` without one."""
        deadline = time.monotonic() + patience_s
        while (remaining := deadline - time.monotonic()) > 0:
            if not self._socket.poll(max(1, int(remaining * 1000))):
                break
            peer, frame = self._socket.recv_multipart()
            message = decode_from_client(frame)
            if isinstance(message, Hello):
                self.peer = peer
            if isinstance(message, Heartbeat) and self.answer_heartbeats:
                self.send(HeartbeatAnswer(message.term, message.session, message.number, 0), to=peer)
            else:
                return message
        return None

    def expect(self, kind: type[_Message]) -> _Message:
        """The next message, which must be of this kind."""
        message = self.receive()
        assert isinstance(message, kind), f"{kind.__name__} was expected, {message} came"
        return message

    def send(self, message: ControllerMessage, *, to: bytes | None = None) -> None:
        self.send_frame(encode(message), to=to)

    def send_frame(self, *frames: bytes, to: bytes | None = None) -> None:
        self._socket.send_multipart([self.peer if to is None else to, *frames])

    def welcome(self, *, lineage: str = LINEAGE) -> None:
        """Expect a hello, and open a new session."""
        self.expect(Hello)
        self.send_welcome(lineage=lineage)

    def send_welcome(self, *, lineage: str = LINEAGE) -> None:
        """Open a new session for whoever said hello last."""
        self.session += 1
        self.send(
            Welcome(
                version=PROTOCOL_VERSION,
                term=TERM,
                session=self.session,
                ttl_ms=self.ttl_ms,
                head=0,
                lineage=lineage,
                lease_ms=10_000,
                hold_ms=30_000,
                after=0,
            )
        )

    def answer(self, kind: Callable[..., ControllerMessage], request: int, *fields: object) -> None:
        """Send an answer of the present session."""
        self.send(kind(TERM, self.session, request, *fields))

    def expect_abort(self) -> Abort:
        abort = self.expect(Abort)
        assert (abort.term, abort.session) == (TERM, self.session)
        return abort

    def expect_acquire(self) -> Acquire:
        acquire = self.expect(Acquire)
        assert (acquire.term, acquire.session) == (TERM, self.session)
        return acquire


class Stage:
    """A scripted controller, a channel with a fresh session there, and threads for the calls of a test."""

    def __init__(self, controller: ScriptedController, channel: ControlChannel, counters: Counters) -> None:
        self.controller = controller
        self.channel = channel
        self.counters = counters
        self.faults_expected = False
        self._callers = ThreadPoolExecutor(8)

    def call(self, function: Callable[..., _Result], *args: object, **kwargs: object) -> Future[_Result]:
        """Run a call of the channel on a thread of its own."""
        return self._callers.submit(function, *args, **kwargs)

    def acquire(self, *keys: EmbeddingKey, wait_s: float = PATIENCE_S, **kwargs: float) -> Future:
        return self.call(self.channel.acquire, keys, wait_s=wait_s, **({"deadline": soon()} | kwargs))

    def end(self) -> None:
        self.channel.close()
        self._callers.shutdown()
        self.controller.close()


@contextmanager
def stage(*, ttl_ms: int = 5000) -> Iterator[Stage]:
    controller = ScriptedController(ttl_ms=ttl_ms)
    counters = Counters()
    channel = ControlChannel(controller.address, name="test", counters=counters)
    staged = Stage(controller, channel, counters)
    try:
        channel.start()
        controller.welcome()
        assert channel.wait_fresh(PATIENCE_S) is not None
        yield staged
    finally:
        staged.end()
    assert staged.faults_expected or not any("internal_error" in name for name in counters.snapshot())
