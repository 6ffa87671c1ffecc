"""The controller on a ZMQ ROUTER socket: frames in, the core's decisions, frames out.

One thread does everything. Sends never block: a peer that does not read loses messages, and with the first of them its
session, so it learns of it by the answer to its next message. Frames larger than a message are never read: libzmq
closes the connection that sends one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

from mmcache.control.messages import MAX_MESSAGE_BYTES, HelloAgain, MalformedMessage, decode_from_client, encode
from mmcache.control.session import HEARTBEATS_PER_TTL
from mmcache.controller.admission import Admission
from mmcache.controller.announcements import LOCAL_PEER
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.mailbox import Mailbox
from mmcache.controller.recorder import Recorder
from mmcache.controller.state.base import StateFull, StateLost, StateStore
from mmcache.controller.state.memory import MemoryStateStore

_BURST: Final = 64
"""Most messages read before they are answered, and between two looks at the clock and at `stop`."""
_MONITORED: Final = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_MORE: Final = zmq.SNDMORE | zmq.DONTWAIT  # made once: `|` of two flags takes as long as a send
_LONGEST_POLL_MS: Final = 60_000
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_OPTIONS: Final = {
    zmq.LINGER: 0,
    zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
    zmq.ROUTER_MANDATORY: 1,  # what cannot be sent is an error here, not silence
    zmq.RCVHWM: 256,  # messages a peer; more stay in its own queue
    zmq.SNDHWM: 1024,
    zmq.BACKLOG: 1024,  # a whole cluster may connect at once
    zmq.HEARTBEAT_IVL: 10_000,  # ms; ends the connections of machines that vanished
    zmq.HEARTBEAT_TIMEOUT: 30_000,
}

_log = logging.getLogger(__name__)


def volatile_store() -> StateStore:
    """For a controller without a file: all is gone when it ends, and the next has another lineage."""
    return MemoryStateStore(secrets.token_hex(8))


def begin_term(store: StateStore, limits: ControllerLimits | None = None) -> tuple[ControllerCore, Recorder]:
    """A core for one start of a controller, with what its store remembers. Raises StateLost or StateFull."""
    limits = limits or ControllerLimits()
    recorder = Recorder(store)
    term, past = recorder.begin(limits, _now(), time.time())
    return ControllerCore(limits, term=term, past=past, random_session=_random_number), recorder


def serve(
    bind: str,
    core: ControllerCore,
    recorder: Recorder,
    *,
    admission: Admission | None = None,
    mailbox: Mailbox | None = None,
    ready: Callable[[str], None] | None = None,
    stop: int | None = None,
) -> None:
    """Serve until stopped.

    Args:
        bind: such as `tcp://127.0.0.1:7710`; port 0 takes a free one.
        core: decides; used by this thread only while this runs.
        recorder: makes durable what must be before anyone hears of it.
        admission: takes clients by their keys; used by this thread only while this runs. None: takes all.
        mailbox: through which other threads of this process reach the core. Closed when this ends.
        ready: called once with the real address, when connections are accepted.
        stop: a file descriptor that becomes readable when it is time to stop. None: SIGTERM and SIGINT stop it, which
            needs the main thread.

    Raises:
        OSError: the address cannot be bound; `filename` is the address.
        StateLost: what is durable is in doubt, or older than what a client knows. Nothing more is told to anyone.
    """
    with contextlib.ExitStack() as stack:
        if mailbox is not None:
            stack.callback(mailbox.close)
        signals = stack.enter_context(_StopSignals()) if stop is None else None
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.ROUTER))
        for option, value in _OPTIONS.items():
            socket.setsockopt(option, value)
        if admission is not None:
            stack.enter_context(admission.secure(context, socket))
        try:
            socket.bind(bind)
        except zmq.ZMQError as error:
            raise OSError(error.errno, zmq.strerror(error.errno or 0), bind) from error  # whose text has the address
        monitor = stack.enter_context(socket.get_monitor_socket(_MONITORED))
        stack.callback(socket.disable_monitor)
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        _log.info("controller at %s: lineage %s, term %d", address, core.lineage, core.term)
        if ready is not None:
            ready(address)
        server = _Server(socket, monitor, core, recorder, mailbox, admission)
        if stop is not None:
            server.run(stop)
        elif signals is not None:
            while not signals.received():
                server.run(signals.fileno())
        _log.info("controller at %s stopped: %s", address, core.stats())


class _Server:
    """The loop around a core, on sockets that its caller owns."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        monitor: zmq.Socket[bytes],
        core: ControllerCore,
        recorder: Recorder,
        mailbox: Mailbox | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._socket = socket
        self._monitor = monitor
        self._core = core
        self._recorder = recorder
        self._mailbox = mailbox
        self._admission = admission
        self._receive = self._receive_of_anybody if admission is None else self._receive_of_admitted
        self._check_every_s = core.limits.ttl_ms / 1000 / HEARTBEATS_PER_TTL
        self._checked_at = -math.inf

    def run(self, stop: int) -> None:
        """Serve until `stop` is readable."""
        poller = zmq.Poller()
        for source in (self._socket, self._monitor, stop):
            poller.register(source, zmq.POLLIN)
        calls = -1 if self._mailbox is None else self._mailbox.fileno()
        if self._mailbox is not None:
            poller.register(calls, zmq.POLLIN)
        admission = self._admission
        if admission is not None:
            poller.register(admission.questions, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._patience_ms()))
            if stop in ready:
                return
            if self._monitor in ready:
                self._count_ends()
            now = _now()
            if admission is not None:
                admission.look(now, self._core.count)
                if admission.questions in ready:
                    admission.answer(now, self._core.count)
            if now >= self._checked_at + self._check_every_s:
                self._recorder.check()
                self._checked_at = now
            self._send(self._core.tick(now) + self._write(now), now)
            if self._socket in ready:
                self._serve_burst()
            if calls in ready:
                self._serve_calls()

    def _patience_ms(self) -> int:
        due = self._core.next_deadline()
        if due is None:
            return _LONGEST_POLL_MS
        return min(max(0, math.ceil((due - _now()) * 1000)), _LONGEST_POLL_MS)

    def _serve_burst(self) -> None:
        """Read what is there, act on it at one time, which is after all of it was sent, and answer.

        Answers go out together: each send that finds libzmq's own thread asleep wakes it, and costs a switch to it.
        """
        received = self._receive()
        now = _now()
        effects: Effects = []
        for peer, frame in received:
            try:
                if frame is None:
                    raise MalformedMessage("more than one frame; a message is one")
                message = decode_from_client(frame)
            except MalformedMessage as error:
                effects += self._core.malformed(peer, str(error), now)
            else:
                effects += self._core.handle(peer, message, now)
        self._send(effects + self._write(now), now)

    def _serve_calls(self) -> None:
        """Carry out calls of other threads. What they bring about is written and sent as what messages do."""
        if self._mailbox is not None:
            now = _now()
            effects = self._core.tick(now)
            self._send(effects + self._mailbox.serve(self._core, now) + self._write(now), now)

    def _write(self, now: float) -> Effects:
        """Make durable what must be before anyone hears of it."""
        effects: Effects = []
        while (todo := self._core.take_writes()) is not None:
            try:
                self._recorder.write(todo, time.time())
            except StateFull as error:
                _log.error("an invalidation was refused: %s", error)
                effects += self._core.not_written(str(error))
            else:
                effects += self._core.written(now)
        if self._core.went_back:
            raise StateLost(self._core.went_back)
        return effects

    def _receive_of_anybody(self) -> list[tuple[bytes, bytes | None]]:
        """Messages with their senders; None for one of several frames. `recv_multipart` takes twice as long."""
        recv, option = self._socket.recv, self._socket.getsockopt
        received: list[tuple[bytes, bytes | None]] = []
        with contextlib.suppress(zmq.Again):
            while len(received) < _BURST:
                peer = recv(zmq.DONTWAIT)
                frame = recv(zmq.DONTWAIT)
                if not option(zmq.RCVMORE):
                    received.append((peer, frame))
                    continue
                received.append((peer, None))
                while option(zmq.RCVMORE):
                    recv(zmq.DONTWAIT)
        return received

    def _receive_of_admitted(self) -> list[tuple[bytes, bytes | None]]:
        """The same, of clients that are still on the list. Others begin anew, and are told why that is in vain."""
        received: list[tuple[bytes, bytes | None]] = []
        with contextlib.suppress(zmq.Again):
            for _ in range(_BURST):
                peer, *frames = self._socket.recv_multipart(zmq.DONTWAIT, copy=False)
                if self._admission is not None and not self._admission.allows(frames[0]):
                    self._core.count("refused.key")
                    self._deliver(peer.bytes, encode(HelloAgain("this client's key is not allowed any more")))
                else:
                    received.append((peer.bytes, frames[0].bytes if len(frames) == 1 else None))
        return received

    def _send(self, effects: Effects, now: float) -> None:
        """Send in order. Who loses a message gets none of the rest, since its session is over."""
        lost: set[bytes] = set()
        for peer, message in effects:
            if peer == LOCAL_PEER:
                if self._mailbox is not None:
                    self._mailbox.deliver(message)
            elif peer not in lost and not self._deliver(peer, encode(message)):
                lost.add(peer)
                effects += self._core.unreachable(peer, now)  # and on with these

    def _deliver(self, peer: bytes, frame: bytes) -> bool:
        """Whether the frame could be queued for the peer."""
        for _ in range(2):
            try:
                self._socket.send(peer, _MORE)  # only this one can fail
                self._socket.send(frame, zmq.DONTWAIT)
                return True
            except zmq.Again:  # asking for events makes libzmq notice what the peer has taken meanwhile
                self._socket.getsockopt(zmq.EVENTS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
        return False

    def _count_ends(self) -> None:
        """Any end of a connection counts: libzmq does not tell a farewell from a frame that was too large."""
        for _ in range(_BURST):
            if not self._monitor.poll(0):
                return
            event = recv_monitor_message(self._monitor)["event"]
            self._core.count("disconnected" if event == zmq.EVENT_DISCONNECTED else "refused.handshake")


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _random_number() -> int:
    return secrets.randbelow((1 << 62) - 1) + 1


class _StopSignals:
    """SIGTERM and SIGINT while it is entered, as a descriptor: one that comes just before a poll is not missed.

    The descriptor is Python's wake-up for signals of any kind, so `received` says whether it was one of these.
    """

    def __enter__(self) -> _StopSignals:
        self._received = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._handlers = {number: signal.signal(number, self._handle) for number in _STOP_SIGNALS}
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self._reader)
        os.close(self._writer)

    def _handle(self, number: int, _frame: object) -> None:
        self._received = True
        _log.info("stopped by %s", signal.Signals(number).name)

    def fileno(self) -> int:
        return self._reader

    def received(self) -> bool:
        """Whether it is time to stop; clears the descriptor."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 256):
                pass
        return self._received
