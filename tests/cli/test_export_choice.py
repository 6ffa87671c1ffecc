"""Which entries are exported: those that come first and fit, against a model that sorts them all."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import key_of

from mmcache.cli.warm.choosing import Choice, Listed, Order, rank


def entry(
    number: int, nbytes: int = 1, cost_ms: float | None = 0.0, uses: float | None = None, created: float = 0.0
) -> Listed:
    return Listed(f"name-{number}", key_of(number), 0, nbytes, created, cost_ms, uses)


few = st.integers(0, 3).map(float)


@given(
    st.lists(st.tuples(st.integers(0, 9), few, st.none() | few, few), max_size=12),
    st.integers(1, 8),
    st.none() | st.integers(0, 30),
    st.sampled_from(["hottest", "newest"]),
    st.randoms(use_true_random=False),
)
def test_the_first_that_fit_are_chosen_in_whatever_order_they_are_listed(
    drawn: list[tuple[int, float, float | None, float]], most: int, most_bytes: int | None, order: Order, random
) -> None:
    entries = [entry(number, *values) for number, values in enumerate(drawn)]
    choice = Choice(order, most_entries=most, most_bytes=most_bytes)
    for one in random.sample(entries, len(entries)):
        choice.offer(one)

    room = math.inf if most_bytes is None else most_bytes
    expected: list[Listed] = []
    for one in sorted(entries, key=lambda one: (rank(one, order), one.name), reverse=True):
        if one.nbytes > room:
            continue
        if len(expected) == most or sum(other.nbytes for other in expected) + one.nbytes > room:
            break
        expected.append(one)
    assert choice.in_order() == expected
    assert choice.left_out == len(entries) - len(expected)
    assert (choice.nbytes, len(choice)) == (sum(one.nbytes for one in expected), len(expected))
    assert choice.largest == max((one.nbytes for one in expected), default=0)


def test_an_entry_that_is_listed_twice_is_chosen_once() -> None:
    choice = Choice("hottest", most_entries=5, most_bytes=None)
    choice.offer(entry(1))
    choice.offer(entry(1))
    assert (len(choice), choice.nbytes, choice.left_out) == (1, 1, 0)


@pytest.mark.parametrize("cost_ms", [math.nan, -1.0, None, -math.inf])
def test_a_publisher_that_lies_about_cost_does_not_come_first(cost_ms: float | None) -> None:
    lying, honest = entry(1, cost_ms=cost_ms, uses=9.0), entry(2, cost_ms=0.5)
    for listed in ([lying, honest], [honest, lying]):
        choice = Choice("hottest", most_entries=1, most_bytes=None)
        for one in listed:
            choice.offer(one)
        assert choice.in_order() == [honest]


def test_uses_count_as_much_as_the_encodings_that_they_spare() -> None:
    used, costly = entry(1, cost_ms=10.0, uses=5.0), entry(2, cost_ms=50.0)
    assert rank(used, "hottest") > rank(costly, "hottest")
