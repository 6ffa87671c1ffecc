"""What the demo's processes say to each other: one JSON object a line over pipes, strictly decoded."""

from __future__ import annotations

from typing import Literal

import msgspec

from mmcache.key import EmbeddingKey

Source = Literal["local", "store", "computed"]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all lines; the tag is the class's name."""


# To a process


class Encode(_Line, frozen=True, tag=True):
    """To an encoder or the reference: the embedding of this photograph is wanted."""

    request: int
    path: str
    mm_hash: str


class Read(_Line, frozen=True, tag=True):
    """To a prefill process: read what an encoder answered for. The key travels; nobody derives it twice."""

    request: int
    key: EmbeddingKey


class Finish(_Line, frozen=True, tag=True):
    """Answer what is still open, say `Finished` and end."""


Command = Encode | Read | Finish

# From a process


class Ready(_Line, frozen=True, tag=True):
    """Loaded and attached."""


class Served(_Line, frozen=True, tag=True):
    """An embedding was had. `elapsed_ms` is the whole call, `encode_ms` the encoder's pass if this request ran one."""

    request: int
    key: EmbeddingKey
    source: Source
    elapsed_ms: float
    encode_ms: float | None
    nbytes: int
    digest: str
    """Over its dtype, shape and bytes."""


class Missed(_Line, frozen=True, tag=True):
    """A prefill process read nothing."""

    request: int
    key: EmbeddingKey


class Failed(_Line, frozen=True, tag=True):
    """A request raised."""

    request: int
    error: str


class Finished(_Line, frozen=True, tag=True):
    """The last line: what the process's cache counted."""

    counters: dict[str, int]


Answer = Ready | Served | Missed | Failed | Finished
RequestAnswer = Served | Missed | Failed

_encoder = msgspec.json.Encoder()
_command_decoder = msgspec.json.Decoder(Command)
_answer_decoder = msgspec.json.Decoder(Answer)


def encode_line(message: Command | Answer) -> bytes:
    """The message with its newline."""
    return _encoder.encode(message) + b"\n"


def decode_command(line: bytes) -> Command:
    """Raises msgspec.MsgspecError."""
    return _command_decoder.decode(line)


def decode_answer(line: bytes) -> Answer:
    """Raises msgspec.MsgspecError."""
    return _answer_decoder.decode(line)
