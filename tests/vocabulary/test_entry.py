from __future__ import annotations

import ctypes
from typing import Any, Literal

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_entries import KEY, entry, header

from mmcache.control.messages import MAX_INFO_BYTES
from mmcache.entry import (
    DTYPE_BYTES,
    MAX_PAYLOAD_BYTES,
    MAX_RANK,
    MAX_TENSORS,
    PREFIX_BYTES,
    TENSOR_ALIGNMENT,
    EntryHeader,
    TensorSpec,
    decode_entry,
    decode_info,
    encode_info,
    encode_prefix,
    lay_out,
    padding,
)
from mmcache.errors import CorruptEntry, InvalidEntry
from mmcache.key import EmbeddingKey

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
    | st.binary(max_size=20)
)
PLAIN = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))
TENSORS = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=8),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    max_size=5,
    unique_by=lambda tensor: tensor[0],
).filter(lambda tensors: all(ord(letter) not in range(0xD800, 0xE000) for tensor in tensors for letter in tensor[0]))
VERIFY: tuple[Literal["full", "prefix"], ...] = ("full", "prefix")


@given(
    tensors=TENSORS,
    meta=st.dictionaries(TEXT, PLAIN, max_size=4),
    mm_hash=TEXT.filter(bool),
    generation=st.integers(0, 2**63 - 1),
    cost_ms=st.floats(0, 1e9),
    producer=TEXT,
    created_ns=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_an_entry_comes_back_as_it_was_published(tensors: Any, mm_hash: str, data: st.DataObject, **rest: Any) -> None:
    key = EmbeddingKey("m", "v", mm_hash)
    specs, nbytes = lay_out(tensors)
    published = EntryHeader(key=key, tensors=specs, **rest)
    payload = data.draw(st.binary(min_size=nbytes, max_size=nbytes))
    view = memoryview(entry(published, payload))
    for verify in VERIFY:
        assert decode_entry(view, key=key, generation=published.generation, verify=verify) == published
    info = decode_info(encode_info(published))
    assert (info.tensors, info.meta) == (published.tensors, published.meta)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(TENSORS)
def test_tensors_are_laid_out_in_order_aligned_and_without_overlap(tensors: Any) -> None:
    specs, nbytes = lay_out(tensors)
    assert [(spec.name, spec.dtype, spec.shape) for spec in specs] == tensors
    taken = bytearray(nbytes)
    for spec in specs:
        assert spec.offset % TENSOR_ALIGNMENT == 0
        assert spec.nbytes == torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)).nbytes
        assert not any(taken[spec.offset : spec.offset + spec.nbytes])
        taken[spec.offset : spec.offset + spec.nbytes] = b"\1" * spec.nbytes
    for offset, size in padding(specs):
        assert not any(taken[offset : offset + size])
        taken[offset : offset + size] = b"\1" * size
    assert all(taken)
    assert [spec.offset for spec in specs] == sorted(spec.offset for spec in specs)


@pytest.mark.filterwarnings("ignore")  # torch warns of what is experimental or on its way out
def test_the_dtypes_are_all_that_torch_can_view_as_bytes() -> None:
    viewable = {}
    for name in dir(torch):
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or name.startswith("bits"):  # bits hold no values
            continue
        try:
            viewed = torch.empty(3, dtype=dtype).contiguous().clone().view(torch.uint8)
        except (RuntimeError, NotImplementedError):
            continue
        viewable[str(dtype).removeprefix("torch.")] = viewed.numel() // 3
    assert viewable == {name: size for name, size in DTYPE_BYTES.items() if hasattr(torch, name)}


def test_an_entry_without_tensors_or_with_empty_ones_is_legal() -> None:
    for tensors in ([], [("a", "float32", (0, 7))], [("a", "int8", (3,)), ("b", "bfloat16", (2, 0))]):
        published = header(tensors)
        view = memoryview(entry(published))
        assert decode_entry(view, key=KEY, generation=3, verify="full") == published


def test_an_entry_in_foreign_memory_is_read() -> None:
    data = entry()
    memory = (ctypes.c_char * len(data)).from_buffer_copy(data)
    assert decode_entry(memoryview(memory), key=KEY, generation=3, verify="full") == header()


def test_the_format_is_that_of_every_release_of_version_1() -> None:
    data = entry(header([("e", "int8", (2,))], meta={}, producer="p", cost_ms=0.5), b"\1\2")
    assert data[:6] == b"MMC1\1\0"
    assert data[8:16] == (2).to_bytes(8, "little")
    assert data[24:32] == (10**18).to_bytes(8, "little")
    length = int.from_bytes(data[6:8], "little")
    assert msgspec.msgpack.decode(data[40 : 40 + length]) == [
        ["google/siglip", "v1", "a photograph", "l1", "video", "acme"],
        3,
        [["e", "int8", [2], 0, 2]],
        {},
        0.5,
        "p",
    ]
    assert data[16:24].hex() == "0758efdd770b1308"
    assert data[32:40].hex() == "6f21a872c9f65e50"
    assert len(data) == PREFIX_BYTES + 2


@pytest.mark.parametrize("field", EmbeddingKey.__struct_fields__)
def test_an_entry_of_another_key_is_refused_and_the_field_named(field: str) -> None:
    other = msgspec.structs.replace(KEY, **{field: "other"})
    with pytest.raises(CorruptEntry, match=f"{field} differ") as refusal:
        decode_entry(memoryview(entry()), key=other, generation=3, verify="prefix")
    assert refusal.value.reason == "identity"


def test_an_entry_without_lora_is_not_the_one_with_it() -> None:
    for published, asked in ((None, "l1"), ("l1", None)):
        data = entry(header(key=msgspec.structs.replace(KEY, lora=published)))
        with pytest.raises(CorruptEntry, match="identity"):
            decode_entry(memoryview(data), key=msgspec.structs.replace(KEY, lora=asked), generation=3, verify="full")


def test_an_entry_of_another_generation_is_refused() -> None:
    for generation in (2, 4):
        with pytest.raises(CorruptEntry, match="identity: generation 3"):
            decode_entry(memoryview(entry()), key=KEY, generation=generation, verify="full")


def test_full_verification_sees_the_payload_and_prefix_verification_does_not() -> None:
    data = bytearray(entry())
    data[-1] ^= 1
    with pytest.raises(CorruptEntry, match="payload_checksum"):
        decode_entry(memoryview(data), key=KEY, generation=3, verify="full")
    assert decode_entry(memoryview(data), key=KEY, generation=3, verify="prefix") == header()


class Number(float):
    pass


@pytest.mark.parametrize(
    "value",
    [object(), (1, 2), {1, 2}, torch.zeros(1), Number(1), 2**64, -(2**63) - 1, float("nan"), float("inf"), {1: 2}],
    ids=repr,
)
def test_metadata_that_is_not_plain_data_is_refused_by_name(value: object) -> None:
    for meta in ({"fine": 1, "grid": value}, {"fine": 1, "grid": [{"deep": value}]}):
        for encode in (entry, encode_info):
            with pytest.raises(InvalidEntry, match=r"meta\['grid'\] holds"):
                encode(header(meta=meta))


def test_metadata_nested_without_end_is_refused_by_name() -> None:
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidEntry, match=r"meta\['grid'\] is nested deeper"):
        entry(header(meta={"grid": endless}))


@pytest.mark.parametrize("meta", [None, [], {1: 2}, {"\ud800": 1}, {"a": "\ud800"}], ids=ascii)
def test_metadata_that_is_no_dict_of_writable_str_is_refused(meta: object) -> None:
    with pytest.raises(InvalidEntry, match="meta"):
        entry(header(meta=meta))


def test_metadata_that_is_too_large_is_refused_and_the_largest_part_named() -> None:
    with pytest.raises(InvalidEntry, match=r"4056 fit; the largest first: meta 5\d\d\d, key "):
        entry(header(meta={"text": "x" * 5000}))
    with pytest.raises(InvalidEntry, match=r"largest first: tensors "):
        entry(header([(f"layer{index}", "int8", (1,)) for index in range(MAX_TENSORS)]))
    with pytest.raises(InvalidEntry, match=r"largest first: meta "):
        encode_info(header(meta={"text": "x" * 5000}))
    with pytest.raises(InvalidEntry, match="more than 65536 items"):
        entry(header(meta={"list": [0] * 10_000_000}))


def test_metadata_may_fill_the_prefix_to_the_last_byte() -> None:
    room = next(size for size in range(4100, 0, -1) if _fits({"text": "x" * size}))
    data = entry(header(meta={"text": "x" * room}))
    assert data[PREFIX_BYTES - 1] != 0
    assert decode_entry(memoryview(data), key=KEY, generation=3, verify="full").meta == {"text": "x" * room}
    assert len(encode_info(header(meta={"text": "x" * room}))) <= MAX_INFO_BYTES


def _fits(meta: dict[str, object]) -> bool:
    try:
        entry(header(meta=meta))
    except InvalidEntry:
        return False
    return True


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("generation", [-1, 2**63, 1.0, True]),
        ("cost_ms", [-0.5, float("nan"), float("inf"), "1"]),
        ("producer", ["x" * 129, None]),
        ("created_ns", [-1, 2**64, 1.5]),
    ],
)
def test_a_header_field_out_of_bounds_is_refused_by_name(field: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidEntry, match=field.replace("created_ns", "creation time")):
            entry(header(**{field: value}))


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (("", "int8", (1,)), "name must be"),
        (("x" * 129, "int8", (1,)), "name must be"),
        ((None, "int8", (1,)), "name must be"),
        (("a", "qint8", (1,)), "'a' has dtype 'qint8'"),
        (("a", "object", (1,)), "'a' has dtype 'object'"),
        (("a", "int8", (-1,)), "'a' has a shape"),
        (("a", "int8", (1.5,)), "'a' has a shape"),
        (("a", "int8", (True,)), "'a' has a shape"),
        (("a", "int8", (1,) * (MAX_RANK + 1)), "65 dimensions"),
        (("a", "int8", (MAX_PAYLOAD_BYTES + 1,)), "'a' of shape .* is larger"),
        (("a", "int8", (2**62, 2**62)), "'a' of shape .* is larger"),
        (("a", "int8", (0, 2**62, 2**62)), "'a' of shape .* is larger"),
    ],
    ids=str,
)
def test_a_tensor_that_no_entry_may_hold_is_refused_by_name(tensor: Any, words: str) -> None:
    with pytest.raises(InvalidEntry, match=words):
        lay_out([("first", "int8", (1,)), tensor])


def test_too_many_too_large_or_doubly_named_tensors_are_refused() -> None:
    with pytest.raises(InvalidEntry, match="257 tensors"):
        lay_out([(str(index), "int8", ()) for index in range(MAX_TENSORS + 1)])
    with pytest.raises(InvalidEntry, match=r"take \d+ bytes"):
        lay_out([("a", "int8", (MAX_PAYLOAD_BYTES,)), ("b", "int8", (1,))])
    with pytest.raises(InvalidEntry, match="two tensors are named 'a'"):
        lay_out([("a", "int8", ()), ("a", "int8", ())])


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("a", "int8", (2,), 0, 3),
        TensorSpec("a", "int8", (2,), 128, 2),
        TensorSpec("a", "int8", (2,), 256, 2),
        TensorSpec("a", "int8", (-1, -2), 0, 2),
        TensorSpec("a", "other", (2,), 0, 2),
        TensorSpec("", "int8", (2,), 0, 2),
        TensorSpec("a", "int8", (0, 1 << 40, 1 << 40), 0, 0),
    ],
    ids=str,
)
def test_what_no_reader_would_take_is_not_published(spec: TensorSpec) -> None:
    with pytest.raises(InvalidEntry):
        encode_prefix(msgspec.structs.replace(header(), tensors=(spec,)), payload_nbytes=2, payload_checksum=0)
