"""Across processes, each embedding is computed once; a process that dies costs only what it was computing."""

from __future__ import annotations

import signal
from collections import Counter

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of
from worker import embedding_of

KEYS = 200
PROCESSES = 8


def test_eight_processes_that_ask_for_the_same_keys_compute_each_once(fresh_serving: Serving) -> None:
    workers = [fresh_serving.start_worker("compute_all", keys=KEYS, seed=seed, batch=5) for seed in range(PROCESSES)]
    for worker in workers:
        worker.read()
    for worker in workers:
        worker.go()
    reports = [worker.finish() for worker in workers]
    assert Counter(number for report in reports for number in report["computed"]) == Counter(range(KEYS))
    assert not any(report["wrong"] for report in reports)


def test_when_a_computing_process_is_killed_only_its_keys_are_computed_again(fresh_serving: Serving) -> None:
    doomed = fresh_serving.start_worker("compute_all", keys=KEYS, seed=0, batch=5, stall_after=20)
    workers = [fresh_serving.start_worker("compute_all", keys=KEYS, seed=seed, batch=5) for seed in range(1, PROCESSES)]
    for worker in (doomed, *workers):
        worker.read()
    doomed.go()
    stalled = doomed.read()
    assert stalled["stalled"]
    for worker in workers:
        worker.go()
    doomed.process.send_signal(signal.SIGKILL)
    reports = [worker.finish() for worker in workers]
    again = Counter(number for report in reports for number in report["computed"])
    assert again == Counter(set(range(KEYS)) - set(stalled["computed"])), (
        "what it had published stays, the rest is once"
    )
    assert not any(report["wrong"] for report in reports)
    assert max(report["seconds"] for report in reports) < 30, "the claims of the dead pass on long before waits end"


@pytest.mark.parametrize("attach", ["sidecar", "embedded"])
def test_a_process_killed_in_the_middle_of_a_put_leaves_no_wrong_byte_and_nobody_hangs(
    fresh_serving: Serving, attach: str
) -> None:
    megabytes = 64
    expected = torch.arange(megabytes << 18, dtype=torch.float32)
    doomed = fresh_serving.start_worker("put_for_ever", attach=attach, megabytes=megabytes)
    doomed.read()
    doomed.go()
    assert doomed.read() == {"putting": 0}
    with fresh_serving.connect(pool_bytes=(megabytes + 4) << 20, local_entries=False) as cache:
        # The put's object is in the store's memory, or on its way there.
        doomed.process.send_signal(signal.SIGKILL)
        doomed.process.wait()
        embedding = cache.get(key_of(0), timeout=10)
        assert embedding is None or torch.equal(embedding.tensor, expected)
        del embedding
        computed = cache.get_or_compute(key_of(0), lambda: expected)
        assert torch.equal(computed.tensor, expected)


def test_the_claims_of_a_process_that_stalls_pass_on_when_it_dies_and_its_late_result_is_no_harm(
    fresh_serving: Serving,
) -> None:
    slow = fresh_serving.start_worker("compute_all", keys=1, seed=0, batch=1, stall_after=0)
    slow.read()
    slow.go()
    assert slow.read()["stalled"]
    cache = fresh_serving.connect(compute_timeout=0.1)
    slow.process.send_signal(signal.SIGSTOP)  # its session ends, and with it the claim
    embedding = cache.get_or_compute(key_of(0), lambda: embedding_of(0))
    assert embedding.source == "computed"
    slow.process.send_signal(signal.SIGCONT)
    slow.go()
    report = slow.finish()
    assert report["computed"] == [0]
    assert not report["wrong"]
    read = fresh_serving.connect().get(key_of(0))
    assert read is not None
    assert torch.equal(read.tensor, embedding_of(0))
    wait_until(lambda: cache.stats()["session.fresh"] == 1, timeout=5, what="a fresh session")
