"""Selectors match what their fields say, and refuse what no key could have."""

from __future__ import annotations

import msgspec
import pytest

from mmcache.errors import InvalidKey
from mmcache.key import EmbeddingKey
from mmcache.selector import Selector

KEY = EmbeddingKey("model", "1", "cat", None, "image", "shop")


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        (Selector(), True),
        (Selector(model="model"), True),
        (Selector(model="another"), False),
        (Selector(lora=None), True),
        (Selector(lora="style"), False),
        (Selector(mm_hash="cat", tenant="shop"), True),
        (Selector(mm_hash="cat", tenant="default"), False),
        (Selector.exactly(KEY), True),
    ],
)
def test_a_selector_matches_what_has_its_fields(selector: Selector, matches: bool) -> None:
    assert selector.matches(KEY) is matches


def test_one_without_an_adapter_is_not_one_of_any_adapter() -> None:
    adapted = EmbeddingKey("model", "1", "cat", "style", "image", "shop")
    assert not Selector(lora=None).matches(adapted)
    assert Selector(model="model").matches(adapted)
    assert Selector().covers(Selector(lora=None))
    assert not Selector(lora=None).covers(Selector())


@pytest.mark.parametrize("field", ["tenant", "model", "version", "lora", "modality", "mm_hash"])
@pytest.mark.parametrize("value", ["", "x" * 2000, 7, b"bytes"])
def test_what_no_key_could_have_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidKey, match=field):
        Selector(**{field: value})  # type: ignore[arg-type]


def test_from_the_wire_nothing_unknown_is_let_through() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Selector.exactly(KEY)), type=Selector) == Selector.exactly(KEY)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode({"lora": None}), type=Selector) == Selector(lora=None)
    for odd in ({"mdoel": "m"}, {"model": None}, {"model": "a b"}, [], {"mm_hash": "\ud800"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(odd, type=Selector)


def test_it_says_what_it_matches() -> None:
    assert str(Selector(model="m", lora=None)) == "model=m, lora=None"
    assert str(Selector()) == "everything"
