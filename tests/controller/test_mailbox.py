"""Calls of other threads reach the core on its own thread, and each of them ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from mmcache.control.messages import Invalidated, Progress, Refused
from mmcache.controller.announcements import Asked
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.mailbox import Mailbox, MailboxClosed, MailboxFull
from mmcache.controller.server import begin_term, serve, volatile_store
from mmcache.selector import Selector

PATIENCE_S = 20.0


class Running:
    def __init__(self, mailbox: Mailbox) -> None:
        core, recorder = begin_term(volatile_store(), ControllerLimits(ttl_ms=200))
        self._stopped, self._stop = os.pipe()
        self.thread = threading.Thread(
            target=serve,
            args=("tcp://127.0.0.1:0", core, recorder),
            kwargs={"mailbox": mailbox, "stop": self._stopped},
        )
        self.thread.start()

    def ask_to_stop(self) -> None:
        os.write(self._stop, b"x")

    def stop(self) -> None:
        self.ask_to_stop()
        self.thread.join(PATIENCE_S)
        os.close(self._stop)
        os.close(self._stopped)


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox(most=50)
    running = Running(mailbox)
    yield mailbox
    running.stop()


def asking(selector: Selector, idempotency: str = "") -> object:
    return lambda core, request, _: core.ask(request, [Asked(selector, "", "me", idempotency, "operator")])


def test_calls_run_on_the_servers_thread(mailbox: Mailbox) -> None:
    threads = [mailbox.call(lambda *_: threading.get_ident()).result(PATIENCE_S) for _ in range(3)]
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_calls_of_many_threads_all_end(mailbox: Mailbox) -> None:
    def calls(_: int) -> list[int]:
        return [mailbox.call(lambda core, _: core.views.head).result(PATIENCE_S) for _ in range(200)]

    with ThreadPoolExecutor(8) as threads:
        assert sum(map(len, threads.map(calls, range(8)))) == 1600
    assert len(mailbox) == 0


def test_what_a_call_raises_is_its_callers(mailbox: Mailbox) -> None:
    def fails(*_: object) -> Effects:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        mailbox.call(fails).result(PATIENCE_S)
    with pytest.raises(KeyError):
        mailbox.ask(fails).result(PATIENCE_S)
    assert len(mailbox) == 0
    assert mailbox.call(lambda core, _: core.views.head).result(PATIENCE_S) == 0


def test_an_invalidation_is_answered_once_it_is_durable_and_followed_until_it_is_complete(mailbox: Mailbox) -> None:
    made = mailbox.ask(asking(Selector(model="a"))).result(PATIENCE_S)
    assert isinstance(made, Invalidated)
    assert made.number == 1
    followed = mailbox.ask(lambda core, request, now: core.follow(request, 1, 10_000, now)).result(PATIENCE_S)
    assert isinstance(followed, Progress)
    assert followed.complete, "when sessions of before could not live any more"
    beyond = mailbox.ask(lambda core, request, now: core.follow(request, 2, 10_000, now)).result(PATIENCE_S)
    assert beyond == Refused(beyond.request, "there is no invalidation 2 yet")


def test_asking_twice_with_one_key_at_once_makes_one(mailbox: Mailbox) -> None:
    asked = [mailbox.ask(asking(Selector(model="a"), "key")) for _ in range(20)]
    numbers = {future.result(PATIENCE_S).number for future in asked}
    assert numbers == {1}
    assert mailbox.call(lambda core, _: core.views.head).result(PATIENCE_S) == 1


def test_more_calls_than_fit_are_refused_and_the_others_go_on() -> None:
    mailbox = Mailbox(most=2)
    first, second = mailbox.call(lambda *_: 1), mailbox.call(lambda *_: 2)
    with pytest.raises(MailboxFull):
        mailbox.call(lambda *_: 3)
    second.cancel()
    running = Running(mailbox)
    assert first.result(PATIENCE_S) == 1
    waits = [mailbox.ask(asking(Selector(model="a")))]
    number = waits[0].result(PATIENCE_S).number
    following = [mailbox.ask(lambda core, request, now: core.follow(request, number, 60_000, now)) for _ in range(2)]
    with pytest.raises(MailboxFull, match="overloaded"):
        mailbox.call(lambda *_: 3)
    running.stop()
    for future in following:
        assert future.done()


def test_all_fail_when_the_server_ends() -> None:
    mailbox = Mailbox()
    hold, entered = threading.Event(), threading.Event()

    def holds(_core: ControllerCore, _now: float) -> str:
        entered.set()
        hold.wait(PATIENCE_S)
        return "carried out"

    running = Running(mailbox)
    held = mailbox.call(holds)
    assert entered.wait(PATIENCE_S)
    running.ask_to_stop()
    waiting = [mailbox.call(lambda *_: 1) for _ in range(100)]
    hold.set()
    running.stop()
    assert held.result(PATIENCE_S) == "carried out"
    failed = [future for future in waiting if isinstance(future.exception(PATIENCE_S), MailboxClosed)]
    assert len(failed) >= 100 - 2 * 16, "a turn or two may have been carried out"
    with pytest.raises(MailboxClosed):
        mailbox.call(lambda *_: 1)
    mailbox.close()
