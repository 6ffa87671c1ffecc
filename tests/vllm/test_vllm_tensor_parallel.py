"""Two workers that load the same embeddings from the same memory, also when one of them stands still meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import psutil
import pytest
from vllm_caches import Pictures, expect, expect_at_once, options
from vllm_engines import LocalEngine, Options, Request, started

from benchmarks.parts import Parts

TWO = {"dtype": "float32", "tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
pictures = Pictures(4000)


class Pair(NamedTuple):
    plain: LocalEngine
    producer: LocalEngine
    consumer: LocalEngine


@pytest.fixture(scope="module")
def pair(model, cluster: Parts) -> Iterator[Pair]:
    """Sums of two halves are not those of one whole, to the last bit: who says what is right has two workers, too."""
    vision = model("vision")
    engines = {
        "plain-2": Options(vision, arguments=TWO),
        "producer-2": options(vision, cluster.config, "ec_both", **TWO),
        "consumer-2": options(vision, cluster.config, "ec_consumer", **TWO),
    }
    seed = {"PYTHONHASHSEED": "0"}  # see docs/vllm.md, Troubleshooting
    pair = Pair(
        *(LocalEngine(msgspec.structs.replace(made, environment=seed), name=name) for name, made in engines.items())
    )
    with started(*pair):
        yield pair


def test_both_workers_load_what_one_published(pair: Pair) -> None:
    requests = [Request([pictures(), pictures(width=112), "what is it?"]) for _ in range(3)]
    expect(pair.producer, pair.plain, *requests)
    expect_at_once(pair.consumer, pair.plain, *requests)
    assert pair.consumer.encoded() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_stops_in_the_middle_of_its_copies_goes_on_with_the_right_bytes(pair: Pair, rank: int) -> None:
    """Meanwhile others ask for the memory that it copies from; all of it is smaller than what they ask for."""
    request = Request([pictures(), pictures(), "stopped"])
    others = [Request([pictures(width=448, height=448), "others"]) for _ in range(6)]
    expect(pair.producer, pair.plain, request, *others)
    encoded = pair.consumer.encoded()
    pids = {worker["rank"]: worker["pid"] for worker in pair.consumer.rpc("probe_install")}
    pair.consumer.rpc("probe_stop_in_load", str(rank))
    worker = psutil.Process(pids[rank])
    number = pair.consumer.add(request)
    wait_until_stopped(worker)
    numbers = [pair.consumer.add(other) for other in others]
    with pytest.raises(AssertionError):
        wait_until(lambda: pair.consumer.is_answered(number), seconds=1.0)
    worker.resume()
    answers = [pair.consumer.answer(one) for one in (number, *numbers)]
    right = [pair.plain.generate(one)[0].tokens for one in (request, *others)]
    assert [answer.tokens for answer in answers] == right
    assert pair.consumer.encoded() == encoded


def wait_until_stopped(process: psutil.Process) -> None:
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, seconds=120.0)


def wait_until(condition, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
