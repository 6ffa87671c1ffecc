"""Across processes, each embedding is computed once; a process that dies costs only what it was computing."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of, store_of
from worker import embedding_of

from mmcache.client.compute import abort_reason
from mmcache.control.messages import AbortReason
from mmcache.store.base import Outcome

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
    # A claim that nobody renews passes on after 3 s (claim_timeout; here even sooner, with its session), and waits end
    # after 30 s. The slack is what eight processes on two busy cores take for all the rest.
    assert max(report["seconds"] for report in reports) < 3 + 5, "the claims of the dead passed on too late"


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


@pytest.mark.parametrize(("reason", "pool_bytes"), [("no_space", "32MiB"), ("larger_than_pool", "1MiB")])
def test_who_waits_for_what_finds_no_room_is_let_go_at_once_to_compute_without_a_claim(
    reason: str, pool_bytes: str
) -> None:
    tensor = torch.ones(6 << 20)
    computing, waited = threading.Event(), threading.Event()
    with Serving(segment_bytes=16 << 20) as serving, ThreadPoolExecutor(2) as threads:
        first = serving.connect(pool_bytes=pool_bytes, wait_timeout=60.0)
        second = serving.connect(pool_bytes="32MiB", wait_timeout=60.0)

        def compute_slowly() -> torch.Tensor:
            computing.set()
            assert waited.wait(30)
            return tensor

        one = threads.submit(first.get_or_compute, key_of(0), compute_slowly)
        assert computing.wait(30)
        other = threads.submit(second.get_or_compute, key_of(0), lambda: tensor)
        wait_until(lambda: second.stats().get("wait", 0) == 1, timeout=30, what="the second one's wait")
        assert not other.done()
        started = time.monotonic()
        waited.set()
        assert [one.result(30).source, other.result(30).source] == ["computed", "computed"]
        assert time.monotonic() - started < 10, "of 60 s that it would have waited"
        assert first.stats()[f"put.{reason}"] == 1
        assert not [name for name in second.stats() if name.startswith("put.")], "it did not try in vain once more"


@pytest.mark.parametrize(
    ("drops", "reason"),
    [
        (("no_space", "quota", "no_memory", "larger_than_pool", "not_finite"), AbortReason.NO_ROOM),
        (("damaged",), AbortReason.HELD),
        (("deadline", "unavailable", "transfer_failed", "uncommitted", "failed", "not_fresh"), AbortReason.FAILED),
    ],
)
def test_the_controller_learns_why_a_claim_is_given_up(drops: tuple[str, ...], reason: AbortReason) -> None:
    assert {drop: abort_reason(drop) for drop in drops} == dict.fromkeys(drops, reason)


def test_what_the_store_lost_is_reported_and_granted_and_published_anew() -> None:
    with Serving(lease_ms=200) as serving:
        writer, reader, third = (serving.connect(local_entries=False) for _ in range(3))
        assert writer.put(key_of(0), torch.ones(3)).status == "stored"
        wait_until(
            lambda: store_of(writer).remove([name_of(writer, key_of(0))], deadline=1e12) == [Outcome.OK],
            timeout=10,
            what="the removal, once nobody leases it",
        )
        [lost] = reader.lookup([key_of(0)])
        assert lost is not None, "the directory still has it"
        assert reader.get_or_compute(key_of(0), lambda: torch.full((3,), 2.0)).source == "computed"
        assert reader.stats()["undelivered"] == 1
        assert reader.stats()["put.stored"] == 1, "granted, for the directory has dropped it"
        found = third.get_or_compute(key_of(0), lambda: torch.zeros(3))
        assert found.source == "store"
        assert found.tensor[0] == 2.0
