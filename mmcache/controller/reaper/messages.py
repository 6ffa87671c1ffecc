"""What the controller and its reaper's child tell each other: msgpack arrays over a SOCK_SEQPACKET pair.

Attach ──► Attached | Failed, and the child ends        once, at first
Remove ──► Removed                                      one at a time
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from mmcache.config import StoreSettings
from mmcache.controller.removals import BATCH
from mmcache.store.base import Outcome

MAX_MESSAGE_BYTES: Final = 128 << 10
MAX_REASON: Final = 1024

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


ToChild = Attach | Remove


class Attached(_Message, frozen=True, tag=11):
    """It is attached, as `sidecar` or `embedded`."""

    kind: Annotated[str, msgspec.Meta(max_length=32)]


class Failed(_Message, frozen=True, tag=12):
    """It could not attach."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class Removed(_Message, frozen=True, tag=13):
    """What became of each, in their order."""

    number: Number
    outcomes: Annotated[list[Outcome], msgspec.Meta(min_length=1, max_length=BATCH)]


FromChild = Attached | Failed | Removed

encode = msgspec.msgpack.Encoder().encode
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
"""Raises msgspec.MsgspecError (ValidationError, DecodeError), or ValueError, for anything else."""
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
