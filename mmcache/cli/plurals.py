"""One thing, or several."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 session`, `1,000 sessions`; `plural` where it takes more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
