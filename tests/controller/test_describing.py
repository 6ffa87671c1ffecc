"""What is read of objects that nothing is known of: only what proves itself, under its own name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmcache.config import StoreSettings
from mmcache.controller.reaper.describing import Describer, description
from mmcache.controller.reaper.messages import MAX_MESSAGE_BYTES, Describe, encode
from mmcache.controller.reconciliation import RECORD
from mmcache.entry import PREFIX_BYTES, EntryHeader, decode_info, encode_prefix, lay_out
from mmcache.errors import StoreUnavailable
from mmcache.key import EmbeddingKey, store_name
from mmcache.store.prefixes import AHEAD, Prefix

LINEAGE = "0a1b"
KEY = EmbeddingKey("m", "1", "item", lora="l", modality="video", tenant="t")
TENSORS, PAYLOAD_BYTES = lay_out([("embedding", "float32", (8,))])
MOST_META = 1900


def header_of(key: EmbeddingKey = KEY, generation: int = 7, **meta: object) -> EntryHeader:
    return EntryHeader(key, generation, TENSORS, meta, 2.5, "encoder", 1_700_000_000_000_000_000)


def prefix_of(header: EntryHeader) -> bytes:
    return encode_prefix(header, payload_nbytes=PAYLOAD_BYTES, payload_checksum=1)


def digests_of(key: EmbeddingKey) -> bytes:
    return key.scope.digest + key.mm_digest


def read(
    content: bytes, nbytes: int = PREFIX_BYTES + PAYLOAD_BYTES, *, key: EmbeddingKey = KEY, generation: int = 7
) -> object:
    return description(digests_of(key), generation, Prefix(content, nbytes))


def test_a_prefix_tells_all_that_a_commit_would_have() -> None:
    one = description(digests_of(KEY), 7, Prefix(prefix_of(header_of(tokens=5)), PREFIX_BYTES + PAYLOAD_BYTES))
    assert one is not None
    assert (one.producer, one.created_ns) == ("encoder", 1_700_000_000_000_000_000)
    entry = one.entry
    assert (entry.mm_hash, entry.generation, entry.token) == ("item", 7, 0)
    assert (entry.nbytes, entry.cost_ms) == (PREFIX_BYTES + PAYLOAD_BYTES, 2.5)
    assert (decode_info(entry.info).tensors, decode_info(entry.info).meta) == (TENSORS, {"tokens": 5})


@example(0, 0)
@example(PREFIX_BYTES - 1, 255)
@given(st.integers(0, PREFIX_BYTES - 1), st.integers(0, 255))
def test_a_byte_that_is_another_makes_it_none(place: int, value: int) -> None:
    whole = prefix_of(header_of())
    damaged = whole[:place] + bytes([value]) + whole[place + 1 :]
    assert (read(damaged) is None) is (damaged != whole)


@given(st.binary(max_size=2 * PREFIX_BYTES), st.integers(0, 1 << 40))
def test_any_bytes_are_an_entry_or_none(content: bytes, nbytes: int) -> None:
    assert read(content, nbytes) is None


@pytest.mark.parametrize(
    ("key", "generation"),
    [(KEY, 6), (EmbeddingKey("m", "1", "other", "l", "video", "t"), 7), (EmbeddingKey("m", "1", "item"), 7)],
)
def test_an_entry_under_another_name_is_none(key: EmbeddingKey, generation: int) -> None:
    assert read(prefix_of(header_of()), key=key, generation=generation) is None


def test_one_of_another_length_is_none() -> None:
    assert read(prefix_of(header_of()), PREFIX_BYTES + PAYLOAD_BYTES + 1) is None
    assert read(prefix_of(header_of()), 10) is None


class _Given:
    """Prefixes by the names that are asked for; as far ahead as the real one."""

    def __init__(self, prefixes: dict[str, Prefix]) -> None:
        self._prefixes = prefixes

    def read(self, pieces: Iterable[list[str]]) -> Iterator[list[Prefix | None]]:
        begun: deque[list[str]] = deque()
        for names in pieces:
            begun.append(names)
            if len(begun) > AHEAD:
                yield [self._prefixes.get(name) for name in begun.popleft()]
        for names in begun:
            yield [self._prefixes.get(name) for name in names]


def test_each_is_answered_under_its_number_with_as_many_at_a_time_as_fit_into_a_message() -> None:
    keys = [EmbeddingKey("m", "1", f"{number}" + "h" * 1000) for number in range(600)]
    whole = PREFIX_BYTES + PAYLOAD_BYTES
    contents = [prefix_of(header_of(key, 1, note="x" * MOST_META)) for key in keys]
    prefixes = {
        store_name(key, lineage=LINEAGE, generation=1): Prefix(content, whole)
        for key, content in zip(keys, contents, strict=True)
    }
    del prefixes[store_name(keys[100], lineage=LINEAGE, generation=1)]
    records = b"".join(RECORD.pack(digests_of(key), 1) for key in keys)
    size = 150 * RECORD.size
    asked = [Describe(place, LINEAGE, records[place * size : (place + 1) * size]) for place in range(4)]
    describer = Describer(StoreSettings())
    describer._reader = _Given(prefixes)  # type: ignore[assignment]
    answers = list(describer.describe(iter(asked)))
    assert len(answers) > len(asked)
    assert all(len(encode(answer)) <= MAX_MESSAGE_BYTES for answer in answers)
    described = [(answer.number, one and one.entry.mm_hash) for answer in answers for one in answer.entries]
    assert described == [(place // 150, None if place == 100 else key.mm_hash) for place, key in enumerate(keys)]


def test_without_the_masters_address_nothing_is_read() -> None:
    with pytest.raises(StoreUnavailable, match=r"store\.metrics"):
        list(Describer(StoreSettings()).describe([Describe(1, LINEAGE, bytes(RECORD.size))]))
