"""What is read of objects that nothing is known of: only what proves itself, under its own name."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmcache.config import StoreSettings
from mmcache.controller.reaper.describing import Describer, description
from mmcache.controller.reaper.messages import MAX_MESSAGE_BYTES, Described, encode
from mmcache.entry import PREFIX_BYTES, EntryHeader, decode_info, encode_prefix, lay_out
from mmcache.errors import StoreUnavailable
from mmcache.key import EmbeddingKey, store_name
from mmcache.store.prefixes import Prefix

LINEAGE = "0a1b"
KEY = EmbeddingKey("m", "1", "item", lora="l", modality="video", tenant="t")
TENSORS, PAYLOAD_BYTES = lay_out([("embedding", "float32", (8,))])
MOST_META = 1900


def header_of(key: EmbeddingKey = KEY, generation: int = 7, **meta: object) -> EntryHeader:
    return EntryHeader(key, generation, TENSORS, meta, 2.5, "encoder", 1_700_000_000_000_000_000)


def prefix_of(header: EntryHeader) -> bytes:
    return encode_prefix(header, payload_nbytes=PAYLOAD_BYTES, payload_checksum=1)


def read(content: bytes, nbytes: int = PREFIX_BYTES + PAYLOAD_BYTES, name: str = "", **of: object) -> object:
    return description(name or store_name(KEY, lineage=LINEAGE, generation=7), Prefix(content, nbytes), LINEAGE)


def test_a_prefix_tells_all_that_a_commit_would_have() -> None:
    one = description(
        store_name(KEY, lineage=LINEAGE, generation=7),
        Prefix(prefix_of(header_of(tokens=5)), PREFIX_BYTES + PAYLOAD_BYTES),
        LINEAGE,
    )
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
    "name",
    [
        store_name(KEY, lineage=LINEAGE, generation=6),
        store_name(KEY, lineage="0a1c", generation=7),
        store_name(EmbeddingKey("m", "1", "other"), lineage=LINEAGE, generation=7),
        store_name(EmbeddingKey("m", "1", "item"), lineage=LINEAGE, generation=7),
        "anything",
    ],
)
def test_an_entry_under_another_name_is_none(name: str) -> None:
    assert read(prefix_of(header_of()), name=name) is None


def test_one_of_another_length_is_none() -> None:
    assert read(prefix_of(header_of()), PREFIX_BYTES + PAYLOAD_BYTES + 1) is None
    assert read(prefix_of(header_of()), 10) is None


class _Given:
    """Prefixes, whoever asks."""

    def __init__(self, prefixes: list[Prefix | None]) -> None:
        self._prefixes = prefixes

    def read(self, _: object) -> list[Prefix | None]:
        return self._prefixes


def test_as_many_at_a_time_as_fit_into_a_message() -> None:
    keys = [EmbeddingKey("m", "1", f"{number}" + "h" * 1000) for number in range(256)]
    names = [store_name(key, lineage=LINEAGE, generation=1) for key in keys]
    contents = [prefix_of(header_of(key, 1, note="x" * MOST_META)) for key in keys]
    prefixes: list[Prefix | None] = [Prefix(content, PREFIX_BYTES + PAYLOAD_BYTES) for content in contents]
    prefixes[100] = None
    describer = Describer(StoreSettings())
    describer._reader = _Given(prefixes)  # type: ignore[assignment]
    parts = list(describer.describe(names, LINEAGE))
    assert len(parts) > 1
    assert all(len(encode(Described((1 << 63) - 1, part))) <= MAX_MESSAGE_BYTES for part in parts)
    described = [one for part in parts for one in part]
    assert described[100] is None
    assert [one and one.entry.mm_hash for one in described] == [
        None if number == 100 else key.mm_hash for number, key in enumerate(keys)
    ]


def test_without_the_masters_address_nothing_is_read() -> None:
    with pytest.raises(StoreUnavailable, match=r"store\.metrics"):
        list(Describer(StoreSettings()).describe(["x"], LINEAGE))
