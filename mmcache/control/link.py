"""The channel's thread: it owns the connection, and moves messages between it, the session and the exchange.

It sleeps until a message, a caller or a deadline wakes it. No other thread touches the connection, the session or the
exchange: callers hand over commands.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import zmq

from mmcache.control.curve import ClientKeys, Handshake
from mmcache.control.exchange import Exchange
from mmcache.control.messages import (
    MAX_MESSAGE_BYTES,
    ClientMessage,
    Goodbye,
    Heartbeat,
    MalformedMessage,
    decode_from_controller,
    encode,
)
from mmcache.control.session import (
    Began,
    Connect,
    Deliver,
    Effect,
    Lost,
    Outdated,
    Phase,
    Send,
    Session,
    SessionView,
)
from mmcache.selector import Selector

if TYPE_CHECKING:
    from mmcache.control.tally import Tally
    from mmcache.metrics import Counters

_log = logging.getLogger(__name__)

MESSAGES_PER_TURN: Final = 256
"""Most messages read before callers and deadlines have their turn."""
HIGH_WATER_MARK: Final = 16_384
"""Most messages queued in each direction. The exchange has fewer under way: it is met only when nothing moves."""
RECONNECT_MS: Final = 50
RECONNECT_MOST_MS: Final = 1000
GOODBYE_LINGER_MS: Final = 200
PATIENCE_S: Final = 0.1
"""Calls that waited in vain for so long, one or several after the other, raise a doubt."""
FAULT_PAUSE_S: Final = 0.05
LONGEST_SLEEP_S: Final = 3600.0
WARN_EVERY_S: Final = 30.0
"""Between warnings of a controller that is there, but does not take this client."""


def boottime() -> float:
    """Seconds on the clock of sessions, which counts suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class _Alarm:
    """Wakes the thread. Its descriptor lives as long as anyone may set it, so never names another file."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set and cleared already
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        os.close(self.fd)


class Link:
    """One thread with one connection at a time.

    Args:
        address: the controller's, `tcp://host:port`.
        session: not started yet.
        keys: None: without CURVE.
        tally: told with each heartbeat, and with the goodbye.
        counters: counts malformed frames, lost connections and internal errors.
    """

    def __init__(
        self,
        address: str,
        session: Session,
        *,
        keys: ClientKeys | None = None,
        tally: Tally | None = None,
        counters: Counters | None = None,
    ) -> None:
        self.view: SessionView | None = None
        """The session as last confirmed. Any thread may read it; it is fresh only before its `fresh_until`."""
        self.last_view: SessionView | None = None
        """The last there was, however old."""
        self.exchange = Exchange(self._send, counters=counters)
        """For commands only: it belongs to the thread."""
        self.listeners: tuple[Callable[[Sequence[Selector] | None], object], ...] = ()
        """Called on the thread with what is outdated, before the controller hears that it counts here."""
        self._address = address
        self._session = session
        self._keys = keys
        self._tally = tally
        self._counters = counters
        self._alarm = _Alarm()
        self._commands: deque[Callable[[], None]] = deque()
        self._state = threading.Condition()  # guards what follows, and tells of a new view
        self._running = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="mmcache-control", daemon=True)
        self._poller = zmq.Poller()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._handshake: Handshake | None = None
        """Of that connection, until it can take a message."""
        self._warned_at = -math.inf
        self.in_doubt = False
        """Whether a caller waited in vain, and nothing was heard since: nobody else should."""
        self._heard_at = self._in_vain_since = -math.inf
        self.connected = False
        """Whether there is a session now. One that was lost is fresh for its time still."""
        self._broken = False
        """Whether a message could not be sent: the connection is down, and the session with it."""

    @property
    def trouble(self) -> str:
        """Why there is no session."""
        return self._session.trouble

    @property
    def backlog(self) -> int:
        """Commands that wait for the thread."""
        return len(self._commands)

    @property
    def running(self) -> bool:
        """Whether commands are taken."""
        return self._running

    def start(self) -> bool:
        """Start the thread; False if it was started or stopped before."""
        with self._state:
            if self._stopping or self._running:
                return False
            self._thread.start()
            self._running = True
            return True

    def stop(self, timeout: float) -> None:
        """End the session with a goodbye, fail all calls, and wait for the thread to end. Idempotent."""
        with self._state:
            self._stopping = True
            running = self._running
            self._state.notify_all()
        self._alarm.set()
        if running and threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("the control channel's thread did not end within %.1f s", timeout)

    def submit(self, command: Callable[[], None]) -> bool:
        """Have the thread run a command, at the latest when it ends; False if it does not run."""
        with self._state:
            if not self._running:
                return False
            self._commands.append(command)
        self._alarm.set()
        return True

    def doubt(self, since: float) -> None:
        """A caller that asked then (`time.monotonic()`) had no answer in time. Ask for a sign of life, at once."""
        if self._heard_at >= since:
            return
        if self._in_vain_since <= self._heard_at:
            self._in_vain_since = since
        if not self.in_doubt and time.monotonic() - self._in_vain_since >= PATIENCE_S:
            self.in_doubt = True
            self._count("breaker", "controller")
            self.submit(lambda: self._session.doubt(boottime()))

    def fresh_view(self) -> SessionView | None:
        """The session, if it is fresh now."""
        view = self.view
        if view is not None and time.clock_gettime(time.CLOCK_BOOTTIME) < view.fresh_until:
            return view
        return None

    def wait_for_fresh_view(self, timeout: float) -> SessionView | None:
        """The session once there is one and it is fresh; None after `timeout` seconds, or when none will be."""
        deadline = time.monotonic() + timeout
        with self._state:
            while (view := self.fresh_view() if self.connected else None) is None and not self._stopping:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._state.wait(min(remaining, threading.TIMEOUT_MAX))
            return view

    # All below runs on the thread

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._context = context
            self._poller.register(self._alarm.fd, zmq.POLLIN)
            while not self._stopping:
                try:
                    if self._session.phase is Phase.IDLE:
                        self._perform(self._session.start(boottime()))
                    self._turn()
                except Exception as error:  # noqa: BLE001 - a fault of ours ends a session, not the channel; counted
                    self._count("control.internal_error", type(error).__name__)
                    _log.exception("the control channel failed and starts its session anew")
                    self._perform(self._session.disconnected("internal_error", "an internal error", boottime()))
                    time.sleep(FAULT_PAUSE_S)  # one that comes again at once must not spin
        finally:
            self._end()
            context.term()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(math.ceil(self._sleep_s() * 1000)))
        if self._alarm.fd in ready:
            self._alarm.clear()
        if self._handshake is not None and self._handshake.events in ready:
            self._look_at(self._handshake)
        if self._socket is not None and self._socket in ready:
            if self._session.phase is Phase.CONNECTING:
                self._poller.modify(self._socket, zmq.POLLIN)
                self._end_handshake()
                self._perform(self._session.connected(boottime()))
            else:
                self._receive(self._socket)
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        self._perform(self._session.tick(boottime()))
        self.exchange.tick(time.monotonic())
        if self._broken:
            self._perform(self._session.disconnected("disconnected", "the connection broke", boottime()))

    def _look_at(self, handshake: Handshake) -> None:
        """Give a connection up that the other end did not let come about."""
        if (end := handshake.broken_off()) is None:
            return
        if time.monotonic() >= self._warned_at + WARN_EVERY_S:
            self._warned_at = time.monotonic()
            _log.warning("no session: %s", end.trouble)
        self._perform(self._session.disconnected(end.reason, end.trouble, boottime()))

    def _sleep_s(self) -> float:
        sleep = LONGEST_SLEEP_S
        if (due := self._session.next_deadline()) is not None:
            sleep = min(sleep, due - boottime())
        if (due := self.exchange.next_deadline()) is not None:
            sleep = min(sleep, due - time.monotonic())
        return max(0.0, sleep)

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(MESSAGES_PER_TURN):
            if socket is not self._socket:  # the session was lost meanwhile: what else it was told is void
                return
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard_at = time.monotonic()
            self.in_doubt = False
            try:
                if len(frames) != 1:
                    raise MalformedMessage(f"{len(frames)} frames")
                message = decode_from_controller(frames[0])
            except MalformedMessage:
                self._count("control.malformed")
                continue
            self._perform(self._session.received(message, boottime()))

    def _perform(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Connect():
                    self._connect()
                case Send(message):
                    if isinstance(message, Heartbeat | Goodbye):
                        self._tell_uses(message.term, message.session)
                    self._send(message)
                case Began(view):
                    self.connected = True
                    self.exchange.begin(view)
                    _log.info("session with the controller at %s (lineage %s)", self._address, view.lineage)
                case Lost(reason):
                    self.connected = False  # before anyone is told, so that nobody asks again at once
                    self._disconnect(linger_ms=0)
                    self.exchange.lost(reason)
                    _log.info("no session with the controller at %s: %s", self._address, self._session.trouble)
                case Outdated(selectors):
                    for listener in self.listeners:
                        listener(selectors)
                case Deliver(message):
                    self.exchange.received(message, time.monotonic())
        self._show(self._session.view)

    def _show(self, view: SessionView | None) -> None:
        if view is not self.view:
            with self._state:
                self.view = view
                self.last_view = view or self.last_view
                self._state.notify_all()

    def _connect(self) -> None:
        self._disconnect(linger_ms=0)
        if self._context is None:
            raise RuntimeError("a connection without a context")
        self._broken = False
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
        if self._keys is not None:
            self._keys.secure(socket)
        self._poller.register(socket, zmq.POLLOUT)
        self._handshake = Handshake(socket, self._address, self._keys)
        self._poller.register(self._handshake.events, zmq.POLLIN)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            trouble = f"cannot connect to {self._address}: {error.strerror}"
            self._perform(self._session.disconnected("address", trouble, boottime()))

    def _disconnect(self, *, linger_ms: int) -> None:
        self._end_handshake()
        socket, self._socket = self._socket, None
        if socket is not None:
            self._poller.unregister(socket)
            socket.close(linger=linger_ms)

    def _end_handshake(self) -> None:
        handshake, self._handshake = self._handshake, None
        if handshake is not None:
            self._poller.unregister(handshake.events)
            handshake.close()

    def _send(self, message: ClientMessage) -> None:
        frame = encode(message)
        try:
            if self._socket is not None:
                self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # nobody is connected
            self._broken = True

    def _tell_uses(self, term: int, session: int) -> None:
        """Tell what is tallied, but where it is likely that nobody hears of it: then it is kept."""
        if self._tally is None or self._socket is None or self.in_doubt:
            return
        if self._socket.poll(0, zmq.POLLOUT) and (used := self._tally.take(term, session)) is not None:
            self._send(used)

    def _end(self) -> None:
        self.connected = False
        self._show(None)
        self.exchange.close()
        self._perform(self._session.close())
        self._disconnect(linger_ms=GOODBYE_LINGER_MS)
        with self._state:
            self._running, self._stopping = False, True
            self._state.notify_all()
        while self._commands:  # no more can come; without a session each fails its call, or does nothing
            self._commands.popleft()()

    def _count(self, name: str, reason: str = "") -> None:
        if self._counters is not None:
            self._counters.add(name, reason=reason)
