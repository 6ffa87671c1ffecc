"""One item of an engine's: what is wanted, where it stands, and what workers are told of it."""

from __future__ import annotations

import enum
from typing import NamedTuple

from mmcache.key import EmbeddingKey


class Phase(enum.Enum):
    """Where an item stands."""

    ASKED = "asked"
    WAITING = "waiting"
    READY = "ready"
    GRANTED = "granted"
    LOADING = "loading"
    SAVING = "saving"
    PUBLISHING = "publishing"
    MISSING = "missing"
    ENDED = "ended"
    """It is in no table but that of blocks."""


class Wanted(NamedTuple):
    """One item of one request.

    Args:
        identifier: the engine's name for it, by which it fills its encoder cache.
        key: None if it cannot be shared; then this engine encodes it for itself.
        rows: number of embeddings.
        widths: second dimensions that it may have; at least one.
        dtype: its name.
        itemsize: bytes of an element.
        end: the position in the prompt behind its last placeholder.
        encodable: whether this engine has an encoder, and the item's input.
    """

    identifier: str
    key: EmbeddingKey | None
    rows: int
    widths: tuple[int, ...]
    dtype: str
    itemsize: int
    end: int
    encodable: bool

    @property
    def nbytes(self) -> int:
        """The most bytes that it can have."""
        return self.rows * max(self.widths) * self.itemsize


class Resident(NamedTuple):
    """What an engine holds under an identifier.

    That may stand for several keys in turn: a LoRA that was reloaded under its name, a uuid under another salt.

    Args:
        key: under which it was loaded or encoded; None if it cannot be shared.
        epoch: in which that began. What is older than an invalidation must not be published after it.
    """

    key: EmbeddingKey | None
    epoch: int


class Copy(NamedTuple):
    """What a worker is to copy: between the block at `offset` and the encoder cache's `identifier`.

    `nbytes` is what a tensor to load has, and what one to save may have; `width` is 0 for the latter.
    """

    number: int
    identifier: str
    offset: int
    nbytes: int
    rows: int
    width: int
    dtype: str


class Item:
    """One key, and its block. Without a block (`offset` -1) its phase is MISSING or ENDED."""

    __slots__ = (
        "agent_holds",
        "deadline",
        "dependents",
        "epoch",
        "key",
        "number",
        "offset",
        "phase",
        "requests",
        "since",
        "source",
        "step",
        "wanted",
        "width",
    )

    def __init__(self, key: EmbeddingKey, wanted: Wanted, phase: Phase, *, requests: set[str], now: float) -> None:
        self.key = key
        self.wanted = wanted
        self.phase = phase
        self.requests = requests
        self.dependents: set[str] = set()
        """Those of them that cannot have it encoded."""
        self.number = 0
        self.offset = -1
        self.agent_holds = False
        self.step = -1
        self.since = now
        self.deadline = 0.0
        self.epoch = 0
        self.width = 0
        self.source = ""
        """Where its bytes came from; of one that is MISSING, why."""

    @property
    def nbytes(self) -> int:
        """Of its embedding, once its width is known."""
        return self.wanted.rows * self.width * self.wanted.itemsize
