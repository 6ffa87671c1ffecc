"""How the results of many keys fit into messages, none of which may be too large, and are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from mmcache.control.messages import (
    MAX_INFO_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_REASON,
    Answer,
    Granted,
    Hit,
    Refused,
    Resolution,
    Unclaimed,
)
from mmcache.controller.claims import WAITING, Wake

RESULT_BYTES: Final = 64
"""More than any result takes on the wire, besides its info; likewise the head of a message."""
SURE_TO_FIT: Final = MAX_MESSAGE_BYTES // (RESULT_BYTES + MAX_INFO_BYTES) - 1
"""As many results fit into a message, however large."""


def batched(wakes: Sequence[Wake]) -> Iterator[tuple[int, int, list[tuple[int, Resolution]]]]:
    """The ends of waits by session and request: one message for each, or more where it would be too large."""
    batches: dict[tuple[int, int], list[list[tuple[int, Resolution]]]] = {}
    sizes: dict[tuple[int, int], int] = {}
    for session, request, position, result in wakes:
        size = RESULT_BYTES + (len(result.info) if isinstance(result, Hit) else 0)
        waiter = (session, request)
        chunks = batches.setdefault(waiter, [])
        if not chunks or sizes[waiter] + size > MAX_MESSAGE_BYTES:
            chunks.append([])
            sizes[waiter] = RESULT_BYTES
        chunks[-1].append((position, result))
        sizes[waiter] += size
    for (session, request), chunks in batches.items():
        for results in chunks:
            yield session, request, results


def cut(results: list[Answer], session: int, request: int) -> list[Wake]:
    """Take out of an answer the hits that would make it too large: they follow at once, as if waited for."""
    room = MAX_MESSAGE_BYTES - RESULT_BYTES * (len(results) + 1)
    follows = []
    for position, result in enumerate(results):
        if isinstance(result, Hit):
            room -= len(result.info)
            if room < 0:
                follows.append(Wake(session, request, position, result))
                results[position] = WAITING
    return follows


def count_results(counts: Counter[str], what: str, results: Iterable[Answer]) -> None:
    """Count each result of what was asked, by its kind."""
    hits = granted = 0
    for result in results:
        if (kind := type(result)) is Hit:  # nearly all are one of two, and isinstance is slow to say no
            hits += 1
        elif kind is Granted:
            granted += 1
        else:
            counts[f"{what}.{result.reason if isinstance(result, Unclaimed) else 'waiting'}"] += 1
    if hits:
        counts[f"{what}.hit"] += hits
    if granted:
        counts[f"{what}.granted"] += granted


def refused(counts: Counter[str], request: int, word: str, reason: str) -> Refused:
    """Refuse a request, 0: whatever was said, and count it under this word."""
    counts[f"refused.{word}"] += 1
    return Refused(request, reason[:MAX_REASON])
