"""What is asked of pins: looked at piece by piece, durable, and only then answered. A state machine, without I/O.

Requests are taken one after another. A pin first needs to know what it would keep, which may be to look at the whole
directory; then it is refused, or written and put.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from mmcache.control.messages import (
    MAX_BATCH,
    MAX_PIN_MS,
    MAX_REASON,
    ControllerMessage,
    Pin,
    PinAnswer,
    Refused,
    Unpin,
)
from mmcache.controller.durable import Past, PinsChange
from mmcache.controller.entries import Entries
from mmcache.controller.followers import Follower
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.pinned import PinnedEntries
from mmcache.controller.pins import Pins
from mmcache.controller.sessions import Session
from mmcache.key import DIGEST_BYTES, Scope, mm_digest
from mmcache.selector import Selector

MAX_ASKED: Final = 64
"""Most requests that wait for their turn."""
_ALL_FIELDS: Final = len(Selector.__struct_fields__)

Answers = Iterator[tuple[Follower, ControllerMessage]]
"""Messages, each with whom it is for."""


class PinAsked(NamedTuple):
    """One selector, or several that each name one key, to be pinned for so long.

    Args:
        role: as what the actor asked. What is asked in a role is recorded for an audit; empty: a session asked.
    """

    selectors: tuple[Selector, ...]
    ttl_s: float
    reason: str
    actor: str
    role: str = ""


class UnpinAsked(NamedTuple):
    """The pins that have these ids, and those of exactly these selectors, are to end. `role` as in `PinAsked`."""

    ids: tuple[int, ...]
    selectors: tuple[Selector, ...]
    actor: str
    role: str = ""


class _Count:
    """What a pin matches, as far as it was looked at."""

    def __init__(self, names: Iterator[bytes]) -> None:
        self.names = names
        self.entries = self.nbytes = 0
        self.new_entries = self.new_nbytes = 0
        """Of those: what is not pinned yet."""


class Pinning:
    """All of one term's pins, what they keep, and the requests about them.

    Args:
        limits: how much may be pinned.
        entries: of which some are kept.
        past: has the pins of the terms before.
        counts: where to count what becomes of them.
    """

    def __init__(
        self, limits: ControllerLimits, entries: Entries, *, term: int, past: Past, counts: Counter[str]
    ) -> None:
        self._directory = entries.directory
        self._scopes = entries.scopes
        self._term = term
        self._counts = counts
        self.pins = Pins(limits.max_pins, past.pins, past.last_pin)
        self.pinned = PinnedEntries(
            self.pins,
            entries.directory,
            entries.scopes,
            claims=entries.claims,
            generation_of=entries.generation_of,
            share=limits.pinned_share,
            most=limits.max_pinned,
            lease_s=limits.lease_ms / 1000,
            counts=counts,
        )
        self._over: list[int] = []
        """Ids of pins whose time is over since it was last told."""
        self._waiting: deque[tuple[Follower, PinAsked | UnpinAsked]] = deque()
        self._count: _Count | None = None
        """Of the first that waits, once that is being looked at."""
        self._counted = False
        self._change: PinsChange | None = None
        """What is being written, for the first that waits."""

    def sizes(self) -> dict[str, int]:
        """How much is pinned, by name."""
        return {
            "pins": len(self.pins),
            "entries_pinned": len(self.pinned),
            "bytes_pinned": self.pinned.nbytes,
        }

    def said(self, session: Session, message: Pin | Unpin) -> ControllerMessage | None:
        """What a session asks; answered as by `ask`."""
        asker, selectors = Follower(session.number, message.request), message.subject.selectors()
        if len(selectors) > MAX_BATCH:
            return Refused(message.request, f"more than {MAX_BATCH} keys")
        if isinstance(message, Pin):
            return self.ask(asker, PinAsked(selectors, message.ttl_ms / 1000, message.reason, session.name))
        return self.ask(asker, UnpinAsked(tuple(message.ids), selectors, session.name))

    def ask(self, asker: Follower, asked: PinAsked | UnpinAsked) -> ControllerMessage | None:
        """Pin or unpin. Refused at once, or answered later."""
        if isinstance(asked, PinAsked) and (fault := _fault(asked)):
            return Refused(asker.request, fault)
        if len(self._waiting) >= MAX_ASKED:
            return Refused(asker.request, "overloaded: too many pins at once")
        self._waiting.append((asker, asked))
        return None

    @property
    def busy(self) -> bool:
        """Whether `tick` has something to do now."""
        return self._is_to_be_counted or self.pinned.sweeping

    def tick(self, most: int, now: float) -> Answers:
        """End what is over, and look at so many entries. Yields the answers of those that are refused for them."""
        self._over += self.pins.expire(now)
        self.pinned.sweep(most)
        if not self._is_to_be_counted:
            return
        asker, asked = self._waiting[0]
        if isinstance(asked, UnpinAsked):
            self._counted = True
            return
        if self._count is None:
            self._count = _Count(self._candidates(asked.selectors))
        if self._look(self._count, most):
            self._counted = True
            if refusal := self._refusal(asked, self._count):
                self._counts["pin.refused"] += 1
                self._done()
                yield asker, self._answer(asker, refusal=refusal)

    def take_over(self) -> list[int]:
        """Ids of pins whose time is over. Told once only."""
        over, self._over = self._over, []
        return over

    def take(self, now: float) -> PinsChange | None:
        """What is to become durable for the first that waits, None if that is nothing. `written` follows, or not."""
        if not self._counted:
            return None
        _, asked = self._waiting[0]
        if isinstance(asked, UnpinAsked):
            pins = [*map(self.pins.find, asked.ids), *map(self.pins.of, asked.selectors)]
            gone = list(dict.fromkeys(pin.id for pin in pins if pin is not None))
            self._change = PinsChange((), gone, now, asked.actor, asked.role)
        else:
            until = now + asked.ttl_s
            put = self.pins.prepared(asked.selectors, until=until, reason=asked.reason, actor=asked.actor)
            if put is None:  # `work` has seen that there is room, and since then pins have but ended
                raise RuntimeError("there are more pins than when they were counted")
            self._change = PinsChange(put, (), now, asked.actor, asked.role)
        return self._change

    def written(self) -> Answers:
        """What was taken is durable, and counts from now on."""
        change, self._change = self._change, None
        if change is None:
            return
        asker, _ = self._waiting[0]
        count = self._count
        self.pins.drop(change.drop)
        self.pins.put(change.put)
        self._counts["pin.put"] += len(change.put)
        self._counts["pin.dropped"] += len(change.drop)
        self._done()
        if count is None:
            yield asker, self._answer(asker, ids=list(change.drop))
        else:
            left_ms = min(MAX_PIN_MS, math.floor((min(pin.until for pin in change.put) - change.now) * 1000))
            ids = [pin.id for pin in change.put]
            yield asker, self._answer(asker, ids=ids, entries=count.entries, nbytes=count.nbytes, left_ms=left_ms)

    def not_written(self, reason: str) -> Answers:
        """Nothing more can be made durable now: all that wait are refused."""
        self._change = None
        waiting = list(self._waiting)
        self._waiting.clear()
        self._count, self._counted = None, False
        for asker, _ in waiting:
            yield asker, self._answer(asker, refusal=reason[:MAX_REASON])

    @property
    def _is_to_be_counted(self) -> bool:
        return bool(self._waiting) and not self._counted

    def _done(self) -> None:
        """The first that waits is answered."""
        self._waiting.popleft()
        self._count, self._counted = None, False

    def _candidates(self, selectors: tuple[Selector, ...]) -> Iterator[bytes]:
        """Names among which are all that match; an empty one stands for something that does not."""
        if len(selectors[0].fields()) == _ALL_FIELDS:
            for selector in selectors:
                key = selector.key()
                yield key.scope.digest + key.mm_digest
            return
        fields = selectors[0].fields()
        mm_hash = fields.pop("mm_hash", None)
        matching = {digest: _matches(scope, fields) for digest, scope in self._scopes.items()}
        if mm_hash is not None:
            digest = mm_digest(mm_hash)
            for scope_digest, matches in matching.items():
                yield scope_digest + digest if matches else b""
            return
        for name in self._directory.names():
            yield name if matching.get(name[:DIGEST_BYTES]) else b""

    def _look(self, count: _Count, most: int) -> bool:
        """Count what is there of the next names. True: those were all."""
        looked_at = 0
        for name in itertools.islice(count.names, most):
            looked_at += 1
            if name and (entry := self._directory.entry(name)) is not None:
                count.entries += 1
                count.nbytes += entry.hit.nbytes
                if not self.pinned.is_pinned(name):
                    count.new_entries += 1
                    count.new_nbytes += entry.hit.nbytes
        return looked_at < most

    def _refusal(self, asked: PinAsked, count: _Count) -> str:
        """Why it cannot be pinned; empty: it can."""
        pinned, most_bytes = self.pinned, self.pinned.most_bytes
        if most_bytes is None:
            return "the store's capacity is not known yet, and so not how much may be pinned: try again in some seconds"
        nbytes = pinned.nbytes + count.new_nbytes
        if nbytes > most_bytes:
            return (
                f"{nbytes:,} bytes would be pinned: {count.entries:,} entries of {count.nbytes:,} bytes match, and"
                f" {pinned.nbytes:,} bytes are pinned already. At most {most_bytes:,} may be, {pinned.share:.4g} of the"
                f" store's {pinned.capacity_bytes:,} (controller.pinned_share): pin less, or unpin something"
            )
        entries = len(pinned) + count.new_entries
        if entries > pinned.most:
            return (
                f"{entries:,} entries would be pinned: {count.entries:,} match, and {len(pinned):,} are pinned already."
                f" At most {pinned.most:,} may be: pin less, or unpin something"
            )
        if self.pins.prepared(asked.selectors, until=0.0, reason="", actor="") is None:
            return f"there are {len(self.pins):,} pins; at most {self.pins.most:,} may be: unpin some, or pin wider"
        return ""

    def _answer(
        self,
        asker: Follower,
        *,
        refusal: str = "",
        ids: list[int] | None = None,
        entries: int = 0,
        nbytes: int = 0,
        left_ms: int = 0,
    ) -> PinAnswer:
        refusal = refusal[:MAX_REASON]
        return PinAnswer(self._term, asker.session, asker.request, refusal, ids or [], entries, nbytes, left_ms)


def _fault(asked: PinAsked) -> str:
    """What is wrong with a request to pin; empty: nothing."""
    if not asked.selectors:
        return "neither a selector nor keys were given"
    if not all(selector.fields() for selector in asked.selectors):
        return "selector: an empty one matches every entry, and to pin all is to pin nothing: give a field"
    if len(asked.selectors) > 1 and any(len(selector.fields()) < _ALL_FIELDS for selector in asked.selectors):
        return "selectors: where there are several, each must name one key, by all of its fields"
    if len(set(asked.selectors)) < len(asked.selectors):
        return "selectors: the same one comes twice"
    return ""


def _matches(scope: Scope, fields: Mapping[str, str | None]) -> bool:
    return all(getattr(scope, name) == value for name, value in fields.items())
