"""The agent's process: `python -m mmcache.agent.process`, started by `link`, one beside each engine.

It ends in order (nothing is fresh any more, claims pass on) when the engine closes the socket or ends, and on SIGTERM;
the kernel ends it when it does not within seconds, or stands still.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from mmcache.agent.messages import (
    MAX_MESSAGE_BYTES,
    AgentMessage,
    EngineMessage,
    Figures,
    Started,
    decode_engine_message,
    encode,
)

if TYPE_CHECKING:
    from mmcache.agent.freshness import Freshness
    from mmcache.agent.service import Service
    from mmcache.client.cache import MMCache

_log = logging.getLogger(__name__)

FIGURES_EVERY_S: Final = 1.0
SEND_PATIENCE_S: Final = 60.0
"""How long the engine may not read what it is told. It does not wait for us; we end when it is gone for so long."""
STANDSTILL_S: Final = 60
"""After so long without a turn of the ticker, the kernel ends this process: whatever holds the interpreter."""
END_S: Final = 30
"""The same from the moment that it is to end."""
_PR_SET_PDEATHSIG: Final = 1  # from <linux/prctl.h>


class EngineSocket:
    """This end of the socket: one thread receives, all may post."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))  # what is longer is cut, and so no message
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._arrivals.register(self._alarm, select.POLLIN)
        self.ended = False
        self.malformed = 0

    def end(self) -> None:
        """Let `receive` return None, and nobody wait for room any more. From any thread, and from signal handlers."""
        self.ended = True
        os.eventfd_write(self._alarm, 1)

    def receive(self) -> EngineMessage | None:
        """The engine's next message; None once it has gone, or this is ended."""
        while not self.ended:
            try:
                nbytes = self._connection.recv_into(self._buffer)
            except BlockingIOError:
                self._arrivals.poll()
                continue
            except OSError:  # the engine ended with unread messages of ours
                return None
            if not nbytes and self._is_closed():
                return None
            try:
                return decode_engine_message(self._buffer[:nbytes])
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self.malformed += 1
        return None

    def post(self, message: AgentMessage) -> None:
        """Tell the engine; waits for room. When it has gone, or does not read, this ends."""
        packet = encode(message)
        deadline = time.monotonic() + SEND_PATIENCE_S
        while not self.ended:
            try:
                self._connection.send(packet)
                return
            except BlockingIOError:
                left = deadline - time.monotonic()
            except OSError as error:
                _log.info("the engine has gone: %s", error.strerror)
                left = 0.0
            if left <= 0.0:
                self.end()
                return
            room = select.poll()
            room.register(self._connection, select.POLLOUT)
            room.poll(min(left, 1.0) * 1000)

    def post_if_room(self, message: AgentMessage) -> None:
        """Tell the engine what it can do without."""
        with contextlib.suppress(OSError):
            self._connection.send(encode(message))

    def _is_closed(self) -> bool:
        """Whether nothing came because nothing will, and not because an empty packet came."""
        closed = select.poll()
        closed.register(self._connection, select.POLLRDHUP)
        return bool(closed.poll(0))


class Ticker:
    """A thread that keeps freshness and figures up to date, and the kernel from ending this process."""

    def __init__(self, engine: EngineSocket) -> None:
        self._engine = engine
        self._end = threading.Event()
        self._serving: tuple[MMCache, Freshness, Service] | None = None
        self._thread = threading.Thread(target=self._run, name="mmcache-agent-tick", daemon=True)
        self._thread.start()

    def serve(self, cache: MMCache, freshness: Freshness, service: Service) -> None:
        """From here on there is something to tell."""
        self._serving = cache, freshness, service

    def end(self) -> None:
        """Stop, and have the kernel end this process if it does not end by itself."""
        self._end.set()
        self._thread.join(timeout=1.0)
        signal.setitimer(signal.ITIMER_REAL, END_S)

    def _run(self) -> None:
        due = time.monotonic()
        pause = 0.0
        while not self._end.wait(pause):
            try:
                if not self._engine.ended:
                    signal.setitimer(signal.ITIMER_REAL, STANDSTILL_S)
                pause = FIGURES_EVERY_S
                if self._serving is not None:
                    self._serving[1].look()
                    pause = self._serving[1].pause_s
                now = time.monotonic()
                if now >= due:
                    due = now + FIGURES_EVERY_S
                    self._engine.post_if_room(Figures(self._figures()))
                pause = max(0.0, min(pause, due - now))
            except Exception as error:  # noqa: BLE001 - the engine would take us for dead; logged
                _log.error("the agent's ticker failed", exc_info=error)
                pause = FIGURES_EVERY_S

    def _figures(self) -> dict[str, float]:
        if self._serving is None:
            return {}
        cache, _, service = self._serving
        return {**cache.stats(), **service.figures(), "agent.malformed": self._engine.malformed}


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one engine until it ends. Returns the exit status: 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(prog="mmcache.agent.process", description=__doc__)
    parser.add_argument("--socket", type=int, required=True, help="descriptor of a SOCK_SEQPACKET socket")
    parser.add_argument("--staging", type=int, required=True, help="descriptor of the staging memory")
    parser.add_argument("--staging-bytes", type=int, required=True, help="its size without the header")
    parser.add_argument("--config", help="as MMCache.connect takes it")
    parser.add_argument("--name", help="a label for people")
    parser.add_argument("--parent", type=int, help="process id of the engine; ends when that does")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s mmcache agent {os.getpid()} %(levelname)s %(name)s: %(message)s"
    )
    engine = EngineSocket(socket.socket(fileno=options.socket))
    _mind_signals(engine)
    if options.parent is not None and not _tie_to(options.parent):
        return 0
    return _serve(engine, options)


def _serve(engine: EngineSocket, options: argparse.Namespace) -> int:
    ticker = Ticker(engine)
    # Here, since they take seconds: the engine hears of us meanwhile, and we of its end.
    import torch  # noqa: PLC0415

    from mmcache.agent.freshness import Freshness  # noqa: PLC0415
    from mmcache.agent.service import Service  # noqa: PLC0415
    from mmcache.agent.staging import Staging  # noqa: PLC0415
    from mmcache.client.cache import MMCache  # noqa: PLC0415
    from mmcache.errors import ConfigError  # noqa: PLC0415

    torch.set_num_threads(1)  # it only copies, and the cores are the engine's
    staging = Staging.open_as_agent(options.staging, options.staging_bytes)
    named = {} if options.name is None else {"name": options.name}
    try:
        cache = MMCache.connect(options.config, strict=False, **named)
    except ConfigError as error:
        _log.error("the agent cannot start: %s", error)
        ticker.end()
        return 2
    freshness = Freshness(staging, cache._parts.channel)
    try:
        service = Service(cache, staging, freshness, engine.post)
        freshness.look()
        ticker.serve(cache, freshness, service)
        engine.post(Started(os.getpid()))
        while (message := engine.receive()) is not None:
            try:
                service.receive(message)
            except Exception as error:  # noqa: BLE001 - no message may end the agent; counted and logged
                cache._counters.add("agent.internal_error", reason=type(error).__name__)
                _log.error("the agent could not take a message on", exc_info=error)
    finally:
        engine.end()
        ticker.end()
        freshness.end()
        cache.close()
    return 0


def _mind_signals(engine: EngineSocket) -> None:
    """SIGTERM ends this process in order; Ctrl-C is the engine's business; SIGALRM is the kernel's last resort."""

    def end(_number: int, _frame: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, END_S)
        engine.end()

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGTERM})


def _tie_to(parent: int) -> bool:
    """Have the kernel send SIGTERM when the parent's thread that started this process ends; False if it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:  # the end of the socket will tell as well
        _log.warning("cannot be tied to the engine: %s", os.strerror(ctypes.get_errno()))
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main())
