from __future__ import annotations

import itertools
import time
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_engines import feature

from mmcache.integrations.vllm.adapters import NoDigest
from mmcache.integrations.vllm.identity import EncoderIdentity, RequestKey, request_key
from mmcache.key import EmbeddingKey

PLAIN = EncoderIdentity(model="org/model", version="f1-1", dtype="bfloat16")
TOWER = EncoderIdentity(model="org/model", version="f1-1", dtype="bfloat16", tower_lora=True)
NUMBERING = EncoderIdentity(model="org/model", version="f1-1", dtype="bfloat16", local_identifiers=True)
DIGEST = "0123456789abcdef" * 4


def keyed(
    identity: EncoderIdentity = PLAIN,
    item: SimpleNamespace | None = None,
    *,
    lora: str | NoDigest | None = None,
    salt: object = None,
    tenant: str = "default",
) -> RequestKey:
    return request_key(
        identity,
        item or feature(DIGEST),
        lora_digest=lora,
        cache_salt=salt,
        tenant=tenant,  # type: ignore[arg-type]
    )


def key(*arguments: object, **named: object) -> EmbeddingKey:
    found = keyed(*arguments, **named)  # type: ignore[arg-type]
    assert found.key is not None, found.reason
    assert found.reason == ""
    return found.key


def test_a_key_names_model_version_item_modality_and_tenant() -> None:
    assert key(tenant="t") == EmbeddingKey("org/model", "f1-1", DIGEST, None, "image", "t")
    assert key(item=feature(DIGEST, "video")).modality == "video"


def test_the_engine_s_identifier_stands_in_where_there_is_no_hash() -> None:
    assert key(item=feature(None, identifier="user-uuid")).mm_hash == "user-uuid"
    assert key(item=feature("", identifier="user-uuid")).mm_hash == "user-uuid"


@pytest.mark.parametrize("uuid", ["a", "../../etc/passwd", "a b", "ü/ß", "\n", "\0", "🖼", "x" * 1024, "~", "mmc1.a.b"])
def test_a_uuid_may_be_any_text(uuid: str) -> None:
    assert key(item=feature(uuid)).mm_hash == uuid


@pytest.mark.parametrize("uuid", ["x" * 1025, "ü" * 1025, "x" * (1 << 20), "", None, b"bytes", 7, ["x"]], ids=range(8))
def test_what_no_key_can_hold_is_not_shared(uuid: object) -> None:
    assert keyed(item=feature(uuid, identifier=uuid)) == RequestKey(None, "mm_hash")


def test_nor_is_what_is_too_long_in_utf_8_alone() -> None:
    assert keyed(item=feature("ü" * 1000)) == RequestKey(None, "invalid")


def test_a_lone_surrogate_is_not_shared() -> None:
    assert keyed(item=feature("\ud800")) == RequestKey(None, "invalid")


@pytest.mark.parametrize("modality", ["", "a b", "x" * 33, None, 7, "ä"])
def test_an_impossible_modality_is_not_shared(modality: object) -> None:
    assert keyed(item=feature(DIGEST, modality)) == RequestKey(None, "invalid")


def test_a_feature_without_any_name_is_not_shared() -> None:
    assert keyed(item=SimpleNamespace()) == RequestKey(None, "mm_hash")  # type: ignore[arg-type]


def test_a_huge_uuid_takes_no_longer_than_a_small_one() -> None:
    huge = feature("x" * (64 << 20))

    def seconds(item: SimpleNamespace) -> float:
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter()
            keyed(NUMBERING, item, salt="x")
            best = min(best, time.perf_counter() - started)
        return best

    assert seconds(huge) < max(seconds(feature("x" * 100)) * 10, 0.001)  # reading 64 MiB takes several times this


@pytest.mark.parametrize(
    "local",
    [
        "renderer0-mm-1-image-0",
        "renderer12-mm-123456-vision_chunk-31",
        "renderer-1-mm-7-video-0",
        "renderer0-mm-0-a-b-0",
    ],
)
@pytest.mark.parametrize("identity", [PLAIN, TOWER, NUMBERING])
def test_numbers_that_vllm_gave_are_refused_wherever_they_come_from(identity: EncoderIdentity, local: str) -> None:
    assert keyed(identity, feature(local)) == RequestKey(None, "request_local")


@pytest.mark.parametrize(
    "uuid", ["renderer0-mm-1-image", "renderer-mm-1-image-0", "my-renderer0-mm-1-image-0", "renderer0-mm-1-image-0.png"]
)
def test_uuids_that_only_resemble_them_are_not(uuid: str) -> None:
    assert key(item=feature(uuid)).mm_hash == uuid


@pytest.mark.parametrize("digest", [DIGEST, DIGEST * 2])
def test_an_engine_that_numbers_items_may_have_hashed_the_number(digest: str) -> None:
    """With arguments of the request's own, vLLM hashes the uuid with them: the number, where there was none."""
    assert keyed(NUMBERING, feature(digest)) == RequestKey(None, "request_local")
    assert key(PLAIN, feature(digest)).mm_hash == digest


@pytest.mark.parametrize("uuid", ["sha256:" + DIGEST, DIGEST[:-1], DIGEST.upper(), "cat.png"])
def test_and_other_uuids_are_shared_by_it_all_the_same(uuid: str) -> None:
    assert key(NUMBERING, feature(uuid)).mm_hash == uuid


def test_a_number_behind_an_adapter_s_name_is_refused_too() -> None:
    behind = feature(None, identifier="style:renderer0-mm-1-image-0")
    assert keyed(TOWER, behind, lora="d") == RequestKey(None, "request_local")


def test_an_adapter_counts_where_it_reaches_the_encoder() -> None:
    assert key(PLAIN, lora="digest").lora is None
    assert key(PLAIN, lora=NoDigest.UNKNOWN).lora is None
    assert key(TOWER, lora=None).lora is None
    assert key(TOWER, lora="digest").lora == "digest"
    assert key(TOWER, lora="other") != key(TOWER, lora="digest")


def test_the_hash_without_the_adapter_s_name_is_the_item_s() -> None:
    named = feature(DIGEST, identifier=f"style:{DIGEST}")
    assert key(TOWER, named, lora="digest").mm_hash == DIGEST


def test_options_for_adapters_make_other_adapters_of_them() -> None:
    narrow = EncoderIdentity(
        model="org/model", version="f1-1", dtype="bfloat16", tower_lora=True, lora_options="{'modules': ['qkv']}"
    )
    assert key(narrow, lora="digest").lora != key(TOWER, lora="digest").lora
    assert key(narrow, lora="digest").lora == key(narrow, lora="digest").lora
    assert key(narrow, lora=None) == key(TOWER, lora=None)


@pytest.mark.parametrize(
    ("unknown", "reason"), [(NoDigest.UNKNOWN, "lora_unknown"), (NoDigest.PENDING, "lora_pending")]
)
def test_an_adapter_that_is_not_known_is_not_shared(unknown: NoDigest, reason: str) -> None:
    assert keyed(TOWER, lora=unknown) == RequestKey(None, reason)


def test_a_salt_makes_a_tenant_of_its_own_below_the_configured_one() -> None:
    salted = key(salt="pepper", tenant="team")
    assert salted.tenant.startswith("team~")
    assert salted.tenant == key(salt="pepper", tenant="team").tenant
    assert key(salt="", tenant="team").tenant == key(salt=None, tenant="team").tenant == "team"


@pytest.mark.parametrize("salt", ["x" * 4097, "x" * (1 << 20), 7, b"x"])
def test_an_impossible_salt_is_not_shared_rather_than_ignored(salt: object) -> None:
    assert keyed(salt=salt) == RequestKey(None, "cache_salt")


def test_a_salt_may_be_any_text() -> None:
    for salt in ("ä", "\ud800", "\0", "x" * 4096, " "):
        assert len(key(salt=salt, tenant="t" * 64).tenant) <= 64


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="~"), min_size=1, max_size=64)


@given(st.lists(st.tuples(NAMES, st.none() | st.text(max_size=8)), min_size=2, max_size=8, unique=True))
@example([("a", "b"), ("ab", ""), ("", "ab"), ("a" * 20, "b"), ("a" * 21, "bc"), ("a" * 21 + "b", "c")])
def test_no_two_of_tenant_and_salt_meet(pairs: list[tuple[str, str | None]]) -> None:
    distinct = {(tenant, salt or None) for tenant, salt in pairs if tenant}
    assert len({key(salt=salt, tenant=tenant).tenant for tenant, salt in distinct}) == len(distinct)


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8),
            st.sampled_from(["image", "video", "audio"]),
            st.none() | st.sampled_from(["d1", "d2"]),
            st.none() | st.sampled_from(["s1", "s2"]),
            st.sampled_from(["default", "t"]),
        ),
        max_size=12,
        unique=True,
    )
)
def test_no_two_different_items_have_one_key(items: list[tuple[str, str, str | None, str | None, str]]) -> None:
    keys = [
        key(TOWER, feature(uuid, modality), lora=lora, salt=salt, tenant=tenant)
        for uuid, modality, lora, salt, tenant in items
    ]
    for one, other in itertools.combinations(keys, 2):
        assert (one.scope.digest, one.mm_digest) != (other.scope.digest, other.mm_digest)


ANYTHING = (
    st.none() | st.text(st.characters()) | st.binary() | st.integers() | st.lists(st.text()) | st.just("x" * (1 << 20))
)


@given(ANYTHING, ANYTHING, ANYTHING, ANYTHING, st.sampled_from([PLAIN, TOWER, NUMBERING]))
def test_nothing_that_a_client_sends_raises(
    mm_hash: object, identifier: object, modality: object, salt: object, identity: EncoderIdentity
) -> None:
    found = keyed(identity, feature(mm_hash, modality, identifier), salt=salt, lora="digest")
    assert (found.key is None) == bool(found.reason)
