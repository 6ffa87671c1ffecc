"""What can never be an entry is refused before anything is sent; what cannot be stored now is dropped and counted."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from serving import Serving, key_of, plant

from mmcache import EntryDropped, InvalidEntry, LifecycleError, MMCache
from mmcache.entry import PREFIX_BYTES, EntryHeader, encode_prefix, lay_out, payload_checksum


@pytest.fixture(scope="module")
def cache(serving: Serving) -> MMCache:
    return serving.connect()


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "dense"),
        (torch.eye(3).to_sparse_csr(), "dense"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "quantised"),
        ([1.0, 2.0], "not of a list"),
        (None, "not of a NoneType"),
        ((torch.ones(1), "no metadata"), "named tensors"),
        ({"a": [1.0]}, "not a torch.Tensor"),
        ({}, "at least one tensor"),
        ({"": torch.ones(1)}, "name"),
        ({"x" * 300: torch.ones(1)}, "name"),
        ({str(number): torch.ones(1) for number in range(400)}, "400 tensors"),
    ],
)
def test_what_is_no_dense_tensor_is_refused(cache: MMCache, tensor: object, words: str) -> None:
    before = cache.stats()
    with pytest.raises(InvalidEntry, match=words):
        cache.put(key_of("refused"), tensor)  # type: ignore[arg-type]
    assert cache.stats()["bytes_published" if "bytes_published" in before else "session.fresh"] == before.get(
        "bytes_published", 1
    )
    assert cache.lookup([key_of("refused")]) == [None]


@pytest.mark.parametrize(
    "meta", [{"large": "x" * 5000}, {"object": object()}, {1: "key"}, {"tensor": torch.ones(1)}, {"big": 1 << 70}]
)
def test_metadata_that_is_large_or_not_plain_is_refused_before_anything_is_sent(
    cache: MMCache, meta: dict[str, object]
) -> None:
    with pytest.raises(InvalidEntry, match="meta"):
        cache.put_many([(key_of("good"), torch.ones(3)), (key_of("meta"), torch.ones(3))], meta=meta)
    assert cache.lookup([key_of("good"), key_of("meta")]) == [None, None]
    assert cache.get(key_of("good")) is None


def test_an_entry_larger_than_the_pool_is_dropped_and_counted(serving: Serving) -> None:
    small = serving.connect(pool_bytes="1MiB")
    result = small.put(key_of("larger-than-pool"), torch.ones(1 << 19))
    assert result == ("dropped", "larger_than_pool")
    assert small.stats()["put.larger_than_pool"] == 1
    with pytest.raises(EntryDropped, match="larger_than_pool"):
        serving.connect(pool_bytes="1MiB", strict=True).put(key_of("larger-than-pool"), torch.ones(1 << 19))


def test_an_entry_larger_than_the_pool_is_a_miss_for_its_reader(serving: Serving, cache: MMCache) -> None:
    assert cache.put(key_of("large"), torch.ones(1 << 19)).readable
    small = serving.connect(pool_bytes="1MiB")
    assert small.get(key_of("large")) is None
    assert small.stats()["miss.larger_than_pool"] == 1


def test_values_that_are_not_finite_are_dropped_where_that_is_asked_for(serving: Serving) -> None:
    checking = serving.connect(check_finite=True)
    for number, bad in enumerate((torch.tensor([1.0, float("nan")]), torch.tensor([float("inf")]).bfloat16())):
        assert checking.put(key_of(f"not-finite-{number}"), bad) == ("dropped", "not_finite")
    assert checking.put(
        key_of("finite"), {"a": torch.ones(3).to(torch.float8_e5m2), "b": torch.tensor([True])}
    ).readable
    embedding = checking.get_or_compute(key_of("not-finite-2"), lambda: torch.tensor([float("nan")]))
    assert embedding.tensor.isnan().all(), "the caller gets what it computed"
    assert checking.lookup([key_of("not-finite-2")]) == [None]


def test_foreign_and_damaged_objects_under_our_names_are_misses_with_a_reason(serving: Serving, cache: MMCache) -> None:
    def entry(number: str) -> bytearray:
        specs, nbytes = lay_out([("embedding", "uint8", (1000,))])
        header = EntryHeader(key_of(number), 0, specs, {}, 0.0, "test", 1)
        payload = bytes(range(250)) * 4
        checksum = payload_checksum(memoryview(payload))
        return bytearray(encode_prefix(header, payload_nbytes=nbytes, payload_checksum=checksum) + payload)

    flipped = entry("flipped")
    flipped[-1] ^= 1
    prefix = entry("prefix")
    prefix[100] ^= 1
    newer = entry("newer")
    newer[4] = 9
    plant(cache, key_of("foreign"), b"not one of ours" * 500)
    plant(cache, key_of("short"), b"x")
    plant(cache, key_of("truncated"), entry("truncated")[:-8])
    plant(cache, key_of("flipped"), flipped)
    plant(cache, key_of("swapped"), entry("another"))
    plant(cache, key_of("prefix"), prefix)
    plant(cache, key_of("no-payload"), entry("no-payload")[:PREFIX_BYTES])
    plant(cache, key_of("newer"), newer)
    plant(cache, key_of("sound"), entry("sound"))
    reader = serving.connect()
    assert reader.get(key_of("sound")) is not None
    reasons = {
        "foreign": "magic",
        "short": "length",
        "truncated": "length",
        "flipped": "payload_checksum",
        "swapped": "identity",
        "prefix": "prefix_checksum",
        "no-payload": "length",
        "newer": "version",
    }
    for number, reason in reasons.items():
        before = reader.stats().get(f"miss.{reason}", 0)
        assert reader.get(key_of(number)) is None
        assert reader.stats()[f"miss.{reason}"] == before + 1, number
    assert reader.get_or_compute(key_of("newer"), lambda: torch.ones(2)).source == "computed"
    assert reader.stats()["put.damaged"] == 1, "it cannot be removed while this read's lease stands"


def test_a_key_whose_entry_is_corrupt_is_encoded_once_more_and_served_again(serving: Serving, cache: MMCache) -> None:
    plant(cache, key_of("corrupt"), b"not one of ours" * 500)
    cache.put(key_of("beside"), torch.ones(2))
    clients = [serving.connect(local_entries=False) for _ in range(4)]
    before = inspect(cache)
    encoded: list[torch.Tensor] = []

    def encode() -> torch.Tensor:
        encoded.append(torch.full((2,), 7.0))
        return encoded[-1]

    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(client.get_or_compute, key_of("corrupt"), encode) for client in clients]
        assert [embedding.result(60).tensor.tolist() for embedding in found] == [[7.0, 7.0]] * 4
    assert len(encoded) == 1
    reader = serving.connect()
    embedding = reader.get(key_of("corrupt"))
    assert embedding is not None
    assert embedding.source == "store"
    after = inspect(cache)
    assert after["abandon.corrupt"] - before.get("abandon.corrupt", 0) == 1
    assert after["head"] - before["head"] == 1
    assert cache.get(key_of("beside")) is not None, "no other key is invalidated with it"


def inspect(cache: MMCache) -> dict[str, int]:
    return cache._channel.inspect(deadline=time.monotonic() + 60)


def test_use_after_close_is_an_error(serving: Serving) -> None:
    closed = serving.connect()
    closed.close()
    closed.close()
    for call in (
        lambda: closed.get(key_of(1)),
        lambda: closed.put(key_of(1), torch.ones(1)),
        lambda: closed.get_or_compute(key_of(1), lambda: torch.ones(1)),
        lambda: closed.lookup([key_of(1)]),
        lambda: closed.empty((1,)),
    ):
        with pytest.raises(LifecycleError, match="closed"):
            call()
    assert closed.stats()["session.fresh"] == 0


def test_what_the_callers_function_raises_reaches_the_caller_and_its_claims_pass_on(
    serving: Serving, cache: MMCache
) -> None:
    def fails() -> torch.Tensor:
        raise RuntimeError("the encoder is out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        cache.get_or_compute(key_of("fails"), fails)
    other = serving.connect()
    assert other.get_or_compute(key_of("fails"), lambda: torch.ones(1)).source == "computed"
    assert other.stats()["put.stored"] == 1
    with pytest.raises(InvalidEntry, match="given 1 keys and returned 2"):
        cache.get_or_compute_many([key_of("two")], lambda keys: [torch.ones(1)] * 2)
    with pytest.raises(InvalidEntry, match="NoneType"):
        cache.get_or_compute(key_of("two"), lambda: None)  # type: ignore[arg-type,return-value]
    assert other.get_or_compute(key_of("two"), lambda: torch.ones(1)).source == "computed"
    assert other.stats()["put.stored"] == 2
