"""What the controller and its reaper's child tell each other: msgpack arrays over a SOCK_SEQPACKET pair.

Attach ──► Attached | Failed, and the child ends        once, before any Remove
Remove ──► Removed
List   ──► Listed, Listed, …, and at last Listed with `last`, or Failed
Describe ► Described, … until all are, or Failed        after Attach
Renew  ──► Renewed                                      after Attach

One is asked at a time, but for Describe: up to MOST_DESCRIBES may be asked and not answered, and answers come in order.
Failed answers all of them that were asked, or none: the parent cannot know, and ends the child.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from mmcache.config import StoreSettings
from mmcache.control.messages import Commitment
from mmcache.controller.reconciliation import MOST_RECORDS, RECORD
from mmcache.controller.removals import BATCH
from mmcache.entry import MAX_NAME
from mmcache.store.base import Outcome

MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_REASON: Final = 1024
MOST_DESCRIBES: Final = 4
"""Fewer bytes than a socket holds, should none be received yet."""

Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
StoreName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class _Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Attach(_Message, frozen=True, tag=1):
    """Where the store is."""

    store: StoreSettings


class Remove(_Message, frozen=True, tag=2):
    """Remove these, without force."""

    number: Number
    names: Annotated[list[StoreName], msgspec.Meta(min_length=1, max_length=BATCH)]


class List(_Message, frozen=True, tag=3):
    """List the names of a lineage."""

    number: Number
    metrics: Annotated[str, msgspec.Meta(max_length=512)]
    """`host:port` of the master's HTTP port."""
    lineage: Annotated[str, msgspec.Meta(max_length=32)]


class Describe(_Message, frozen=True, tag=4):
    """Tell what these objects are, at least one, as `reconciliation.RECORD` has their names."""

    number: Number
    lineage: Annotated[str, msgspec.Meta(max_length=32)]
    records: Annotated[bytes, msgspec.Meta(min_length=RECORD.size, max_length=BATCH * RECORD.size)]


class Renew(_Message, frozen=True, tag=5):
    """Give each of these that is there a new lease."""

    number: Number
    names: Annotated[list[StoreName], msgspec.Meta(min_length=1, max_length=BATCH)]


ToChild = Attach | Remove | List | Describe | Renew


class Attached(_Message, frozen=True, tag=11):
    """It is attached, as `sidecar` or `embedded`."""

    kind: Annotated[str, msgspec.Meta(max_length=32)]


class Failed(_Message, frozen=True, tag=12):
    """It could not attach, not list all, or not describe."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class Removed(_Message, frozen=True, tag=13):
    """What became of each, in their order."""

    number: Number
    outcomes: Annotated[list[Outcome], msgspec.Meta(min_length=1, max_length=BATCH)]


class Listed(_Message, frozen=True, tag=14):
    """Some of the names, as `reconciliation.RECORD` has them."""

    number: Number
    records: Annotated[bytes, msgspec.Meta(max_length=MOST_RECORDS * RECORD.size)]
    last: bool


class Description(_Message, frozen=True):
    """An entry, by its prefix; `created_ns` is nanoseconds since the epoch on its producer's clock."""

    entry: Commitment
    producer: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    created_ns: int


class Described(_Message, frozen=True, tag=15):
    """The next of them, in their order; None for one that is not there, or no entry under its own name."""

    number: Number
    entries: Annotated[list[Description | None], msgspec.Meta(min_length=1, max_length=BATCH)]


class Renewed(_Message, frozen=True, tag=16):
    """What became of each, in their order: OK, NOT_FOUND, or why nobody knows."""

    number: Number
    outcomes: Annotated[list[Outcome], msgspec.Meta(min_length=1, max_length=BATCH)]


FromChild = Attached | Failed | Removed | Listed | Described | Renewed

encode = msgspec.msgpack.Encoder().encode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
"""Raises msgspec.MsgspecError (ValidationError, DecodeError), or ValueError, for anything else."""
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
