"""One thing is not several."""

from __future__ import annotations

import pytest

from mmcache.cli.plurals import counted


@pytest.mark.parametrize(("number", "expected"), [(0, "0 entries"), (1, "1 entry"), (2000, "2,000 entries")])
def test_a_number_of_things_is_told_with_the_right_noun(number: int, expected: str) -> None:
    assert counted(number, "entry", "entries") == expected
    assert counted(number, "session") == expected.replace("entries", "sessions").replace("entry", "session")
