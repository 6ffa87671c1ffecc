"""Makes entries for the tests of their format."""

from __future__ import annotations

import struct

import msgspec
import xxhash

from mmcache.entry import PREFIX_BYTES, EntryHeader, encode_prefix, lay_out, payload_checksum
from mmcache.key import EmbeddingKey

KEY = EmbeddingKey("google/siglip", "v1", "a photograph", lora="l1", modality="video", tenant="acme")
HEAD_BYTES = 40


def header(tensors: list[tuple[str, str, tuple[int, ...]]] | None = None, **changes: object) -> EntryHeader:
    """A header as a publisher would make it."""
    specs, _ = lay_out(tensors if tensors is not None else [("embedding", "float16", (4, 6)), ("extra", "int8", (3,))])
    made = EntryHeader(
        KEY, 3, specs, {"grid_thw": [1, 2, 2], "num_tokens": 4}, cost_ms=12.5, producer="host:1", created_ns=10**18
    )
    return msgspec.structs.replace(made, **changes)


def entry(of: EntryHeader | None = None, payload: bytes | None = None) -> bytes:
    """A whole object."""
    of = of or header()
    if payload is None:
        nbytes = max((spec.offset + spec.nbytes for spec in of.tensors), default=0)
        payload = bytes(index * 7 % 251 for index in range(nbytes))
    checksum = payload_checksum(memoryview(payload))
    return encode_prefix(of, payload_nbytes=len(payload), payload_checksum=checksum) + payload


def sealed(data: bytes) -> bytes:
    """The object with a prefix checksum that is right, whatever its prefix says: what a hostile writer would do."""
    blank = data[:32] + bytes(8) + data[HEAD_BYTES:PREFIX_BYTES]
    return data[:32] + xxhash.xxh3_64_intdigest(blank).to_bytes(8, "little") + data[HEAD_BYTES:]


def with_metadata(metadata: object, *, payload: bytes = bytes(1024), version: int = 1) -> bytes:
    """An object with metadata of the test's own making and everything else in order."""
    packed = metadata if isinstance(metadata, bytes) else msgspec.msgpack.encode(metadata)
    checksum = payload_checksum(memoryview(payload))
    head = struct.pack("<4sHHQQQQ", b"MMC1", version, len(packed), len(payload), checksum, 10**18, 0)
    return sealed((head + packed).ljust(PREFIX_BYTES, b"\0") + payload)
