"""Generations against their definition: the largest number among the invalidations that match a key."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.control.generations import GenerationTable
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

LORAS = (None, "style")
KEYS = [
    EmbeddingKey(model, version, mm_hash, lora, "image", tenant)
    for model, version, mm_hash, lora, tenant in itertools.product("ab", "12", "xy", LORAS, ("s", "t"))
]
given_fields = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.sampled_from("st"),
        "model": st.sampled_from("ab"),
        "version": st.sampled_from("12"),
        "lora": st.sampled_from(LORAS),
        "modality": st.sampled_from(["image", "video"]),
        "mm_hash": st.sampled_from("xy"),
    },
)
selectors = given_fields.map(lambda fields: Selector(**fields))
steps = st.lists(st.tuples(st.integers(1, 5), selectors, st.booleans()), max_size=30)


def generations(table: GenerationTable) -> list[int]:
    return [table.generation(key.scope, key.mm_digest) for key in KEYS]


@given(steps)
def test_a_key_s_generation_is_the_last_invalidation_that_matches_it(steps: list[tuple[int, Selector, bool]]) -> None:
    table = GenerationTable(budget=1000)
    made: list[tuple[int, Selector]] = []
    for step, selector, compacts in steps:
        made.append((table.head + step, selector))
        table.apply(*made[-1])
        if compacts:
            table.compact()
        assert generations(table) == [
            max((number for number, one in made if one.matches(key)), default=0) for key in KEYS
        ]


@given(steps)
def test_a_table_that_is_sent_what_another_holds_says_the_same(steps: list[tuple[int, Selector, bool]]) -> None:
    table, replica = GenerationTable(budget=1000), GenerationTable(budget=1000)
    for step, selector, compacts in steps:
        table.apply(table.head + step, selector)
        if compacts:
            table.compact()
    for number, selector in table.invalidations():
        replica.apply(number, selector)
    assert generations(replica) == generations(table)
    assert replica.head == table.head


@given(steps)
def test_compaction_forgets_all_that_is_covered_and_nothing_else(steps: list[tuple[int, Selector, bool]]) -> None:
    table = GenerationTable(budget=1000)
    for step, selector, _ in steps:
        table.apply(table.head + step, selector)
    before = table.invalidations()
    forgotten = table.compact()
    kept = table.invalidations()
    assert sorted(forgotten) == sorted({number for number, _ in before} - {number for number, _ in kept})
    assert kept == [
        (number, one) for number, one in before if not any(later > number and two.covers(one) for later, two in before)
    ]


@given(steps, st.integers(1, 8))
def test_coarsening_keeps_the_budget_and_lets_no_generation_fall(
    steps: list[tuple[int, Selector, bool]], budget: int
) -> None:
    table = GenerationTable(budget=budget)
    for step, selector, _ in steps:
        before = generations(table)
        table.apply(table.head + step, selector)
        table.compact()
        for _ in range(100):
            if (coarser := table.coarser()) is None:
                break
            held = len(table)
            table.apply(table.head + 1, coarser)
            table.compact()
            assert len(table) < held
        assert len(table) <= budget
        assert all(now >= then for now, then in zip(generations(table), before, strict=True))


def test_the_oldest_images_are_replaced_by_what_they_have_in_common() -> None:
    table = GenerationTable(budget=99)
    for number in range(100):
        table.apply(number + 1, Selector.exactly(EmbeddingKey("model", "1", f"image-{number}")))
    assert table.coarser() == Selector(tenant="default", model="model", version="1", lora=None, modality="image")


@pytest.mark.parametrize("number", [0, 6, 7])
def test_an_invalidation_out_of_order_is_refused(number: int) -> None:
    table = GenerationTable(budget=10)
    table.apply(7, Selector(model="a"))
    with pytest.raises(ValueError, match="comes after 7"):
        table.apply(number, Selector())
    assert table.invalidations() == [(7, Selector(model="a"))]
