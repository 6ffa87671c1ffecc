"""Plain data: what metadata, fingerprints and sampling settings may hold, so that it is written alike everywhere.

None, bool, str, bytes, ints of 64 bits, finite floats, lists of plain data, and dicts of plain data with str keys.
Exactly these types: a subclass or a tuple would come back as something else, and NaN equals nothing.
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Final

MAX_DEPTH: Final = 16
"""Deepest nesting of lists and dicts."""
MAX_ITEMS: Final = 65_536
"""Most items on one level of nesting."""

_INT_MIN: Final = -(1 << 63)
_INT_MAX: Final = (1 << 64) - 1
_ALWAYS_PLAIN: Final = frozenset({str, bytes, bool, NoneType})


def plain_fault(value: object) -> str | None:
    """What keeps `value` from being plain data, as the end of a sentence about it; None if nothing does."""
    level = [value]  # level by level, so that neither depth nor a reference to itself can hurt
    for _ in range(MAX_DEPTH + 1):
        below: list[object] = []
        for item in level:
            if type(item) in _ALWAYS_PLAIN:
                continue
            if type(item) is int:
                if not _INT_MIN <= item <= _INT_MAX:
                    return "holds an int that needs more than 64 bits"
            elif type(item) is float:
                if not math.isfinite(item):
                    return f"holds {item}, which is not a finite float"
            elif type(item) is list:
                below += item
            elif type(item) is dict:
                for name in item:
                    if type(name) is not str:
                        return "holds a dict with a key that is not a str"
                below += item.values()
            else:
                kind = type(item)
                return (
                    f"holds a {kind.__module__}.{kind.__qualname__}, which is not plain data (lists, dicts, numbers, …)"
                )
            if len(below) > MAX_ITEMS:
                return f"holds more than {MAX_ITEMS} items"
        if not below:
            return None
        level = below
    return f"is nested deeper than {MAX_DEPTH} levels"
