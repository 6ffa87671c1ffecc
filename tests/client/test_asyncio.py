"""The asyncio client has the same names, arguments and results, and never blocks the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence

import pytest
import torch
from serving import Serving, key_of

from mmcache import AsyncMMCache, EmbeddingKey, MMCache
from mmcache.client.aio import MAX_COMPUTATIONS


def test_it_has_the_same_names_and_arguments_as_the_other_client() -> None:
    for name, member in inspect.getmembers(MMCache, inspect.isfunction):
        if name.startswith("_"):
            continue
        ours = inspect.signature(getattr(AsyncMMCache, name))
        assert list(ours.parameters) == list(inspect.signature(member).parameters), name


def test_publish_read_and_compute(serving: Serving) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            tensor = torch.randn(10)
            assert (await cache.put(key_of("aio"), tensor, meta={"n": 1})).status == "stored"
            found = await cache.get(key_of("aio"))
            assert found is not None
            assert torch.equal(found.tensor, tensor)
            assert (await cache.lookup([key_of("aio")]))[0] is not None
            assert [r.status for r in await cache.put_many([(key_of("aio"), tensor)])] == ["duplicate"]
            assert (await cache.get_many([key_of("aio"), key_of("aio-none")]))[1] is None
            assert tuple((await cache.empty((2, 3))).shape) == (2, 3)
            assert cache.stats()["put.stored"] == 1

    asyncio.run(run())


def test_many_at_once_compute_each_key_once_while_the_loop_goes_on(serving: Serving) -> None:
    computed: list[EmbeddingKey] = []

    async def encode(keys: Sequence[EmbeddingKey]) -> list[torch.Tensor]:
        computed.extend(keys)
        await asyncio.sleep(0)
        return [torch.full((4,), float(key.mm_hash.split("-")[-1])) for key in keys]

    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            keys = [key_of(f"aio-many-{number}") for number in range(20)]
            answers = await asyncio.gather(*(cache.get_or_compute_many(keys, encode, batch=4) for _ in range(8)))
            for answer in answers:
                assert [int(e.tensor[0]) for e in answer] == list(range(20))

    asyncio.run(run())
    assert sorted(computed, key=str) == sorted(set(computed), key=str)
    assert len(computed) == 20


def test_what_the_coroutine_raises_reaches_the_caller(serving: Serving) -> None:
    async def fails() -> torch.Tensor:
        raise RuntimeError("no encoder")

    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            with pytest.raises(RuntimeError, match="no encoder"):
                await cache.get_or_compute(key_of("aio-fails"), fails)

    asyncio.run(run())


def test_a_cancelled_computation_gives_its_claim_up(serving: Serving) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            begun = asyncio.Event()

            async def never() -> torch.Tensor:
                begun.set()
                await asyncio.Event().wait()
                raise AssertionError

            task = asyncio.create_task(cache.get_or_compute(key_of("aio-cancelled"), never))
            await begun.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

            async def encode() -> torch.Tensor:
                return torch.ones(1)

            other = await cache.get_or_compute(key_of("aio-cancelled"), encode)
            assert other.source == "computed"

    asyncio.run(asyncio.wait_for(run(), 30))


def test_reads_keep_their_deadline_while_very_many_computations_wait(serving: Serving) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:
            go_on = asyncio.Event()

            async def encode() -> torch.Tensor:
                await go_on.wait()
                return torch.ones(1)

            tasks = [
                asyncio.create_task(cache.get_or_compute(key_of(f"aio-busy-{number}"), encode)) for number in range(100)
            ]
            while cache.stats().get("miss.absent", 0) < MAX_COMPUTATIONS:
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(cache.get(key_of("aio-not-there"), timeout=1.0), 5.0) is None
            assert cache.stats().get("miss.deadline", 0) == 0
            go_on.set()
            assert len(await asyncio.gather(*tasks)) == 100

    asyncio.run(asyncio.wait_for(run(), 60))


def test_computations_that_compute_end_even_when_all_threads_are_taken(serving: Serving) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config, wait_timeout="500ms") as cache:
            begun = 0

            async def inner() -> torch.Tensor:
                return torch.ones(1)

            async def outer(number: int) -> torch.Tensor:
                nonlocal begun
                begun += 1
                while begun < MAX_COMPUTATIONS:  # all of them hold a thread before the first computes further
                    await asyncio.sleep(0.01)
                return (await cache.get_or_compute(key_of(f"aio-inner-{number}"), inner)).tensor

            tasks = [
                cache.get_or_compute(key_of(f"aio-outer-{number}"), lambda number=number: outer(number))
                for number in range(MAX_COMPUTATIONS)
            ]
            for embedding in await asyncio.gather(*tasks):
                assert embedding.tensor.item() == 1.0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_timeout_of_zero_means_not_to_wait_for_others_and_still_reads_and_publishes(serving: Serving) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:

            async def encode() -> torch.Tensor:
                return torch.ones(1)

            assert (await cache.get_or_compute(key_of("aio-zero"), encode, timeout=0.0)).source == "computed"
            assert (await cache.get_or_compute(key_of("aio-zero"), encode, timeout=0.0)).source == "local"
            assert cache.stats()["put.stored"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_is_never_swallowed(serving: Serving, turns: int) -> None:
    async def run() -> None:
        async with await AsyncMMCache.connect(serving.config) as cache:

            async def never() -> torch.Tensor:
                await asyncio.Event().wait()
                raise AssertionError

            task = asyncio.create_task(cache.get_or_compute(key_of(f"aio-cancel-{turns}"), never))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(run(), 30))
