"""One entry in one safetensors file, with all that it takes to publish it again, and to know whether that may be.

Of the file's metadata, `mmcache.entry` is the JSON of a `Record`, and `mmcache.xxh3` the XXH3-64, in 16 hexadecimal
digits, of that text and then of each tensor: the msgpack of its name, dtype and shape, and its bytes. So a bit that
fell over in the file is not published as somebody's embedding. The decoder trusts nothing, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from mmcache.cli.entries import files
from mmcache.cli.errors import InputError
from mmcache.entry import MAX_NAME, MAX_TENSORS, PREFIX_BYTES
from mmcache.errors import InvalidEntry
from mmcache.key import EmbeddingKey
from mmcache.memory.host import dtype_name

SUFFIX: Final = ".safetensors"
RECORD: Final = "mmcache.entry"
CHECKSUM: Final = "mmcache.xxh3"
MAX_RECORD_CHARACTERS: Final = 64 << 10
MAX_FILE_BYTES: Final = 4 << 30
"""Larger files are refused: a pool is made for the largest, and twice that is shared memory of the node."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Amount = Annotated[float, msgspec.Meta(ge=0.0, le=1e300)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says of its entry."""

    format: Literal[1]
    key: EmbeddingKey
    lineage: Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9]{1,32}\Z")]
    """Of the controller in whose world it was published."""
    generation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    """The sequence number up to which nothing had invalidated it; a later one that matches makes it worthless."""
    tensors: Annotated[tuple[_Name, ...], msgspec.Meta(min_length=1, max_length=MAX_TENSORS)]
    """Their names in the entry's order, which the file does not keep."""
    cost_ms: _Amount
    """What encoding it cost."""
    created: _Amount
    """When it was published; seconds since 1970."""
    uses: _Amount
    """Hits that were known of it when it was exported."""
    meta: Annotated[bytes, msgspec.Meta(max_length=PREFIX_BYTES)]
    """The msgpack of its metadata; in JSON, base64 of that."""


class EmbeddingFile(NamedTuple):
    """An export, read and checked."""

    record: Record
    tensors: dict[str, torch.Tensor]
    meta: dict[str, object]


class Peek(NamedTuple):
    """What a file says of itself. `record` is None where it is sound, and no export; `nbytes` its size."""

    record: Record | None
    metadata: dict[str, str]
    nbytes: int


_ERRORS: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_record_decoder = msgspec.json.Decoder(Record)
_meta_decoder = msgspec.msgpack.Decoder(dict[str, object])


def packed(meta: Mapping[str, object]) -> bytes:
    """An entry's metadata as a `Record` holds it."""
    return msgspec.msgpack.encode(dict(meta))


def encode(record: Record, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """The file of an entry.

    Raises:
        InvalidEntry: no file that `decode` takes can hold it; the message says why.
    """
    if "__metadata__" in tensors:
        raise InvalidEntry("a tensor is named '__metadata__', which a safetensors file cannot hold")
    text = msgspec.json.encode(record).decode()
    checksum = _checksum(text, {name: tensors[name] for name in record.tensors})
    try:
        _record_of({RECORD: text})  # so that nothing is written that its readers would refuse
        return save(dict(tensors), metadata={RECORD: text, CHECKSUM: checksum})
    except (ValueError, RuntimeError, KeyError, SafetensorError) as error:  # whichever this release says it by
        raise InvalidEntry(f"no safetensors file can hold it: {error}") from error


def peek(path: Path) -> Peek:
    """Look at a file, and read no tensor.

    Raises:
        InputError: it is no safetensors file, truncated, too large, or an export that is damaged.
    """
    files.check_regular(path)
    try:
        if (nbytes := path.stat().st_size) > MAX_FILE_BYTES:
            raise InputError(f"{path}: has {nbytes:,} bytes; at most {MAX_FILE_BYTES:,} are read")
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as a safetensors file: {error}") from error
    try:
        return Peek(_record_of(metadata), metadata, nbytes)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def read(path: Path, record: Record) -> EmbeddingFile:
    """An export that was looked at before. Raises InputError, which names the file and what is wrong with it."""
    contents = files.read(path)
    try:
        found = decode(contents)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    if found.record != record:
        raise InputError(f"{path}: was replaced meanwhile: run it again")
    return found


def decode(contents: files.Contents) -> EmbeddingFile:
    """What a safetensors file holds, as an export. Raises ValueError, which says what is wrong with it."""
    record = _record_of(contents.metadata)
    if record is None:
        raise ValueError("is no export: `mmcache warm` and `mmcache put` take such files")
    if sorted(record.tensors) != sorted(contents.tensors):
        raise ValueError(f"its tensors are not those that {RECORD} names")
    tensors = {name: contents.tensors[name] for name in record.tensors}
    if _checksum(contents.metadata[RECORD], tensors) != contents.metadata.get(CHECKSUM):
        raise ValueError("is damaged: what it holds is not what was exported. Export it again, or remove the file")
    try:
        meta = _meta_decoder.decode(record.meta)
    except _ERRORS as error:
        raise ValueError(f"meta in {RECORD} cannot be read: {error}") from error
    return EmbeddingFile(record, tensors, meta)


def _record_of(metadata: Mapping[str, str]) -> Record | None:
    """Raises ValueError."""
    if (text := metadata.get(RECORD)) is None:
        return None
    if len(text) > MAX_RECORD_CHARACTERS:
        raise ValueError(
            f"{RECORD} in its metadata has {len(text):,} characters; {MAX_RECORD_CHARACTERS:,} are allowed"
        )
    try:
        return _record_decoder.decode(text)
    except _ERRORS as error:
        raise ValueError(f"{RECORD} in its metadata is no record of an entry: {error}") from error


def _checksum(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = xxhash.xxh3_64(text.encode())
    for name, tensor in tensors.items():
        hasher.update(msgspec.msgpack.encode((name, dtype_name(tensor.dtype), tuple(tensor.shape))))
        hasher.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()
