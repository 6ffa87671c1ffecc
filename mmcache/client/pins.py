"""Pinning, from a client: asked for until there is an answer, since to ask again changes nothing."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

from mmcache.control.channel import ControlChannel
from mmcache.control.messages import (
    MAX_BATCH,
    MAX_MESSAGE_BYTES,
    MAX_PIN_MS,
    MAX_REASON,
    Pin,
    PinnedKeys,
    PinSubject,
    encode,
)
from mmcache.errors import ControllerUnavailable, DeadlineExceeded, InvalidKey, PinRefused
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

_TRY_SECONDS: Final = 5.0
"""How long one question may take, which may be to look at all entries, before it is asked again."""
_PAUSE_S: Final = 0.05

_NOTHING: Final = PinSubject(None, [])

Pinnable = Selector | EmbeddingKey | Sequence[EmbeddingKey]
"""What is to be pinned: a selector, or keys."""
_Answer = TypeVar("_Answer")


class Pinned(NamedTuple):
    """What is pinned.

    Args:
        lineage, ids: names of the pins: one for a selector, else one for each key, in their order. The lineage is the
            controller's.
        entries: how many entries that the controller knows match.
        nbytes: how large they are in the store.
        until: when the first of the pins ends, in seconds since 1970 on this machine's clock.
    """

    lineage: str
    ids: tuple[int, ...]
    entries: int
    nbytes: int
    until: float


def pin(channel: ControlChannel, what: Pinnable, *, ttl: float, reason: str, deadline: float) -> Pinned:
    """Pin something. Raises InvalidKey, ValueError, PinRefused, ControllerUnavailable or DeadlineExceeded."""
    subject = _subject(what)
    if subject.selector is not None and not subject.selector.fields():
        raise InvalidKey("an empty selector matches every entry, and to pin all is to pin nothing: give a field")
    if len(reason) > MAX_REASON:
        raise InvalidKey(f"reason has {len(reason)} characters; at most {MAX_REASON} are allowed")
    ttl_ms = milliseconds_of(ttl)
    nbytes = len(encode(Pin(0, 0, 0, subject, ttl_ms, reason)))
    if nbytes > MAX_MESSAGE_BYTES - 64:  # and the numbers that stand for its 0s
        raise InvalidKey(
            f"keys: they take {nbytes:,} bytes of a message, which may have {MAX_MESSAGE_BYTES:,}: in parts"
        )
    lineage, answer = _asked(lambda until: channel.pin(subject, ttl_ms=ttl_ms, reason=reason, deadline=until), deadline)
    if answer.refusal:
        raise PinRefused(answer.refusal)
    return Pinned(lineage, tuple(answer.ids), answer.entries, answer.nbytes, time.time() + answer.left_ms / 1000)


def unpin(channel: ControlChannel, what: Pinnable | Pinned | int | Sequence[int], *, deadline: float) -> int:
    """End pins; returns how many there were. Raises InvalidKey, ControllerUnavailable or DeadlineExceeded."""
    lineage, ids, subject = _named(what)
    answer = _asked(lambda until: channel.unpin(ids, subject, lineage=lineage, deadline=until), deadline)
    if answer.refusal:
        raise PinRefused(answer.refusal)
    return len(answer.ids)


def _named(what: Pinnable | Pinned | int | Sequence[int]) -> tuple[str, list[int], PinSubject]:
    """Lineage and ids of pins, or what they are for."""
    if isinstance(what, Pinned):
        return what.lineage, list(what.ids), _NOTHING
    numbers = [what] if isinstance(what, int) else what
    if isinstance(numbers, Sequence) and numbers and all(isinstance(one, int) for one in numbers):
        ids = [one for one in numbers if isinstance(one, int)]
        if len(ids) > MAX_BATCH or not all(0 < one < 1 << 63 for one in ids):
            raise InvalidKey(f"ids: up to {MAX_BATCH:,} numbers from 1 up, as Pinned.ids has them")
        return "", ids, _NOTHING
    if isinstance(what, int):
        raise InvalidKey("ids: numbers from 1 up, as Pinned.ids has them")
    return "", [], _subject(what)  # type: ignore[arg-type]  # which looks at what it is


def _subject(what: Pinnable) -> PinSubject:
    if isinstance(what, Selector):
        return PinSubject(what, [])
    keys = [what] if isinstance(what, EmbeddingKey) else what
    if not isinstance(keys, Sequence) or not all(isinstance(key, EmbeddingKey) for key in keys):
        raise InvalidKey("what is pinned is a Selector, an EmbeddingKey, or a sequence of such keys")
    if not 0 < len(keys) <= MAX_BATCH:
        raise InvalidKey(f"keys: {len(keys):,} were given; 1 to {MAX_BATCH:,} are pinned at once")
    groups = itertools.groupby(dict.fromkeys(keys), lambda key: key.scope)
    return PinSubject(None, [PinnedKeys(scope, [key.mm_hash for key in group]) for scope, group in groups])


def milliseconds_of(ttl: float) -> int:
    """How long something is to be pinned. Raises ValueError for what is no such time."""
    if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= MAX_PIN_MS / 1000:  # nor is NaN
        raise ValueError(f"ttl must be seconds above 0, and at most {MAX_PIN_MS // 1000:,} (30 days), not {ttl!r}")
    return math.ceil(ttl * 1000)


def _asked(ask: Callable[[float], _Answer], deadline: float) -> _Answer:
    while True:
        try:
            return ask(min(deadline, time.monotonic() + _TRY_SECONDS))
        except (ControllerUnavailable, DeadlineExceeded):
            time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))
            if time.monotonic() >= deadline:
                raise
