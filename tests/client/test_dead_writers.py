"""A writer that is killed in the middle of its put: its name is in progress, and stays so for half a minute or more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of
from worker import large_embedding

from mmcache import Embedding, MMCache

MEGABYTES = 8
SLACK_S = 5.0
"""For a machine whose two cores run other tests too."""
CONFIRM_S = 1.0
"""How long a put takes to see that its name is another's."""
PUBLISH_S = 2.0
"""How long one may take: under another name it goes to the owner that is stopped."""
LONG = 60.0


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return large_embedding(MEGABYTES)


@pytest.fixture
def split_serving() -> Iterator[Serving]:
    """All bytes lie with a remote owner, whose silence sidecar and master bear for longer than this test takes."""
    patience = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "60", "MC_TCP_STATUS_TIMEOUT_SEC": "60"}
    options = ("--client_ttl=60", "--put_start_discard_timeout_sec=600")
    with Serving(segment_bytes=0, remote_bytes=64 << 20, environment=patience, master_options=options) as serving:
        yield serving


@contextmanager
def killed_in_mid_put(serving: Serving, attach: str, name: str) -> Iterator[None]:
    """A process that claimed, computed and began to put one entry is dead; the bytes' owner is stopped meanwhile."""
    doomed = serving.start_worker("compute_large", attach=attach, megabytes=MEGABYTES)
    assert doomed.read() == {"ready": True}
    with serving.remote.stopped():
        doomed.go()
        wait_until(lambda: serving.is_in_progress(name), timeout=10, what="the start of the put")
        doomed.kill()
        assert serving.is_in_progress(name)
        yield


def timed(call: Callable[[], Embedding | None]) -> tuple[Embedding | None, float]:
    started = time.monotonic()
    return call(), time.monotonic() - started


def figure(cache: MMCache, name: str) -> int:
    return cache._channel.inspect(deadline=time.monotonic() + LONG).get(name, 0)


def count(readers: list[MMCache], name: str) -> float:
    return sum(reader.stats().get(name, 0) for reader in readers)


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
def test_a_process_killed_in_the_middle_of_a_put_leaves_no_wrong_byte_and_nobody_hangs(
    split_serving: Serving, attach: str, expected: torch.Tensor
) -> None:
    readers = [
        split_serving.connect(
            attach=kind, pool_bytes="64MiB", local_entries=False, wait_timeout=LONG, publish_timeout=PUBLISH_S
        )
        for kind in ("sidecar", "embedded")
    ]
    name = name_of(readers[0], key_of(0))

    def get(reader: MMCache) -> Embedding | None:
        return reader.get(key_of(0), timeout=1.0)

    def get_or_compute(reader: MMCache) -> Embedding:
        return reader.get_or_compute(key_of(0), lambda: expected)

    with ThreadPoolExecutor(8) as threads:
        with killed_in_mid_put(split_serving, attach, name):
            gets = [threads.submit(timed, lambda reader=reader: get(reader)) for reader in readers * 2]
            computations = [
                threads.submit(timed, lambda reader=reader: get_or_compute(reader)) for reader in readers * 2
            ]
            for future in gets:
                embedding, seconds = future.result(60)
                assert embedding is None, "nothing is there yet"
                assert seconds < 1.0 + SLACK_S
            for future in computations:
                embedding, seconds = future.result(60)
                assert embedding is not None
                assert torch.equal(embedding.tensor, expected)
                # the claim passes on within 3 s, its next owner meets the dead one's put, and then each client may
                # find out once that nothing can be put at all
                assert seconds < 3.0 + CONFIRM_S + len(readers) * PUBLISH_S + SLACK_S
            assert count(readers, "miss.in_progress") >= len(readers) * 2
            assert count(readers, "put.in_progress") >= 1, "one of them tried, and told the controller"
            assert not count(readers, "put.stored")
            # on a busy machine another may find out meanwhile, and is told that it is known
            assert 1 <= figure(readers[0], "abandon.held") <= count(readers, "put.in_progress")
            assert figure(readers[0], "holds") == 0
        # The owner goes on. A sidecar finishes what its dead engine had begun; otherwise nothing comes of it.
        for reader in readers * 2:
            embedding, seconds = timed(lambda reader=reader: get(reader))
            assert embedding is None or torch.equal(embedding.tensor, expected)
            assert seconds < 1.0 + SLACK_S
            assert torch.equal(get_or_compute(reader).tensor, expected)
    assert all((found := get(reader)) is None or torch.equal(found.tensor, expected) for reader in readers)


def test_a_name_that_a_dead_writer_holds_is_abandoned_and_its_key_served_at_once_under_another(
    split_serving: Serving, expected: torch.Tensor
) -> None:
    first, second, reader = (
        split_serving.connect(pool_bytes="64MiB", local_entries=False, wait_timeout=LONG) for _ in range(3)
    )
    name = name_of(reader, key_of(0))
    with killed_in_mid_put(split_serving, "embedded", name):
        pass  # the owner goes on, and nothing comes of the put
    wait_until(lambda: not first.stats()["store.open"], timeout=LONG, what="a store that is well")
    assert first.get_or_compute(key_of(0), lambda: expected).source == "computed"
    assert first.stats()["put.in_progress"] == 1
    embedding = second.get_or_compute(key_of(0), lambda: expected)
    assert embedding.source == "computed"
    assert second.stats()["put.stored"] == 1
    wait_until(lambda: reader.mark().number == 1, timeout=LONG, what="the push")
    found = reader.get(key_of(0), timeout=LONG)
    assert found is not None
    assert torch.equal(found.tensor, expected)
    assert split_serving.is_in_progress(name), "the dead writer holds its name still"
    assert [figure(reader, word) for word in ("abandon.held", "head", "holds", "claims")] == [1, 1, 0, 0]
