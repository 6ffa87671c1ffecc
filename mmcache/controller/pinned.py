"""Which entries are kept for pins: at most a share of the store's capacity. A state machine, without I/O.

The eviction policy never chooses them, and the reaper renews their leases, so that the store's own eviction takes
others first. An entry is kept from when the directory knows it, or from when a sweep comes to it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from mmcache.controller.claims import Claims
from mmcache.controller.directory import Directory, Entry
from mmcache.controller.pins import Pins
from mmcache.controller.renewals import Renewals
from mmcache.key import DIGEST_BYTES, Scope
from mmcache.store.base import Outcome

RENEWED_AFTER: Final = 3 / 8
"""Of a lease: then it is to be renewed, for which there is another eighth."""


class Due(NamedTuple):
    """An entry whose lease is to be renewed: its name in the directory, its generation, and the revision it has."""

    name: bytes
    generation: int
    revision: int


class PinnedEntries:
    """The entries of one directory that are kept. It watches that directory, which tells it what comes and goes.

    Args:
        scopes: by their digests; a name begins with one.
        claims: what is being computed, which is not known to be lost.
        generation_of: the generation of a name that counts.
        share: of the capacity, 0 to 1.
        most: entries that are kept.
        lease_s: the store's. Each is renewed before half of it is over.
        counts: where to count what was left out or lost.
    """

    def __init__(
        self,
        pins: Pins,
        directory: Directory,
        scopes: Mapping[bytes, Scope],
        *,
        claims: Claims,
        generation_of: Callable[[bytes], int],
        share: float,
        most: int,
        lease_s: float,
        counts: Counter[str],
    ) -> None:
        self._pins = pins
        self._directory = directory
        self._scopes = scopes
        self._claims = claims
        self._generation_of = generation_of
        self.share = share
        self.most = most
        self._counts = counts
        self._nbytes_of: dict[bytes, int] = {}
        """The object's size by name, in the order in which they were pinned."""
        self.nbytes = 0
        """Of all that is pinned."""
        self.capacity_bytes: int | None = None
        """The store's, see `set_capacity`."""
        self.renewals = Renewals(lease_s * RENEWED_AFTER)
        self.on_change: Callable[[bytes, bool], object] | None = None
        """Called with a name, and whether it is pinned from now on."""
        self._swept_version = pins.version
        self._to_sweep: Iterator[bytes] | None = None
        directory.watchers.append(self)

    def __len__(self) -> int:
        return len(self._nbytes_of)

    @property
    def most_bytes(self) -> int | None:
        """How much may be pinned; None: that is not known yet."""
        return None if self.capacity_bytes is None else int(self.capacity_bytes * self.share)

    def is_pinned(self, name: bytes) -> bool:
        """Whether the entry of this name is kept."""
        return name in self._nbytes_of

    def set_capacity(self, nbytes: int | None) -> None:
        """The store's capacity is so large; None: nobody knows. What is pinned follows, a sweep later."""
        if nbytes != self.capacity_bytes:
            self.capacity_bytes = nbytes
            self._swept_version = -1

    # What the directory tells

    def entered(self, name: bytes, entry: Entry) -> None:
        """There is a new entry."""
        if len(self._pins) and self._pins.covers(self._scopes[name[:DIGEST_BYTES]], name[DIGEST_BYTES:]):
            self._keep(name, entry.hit.nbytes)

    def left(self, name: bytes, _entry: Entry) -> None:
        """There is none under this name any more."""
        self._let_go(name)

    # What was pinned before a change

    @property
    def sweeping(self) -> bool:
        """Whether there may be entries that are kept and should not be, or the other way round."""
        return self._to_sweep is not None or self._swept_version != self._pins.version

    def sweep(self, most: int) -> None:
        """Look at so many entries, and keep or let go each of them."""
        if self._to_sweep is None:
            if self._swept_version == self._pins.version:
                return
            self._swept_version = self._pins.version
            if not len(self._pins) and not self._nbytes_of:
                return
            self._to_sweep = self._directory.names()
        most -= self._fall_below(most)
        looked_at = 0
        for name in itertools.islice(self._to_sweep, max(1, most)):
            looked_at += 1
            entry = self._directory.entry(name)
            if entry is None:
                continue
            if not self._pins.covers(self._scopes[name[:DIGEST_BYTES]], name[DIGEST_BYTES:]):
                self._let_go(name)
            elif name not in self._nbytes_of:
                self._keep(name, entry.hit.nbytes)
        if looked_at < most:
            self._to_sweep = None

    # Leases

    def take_due(self, now: float, most: int) -> list[Due]:
        """Entries whose leases are to be renewed now, up to `most`. `renewed` or `not_renewed` follows."""
        due: list[Due] = []
        for name in self.renewals.take(now, most):
            entry = self._directory.entry(name)
            if entry is not None and entry.hit.generation == self._generation_of(name):  # else it is on its way out
                due.append(Due(name, entry.hit.generation, entry.hit.revision))
        return due

    def renewed(self, due: Sequence[Due], outcomes: Sequence[Outcome]) -> bool:
        """What became of them, in their order: OK, NOT_FOUND, or why nobody knows. False: of some, nobody does.

        What the store lost is forgotten, unless something was heard of it since it was taken. Raises ValueError for
        another number of outcomes.
        """
        if len(due) != len(outcomes):
            raise ValueError(f"outcomes: {len(outcomes)} for {len(due)}")
        unknown: list[Due] = []
        for one, outcome in zip(due, outcomes, strict=True):
            if outcome is Outcome.OK:
                self._counts["pin.renewed"] += 1
            elif outcome is not Outcome.NOT_FOUND:
                unknown.append(one)
            elif self._claims.token_of(one.name) is None and self._directory.drop(one.name, one.revision):
                self._counts["pin.lost"] += 1
        self.not_renewed(unknown)
        return not unknown

    def not_renewed(self, due: Sequence[Due]) -> None:
        """Nobody knows what became of them: they are due again at once."""
        self._counts["pin.not_renewed"] += len(due)
        self.renewals.failed(one.name for one in due)

    def _keep(self, name: bytes, nbytes: int) -> None:
        """Unless there is no room for it."""
        most_bytes = self.most_bytes
        if most_bytes is None or self.nbytes + nbytes > most_bytes or len(self._nbytes_of) >= self.most:
            self._counts["pin.no_room"] += 1
            return
        self._nbytes_of[name] = nbytes
        self.nbytes += nbytes
        self.renewals.add(name)
        self._tell(name, pinned=True)

    def _let_go(self, name: bytes) -> None:
        nbytes = self._nbytes_of.pop(name, None)
        if nbytes is not None:
            self.nbytes -= nbytes
            self.renewals.discard(name)
            self._tell(name, pinned=False)

    def _fall_below(self, most: int) -> int:
        """Let go what was pinned last where the share has become smaller; returns how many that were."""
        most_bytes = self.most_bytes
        count = 0
        while most_bytes is not None and self.nbytes > most_bytes and count < most:
            self._let_go(next(reversed(self._nbytes_of)))
            count += 1
        return count

    def _tell(self, name: bytes, *, pinned: bool) -> None:
        if self.on_change is not None:
            self.on_change(name, pinned)
