"""Cutting into messages: nothing is left out, order is kept, and every message and answer fits."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.batches import KEYS_PER_MESSAGE, CommitEntry, commit_batches, key_batches, missing_batches
from mmcache.control.messages import (
    MAX_INFO_BYTES,
    MAX_MESSAGE_BYTES,
    Acquire,
    Acquired,
    Commit,
    Found,
    Hit,
    Report,
    decode_from_client,
    decode_from_controller,
    encode,
)
from mmcache.key import MM_HASH_MAX_BYTES, EmbeddingKey

LARGEST = (1 << 63) - 1


def longest_key(number: int) -> EmbeddingKey:
    """Each in a scope of its own, all fields as long as they may be."""
    return EmbeddingKey(
        model=f"{number:0256}",
        version="v" * 128,
        mm_hash=f"{number:0{MM_HASH_MAX_BYTES}}",
        lora="l" * 128,
        modality="m" * 32,
        tenant="t" * 64,
    )


@given(st.lists(st.integers(0, 4), max_size=700))
def test_every_key_stands_once_at_the_index_that_its_batch_names(scopes: list[int]) -> None:
    keys = [EmbeddingKey(f"model{scope}", "v", f"hash{index}") for index, scope in enumerate(scopes)]
    seen: dict[int, EmbeddingKey] = {}
    for groups, indices in key_batches(keys):
        assert 0 < len(indices) <= KEYS_PER_MESSAGE
        sent = [(group.scope, digest) for group in groups for digest in group.digests]
        assert sent == [(keys[index].scope, keys[index].mm_digest) for index in indices]
        seen.update((index, keys[index]) for index in indices)
    assert len(seen) == len(keys)


def test_the_largest_messages_and_their_largest_answers_fit_into_a_frame() -> None:
    keys = [longest_key(number) for number in range(3 * KEYS_PER_MESSAGE)]
    entries = [CommitEntry(key, LARGEST, LARGEST, 1 << 47, 1e300, bytes(MAX_INFO_BYTES)) for key in keys]
    hits = [Hit(LARGEST, LARGEST, LARGEST, bytes(MAX_INFO_BYTES))] * KEYS_PER_MESSAGE
    for message in (
        *(Acquire(LARGEST, LARGEST, LARGEST, 1, groups) for groups, _ in key_batches(keys)),
        *(Commit(LARGEST, LARGEST, LARGEST, groups) for groups, _ in commit_batches(entries)),
        *(Report(LARGEST, LARGEST, missing) for missing in missing_batches([(key, LARGEST) for key in keys])),
    ):
        frame = encode(message)
        assert len(frame) <= MAX_MESSAGE_BYTES
        assert decode_from_client(frame) == message
    for answer in (Acquired(LARGEST, LARGEST, LARGEST, hits), Found(LARGEST, LARGEST, LARGEST, hits)):
        frame = encode(answer)
        assert len(frame) <= MAX_MESSAGE_BYTES
        assert decode_from_controller(frame) == answer


@pytest.mark.parametrize("cost_ms", [-1.0, math.nan, math.inf])
def test_a_cost_that_cannot_be_does_not_cost_the_entry(cost_ms: float) -> None:
    [batch] = commit_batches([CommitEntry(longest_key(1), 0, 0, 1, cost_ms, b"")])
    assert batch.groups[0].entries[0].cost_ms == 0.0
