"""A writer that is killed in the middle of its put: its name is in progress, and stays so for half a minute."""

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


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return large_embedding(MEGABYTES)


@pytest.fixture
def split_serving() -> Iterator[Serving]:
    """All bytes lie with a remote owner, whose silence sidecar and master bear for longer than this test takes."""
    patience = {"MC_TCP_PROGRESS_TIMEOUT_SEC": "60", "MC_TCP_STATUS_TIMEOUT_SEC": "60"}
    with Serving(
        segment_bytes=0, remote_bytes=64 << 20, environment=patience, master_options=("--client_ttl=60",)
    ) as serving:
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


def count(readers: list[MMCache], name: str) -> float:
    return sum(reader.stats().get(name, 0) for reader in readers)


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
def test_a_process_killed_in_the_middle_of_a_put_leaves_no_wrong_byte_and_nobody_hangs(
    split_serving: Serving, attach: str, expected: torch.Tensor
) -> None:
    readers = [
        split_serving.connect(attach=kind, pool_bytes="64MiB", local_entries=False, wait_timeout=60.0)
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
                # the claim passes on within 3 s, its next owner meets the dead one's put, and all others are let go
                assert seconds < 3.0 + CONFIRM_S + SLACK_S
            assert count(readers, "miss.in_progress") >= len(readers) * 2
            assert count(readers, "put.in_progress") == 1, "one of them tried, and told the controller"
            assert not count(readers, "put.stored")
            asking = [reader for reader in readers if not reader.stats()["store.open"]]  # the others need no answer
            before = count(asking, "unclaimed")
            assert all(get_or_compute(reader).source == "computed" for reader in readers)
            assert count(asking, "unclaimed") == before + len(asking), "the controller holds the name"
        # The owner goes on. A sidecar finishes what its dead engine had begun; otherwise nothing comes of it.
        for reader in readers * 2:
            embedding, seconds = timed(lambda reader=reader: get(reader))
            assert embedding is None or torch.equal(embedding.tensor, expected)
            assert seconds < 1.0 + SLACK_S
            assert torch.equal(get_or_compute(reader).tensor, expected)
    assert count(readers, "put.in_progress") == 1
    if attach == "sidecar":
        wait_until(lambda: get(readers[0]) is not None, timeout=10, what="the end of the put")
    assert all((found := get(reader)) is None or torch.equal(found.tensor, expected) for reader in readers)
