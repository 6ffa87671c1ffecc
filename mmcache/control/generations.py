"""Which generation a key is at: the largest number among the invalidations that match it.

Controller and clients keep the same table, each fed in the order of the numbers. A key's generation never falls: an
invalidation is forgotten only where a later one matches all that it matches.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from msgspec import UNSET

from mmcache.key import Scope, mm_digest
from mmcache.selector import Selector

_FIELDS: Final = ("tenant", "model", "version", "lora", "modality", "mm_hash")
_WIDER: Final = (("mm_hash",), ("modality", "lora"), ("version",), ("model",), ("tenant",))
"""What coarsening stops looking at, step by step."""
_MAX_SCOPES: Final = 1 << 16
"""Scopes whose generations are remembered: at most so many."""
_LEAST_SHARE: Final = 64
"""A coarser invalidation is to replace at least a 64th of the table, so that coarsening is rare."""


class _Shape:
    """Invalidations that give the same fields, by these fields' values."""

    __slots__ = ("narrow", "numbers", "pick", "selectors")

    def __init__(self, given: tuple[int, ...]) -> None:
        self.numbers: dict[Any, int] = {}
        self.selectors: dict[Any, Selector] = {}
        self.pick: Callable[[tuple[Any, ...]], Any] = operator.itemgetter(*given) if given else lambda _: None
        self.narrow = len(_FIELDS) - 1 in given
        """Whether they look at the mm_hash."""

    def number(self, values: tuple[Any, ...]) -> int:
        """Of the invalidation that gives these values; 0 if there is none."""
        return self.numbers.get(self.pick(values), 0)


class GenerationTable:
    """Generations of all keys.

    Args:
        budget: how many invalidations it may hold; then `coarser` says by which new one the oldest are to be replaced.
    """

    def __init__(self, budget: int) -> None:
        self.head = 0
        """The number of the last invalidation that was applied."""
        self._budget = budget
        self._shapes: dict[tuple[int, ...], _Shape] = {}
        self._of_scopes: dict[Scope, int] = {}
        """What those shapes say that do not look at the mm_hash, of scopes that were asked about since they changed."""

    def __len__(self) -> int:
        return sum(len(shape.numbers) for shape in self._shapes.values())

    def generation(self, scope: Scope, digest: bytes) -> int:
        """The generation of the key of this scope whose mm_hash has this digest; 0 if nothing ever matched it."""
        latest = self._of_scopes.get(scope)
        values = (scope.tenant, scope.model, scope.version, scope.lora, scope.modality, digest)
        if latest is None:
            latest = max((shape.number(values) for shape in self._shapes.values() if not shape.narrow), default=0)
            if len(self._of_scopes) >= _MAX_SCOPES:
                self._of_scopes.clear()
            self._of_scopes[scope] = latest
        for shape in self._shapes.values():
            if shape.narrow and (number := shape.number(values)) > latest:
                latest = number
        return latest

    def apply(self, number: int, selector: Selector) -> None:
        """An invalidation. Raises ValueError for a number that is not above all before it: nothing may be lost."""
        if number <= self.head:
            raise ValueError(f"invalidation {number} comes after {self.head}")
        values = _values(selector)
        given = tuple(index for index, value in enumerate(values) if value is not UNSET)
        shape = self._shapes.get(given)
        if shape is None:
            shape = self._shapes[given] = _Shape(given)
        place = shape.pick(values)
        shape.numbers[place] = self.head = number
        shape.selectors[place] = selector
        if not shape.narrow:
            self._of_scopes.clear()

    def invalidations(self) -> list[tuple[int, Selector]]:
        """All that it holds, in order: what another table needs to become like this one."""
        return sorted(
            (number, shape.selectors[place])
            for shape in self._shapes.values()
            for place, number in shape.numbers.items()
        )

    def compact(self) -> list[int]:
        """Forget what a later invalidation covers; returns the numbers that were forgotten."""
        covered = [(shape, place) for shape, place, number, selector in self._all() if self._covered(number, selector)]
        forgotten = []
        for shape, place in covered:
            forgotten.append(shape.numbers.pop(place))
            del shape.selectors[place]
        for given in [given for given, shape in self._shapes.items() if not shape.numbers]:
            del self._shapes[given]
        return forgotten

    def coarser(self) -> Selector | None:
        """None within the budget. Else an invalidation to make: once applied, `compact` forgets many old ones for it.

        It is the narrowest that covers enough of the older half of the table.
        """
        held = self.invalidations()
        if len(held) <= self._budget:
            return None
        enough = max(2, len(held) // _LEAST_SHARE)
        oldest = [selector for _, selector in held[: max(enough, len(held) // 2)]]
        ignored: tuple[str, ...] = ()
        for fields in _WIDER:
            ignored += fields
            [(widened, count)] = Counter(selector.without(*ignored) for selector in oldest).most_common(1)
            if count >= enough:
                return widened
        return Selector()

    def _all(self) -> Iterator[tuple[_Shape, Any, int, Selector]]:
        for shape in self._shapes.values():
            for place, number in shape.numbers.items():
                yield shape, place, number, shape.selectors[place]

    def _covered(self, number: int, selector: Selector) -> bool:
        values = _values(selector)
        return any(
            shape.number(values) > number  # a field that it does not give is like no other's value
            for shape in self._shapes.values()
        )


def _values(selector: Selector) -> tuple[Any, ...]:
    values = [getattr(selector, name) for name in _FIELDS]
    if values[-1] is not UNSET:
        values[-1] = mm_digest(values[-1])
    return tuple(values)
