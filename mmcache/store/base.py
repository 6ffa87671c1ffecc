"""The one contract that every store keeps: names and addresses in, typed outcomes out.

A store never owns the caller's blocks: it is given addresses inside memory that it lent (`allocate_region`), and says
of each whether a transfer may still land there. All calls block; deadlines are `time.monotonic()` seconds, and one that
passes between two chunks leaves the rest `TIMED_OUT`. A single call below may overrun it: callers hand it to a thread.
The names of one call must differ.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Outcome(enum.Enum):
    """What became of one object in a batch. The values are words for counters."""

    OK = "ok"
    NOT_FOUND = "not_found"
    TOO_SMALL = "too_small"
    """The buffer is smaller than the object."""
    IN_PROGRESS = "in_progress"
    """A writer is, or died, between start and end: nothing was stored and nothing can be read."""
    NO_SPACE = "no_space"
    """The store has no room now, or the object is larger than any segment."""
    QUOTA = "quota"
    LEASED = "leased"
    """A reader's lease forbids the removal for now."""
    LEASE_EXPIRED = "lease_expired"
    """The read outlasted the lease, so its bytes prove nothing."""
    TRANSFER_FAILED = "transfer_failed"
    CHECKSUM = "checksum"
    UNAVAILABLE = "unavailable"
    """The master or the sidecar does not answer."""
    TIMED_OUT = "timed_out"
    INVALID = "invalid"
    FAILED = "failed"
    """A code that says no more than that."""


class ReadResult(NamedTuple):
    """One object of a batch read."""

    outcome: Outcome
    nbytes: int = 0
    """The object's size in bytes when OK; when TOO_SMALL, its size where the store could tell, else 0."""
    settled: bool = True
    """False: a transfer into this address may still land, so its block must never be used again."""


class PutResult(NamedTuple):
    """One object of a batch publication; OK means confirmed, not only accepted."""

    outcome: Outcome
    settled: bool = True
    """False: the store may still read from this address."""


class Region(NamedTuple):
    """Memory that the store can read into and write from."""

    address: int
    nbytes: int


class Store(ABC):
    """Where the bytes are. Safe to call from several threads once built; not usable after `close` or in a forked child.

    Raises (every method): LifecycleError after close or fork; StoreUnavailable if the attachment is gone for good.
    """

    kind: str
    """`sidecar`, `embedded` or `memory`."""

    lease_s: float
    """The store's read lease in seconds: a read that took longer is LEASE_EXPIRED. The welcome may correct it."""

    @abstractmethod
    def allocate_region(self, nbytes: int) -> Region:
        """Lend `nbytes` of memory, registered once with the store; it lives until `close` (or longer, see there)."""

    @abstractmethod
    def read_into(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, deadline: float
    ) -> list[ReadResult]:
        """Copy each named object to its address, into at most its size in bytes. A larger buffer is fine."""

    @abstractmethod
    def put_from(
        self, names: Sequence[str], addresses: Sequence[int], sizes: Sequence[int], *, deadline: float
    ) -> list[PutResult]:
        """Publish each object and confirm that it is there. An object that exists already is OK and is not replaced."""

    @abstractmethod
    def sizes(self, names: Sequence[str], *, deadline: float) -> list[int | None]:
        """Size of each object in bytes, None where it cannot be told."""

    @abstractmethod
    def exists(self, names: Sequence[str], *, deadline: float) -> list[bool]:
        """Whether each object is complete in the store. It takes a lease, and does not prove that a read succeeds."""

    @abstractmethod
    def remove(self, names: Sequence[str], *, deadline: float) -> list[Outcome]:
        """Remove objects without force: LEASED ones stay."""

    @abstractmethod
    def reachable(self) -> bool:
        """Whether the processes that every call needs answer; a second or two at most, and no call is made to them."""

    def give_back(self, region: Region, quarantined: Mapping[int, int]) -> None:  # noqa: B027 - nothing to do for most
        """Nobody uses this region any more, not even tensors: its memory may go, if not its addresses.

        Args:
            quarantined: bytes by offset of what transfers may still touch; that goes when they have certainly ended.

        Called by finalisers, anywhere and at any time: it takes no locks.
        """

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether its client has ended; `close` may leave that to a thread of its own."""

    @abstractmethod
    def close(self) -> None:
        """Detach; idempotent. Region memory stays mapped while the process lives, for tensors that are still held."""
