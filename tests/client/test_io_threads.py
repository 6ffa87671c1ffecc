"""What a call used is given back exactly once, when the call has really ended, whichever way it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cluster import wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Serving, key_of, store_of

from mmcache.client import calls
from mmcache.client.calls import Call, IoThreads, Overloaded
from mmcache.errors import DeadlineExceeded, LifecycleError, StoreUnavailable

LONG = 20.0


class Disposals:
    """A `dispose`, and what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, bool]] = []

    def __call__(self, result: object, began: bool) -> None:
        self.seen.append((result, began))


def soon() -> float:
    return time.monotonic() + LONG


def raising(error: BaseException) -> Callable[[], str]:
    def work() -> str:
        raise error

    return work


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_a_call_that_is_abandoned_at_any_time_disposes_once_when_it_has_ended(when: str, raises: bool) -> None:
    disposals = Disposals()
    ran: list[bool] = []

    def work() -> str:
        ran.append(True)
        if when == "during":
            call.abandon(disposals)
            assert disposals.seen == [], "its memory is in use"
        if raises:
            raise OSError("late")
        return "late"

    call = Call(work)
    if when == "before":
        call.abandon(disposals)
        assert disposals.seen == [(None, False)]
    call.run()
    if when == "after":
        call.abandon(disposals)
    if when == "before":
        assert not ran
        assert disposals.seen == [(None, False)]
    else:
        assert disposals.seen == [(None if raises else "late", True)]


def test_a_result_in_time_disposes_nothing() -> None:
    io, disposals = IoThreads(1), Disposals()
    assert io.perform(lambda: "result", deadline=soon(), dispose=disposals) == "result"
    assert io.close(soon())
    assert disposals.seen == []


@pytest.mark.parametrize(
    ("error", "began"),
    [(StoreUnavailable("refused before anything was sent"), False), (OSError("anything else"), True)],
    ids=["refused", "failed"],
)
def test_what_the_work_raises_reaches_the_caller_and_disposes_once(error: Exception, began: bool) -> None:
    io, disposals = IoThreads(1), Disposals()
    with pytest.raises(type(error)):
        io.perform(raising(error), deadline=soon(), dispose=disposals)
    assert io.close(soon())
    assert disposals.seen == [(None, began)]


def test_calls_that_reach_their_deadline_dispose_once_late_or_never_begun_and_more_are_refused() -> None:
    io = IoThreads(2, max_pending=1)
    running, queued, refused, closed = (Disposals() for _ in range(4))
    begun, also_begun, go_on, ran = threading.Event(), threading.Event(), threading.Event(), []

    def slow(tell: threading.Event = begun) -> str:
        tell.set()
        assert go_on.wait(LONG)
        return "late"

    with pytest.raises(DeadlineExceeded):
        io.perform(slow, deadline=time.monotonic() + 0.2, dispose=running)
    assert begun.is_set()
    assert running.seen == [], "its memory is in use"
    io.submit(lambda: slow(also_begun))
    assert also_begun.wait(LONG)
    with pytest.raises(DeadlineExceeded):
        io.perform(lambda: ran.append("queued"), deadline=time.monotonic(), dispose=queued)
    assert queued.seen == [(None, False)]
    with pytest.raises(Overloaded, match="1 calls are waiting"):
        io.perform(lambda: ran.append("refused"), deadline=soon(), dispose=refused)
    assert refused.seen == [(None, False)]
    go_on.set()
    assert io.close(soon())
    with pytest.raises(LifecycleError):
        io.perform(lambda: ran.append("closed"), deadline=soon(), dispose=closed)
    assert [running.seen, queued.seen, refused.seen, closed.seen] == [
        [("late", True)],
        [(None, False)],
        [(None, False)],
        [(None, False)],
    ]
    assert ran == []


def test_when_all_threads_run_calls_that_are_overdue_more_are_refused_until_one_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "OVERDUE_SECONDS", 0.0)
    io = IoThreads(1)
    go_on, late, refused, after = threading.Event(), Disposals(), Disposals(), Disposals()
    with pytest.raises(DeadlineExceeded):
        io.perform(lambda: go_on.wait(LONG), deadline=time.monotonic() + 0.1, dispose=late)
    with pytest.raises(Overloaded, match="overdue"):
        io.perform(lambda: "never", deadline=soon(), dispose=refused)
    assert refused.seen == [(None, False)]
    go_on.set()
    wait_until(lambda: late.seen == [(True, True)], timeout=LONG, what="the end of the overdue call")
    assert io.perform(lambda: "again", deadline=soon(), dispose=after) == "again"
    assert io.close(soon())


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from(["returns", "raises", "refused"]), st.integers(0, 3)), max_size=60))
def test_whatever_races_each_call_has_a_result_or_is_disposed_of_once(calls: list[tuple[str, int]]) -> None:
    io = IoThreads(2, max_pending=8)
    errors = {"raises": OSError("failed"), "refused": StoreUnavailable("refused")}

    def perform(ending: str, patience: int) -> tuple[bool, Disposals]:
        disposals = Disposals()
        work = raising(errors[ending]) if ending in errors else (lambda: "result")
        try:
            # deadlines from the past to a little later than the result, so that the two meet
            io.perform(work, deadline=time.monotonic() + patience * 2e-5, dispose=disposals)
        except (OSError, StoreUnavailable, DeadlineExceeded):
            return False, disposals
        return True, disposals

    with ThreadPoolExecutor(4) as callers:
        outcomes = list(callers.map(lambda call: perform(*call), calls))
    assert io.close(soon())
    assert all(len(disposals.seen) == (0 if has_result else 1) for has_result, disposals in outcomes)


def test_a_cache_with_too_many_calls_under_way_misses_and_drops_at_once_and_goes_on_after(serving: Serving) -> None:
    keys = [key_of(f"overloaded-{number}") for number in range(3)]
    writer = serving.connect()
    assert all(result.readable for result in writer.put_many([(key, torch.ones(10)) for key in keys]))
    cache = serving.connect(io_threads=1, local_entries=False)
    cache._parts.io._max_pending = 1
    store = store_of(cache)
    read_into, begun, go_on = store.read_into, threading.Event(), threading.Event()

    def slow_read_into(*arguments, **named):
        begun.set()
        assert go_on.wait(LONG)
        return read_into(*arguments, **named)

    store.read_into = slow_read_into
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(cache.get, keys[0], timeout=LONG)
        assert begun.wait(LONG)
        queued = threads.submit(cache.get, keys[1], timeout=LONG)
        wait_until(lambda: len(cache._parts.io._reads) == 1, timeout=LONG, what="a call in the queue")
        used = cache.stats()["pool.used"]
        started = time.monotonic()
        assert cache.get(keys[2], timeout=LONG) is None
        assert cache.put(key_of("overloaded-put"), torch.ones(10), timeout=LONG) == ("dropped", "unavailable")
        assert time.monotonic() - started < LONG / 2
        assert cache.stats()["miss.unavailable"] == 1
        assert cache.stats()["pool.used"] == used
        go_on.set()
        assert running.result(LONG) is not None
        assert queued.result(LONG) is not None
    assert cache.get(keys[2]) is not None
    assert cache.stats()["store.attached"] == 1
    assert not cache.stats().get("attachment_lost")


def test_a_late_refusal_is_disposed_of_as_never_begun_and_a_disposal_that_fails_does_not_end_its_thread() -> None:
    io, go_on, late = IoThreads(1), threading.Event(), Disposals()

    def refused() -> None:
        assert go_on.wait(LONG)
        raise StoreUnavailable("before anything was sent")

    with pytest.raises(DeadlineExceeded):
        io.perform(refused, deadline=time.monotonic() + 0.05, dispose=late)

    def fails(_result: object, _began: bool) -> None:
        raise OSError("cannot give back")

    with pytest.raises(DeadlineExceeded):
        io.perform(lambda: go_on.wait(LONG), deadline=time.monotonic(), dispose=fails)
    go_on.set()
    wait_until(lambda: late.seen == [(None, False)], timeout=LONG, what="the end of the refused call")
    assert io.perform(lambda: "goes on", deadline=soon(), dispose=late) == "goes on"
    assert io.close(soon())


def test_publications_leave_a_thread_to_reads_begin_after_them_and_are_refused_first() -> None:
    io = IoThreads(2, max_pending=4)
    go_on, begun, order = threading.Event(), threading.Semaphore(0), list[str]()

    def slow() -> None:
        begun.release()
        assert go_on.wait(LONG)

    def noted(word: str) -> Callable[[], None]:
        return lambda: order.append(word)

    io.hand_off(slow, Disposals(), publishes=True)
    assert begun.acquire(timeout=LONG)
    waiting = [io.hand_off(noted("publication"), Disposals(), publishes=True) for _ in range(2)]
    with pytest.raises(Overloaded, match="2 calls are waiting"):
        io.hand_off(noted("shed"), Disposals(), publishes=True)
    assert io.perform(lambda: "read", deadline=soon(), dispose=Disposals()) == "read", "a thread was left to it"
    io.hand_off(slow, Disposals())
    assert begun.acquire(timeout=LONG)
    waiting += [io.hand_off(noted("read"), Disposals()) for _ in range(2)]
    go_on.set()
    for hand_off in waiting:
        hand_off.result(soon())
    assert sorted(order) == ["publication", "publication", "read", "read"]
    assert order[0] == "read"
    assert io.close(soon())


@settings(max_examples=30)
@given(st.integers(1, 4), st.lists(st.booleans(), max_size=200))
def test_every_call_that_is_queued_has_its_turn_however_reads_and_publications_mix(
    threads: int, kinds: list[bool]
) -> None:
    io = IoThreads(threads, max_pending=1000)
    calls = [
        io.hand_off(lambda number=number: number, Disposals(), publishes=kind) for number, kind in enumerate(kinds)
    ]
    assert [call.result(soon()) for call in calls] == list(range(len(kinds)))
    assert io.close(soon())
    assert io._publishing == 0
