"""What the directory lacks is read back piece by piece, and what is to be removed does not wait for all of it."""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from cluster import wait_until
from serving import Serving, key_of, name_of

from mmcache.config import StoreSettings
from mmcache.controller.core import ControllerCore
from mmcache.controller.durable import Past
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.mailbox import Mailbox, MailboxClosed
from mmcache.controller.reaper import service
from mmcache.controller.removals import BATCH

LONG = 120.0
PIECES = 6


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving() as serving:
        yield serving


def serve(mailbox: Mailbox, core: ControllerCore) -> None:
    """As a controller's loop does, until the mailbox is closed."""
    calls = select.poll()
    calls.register(mailbox.fileno(), select.POLLIN)
    try:
        while True:
            calls.poll(1000)
            mailbox.call(lambda *_: None)  # so that there is something to take
            mailbox.serve(core, time.monotonic())
    except MailboxClosed:
        return


def test_a_reaper_that_fails_begins_anew(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "BEGIN_ANEW_S", 0.0)
    core = ControllerCore(ControllerLimits(), term=1, past=Past("l"), random_session=itertools.count(1).__next__)
    turns = itertools.count(1)
    served = threading.Event()

    def fail_once(_now: float) -> list[str]:
        if next(turns) == 1:
            raise KeyError("nobody has thought of this")
        served.set()
        return []

    monkeypatch.setattr(core, "take_removals", fail_once)
    mailbox = Mailbox()
    loop = threading.Thread(target=serve, args=(mailbox, core))
    loop.start()
    try:
        with service.Reaper(StoreSettings(master=serving.store.master.address), mailbox, 1000.0):
            assert served.wait(LONG)
            mailbox.close()
    finally:
        mailbox.close()
        loop.join()


def test_all_is_read_back_and_removals_have_their_turns(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "READ_S", 0.0)  # one piece each time
    cache = serving.connect()
    keys = [key_of(number, version="back") for number in range(PIECES * BATCH - 1)]
    for start in range(0, len(keys), 256):
        outcomes = cache.put_many([(key, torch.zeros(8)) for key in keys[start : start + 256]])
        assert {outcome.status for outcome in outcomes} == {"stored"}
    lineage = name_of(cache, keys[0]).split(".")[1]
    past = Past(lineage, scopes=(keys[0].scope,))
    core = ControllerCore(ControllerLimits(), term=1, past=past, random_session=itertools.count(1).__next__)
    directory, take = core._entries.directory, core.take_removals
    known: list[int] = []

    def take_and_note(now: float) -> list[str]:
        known.append(len(directory))
        return take(now)

    monkeypatch.setattr(core, "take_removals", take_and_note)
    settings = StoreSettings(
        master=serving.store.master.address, metrics=serving.store.metrics, sidecar=serving.sidecar.address
    )
    mailbox = Mailbox()
    loop = threading.Thread(target=serve, args=(mailbox, core))
    loop.start()
    try:
        with service.Reaper(settings, mailbox, 1000.0):
            wait_until(lambda: len(directory) == len(keys), timeout=LONG, what="all that is there")
            mailbox.close()
    finally:
        mailbox.close()
        loop.join()
    assert {directory.entry(key.scope.digest + key.mm_digest) is not None for key in keys} == {True}
    between = {number for number in known if 0 < number < len(keys)}
    assert between == {BATCH * pieces for pieces in range(1, PIECES)}
