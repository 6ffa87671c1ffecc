from __future__ import annotations

import enum
import hashlib
import re
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcache.errors import InvalidKey
from mmcache.key import EmbeddingKey, EncoderFingerprint, Scope, store_name

FIELDS = {"model": "google/siglip", "version": "v1", "mm_hash": "h", "lora": "l", "modality": "image", "tenant": "t"}
LIMITS = {"model": 256, "version": 128, "lora": 128, "modality": 32, "tenant": 64}
PRINTABLE = st.characters(min_codepoint=ord("!"), max_codepoint=ord("~"))
WRITABLE = st.characters(exclude_categories=["Cs"])


def key(**changes: object) -> EmbeddingKey:
    return EmbeddingKey(**{**FIELDS, **changes})


def name(of: EmbeddingKey, generation: int = 0, lineage: str = "0123456789abcdef") -> str:
    return store_name(of, lineage=lineage, generation=generation)


class Modality(str, enum.Enum):
    IMAGE = "image"


@pytest.mark.parametrize("field", LIMITS)
@pytest.mark.parametrize("value", ["", "a b", "a\n", "a\x7f", "ä", "\u202e", "\0"], ids=ascii)
def test_a_field_that_is_empty_or_outside_its_alphabet_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(InvalidKey, match=rf"^{field} "):
        key(**{field: value})


@pytest.mark.parametrize(("field", "limit"), LIMITS.items())
def test_a_field_may_be_as_long_as_its_limit_and_no_longer(field: str, limit: int) -> None:
    assert getattr(key(**{field: "x" * limit}), field) == "x" * limit
    with pytest.raises(InvalidKey, match=rf"^{field} has {limit + 1} characters; at most {limit}"):
        key(**{field: "x" * (limit + 1)})


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", [b"bytes", 7, Modality.IMAGE], ids=["bytes", "int", "str subclass"])
def test_a_field_of_another_type_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidKey, match=rf"^{field} must be a str"):
        key(**{field: value})


@pytest.mark.parametrize("field", [field for field in FIELDS if field != "lora"])
def test_only_lora_may_be_absent(field: str) -> None:
    with pytest.raises(InvalidKey, match=rf"^{field} must be a str"):
        key(**{field: None})
    assert key(lora=None).lora is None


@given(st.text(WRITABLE, min_size=1, max_size=1024).filter(lambda text: len(text.encode()) <= 1024))
def test_any_unicode_of_up_to_1024_bytes_is_an_mm_hash(mm_hash: str) -> None:
    of = key(mm_hash=mm_hash)
    assert of.mm_hash == mm_hash
    assert re.fullmatch(r"[a-z0-9.]+", name(of))


@pytest.mark.parametrize("mm_hash", ["", "x" * 1025, "é" * 513, "𝄞" * 257, "x" * 10_000_000], ids=len)
def test_an_mm_hash_that_is_empty_or_beyond_1024_bytes_is_refused_by_name(mm_hash: str) -> None:
    with pytest.raises(InvalidKey, match=r"^mm_hash "):
        key(mm_hash=mm_hash)


def test_an_mm_hash_of_exactly_1024_bytes_is_accepted() -> None:
    for mm_hash in ("x" * 1024, "é" * 512, "𝄞" * 256):
        assert key(mm_hash=mm_hash).mm_hash == mm_hash


def test_an_mm_hash_that_utf8_cannot_write_is_refused_by_name() -> None:
    with pytest.raises(InvalidKey, match=r"^mm_hash has a lone surrogate"):
        key(mm_hash="a\ud800")


def test_the_same_mm_hash_as_image_and_as_video_has_two_names() -> None:
    assert name(key(modality="image")) != name(key(modality="video"))


def test_an_mm_hash_equal_to_the_hex_digest_of_another_has_a_name_of_its_own() -> None:
    of = key(mm_hash="a photograph")
    digests = [of.mm_digest.hex(), of.scope.digest.hex(), hashlib.blake2b(b"a photograph", digest_size=32).hexdigest()]
    names = {name(key(mm_hash=digest)) for digest in digests} | {name(of)}
    assert len(names) == 4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": "a.b", "version": "c"}, {"model": "a", "version": "b.c"}),
        ({"mm_hash": "a.0"}, {"mm_hash": "a"}),
        ({"model": "ab", "version": "c"}, {"model": "a", "version": "bc"}),
        ({"tenant": "a", "model": "b"}, {"tenant": "b", "model": "a"}),
        ({"lora": None}, {"lora": "None"}),
        ({"lora": None, "modality": "1l"}, {"lora": "l", "modality": "1"}),
    ],
)
def test_dots_and_shifted_or_swapped_fields_do_not_collide(one: dict[str, object], other: dict[str, object]) -> None:
    assert name(key(**one)) != name(key(**other))


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_part_of_the_name(field: str) -> None:
    assert name(key(**{field: "other"})) != name(key())


def test_generation_and_lineage_are_part_of_the_name() -> None:
    assert len({name(key()), name(key(), generation=1), name(key(), lineage="another")}) == 3


@given(
    st.fixed_dictionaries({field: st.text(PRINTABLE, min_size=1, max_size=32) for field in LIMITS}),
    st.text(WRITABLE, min_size=1, max_size=256),
    st.integers(0, 2**63 - 1),
)
def test_names_hold_only_lower_case_letters_digits_and_dots(
    fields: dict[str, str], mm_hash: str, generation: int
) -> None:
    of = key(mm_hash=mm_hash, **fields)
    assert re.fullmatch(rf"mmc1\.[a-z0-9]{{1,32}}\.[0-9a-f]{{64}}\.[0-9a-f]{{64}}\.{generation}", name(of, generation))


@pytest.mark.parametrize("lineage", ["", "A", "a.b", "a\n", "x" * 33])
def test_a_lineage_outside_its_alphabet_is_refused(lineage: str) -> None:
    with pytest.raises(InvalidKey, match="lineage"):
        name(key(), lineage=lineage)


def test_a_generation_below_zero_is_refused() -> None:
    with pytest.raises(InvalidKey, match="generation"):
        name(key(), generation=-1)


def test_names_are_the_same_in_every_release_and_process() -> None:
    expected = (
        "mmc1.00c0ffee."
        "17c5cc2693e4e808e407e9855ebde23bd9c5e36f5dd8fdbd81feb7d5446bb2ae."
        "4dc5afdf0f02b8698e1c837effb39de37f7bf6beb8b2050cd426086df6cd4d51.7"
    )
    of = EmbeddingKey("google/siglip-base-patch16-224", "v1", "0b5e…ü", lora="l1", modality="video", tenant="acme")
    assert name(of, 7, "00c0ffee") == expected
    script = f"""
from mmcache.key import EmbeddingKey, store_name
key = EmbeddingKey("google/siglip-base-patch16-224", "v1", {of.mm_hash!r}, lora="l1", modality="video", tenant="acme")
print(store_name(key, lineage="00c0ffee", generation=7))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == expected


def test_a_key_is_immutable_and_equal_keys_hash_alike() -> None:
    of = key()
    with pytest.raises(AttributeError):
        of.model = "other"  # type: ignore[misc]
    assert {of: 1}[key()] == 1


def test_a_scope_is_the_key_without_its_mm_hash_and_is_checked_as_the_key_is() -> None:
    assert key().scope == Scope(tenant="t", model="google/siglip", version="v1", lora="l", modality="image")
    assert key(mm_hash="other").scope == key().scope
    with pytest.raises(InvalidKey, match=r"^modality "):
        Scope(tenant="t", model="m", version="v", lora=None, modality="")
    with pytest.raises(msgspec.ValidationError, match="tenant"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(["", "m", "v", None, "image"]), type=Scope)


def test_every_part_of_a_fingerprint_changes_the_version() -> None:
    parts: dict[str, object] = {
        "weights": "w",
        "dtype": "bfloat16",
        "quantization": "q",
        "processor": "p",
        "extra": "e",
    }
    versions = {EncoderFingerprint(**{**parts, part: "other"}).version for part in parts}
    versions.add(EncoderFingerprint(**parts).version)
    assert len(versions) == 6
    for version in versions:
        assert key(version=version).version == version


@pytest.mark.parametrize(
    ("one", "other"),
    [(None, "None"), (None, float("nan")), ("1", 1), (1, True), (b"a", "YQ=="), ([], None), (["a", "b"], ["ab"])],
)
def test_fingerprints_of_different_configurations_differ(one: object, other: object) -> None:
    def version(processor: object) -> str:
        return EncoderFingerprint(weights="w", dtype="d", processor={"setting": processor}).version

    assert version(one) != version(other)


def test_a_fingerprint_does_not_depend_on_the_order_of_settings() -> None:
    one = EncoderFingerprint(weights="w", dtype="d", processor={"a": 1, "b": {"c": 2, "d": 3}})
    other = EncoderFingerprint(weights="w", dtype="d", processor={"b": {"d": 3, "c": 2}, "a": 1})
    assert one.version == other.version


@pytest.mark.parametrize(
    "processor", [object(), {1: 2}, 2**70, "\ud800"], ids=["object", "int key", "2**70", "surrogate"]
)
def test_a_fingerprint_of_what_is_not_plain_data_is_refused(processor: object) -> None:
    with pytest.raises(InvalidKey, match="plain data"):
        _ = EncoderFingerprint(weights="w", dtype="d", processor=processor).version


@pytest.mark.parametrize("part", ["weights", "dtype", "quantization"])
def test_a_fingerprint_part_that_is_not_a_str_is_refused_by_name(part: str) -> None:
    with pytest.raises(InvalidKey, match=part):
        EncoderFingerprint(**{"weights": "w", "dtype": "d", part: 8})  # type: ignore[arg-type]
