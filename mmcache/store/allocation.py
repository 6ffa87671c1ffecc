"""What an object takes of a segment: more than its bytes.

Found by filling segments of Mooncake 0.3.13 with objects of one size until a put was refused: 64 MiB hold 64 objects of
1 MiB, and 56 of 1 MiB and 4 KiB, as many as of 1.125 MiB. The master's figures of what is used do not have it.
"""

from __future__ import annotations

_BITS = 3


def allocated(nbytes: int) -> int:
    """Bytes that an object of so many takes: the next eighth of the power of two below it, up to an eighth more."""
    shift = max(0, nbytes.bit_length() - 1 - _BITS)
    return -(-nbytes >> shift) << shift
