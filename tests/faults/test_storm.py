"""Hundreds of short faults, several at a time, over engines of both kinds that ask for the same keys.

The seed is printed; FAULTS_SEED repeats its order of faults, FAULTS_COUNT sets their number.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter

import pytest
from relay import Relay
from verdict import hold_nothing, no_more_than, serve_again, unharmed

from benchmarks.fault_engine import Engine
from benchmarks.fault_load import Options
from benchmarks.parts import Part, Parts

FAULTS = int(os.environ.get("FAULTS_COUNT", "200"))
AT_ONCE = 2
OPTIONS = Options(timeout=0.5, burst=4, pause=0.04, nbytes=16 << 10, pool_bytes=8 << 20)


class Storm:
    """Breaks parts at random, mends each after a while, and breaks connections off."""

    def __init__(self, parts: dict[str, Part], relays: dict[str, Relay], seed: int) -> None:
        self.injected: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._parts = parts
        self._relays = relays
        self._due: dict[str, float] = {}
        self._starting: set[str] = set()

    def rage(self, count: int) -> None:
        """Inject `count` faults, and return when every part serves again."""
        while self.injected.total() < count:
            self._mend()
            if len(self._due) + len(self._starting) < AT_ONCE:
                self._break()
            time.sleep(self._random.uniform(0.0, 0.05))
        while self._due or self._starting:
            self._mend()
            time.sleep(0.01)

    def _break(self) -> None:
        if self._random.random() < 0.2:
            name = self._random.choice(sorted(self._relays))
            self._relays[name].reset()
            self.injected[f"{name} reset"] += 1
            return
        whole = sorted(set(self._parts) - set(self._due) - self._starting)
        name = self._random.choice(whole)
        part, seconds = self._parts[name], self._random.uniform(0.05, 0.5)
        if self._random.random() < 0.15:
            part.kill()
            self.injected[f"{name} killed"] += 1
        else:
            part.stop()
            self.injected[f"{name} stopped"] += 1
        self._due[name] = time.monotonic() + seconds

    def _mend(self) -> None:
        for name in [name for name, due in self._due.items() if due <= time.monotonic()]:
            del self._due[name]
            self._parts[name].resume()
            if not self._parts[name].alive:
                self._starting.add(name)
        for name in self._starting:
            self._parts[name].launch()  # and again, if it met another fault while it started, and gave up
        self._starting = {name for name in self._starting if not self._parts[name].ready}


def test_no_order_of_faults_harms_an_engine_or_leaves_anything_behind(capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("FAULTS_SEED", random.randrange(1 << 32)))
    relays: dict[str, Relay] = {}
    with contextlib.ExitStack() as stack:

        def via(name: str, address: str) -> str:
            relays[name] = stack.enter_context(Relay(address))
            return relays[name].address

        parts = stack.enter_context(Parts(owner_bytes=512 << 20, via=via))
        configs = [parts.config_for(attach) for attach in ("sidecar", "embedded")]
        engines = [stack.enter_context(Engine(config, OPTIONS)) for config in configs for _ in range(2)]
        for engine in engines:
            engine.wait_ready()
        before = hold_nothing(engines)
        storm = Storm(parts.parts, relays, seed)
        storm.rage(FAULTS)
        with capsys.disabled():
            print(f"\n{storm.injected.total()} faults, FAULTS_SEED={seed}: {dict(storm.injected)}")
        serve_again(engines, OPTIONS)
        no_more_than(before, hold_nothing(engines))
        for engine in engines:
            engine.tell("end")
        for engine in engines:
            said = engine.hear(180.0)
            unharmed(said, OPTIONS)
            # What ends a client of the store once no transfer can be under way may take a minute; nothing else stays.
            assert set(said["left"]) <= {"mmcache-detach"}, "threads outlive their cache"
