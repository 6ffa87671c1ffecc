"""The channel's own life: start, loss, close, fork, and a process that was stopped."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq
from scripted_controller import PATIENCE_S, ScriptedController, Stage, key, soon, stage

from mmcache.control import link
from mmcache.control.channel import ControlChannel
from mmcache.control.link import Link
from mmcache.control.messages import (
    PROTOCOL_VERSION,
    AbortReason,
    Acquire,
    Acquired,
    Goodbye,
    Granted,
    Heartbeat,
    Hello,
    HelloAgain,
    Waiting,
)
from mmcache.errors import ConfigError, ControllerUnavailable, LifecycleError
from mmcache.metrics import Counters


def threads() -> set[threading.Thread]:
    """The threads of all channels in this process, those of other tests' fixtures too."""
    return {thread for thread in threading.enumerate() if thread.name == "mmcache-control"}


def test_a_session_begins_by_itself_and_shows_what_the_welcome_said(staged: Stage) -> None:
    view = staged.channel.fresh()
    assert view is not None
    assert (view.lineage, view.lease_s) == ("a1", 10.0)
    assert time.clock_gettime(time.CLOCK_BOOTTIME) < view.fresh_until


def test_the_hello_says_who_we_are() -> None:
    controller = ScriptedController()
    channel = ControlChannel(controller.address, name="encoder-3")
    channel.start()
    hello = controller.expect(Hello)
    assert (hello.version, hello.name, hello.pid) == (PROTOCOL_VERSION, "encoder-3", os.getpid())
    channel.close()
    controller.close()


@pytest.mark.parametrize("name", ["", "n" * 129])
def test_a_name_that_no_hello_can_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        ControlChannel("tcp://127.0.0.1:1", name=name)


def test_answered_heartbeats_keep_a_session_fresh() -> None:
    with stage(ttl_ms=2000) as staged:
        first = last = staged.channel.fresh()
        assert first is not None
        deadline = soon()
        while (last is None or last.fresh_until == first.fresh_until) and time.monotonic() < deadline:
            staged.controller.receive(patience_s=0.05)  # answers heartbeats
            last = staged.channel.fresh()
        assert last is not None
        assert last.session == first.session
        assert last.fresh_until > first.fresh_until


def test_without_answers_freshness_ends_and_another_hello_comes_over_another_connection() -> None:
    with stage(ttl_ms=1000) as staged:
        staged.controller.answer_heartbeats = False
        before, peer = staged.channel.fresh(), staged.controller.peer
        messages: list[object] = []
        while staged.channel.fresh() is not None:
            messages.append(staged.controller.receive(patience_s=0.02))
        assert before is not None
        assert time.clock_gettime(time.CLOCK_BOOTTIME) >= before.fresh_until
        with pytest.raises(ControllerUnavailable):
            staged.channel.lookup([key("a")], deadline=soon())
        while not any(isinstance(message, Hello) for message in messages):
            messages.append(staged.controller.receive())
        assert staged.controller.peer != peer
        assert all(message is None or isinstance(message, Heartbeat | Hello) for message in messages)


def test_what_is_fresh_stays_so_for_its_time_while_another_session_is_sought(staged: Stage) -> None:
    view = staged.channel.fresh()
    assert view is not None
    staged.controller.send(HelloAgain("again"))
    staged.controller.expect(Hello)
    assert staged.channel.in_doubt
    assert staged.channel.fresh() is view
    with pytest.raises(ControllerUnavailable):
        staged.channel.lookup([key("a")], deadline=soon())


def test_nobody_asks_a_session_once_its_end_is_known(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = staged.channel._link.exchange
    lost, seen = exchange.lost, []

    def tell(reason: str) -> None:
        seen.append(staged.channel.in_doubt)
        lost(reason)

    monkeypatch.setattr(exchange, "lost", tell)
    staged.controller.send(HelloAgain("again"))
    staged.controller.welcome()
    assert staged.channel.wait_fresh(PATIENCE_S) is not None
    staged.channel.close()
    assert seen == [True, True]
    assert staged.channel.fresh() is None


def test_a_channel_waits_for_a_controller_that_comes_later() -> None:
    gone = ScriptedController()
    address = gone.address
    gone.close()
    channel = ControlChannel(address, name="early")
    channel.start()
    assert channel.wait_fresh(0.05) is None
    with pytest.raises(ControllerUnavailable):
        channel.lookup([key("a")], deadline=soon())
    controller = ScriptedController(address=address)
    controller.welcome()
    assert channel.wait_fresh(PATIENCE_S) is not None
    channel.close()
    controller.close()


def test_calls_fail_when_the_connection_breaks_and_a_new_session_begins_with_the_next_controller() -> None:
    with stage(ttl_ms=2000) as staged:
        asking = staged.call(staged.channel.acquire, [key("a")], wait_s=60.0, deadline=soon())
        staged.controller.expect(Acquire)
        address = staged.controller.address
        staged.controller.close()
        with pytest.raises(ControllerUnavailable, match="disconnected"):
            asking.result(PATIENCE_S)
        assert staged.channel.in_doubt
        staged.controller = ScriptedController(address=address)
        staged.controller.welcome(lineage="another")
        view = staged.channel.wait_fresh(PATIENCE_S)
        assert view is not None
        assert view.lineage == "another"


def test_an_address_that_cannot_be_is_said_and_counted() -> None:
    counters = Counters()
    channel = ControlChannel("tcp://nonsense", name="test", counters=counters)
    channel.start()
    deadline = time.monotonic() + PATIENCE_S
    while "control.hello_failed.address" not in counters.snapshot() and time.monotonic() < deadline:
        channel.wait_fresh(0.02)
    with pytest.raises(ControllerUnavailable, match="cannot connect to tcp://nonsense"):
        channel.lookup([key("a")], deadline=soon())
    channel.close()


def test_close_says_goodbye_and_wakes_everyone(staged: Stage) -> None:
    acquiring = staged.acquire(key("a"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [Waiting()])
    acquisition = acquiring.result()
    waiting = staged.call(acquisition.resolutions, soon())
    asking = staged.call(staged.channel.lookup, [key("b")], deadline=soon())
    staged.controller.receive()
    before = threads()
    staged.channel.close()
    assert len(threads()) == len(before) - 1
    assert waiting.result(PATIENCE_S) == []
    assert acquisition.lost
    with pytest.raises(ControllerUnavailable, match="closed"):
        asking.result(PATIENCE_S)
    goodbye = staged.controller.expect(Goodbye)
    assert goodbye.session == staged.controller.session
    assert staged.channel.fresh() is None
    assert staged.channel.wait_fresh(PATIENCE_S) is None


def test_a_call_that_comes_while_the_channel_closes_ends_too(staged: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    link = staged.channel._link
    lost, ran = link.exchange.lost, []

    def tell(reason: str) -> None:
        lost(reason)
        link.submit(lambda: ran.append(reason))  # later than all that the thread does in its turns

    monkeypatch.setattr(link.exchange, "lost", tell)
    staged.channel.close()
    assert ran == ["closed"]


def test_close_wakes_who_waits_for_a_session() -> None:
    controller = ScriptedController()
    channel = ControlChannel(controller.address, name="test")
    channel.start()
    found: list[object] = ["nothing yet"]
    waiter = threading.Thread(target=lambda: found.append(channel.wait_fresh(PATIENCE_S)))
    waiter.start()
    controller.expect(Hello)
    channel.close()
    waiter.join(PATIENCE_S / 2)
    assert found == ["nothing yet", None]
    controller.close()


def test_a_channel_that_is_not_running_says_so_and_ignores_what_has_no_answer(staged: Stage) -> None:
    early = ControlChannel(staged.controller.address, name="early")
    acquiring = staged.acquire(key("a"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [Waiting()])
    acquisition = acquiring.result()
    staged.channel.close()
    staged.channel.close()
    for channel in (early, staged.channel):
        with pytest.raises(LifecycleError):
            channel.lookup([key("a")], deadline=soon())
        with pytest.raises(LifecycleError):
            channel.acquire([key("a")], wait_s=1.0, deadline=soon())
        assert channel.fresh() is None
        channel.abort([1], AbortReason.FAILED)
        channel.report([(key("a"), 1)])
    with pytest.raises(LifecycleError):
        staged.channel.start()
    acquisition.leave()
    early.close()
    with pytest.raises(LifecycleError):
        early.start()


def test_a_channel_that_is_dropped_ends_its_session() -> None:
    controller = ScriptedController()
    before = threads()
    channel = ControlChannel(controller.address, name="dropped")
    channel.start()
    controller.welcome()
    channel.wait_fresh(PATIENCE_S)
    del channel
    gc.collect()
    controller.expect(Goodbye)
    assert threads() <= before
    controller.close()


def test_a_process_that_exits_without_close_says_goodbye() -> None:
    controller = ScriptedController()
    source = (
        "import sys; from mmcache.control.channel import ControlChannel\n"
        "channel = ControlChannel(sys.argv[1], name='exits'); channel.start(); assert channel.wait_fresh(20)"
    )
    process = subprocess.Popen([sys.executable, "-c", source, controller.address])
    controller.welcome()
    controller.expect(Goodbye)
    assert process.wait(PATIENCE_S) == 0
    controller.close()


def test_in_a_child_after_fork_every_call_is_refused_and_the_parent_is_left_alone(staged: Stage) -> None:
    channel = staged.channel
    acquiring = staged.acquire(key("a"))
    staged.controller.answer(Acquired, staged.controller.expect_acquire().request, [Waiting()])
    acquisition = acquiring.result()
    calls = [
        channel.fresh,
        channel.start,
        channel.close,
        lambda: channel.wait_fresh(1.0),
        lambda: channel.acquire([key("a")], wait_s=1.0, deadline=soon()),
        lambda: channel.lookup([key("a")], deadline=soon()),
        lambda: channel.abort([1], AbortReason.FAILED),
        lambda: channel.report([(key("a"), 1)]),
        lambda: acquisition.resolutions(soon()),
        acquisition.leave,
    ]
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except LifecycleError:
                refused += 1
        os._exit(0 if refused == len(calls) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert channel.fresh() is not None
    assert staged.controller.receive(patience_s=0.05) is None


def test_a_process_stopped_for_longer_than_the_ttl_wakes_up_without_a_session() -> None:
    controller = ScriptedController(ttl_ms=1000)
    script = Path(__file__).with_name("stopped_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), controller.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(question: str) -> str:
        process.stdin.write(question + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    try:
        controller.welcome()
        assert process.stdout.readline() == "fresh\n"
        request = controller.expect(Acquire)
        process.send_signal(signal.SIGSTOP)
        controller.answer_heartbeats = False
        controller.answer(Acquired, request.request, [Granted(0, 5, 10_000)])  # it is granted meanwhile
        time.sleep(1.2 * controller.ttl_ms / 1000)  # that the TTL passes is what is tested
        process.send_signal(signal.SIGCONT)
        assert ask("fresh?") == "False"
        assert ask("acquired?") in ("acquired", "ControllerUnavailable")
        while not isinstance(controller.receive(), Hello):
            pass
        controller.send_welcome()
        controller.answer_heartbeats = True
        assert ask("again?") == "True"
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        controller.close()


def test_a_fault_in_the_channels_thread_costs_a_session_not_the_channel(
    staged: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Link) -> float:
        monkeypatch.undo()
        raise ZeroDivisionError

    staged.faults_expected = True
    asking = staged.acquire(key("a"))
    staged.controller.expect_acquire()
    monkeypatch.setattr(Link, "_sleep_s", fail)
    staged.channel.abort([1], AbortReason.FAILED)  # of no claim: it only wakes the thread
    with pytest.raises(ControllerUnavailable):
        asking.result(PATIENCE_S)
    staged.controller.welcome()
    assert staged.channel.wait_fresh(PATIENCE_S) is not None
    assert staged.counters.snapshot()["control.internal_error.ZeroDivisionError"] == 1


def test_a_first_connection_for_which_there_was_no_descriptor_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Mock(side_effect=zmq.ZMQError(errno.EMFILE))
    monkeypatch.setattr(link, "Handshake", watch)
    controller, counters = ScriptedController(), Counters()
    channel = ControlChannel(controller.address, name="test", counters=counters)
    try:
        channel.start()
        deadline = time.monotonic() + PATIENCE_S
        while not watch.called and time.monotonic() < deadline:
            time.sleep(0.001)
        monkeypatch.undo()
        controller.welcome()
        assert channel.wait_fresh(PATIENCE_S) is not None
        assert counters.snapshot()["control.internal_error.ZMQError"] >= 1
    finally:
        channel.close()
        controller.close()
