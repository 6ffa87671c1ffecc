"""Requests that are preempted, that wait for room, or for each other."""

from __future__ import annotations

import contextlib

from vllm_caches import EXACT, Pictures, expect, expect_at_once, options
from vllm_engines import LocalEngine, Request, started

from benchmarks.parts import Parts

pictures = Pictures(5000)
CRAMPED = {**EXACT, "max_model_len": 256, "block_size": 32, "num_gpu_blocks_override": 12, "max_num_seqs": 4}


def test_preempted_requests_resume_with_the_same_embeddings(
    model, cluster: Parts, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    producer, consumer = (
        LocalEngine(options(model("vision"), cluster.config, role, **CRAMPED), name=role)
        for role in ("ec_both", "ec_consumer")
    )
    stack.enter_context(started(producer, consumer))
    requests = [Request([pictures(), "so", pictures(width=112), "long"], max_tokens=120) for _ in range(4)]
    right = [plain.generate(request)[0].tokens for request in requests]
    for engine in (producer, consumer):
        answers = engine.generate(*requests)
        assert [answer.error for answer in answers] == [""] * len(answers)
        assert [answer.tokens for answer in answers] == right
        assert engine.metrics()["vllm:num_preemptions_total"] > 0
    assert consumer.encoded() == 0
    expect(consumer, plain, *requests)


def test_more_pictures_than_there_is_memory_for_take_turns(
    model, cluster: Parts, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    """Staging memory for sixteen of them, of 64 KiB each: requests take what they get, and encode the rest."""
    arguments = {**EXACT, "max_model_len": 4096}
    extra = {"staging_bytes": "1MiB", "fetch_timeout": 2.0, "wait_timeout": 2.0}
    producer, consumer = (
        LocalEngine(options(model("vision"), cluster.config, role, extra=extra, **arguments), name=role)
        for role in ("ec_both", "ec_consumer")
    )
    stack.enter_context(started(producer, consumer))
    requests = [
        Request([*(pictures(width=448, height=448) for _ in range(count)), "many"]) for count in (1, 6, 8, 7, 8, 2)
    ]
    for engine in (producer, consumer):
        expect_at_once(engine, plain, *requests)
        expect(engine, plain, *requests)


def test_two_requests_that_want_each_others_pictures_do_not_wait_for_ever(
    both: list[LocalEngine], plain: LocalEngine
) -> None:
    """Each of two engines is to encode what the other's request needs as well, in the other order."""
    for _ in range(5):
        one, other = pictures(), pictures()
        requests = [Request([one, other, "crossed"]), Request([other, one, "crossed"])]
        right = [plain.generate(request)[0].tokens for request in requests]
        before = sum(engine.encoded() for engine in both)
        numbers = [engine.add(request) for engine, request in zip(both, requests, strict=True)]
        answers = [engine.answer(number) for engine, number in zip(both, numbers, strict=True)]
        assert [answer.tokens for answer in answers] == right
        assert sum(engine.encoded() for engine in both) == before + 2
