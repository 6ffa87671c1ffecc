"""The beginnings of objects, out of their owners' memory: without a lease, and so no object is evicted later for it.

The master says where an object lies (`/batch_query_keys`, which leases nothing); then the transfer engine reads there,
as Mooncake's own client does. Meanwhile an object may go, and its memory be another's: what is read must prove itself.
"""

from __future__ import annotations

import contextlib
import http.client
import mmap
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from ctypes import addressof, c_char
from typing import Annotated, Final, NamedTuple

import msgspec

from mmcache.config import StoreSettings
from mmcache.entry import PREFIX_BYTES
from mmcache.errors import StoreUnavailable
from mmcache.store.binding import new_transfer_engine

MOST: Final = 256
"""Objects in one piece."""
AHEAD: Final = 2
"""Pieces whose transfers are under way while one is looked at."""
_REGION_BYTES: Final = MOST * PREFIX_BYTES
_NOT_BEGUN: Final = (0, (1 << 64) - 1)
"""What stands for a transfer that could not begin, as to an owner that cannot be reached. 0.3.13 gives 0; the other
would be -1, and the number of a transfer is an address that Mooncake follows."""
_MOST_ANSWER_BYTES: Final = 1 << 20
_Address = Annotated[int, msgspec.Meta(gt=0)]


class Prefix(NamedTuple):
    """What may be the first PREFIX_BYTES of an object of `nbytes`."""

    content: bytes
    nbytes: int


class _Transfer(NamedTuple):
    """Of those objects of a piece that one owner has, into its region."""

    number: int
    positions: list[int]


class _Piece(NamedTuple):
    """One whose transfers have begun."""

    places: Sequence[_Place | None]
    region: int
    transfers: list[_Transfer]


class _Place(msgspec.Struct, frozen=True):
    size: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(name="size_")
    address: _Address = msgspec.field(name="buffer_address_")
    endpoint: str = msgspec.field(name="transport_endpoint_")


class _Found(msgspec.Struct, frozen=True):
    ok: bool
    values: list[_Place] | None = None


class _Answer(msgspec.Struct, frozen=True):
    data: dict[str, _Found]


_answer = msgspec.json.Decoder(_Answer)


class PrefixReader:
    """One process's. Ends with it.

    Args:
        settings: where the store is, its `metrics` too.
        timeout: seconds for the connection to the master, and for its answer.

    Raises:
        StoreUnavailable: there is no Mooncake, or its transfer engine cannot begin.
    """

    def __init__(self, settings: StoreSettings, *, timeout: float) -> None:
        if settings.metrics is None:
            raise StoreUnavailable("store.metrics is not set")
        self._metrics = settings.metrics
        self._timeout = timeout
        self._engine = new_transfer_engine()
        if code := self._engine.initialize(settings.hostname, settings.metadata, settings.protocol, settings.devices):
            raise StoreUnavailable(f"Mooncake's transfer engine does not begin ({code}): see store.protocol, .devices")
        self._memory = mmap.mmap(-1, (AHEAD + 1) * _REGION_BYTES)
        self._address = addressof(c_char.from_buffer(self._memory))
        if code := self._engine.register_memory(self._address, len(self._memory)):
            raise StoreUnavailable(f"Mooncake's transfer engine takes no memory ({code})")

    def read(self, pieces: Iterable[Sequence[str]]) -> Iterator[list[Prefix | None]]:
        """Piece by piece of at most MOST names; None for one that is not there, shorter than a prefix, or could not be
        read.

        AHEAD further pieces are taken, and their transfers begun, before one is given. Waits for as long as an owner
        hangs. Raises StoreUnavailable: the master gives no answer.
        """
        begun: deque[_Piece] = deque()
        try:
            for number, names in enumerate(pieces):
                begun.append(self._begin(names, number % (AHEAD + 1) * _REGION_BYTES))
                if len(begun) > AHEAD:
                    yield self._end(begun.popleft())
            while begun:
                yield self._end(begun.popleft())
        finally:
            while begun:
                self._end(begun.popleft())

    def _begin(self, names: Sequence[str], region: int) -> _Piece:
        places = self._places(names)
        by_endpoint: dict[str, list[int]] = {}
        for position, place in enumerate(places):
            if place is not None:
                by_endpoint.setdefault(place.endpoint, []).append(position)
        transfers: list[_Transfer] = []
        for endpoint, positions in by_endpoint.items():
            there = [place.address for position in positions if (place := places[position]) is not None]
            addresses = [self._address + region + PREFIX_BYTES * position for position in positions]
            sizes = [PREFIX_BYTES] * len(positions)
            number = self._engine.batch_transfer_async_read(endpoint, addresses, there, sizes)
            if number not in _NOT_BEGUN:
                transfers.append(_Transfer(number, positions))
        return _Piece(places, region, transfers)

    def _end(self, piece: _Piece) -> list[Prefix | None]:
        prefixes: list[Prefix | None] = [None] * len(piece.places)
        for number, positions in piece.transfers:
            if self._engine.get_batch_transfer_status([number]):
                continue
            for position in positions:
                if (place := piece.places[position]) is not None:
                    start = piece.region + PREFIX_BYTES * position
                    prefixes[position] = Prefix(self._memory[start : start + PREFIX_BYTES], place.size)
        return prefixes

    def _places(self, names: Sequence[str]) -> list[_Place | None]:
        """Where each object lies that is there in one piece."""
        if not 0 < len(names) <= MOST:
            raise ValueError(f"names: {len(names)}, not 1 to {MOST}")
        host, _, port = self._metrics.rpartition(":")
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=self._timeout)
        with contextlib.closing(connection):
            try:
                connection.request("GET", f"/batch_query_keys?keys={','.join(names)}", headers={"Connection": "close"})
                answer = connection.getresponse()
                data = _answer.decode(answer.read(_MOST_ANSWER_BYTES)).data
            except (OSError, http.client.HTTPException, msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise StoreUnavailable(f"http://{self._metrics}/batch_query_keys: {error}") from error
        found = [data.get(name) for name in names]
        return [
            one.values[0]
            if one is not None and one.ok and one.values and len(one.values) == 1 and one.values[0].size >= PREFIX_BYTES
            else None
            for one in found
        ]
