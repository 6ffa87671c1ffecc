"""The file of an exported entry: what is written comes back, and whatever else is in a file is refused by its name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from commands import safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from mmcache import EmbeddingKey
from mmcache.cli.errors import InputError
from mmcache.cli.warm import embedding_file
from mmcache.cli.warm.embedding_file import CHECKSUM, RECORD, Record
from mmcache.errors import InvalidEntry

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
fields = st.text(st.sampled_from("abc/.-_019"), min_size=1, max_size=20)
amounts = st.floats(min_value=0.0, max_value=1e300)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
keys = st.builds(
    EmbeddingKey,
    model=fields,
    version=fields,
    mm_hash=names,
    lora=st.none() | fields,
    modality=fields,
    tenant=fields,
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(dtypes)
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.arange(count).remainder(2).eq(draw(st.integers(0, 1))).reshape(shape)
    data = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    return (torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)).reshape(shape)


@st.composite
def entries(draw: st.DrawFn) -> tuple[Record, dict[str, torch.Tensor], dict[str, object]]:
    named = draw(st.dictionaries(names, tensors(), min_size=1, max_size=3))
    meta = draw(st.dictionaries(st.text(max_size=8), plain, max_size=3))
    record = Record(
        format=1,
        key=draw(keys),
        lineage=draw(st.text(st.sampled_from("abc019"), min_size=1, max_size=32)),
        generation=draw(st.integers(0, (1 << 63) - 1)),
        tensors=tuple(named),
        cost_ms=draw(amounts),
        created=draw(amounts),
        uses=draw(amounts),
        meta=embedding_file.packed(meta),
    )
    return record, named, meta


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8).tolist()


def take(content: bytes) -> embedding_file.EmbeddingFile:
    """What an import makes of a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "some.safetensors")
        path.write_bytes(content)
        try:
            peek = embedding_file.peek(path)
            if peek.record is None:
                raise InputError(f"{path}: is no export")
            found = embedding_file.read(path, peek.record)
        except InputError as error:
            if str(path) not in str(error):
                raise AssertionError(f"the message does not name the file: {error}") from error
            raise
        tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        return found._replace(tensors=tensors)


def assert_same(
    found: embedding_file.EmbeddingFile, entry: tuple[Record, dict[str, torch.Tensor], dict[str, object]]
) -> None:
    record, named, meta = entry
    assert (found.record, found.meta, list(found.tensors)) == (record, meta, list(named))
    assert [bits(tensor) for tensor in found.tensors.values()] == [bits(tensor) for tensor in named.values()]


@settings(max_examples=60)
@given(entries())
def test_what_is_written_comes_back(entry: tuple[Record, dict[str, torch.Tensor], dict[str, object]]) -> None:
    assert_same(take(embedding_file.encode(entry[0], entry[1])), entry)


@settings(max_examples=120)
@given(entries(), st.data())
def test_a_bit_that_fell_over_is_never_another_entry(
    entry: tuple[Record, dict[str, torch.Tensor], dict[str, object]], data: st.DataObject
) -> None:
    content = bytearray(embedding_file.encode(entry[0], entry[1]))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = take(bytes(content))
    except InputError:
        return
    assert_same(found, entry)  # it fell over in a blank of the header


@settings(max_examples=60)
@given(entries(), st.data())
def test_a_truncated_file_is_refused(
    entry: tuple[Record, dict[str, torch.Tensor], dict[str, object]], data: st.DataObject
) -> None:
    content = embedding_file.encode(entry[0], entry[1])
    with pytest.raises(InputError):
        take(content[: data.draw(st.integers(0, len(content) - 1))])


@settings(max_examples=60)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_at_all_are_refused(content: bytes, framed: bool) -> None:
    with pytest.raises(InputError):
        take(safetensors_bytes(content) if framed else content)


GOOD: dict[str, Any] = {
    "format": 1,
    "key": {"model": "m", "version": "1", "mm_hash": "h", "lora": None, "modality": "image", "tenant": "t"},
    "lineage": "abc",
    "generation": 7,
    "tensors": ["embedding"],
    "cost_ms": 1.5,
    "created": 0,
    "uses": 0,
    "meta": "gA==",
}


def forged(text: str) -> bytes:
    """A file that says of itself what it likes, with a checksum that fits."""
    tensors = {"embedding": torch.zeros(2)}
    return save(tensors, {RECORD: text, CHECKSUM: embedding_file._checksum(text, tensors)})


def test_the_good_record_below_is_taken() -> None:
    assert take(forged(msgspec.json.encode(GOOD).decode())).record.generation == 7


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.pop(name)


def saying(**more: object) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.update(more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (saying(format=2), "Invalid enum value 2 - at `$.format`"),
        (saying(more=1), "unknown field `more`"),
        (without("generation"), "missing required field `generation`"),
        (saying(generation=-1), ">= 0 - at `$.generation`"),
        (saying(generation=1 << 63), "$.generation"),
        (saying(generation=1.5), "$.generation"),
        (saying(generation=True), "$.generation"),
        (saying(cost_ms=-1.0), ">= 0.0 - at `$.cost_ms`"),
        (saying(cost_ms="1"), "$.cost_ms"),
        (saying(lineage="../../etc"), "$.lineage"),
        (saying(lineage="abc\n"), "$.lineage"),
        (saying(key=GOOD["key"] | {"model": "m" * 257}), "model has 257 characters; at most 256 are allowed"),
        (saying(key=GOOD["key"] | {"tenant": ""}), "tenant must not be empty"),
        (saying(key=GOOD["key"] | {"weights": "w"}), "unknown field `weights`"),
        (saying(tensors=[]), "$.tensors"),
        (saying(tensors=["embedding", "embedding"]), "its tensors are not those"),
        (saying(tensors=["other"]), "its tensors are not those"),
        (saying(meta="no base64!"), "$.meta"),
        (saying(meta="gIA="), "meta in mmcache.entry cannot be read"),
        (saying(meta="kA=="), "meta in mmcache.entry cannot be read"),
        (saying(meta="A" * 8192), "$.meta"),
        (saying(lineage="a" * (1 << 17)), "has 131,2"),
    ],
)
def test_a_record_that_says_what_none_may_say_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    record = dict(GOOD)
    change(record)
    with pytest.raises(InputError) as caught:
        take(forged(msgspec.json.encode(record).decode()))
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "7", "[]", "{" * 5000, '{"format":1e999}', '{"cost_ms":NaN}'])
def test_a_record_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no record of an entry"):
        take(forged(text))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.truncate(embedding_file.MAX_FILE_BYTES + 1)
    with pytest.raises(InputError, match=r"huge.safetensors: has 4,294,967,297 bytes; at most"):
        embedding_file.peek(path)


@pytest.mark.parametrize("name", ["__metadata__", "fine"])
def test_what_no_file_can_hold_is_refused_when_it_is_written(name: str) -> None:
    record = msgspec.convert(GOOD | {"tensors": [name], "meta": b""}, Record)
    dtype = torch.complex128 if name == "fine" else torch.float32
    with pytest.raises(InvalidEntry):
        embedding_file.encode(record, {name: torch.zeros(2, dtype=dtype)})
