"""The engine's side: sends to its agent and receives from it without ever waiting, and keeps one running.

The scheduler's thread calls `send` and `receive`. All that takes time (to start an agent, to end one that hangs, to
reap) is done by a thread of the link's own, the keeper.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import threading
import time
import weakref
from pathlib import Path
from typing import Final

import msgspec

from mmcache.agent.child import AgentChild
from mmcache.agent.messages import MAX_MESSAGE_BYTES, AgentMessage, EngineMessage, Figures, Started, encode
from mmcache.agent.staging import Staging
from mmcache.metrics import Counters

_log = logging.getLogger(__name__)

HANGS_AFTER_S: Final = 10.0
"""An agent that is not heard of for so long is killed; it says something every second."""
STARTS_WITHIN_S: Final = 60.0
"""The same until it serves: what it loads can hold its interpreter for many seconds on a busy machine."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Between two agents: doubled for each that did not live for so long."""
END_PATIENCE_S: Final = 5.0
"""How long an agent whose socket is closed may take to end before it is asked to, and then before it is killed."""
_TURN_S: Final = 1.0
_LATE_S: Final = 5.0
"""A turn that comes so late shows that this process stood still, and not that the agent is silent."""
_WAIT_SLICE_S: Final = 0.05
_NOT_SENDABLE: Final = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)


class AgentLink:
    """An engine's link to its agent. All but `close` for one thread.

    Args:
        staging: what the agent is to read into; it must outlive this.
        config_path: the client's configuration; None: the one that MMCACHE_CONFIG names.
        name: labels the agent for people.
        counters: counts starts, deaths, hangs and malformed messages under names that begin with `link.`.
    """

    def __init__(
        self, staging: Staging, config_path: str | Path | None, name: str | None, counters: Counters | None = None
    ) -> None:
        config = None if config_path is None else str(config_path)
        self._keeper = keeper = _Keeper(staging, config, name, counters or Counters())
        weakref.finalize(self, keeper.leave).atexit = False
        _open.add(keeper)

    def start(self, timeout: float) -> bool:
        """Start an agent, and wait up to `timeout` seconds until it serves; whether it does.

        If not, or if it ends before, it is tried on in the background.
        """
        return self._keeper.start(timeout)

    def send(self, message: EngineMessage) -> bool:
        """Tell the agent, at once; False if it cannot be told now: there is none, or it is behind. Never raises."""
        return self._keeper.send(message)

    def receive(self) -> list[AgentMessage]:
        """What the agent has said since the last call; does not wait."""
        return self._keeper.receive()

    def wait(self, seconds: float) -> bool:
        """Wait until there is something to `receive`, or a death to take; False if there was nothing in time."""
        return self._keeper.wait(seconds)

    @property
    def agent_lives(self) -> bool:
        """Whether there is an agent that serves."""
        agent = self._keeper.agent
        return agent is not None and not agent.closed

    def take_death(self) -> bool:
        """Whether an agent that was sent something has ended since the last call: all its blocks are free.

        Never before all that it said has been received. Until it has been taken, no other agent is sent anything.
        """
        return self._keeper.take_death()

    def close(self) -> None:
        """End the agent, within seconds. Idempotent; also done at exit."""
        self._keeper.close()


class _Keeper:
    """All of a link's state, and the thread that keeps an agent running."""

    def __init__(self, staging: Staging, config: str | None, name: str | None, counters: Counters) -> None:
        self.agent: AgentChild | None = None
        """The one that the engine talks to, from when it can serve until it is reaped."""
        self._staging = staging
        self._config = config
        self._name = name
        self._counters = counters
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the agent's socket and what follows
        self._inbox: list[AgentMessage] = []
        self._death = False
        self._closing = False
        self._received_at = time.monotonic()
        self._first_tried = threading.Event()
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mmcache-agent-link", daemon=True)

    def __del__(self) -> None:
        os.close(self._alarm)

    # On the engine's thread

    def start(self, timeout: float) -> bool:
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no thread to give
            self._counters.add("link.start_failed")
            _log.warning("cannot start an agent, nothing is cached: %s", error)
            return False
        self._first_tried.wait(timeout)
        return self.agent is not None

    def send(self, message: EngineMessage) -> bool:
        agent = self.agent
        if agent is None:
            return False
        try:
            packet = encode(message)
        except _NOT_SENDABLE:
            self._counters.add("link.unsendable")
            return False
        if len(packet) > MAX_MESSAGE_BYTES:
            self._counters.add("link.unsendable")
            return False
        with self._lock:
            return agent.send(packet)

    def receive(self) -> list[AgentMessage]:
        with self._lock:
            self._received_at = time.monotonic()
            if self.agent is not None:
                self._take_from(self.agent)
            if not self._inbox:
                return []
            messages, self._inbox = self._inbox, []
            return messages

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._inbox and not self._death:
            left = deadline - time.monotonic()
            agent = self.agent
            descriptor = agent.descriptor if agent is not None and not agent.closed else -1
            if descriptor < 0:  # in slices, since the keeper may take what comes, or bury it
                if left <= 0.0:
                    return False
                time.sleep(min(left, _WAIT_SLICE_S))
                continue
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if poll.poll(max(0.0, min(left, _WAIT_SLICE_S)) * 1000):
                return True
            if left <= 0.0:
                return False
        return True

    def take_death(self) -> bool:
        if not self._death or self._inbox:
            return False
        with self._lock:
            self._death = False
        self._wake()
        return True

    def close(self) -> None:
        if os.getpid() != self._process:  # a forked child's copy: there is no such thread here, nor a child to reap
            return
        self.leave()
        _open.discard(self)
        if self._thread.ident is not None:
            self._thread.join(3 * END_PATIENCE_S)

    def leave(self) -> None:
        """End without waiting for it: from finalisers, which may run in any thread and under any lock."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._alarm, 1)

    def _take_from(self, agent: AgentChild) -> bool:
        """Move what an agent said into the inbox; False if there was nothing. The lock is held."""
        was_closed = agent.closed
        came: list[AgentMessage] = []
        if malformed := agent.receive(came):
            self._counters.add("link.malformed", malformed)
        for message in came:
            if isinstance(message, Figures) and self._inbox and isinstance(self._inbox[-1], Figures):
                self._inbox[-1] = message  # of an engine that has nothing to do, and does not look
            else:
                self._inbox.append(message)
        if agent.closed and not was_closed:
            self._wake()
        return bool(came or malformed)

    # On the keeper's thread

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while not self._closing:
            began = time.monotonic()
            agent = self._start_agent()
            if agent is not None:
                try:
                    self._tend(agent)
                except Exception as error:  # noqa: BLE001 - it costs an agent, not the thread that starts another
                    self._counters.add("link.internal_error")
                    _log.error("the link to the agent failed", exc_info=error)
                self._bury(agent)
            self._first_tried.set()
            if time.monotonic() - began >= LONGEST_PAUSE_S:
                pause = FIRST_PAUSE_S
            self._pause(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _start_agent(self) -> AgentChild | None:
        try:
            agent = AgentChild(self._staging, self._config, self._name)
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without; counted and logged
            self._counters.add("link.start_failed")
            _log.warning("cannot start an agent, nothing is cached until it can: %s", error)
            return None
        self._counters.add("link.start")
        return agent

    def _tend(self, agent: AgentChild) -> None:
        """Return once it has ended, hangs, or this is closed."""
        serves = False
        looked_at = time.monotonic()
        while not self._closing and not agent.closed and agent.status is None:
            now = time.monotonic()
            if now - looked_at > _LATE_S:
                agent.heard_at = now
            looked_at = now
            with self._lock:
                if self.agent is agent:
                    if now - self._received_at >= _TURN_S:
                        self._take_from(agent)
                else:
                    serves = self._hear_of_start(agent) or serves
                    if serves and not self._death:
                        self.agent = agent
                        self._first_tried.set()
                        _log.info("the agent (process %d) serves", agent.pid)
            patience = HANGS_AFTER_S if serves else STARTS_WITHIN_S
            if time.monotonic() - agent.heard_at > patience:
                self._counters.add("link.hang")
                _log.warning("the agent (process %d) hangs and is killed", agent.pid)
                agent.kill()
                return
            self._sleep(_TURN_S, agent.exit_descriptor, -1 if self.agent is agent else agent.descriptor)

    def _hear_of_start(self, agent: AgentChild) -> bool:
        """Whether it says that it can serve. Until it is sent something it has nothing else to say."""
        came: list[AgentMessage] = []
        if malformed := agent.receive(came):
            self._counters.add("link.malformed", malformed)
        return any(isinstance(message, Started) for message in came)

    def _bury(self, agent: AgentChild) -> None:
        """End an agent, keep what it said, and let the engine know that it is dead."""
        pid = agent.pid
        if self._closing:
            with self._lock:
                agent.hang_up()
        if self.agent is agent:
            agent.end(END_PATIENCE_S)
        else:
            agent.kill()  # it has begun nothing yet
        with self._lock:
            if self.agent is agent:
                while self._take_from(agent):
                    pass
                self.agent = None
                self._death = True
            agent.hang_up()
        self._counters.add("link.end")
        if not self._closing:
            _log.warning("the agent (process %d) has ended with status %s", pid, agent.status)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing and (left := until - time.monotonic()) > 0.0:
            self._sleep(left)

    def _sleep(self, seconds: float, *descriptors: int) -> None:
        """Until a descriptor (-1: none) becomes readable, or the engine's thread wakes us."""
        poll = select.poll()
        for descriptor in (self._alarm, *descriptors):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        poll.poll(seconds * 1000)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._alarm)


_open: weakref.WeakSet[_Keeper] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for keeper in list(_open):
        keeper.close()
