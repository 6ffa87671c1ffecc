"""What others wrote, on a terminal; and times, in and out."""

from __future__ import annotations

import datetime

from mmcache.cli.errors import InputError
from mmcache.setting_kinds import BadValue, parse_duration


def printable(text: str) -> str:
    """The text with escapes in the place of what could move a cursor, or cannot be seen."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def when(seconds: float) -> str:
    """A time for people, in UTC; `seconds` since 1970."""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "?"
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


def moment(option: str, text: str | None, now: float) -> float | None:
    """Seconds since 1970 of `2h` (ago) or a time in ISO 8601, of UTC unless it says otherwise. Raises InputError."""
    if text is None:
        return None
    try:
        return max(0.0, now - parse_duration(text))
    except BadValue:
        pass
    try:
        parsed = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        parsed = parsed if parsed.tzinfo is not None else parsed.replace(tzinfo=datetime.timezone.utc)
        return max(0.0, parsed.timestamp())
    except (ValueError, OverflowError) as error:
        form = "a time such as 2026-12-31T08:00:00Z, or how long ago, such as 90s, 5min or 2h"
        raise InputError(f"{option} must be {form}, not {text[:80]!r}") from error
