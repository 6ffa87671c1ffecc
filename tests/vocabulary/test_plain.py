from __future__ import annotations

import pytest

from mmcache.plain import MAX_DEPTH, MAX_ITEMS, plain_fault


def nested(depth: int) -> list[object]:
    value: list[object] = [0]
    for _ in range(depth - 1):
        value = [value]
    return value


def test_plain_data_has_no_fault() -> None:
    scalars = [None, True, "text", b"bytes", 0, -(2**63), 2**64 - 1, 0.5]
    for value in (*scalars, scalars, {"a": scalars, "": {"b": scalars}}, [], {}):
        assert plain_fault(value) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((1,), "tuple"),
        ({1}, "set"),
        (1j, "complex"),
        (bytearray(1), "bytearray"),
        ({None: 1}, "key"),
        (2**64, "64 bits"),
        (-(2**63) - 1, "64 bits"),
        (float("-inf"), "finite"),
    ],
)
def test_what_is_not_plain_is_named_at_any_depth(value: object, words: str) -> None:
    for holder in (value, [1, value], {"a": {"b": [value]}}):
        assert words in (plain_fault(holder) or "")


def test_depth_and_number_of_items_are_bounded() -> None:
    assert plain_fault(nested(MAX_DEPTH)) is None
    assert "deeper" in (plain_fault(nested(MAX_DEPTH + 1)) or "")
    assert plain_fault([0] * MAX_ITEMS) is None
    assert "more than" in (plain_fault([0] * (MAX_ITEMS + 1)) or "")
    bomb: list[object] = [0] * 100
    for _ in range(10):
        bomb = [bomb] * 100
    assert "more than" in (plain_fault(bomb) or "")
