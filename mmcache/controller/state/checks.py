"""What the values of durable state may be. Each raises ValueError with a text that names the value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final

import msgspec

from mmcache.plain import plain_fault

MAX_NUMBER: Final = (1 << 63) - 1
"""The largest number of an invalidation, and of anything else that is counted."""
MAX_TTL_MS: Final = 86_400_000
MAX_PAGE: Final = 1_000
"""Most rows that one page may have."""
MAX_VALUE_BYTES: Final = 4_096
"""Longest JSON of a setting's value, or of the detail of an audit record, in UTF-8."""

_MAX_UNIX_S: Final = 1e11
"""Of the year 5138: what is later was given in milliseconds."""
_SETTING_NAME: Final = re.compile(r"[a-z][a-z0-9_.]{0,63}\Z")
_json: Final = msgspec.json.Encoder(order="deterministic")


def check_text(name: str, value: object, limit: int, *, empty: bool = False) -> None:
    """A str of printable characters, at most `limit`, and of at least one unless it may be `empty`."""
    if type(value) is not str:
        raise ValueError(f"{name} must be a str, not {type(value).__name__}")
    if not value and not empty:
        raise ValueError(f"{name} must not be empty")
    if len(value) > limit:
        raise ValueError(f"{name} has {len(value)} characters; at most {limit} are allowed")
    if not value.isprintable():
        raise ValueError(f"{name} may hold printable characters only, got {value!r}")


def check_time(name: str, value: object) -> None:
    """Seconds since 1970."""
    if type(value) not in (int, float) or not 0 <= value < _MAX_UNIX_S:  # type: ignore[operator]
        raise ValueError(f"{name} must be in seconds since 1970, got {value!r}")


def check_number(name: str, value: object, least: int, most: int = MAX_NUMBER) -> None:
    """An int from `least` to `most`."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} must be an int from {least} to {most}, got {value!r}")


def check_numbers(numbers: Iterable[int], head: int) -> list[int]:
    """Numbers of invalidations up to `head`, in order, each once."""
    ordered = sorted(set(numbers))
    for number in ordered:
        check_number("number", number, 1, head)
    return ordered


def check_term(term: object, ttl_ms: object) -> None:
    """A term and its TTL."""
    check_number("term", term, 1)
    check_number("ttl_ms", ttl_ms, 1, MAX_TTL_MS)


def check_page(before: int | None, limit: int) -> int:
    """What a page begins below, where `before` may be None for the newest."""
    check_number("limit", limit, 1, MAX_PAGE)
    if before is None:
        return MAX_NUMBER
    check_number("before", before, 1)
    return before


def check_setting_name(name: object) -> None:
    """A name such as `eviction.high_watermark`."""
    if type(name) is not str or not _SETTING_NAME.match(name):
        raise ValueError(f"a setting's name is 1 to 64 of [a-z0-9_.] after a letter, got {name!r}")


def to_json(name: str, value: object) -> str:
    """Small plain data as JSON, from which it comes back as it was."""
    if (fault := plain_fault(value)) is not None:
        raise ValueError(f"{name} {fault}")
    encoded = _json.encode(value)
    if len(encoded) > MAX_VALUE_BYTES:
        raise ValueError(f"{name} has {len(encoded)} bytes of JSON; at most {MAX_VALUE_BYTES} are allowed")
    if not _same(msgspec.json.decode(encoded), value):  # bytes come back as str
        raise ValueError(f"{name} holds what JSON cannot, such as bytes")
    return encoded.decode()


def _same(left: object, right: object) -> bool:
    """Equal, where 1 is not True, nor 1.0."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return left == right and math.copysign(1.0, left) == math.copysign(1.0, right)
    return left == right
