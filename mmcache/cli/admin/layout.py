"""A list for people: what is short in columns, and below it what may be long, each value whole on one line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len

from mmcache.cli.admin.text import printable

_GAP: Final = "  "


class Item(NamedTuple):
    """One row. The last of its cells may be long as well; each of `below` is a name and a value, or a word."""

    cells: tuple[str, ...]
    below: tuple[str, ...] = ()


def lines(head: Sequence[str], items: Sequence[Item], width: int) -> Iterator[str]:
    """The head and the items, and nothing that others wrote means anything.

    Lines are up to `width` columns wide, where no single value is longer: none is ever cut.
    """
    rows = [tuple(map(printable, item.cells)) for item in items]
    widths = [max(map(cell_len, column)) for column in zip(head, *rows, strict=True)]
    yield _row(head, widths)
    for row, item in zip(rows, items, strict=True):
        yield _row(row, widths)
        yield from folded(tuple(map(printable, item.below)), width)


def folded(parts: Sequence[str], width: int) -> Iterator[str]:
    """Indented lines of as many whole parts as fit."""
    line = ""
    for part in parts:
        longer = f"{line}{_GAP}{part}"
        if line and cell_len(longer) > width:
            yield line
            longer = f"{_GAP}{part}"
        line = longer
    if line:
        yield line


def parts_of(selector: Mapping[str, str | None]) -> tuple[str, ...]:
    """A selector's fields."""
    if not selector:
        return ("everything",)
    return tuple(f"without {name}" if value is None else f"{name} {value}" for name, value in selector.items())


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    filled = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
    return _GAP.join(filled).rstrip()
