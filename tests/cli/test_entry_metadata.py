"""Metadata: of the entry in a file, of the file in an entry, and from options."""

from __future__ import annotations

import pytest
from commands import KEY, run
from hypothesis import given
from hypothesis import strategies as st

from mmcache.cli.entries.metadata import OF_THE_ENTRY, meta_of_file, metadata_for_file, parse_options
from mmcache.cli.errors import InputError

_floats = st.floats(allow_nan=False, allow_infinity=False)
_plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | _floats,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_foreign_names = st.text().filter(lambda name: name != OF_THE_ENTRY)


@given(st.dictionaries(_foreign_names, st.text(), max_size=4))
def test_what_a_file_says_of_itself_goes_through_an_entry_unchanged(metadata: dict[str, str]) -> None:
    assert metadata_for_file(meta_of_file(metadata, "file")) == metadata


@given(st.dictionaries(st.text(), _plain, max_size=4))
def test_an_entrys_metadata_goes_through_a_file_unchanged(meta: dict[str, object]) -> None:
    assert meta_of_file(metadata_for_file(meta), "file") == meta


def test_a_foreign_value_under_the_files_name_stays_what_it_is() -> None:
    for value in (1, "text", ["a"], {}, {"a": 1}, {"mmcache.meta": "{}"}):
        meta = {"safetensors": value, "grid_thw": [1, 2, 2]}
        assert meta_of_file(metadata_for_file(meta), "file") == meta


def test_bytes_become_base64_text() -> None:
    assert metadata_for_file({"raw": b"\x00\xff"}) == {"mmcache.meta": '{"raw":"AP8="}'}


@pytest.mark.parametrize("text", ["[1]", "not JSON", "{", '{"a":' * 5000])
def test_a_file_whose_entry_metadata_is_no_object_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match=r"photo\.safetensors: mmcache\.meta in its metadata is no JSON object"):
        meta_of_file({"mmcache.meta": text}, "photo.safetensors")


def test_options_are_json_by_name() -> None:
    assert parse_options(["grid_thw=[1, 24, 24]", 'note="a=b"', "none=null"]) == {
        "grid_thw": [1, 24, 24],
        "note": "a=b",
        "none": None,
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["grid"], "--meta grid: must be NAME=JSON"),
        (["=1"], "--meta =1: must be NAME=JSON"),
        (["note=text"], """text needs quotes of its own: --meta 'note="text"'"""),
        (["a=1", "a=2"], "--meta a is given twice"),
        (["safetensors={}"], "this name is for the file's own metadata"),
        (["a=" + "[" * 100_000], "--meta a: "),
    ],
)
def test_a_wrong_option_is_named_with_what_to_do(tmp_path, options: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_options(options)
    assert message in str(caught.value)
    ran = run("put", tmp_path / "x", *KEY, "--mm-hash", "h", *[word for text in options for word in ("--meta", text)])
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
