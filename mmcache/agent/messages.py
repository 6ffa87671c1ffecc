"""What an engine's scheduler and its agent tell each other: msgpack arrays over a SOCK_SEQPACKET pair.

An engine asks for an item under a number of its own choice, with a block of the staging memory for its bytes. The block
is the agent's from `Ask` until the item's last word (`Ready`, `Missing`, `Published`), but for the time from `Granted`
to `Encoded`:

    Ask ──► Ready                                    its bytes are in the block, verified
        ──► Waiting ──► Ready | Granted | Missing    another engine encodes it
        ──► Granted ──► Encoded ──► Published        this engine is to encode it, into the block
        ──► Missing                                  encode it for yourself alone
    Drop  at any time; answered by Missing, unless another last word was under way.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from mmcache.key import EmbeddingKey

MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_ITEMS: Final = 64
"""Most items in one message."""

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Word = Annotated[str, msgspec.Meta(max_length=128)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Item(_Message, frozen=True):
    """One embedding that an engine wants.

    Args:
        number: the engine's name for it, never used twice.
        offset: where its block begins in the staging memory.
        nbytes: the size of its block.
        rows: how many embeddings it must have: its first dimension.
        widths: which second dimensions it may have. Empty: any that fits the block.
        dtype: of its elements, such as `bfloat16`.
        claim: whether this engine can encode it and publish the result. Without, the agent never answers `Granted`.
        wait_s: how long to wait for another engine's result, in seconds.
    """

    number: Number
    key: EmbeddingKey
    offset: Number
    nbytes: Number
    rows: Number
    widths: Annotated[list[Number], msgspec.Meta(max_length=8)]
    dtype: Word
    claim: bool
    wait_s: Annotated[float, msgspec.Meta(ge=0.0, le=3600.0)]


class Ask(_Message, frozen=True, tag=1):
    """Items of one request: read in one batch, what is missing acquired in one message."""

    items: Annotated[list[Item], msgspec.Meta(max_length=MAX_ITEMS)]


class Encoded(_Message, frozen=True, tag=2):
    """A granted item's bytes are in its block: publish them."""

    number: Number
    shape: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=8)]
    dtype: Word
    cost_ms: Annotated[float, msgspec.Meta(ge=0.0, le=3.6e6)]


class Drop(_Message, frozen=True, tag=3):
    """These are not wanted any more: give up claims and waits."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_ITEMS)]


EngineMessage = Ask | Encoded | Drop


class Started(_Message, frozen=True, tag=11):
    """The agent can serve, or has waited for that for as long as the client's `connect_timeout`."""

    pid: Number


class Ready(_Message, frozen=True, tag=12):
    """The item's bytes are in its block from the start, verified; good while the staging memory's epoch is this one."""

    number: Number
    epoch: Number
    shape: Annotated[list[Number], msgspec.Meta(min_length=1, max_length=8)]
    nbytes: Number
    source: Word
    """`local` or `store`."""


class Granted(_Message, frozen=True, tag=13):
    """This engine is to encode the item; its claim is renewed until `Encoded` or `Drop`."""

    number: Number


class Waiting(_Message, frozen=True, tag=14):
    """Another engine encodes the item; the agent waits for its result."""

    number: Number


class Missing(_Message, frozen=True, tag=15):
    """There is nothing for this item, and no claim; the reason in a word (`absent`, `deadline`, `dropped`, …)."""

    number: Number
    reason: Word


class Published(_Message, frozen=True, tag=16):
    """What became of an encoded item: `stored`, `duplicate`, or `dropped` with the reason."""

    number: Number
    status: Word
    reason: Word = ""


class Figures(_Message, frozen=True, tag=17):
    """The client's `stats()`, once a second."""

    figures: dict[Word, float]


AgentMessage = Started | Ready | Granted | Waiting | Missing | Published | Figures

encode = msgspec.msgpack.Encoder().encode
decode_engine_message = msgspec.msgpack.Decoder(EngineMessage).decode
"""Raises msgspec.MsgspecError (ValidationError, DecodeError) for anything else."""
decode_agent_message = msgspec.msgpack.Decoder(AgentMessage).decode
