"""Cuts what a caller asks for into messages: keys of one scope together, and few enough that every answer fits.

Built on the caller's thread, so that what cannot be put into a message raises there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from mmcache.control.messages import Abandoned, AbandonReason, CommitGroup, Commitment, KeyGroup, Missing
from mmcache.key import EmbeddingKey, Scope

KEYS_PER_MESSAGE: Final = 128
"""So that neither a message nor its answer can outgrow MAX_MESSAGE_BYTES, were all fields at their longest."""


class CommitEntry(NamedTuple):
    """One entry to enter in the directory. Its publisher has seen it in the store."""

    key: EmbeddingKey
    generation: int
    token: int
    """As `Granted` gave it, or 0 for an entry published without a claim."""
    nbytes: int
    """Size of the whole object in bytes."""
    cost_ms: float
    """What it took to compute."""
    info: bytes
    """`mmcache.entry.encode_info` of it."""


class AbandonEntry(NamedTuple):
    """A key whose name at a generation is of no use; `token`, as `Granted` gave it, or 0: the claim that this ends."""

    key: EmbeddingKey
    generation: int
    token: int
    reason: AbandonReason


class KeyBatch(NamedTuple):
    """Keys for one message. `indices` are their places in the caller's sequence, in the order of the message."""

    groups: list[KeyGroup]
    indices: list[int]


class CommitBatch(NamedTuple):
    """Commitments for one message, with the caller's tokens; `indices` as in `KeyBatch`."""

    groups: list[CommitGroup]
    indices: list[int]


def key_batches(keys: Sequence[EmbeddingKey]) -> list[KeyBatch]:
    """Batches that together hold each of the keys once."""
    return digest_batches([(key.scope, key.mm_digest) for key in keys])


def digest_batches(keys: Sequence[tuple[Scope, bytes]]) -> list[KeyBatch]:
    """The same for keys that are known by scope and digest."""
    return [
        KeyBatch(
            [KeyGroup(scope, [keys[index][1] for index in indices]) for scope, indices in runs],
            [index for _, indices in runs for index in indices],
        )
        for runs in _cut([scope for scope, _ in keys])
    ]


def commit_batches(entries: Sequence[CommitEntry]) -> list[CommitBatch]:
    """Batches that together hold each of the entries once."""
    return [
        CommitBatch(
            [CommitGroup(scope, [_commitment(entries[index]) for index in indices]) for scope, indices in runs],
            [index for _, indices in runs for index in indices],
        )
        for runs in _cut([entry.key.scope for entry in entries])
    ]


def missing_batches(entries: Sequence[tuple[EmbeddingKey, int]]) -> list[list[Missing]]:
    """Reports, each batch for one message."""
    missing = [Missing(key.scope, key.mm_digest, revision) for key, revision in entries]
    return [missing[start : start + KEYS_PER_MESSAGE] for start in range(0, len(missing), KEYS_PER_MESSAGE)]


def abandoned_batches(entries: Sequence[AbandonEntry]) -> list[list[Abandoned]]:
    """What to abandon, each batch for one message, with the caller's tokens."""
    abandoned = [
        Abandoned(entry.key.scope, entry.key.mm_hash, entry.generation, entry.token, entry.reason) for entry in entries
    ]
    return [abandoned[start : start + KEYS_PER_MESSAGE] for start in range(0, len(abandoned), KEYS_PER_MESSAGE)]


def _cut(scopes: Sequence[Scope]) -> list[list[tuple[Scope, list[int]]]]:
    """For each message, runs of indices of one scope."""
    by_scope: dict[Scope, list[int]] = {}
    for index, scope in enumerate(scopes):
        by_scope.setdefault(scope, []).append(index)
    messages: list[list[tuple[Scope, list[int]]]] = []
    room = 0
    for scope, indices in by_scope.items():
        start = 0
        while start < len(indices):
            if not room:
                messages.append([])
                room = KEYS_PER_MESSAGE
            taken = indices[start : start + room]
            messages[-1].append((scope, taken))
            start += len(taken)
            room -= len(taken)
    return messages


def _commitment(entry: CommitEntry) -> Commitment:
    cost_ms = float(entry.cost_ms)
    if not 0.0 <= cost_ms < math.inf:  # a clock that jumped; no reason to lose the entry
        cost_ms = 0.0
    return Commitment(entry.key.mm_hash, entry.generation, entry.token, entry.nbytes, cost_ms, entry.info)
