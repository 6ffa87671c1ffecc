"""What must hold of evictions, within a term.

E1  Nothing is removed from the store that was committed after its removal was decided: after it was chosen, and the
    choice was not taken back.
E2  What was asked for after it was chosen is not sent for removal, and what was sent is not told of as being there.
E3  The directory learns of nothing that a removal has just taken.
E4  What is pinned is not sent for removal. (A removal whose outcome is not known is sent again whatever comes.)
E5  Nobody waits for a removal for longer than it may take.
E6  What the store did not remove for a reader's lease is not forgotten for that.

It hears what the core is told and makes of it, and asks it what is chosen, out and reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from mmcache.control.messages import (
    Acquire,
    Acquired,
    ClientMessage,
    Commit,
    CommitStatus,
    Committed,
    Found,
    Hit,
    Lookup,
)
from mmcache.controller.capacity import evictions
from mmcache.controller.core import Effects
from mmcache.key import mm_digest, store_name_of
from mmcache.store.base import Outcome

if TYPE_CHECKING:
    from mmcache.controller.core import ControllerCore

    from .checker import Checker
    from .store import Store

_BELIEVED = (CommitStatus.STORED, CommitStatus.DUPLICATE)
_UNKNOWN = (Outcome.UNAVAILABLE, Outcome.TIMED_OUT)
_Named = tuple[bytes, int]
"""A name of the directory, and a generation."""


class RemovalsWatch:
    """One term's removals of what is not outdated."""

    def __init__(self, core: ControllerCore, store: Store, checker: Checker) -> None:
        self._core = core
        self._store = store
        self._checker = checker
        self._decided: dict[_Named, bool] = {}
        """All that are chosen or sent, and whether somebody has asked for it, or committed it, since."""
        self._sent: dict[str, _Named] = {}
        """By names of the store: those whose outcome is not known."""
        self._sent_at = 0.0

    # What the loop does

    def handled(self, message: ClientMessage, effects: Effects, now: float) -> None:
        """The core has made this of a message."""
        for _, answer in effects:
            match message, answer:
                case Acquire() | Lookup(), Acquired() | Found() if answer.request == message.request:
                    names = [group.scope.digest + digest for group in message.groups for digest in group.digests]
                    for name, result in zip(names, answer.results, strict=True):
                        if isinstance(result, Hit):
                            self._told((name, result.generation))
                case Commit(), Committed() if answer.request == message.request:
                    entries = [(group.scope.digest, entry) for group in message.groups for entry in group.entries]
                    for (scope, entry), status in zip(entries, answer.results, strict=True):
                        if status in _BELIEVED:
                            self.learned(scope + mm_digest(entry.mm_hash), entry.generation, now)
        self._look()

    def learned(self, name: bytes, generation: int, now: float) -> None:
        """The directory takes this entry for readable."""
        named = name, generation
        if named in self._decided:
            self._decided[named] = True
        stored = self._stored(named)
        removed = self._store.removed.get(stored)
        if removed is not None and removed.term == self._core.term and now < removed.at + evictions.DOUBTED_S:
            self._checker.fail(f"E3: {stored} is believed to be there at {now:.4f}, and was removed: {removed}")

    def ticked(self, now: float) -> None:
        """The core has seen to what is due, and what it was asked to do."""
        self._look()
        for claim in self._core._entries.claims._by_name.values():
            if claim.party.session == 0 and not (
                (claim.name, claim.generation) in self._sent.values() and now < self._sent_at + evictions.WAIT_S
            ):
                self._checker.fail(
                    f"E5: somebody waits for a removal at {now:.4f}, and the last began {self._sent_at:.4f}"
                )

    # What the reaper does

    def sent(self, names: Sequence[str], now: float) -> None:
        """The core gives these to be removed, besides what is outdated."""
        self._look()
        self._sent_at = now
        for name, named in zip(names, self._out(), strict=True):
            if name in self._sent:
                continue
            if self._decided.get(named):
                self._checker.fail(f"E2: {name} is sent for removal, and was asked for after it was chosen")
            if self._core.pinning.pinned.is_pinned(named[0]):
                self._checker.fail(f"E4: {name} is sent for removal, and it is pinned")
            self._decided[named] = False
            self._sent[name] = named

    def landed(self, name: str) -> None:
        """The store has removed it."""
        named = self._sent.get(name)
        if named is not None and self._decided[named]:
            self._checker.fail(f"E1: {name} is removed, and was committed after that was decided")

    def done(self, names: Sequence[str], outcomes: Sequence[Outcome], removed: Callable[[], object]) -> None:
        """The core is about to hear what became of them, by `removed`."""
        directory = self._core._entries.directory
        refused = {self._sent[name][0] for name, one in zip(names, outcomes, strict=True) if one is Outcome.LEASED}
        known = {name for name in refused if directory.entry(name) is not None}
        removed()
        if any(directory.entry(name) is None for name in known):
            self._checker.fail("E6: a removal was refused, and the entry is taken for gone")
        for name, outcome in zip(names, outcomes, strict=True):
            if outcome not in _UNKNOWN:
                self._decided.pop(self._sent.pop(name), None)
        self._look()

    def _told(self, named: _Named) -> None:
        if self._stored(named) in self._sent:
            self._checker.fail(f"E2: {self._stored(named)} is told of as being there, and its removal is under way")
        if named in self._decided:
            self._decided[named] = True

    def _look(self) -> None:
        """Know what is chosen by now, and what is neither chosen nor out any more."""
        leaving = self._core.room.evictions
        if not len(leaving) and not self._decided:
            return
        chosen = {(name, one.generation) for name, one in leaving._chosen.items()}
        sent = {(name, one.generation) for name, one in (leaving._out | leaving._unsure).items()}
        self._sent = {name: named for name, named in self._sent.items() if named in sent}
        for named in [named for named in self._decided if named not in chosen and named not in sent]:
            del self._decided[named]
        for named in chosen:
            self._decided.setdefault(named, False)

    def _out(self) -> Iterator[_Named]:
        return ((name, leaving.generation) for name, leaving in self._core.room.evictions._out.items())

    def _stored(self, named: _Named) -> str:
        return store_name_of(named[0], lineage=self._core.lineage, generation=named[1])
