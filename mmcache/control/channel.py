"""The client's way to the controller: sessions kept by themselves, and calls that end by a deadline.

A hit needs only `fresh`. All else is a round trip to the controller on a thread of the channel's own; callers block,
each no longer than its deadline, and no longer than the session lives.
"""

from __future__ import annotations

import functools
import os
import random
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mmcache.control.batches import (
    AbandonEntry,
    CommitEntry,
    abandoned_batches,
    commit_batches,
    key_batches,
    missing_batches,
)
from mmcache.control.calls import Acquisition, Call
from mmcache.control.curve import ClientKeys
from mmcache.control.exchange import MAX_REQUESTS
from mmcache.control.link import Link
from mmcache.control.messages import (
    PROTOCOL_VERSION,
    AbortReason,
    CommitStatus,
    Figures,
    Hello,
    Hit,
    Invalidated,
    PinAnswer,
    PinSubject,
    Progress,
)
from mmcache.control.session import Session, SessionView
from mmcache.errors import ConfigError, ControllerUnavailable, DeadlineExceeded, LifecycleError
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

if TYPE_CHECKING:
    from mmcache.control.tally import Tally
    from mmcache.metrics import Counters

__all__ = ["AbandonEntry", "Acquisition", "CommitEntry", "ControlChannel", "SessionView"]

CLOSE_PATIENCE_S: Final = 2.0

_Result = TypeVar("_Result")

_process = os.getpid()


def _note_fork() -> None:
    global _process  # noqa: PLW0603 - read on every hit, where getpid would cost more than all the rest
    _process = os.getpid()


os.register_at_fork(after_in_child=_note_fork)


class ControlChannel:
    """One client's sessions with one controller. Safe to call from several threads.

    Args:
        address: the controller's, such as `tcp://127.0.0.1:7710`. Nothing needs to listen there yet.
        name: labels this client for people; 1 to 128 characters.
        serves_stale: whether it reads by what it knew last, however long ago. No invalidation waits for it then.
        keys: None: without CURVE. See `control.curve.client_keys`.
        tally: of what this client reads, for the controller.
        counters: counts sessions, losses, ignored messages and claims under names that begin with `control.`.

    Raises (every method): LifecycleError in a child after fork. Calls with an answer also raise LifecycleError before
    `start` and after `close`, DeadlineExceeded, and ControllerUnavailable: at once when there is no fresh session, when
    it is lost meanwhile, and when this client has too much under way.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        serves_stale: bool = False,
        keys: ClientKeys | None = None,
        tally: Tally | None = None,
        counters: Counters | None = None,
    ) -> None:
        if not 1 <= len(name) <= 128:
            raise ConfigError(f"the client's name must have 1 to 128 characters, not {len(name)}")
        self._address = address
        self._process = os.getpid()
        self._counters = counters
        self._serves_stale = serves_stale
        hello = Hello(PROTOCOL_VERSION, name, socket.gethostname()[:512], os.getpid(), serves_stale=serves_stale)
        session = Session(hello, random=random.random, counters=counters)
        self._link = Link(address, session, keys=keys, tally=tally, counters=counters)
        # the thread keeps the link alive, not the channel, so a channel that is dropped, or still open at exit, ends
        self._end = weakref.finalize(self, _stop, self._link, self._process)

    def start(self) -> None:
        """Begin to look for the controller, and go on for as long as the channel is open. Does not wait."""
        self._check()
        if not self._link.start():
            raise LifecycleError("a control channel is started once, before it is closed")

    def close(self) -> None:
        """End the session, and all calls with ControllerUnavailable. Idempotent, and ends within seconds."""
        self._check()
        self._end()

    def fresh(self) -> SessionView | None:
        """The session, if it is fresh now. Nobody may read or publish without one."""
        self._check()
        return self._link.fresh_view()

    def readable(self) -> SessionView | None:
        """By what reads go: the session, if it is fresh now; where staleness is allowed, also the last that was."""
        view = self.fresh()
        return self._link.last_view if view is None and self._serves_stale else view

    def wait_fresh(self, timeout: float) -> SessionView | None:
        """Wait up to `timeout` seconds for a fresh session."""
        self._check()
        return self._link.wait_for_fresh_view(timeout)

    @property
    def trouble(self) -> str:
        """Why there is no session, for people; while there is one, what was wrong last."""
        return self._link.trouble

    @property
    def in_doubt(self) -> bool:
        """Whether calls end at once, as unavailable: one had no answer in time, or there is no session.

        Names may be fresh even so, and what the store has can be read.
        """
        return self._link.in_doubt or not self._link.connected

    def acquire(
        self, keys: Sequence[EmbeddingKey], *, wait_s: float, deadline: float, renew_for_s: float = 120.0
    ) -> Acquisition:
        """Ask who computes these keys.

        Args:
            keys: any number of distinct keys.
            wait_s: how long, from now, to wait for results that others are computing; 0: do not wait.
            deadline: for the answers, in `time.monotonic()` seconds.
            renew_for_s: how long each claim is renewed that is not committed or aborted.

        Returns the answers in the order of the keys. The claims in them are the caller's to end.
        """
        acquisition = Acquisition(
            len(keys),
            wait_s=wait_s,
            renew_for_s=renew_for_s,
            check=self._check,
            leave=self._leave,
        )
        ask = functools.partial(self._link.exchange.acquire, acquisition, key_batches(keys))
        try:
            acquisition.answers = self._ask(acquisition, ask, deadline)
        except BaseException:  # an interrupt too must not leave claims behind
            acquisition.leave()
            raise
        return acquisition

    def commit(
        self, entries: Sequence[CommitEntry], *, deadline: float, lineage: str | None = None
    ) -> list[CommitStatus]:
        """Announce entries that are readable in the store, and end their claims.

        Args:
            entries: any number, in one or several scopes.
            deadline: for the answers, in `time.monotonic()` seconds.
            lineage: the one in the entries' names. A controller with another one is not told of them
                (ControllerUnavailable): it would promise what nobody can find.
        """
        call: Call[CommitStatus] = Call(len(entries))
        ask = functools.partial(self._link.exchange.commit, call, commit_batches(entries), lineage)
        return self._ask_or_forget(call, ask, deadline)

    def lookup(self, keys: Sequence[EmbeddingKey], *, deadline: float) -> list[Hit | None]:
        """What the directory knows of these keys, in their order; claims nothing."""
        call: Call[Hit | None] = Call(len(keys))
        ask = functools.partial(self._link.exchange.lookup, call, key_batches(keys))
        return self._ask_or_forget(call, ask, deadline)

    def inspect(self, *, deadline: float) -> dict[str, int]:
        """The controller's figures by name: sizes of its tables now, and what it counted since its start."""
        call: Call[Figures] = Call(1)
        return self._ask_or_forget(call, functools.partial(self._link.exchange.inspect, call), deadline)[0].figures

    def invalidate(self, selector: Selector, *, reason: str, idempotency: str, deadline: float) -> tuple[str, int]:
        """Have nothing served any more that matches. Returns the lineage, and the invalidation's durable number in it.

        Args:
            reason: for people; at most 512 characters.
            idempotency: of at most 128 characters. Asked once more with the same, there is still but one invalidation.
        """
        lineage = self._present_lineage()
        call: Call[Invalidated] = Call(1)
        ask = functools.partial(self._link.exchange.invalidate, call, selector, reason, idempotency, lineage)
        return lineage, self._ask_or_forget(call, ask, deadline)[0].number

    def follow(self, lineage: str, number: int, *, wait_s: float, deadline: float) -> Progress:
        """How far an invalidation is: once it is complete, or after `wait_s`."""
        call: Call[Progress] = Call(1)
        ask = functools.partial(self._link.exchange.follow, call, number, int(wait_s * 1000), lineage)
        return self._ask_or_forget(call, ask, deadline)[0]

    def pin(self, subject: PinSubject, *, ttl_ms: int, reason: str, deadline: float) -> tuple[str, PinAnswer]:
        """Have what matches kept for a time. Returns the lineage, and what is pinned; it may be asked again.

        The caller sees to it that it fits into a message.
        """
        lineage = self._present_lineage()
        call: Call[PinAnswer] = Call(1)
        ask = functools.partial(self._link.exchange.pin, call, subject, ttl_ms, reason, lineage)
        return lineage, self._ask_or_forget(call, ask, deadline)[0]

    def unpin(self, ids: Sequence[int], subject: PinSubject, *, lineage: str, deadline: float) -> PinAnswer:
        """End pins by their ids, in a lineage, and by exactly what they are for. An empty lineage: the present one."""
        call: Call[PinAnswer] = Call(1)
        ask = functools.partial(self._link.exchange.unpin, call, list(ids), subject, lineage or self._present_lineage())
        return self._ask_or_forget(call, ask, deadline)[0]

    def on_outdated(self, listener: Callable[[Sequence[Selector] | None], object]) -> None:
        """Have a function called whenever something is not what it was: what matches these, or everything.

        It is called on the channel's thread, before the controller hears of it, so it must be quick, and never raise.
        What it keeps alive lives as long as the channel.
        """
        self._link.listeners += (listener,)

    def abort(self, tokens: Sequence[int], reason: AbortReason) -> None:
        """Give up claims. Does not wait; tokens that are no live claims of this session are ignored."""
        self._tell(functools.partial(self._link.exchange.abort, list(tokens), reason))

    def report(self, entries: Sequence[tuple[EmbeddingKey, int]]) -> None:
        """Tell of entries that the directory promised, with the promise's revision, and that cannot be read.

        Does not wait, and is dropped when too much is under way.
        """
        if self._link.backlog < MAX_REQUESTS:
            self._tell(functools.partial(self._link.exchange.report, missing_batches(entries)))

    def abandon(self, entries: Sequence[AbandonEntry], *, lineage: str) -> None:
        """Tell of names in the store that are of no use, for their keys to be named anew; ends the claims on them.

        Does not wait. The controller bounds how many it invalidates for this, and one of another `lineage` none.
        """
        self._tell(functools.partial(self._link.exchange.abandon, abandoned_batches(entries), lineage))

    def _present_lineage(self) -> str:
        """Without a session there is none, and the call fails."""
        view = self.fresh()
        return view.lineage if view is not None else ""

    def _ask(self, call: Call[_Result], command: Callable[[], None], deadline: float) -> list[_Result]:
        self._check()
        if not self._link.running:
            raise LifecycleError("the control channel is not running: before its start, or after its close")
        began = time.monotonic()
        if began >= deadline:
            raise DeadlineExceeded("the deadline had passed before the controller was asked")
        if self._link.in_doubt:
            raise ControllerUnavailable(f"{self._address} did not answer in time, and nothing was heard of it since")
        if not self._link.connected or self._link.fresh_view() is None:
            raise ControllerUnavailable(f"no fresh session with {self._address}: {self._link.trouble}")
        if self._link.backlog >= MAX_REQUESTS:
            raise ControllerUnavailable("overloaded: too many calls wait for the control channel")
        if not self._link.submit(command):
            raise ControllerUnavailable("the control channel was closed meanwhile")
        try:
            return call.wait(deadline)
        except DeadlineExceeded:
            self._link.doubt(began)
            raise

    def _ask_or_forget(self, call: Call[_Result], command: Callable[[], None], deadline: float) -> list[_Result]:
        try:
            return self._ask(call, command, deadline)
        except BaseException:  # the table of requests must not keep what nobody waits for
            self._tell(functools.partial(self._link.exchange.forget, call))
            raise

    def _leave(self, acquisition: Acquisition) -> None:
        self._link.submit(functools.partial(self._link.exchange.leave, acquisition))

    def _tell(self, command: Callable[[], Any]) -> None:
        """Hand over what has no answer. Without a running thread there is no session, and so nothing to end."""
        self._check()
        self._link.submit(command)

    def _check(self) -> None:
        if self._process != _process:
            raise LifecycleError("this control channel belongs to the parent process; make another after fork")


def _stop(link: Link, process: int) -> None:
    if process == os.getpid():
        link.stop(CLOSE_PATIENCE_S)
