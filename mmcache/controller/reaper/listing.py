"""The store's list of all names, over HTTP from its master, in pieces: no object is looked at, and no lease taken."""

from __future__ import annotations

import contextlib
import http.client
import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from mmcache.controller.reconciliation import MOST_RECORDS, RECORD
from mmcache.errors import MMCacheError
from mmcache.key import store_names

PIECE_BYTES: Final = 1 << 18
_LONGEST_NAME: Final = 512
"""Longer than any of ours: so much of a line that is cut is kept, to see that it is not ours."""
_MOST_GENERATION: Final = (1 << 63) - 1


class NotListed(MMCacheError):
    """The master gave no list, or not all of it."""


def listing(metrics: str, lineage: str, *, timeout: float) -> Iterator[bytes]:
    """The names of a lineage as records (`reconciliation.RECORD`), at most MOST_RECORDS at a time.

    Args:
        metrics: `host:port` of the master's HTTP port.
        timeout: seconds for the connection, and for each piece.

    Raises:
        NotListed: what came before is not all. The master's list is one of objects that can be read: what is being
            written is not in it.
    """
    host, _, port = metrics.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/get_all_keys", headers={"Connection": "close"})
            yield from records(_pieces(connection.getresponse()), lineage)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotListed(f"http://{metrics}/get_all_keys: {reason}") from error


def _pieces(answer: http.client.HTTPResponse) -> Iterator[bytes]:
    if answer.status != http.client.OK:
        raise http.client.HTTPException(f"status {answer.status}")
    left = answer.length  # which http.client does not see to, where it is asked for pieces
    if left is None:
        raise http.client.HTTPException("no Content-Length, and so no telling whether it is all")
    while left:
        piece = answer.read(min(left, PIECE_BYTES))
        if not piece:
            raise http.client.HTTPException(f"ended {left} bytes early")
        left -= len(piece)
        yield piece


def records(pieces: Iterable[bytes], lineage: str) -> Iterator[bytes]:
    """What of these pieces of a text, one name a line, are names of a lineage."""
    names = store_names(lineage)
    found = bytearray()
    begun = b""
    for piece in itertools.chain(pieces, (b"\n",)):  # the end of the last line, should it have none
        text = begun + piece
        end = text.rfind(b"\n") + 1
        begun = text[end : end + _LONGEST_NAME]
        for scope, digest, generation in names.findall(text, 0, end):
            if (number := int(generation)) <= _MOST_GENERATION:
                found += RECORD.pack(bytes.fromhex((scope + digest).decode()), number)
        while len(found) >= MOST_RECORDS * RECORD.size:
            yield bytes(found[: MOST_RECORDS * RECORD.size])
            del found[: MOST_RECORDS * RECORD.size]
    if found:
        yield bytes(found)
