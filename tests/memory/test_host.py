"""Tensors in pool blocks: their values outlive everything that happens to the pool meanwhile."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from mmcache.entry import DTYPE_BYTES
from mmcache.errors import InvalidEntry, LifecycleError
from mmcache.memory import host
from mmcache.memory.block import BlockState
from mmcache.memory.host import HostMemory, copy_into, dtype_name, dtype_of, tensor_maker
from mmcache.memory.pool import RegisteredPool

PAGE = 4096
DTYPES = sorted(host._DTYPES)


def tensor_in(pool, block, shape, dtype=torch.float32, offset=0):
    return tensor_maker(block, offset=offset, dtype=dtype, shape=shape)(pool.export(block))


def random_bits(shape, dtype):
    count = torch.Size(shape).numel() * dtype.itemsize
    highest = 2 if dtype is torch.bool else 256  # other bytes are no truth values, and torch itself changes them
    return torch.randint(0, highest, (count,), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one, other):
    return bytes(bits_of(one)) == bytes(bits_of(other))


def bits_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy()


def test_tensors_keep_their_values_while_10_000_gets_and_puts_pass_through_a_pool_of_32_entries(make_pool):
    pool = make_pool(32)

    def put(name, value):
        block = pool.allocate(PAGE, deadline=0)
        tensor_in(pool, block, (1024,)).fill_(value)
        return pool.keep(name, block, value)

    def get(name):
        [found] = pool.find([name])
        if found is None:
            return None
        value, export = found
        return tensor_maker(export.block, offset=0, dtype=torch.float32, shape=(32, 32))(export), value

    for number in range(4):
        pool.unhold(put(f"held{number}", 1000.0 + number).block)
    whole = get("held0")[0]
    part = get("held1")[0][3:7]
    reshaped = get("held2")[0].reshape(4, 256).t()
    cells = get("held3")[0].view(torch.int32)[::2, ::3]
    pool.forget("held3")
    choose = random.Random(1)
    hits = 0
    for number in range(10_000):
        found = get(f"name{choose.randrange(64)}")
        if found is not None:
            hits += 1
            assert found[0][0, 0].item() == found[0][31, 31].item() == found[1]
        if number % 2:
            pool.unhold(put(f"name{choose.randrange(64)}", float(number)).block)
        del found
    assert hits > 1000
    assert pool.stats()["evictions"] > 1000
    assert torch.equal(whole, torch.full((32, 32), 1000.0))
    assert torch.equal(part, torch.full((4, 32), 1001.0))
    assert torch.equal(reshaped, torch.full((256, 4), 1002.0))
    assert torch.equal(cells, torch.full((16, 11), 1003.0).view(torch.int32))
    del whole, part, reshaped, cells
    assert pool.stats()["held_blocks"] == 0


def test_a_block_is_freed_when_the_last_view_of_its_tensor_is_gone(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    tensor = tensor_in(pool, block, (32, 32))
    pool.release(block)
    piece, array = tensor[1, 2:], tensor.numpy()
    del tensor
    assert block.state is BlockState.FILLING
    del piece
    assert block.state is BlockState.FILLING
    del array
    assert block.state is BlockState.FREED


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_is_copied_in_and_read_back_bit_for_bit_contiguous_or_not(make_pool, name):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    dtype = dtype_of(name)
    assert dtype_name(dtype) == name
    source = random_bits((6, 4, 2), dtype)
    for tensor in (source, source.permute(2, 0, 1), source[::2, 1:]):
        target = tensor_in(pool, block, tuple(tensor.shape), dtype, offset=256)
        copy_into(pool.view(block)[256 : 256 + tensor.numel() * tensor.itemsize], tensor)
        assert target.dtype is dtype
        assert target.is_contiguous()
        assert same_bits(target, tensor)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 3), (1, 1, 1, 1, 5), (2,) * 10])
def test_every_rank_is_written_in_place(make_pool, shape):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    tensor = tensor_in(pool, block, shape, torch.int32)
    tensor.copy_(torch.arange(tensor.numel(), dtype=torch.int32).view(shape))
    assert tensor.shape == shape
    stored = torch.frombuffer(pool.view(block), dtype=torch.int32)[: tensor.numel()]
    assert torch.equal(stored, torch.arange(tensor.numel(), dtype=torch.int32))
    copied = torch.ones(shape, dtype=torch.int32)
    copy_into(pool.view(block)[: copied.numel() * 4], copied)
    assert torch.equal(tensor, copied)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2)])
def test_a_tensor_without_elements_holds_nothing(make_pool, shape):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    tensor = tensor_in(pool, block, shape, torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == (shape, torch.bfloat16)
    copy_into(pool.view(block)[:0], tensor)
    pool.release(block)
    assert block.state is BlockState.FREED


def test_several_tensors_of_one_entry_hold_its_block_each(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    one, two = tensor_in(pool, block, (8,)), tensor_in(pool, block, (8,), offset=256)
    pool.release(block)
    one.fill_(1)
    two.fill_(2)
    del one
    assert block.state is BlockState.FILLING
    assert torch.equal(two, torch.full((8,), 2.0))
    del two
    assert block.state is BlockState.FREED


@pytest.mark.parametrize(
    ("offset", "shape"),
    [(0, (5,)), (4, (4,)), (1, (2, 2)), (17, (0,)), (-4, (4,)), (0, (-1,)), (0, (-2, -2)), (16, ())],
)
def test_a_tensor_that_does_not_lie_within_its_block_is_refused(make_pool, offset, shape):
    pool = make_pool(2)
    block = pool.allocate(16, deadline=0)
    with pytest.raises(ValueError, match="does not lie within"):
        tensor_maker(block, offset=offset, dtype=torch.float32, shape=shape)
    assert tensor_in(pool, block, (2, 2)).numel() == 4
    pool.release(block)
    assert block.state is BlockState.FREED


def test_gradients_conjugates_and_negatives_are_copied_as_plain_values(make_pool):
    pool = make_pool(1)
    block = pool.allocate(PAGE, deadline=0)
    numbers = torch.randn(4, dtype=torch.complex64)
    for tensor in (torch.randn(4, requires_grad=True), numbers.conj(), numbers.conj().imag):
        target = tensor_in(pool, block, (4,), tensor.dtype)
        copy_into(pool.view(block)[: 4 * tensor.itemsize], tensor)
        assert torch.equal(target, tensor.detach())
        assert not target.requires_grad


@pytest.mark.parametrize("nbytes", [0, 15, 17])
def test_a_view_of_another_size_is_refused(nbytes):
    with pytest.raises(ValueError, match="16 bytes"):
        copy_into(memoryview(bytearray(nbytes)), torch.zeros(4))


def test_dtypes_outside_the_format_are_refused_by_name():
    with pytest.raises(InvalidEntry, match="qint8"):
        dtype_name(torch.qint8)
    with pytest.raises(InvalidEntry, match="float3"):
        dtype_of("float3")
    with pytest.raises(InvalidEntry):
        dtype_of("Tensor")


def test_memory_is_page_aligned_zeroed_and_writable_to_its_end():
    memory = HostMemory(3 * PAGE)
    assert memory.address % PAGE == 0
    assert memory.mapping[:] == bytes(3 * PAGE)
    pool = RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping)
    pool.view(pool.allocate(3 * PAGE, deadline=0))[-1] = 7
    assert memory.mapping[-1] == 7


def test_a_tensor_outlives_pool_and_memory():
    memory = HostMemory(PAGE)
    pool = RegisteredPool(memory.address, memory.nbytes, owner=memory.mapping)
    tensor = tensor_in(pool, pool.allocate(PAGE, deadline=0), (1024,)).fill_(5)
    memory.close()
    memory.close()
    with pytest.raises(LifecycleError):
        memory.address  # noqa: B018
    del pool, memory
    gc.collect()
    assert torch.equal(tensor, torch.full((1024,), 5.0))


def test_dtypes_are_those_of_the_entry_format_and_have_its_sizes():
    assert {name: dtype_of(name).itemsize for name in DTYPES}.items() <= DTYPE_BYTES.items()
