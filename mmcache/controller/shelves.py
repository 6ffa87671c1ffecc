"""Names of entries in an order that does not change, so that one can go through millions of them a few at a time."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from mmcache.key import DIGEST_BYTES

SHELVES: Final = 4096
"""Of two million names each has some five hundred."""
_NAME_BYTES: Final = 2 * DIGEST_BYTES
_SMALL: Final = 16 * _NAME_BYTES
"""A shelf of so many bytes need not be tidied."""


class Shelves:
    """Names, each a scope's digest followed by an mm_hash's, on shelves by how the second begins.

    Adding is all that its owner does: what is gone is noticed when a shelf is full of it, or looked at. Shelves are
    plain bytes, which the garbage collector does not walk.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, bytearray] = {}
        self._tidy_at: dict[int, int] = {}

    def add(self, name: bytes, present: Container[bytes]) -> None:
        """A name that was not there. `present` are all that are there."""
        number = shelf_of(name[DIGEST_BYTES:])
        shelf = self._shelves.setdefault(number, bytearray())
        shelf += name
        if len(shelf) > self._tidy_at.get(number, _SMALL):
            names = self.names(number, present)
            self._shelves[number] = bytearray(b"".join(names))
            self._tidy_at[number] = 2 * len(names) * _NAME_BYTES + _SMALL

    def names(self, number: int, present: Container[bytes]) -> list[bytes]:
        """Those of a shelf that are there, in order: by the mm_hash's digest, then by the scope's."""
        if number not in self._shelves:
            return []
        shelf = bytes(self._shelves[number])
        names = {shelf[start : start + _NAME_BYTES] for start in range(0, len(shelf), _NAME_BYTES)}
        return sorted((name for name in names if name in present), key=place)


def shelf_of(digest: bytes) -> int:
    """The shelf of all names with this digest of an mm_hash. Later shelves have larger digests."""
    return digest[0] << 4 | digest[1] >> 4


def place(name: bytes) -> bytes:
    """By what names are ordered."""
    return name[DIGEST_BYTES:] + name[:DIGEST_BYTES]
