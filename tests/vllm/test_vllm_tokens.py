"""Engines that share embeddings generate the very tokens of one that shares none, and the consumer encodes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from vllm_caches import EXACT, expect, expect_at_once, figure, options
from vllm_engines import Clip, LocalEngine, Options, Picture, Request, started

from benchmarks.parts import Parts
from mmcache.key import MM_HASH_MAX_BYTES

LONG = "so many words that a prompt of them is longer than a step, and than a block of the prefix cache: " * 4

SCENARIOS: dict[str, list[Request]] = {
    "a picture": [Request([Picture(1), "what is it?"])],
    "a picture between words": [Request(["look: ", Picture(2), " what is it?"])],
    "a large picture": [Request([Picture(3, 224, 224), "what is it?"])],
    "several pictures": [Request([Picture(4), "and", Picture(5, 112, 56), "and", Picture(6, 56, 112)])],
    "one picture twice in a request": [Request([Picture(7), Picture(7), "the same?"])],
    "the same request again": [Request([Picture(8), "what is it?"])] * 2,
    "requests that overlap": [
        Request([Picture(10), Picture(11), "what is it?"]),
        Request([Picture(11), Picture(12), "what is it?"]),
        Request(["first", Picture(12), Picture(10)]),
    ],
    "a video": [Request([Clip(1), "what happens?"])],
    "a video and pictures": [Request([Picture(13), Clip(2), Picture(14), "what happens?"])],
    "a picture behind many words": [Request([LONG, Picture(15, 112, 112), "what is it?"])],
    "pictures before many words": [Request([Picture(16, 112, 112), Picture(17, 112, 112), LONG])] * 2,
    "an identifier of the client's": [Request([Picture(18), "what is it?"], uuids=["sku-1"])],
    "an identifier with slashes": [Request([Picture(19), "what is it?"], uuids=["../../../etc/passwd/../x y\0z"])],
    "an identifier as long as can be": [Request([Picture(20), "what is it?"], uuids=["é" * (MM_HASH_MAX_BYTES // 2)])],
}
SETTINGS = {
    "bfloat16": {"dtype": "bfloat16"},
    "chunked prefill": {"max_num_batched_tokens": 24},
    "prefix caching": {"enable_prefix_caching": True, "block_size": 32},
    "prefix caching and chunked prefill": {
        "enable_prefix_caching": True,
        "block_size": 32,
        "max_num_batched_tokens": 48,
    },
}


class Trio(NamedTuple):
    plain: LocalEngine
    producer: LocalEngine
    consumer: LocalEngine
    in_bfloat16: bool


@pytest.fixture(scope="module", params=SETTINGS)
def trio(request: pytest.FixtureRequest, model, cluster: Parts) -> Iterator[Trio]:
    """In float32 one plain engine, which neither cuts prompts nor keeps prefixes, says what is right for all."""
    arguments = {**EXACT, **SETTINGS[request.param]}
    exact = arguments["dtype"] == EXACT["dtype"]
    vision = model("vision")
    # Another tenant for each, so that nothing is there yet.
    extra = {"tenant": request.param.replace(" ", "-")}
    plain = (
        request.getfixturevalue("plain") if exact else LocalEngine(Options(vision, arguments=arguments), name="plain")
    )
    engines = (
        LocalEngine(options(vision, cluster.config, "ec_both", extra=extra, **arguments), name="producer"),
        LocalEngine(options(vision, cluster.config, "ec_consumer", extra=extra, **arguments), name="consumer"),
    )
    with started(*engines, *([] if exact else [plain])):
        yield Trio(plain, *engines, not exact)


@pytest.mark.parametrize("name", SCENARIOS)
def test_tokens_are_those_of_an_engine_without_a_cache_and_a_consumer_encodes_nothing(trio: Trio, name: str) -> None:
    requests = SCENARIOS[name]
    expect(trio.producer, trio.plain, *requests)
    encoded, hits = trio.consumer.encoded(), figure(trio.consumer, "hits")
    expect(trio.consumer, trio.plain, *requests)
    assert trio.consumer.encoded() == encoded
    assert figure(trio.consumer, "hits") > hits


def test_an_engine_whose_own_caches_are_emptied_goes_on(trio: Trio) -> None:
    """It cannot know that at once, and may encode what it held."""
    requests = [request for name in ("a picture", "several pictures") for request in SCENARIOS[name]]
    for engine in (trio.producer, trio.consumer):
        for _ in range(2):
            expect(engine, trio.plain, *requests)
            engine.reset()
            expect(engine, trio.plain, *requests)


def test_text_alone_never_waits_for_the_cache(trio: Trio) -> None:
    for engine in (trio.producer, trio.consumer):
        before = ours(engine)
        expect(engine, trio.plain, Request(["no picture at all"]), Request([LONG]))
        assert ours(engine) == before


def test_many_requests_at_once_are_as_good_as_one_after_another(trio: Trio) -> None:
    """More of them than an engine takes at once, with pictures in common."""
    if trio.in_bfloat16:
        pytest.skip("in bfloat16 a token may depend on which requests share a step")
    numbers = range(100, 108)
    requests = [Request([Picture(number), Picture(number + 1), f"number {number % 3}"]) for number in numbers]
    expect_at_once(trio.producer, trio.plain, *requests)
    encoded = trio.consumer.encoded()
    expect_at_once(trio.consumer, trio.plain, *requests)
    assert trio.consumer.encoded() == encoded


def ours(engine: LocalEngine) -> dict[str, float]:
    """All that the connector has counted."""
    return {name: value for name, value in engine.metrics().items() if "mmcache" in name and "_created" not in name}
