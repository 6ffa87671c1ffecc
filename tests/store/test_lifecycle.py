"""The gate in front of a library that crashes when it is called too late."""

from __future__ import annotations

import threading
import time

import pytest

from mmcache.errors import LifecycleError
from mmcache.store.lifecycle import CallGate


def test_close_waits_for_the_calls_that_run() -> None:
    gate = CallGate("store")
    inside, go = threading.Event(), threading.Event()
    left_at: list[float] = []

    def call() -> None:
        with gate:
            inside.set()
            go.wait(10)
            left_at.append(time.monotonic())

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(10)
    threading.Timer(0.05, go.set).start()
    assert gate.close(wait_s=10)
    assert left_at
    assert left_at[0] <= time.monotonic()
    thread.join(10)


def test_close_gives_up_on_a_call_that_hangs_and_lets_nobody_in() -> None:
    gate = CallGate("store")
    with gate:
        assert not gate.close(wait_s=0.01)
        with pytest.raises(LifecycleError, match="closed"), gate:
            pass
    assert gate.close(wait_s=0.0), "the last one is out"


def test_a_call_that_raises_leaves_too() -> None:
    gate = CallGate("store")
    with pytest.raises(ZeroDivisionError), gate:
        raise ZeroDivisionError
    assert gate.close(wait_s=0.0)
