"""S5, from the messages alone: within a term, no claim on a name is granted while another is alive."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mmcache.control.messages import (
    Abort,
    Acquire,
    Acquired,
    ClientMessage,
    Commit,
    CommitStatus,
    Committed,
    ControllerMessage,
    Granted,
    Hello,
    Renew,
    Renewed,
    Resolved,
)
from mmcache.key import mm_digest

if TYPE_CHECKING:
    from mmcache.controller.core import ControllerCore

    from .checker import Checker


class _Live(NamedTuple):
    token: int
    session: int
    generation: int
    due: float


class ClaimsWatch:
    """What one term has granted, and what has ended it.

    A claim is alive until its time is over since it was granted or renewed, it was given up or committed, its
    generation or its session is over. Of sessions it asks the core.
    """

    def __init__(self, core: ControllerCore) -> None:
        self._core = core
        self._claim_s = core.limits.claim_ms / 1000
        self._live: dict[bytes, _Live] = {}
        self._ended: set[int] = set()
        self._acquires: dict[tuple[int, int], list[bytes]] = {}
        self._commits: dict[tuple[int, int], list[bytes]] = {}
        self._renewals: dict[tuple[int, int], list[int]] = {}

    def received(self, peer: bytes, message: ClientMessage) -> None:
        """The core is about to read this."""
        session = self._core._sessions.at(peer)
        if session is None or isinstance(message, Hello) or message.session != session.number:
            return
        match message:
            case Acquire():
                names = [group.scope.digest + digest for group in message.groups for digest in group.digests]
                self._acquires[message.session, message.request] = names
            case Commit():
                entries = [(group.scope.digest, entry) for group in message.groups for entry in group.entries]
                self._commits[message.session, message.request] = [
                    scope + mm_digest(entry.mm_hash) for scope, entry in entries
                ]
                self._ended.update(entry.token for _, entry in entries)
            case Abort():
                self._ended.update(message.tokens)
            case Renew():
                self._renewals[message.session, message.request] = list(message.tokens)

    def sent(self, message: ControllerMessage, now: float, checker: Checker) -> None:
        """This is what the core made of it."""
        match message:
            case Acquired():
                for name, result in zip(self._acquires[message.session, message.request], message.results, strict=True):
                    if isinstance(result, Granted):
                        self._granted(name, message.session, result, now, checker)
            case Resolved():
                names = self._acquires[message.session, message.request]
                for position, result in message.results:
                    if isinstance(result, Granted):
                        self._granted(names[position], message.session, result, now, checker)
            case Committed():
                for name, status in zip(self._commits[message.session, message.request], message.results, strict=True):
                    if status in (CommitStatus.STORED, CommitStatus.DUPLICATE):
                        self._live.pop(name, None)
            case Renewed():
                renewed = set(self._renewals[message.session, message.request]) - set(message.lost)
                for name, live in self._live.items():
                    if live.token in renewed:
                        self._live[name] = live._replace(due=now + self._claim_s)

    def _granted(self, name: bytes, session: int, granted: Granted, now: float, checker: Checker) -> None:
        before = self._live.get(name)
        if (
            before is not None
            and before.token != granted.token
            and before.token not in self._ended
            and before.generation == granted.generation
            and now < before.due
            and self._core._sessions.find(before.session) is not None
        ):
            checker.fail(f"S5: claims {before.token} and {granted.token} on one name are alive at once")
        due = now + granted.claim_ms / 1000
        self._live[name] = _Live(granted.token, session, granted.generation, due)
