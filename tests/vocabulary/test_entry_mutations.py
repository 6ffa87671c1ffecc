"""What the decoder makes of objects that are not, or no longer, the entries that were published."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from made_entries import HEAD_BYTES, KEY, entry, header, sealed, with_metadata

from mmcache.entry import MAX_PAYLOAD_BYTES, PREFIX_BYTES, EntryHeader, decode_entry, decode_info, encode_info
from mmcache.errors import CORRUPT_REASONS, CorruptEntry

FIELDS = list(msgspec.structs.astuple(KEY))
META_OF_7 = msgspec.msgpack.encode([FIELDS, 3, [], {"a": 7}, 0.0, ""])
OURS = entry()
FOREIGN = [
    entry(header(key=msgspec.structs.replace(KEY, mm_hash="another photograph"))),
    entry(header(generation=4)),
    entry(header([("embedding", "bfloat16", (300, 7))], key=msgspec.structs.replace(KEY, tenant="other"))),
]


def decoded(data: bytes) -> EntryHeader:
    return decode_entry(memoryview(data), key=KEY, generation=3, verify="full")


def refusal(data: bytes) -> str | None:
    """Why the decoder refuses; None if it does not."""
    try:
        decoded(data)
    except CorruptEntry as error:
        return error.reason
    return None


def info_refusal(data: bytes) -> str | None:
    try:
        decode_info(data)
    except CorruptEntry as error:
        return error.reason
    return None


def flipped(data: bytes, chance: random.Random, start: int = 0, end: int | None = None) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8])):
        changed[chance.randrange(start, len(data) if end is None else end)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def truncated(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def extended(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randrange(1, 600))


def cut_out(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + data[start + chance.randrange(1, 300) :]


def spliced(data: bytes, chance: random.Random) -> bytes:
    other, at = chance.choice(FOREIGN), chance.choice([HEAD_BYTES, PREFIX_BYTES, chance.randrange(1, len(data))])
    return data[:at] + other[at:]


def swapped(data: bytes, chance: random.Random) -> bytes:
    nbytes = chance.randrange(1, 300)
    one, other = sorted(chance.sample(range(len(data) - nbytes), 2))
    changed = bytearray(data)
    changed[one : one + nbytes], changed[other : other + nbytes] = (
        data[other : other + nbytes],
        data[one : one + nbytes],
    )
    return bytes(changed)


def zeroed(data: bytes, chance: random.Random) -> bytes:
    start = chance.randrange(len(data))
    return data[:start] + bytes(len(data) - start)


def foreign(_: bytes, chance: random.Random) -> bytes:
    return chance.choice(FOREIGN)


def noise(data: bytes, chance: random.Random) -> bytes:
    return chance.randbytes(chance.choice([0, 1, 40, PREFIX_BYTES - 1, PREFIX_BYTES, len(data)]))


def noise_behind_the_magic(data: bytes, chance: random.Random) -> bytes:
    return data[:6] + chance.randbytes(len(data) - 6)


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [
    flipped,
    truncated,
    extended,
    cut_out,
    spliced,
    swapped,
    zeroed,
    foreign,
    noise,
    noise_behind_the_magic,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_thousand_mutations_of_each_kind_are_refused_with_a_reason(mutate: Callable[..., bytes]) -> None:
    chance = random.Random(mutate.__name__)
    for _ in range(1000):
        data = mutate(OURS, chance)
        if data == OURS:  # as when what was swapped is equal
            assert decoded(data) == header()
        else:
            assert refusal(data) in CORRUPT_REASONS


def test_prefixes_resealed_after_mutation_never_crash_and_never_pass_for_another_layout() -> None:
    """The checksum put right again, so that every check behind it meets arbitrary metadata."""
    chance = random.Random(1)
    length = HEAD_BYTES + int.from_bytes(OURS[6:8], "little")
    passed = 0
    for _ in range(10_000):
        data = sealed(flipped(OURS, chance, 4, length))
        if (found := refusal(data)) is not None:
            assert found in CORRUPT_REASONS
            continue
        passed += 1  # what may differ: names, meta, cost, producer, time, and views of the very same bytes
        for spec in decoded(data).tensors:
            assert spec.offset + spec.nbytes <= len(data) - PREFIX_BYTES
    assert passed


def test_infos_changed_on_their_way_never_crash() -> None:
    chance = random.Random(2)
    info = encode_info(header())
    for _ in range(5000):
        mutate = chance.choice([flipped, truncated, zeroed, extended])
        assert info_refusal(mutate(info, chance)) in {None, *CORRUPT_REASONS}


def test_an_info_longer_than_any_prefix_is_refused_unread() -> None:
    assert info_refusal(msgspec.msgpack.encode([[], {"text": "x" * 5000}])) == "length"


@pytest.mark.parametrize(
    ("expected", "data"),
    [
        ("length", b""),
        ("length", OURS[:PREFIX_BYTES - 1]),
        ("length", OURS + b"\0"),
        ("magic", b"MMC2" + OURS[4:]),
        ("magic", bytes(len(OURS))),
        ("version", OURS[:4] + b"\2" + OURS[5:]),
        ("version", with_metadata([FIELDS, 3, [], {}, 0.0, ""], version=2)),
        ("prefix_checksum", OURS[:PREFIX_BYTES - 1] + b"\1" + OURS[PREFIX_BYTES:]),
        ("payload_checksum", OURS[:-1] + b"\0"),
        ("metadata", sealed(OURS[:PREFIX_BYTES - 1] + b"\1" + OURS[PREFIX_BYTES:])),
        ("metadata", sealed(OURS[:6] + b"\xff\xff" + OURS[8:])),
        ("metadata", sealed(OURS[:6] + b"\0\0" + OURS[8:])),
        ("identity", FOREIGN[0]),
        ("identity", FOREIGN[1]),
    ],
)  # fmt: skip
def test_each_fault_has_its_reason(expected: str, data: bytes) -> None:
    assert refusal(data) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 4000 + b"\x90",
        {},
        [],
        [FIELDS[:5], 3, [], {}, 0.0, ""],
        [[*FIELDS, "more"], 3, [], {}, 0.0, ""],
        [FIELDS, -1, [], {}, 0.0, ""],
        [FIELDS, 3, [], {}, float("nan"), ""],
        [FIELDS, 3, [], {}, float("inf"), ""],
        [FIELDS, 3, [], {}, -1.0, ""],
        [FIELDS, 3, [], {}, 0.0, "x" * 129],
        [FIELDS, 3, [], {}, 0.0, "", "more"],
        [FIELDS, 3, [], [], 0.0, ""],
        [FIELDS, 3, [], {1: 2}, 0.0, ""],
        [FIELDS, 3, [], {"a": {1: 2}}, 0.0, ""],
        [FIELDS, 3, [], {"a": msgspec.msgpack.Ext(1, b"code")}, 0.0, ""],
        [FIELDS, 3, [], {"a": msgspec.msgpack.Ext(-1, b"\0\0\0\1")}, 0.0, ""],
        [FIELDS, 3, [], {"a": float("nan")}, 0.0, ""],
        META_OF_7.replace(b"\xa1a\7", b"\xa1\xff\7"),
        META_OF_7.replace(b"\xa1a\7", b"\xa1a" + b"\x91" * 3900 + b"\7"),
    ],
    ids=lambda metadata: repr(metadata)[:40],
)  # fmt: skip
def test_metadata_that_is_not_what_it_should_be_is_refused(metadata: Any) -> None:
    assert refusal(with_metadata(metadata)) == "metadata"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([["a", "int8", [8], 0, 8], ["b", "int8", [8], 256, 8]], None),
        ([["a", "int8", [8], 512, 8]], None),
        ([["a", "int8", [1024], 0, 1024]], None),
        ([["a", "int8", [8], 8, 8]], "layout"),
        ([["a", "int8", [8], 256, 8], ["b", "int8", [8], 0, 8]], "layout"),
        ([["a", "int8", [300], 0, 300], ["b", "int8", [8], 256, 8]], "layout"),
        ([["a", "int8", [8], 0, 8], ["b", "int8", [8], 0, 8]], "layout"),
        ([["a", "int8", [8], 0, 8], ["a", "int8", [8], 256, 8]], "layout"),
        ([["a", "int8", [8], 0, 7]], "layout"),
        ([["a", "float32", [8], 0, 8]], "layout"),
        ([["a", "object", [8], 0, 8]], "layout"),
        ([["a", "int8", [1 << 40, 1 << 40], 0, 8]], "layout"),
        ([["a", "int8", [1 << 32, 1 << 32], 0, 0]], "layout"),  # 0 modulo 2**64
        ([["a", "int8", [0, 1 << 40, 1 << 40], 0, 0]], "layout"),
        ([["a", "int8", [], 0, 0]], "layout"),
        ([["", "int8", [8], 0, 8]], "metadata"),
        ([["a", "int8", [-8], 0, 8]], "metadata"),
        ([["a", "int8", [-2, -4], 0, 8]], "metadata"),
        ([["a", "int8", [8.0], 0, 8]], "metadata"),
        ([["a", "int8", [8], -256, 8]], "metadata"),
        ([["a", "int8", [8], MAX_PAYLOAD_BYTES + 256, 8]], "metadata"),
        ([["a", "int8", [1] * 65, 0, 1]], "metadata"),
        ([["a", "int8", [8], 0]], "metadata"),
        ([["a", "int8", [8], 0, 8, 9]], "metadata"),
        ([["a", "int8", 8, 0, 8]], "metadata"),
        ([[str(index), "int8", [0], 0, 0] for index in range(257)], "metadata"),
        ({"a": 1}, "metadata"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_tensors_that_do_not_lie_in_the_payload_as_they_must_are_refused(tensors: Any, expected: str | None) -> None:
    assert refusal(with_metadata([FIELDS, 3, tensors, {}, 0.0, ""])) == expected
    assert info_refusal(msgspec.msgpack.encode([tensors, {}])) == expected


@pytest.mark.parametrize("tensor", [["a", "int8", [1025], 0, 1025], ["a", "int8", [8], 1024, 8]])
def test_tensors_beyond_the_end_of_the_payload_are_refused(tensor: list[Any]) -> None:
    assert refusal(with_metadata([FIELDS, 3, [tensor], {}, 0.0, ""], payload=bytes(1024))) == "layout"
