"""Channels against the real controller, over real sockets."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cluster import wait_until
from scripted_controller import PATIENCE_S, key, soon

from mmcache.control.channel import CommitEntry, ControlChannel
from mmcache.control.messages import AbortReason, CommitStatus, Granted, Hit, Unclaimed, Waiting
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.server import begin_term, serve, volatile_store
from mmcache.errors import ControllerUnavailable


class Controller:
    """The controller on a thread, on a free port; `stop` and make another to restart it."""

    def __init__(self, address: str = "tcp://127.0.0.1:0", **limits: int) -> None:
        self._stopped, self._stop = os.pipe()
        bound = threading.Event()

        def ready(address: str) -> None:
            self.address = address
            bound.set()

        self.core, recorder = begin_term(volatile_store(), ControllerLimits(**limits))
        self._thread = threading.Thread(
            target=serve, args=(address, self.core, recorder), kwargs={"ready": ready, "stop": self._stopped}
        )
        self._thread.start()
        assert bound.wait(PATIENCE_S)

    def stop(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        os.close(self._stop)
        os.close(self._stopped)


@pytest.fixture
def controller() -> Iterator[Controller]:
    running = Controller(ttl_ms=2000, claim_ms=1000)
    yield running
    running.stop()


@pytest.fixture
def channels(controller: Controller) -> Iterator[list[ControlChannel]]:
    opened = [ControlChannel(controller.address, name=f"client-{number}") for number in range(3)]
    for channel in opened:
        channel.start()
        assert channel.wait_fresh(PATIENCE_S) is not None
    yield opened
    for channel in opened:
        channel.close()


def entry(name: str, token: int) -> CommitEntry:
    return CommitEntry(key(name), 0, token, 8192, 3.0, b"info")


def test_one_computes_and_the_others_wait_for_it(channels: list[ControlChannel]) -> None:
    first, second, third = channels
    with first.acquire([key("a")], wait_s=PATIENCE_S, deadline=soon()) as mine:
        [claim] = mine.answers
        assert isinstance(claim, Granted)
        waits = [other.acquire([key("a")], wait_s=PATIENCE_S, deadline=soon()) for other in (second, third)]
        assert [wait.answers for wait in waits] == [[Waiting()], [Waiting()]]
        assert first.commit([entry("a", claim.token)], deadline=soon()) == [CommitStatus.STORED]
    for wait in waits:
        with wait:
            [(index, hit)] = wait.resolutions(soon())
            assert (index, hit.nbytes, hit.info) == (0, 8192, b"info")
    [found, nothing] = third.lookup([key("a"), key("b")], deadline=soon())
    assert isinstance(found, Hit)
    assert nothing is None
    third.report([(key("a"), found.revision)])
    assert third.lookup([key("a")], deadline=soon()) == [None]


def test_a_claim_outlives_its_time_because_it_is_renewed(channels: list[ControlChannel]) -> None:
    first, second, _ = channels
    mine = first.acquire([key("a")], wait_s=0.0, deadline=soon())
    with second.acquire([key("a")], wait_s=1.5, deadline=soon()) as other:
        assert other.resolutions(soon()) == [], "a claim of a second passed on within one and a half"
    [claim] = mine.answers
    assert isinstance(claim, Granted)
    assert first.commit([entry("a", claim.token)], deadline=soon()) == [CommitStatus.STORED]


def test_a_claim_that_is_given_up_passes_to_who_waits_and_one_for_want_of_room_to_nobody(
    channels: list[ControlChannel],
) -> None:
    first, second, _ = channels
    for reason in (AbortReason.FAILED, AbortReason.NO_ROOM):
        [claim] = first.acquire([key(reason.name)], wait_s=0.0, deadline=soon()).answers
        assert isinstance(claim, Granted)
        with second.acquire([key(reason.name)], wait_s=PATIENCE_S, deadline=soon()) as other:
            first.abort([claim.token], reason)
            [(_, resolution)] = other.resolutions(soon())
        assert isinstance(resolution, Granted if reason is AbortReason.FAILED else Unclaimed)


def test_claims_of_a_closed_channel_pass_on_at_once(channels: list[ControlChannel]) -> None:
    first, second, _ = channels
    first.acquire([key("a")], wait_s=0.0, deadline=soon())
    with second.acquire([key("a")], wait_s=PATIENCE_S, deadline=soon()) as other:
        first.close()
        [(_, resolution)] = other.resolutions(soon())
    assert isinstance(resolution, Granted)


def test_nothing_is_left_at_the_controller_by_callers_that_give_up_at_any_time(
    controller: Controller, channels: list[ControlChannel]
) -> None:
    """Deadlines short enough to pass before, during and after the answers."""

    def ask(number: int) -> None:
        channel = channels[number % 3]
        names = [key(f"{(number + step) % 7}") for step in range(3)]
        try:
            with channel.acquire(names, wait_s=0.02, deadline=soon() - PATIENCE_S + (number % 9) * 0.0005) as mine:
                claims = {answer.token for answer in mine.answers if isinstance(answer, Granted)}
                claims |= {answer.token for _, answer in mine.resolutions(soon()) if isinstance(answer, Granted)}
                channel.abort(sorted(claims), AbortReason.UNWANTED)
        except (TimeoutError, ControllerUnavailable):  # the second when others waited in vain just before
            pass

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(ask, range(400)))
    for channel in channels:
        wait_until(lambda channel=channel: not channel.in_doubt, timeout=PATIENCE_S, what="a sign of life")
        channel.lookup([key("last")], deadline=soon())  # all that it sent before has been read
    for channel in channels:
        channel.lookup([key("last")], deadline=soon())  # and what the others' grants made it send
    stats = controller.core.stats()
    assert (stats["claims"], stats["waiters"]) == (0, 0)


def test_after_a_restart_of_the_controller_a_new_session_has_its_lineage(controller: Controller) -> None:
    first = Controller(ttl_ms=1000)
    channel = ControlChannel(first.address, name="survivor")
    channel.start()
    before = channel.wait_fresh(PATIENCE_S)
    first.stop()
    second = Controller(first.address, ttl_ms=1000)
    deadline = soon()
    while (view := channel.wait_fresh(PATIENCE_S)) == before or view is None or view.term == first.core.term:
        assert soon() < deadline + PATIENCE_S
    assert view.lineage == second.core.lineage
    channel.close()
    second.stop()
