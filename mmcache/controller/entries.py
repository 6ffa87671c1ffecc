"""What sessions ask and tell of entries: acquire, commit, look up, report and abandon. A part of the core, without I/O.

The directory, the claims and the scopes are its own; generations are those of the invalidations. Methods that end waits
return them as wakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from mmcache.control.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    Abandon,
    AbandonReason,
    Abort,
    AbortReason,
    Acquire,
    Acquired,
    Commit,
    Commitment,
    CommitStatus,
    Committed,
    ControllerMessage,
    Found,
    Hit,
    KeyGroup,
    Lookup,
    Renew,
    Renewed,
    Report,
    Unclaimed,
    Used,
)
from mmcache.controller.abandonments import Abandonments, abandonment
from mmcache.controller.accounts import Accounts, credible_ms
from mmcache.controller.announcements import Announcements
from mmcache.controller.answers import RESULT_BYTES, SURE_TO_FIT, count_results, cut, refused
from mmcache.controller.capacity.evictions import Fate
from mmcache.controller.capacity.room import Room
from mmcache.controller.claims import ASK_AGAIN, OVERLOADED, REMOVING, Claims, Wake
from mmcache.controller.directory import Directory
from mmcache.controller.invalidations import Invalidations
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.removals import Removals
from mmcache.controller.sessions import Session
from mmcache.key import DIGEST_BYTES, Scope, mm_digest

MOST_USES: Final = (1 << 63) - 1
"""An entry's uses are counted no further."""
_TOO_MANY_SCOPES: Final = "there are as many scopes as this controller allows"


class Entries:
    """All of one term's.

    Args:
        limits: times and bounds.
        term: the controller's.
        scopes: those that are durable.
        invalidations: what says which generation of a key counts.
        announcements: has names invalidated that are abandoned.
        removals: told of all that nobody reads any more.
        counts: where to count what becomes of it.
    """

    def __init__(
        self,
        limits: ControllerLimits,
        *,
        term: int,
        scopes: Iterable[Scope],
        invalidations: Invalidations,
        announcements: Announcements,
        removals: Removals,
        counts: Counter[str],
    ) -> None:
        self._limits = limits
        self._term = term
        self._invalidations = invalidations
        self._announcements = announcements
        self._removals = removals
        self._counts = counts
        self.scopes = {scope.digest: scope for scope in scopes}
        """By their digests; a key's name begins with one."""
        self._new_scopes: list[Scope] = []
        self.asked_in_vain: dict[bytes, int] | None = None
        """Names that were looked up and are not known, with their generations, while the directory is read back."""
        self.accounts = Accounts(self.scopes)
        self.directory = Directory(max_entries=limits.max_entries, removals=removals)
        self.directory.watchers.append(self.accounts)
        self.claims = Claims(
            claim_ms=limits.claim_ms,
            hold_ms=limits.hold_ms,
            max_claims=limits.max_claims,
            max_holds=limits.max_holds,
            max_waiters=limits.max_waiters,
            max_waiters_per_session=limits.max_waiters_per_session,
        )
        self.room = Room(limits.capacity, self.directory, self.scopes, lease_ms=limits.lease_ms, counts=counts)
        self._abandonments = Abandonments(at_once=limits.max_abandonments, every_ms=limits.abandonment_ms)

    # What sessions say

    def acquire(self, session: Session, acquire: Acquire, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        """Answer for each key: a hit, a claim, or that it waits."""
        names, generations = self._names(acquire.groups)
        if len(names) > MAX_BATCH:
            return refused(self._counts, acquire.request, "batch", f"more than {MAX_BATCH} keys"), ()
        if not self._remember(group.scope for group in acquire.groups):
            return refused(self._counts, acquire.request, "scopes", _TOO_MANY_SCOPES), ()
        known: Sequence[Hit | Unclaimed | None] = self.directory.find(names, generations)
        if self._abandonments:  # their keys are about to have other names
            known = [ASK_AGAIN if name in self._abandonments else hit for name, hit in zip(names, known, strict=True)]
        if self.room.evictions.busy:
            known = [self._despite_removal(*one, now) for one in zip(names, known, generations, strict=True)]
        results = self.claims.acquire(
            names,
            known,
            generations,
            session.number,
            acquire.request,
            wait_until=now + acquire.wait_ms / 1000,
            now=now,
        )
        count_results(self._counts, "acquire", results)
        follows = cut(results, session.number, acquire.request) if len(results) > SURE_TO_FIT else ()
        return Acquired(self._term, session.number, acquire.request, results), follows

    def commit(self, session: Session, commit: Commit, now: float) -> tuple[ControllerMessage, Sequence[Wake]]:
        """Enter what was published; whoever waits for it hears of it."""
        if sum(len(group.entries) for group in commit.groups) > MAX_BATCH:
            return refused(self._counts, commit.request, "batch", f"more than {MAX_BATCH} entries"), ()
        if not self._remember(group.scope for group in commit.groups):
            return refused(self._counts, commit.request, "scopes", _TOO_MANY_SCOPES), ()
        table = self._invalidations.table
        results: list[CommitStatus] = []
        wakes: list[Wake] = []
        for group in commit.groups:
            scope = group.scope.digest
            for entry in group.entries:
                digest = mm_digest(entry.mm_hash)
                name = scope + digest
                generation = table.generation(group.scope, digest)
                hit: Hit | None = None
                if entry.generation == generation and (
                    not self.room.has_room_for(entry.nbytes) or self._may_be_gone(session, name, entry, now)
                ):
                    status = CommitStatus.REFUSED
                elif entry.generation == generation:
                    hit, new = self.directory.enter(name, entry, session.name, now)
                    if new:
                        self.accounts.published(scope, entry.nbytes, credible_ms(entry.cost_ms))
                    found = CommitStatus.STORED if new else CommitStatus.DUPLICATE
                    status = CommitStatus.REFUSED if hit is None else found
                elif entry.generation < generation:
                    status = CommitStatus.OUTDATED
                    self._removals.add(name, entry.generation)
                else:
                    status = CommitStatus.REFUSED
                results.append(status)
                if hit is not None:
                    wakes += self.claims.committed(name, hit)
                elif self.claims.token_of(name) == entry.token:
                    full = entry.generation == generation
                    reason = AbortReason.NO_ROOM if full else AbortReason.FAILED
                    wakes += self.claims.give_up(session.number, entry.token, reason, now) or ()
        stored = results.count(CommitStatus.STORED)
        self._count("commit.stored", stored)
        if stored < len(results):
            for status in (CommitStatus.DUPLICATE, CommitStatus.OUTDATED, CommitStatus.REFUSED):
                self._count(f"commit.{status.name.lower()}", results.count(status))
        return Committed(self._term, session.number, commit.request, results), wakes

    def renew(self, session: Session, renew: Renew, now: float) -> ControllerMessage:
        """Prolong claims; the answer names those that are lost."""
        lost = self.claims.renew(session.number, renew.tokens, now)
        self._count("claim.renewed", len(renew.tokens) - len(lost))
        self._count("claim.lost", len(lost))
        return Renewed(self._term, session.number, renew.request, self._limits.claim_ms, lost)

    def abort(self, session: Session, abort: Abort, now: float) -> list[Wake]:
        """Give claims up."""
        wakes: list[Wake] = []
        for token in abort.tokens:
            woken = self.claims.give_up(session.number, token, abort.reason, now)
            self._counts["abort.stale" if woken is None else f"abort.{abort.reason.name.lower()}"] += 1
            wakes += woken or ()
        return wakes

    def report(self, report: Report) -> None:
        """Forget what a reader did not find."""
        for missing in report.entries:
            dropped = self.directory.drop(missing.scope.digest + missing.digest, missing.revision)
            self._counts["missing.dropped" if dropped else "missing.stale"] += 1

    def used(self, used: Used) -> None:
        """Clients read these. What is known of them says what that spared; of what is not known nothing is."""
        self.accounts.missed += used.missed
        table = self._invalidations.table
        unknown = 0
        for group in used.groups:
            scope = self.scopes.get(group.scope)
            hits = nbytes = 0
            saved_ms = 0.0
            for digest, count in zip(group.digests, group.counts, strict=True):
                name = group.scope + digest
                entry = self.directory.entry(name) if scope is not None else None
                if scope is None or entry is None or entry.hit.generation != table.generation(scope, digest):
                    unknown += count
                    continue
                entry.uses = min(entry.uses + count, MOST_USES)
                self.room.accessed(name, count)
                hits += count
                nbytes += count * entry.hit.nbytes
                saved_ms += count * credible_ms(entry.cost_ms)
            if hits:
                self.accounts.used(group.scope, hits, nbytes, saved_ms)
        self._count("used.unknown", unknown)

    def abandon(self, session: Session, abandon: Abandon, now: float) -> list[Wake]:
        """Have names invalidated that are of no use. The claims on them end then, and whoever waits asks again.

        An entry that no reader can verify, since the readers are broken, comes back here under each new name. So there
        is a bound: beyond it dead writers' names are held for their time, and corrupt ones stay as they are.
        """
        wakes: list[Wake] = []
        for entry in abandon.entries:
            digest = mm_digest(entry.mm_hash)
            name = entry.scope.digest + digest
            held = entry.reason is AbandonReason.HELD
            claim = (session.number, entry.token) if held else None
            if entry.generation != self._invalidations.table.generation(entry.scope, digest) or (
                held and not self.claims.has(session.number, entry.token, name)
            ):
                self._counts["abandon.stale"] += 1
            elif name in self._abandonments:
                self._counts["abandon.repeated"] += 1
                self._abandonments.add(name, claim)
            elif self._abandonments.may(now) and self._announcements.make(abandonment(entry, session.name)):
                self._counts[f"abandon.{entry.reason.name.lower()}"] += 1
                self._abandonments.add(name, claim)
            else:
                self._counts["abandon.refused"] += 1
                if held:
                    wakes += self.claims.give_up(session.number, entry.token, AbortReason.HELD, now) or ()
        return wakes

    def lookup(self, session: Session, lookup: Lookup, now: float) -> ControllerMessage:
        """What is known of keys, without claims."""
        names, generations = self._names(lookup.groups)
        if len(names) > MAX_BATCH:
            return refused(self._counts, lookup.request, "batch", f"more than {MAX_BATCH} keys")
        found = self.directory.find(names, generations)
        if self.room.evictions.busy:
            found = [self._kept(*one, now) for one in zip(names, found, generations, strict=True)]
        if len(found) > SURE_TO_FIT:
            info = sum(len(hit.info) for hit in found if hit is not None)
            if info + RESULT_BYTES * (len(found) + 1) > MAX_MESSAGE_BYTES:
                return refused(self._counts, lookup.request, "answer", "larger than a message; ask for fewer keys")
        self._counts["lookup"] += len(found)
        if self.asked_in_vain is not None:
            self._note_unknown(names, generations, found)
        return Found(self._term, session.number, lookup.request, found)

    # What else happens

    def take_new_scopes(self) -> list[Scope]:
        """Those that must be durable before their first grants are told of. Told once only."""
        scopes, self._new_scopes = self._new_scopes, []
        return scopes

    def outdate(self) -> list[Wake]:
        """There are new invalidations, those of abandoned names among them."""
        self._abandonments.take()
        self.directory.outdate()
        return self.claims.outdate(self.generation_of)

    def not_abandoned(self, now: float) -> list[Wake]:
        """The names that were to be abandoned keep their generation."""
        wakes: list[Wake] = []
        for session, token in self._abandonments.take():
            wakes += self.claims.give_up(session, token, AbortReason.HELD, now) or ()
        return wakes

    def generation_of(self, name: bytes) -> int:
        """The one that counts. Raises KeyError for a name of no known scope."""
        return self._invalidations.table.generation(self.scopes[name[:DIGEST_BYTES]], name[DIGEST_BYTES:])

    def sweep(self, most: int) -> None:
        """Forget those of an old generation among so many."""
        self._count("entry.outdated", self.directory.sweep(self.generation_of, most))

    def settle_removals(self, now: float) -> list[Wake]:
        """Act on what has become known of removals."""
        wakes: list[Wake] = []
        for name, generation, fate in self.room.evictions.take_news():
            self.room.settle(name, generation, fate)
            entry = self.directory.entry(name)
            stays = entry is not None and entry.hit.generation == generation
            result = REMOVING if fate is Fate.UNSURE else entry.hit if stays and entry is not None else None
            wakes += self.claims.settle(name, result, now)
        return wakes

    def _note_unknown(self, names: Sequence[bytes], generations: Sequence[int], found: Sequence[Hit | None]) -> None:
        asked = self.asked_in_vain
        for name, generation, hit in zip(names, generations, found, strict=True):
            if asked is not None and hit is None and name[:DIGEST_BYTES] in self.scopes and len(asked) < MAX_BATCH:
                asked[name] = generation

    def _despite_removal(
        self, name: bytes, known: Hit | Unclaimed | None, generation: int, now: float
    ) -> Hit | Unclaimed | None:
        """What is known of a name that may be on its way out."""
        if isinstance(known, Unclaimed):
            return known
        self.room.keep(name)
        match self.room.evictions.fate(name, generation, now):
            case Fate.OUT:
                return None if self.claims.reserve(name, generation) else OVERLOADED
            case Fate.UNSURE:
                return REMOVING
        return known

    def _kept(self, name: bytes, found: Hit | None, generation: int, now: float) -> Hit | None:
        """The same for whoever claims nothing."""
        self.room.keep(name)
        return found if self.room.evictions.fate(name, generation, now) is Fate.STAYS else None

    def _may_be_gone(self, session: Session, name: bytes, entry: Commitment, now: float) -> bool:
        """Whether what was committed may have been removed since its publisher saw it in the store."""
        evictions = self.room.evictions
        if not evictions.busy:
            return False
        self.room.keep(name)
        if self.claims.has(session.number, entry.token, name):
            evictions.trust(name)
            return False
        return evictions.doubts(name, entry.generation, now)

    def _names(self, groups: Iterable[KeyGroup]) -> tuple[list[bytes], Sequence[int]]:
        """The names of keys, and their generations, in the order of their results."""
        table = self._invalidations.table
        names: list[bytes] = []
        generations: list[int] = []
        for group in groups:
            scope = group.scope.digest
            names += [scope + digest for digest in group.digests]
            if table.head:
                generations += [table.generation(group.scope, digest) for digest in group.digests]
        return names, generations if table.head else [0] * len(names)

    def _remember(self, scopes: Iterable[Scope]) -> bool:
        """Know these scopes by their digests from now on. False if that are too many."""
        known = self.scopes
        for scope in scopes:
            if scope.digest not in known:
                if len(known) >= self._limits.max_scopes:
                    return False
                known[scope.digest] = scope
                self._new_scopes.append(scope)
        return True

    def _count(self, word: str, number: int) -> None:
        if number:
            self._counts[word] += number
