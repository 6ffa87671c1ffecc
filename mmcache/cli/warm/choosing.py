"""Which entries are exported: of all that the controller lists, those that come first and fit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal, get_args

import msgspec

from mmcache.cli.admin.connection import AdminApi
from mmcache.cli.admin.listing import PAGE
from mmcache.cli.errors import AdminUnavailable
from mmcache.key import EmbeddingKey

Order = Literal["hottest", "newest"]
ORDERS: Final = get_args(Order)
Rank = tuple[float, ...]

MOST_ENTRIES: Final = 1_000_000
"""Most that one export chooses, which takes some GiB of memory."""
_MOST: Final = 1e300


class Listed(msgspec.Struct, frozen=True):
    """What is read of an entry in the admin API's list; other fields are let through, and left out."""

    name: str
    key: EmbeddingKey
    generation: Annotated[int, msgspec.Meta(ge=0)]
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    created: float
    cost_ms: float | None = None
    uses: float | None = None


class _Page(msgspec.Struct):
    entries: list[Listed]
    next: str | None


def rank(entry: Listed, order: Order) -> Rank:
    """What comes first has the largest."""
    if order == "newest":
        return (amount(entry.created),)
    return hotness(amount(entry.cost_ms), amount(entry.uses), amount(entry.created))


def hotness(cost_ms: float, uses: float, created: float) -> Rank:
    """By the encode time that an entry spares: once, and once more for each use that is known; then the newest."""
    return (cost_ms * (1.0 + uses), created)


def amount(number: float | None) -> float:
    """A number that others told, as one from 0 up."""
    return 0.0 if number is None or math.isnan(number) else min(max(number, 0.0), _MOST)


class Choice:
    """The entries that come first: at most so many, and so many bytes. Bounded, whatever is offered.

    Those are chosen that come before the first one that does not fit any more; one that alone is too large is left out.
    """

    def __init__(self, order: Order, *, most_entries: int, most_bytes: int | None) -> None:
        self._order = order
        self._most_entries = most_entries
        self._most_bytes = math.inf if most_bytes is None else most_bytes
        self._heap: list[tuple[Rank, str, Listed]] = []
        self._names: set[str] = set()
        self._floor: tuple[Rank, str] | None = None
        self.nbytes = 0
        self.left_out = 0

    def offer(self, entry: Listed) -> None:
        """Take it, or leave it out, or take it in place of others."""
        if entry.name in self._names:  # one that was published anew meanwhile is listed twice
            return
        ranked = (rank(entry, self._order), entry.name)
        if entry.nbytes > self._most_bytes or (self._floor is not None and ranked < self._floor):
            self.left_out += 1
            return
        heapq.heappush(self._heap, (*ranked, entry))
        self._names.add(entry.name)
        self.nbytes += entry.nbytes
        while len(self._heap) > self._most_entries or self.nbytes > self._most_bytes:
            lowest, name, last = heapq.heappop(self._heap)
            self._floor = (lowest, name)
            self._names.remove(last.name)
            self.nbytes -= last.nbytes
            self.left_out += 1

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def largest(self) -> int:
        """The size in bytes of the largest entry chosen."""
        return max((entry.nbytes for *_, entry in self._heap), default=0)

    def in_order(self) -> list[Listed]:
        """The first one first."""
        return [entry for *_, entry in sorted(self._heap, reverse=True)]


def listed(api: AdminApi, query: Mapping[str, object]) -> Iterator[Listed]:
    """All entries that match, page by page. Raises AdminUnavailable, InputError."""
    cursor: str | None = None
    while True:
        page = api.get("/v1/entries", _Page, {**query, "limit": PAGE, "cursor": cursor})
        yield from page.entries
        if page.next is None:
            return
        if page.next == cursor:
            raise AdminUnavailable(f"the admin API at {api.url} goes round in circles: it gives the same page again")
        cursor = page.next
