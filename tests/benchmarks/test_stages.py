"""Each moment of a call belongs to one stage: the innermost one of the thread that is at work."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.stages import HAND_BACK, HAND_OVER, REST, TOTAL, WAIT, Stages, Watched, spent_ns

HERE, THERE = threading.get_ident(), -1


def test_a_stage_does_not_count_what_is_spent_in_stages_inside_it() -> None:
    events = [(10, HERE, "outer", True), (12, HERE, "inner", True)]
    events += [(15, HERE, "inner", False), (16, HERE, "outer", False)]
    assert spent_ns(events, 0, 20) == {"outer": 3, "inner": 3, REST: 14, TOTAL: 20}


def test_a_wait_is_told_apart_into_the_hand_over_what_the_thread_does_and_the_hand_back() -> None:
    events = [(10, HERE, WAIT, True), (90, HERE, WAIT, False)]
    events += [(30, THERE, "check", True), (70, THERE, "check", False)]
    events += [(40, THERE, "transfer", True), (65, THERE, "transfer", False)]
    spent = spent_ns(events, 0, 100)
    assert spent == {HAND_OVER: 20, "check": 15, "transfer": 25, HAND_BACK: 20, REST: 20, TOTAL: 100}
    assert list(spent)[-2:] == [REST, TOTAL]


def test_what_is_noted_after_the_call_does_not_count() -> None:
    events = [(2, THERE, "late", True), (20, THERE, "late", False)]
    assert spent_ns(events, 0, 10) == {"late": 8, REST: 2, TOTAL: 10}


class Worker:
    """Does what it is told on a thread of its own."""

    def __init__(self) -> None:
        self.told: SimpleQueue[threading.Event | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while (done := self.told.get()) is not None:
            self.work()
            done.set()

    def work(self) -> None:
        pass

    def wait(self, done: threading.Event) -> None:
        assert done.wait(20)

    def call(self) -> None:
        done = threading.Event()
        self.told.put(done)
        self.wait(done)


def test_functions_are_watched_in_all_threads_and_put_back_after() -> None:
    before = Worker.work, Worker.wait
    worker = Worker()
    stages = Stages([Watched(Worker, "work", "work"), Watched(Worker, "wait", WAIT)])
    taken = stages.median_us(worker.call, runs=5, warm_up=1)
    worker.told.put(None)
    worker.thread.join(20)
    assert {"work", HAND_BACK, REST, TOTAL} <= set(taken)
    assert (Worker.work, Worker.wait) == before
