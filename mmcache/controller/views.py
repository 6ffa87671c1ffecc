"""What an operator may see of a core: sessions, entries and what is known of keys. Nothing here changes anything.

A call looks at a bounded number of things and says where to go on, so that no question stops the controller for long.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from mmcache.control.messages import Hit
from mmcache.controller.accounts import Account, Accounts
from mmcache.controller.directory import Directory, Entry
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.sessions import Session, Sessions
from mmcache.controller.shelves import SHELVES, place, shelf_of
from mmcache.key import DIGEST_BYTES, EmbeddingKey, Scope, mm_digest
from mmcache.selector import Selector

MOST_LOOKED_AT: Final = 1_000
"""Entries that one call looks at, and a shelf more: a millisecond or two."""
START: Final = bytes(2)
"""The place before all entries."""


class SessionView(NamedTuple):
    """One session. Times are seconds on the core's clock.

    Args:
        live: False for one that has ended, and whose client may not know yet.
        acknowledged: the last invalidation that it said it heeds.
        settled: the last one against which it serves nothing.
        heard: when a heartbeat of it was answered last.
        trusted_until: when its client cannot trust it any more, if it is never heard of again.
    """

    number: int
    name: str
    host: str
    pid: int
    live: bool
    serves_stale: bool
    acknowledged: int
    settled: int
    heard: float
    trusted_until: float


class EntryView(NamedTuple):
    """One entry. `created` is in seconds on the core's clock, `info` as its publisher gave it."""

    key: EmbeddingKey
    generation: int
    nbytes: int
    cost_ms: float
    producer: str
    created: float
    info: bytes
    uses: int


class Wanted(NamedTuple):
    """Which entries: those that match all that is given. Times are seconds on the core's clock, both included."""

    selector: Selector = Selector()
    producer: str | None = None
    created_from: float | None = None
    created_until: float | None = None


class EntryPage(NamedTuple):
    """Some entries, and the place after which the next ones come; None: there are none."""

    entries: list[EntryView]
    after: bytes | None


class AccountsView(NamedTuple):
    """All accounts, as they were at one moment."""

    total: Account
    missed: int
    by_tenant: dict[str, Account]
    by_model: dict[str, Account]


class Views:
    """Of the parts of one core, by its own thread."""

    def __init__(
        self,
        sessions: Sessions,
        directory: Directory,
        invalidations: Invalidations,
        scopes: Mapping[bytes, Scope],
        accounts: Accounts,
        *,
        term: int,
        lineage: str,
    ) -> None:
        self._sessions = sessions
        self._directory = directory
        self._invalidations = invalidations
        self._scopes = scopes
        self._accounts = accounts
        self.term = term
        self.lineage = lineage

    @property
    def head(self) -> int:
        """The number of the last invalidation."""
        return self._invalidations.head

    def awaited(self, numbers: Iterable[int]) -> dict[int, int]:
        """For how many sessions each of these invalidations waits that are not complete."""
        pending = self._invalidations.pending
        return {number: pending[number] for number in numbers if number in pending}

    def sessions(self, after: int, limit: int) -> list[SessionView]:
        """Up to `limit`, in the order of their numbers, which are random, and above `after`."""
        later = (session for session in self._sessions.all() if session.number > after)
        chosen = heapq.nsmallest(limit, later, key=lambda session: session.number)
        return [self._session(session) for session in chosen]

    def lookup(self, keys: Sequence[EmbeddingKey]) -> list[EntryView | None]:
        """What is known of each key at its generation now."""
        return [self._current(key.scope.digest + key.mm_digest) for key in keys]

    def entry(self, name: bytes, generation: int) -> EntryView | None:
        """The entry of this name and generation, if that is its generation now."""
        known = self._current(name)
        return known if known is not None and known.generation == generation else None

    def entries(self, wanted: Wanted, after: bytes, limit: int) -> EntryPage:
        """The next entries that are wanted, in the order of their places, up to `limit`, 0 or more."""
        found: list[EntryView] = []
        for name, entry, then in self._look(wanted, after):
            if entry is None:
                return EntryPage(found, then)
            found.append(self._view(name, entry))
            if len(found) >= limit:
                return EntryPage(found, then)
        return EntryPage(found, None)

    def hottest(self, wanted: Wanted, after: bytes, limit: int, above: int) -> EntryPage:
        """Of the next entries that are wanted, the up to `limit` that were used most, and more often than `above`.

        In the order of their uses, and of their places where those are the same.
        """
        more: bytes | None = None
        found: list[tuple[bytes, Entry]] = []
        for name, entry, then in self._look(wanted, after):
            if entry is None:
                more = then
            elif entry.uses > above:
                found.append((name, entry))
        chosen = heapq.nlargest(limit, found, key=lambda one: one[1].uses)
        return EntryPage([self._view(name, entry) for name, entry in chosen], more)

    def accounts(self) -> AccountsView:
        """What is held and was saved, in all, by tenant and by model."""
        accounts = self._accounts
        return AccountsView(
            copy.copy(accounts.total),
            accounts.missed,
            {name: copy.copy(row) for name, row in accounts.by_tenant.items()},
            {name: copy.copy(row) for name, row in accounts.by_model.items()},
        )

    def count(self, wanted: Wanted, after: bytes) -> tuple[int, bytes | None]:
        """How many of the next entries are wanted, and the place after which it has not looked yet."""
        count = 0
        for _, entry, then in self._look(wanted, after):
            if entry is None:
                return count, then
            count += 1
        return count, None

    def _look(self, wanted: Wanted, after: bytes) -> Iterator[tuple[bytes, Entry | None, bytes]]:
        """Entries that are wanted, each with its place; last, where it has looked at enough, a place alone."""
        fields = wanted.selector.fields()
        mm_hash = fields.pop("mm_hash", None)
        last = SHELVES - 1
        if mm_hash is not None:
            digest = mm_digest(mm_hash)
            after = max(after, digest)
            last = shelf_of(digest)
        matching: dict[bytes, Scope | None] = {}
        looked_at = 0
        for number in range(shelf_of(after), last + 1):
            for name, entry in self._directory.shelf(number):
                if (here := place(name)) <= after:
                    continue
                looked_at += 1
                digest = name[:DIGEST_BYTES]
                if digest not in matching:
                    scope = self._scopes[digest]
                    matches = all(getattr(scope, field) == value for field, value in fields.items())
                    matching[digest] = scope if matches else None
                if (known := matching[digest]) is not None and self._is_wanted(wanted, mm_hash, known, name, entry):
                    yield name, entry, here
            looked_at += 1
            if looked_at >= MOST_LOOKED_AT and number < last:
                yield b"", None, (number + 1 << 4).to_bytes(2, "big")
                return

    def _is_wanted(self, wanted: Wanted, mm_hash: str | None, scope: Scope, name: bytes, entry: Entry) -> bool:
        return (
            (mm_hash is None or entry.mm_hash == mm_hash)
            and (wanted.producer is None or entry.producer == wanted.producer)
            and (wanted.created_from is None or entry.created >= wanted.created_from)
            and (wanted.created_until is None or entry.created <= wanted.created_until)
            and self._is_current(scope, name, entry.hit)
        )

    def _is_current(self, scope: Scope, name: bytes, hit: Hit) -> bool:
        return hit.generation == self._invalidations.table.generation(scope, name[DIGEST_BYTES:])

    def _current(self, name: bytes) -> EntryView | None:
        entry = self._directory.entry(name)
        if entry is None or not self._is_current(self._scopes[name[:DIGEST_BYTES]], name, entry.hit):
            return None
        return self._view(name, entry)

    def _view(self, name: bytes, entry: Entry) -> EntryView:
        scope = self._scopes[name[:DIGEST_BYTES]]
        key = EmbeddingKey(
            model=scope.model,
            version=scope.version,
            mm_hash=entry.mm_hash,
            lora=scope.lora,
            modality=scope.modality,
            tenant=scope.tenant,
        )
        hit = entry.hit
        return EntryView(
            key, hit.generation, hit.nbytes, entry.cost_ms, entry.producer, entry.created, hit.info, entry.uses
        )

    def _session(self, session: Session) -> SessionView:
        settled = session.settled
        heard = session.answers[-1][1] if session.answers else 0.0
        return SessionView(
            session.number,
            session.name,
            session.host,
            session.pid,
            self._sessions.find(session.number) is session,
            session.serves_stale,
            session.acknowledged,
            settled,
            heard,
            self._sessions.trusted_until(session),
        )
