"""Lists of the admin commands for people: aligned, no wider than need be, and nothing of a value ever cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from mmcache.cli.admin.layout import Item, lines, parts_of

values = st.text(min_size=1, max_size=100)
words = st.text("ab文", min_size=1, max_size=100)
items = st.builds(Item, st.tuples(words, words), st.lists(words, max_size=4).map(tuple))


def test_short_cells_stand_in_columns_and_the_rest_below() -> None:
    rows = [Item(("1", "x"), ("model m", "version 1", "mm_hash " + "h" * 12)), Item(("1,000", "文文"))]
    assert list(lines(("size", "by"), rows, 24)) == [
        "size   by",
        "1      x",
        "  model m  version 1",
        "  mm_hash hhhhhhhhhhhh",
        "1,000  文文",
    ]


@given(st.lists(items, max_size=4), st.integers(1, 120))
def test_every_value_is_whole_and_only_one_alone_is_wider(rows: list[Item], width: int) -> None:
    told = list(lines(("a", "b"), rows, width))
    below = [line for line in told if line.startswith("  ")]
    parts = [part for row in rows for part in row.below]
    assert [part for line in below for part in line.split()] == parts
    assert all(cell_len(line) <= width or len(line.split()) == 1 for line in below)
    starts = {cell_len(line) - cell_len(line.split()[-1]) for line in told if line not in below}
    assert len(starts) == 1, "the last column begins at one place"


@given(values)
def test_what_others_wrote_moves_no_cursor_in_a_list(value: str) -> None:
    told = list(lines(("a",), [Item((value,), (value,))], 80))
    assert all(line.isprintable() for line in told)
    assert len(told) == 3


def test_a_selector_is_told_by_its_fields() -> None:
    assert parts_of({"model": "m", "lora": None}) == ("model m", "without lora")
    assert parts_of({}) == ("everything",)
