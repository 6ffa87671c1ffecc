"""Each part of a cluster dies, hangs, comes back late or at once and empty: engines miss meanwhile, and go on.

A cluster for each part, all of them broken at the same time, since most of this is waiting. Each has an engine that is
attached to the sidecar and, but for the sidecar's own, an embedded one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest
from verdict import CLOSE_SECONDS, SLACK_SECONDS, hold_nothing, no_more_than, serve_again, unharmed

from benchmarks.fault_engine import Engine
from benchmarks.fault_load import Options
from benchmarks.parts import PARTS, Part, Parts

OPTIONS = Options(timeout=1.0, burst=4, pause=0.08, nbytes=16 << 10, pool_bytes=8 << 20)
OUTAGE_SECONDS = 2.0
LONGER_THAN_THE_STORE_WAITS = 40.0


class Fleet:
    """The clusters by the part that breaks in each, and all engines."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.victims: list[Part] = []
        self.engines: list[Engine] = []
        for name in PARTS:
            parts = stack.enter_context(Parts(owner_bytes=256 << 20))
            self.victims.append(parts.parts[name])
            for attach in ("sidecar",) if name == "sidecar" else ("sidecar", "embedded"):
                self.engines.append(stack.enter_context(Engine(parts.config_for(attach), OPTIONS)))
        for engine in self.engines:
            engine.wait_ready()

    def each(self, act: Callable[[Part], None]) -> None:
        for victim in self.victims:
            act(victim)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Every victim stands still within a `with` block."""
        try:
            self.each(Part.stop)
            yield
        finally:
            self.each(Part.resume)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with contextlib.ExitStack() as stack:
        yield Fleet(stack)


def test_parts_that_are_killed_are_missed_until_they_are_started_again(fleet: Fleet) -> None:
    fleet.each(Part.kill)
    time.sleep(OUTAGE_SECONDS)
    fleet.each(Part.start)
    serve_again(fleet.engines, OPTIONS)


def test_parts_that_are_restarted_at_once_and_empty_go_on(fleet: Fleet) -> None:
    def restart(part: Part) -> None:
        part.kill()
        part.start()

    fleet.each(restart)
    serve_again(fleet.engines, OPTIONS)


def test_parts_that_stop_for_longer_than_the_store_waits_change_no_byte_and_leave_nothing_held(fleet: Fleet) -> None:
    before = hold_nothing(fleet.engines)
    with fleet.stopped():
        time.sleep(LONGER_THAN_THE_STORE_WAITS)
    serve_again(fleet.engines, OPTIONS)
    no_more_than(before, hold_nothing(fleet.engines))


def test_an_engine_can_close_while_its_calls_hang(fleet: Fleet) -> None:
    """The engines' last test: it ends them."""
    with fleet.stopped():
        time.sleep(OPTIONS.timeout / 2)  # by now a call of each kind is under way to somebody who does not answer
        for engine in fleet.engines:
            engine.tell("close")
        for engine in fleet.engines:
            said = engine.hear(CLOSE_SECONDS + 60.0)
            unharmed(said, OPTIONS)
            assert said["ended"]
            assert said["close_seconds"] < CLOSE_SECONDS + SLACK_SECONDS
