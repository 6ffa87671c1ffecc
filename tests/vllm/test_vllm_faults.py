"""Whatever breaks around it, an engine answers with the right tokens, and uses the cache again once it is mended.

One producer and one consumer live through all of it. Deadlines are short here: a request that meets a fault may encode
for itself, but not fail.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from vllm_bystander import Bystander, Entry
from vllm_caches import Pictures, expect, figure, options, serve_again, wait_for_figure
from vllm_engines import LocalEngine, Request, started

from benchmarks.parts import Part, Parts
from benchmarks.vllm_probe import holding

SHORT = {"fetch_timeout": 1.0, "wait_timeout": 3.0}
SHORT_CLIENT = {"pool_bytes": "32MiB", "read_timeout": 1.0, "publish_timeout": 2.0}
LEASE_S = 1.0

pictures = Pictures(2000)


class Place(NamedTuple):
    """A cluster that can be broken, and its engines."""

    parts: Parts
    producer: LocalEngine
    consumer: LocalEngine


@pytest.fixture(scope="module")
def place(model) -> Iterator[Place]:
    parts = Parts(
        owner_bytes=256 << 20,
        client=SHORT_CLIENT,
        controller={"session_ttl": 2.0, "claim_timeout": 3.0},
        store={"lease": LEASE_S},
    )
    with parts:
        producer, consumer = (
            LocalEngine(options(model("vision"), parts.config, role, extra=SHORT), name=role)
            for role in ("ec_both", "ec_consumer")
        )
        with started(producer, consumer):
            serve_again(producer, consumer, pictures)
            yield Place(parts, producer, consumer)


@pytest.fixture
def mended(place: Place) -> Iterator[Place]:
    """After each test the cluster is whole, and of use to both engines; no embedding was lost on the way."""
    yield place
    place.parts.heal()
    serve_again(place.producer, place.consumer, pictures)


def new_requests(count: int) -> list[Request]:
    """With new pictures, and one without any."""
    return [Request([pictures(), pictures(width=112), "what is it?"]) for _ in range(count)] + [Request(["no picture"])]


@pytest.mark.parametrize("name", ["controller", "master", "sidecar", "owner"])
def test_a_part_that_is_killed_costs_encodings_until_it_is_back(mended: Place, plain: LocalEngine, name: str) -> None:
    known = new_requests(2)
    expect(mended.producer, plain, *known)
    mended.parts.parts[name].kill()
    for engine in (mended.producer, mended.consumer):
        expect(engine, plain, *known, *new_requests(2))


@pytest.mark.parametrize("name", ["controller", "master", "sidecar", "owner"])
def test_a_part_that_hangs_costs_no_more_than_the_deadline_and_an_encoding(
    mended: Place, plain: LocalEngine, name: str
) -> None:
    known = new_requests(2)
    expect(mended.producer, plain, *known)
    part: Part = mended.parts.parts[name]
    with part.stopped():
        for engine in (mended.producer, mended.consumer):
            expect(engine, plain, *known, *new_requests(2))


def test_a_part_that_is_killed_while_a_request_waits(mended: Place, plain: LocalEngine) -> None:
    request = Request([pictures(), "who has it?"])
    waits = figure(mended.consumer, "waits")
    with holding(mended.producer) as wait_until_it_encodes:
        first = mended.producer.add(request)
        wait_until_it_encodes()
        second = mended.consumer.add(request)
        wait_for_figure(mended.consumer, "waits", waits + 1)
        mended.parts.controller.kill()
        right = plain.generate(request)[0].tokens
        assert mended.consumer.answer(second).tokens == right
    assert mended.producer.answer(first).tokens == right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_an_agent_that_ends_or_hangs_is_replaced(mended: Place, plain: LocalEngine, number: signal.Signals) -> None:
    known = new_requests(1)
    expect(mended.producer, plain, *known)
    for engine in (mended.producer, mended.consumer):
        agent = engine.agent
        agent.send_signal(number)
        expect(engine, plain, *known, *new_requests(2))
        assert engine.is_alive
        if number == signal.SIGSTOP:
            with contextlib.suppress(Exception):
                agent.send_signal(signal.SIGCONT)


def test_an_agent_that_is_killed_while_a_request_waits(mended: Place, plain: LocalEngine) -> None:
    request = Request([pictures(), "who has it?"])
    waits = figure(mended.consumer, "waits")
    with holding(mended.producer) as wait_until_it_encodes:
        first = mended.producer.add(request)
        wait_until_it_encodes()
        second = mended.consumer.add(request)
        wait_for_figure(mended.consumer, "waits", waits + 1)
        mended.consumer.agent.kill()
        right = plain.generate(request)[0].tokens
        assert mended.consumer.answer(second).tokens == right
        mended.producer.agent.kill()  # with the claim on what its engine encodes now
    assert mended.producer.answer(first).tokens == right


FORGERIES: dict[str, Callable[[Bystander, Entry], None]] = {
    "nothing": lambda bystander, entry: bystander.remove(entry),
    "no entry at all": lambda bystander, entry: bystander.spoil(entry),
    "too many embeddings": lambda bystander, entry: bystander.forge(entry, shape=(entry.shape[0] + 1, entry.shape[1])),
    "too few embeddings": lambda bystander, entry: bystander.forge(entry, shape=(entry.shape[0] - 1, entry.shape[1])),
    "too wide embeddings": lambda bystander, entry: bystander.forge(entry, shape=(entry.shape[0], 2 * entry.shape[1])),
    "as many numbers in another shape": lambda bystander, entry: bystander.forge(
        entry, shape=(entry.shape[0] // 2, entry.shape[1] * 2)
    ),
    "another dtype": lambda bystander, entry: bystander.forge(entry, shape=entry.shape, dtype="float16"),
    "a vector": lambda bystander, entry: bystander.forge(entry, shape=(entry.shape[0] * entry.shape[1],)),
    "far too much": lambda bystander, entry: bystander.forge(entry, shape=(1000, entry.shape[0], entry.shape[1])),
}


@pytest.mark.parametrize("what", FORGERIES)
def test_what_is_in_an_entrys_place_is_found_out_and_encoded_instead(
    mended: Place, plain: LocalEngine, what: str
) -> None:
    """The controller still says that the entry is there; the producer has it, and the consumer does not."""
    request = Request([pictures(), "what is it?"])
    with Bystander(mended.parts) as bystander:
        before = bystander.names()
        expect(mended.producer, plain, request)
        [entry] = bystander.new_entries(before, 1)
        FORGERIES[what](bystander, entry)
    encoded = mended.consumer.encoded()
    expect(mended.consumer, plain, request)
    assert mended.consumer.encoded() == encoded + 1
    mended.producer.reset()
    expect(mended.producer, plain, request)


def test_an_engine_whose_shared_memory_is_full_runs_without_the_cache(
    model, place: Place, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no private mounts are permitted here")
    script = 'mount -t tmpfs -o size=4m none /dev/shm && exec "$@"'
    engine = LocalEngine(
        options(model("vision"), place.parts.config, "ec_both", extra=SHORT),
        name="cramped",
        within=[unshare, "--mount", "/bin/sh", "-c", script, "sh"],
    )
    stack.enter_context(started(engine))
    expect(engine, plain, *new_requests(2))
    assert "/dev/shm" in engine.log.read_text(errors="replace")


def test_an_engine_that_starts_before_its_cluster_uses_it_once_it_is_there(
    model, plain: LocalEngine, stack: contextlib.ExitStack
) -> None:
    parts = Parts(owner_bytes=64 << 20, client=SHORT_CLIENT)
    stack.callback(parts.end)
    extra = {**SHORT, "connect_timeout": 1.0}
    producer, consumer = (
        LocalEngine(options(model("vision"), parts.config, role, extra=extra), name=f"early-{role}")
        for role in ("ec_both", "ec_consumer")
    )
    stack.enter_context(started(producer, consumer))
    for engine in (producer, consumer):
        expect(engine, plain, *new_requests(2))
    parts.start()
    serve_again(producer, consumer, pictures)
