"""One agent process as its engine sees it: started, heard, ended and reaped."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from mmcache.agent.messages import MAX_MESSAGE_BYTES, AgentMessage, decode_agent_message
from mmcache.agent.staging import Staging
from mmcache.config import CONFIG_VARIABLE

MOST_AT_ONCE: Final = 1024
"""Most messages taken in one call."""
_NOT_MESSAGES: Final = (msgspec.MsgspecError, ValueError, RecursionError)


class AgentChild:
    """A process and the socket to it. Nothing here blocks but the constructor and `end`; not thread-safe.

    Make it on a thread that outlives it: the kernel ends the agent when that thread ends. Raises OSError.
    """

    def __init__(self, staging: Staging, config: str | None, name: str | None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._buffer = memoryview(bytearray(MAX_MESSAGE_BYTES))  # what is longer is cut, and so no message
        try:
            with theirs:
                self._socket.setblocking(False)
                self._process = _start(theirs.fileno(), staging, config, name)
        except BaseException:
            self._socket.close()
            raise
        self.heard_at = time.monotonic()
        """When it was started, or anything was received last."""
        self.closed = False
        """Whether nothing can be sent or received any more: the agent closed its end, or we ours."""
        self._exit = -1
        with contextlib.suppress(OSError):  # an old kernel: then its end shows when it is looked for
            self._exit = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        """Its process id, until it is reaped."""
        return self._process.pid

    @property
    def descriptor(self) -> int:
        """What becomes readable when it says something; -1 once our end is closed."""
        return self._socket.fileno()

    @property
    def exit_descriptor(self) -> int:
        """What becomes readable when it ends; -1 where there is no such thing."""
        return self._exit

    @property
    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the number of the signal that ended it. Reaps it."""
        return self._process.poll()

    def send(self, packet: bytes) -> bool:
        """Whether a packet could be handed over at once."""
        if self.closed:
            return False
        try:
            self._socket.send(packet)
        except OSError:  # full, too long for it, or gone
            return False
        return True

    def receive(self, into: list[AgentMessage]) -> int:
        """Add what has come, up to a bound; returns how many packets were no messages."""
        came = malformed = 0
        while not self.closed and came < MOST_AT_ONCE:
            try:
                nbytes = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                self.closed = True
                break
            if not nbytes and self._has_hung_up():
                self.closed = True
                break
            came += 1
            try:
                into.append(decode_agent_message(self._buffer[:nbytes]))
            except _NOT_MESSAGES:
                malformed += 1
        if came:
            self.heard_at = time.monotonic()
        return malformed

    def hang_up(self) -> None:
        """Close our end, so that it ends. Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):  # a forked child's copy of it must not keep the connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def end(self, patience_s: float) -> None:
        """Reap it: once it ends by itself, or else is asked to, or else is killed."""
        for ask in (None, self._process.terminate):
            if ask is not None:
                ask()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
                break
        self.kill()

    def kill(self) -> None:
        """End it at once, stopped or not, and reap it. Idempotent."""
        self._process.kill()
        self._process.wait()
        if self._exit >= 0:
            os.close(self._exit)
            self._exit = -1

    def _has_hung_up(self) -> bool:
        """Whether nothing came because nothing will, and not because an empty packet came."""
        poll = select.poll()
        poll.register(self._socket, select.POLLRDHUP)
        return bool(poll.poll(0))


def _start(descriptor: int, staging: Staging, config: str | None, name: str | None) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "mmcache.agent.process"),
        *("--socket", str(descriptor)),
        *("--staging", str(staging.descriptor), "--staging-bytes", str(staging.nbytes)),
        *("--parent", str(os.getpid())),
        *(() if config is None else (f"--config={Path(config).absolute()}",)),
        *(() if name is None else (f"--name={name}",)),
    ]
    # It imports what we would, wherever that comes from, and nothing that happens to lie in the working directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    if environment.get(CONFIG_VARIABLE):
        environment[CONFIG_VARIABLE] = str(Path(environment[CONFIG_VARIABLE]).absolute())
    return subprocess.Popen(
        command,
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(descriptor, staging.descriptor),
        start_new_session=True,
    )
