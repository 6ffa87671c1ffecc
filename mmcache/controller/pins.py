"""What is to be kept, and until when: a table of pins. A state machine, without I/O.

A pin is for a selector, and counts until its time is over or somebody takes it away. It keeps nothing by itself:
`PinnedEntries` are the entries that are kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from mmcache.control.generations import GenerationTable
from mmcache.controller.deadlines import Deadlines
from mmcache.key import Scope
from mmcache.selector import Selector

MAX_TTL_S: Final = 30 * 86_400
"""Longest time for which something is pinned, in seconds. It may be pinned again."""


class Pin(NamedTuple):
    """One pin.

    Args:
        id: from 1 up; later ones have larger ids, and none is used twice.
        until: on the core's clock, in seconds.
        reason: for people.
        actor: who asked for it first.
    """

    id: int
    selector: Selector
    until: float
    reason: str
    actor: str


class Pins:
    """All that count.

    Args:
        most: how many there may be.
        pins: those of a term before, in the order of their ids.
        last: the id of the newest that ever was.
    """

    def __init__(self, most: int, pins: Iterable[Pin] = (), last: int = 0) -> None:
        self.most = most
        self.last = last
        """The id of the newest that ever was."""
        self.version = 0
        """Grows whenever other keys may be covered than before."""
        self._pins: dict[int, Pin] = {}
        self._by_selector: dict[Selector, int] = {}
        self._until: Deadlines[int] = Deadlines()
        self._table = GenerationTable(most)
        self.put(pins)

    def __len__(self) -> int:
        return len(self._pins)

    def find(self, number: int) -> Pin | None:
        """The one with this id."""
        return self._pins.get(number)

    def of(self, selector: Selector) -> Pin | None:
        """The one of exactly this selector."""
        number = self._by_selector.get(selector)
        return None if number is None else self._pins[number]

    def page(self, before: int | None, limit: int) -> list[Pin]:
        """The newest first, with ids below `before`, up to `limit`."""
        later = (pin for number, pin in reversed(self._pins.items()) if before is None or number < before)
        return [pin for pin, _ in zip(later, range(limit), strict=False)]

    def covers(self, scope: Scope, digest: bytes) -> bool:
        """Whether the key of this scope whose mm_hash has this digest is pinned by any."""
        return bool(self._pins) and self._table.generation(scope, digest) > 0

    def prepared(self, selectors: Iterable[Selector], *, until: float, reason: str, actor: str) -> list[Pin] | None:
        """The pins that `put` is to take for these, each named once; None: there would be too many.

        One whose selector is pinned already is that one, prolonged, and never shortened.
        """
        pins: list[Pin] = []
        last = self.last
        for selector in selectors:
            known = self.of(selector)
            if known is None:
                last += 1
                pins.append(Pin(last, selector, until, reason, actor))
            else:
                pins.append(known._replace(until=max(known.until, until), reason=reason or known.reason))
        return pins if len(self) + last - self.last <= self.most else None

    def put(self, pins: Iterable[Pin]) -> None:
        """Add pins, or put them in the place of those with their ids, whose selectors they have."""
        for pin in pins:
            if pin.id not in self._pins:
                self.last = max(self.last, pin.id)
                self._by_selector[pin.selector] = pin.id
                self._table.apply(pin.id, pin.selector)
                self.version += 1
            self._pins[pin.id] = pin
            self._until.set(pin.id, pin.until)

    def drop(self, numbers: Iterable[int]) -> None:
        """Take those away that are there."""
        gone = [pin for number in numbers if (pin := self._pins.pop(number, None)) is not None]
        if not gone:
            return
        for pin in gone:
            if self._by_selector.get(pin.selector) == pin.id:  # else a later one has it: this one's end was not written
                del self._by_selector[pin.selector]
            self._until.discard(pin.id)
        self._table = GenerationTable(self.most)
        for pin in self._pins.values():
            self._table.apply(pin.id, pin.selector)
        self.version += 1

    def expire(self, now: float) -> list[int]:
        """Take those away whose time is over; returns their ids."""
        over = self._until.pop_due(now)
        self.drop(over)
        return over

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        return self._until.next()
