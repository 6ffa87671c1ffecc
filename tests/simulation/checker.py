"""What must hold of a schedule, whatever went wrong in it.

S1  A call returns only what was published under the very key and generation that it read.
S3  A call that starts after an invalidation is complete returns nothing of an older generation; a claim that is asked
    for after it has at least its generation.
S4  Nor anything whose generation was fixed before the invalidation was durable, nor of a content from before it.
S5  See `claims_watch`.
E1 to E6, of what is evicted: see `removals_watch`.
L3  What is removed from the store is of an old generation, or evicted; what is of an old one is removed (see `reaper`,
    `store_check`).
    A number that anybody was told is durable, and stands for one selector for ever.

An invalidation counts as complete from when the controller decides so, which is before anybody hears of it.

A database that went back is not what anything was promised of. Below the number to which it went back all holds still,
and a client that is ahead shows it, upon which the controller serves nothing more. Until one has come, what was
complete above that number is forgotten, and numbers above it are given again: none of this lineage above it is
promised. Of the lineage that follows, everything is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mmcache.control.messages import (
    Acquired,
    ControllerMessage,
    Granted,
    HeartbeatAnswer,
    Hit,
    Invalidated,
    Progress,
    Push,
    Resolved,
    Welcome,
)
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

from .store import Publication

_SERVES = (Welcome, HeartbeatAnswer, Acquired, Push, Invalidated)


class Violation(AssertionError):
    """Something that must hold does not."""


class _Made(NamedTuple):
    """An invalidation that is durable, and the content of each key then."""

    selector: Selector
    at: float
    contents: dict[EmbeddingKey, int]


class _Complete(NamedTuple):
    """That it is complete, as one key sees it."""

    at: float
    lineage: str
    number: int
    made_at: float
    content: int


class Checker:
    """Hears of everything, and fails where something is wrong.

    Args:
        now: the world's time.
        content: of each key, as it is at the time.
        on_complete: told of the keys of an invalidation when it is complete.
    """

    def __init__(
        self,
        now: Callable[[], float],
        content: dict[EmbeddingKey, int],
        *,
        on_complete: Callable[[list[EmbeddingKey]], object],
    ) -> None:
        self._now = now
        self._content = content
        self._on_complete = on_complete
        self._made: dict[str, dict[int, _Made]] = {}
        self._head: dict[str, int] = {}
        self._copy_heads: dict[str, list[int]] = {}
        """Of the older copies that were put in place, by lineage."""
        self._copies_before: dict[int, int] = {}
        """How many that were, by the term that came next."""
        self._promised: dict[str, int] = {}
        self._complete: dict[EmbeddingKey, list[_Complete]] = {key: [] for key in content}
        self._known_complete: set[tuple[str, int]] = set()

    def fail(self, what: str) -> None:
        """It does not hold."""
        raise Violation(what)

    # What the controller does

    def durable(self, lineage: str, numbered: Iterable[tuple[int, Selector]]) -> None:
        """These invalidations are on disk."""
        made = self._made.setdefault(lineage, {})
        for number, selector in numbered:
            if number in made:
                self.fail(f"the number {number} stands for {selector}, and for {made[number].selector} before")
            made[number] = _Made(selector, self._now(), dict(self._content))
            self._head[lineage] = number

    def completed(self, lineage: str, numbers: Iterable[int]) -> None:
        """The controller takes these for complete."""
        for number in numbers:
            if (lineage, number) in self._known_complete or number > self._promised.get(lineage, number):
                continue
            self._known_complete.add((lineage, number))
            made = self._made[lineage][number]
            keys = [key for key in self._complete if made.selector.matches(key)]
            for key in keys:
                self._complete[key].append(_Complete(self._now(), lineage, number, made.at, made.contents[key]))
            self._on_complete(keys)

    def told(self, lineage: str, message: ControllerMessage, *, went_back: bool) -> None:
        """The controller says this to somebody."""
        number = 0
        match message:
            case Welcome() | HeartbeatAnswer():
                number = message.head
            case Push():
                number = message.through
                for one, selector in message.invalidations:
                    if one <= self._head.get(lineage, 0) and self._made[lineage][one].selector != selector:
                        self.fail(f"invalidation {one} is pushed as {selector}")
            case Invalidated():
                number = message.number
            case Progress():
                number = message.number
                if message.complete:
                    self.completed(lineage, [number])
            case Acquired():
                number = max((self._generation(result) for result in message.results), default=0)
            case Resolved():
                number = max((self._generation(result) for _, result in message.results), default=0)
        if number > self._head.get(lineage, 0):
            self.fail(f"{message} tells of a number that is not durable")
        if went_back and isinstance(message, _SERVES):
            self.fail(f"a controller whose database went back sends {message}")

    def went_back(self, lineage: str, head: int) -> None:
        """An older copy of its database is in place."""
        self._copy_heads.setdefault(lineage, []).append(head)
        self._promised[lineage] = min(head, self._promised.get(lineage, head))
        self._head[lineage] = head
        made = self._made.get(lineage, {})
        for number in [number for number in made if number > head]:
            del made[number]

    def began(self, lineage: str, term: int) -> None:
        """A term begins."""
        self._copies_before[term] = len(self._copy_heads.setdefault(lineage, []))

    def lasts(self, lineage: str, term: int) -> float:
        """The number after which what that term has told of is lost, since older copies were put in place since."""
        return min(self._copy_heads.get(lineage, [])[self._copies_before.get(term, 0) :], default=math.inf)

    def generation(self, lineage: str, key: EmbeddingKey) -> int:
        """The generation of a key by all that is durable."""
        made = self._made.get(lineage, {})
        return max((number for number, one in made.items() if one.selector.matches(key)), default=0)

    # What callers get

    def claimed(self, key: EmbeddingKey, lineage: str, generation: int, asked_at: float) -> None:
        """A claim was granted that was asked for then."""
        for complete in self._binding(key, lineage, asked_at):
            if complete.lineage == lineage and generation < complete.number:
                self.fail(f"S3: a claim at generation {generation} of what {complete} is for was asked for after it")

    def returned(self, key: EmbeddingKey, name: str, expected: str, found: Publication, started: float) -> None:
        """A call that started then returns this, which it read under a name."""
        if name != expected or found.key != key:
            self.fail(f"S1: {found} was read as {key} under {name}")
        for complete in self._binding(key, found.lineage, started):
            if complete.lineage == found.lineage and found.generation < complete.number:
                self.fail(f"S3: a call that started at {started:.4f} returns {found}, and {complete} was complete")
            if found.since < complete.made_at:
                self.fail(f"S4: a call that started at {started:.4f} returns {found}, fixed before {complete} was made")
            if found.content < complete.content:
                self.fail(f"S4: a call that started at {started:.4f} returns {found}, of a content before {complete}")

    def _binding(self, key: EmbeddingKey, lineage: str, started: float) -> list[_Complete]:
        """What was complete when a call started that meets names of this lineage."""
        promised = self._promised.get(lineage)
        return [
            complete
            for complete in self._complete[key]
            if complete.at <= started
            and not (promised is not None and complete.lineage == lineage and complete.number > promised)
        ]

    @staticmethod
    def _generation(result: object) -> int:
        return result.generation if isinstance(result, Granted | Hit) else 0
