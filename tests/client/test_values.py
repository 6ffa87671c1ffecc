"""What is published comes back bit for bit: every dtype, shape and layout, and several tensors an entry."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from serving import Serving, key_of, raw_object

from mmcache import EmbeddingKey, MMCache
from mmcache.entry import DTYPE_BYTES, PREFIX_BYTES, decode_entry
from mmcache.memory.host import dtype_of

AVAILABLE = [name for name in DTYPE_BYTES if hasattr(torch, name)]


class Pair(NamedTuple):
    """A writer, a reader in which nothing is local, and keys of their own."""

    writer: MMCache
    reader: MMCache
    key: Callable[[int | str], EmbeddingKey]


@pytest.fixture(scope="module", params=["sidecar", "embedded"])
def pair(serving: Serving, request: pytest.FixtureRequest) -> Pair:
    attach = request.param
    writer = serving.connect(attach=attach, strict=True)
    reader = serving.connect(attach=attach, strict=True, local_entries=False)
    return Pair(writer, reader, functools.partial(key_of, version=attach))


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous()
    return bytes(flat.view(torch.uint8).flatten().tolist()) if flat.dim() else bits(flat.reshape(1))


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_dtype_comes_back_bit_for_bit(pair: Pair, name: str) -> None:
    writer, reader, key = pair
    dtype = dtype_of(name)
    raw = torch.randint(0, 256 if name != "bool" else 2, (6, 16), dtype=torch.uint8)
    tensor = raw.view(torch.bool) if name == "bool" else raw.view(dtype)
    assert writer.put(key(f"dtype-{name}"), tensor).status == "stored"
    found = reader.get(key(f"dtype-{name}"))
    assert found is not None
    assert found.source == "store"
    assert found.tensor.dtype is dtype
    assert found.tensor.shape == tensor.shape
    assert bits(found.tensor) == bits(tensor)


@pytest.mark.parametrize(
    "shape", [(), (1,), (0,), (3, 0, 5), (2, 3, 5, 7), (1, 1, 1, 1, 1, 1, 1, 4)], ids=lambda shape: f"shape{shape}"
)
def test_any_rank_and_zero_elements(pair: Pair, shape: tuple[int, ...]) -> None:
    writer, reader, key = pair
    tensor = torch.randn(shape)
    assert writer.put(key(f"shape-{shape}"), tensor).readable
    found = reader.get(key(f"shape-{shape}"))
    assert found is not None
    assert torch.equal(found.tensor, tensor)
    assert found.tensor.shape == tensor.shape


def test_what_is_not_contiguous_is_published_by_its_values(pair: Pair) -> None:
    writer, reader, key = pair
    base = torch.arange(24).reshape(4, 6)
    views = {"transposed": base.t(), "strided": base[::2, 1::2], "expanded": base[:1].expand(3, 6)}
    for name, view in views.items():
        assert writer.put(key(f"layout-{name}"), view).readable
        found = reader.get(key(f"layout-{name}"))
        assert found is not None
        assert torch.equal(found.tensor, view)


def test_conjugated_and_differentiable_tensors_are_published_by_their_values(pair: Pair) -> None:
    writer, reader, key = pair
    lazy = torch.randn(4, dtype=torch.complex64).conj()
    leaf = torch.randn(4, requires_grad=True)
    assert writer.put(key("conj"), {"lazy": lazy, "leaf": leaf}).readable
    found = reader.get(key("conj"))
    assert found is not None
    assert torch.equal(found.tensors["lazy"], lazy)
    assert torch.equal(found.tensors["leaf"], leaf.detach())


def test_an_entry_holds_several_tensors_and_metadata(pair: Pair) -> None:
    writer, reader, key = pair
    tensors = {f"deepstack_{level}": torch.randn(7, 3 + level).bfloat16() for level in range(4)}
    meta = {"grid_thw": [1, 16, 16], "num_tokens": 64, "nested": {"a": None, "b": [True, 1.5, b"x"]}}
    assert writer.put(key("several"), tensors, meta=meta, cost_ms=12.5).readable
    found = reader.get(key("several"))
    assert found is not None
    assert list(found.tensors) == list(tensors)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert found.meta == meta
    assert found.key == key("several")
    [info] = reader.lookup([key("several")])
    assert info is not None
    assert info.meta == meta
    assert [spec.name for spec in info.tensors] == list(tensors)


def test_each_entry_of_a_batch_may_have_metadata_of_its_own(serving: Serving) -> None:
    cache = serving.connect(strict=True)
    keys = [key_of(f"own-meta-{number}") for number in range(3)]
    cache.put_many([(key, (torch.ones(2), {"n": n})) for n, key in enumerate(keys[:2])], meta={"all": True})
    computed = cache.get_or_compute_many(keys, lambda some: [(torch.zeros(2), {"n": 9})] * len(some), meta={"all": 1})
    assert [dict(embedding.meta) for embedding in computed] == [
        {"all": True, "n": 0},
        {"all": True, "n": 1},
        {"all": 1, "n": 9},
    ]
    assert [embedding.source for embedding in computed] == ["local", "local", "computed"]


def test_what_lies_between_tensors_is_zero_whatever_was_in_that_memory_before(pair: Pair) -> None:
    writer, reader, key = pair
    pool = writer._attacher.require().pool
    dirty = pool.allocate(pool.capacity, deadline=0.0)
    ctypes.memset(dirty.address, 0xA5, dirty.nbytes)
    pool.release(dirty)
    tensors = {f"odd-{size}": torch.full((size,), 0x5A, dtype=torch.uint8) for size in (1, 65, 0, 127, 3, 4097)}
    assert writer.put(key("padding"), tensors).status == "stored"
    raw = raw_object(reader, key("padding"))
    header = decode_entry(memoryview(raw), key=key("padding"), generation=0, verify="full")
    used = bytearray(len(raw) - PREFIX_BYTES)
    for spec in header.tensors:
        used[spec.offset : spec.offset + spec.nbytes] = b"\1" * spec.nbytes
    between = [byte for byte, is_used in zip(raw[PREFIX_BYTES:], used, strict=True) if not is_used]
    assert len(between) > 100
    assert not any(between)
    assert raw[:PREFIX_BYTES].count(0xA5) < 100, "nor in the rest of the prefix"


def test_like_tells_the_size_and_refuses_what_looks_different(pair: Pair) -> None:
    writer, reader, key = pair
    tensor = torch.randn(5, 7)
    assert writer.put(key("like"), tensor).readable
    found = reader.get(key("like"), like=torch.empty(5, 7, device="meta"))
    assert found is not None
    assert torch.equal(found.tensor, tensor)


@pytest.mark.parametrize("other", [torch.empty(7, 5), torch.empty(5, 7, dtype=torch.float16), torch.empty(5, 700)])
def test_an_entry_that_is_not_like_what_its_reader_expects_is_a_miss(serving: Serving, other: torch.Tensor) -> None:
    writer = serving.connect()
    assert writer.put(key_of("unlike"), torch.randn(5, 7)).readable
    for local in (True, False):
        reader = serving.connect(local_entries=local)
        assert reader.get(key_of("unlike"), like=other) is None
        assert reader.stats()["miss.unexpected"] == 1
        assert reader.get(key_of("unlike")) is not None


def test_a_tensor_from_empty_is_published_without_a_copy_and_can_be_used_again(serving: Serving) -> None:
    writer = serving.connect(strict=True, local_entries=False)
    reader = serving.connect(strict=True, local_entries=False)
    tensor = writer.empty((100, 100), torch.float32)
    for number in range(3):
        tensor.fill_(number)
        used = writer.stats()["pool.used"]
        assert writer.put(key_of(f"in-place-{number}"), tensor).status == "stored"
        assert writer.stats()["pool.used"] == used
    for number in range(3):
        found = reader.get(key_of(f"in-place-{number}"))
        assert found is not None
        assert torch.equal(found.tensor, torch.full((100, 100), float(number)))
    del tensor
    assert writer.stats()["pool.used"] == 0


def test_entries_larger_than_guessed_cost_a_second_round_and_are_whole(serving: Serving) -> None:
    writer = serving.connect(strict=True)
    reader = serving.connect(strict=True, local_entries=False)
    sizes = [10, 3_000_000, 20, 700_000]
    keys = [key_of(f"grows-{size}", version="grows") for size in sizes]
    writer.put_many([(key, torch.arange(size, dtype=torch.float32)) for key, size in zip(keys, sizes, strict=True)])
    found = reader.get_many(keys)
    for embedding, size in zip(found, sizes, strict=True):
        assert embedding is not None
        assert torch.equal(embedding.tensor, torch.arange(size, dtype=torch.float32))


def test_a_batch_larger_than_the_pool_gives_what_fits(serving: Serving) -> None:
    writer = serving.connect(strict=True)
    reader = serving.connect(pool_bytes="8MiB", local_entries=False)
    keys = [key_of(f"batch-{number}", version="large-batch") for number in range(12)]
    for key in keys:
        assert writer.put(key, torch.ones(1 << 18)).readable
    found = reader.get_many(keys)
    assert sum(embedding is not None for embedding in found) >= 4
    assert reader.stats()["miss.no_memory"] == sum(embedding is None for embedding in found)
    del found
    assert reader.get(keys[-1]) is not None
