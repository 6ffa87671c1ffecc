"""The worker processes: real ones, in the role that needs no cluster."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from mmcache.cli.demo.errors import DemoError
from mmcache.cli.demo.photographs import Photograph, find_photographs
from mmcache.cli.demo.protocol import Encode, Failed, Finish, Finished, Read, Ready, Served
from mmcache.cli.demo.workers import Workers
from mmcache.key import EmbeddingKey

START_S = 100.0


def soon() -> float:
    return time.monotonic() + 30


@pytest.fixture(scope="module")
def photograph() -> Photograph:
    return find_photographs(None).photographs[0]


@pytest.fixture
def workers(tmp_path: Path, tiny_weights: Path):
    with Workers(tmp_path) as workers:
        workers.start("reference", ["reference", "--weights", str(tiny_weights)])
        assert workers.receive(deadline=time.monotonic() + START_S) == ("reference", Ready())
        yield workers


def test_a_worker_answers_reports_what_fails_and_finishes(workers: Workers, photograph: Photograph) -> None:
    workers.send("reference", Encode(0, str(photograph.path), photograph.mm_hash))
    _, served = workers.receive(deadline=soon())
    assert isinstance(served, Served)
    assert (served.request, served.nbytes, served.key.mm_hash) == (0, 16 * 64 * 4, photograph.mm_hash)

    workers.send("reference", Encode(1, "/nowhere.png", photograph.mm_hash))
    _, failed = workers.receive(deadline=soon())
    assert isinstance(failed, Failed)
    assert "/nowhere.png" in failed.error

    workers.send("reference", Read(2, EmbeddingKey("model", "1", "a")))
    _, failed = workers.receive(deadline=soon())
    assert failed == Failed(2, "TypeError: the reference cannot Read")

    workers.send("reference", Encode(3, str(photograph.path), photograph.mm_hash))
    workers.send("reference", Finish())
    _, again = workers.receive(deadline=soon())
    assert isinstance(again, Served)
    assert again.digest == served.digest
    assert workers.receive(deadline=soon()) == ("reference", Finished({}))


def test_a_killed_worker_is_named_and_all_end_with_the_block(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        killed, other = (workers.start(name, ["reference"]) for name in ("reference-0", "reference-1"))
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=r"^reference-0 was ended by SIGKILL before its work was done$"):
            workers.receive(deadline=soon())
    assert not psutil.pid_exists(killed.pid)
    assert not psutil.pid_exists(other.pid)


def test_a_worker_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        workers.start("reference", ["reference", "--weights", "/nowhere"])
        with pytest.raises(DemoError, match=r"(?s)reference ended with status 1 .*--weights needs a directory"):
            workers.receive(deadline=time.monotonic() + START_S)


def test_waiting_for_an_answer_ends_when_there_is_no_more_sense_in_it(tmp_path: Path) -> None:
    checks = iter([None, DemoError("the cluster has ended")])

    def check() -> None:
        if error := next(checks):
            raise error

    with Workers(tmp_path, check) as workers, pytest.raises(DemoError, match="the cluster has ended"):
        workers.receive(deadline=soon())


def test_silence_ends_at_its_deadline_with_everybodys_log(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        workers.start("reference", ["reference"])
        with pytest.raises(DemoError, match=r"(?s)answers any more.*--- reference"):
            workers.receive(deadline=time.monotonic())
