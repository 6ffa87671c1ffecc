"""What an entry looks like in the store (format 1): one immutable object, a 4,096-byte prefix and then the payload.

The prefix is a fixed head, msgpack metadata and zeros, all numbers little-endian:

    bytes  0-3    magic `MMC1`
           4-5    format version
           6-7    length of the metadata
           8-15   length of the payload
          16-23   XXH3-64 of the payload
          24-31   creation time, ns since the epoch
          32-39   XXH3-64 of the whole prefix with this field zero
          40-     [key, generation, tensors, meta, cost_ms, producer]

The payload holds the tensors' bytes in order, C-contiguous, each at a multiple of 256 bytes. The decoder trusts
nothing: whatever is in doubt is a `CorruptEntry` with a reason, and never another exception. Checksums find accidents;
identity is the whole key and generation, compared field by field.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Final, Literal

import msgspec
import xxhash

from mmcache.errors import CorruptEntry, InvalidEntry, InvalidKey
from mmcache.key import EmbeddingKey
from mmcache.plain import plain_fault

PREFIX_BYTES: Final = 4096
TENSOR_ALIGNMENT: Final = 256
MAX_PAYLOAD_BYTES: Final = 1 << 40
MAX_TENSORS: Final = 256
MAX_RANK: Final = 64
"""As many dimensions as torch and numpy can copy."""
MAX_NAME: Final = 128
"""Longest name of a tensor and of a producer, in characters."""

DTYPE_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "bool": 1,
        "uint8": 1,
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "int8": 1,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float4_e2m1fn_x2": 1,  # two values an element, as torch counts
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "complex64": 8,
        "complex128": 16,
    }
)
"""Every dtype that an entry may hold, by torch's name, and its bytes an element."""

_MAGIC: Final = b"MMC1"
_FORMAT_VERSION: Final = 1
_HEAD: Final = struct.Struct("<4sHHQQQQ")
_CHECKSUM_FIELD: Final = slice(32, 40)
_METADATA_ROOM: Final = PREFIX_BYTES - _HEAD.size
_U63_MAX: Final = (1 << 63) - 1

_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_PAYLOAD_BYTES)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One named tensor of an entry: its dtype by torch's name, shape, and place in the payload in bytes."""

    name: _Name
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=MAX_RANK)]
    offset: _Size
    nbytes: _Size


_Tensors = Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]


class EntryHeader(msgspec.Struct, frozen=True):
    """What an entry's prefix says of it."""

    key: EmbeddingKey
    generation: int
    tensors: tuple[TensorSpec, ...]
    meta: dict[str, object]
    """Free plain data (see `mmcache.plain`): `grid_thw`, `num_tokens`, …"""
    cost_ms: float
    """What the encoding took."""
    producer: str
    """A label for people."""
    created_ns: int
    """Nanoseconds since the epoch on the producer's clock."""


class EntryInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The part of a header that the controller keeps for those who ask before they read."""

    tensors: _Tensors
    meta: dict[str, object]


class _Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: tuple[str, str, str, str | None, str, str]
    """The fields of EmbeddingKey in their order; not the class, since they are compared and not used."""
    generation: Annotated[int, msgspec.Meta(ge=0, le=_U63_MAX)]
    tensors: _Tensors
    meta: dict[str, object]
    cost_ms: float
    producer: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


_encoder = msgspec.msgpack.Encoder()
_metadata_decoder = msgspec.msgpack.Decoder(_Metadata)
_info_decoder = msgspec.msgpack.Decoder(EntryInfo)
_DECODE_ERRORS: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)  # the second: older msgspec


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[tuple[TensorSpec, ...], int]:
    """Places tensors, given as (name, dtype, shape), one after another at aligned offsets.

    Returns:
        Their specs, and the payload's length in bytes. Whoever fills the payload clears what `padding` names.

    Raises:
        InvalidEntry: a name, dtype or shape that no entry may hold, or too much of it; the message names the tensor.
    """
    if len(tensors) > MAX_TENSORS:
        raise InvalidEntry(f"{len(tensors)} tensors; an entry may hold {MAX_TENSORS}")
    specs: list[TensorSpec] = []
    names: set[str] = set()
    end = 0
    for name, dtype, shape in tensors:
        if type(name) is not str or not 1 <= len(name) <= MAX_NAME:
            raise InvalidEntry(f"a tensor's name must be a str of 1 to {MAX_NAME} characters, got {str(name)[:160]!r}")
        if name in names:
            raise InvalidEntry(f"two tensors are named {name!r}")
        names.add(name)
        if dtype not in DTYPE_BYTES:
            raise InvalidEntry(f"tensor {name!r} has dtype {dtype!r}, which an entry cannot hold")
        if len(shape) > MAX_RANK:
            raise InvalidEntry(f"tensor {name!r} has {len(shape)} dimensions; an entry may hold {MAX_RANK}")
        if not all(type(size) is int and size >= 0 for size in shape):
            raise InvalidEntry(f"tensor {name!r} has a shape that is not of ints from 0 up: {tuple(shape)!r}")
        if _span(dtype, shape) > MAX_PAYLOAD_BYTES:
            raise InvalidEntry(f"tensor {name!r} of shape {tuple(shape)!r} is larger than {MAX_PAYLOAD_BYTES} bytes")
        offset = _aligned(end)
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        specs.append(TensorSpec(name, dtype, tuple(shape), offset, end - offset))
    if end > MAX_PAYLOAD_BYTES:
        raise InvalidEntry(f"the tensors take {end} bytes; an entry may hold {MAX_PAYLOAD_BYTES}")
    return tuple(specs), end


def padding(tensors: Sequence[TensorSpec]) -> list[tuple[int, int]]:
    """The payload's gaps before tensors, as (offset, nbytes): to be cleared, lest a reused block's old bytes go out."""
    gaps: list[tuple[int, int]] = []
    end = 0
    for spec in tensors:
        if spec.offset > end:
            gaps.append((end, spec.offset - end))
        end = spec.offset + spec.nbytes
    return gaps


def payload_checksum(view: memoryview) -> int:
    """XXH3-64 of a payload: for accidents, never for identity."""
    return xxhash.xxh3_64_intdigest(view)


def encode_prefix(header: EntryHeader, *, payload_nbytes: int, payload_checksum: int) -> bytes:
    """The 4,096 bytes that stand before a payload of `payload_nbytes`.

    Raises:
        InvalidEntry: the metadata is too large, not plain data, or does not fit the payload; the message says which.
    """
    if fault := _header_fault(header):
        raise InvalidEntry(fault)
    metadata = _packed(
        (
            msgspec.structs.astuple(header.key),
            header.generation,
            header.tensors,
            header.meta,
            header.cost_ms,
            header.producer,
        )
    )
    if len(metadata) > _METADATA_ROOM:
        raise InvalidEntry(_too_large(header, len(metadata)))
    prefix = bytearray(PREFIX_BYTES)
    try:
        _HEAD.pack_into(
            prefix, 0, _MAGIC, _FORMAT_VERSION, len(metadata), payload_nbytes, payload_checksum, header.created_ns, 0
        )
    except struct.error as error:
        raise InvalidEntry(f"payload length, its checksum or creation time is not a 64-bit number: {error}") from error
    prefix[_HEAD.size : _HEAD.size + len(metadata)] = metadata
    prefix[_CHECKSUM_FIELD] = xxhash.xxh3_64_intdigest(prefix).to_bytes(8, "little")
    try:
        _decode_prefix(prefix[:], payload_nbytes)  # so that nothing is published that its readers would refuse
    except CorruptEntry as error:
        raise InvalidEntry(f"no reader would take this entry: {error}") from error
    return bytes(prefix)


def decode_entry(
    view: memoryview, *, key: EmbeddingKey, generation: int, verify: Literal["full", "prefix"]
) -> EntryHeader:
    """Checks that `view` is exactly the entry of `key` at `generation`, and reads its header.

    Args:
        view: the object's bytes, all of them and no more.
        key: whose entry it must be; the header carries this very object.
        generation: the generation that it must have been published under.
        verify: `full` also compares the payload with its checksum, which reads all of it.

    Raises:
        CorruptEntry: any doubt at all; nothing else is raised, whatever the bytes.
    """
    if view.nbytes < PREFIX_BYTES:
        raise CorruptEntry("length", f"{view.nbytes} bytes, less than a prefix")
    metadata, checksum, created_ns = _decode_prefix(bytearray(view[:PREFIX_BYTES]), view.nbytes - PREFIX_BYTES)
    if metadata.key != msgspec.structs.astuple(key):
        raise CorruptEntry("identity", _difference(metadata.key, key))
    if metadata.generation != generation:
        raise CorruptEntry("identity", f"generation {metadata.generation}, not {generation}")
    if verify != "prefix" and payload_checksum(view[PREFIX_BYTES:]) != checksum:
        raise CorruptEntry("payload_checksum", "the payload's bytes are not those that were published")
    return _header(key, metadata, created_ns)


def decode_prefix(prefix: bytes, nbytes: int) -> EntryHeader:
    """The header of an object of so many bytes, for whoever does not know whose entry it is.

    Raises:
        CorruptEntry: it is no entry's prefix; nothing else is raised, whatever the bytes.
    """
    if len(prefix) != PREFIX_BYTES or nbytes < PREFIX_BYTES:
        raise CorruptEntry("length", f"{len(prefix)} of {nbytes} bytes are no prefix")
    metadata, _, created_ns = _decode_prefix(bytearray(prefix), nbytes - PREFIX_BYTES)
    try:
        key = EmbeddingKey(*metadata.key)
    except InvalidKey as error:
        raise CorruptEntry("identity", str(error)) from error
    return _header(key, metadata, created_ns)


def encode_info(header: EntryHeader) -> bytes:
    """The header's tensors and meta for the directory; shorter than the prefix. Raises InvalidEntry."""
    if fault := _meta_fault(header.meta):
        raise InvalidEntry(fault)
    info = _packed(EntryInfo(header.tensors, header.meta))
    if len(info) > _METADATA_ROOM:
        raise InvalidEntry(_too_large(header, len(info)))
    return info


def decode_info(data: bytes) -> EntryInfo:
    """Reads what `encode_info` wrote. Raises CorruptEntry for anything else."""
    if len(data) > _METADATA_ROOM:
        raise CorruptEntry("length", f"{len(data)} bytes of info; at most {_METADATA_ROOM} are read")
    try:
        info = _info_decoder.decode(data)
    except _DECODE_ERRORS as error:
        raise CorruptEntry("metadata", str(error)) from error
    _check_contents(info.tensors, info.meta, MAX_PAYLOAD_BYTES)
    return info


def _header(key: EmbeddingKey, metadata: _Metadata, created_ns: int) -> EntryHeader:
    return EntryHeader(
        key,
        metadata.generation,
        metadata.tensors,
        metadata.meta,
        metadata.cost_ms,
        metadata.producer,
        created_ns,
    )


def _decode_prefix(prefix: bytearray, payload_nbytes: int) -> tuple[_Metadata, int, int]:
    """Metadata, payload checksum and creation time from a private copy of a prefix, which is changed."""
    magic, version, metadata_nbytes, stated_nbytes, checksum, created_ns, prefix_checksum = _HEAD.unpack_from(prefix)
    if magic != _MAGIC:
        raise CorruptEntry("magic", f"{magic!r} where {_MAGIC!r} should be")
    if version != _FORMAT_VERSION:
        raise CorruptEntry("version", f"format {version}; this release reads {_FORMAT_VERSION}")
    prefix[_CHECKSUM_FIELD] = bytes(8)
    if xxhash.xxh3_64_intdigest(prefix) != prefix_checksum:
        raise CorruptEntry("prefix_checksum", "the prefix's bytes are not those that were published")
    if stated_nbytes != payload_nbytes:
        raise CorruptEntry("length", f"{payload_nbytes} bytes of payload; the prefix says {stated_nbytes}")
    end = _HEAD.size + metadata_nbytes
    if end > PREFIX_BYTES or prefix[end:] != bytes(PREFIX_BYTES - end):
        raise CorruptEntry("metadata", "it does not end within the prefix, or is not followed by zeros alone")
    try:
        metadata = _metadata_decoder.decode(prefix[_HEAD.size : end])
    except _DECODE_ERRORS as error:
        raise CorruptEntry("metadata", str(error)) from error
    if not 0 <= metadata.cost_ms < math.inf:
        raise CorruptEntry("metadata", f"cost_ms is {metadata.cost_ms}")
    _check_contents(metadata.tensors, metadata.meta, payload_nbytes)
    return metadata, checksum, created_ns


def _check_contents(tensors: tuple[TensorSpec, ...], meta: dict[str, object], payload_nbytes: int) -> None:
    if meta and (fault := _meta_fault(meta)):
        raise CorruptEntry("metadata", fault)
    if fault := _layout_fault(tensors, payload_nbytes):
        raise CorruptEntry("layout", fault)


def _aligned(offset: int) -> int:
    return -(-offset // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def _span(dtype: str, shape: Sequence[int]) -> int:
    """Bytes as if no dimension were 0: what torch must be able to compute strides for."""
    return math.prod(size or 1 for size in shape) * DTYPE_BYTES[dtype]


def _layout_fault(tensors: Sequence[TensorSpec], payload_nbytes: int) -> str | None:
    """Why tensors, whose fields the decoder has bounded, are not a layout of this payload; None if they are."""
    end = 0
    for spec in tensors:
        itemsize = DTYPE_BYTES.get(spec.dtype)
        if itemsize is None:
            return f"tensor {spec.name!r} has the unknown dtype {spec.dtype!r}"
        if spec.nbytes != math.prod(spec.shape) * itemsize:
            return f"tensor {spec.name!r} of {spec.dtype} {spec.shape} does not take {spec.nbytes} bytes"
        if not spec.nbytes and _span(spec.dtype, spec.shape) > MAX_PAYLOAD_BYTES:
            return f"tensor {spec.name!r} has the absurd shape {spec.shape}"
        if spec.offset % TENSOR_ALIGNMENT or spec.offset < end:
            return f"tensor {spec.name!r} at {spec.offset} is not aligned, or begins before the one before it ends"
        end = spec.offset + spec.nbytes
    if end > payload_nbytes:
        return f"the tensors take {end} bytes, more than the payload's {payload_nbytes}"
    if len({spec.name for spec in tensors}) != len(tensors):
        return "two tensors have one name"
    return None


def _header_fault(header: EntryHeader) -> str | None:
    if type(header.generation) is not int or not 0 <= header.generation <= _U63_MAX:
        return f"generation must be an int from 0 up, got {header.generation!r}"
    if type(header.cost_ms) not in (int, float) or not 0 <= header.cost_ms < math.inf:
        return f"cost_ms must be a finite number from 0 up, got {header.cost_ms!r}"
    if type(header.producer) is not str or len(header.producer) > MAX_NAME:
        return f"producer must be a str of at most {MAX_NAME} characters, got {str(header.producer)[:160]!r}"
    return _meta_fault(header.meta)


def _meta_fault(meta: object) -> str | None:
    if type(meta) is not dict:
        return f"meta must be a dict, not {type(meta).__name__}"
    fault = plain_fault(meta)
    if fault is None:
        return None
    for name, value in meta.items():  # which it was, for the message
        if value_fault := plain_fault(value):
            return f"meta[{name!r:.80}] {value_fault}"
    return f"meta {fault}"


def _packed(value: object) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError) as error:  # a lone surrogate is a ValueError
        raise InvalidEntry(f"the metadata cannot be written: {error}") from error


def _too_large(header: EntryHeader, nbytes: int) -> str:
    parts = {"key": header.key, "tensors": header.tensors, "meta": header.meta, "producer": header.producer}
    sizes = sorted(((len(_encoder.encode(part)), name) for name, part in parts.items()), reverse=True)
    listed = ", ".join(f"{name} {size}" for size, name in sizes)
    return f"the metadata takes {nbytes} bytes and {_METADATA_ROOM} fit; the largest first: {listed}"


def _difference(found: tuple[str | None, ...], key: EmbeddingKey) -> str:
    expected = msgspec.structs.asdict(key)
    names = [name for name, value in zip(expected, found, strict=True) if value != expected[name]]
    return f"it is another key's entry: {', '.join(names)} differ"
