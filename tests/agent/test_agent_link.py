"""The agent's process and the link to it: it dies, hangs, hears and says garbage; the engine never waits for it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from cluster import wait_until
from engines import PATIENCE_S, SOON_S, LinkedEngine, embedding_of
from serving import Serving

from mmcache.agent import child, link
from mmcache.agent.messages import (
    Ask,
    Drop,
    Figures,
    Granted,
    Missing,
    Ready,
    Waiting,
)


@pytest.fixture(scope="module")
def pair(serving: Serving) -> Iterator[list[LinkedEngine]]:
    with LinkedEngine(serving.config) as one, LinkedEngine(serving.config) as other:
        yield [one, other]


@pytest.fixture
def engine(serving: Serving) -> Iterator[LinkedEngine]:
    """One that the test may break."""
    with LinkedEngine(serving.config) as engine:
        yield engine


def test_two_engines_encode_once_and_share_the_result(pair: list[LinkedEngine]) -> None:
    one, other = pair
    item = one.ask("linked")
    one.expect(item, Granted)
    waiting = other.ask("linked")
    other.expect(waiting, Waiting)
    assert one.encode(item, embedding_of(1)).status == "stored"
    assert torch.equal(other.embedding(waiting, other.expect(waiting, Ready)), embedding_of(1))
    again = other.ask("linked", claim=False)
    assert torch.equal(other.embedding(again, other.expect(again, Ready)), embedding_of(1))


def test_figures_come_by_themselves(pair: list[LinkedEngine]) -> None:
    one, _ = pair
    deadline = time.monotonic() + PATIENCE_S
    while not one.figures:
        assert time.monotonic() < deadline
        one.pump(0.1)
    assert one.figures["session.fresh"] == 1
    assert one.figures["agent.items"] >= 0


def test_freshness_is_renewed_for_as_long_as_the_session_lives(pair: list[LinkedEngine], serving: Serving) -> None:
    one, _ = pair
    assert one.ask_and_encode("renewed", embedding_of(2)).status == "stored"
    item = one.ask("renewed")
    ready = one.expect(item, Ready)
    until = time.monotonic() + 3 * 2.0  # the session's TTL, without a renewal, would be over
    while time.monotonic() < until:
        assert one.staging.is_fresh(ready.epoch)
        one.pump(0.05)


def test_nothing_is_told_to_and_had_from_an_agent_that_was_not_started(serving: Serving) -> None:
    with LinkedEngine(serving.config, start=False) as engine:
        assert not engine.link.agent_lives
        assert not engine.send(Ask([]))
        assert engine.link.receive() == []
        assert not engine.link.wait(0.0)
        assert not engine.link.take_death()


def test_a_killed_agent_is_reported_dead_once_and_started_again(engine: LinkedEngine) -> None:
    item = engine.ask("killed")
    engine.expect(item, Granted)
    asked = engine.ask("killed before its answer was read", claim=False)
    wait_until(lambda: engine.link.wait(0.1), timeout=PATIENCE_S, what="an answer")
    pid, epoch = engine.pid, engine.staging.epoch
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid), timeout=PATIENCE_S, what="the agent's burial")
    assert not engine.send(Drop([item.number]))
    if not engine.link.take_death():
        engine.pump(0.0)
        assert engine.said[asked.number][-1] == Missing(asked.number, "absent"), "what it said before comes first"
        assert engine.link.take_death()
    assert not engine.link.take_death(), "once"
    engine.wait_for_agent()
    assert engine.pid != pid
    assert engine.staging.epoch != epoch, "what the dead one had staged is not to be used"
    again = engine.ask("killed")
    while isinstance(message := engine.next(again), Waiting):
        pass  # for the dead one's claim to lapse
    assert isinstance(message, Granted)
    assert engine.encode(again, embedding_of(3)).status == "stored"
    counts = engine.counters.snapshot()
    assert (counts["link.start"], counts["link.end"]) == (2, 1)


def test_no_other_agent_serves_before_a_death_was_taken(engine: LinkedEngine) -> None:
    epoch = engine.staging.epoch
    os.kill(engine.pid, signal.SIGKILL)
    wait_until(lambda: engine.staging.epoch != epoch, timeout=PATIENCE_S, what="another agent that can serve")
    engine.pump(0.0)
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        assert not engine.link.agent_lives
        assert not engine.send(Ask([]))
        engine.pump(0.1)
    assert engine.link.take_death()
    engine.wait_for_agent()
    assert engine.counters.snapshot()["link.start"] == 2
    engine.expect(engine.ask("after a death"), Granted)


def test_an_agent_that_stands_still_is_killed_and_replaced(engine: LinkedEngine) -> None:
    pid = engine.pid
    os.kill(pid, signal.SIGSTOP)
    assert engine.link.agent_lives
    deadline = time.monotonic() + PATIENCE_S
    while not engine.link.take_death():
        assert time.monotonic() < deadline
        engine.pump(0.1)
    engine.wait_for_agent()
    assert engine.pid != pid
    assert not psutil.pid_exists(pid)
    assert engine.counters.snapshot()["link.hang"] >= 1
    engine.expect(engine.ask("after a hang"), Granted)


def test_an_idle_engine_that_receives_nothing_keeps_its_agent(
    engine: LinkedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "HANGS_AFTER_S", 8.0)
    pid = engine.pid
    time.sleep(10.0)
    assert engine.pid == pid
    assert engine.link.agent_lives
    messages = engine.link.receive()
    assert [type(message) for message in messages] == [Figures], "only the newest are kept"


def test_an_engine_that_stood_still_itself_does_not_take_its_agent_for_dead(serving: Serving) -> None:
    with _program(serving, "print(engine.pid, flush=True); input(); print(engine.pid, flush=True)") as program:
        pid = program.read()
        program.process.send_signal(signal.SIGSTOP)
        os.kill(int(pid), signal.SIGSTOP)
        time.sleep(8.0 + 2.0)  # the test's HANGS_AFTER_S is 8; what comes later than 5 s is a standstill of our own
        program.process.send_signal(signal.SIGCONT)
        os.kill(int(pid), signal.SIGCONT)
        time.sleep(2.0)
        program.go()
        assert program.read() == pid


def test_an_agent_ends_in_order_when_its_engine_is_killed(serving: Serving) -> None:
    with LinkedEngine(serving.config) as other:
        task = """
item = engine.ask("orphaned")
engine.expect(item, Granted)
print(engine.pid, flush=True)
input()
"""
        with _program(serving, task) as program:
            agent = psutil.Process(int(program.read()))
            waiting = other.ask("orphaned")
            other.expect(waiting, Waiting)
            program.process.kill()
            agent.wait(SOON_S)
            other.expect(waiting, Granted)


def test_an_agent_that_stands_still_dies_with_its_engine_once_it_goes_on(serving: Serving) -> None:
    with _program(serving, "print(engine.pid, flush=True); input()") as program:
        agent = psutil.Process(int(program.read()))
        agent.suspend()
        program.process.kill()
        program.process.wait()
        agent.resume()
        agent.wait(SOON_S)


def test_an_engine_that_ends_without_closing_leaves_nothing(serving: Serving) -> None:
    with _program(serving, "print(engine.pid, flush=True); engine.link.close = None") as program:
        agent = psutil.Process(int(program.read()))
        assert program.process.wait(SOON_S) == 0
        assert not agent.is_running()


def test_ctrl_c_is_the_engines_business_and_sigterm_ends_the_agent(engine: LinkedEngine) -> None:
    agent = psutil.Process(engine.pid)
    agent.send_signal(signal.SIGINT)
    engine.expect(engine.ask("after SIGINT"), Granted)
    agent.send_signal(signal.SIGTERM)
    wait_until(lambda: not agent.is_running(), timeout=SOON_S, what="the agent's end")
    engine.pump(0.0)
    assert engine.link.take_death()


def test_an_agent_that_ends_in_order_says_first_that_nothing_is_fresh() -> None:
    with Serving(session_ttl=600.0) as serving, LinkedEngine(serving.config) as engine:
        assert engine.ask_and_encode("ends", embedding_of(1)).status == "stored"
        ready = engine.expect(engine.ask("ends"), Ready)
        assert engine.staging.is_fresh(ready.epoch)
        engine.link.close()
        assert not engine.staging.is_fresh(ready.epoch)


def test_close_ends_the_agent_and_leaves_neither_process_nor_descriptor_nor_thread(serving: Serving) -> None:
    with LinkedEngine(serving.config):
        pass  # what is opened once and for all is open now
    gc.collect()
    descriptors, threads = _descriptors(), threading.active_count()
    with LinkedEngine(serving.config) as engine:
        agent = psutil.Process(engine.pid)
        engine.expect(engine.ask("closed"), Granted)
        engine.link.close()
        assert not agent.is_running()
        assert not engine.link.agent_lives
        engine.link.close()
        assert not engine.send(Ask([]))
    del engine
    gc.collect()
    assert _descriptors() == descriptors
    assert threading.active_count() == threads


def test_close_ends_an_agent_that_stands_still(engine: LinkedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "END_PATIENCE_S", 0.5)
    agent = psutil.Process(engine.pid)
    agent.suspend()
    engine.link.close()
    assert not agent.is_running()


def test_close_reaches_an_agent_though_a_forked_child_may_hold_its_socket(
    engine: LinkedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "END_PATIENCE_S", PATIENCE_S)
    agent = psutil.Process(engine.pid)
    copy = os.dup(engine.link._keeper.agent.descriptor)
    started = time.monotonic()
    engine.link.close()
    os.close(copy)
    assert not agent.is_running()
    assert time.monotonic() < started + PATIENCE_S, "it needed no signal"


def test_close_while_the_agent_starts(serving: Serving) -> None:
    before = set(psutil.Process().children())
    engine = LinkedEngine(serving.config, start=False)
    assert not engine.link.start(0.0)
    wait_until(lambda: engine.counters.snapshot().get("link.start") == 1, timeout=SOON_S, what="a start")
    [agent] = set(psutil.Process().children()) - before
    engine.close()
    assert not agent.is_running()


def test_a_link_that_is_dropped_ends_its_agent(serving: Serving) -> None:
    engine = LinkedEngine(serving.config)
    agent = psutil.Process(engine.pid)
    del engine.link
    gc.collect()
    wait_until(lambda: not agent.is_running(), timeout=SOON_S, what="the agent's end")
    engine.staging.close()


def test_a_configuration_that_cannot_be_used_is_tried_again_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "FIRST_PAUSE_S", 0.1)
    config = tmp_path / "client.yaml"
    config.write_text("client: {pool: 1}")
    with LinkedEngine(config, start=False) as engine:
        started = time.monotonic()
        assert not engine.link.start(3 * PATIENCE_S)
        assert time.monotonic() < started + 2 * PATIENCE_S, "it knows before"
        wait_until(
            lambda: engine.counters.snapshot().get("link.end", 0) >= 2, timeout=PATIENCE_S, what="the second try's end"
        )
        assert not engine.link.agent_lives
        assert not engine.link.take_death(), "nothing was ever given to it"


def test_an_agent_that_cannot_even_be_started_is_tried_again(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "FIRST_PAUSE_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(child.sys, "executable", "/nowhere/python")
        engine = LinkedEngine(serving.config, start=False)
        assert not engine.link.start(0.0)
        wait_until(
            lambda: engine.counters.snapshot().get("link.start_failed", 0) >= 2, timeout=SOON_S, what="a second try"
        )
    with engine:
        engine.wait_for_agent()


def test_the_agent_serves_misses_while_there_is_no_cluster(tmp_path: Path) -> None:
    config = tmp_path / "client.yaml"
    config.write_text(
        "{store: {master: '127.0.0.1:1'}, control: {address: 'tcp://127.0.0.1:1'}, client: {connect_timeout: 500ms}}"
    )
    with LinkedEngine(config) as engine:
        assert engine.missing(engine.ask("nowhere")) == "not_fresh"
        assert not engine.staging.is_fresh(engine.staging.epoch)


def test_a_relative_configuration_is_found_wherever_the_agent_runs(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(serving.folder)
    (serving.folder / "logging.py").write_text("raise RuntimeError('taken from where the user happens to be')")
    try:
        with LinkedEngine(serving.config.name) as engine:
            engine.expect(engine.ask("relative"), Granted)
    finally:
        (serving.folder / "logging.py").unlink()


class _Program:
    """A process with an engine, which runs some lines of Python."""

    def __init__(self, serving: Serving, lines: str) -> None:
        source = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from engines import *
from mmcache.agent import link
link.HANGS_AFTER_S = 8.0
engine = LinkedEngine({str(serving.config)!r})
{lines}
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@contextlib.contextmanager
def _program(serving: Serving, lines: str) -> Iterator[_Program]:
    program = _Program(serving, lines)
    try:
        yield program
    finally:
        program.process.kill()
        program.process.communicate()


def _descriptors() -> set[int]:
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            fcntl.fcntl(number, fcntl.F_GETFD)
            found.add(number)
    return found
