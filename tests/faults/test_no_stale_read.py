"""The guarantee on real processes: what a get returns that began after an invalidation was complete is not older.

Readers compute on a miss, are stopped and continued at random, and the controller is killed and started again, while an
operator gives keys new contents and then invalidates what may be of the old.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Serving
from version_reader import key_of

from mmcache import ControllerUnavailable, DeadlineExceeded, MMCache, Selector

KEYS = 50
READERS = 8
TTL = 1.0
SECONDS = 60.0
RESTARTS = 5


class Contents:
    """The version of each key's content, for readers to see, and from when on only newer ones may be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(8 * KEYS))
        self._file = path.open("r+b")
        self.versions = [0] * KEYS
        self.complete_at: list[list[float]] = [[] for _ in range(KEYS)]
        self.least: list[list[int]] = [[0] for _ in range(KEYS)]
        """The version before all completions, and from each of them on."""

    def renew(self, numbers: list[int]) -> dict[int, int]:
        """Give these a new version; returns them."""
        for number in numbers:
            self.versions[number] += 1
            os.pwrite(self._file.fileno(), struct.pack("<q", self.versions[number]), 8 * number)
        return {number: self.versions[number] for number in numbers}

    def complete(self, renewed: dict[int, int]) -> None:
        """No get that begins from now on may return anything older."""
        now = time.monotonic()
        for number, version in renewed.items():
            self.complete_at[number].append(now)
            self.least[number].append(version)

    def stale(self, gets: list[tuple[float, int, int]]) -> list[str]:
        """Gets that returned what they must not."""
        found = []
        for began, number, version in gets:
            least = self.least[number][bisect.bisect_left(self.complete_at[number], began)]
            if version < least:
                found.append(f"a get of key {number} at {began:.3f} returned version {version}, not {least} or later")
        return found


class Reader:
    """One reading process."""

    def __init__(
        self, serving: Serving, contents: Contents, seed: int, *, keys: int = KEYS, trusts_for_ever: bool = False
    ) -> None:
        given = {
            "config": str(serving.config),
            "versions": str(contents.path),
            "keys": keys,
            "seed": seed,
            "trusts_for_ever": trusts_for_ever,
        }
        command = [sys.executable, str(Path(__file__).with_name("version_reader.py")), json.dumps(given)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def finish(self) -> dict[str, Any]:
        os.kill(self.process.pid, signal.SIGCONT)
        out, _ = self.process.communicate("end\n", timeout=60)
        assert self.process.returncode == 0
        return json.loads(out)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def serving() -> Iterator[Serving]:
    with Serving(durable=True, session_ttl=TTL) as serving:
        yield serving


def select(choose: random.Random) -> tuple[Selector, list[int]]:
    """Something to invalidate, and the keys that it matches."""
    number = choose.randrange(KEYS)
    key = key_of(number)
    selector = choose.choice(
        [
            Selector.exactly(key),
            Selector(mm_hash=key.mm_hash),
            Selector(model=key.model, version=key.version),
            Selector(tenant=key.tenant, version=key.version),
            Selector(),
        ]
    )
    return selector, [each for each in range(KEYS) if selector.matches(key_of(each))]


def invalidate(cache: MMCache, contents: Contents, selector: Selector, numbers: list[int]) -> bool:
    """New contents for some keys, and their invalidation; False if it is not known to be complete."""
    renewed = contents.renew(numbers)
    with contextlib.suppress(ControllerUnavailable, DeadlineExceeded):
        if cache.invalidate(selector, everything=True, wait=True, timeout=10.0).complete:
            contents.complete(renewed)
            return True
    return False


@pytest.mark.timeout(400)
def test_no_get_is_stale_whoever_is_stopped_or_killed_meanwhile(serving: Serving, tmp_path: Path) -> None:
    contents = Contents(tmp_path / "versions")
    operator = serving.connect()
    choose = random.Random(7)
    complete = 0
    with contextlib.ExitStack() as stack:
        readers = [Reader(serving, contents, seed) for seed in range(READERS)]
        for reader in readers:
            stack.callback(reader.kill)
        for reader in readers:
            reader.wait_ready()
        ends = time.monotonic() + SECONDS

        def disturb() -> None:
            disturbing = random.Random(11)
            restart_at = [time.monotonic() + SECONDS * (each + 0.5) / RESTARTS for each in range(RESTARTS)]
            while time.monotonic() < ends:
                if restart_at and time.monotonic() >= restart_at[0]:
                    del restart_at[0]
                    serving.controller.kill()
                    time.sleep(disturbing.uniform(0.0, 2 * TTL))  # how long it is away is what is varied
                    serving.controller.start()
                pid = disturbing.choice(readers).process.pid
                os.kill(pid, signal.SIGSTOP)
                time.sleep(disturbing.choice([0.05, 0.5, 1.2 * TTL, 2 * TTL]))
                os.kill(pid, signal.SIGCONT)

        disturber = threading.Thread(target=disturb)
        disturber.start()
        while time.monotonic() < ends:
            complete += invalidate(operator, contents, *select(choose))
        disturber.join()
        told = [reader.finish() for reader in readers]
    gets = [get for one in told for get in one["gets"]]
    assert [text for one in told for text in contents.stale(one["gets"])] == []
    assert complete >= 10
    assert len(gets) > 1000, "there was something to be stale"
    assert sum(one["computed"] for one in told) > KEYS


def test_a_reader_that_trusts_its_session_for_ever_is_found_out(serving: Serving, tmp_path: Path) -> None:
    contents = Contents(tmp_path / "versions")
    operator = serving.connect()
    reader = Reader(serving, contents, 0, keys=1, trusts_for_ever=True)
    try:
        reader.wait_ready()
        for _ in range(5):
            time.sleep(0.5)  # it reads
            os.kill(reader.process.pid, signal.SIGSTOP)
            assert invalidate(operator, contents, Selector.exactly(key_of(0)), [0])
            os.kill(reader.process.pid, signal.SIGCONT)
        assert contents.stale(reader.finish()["gets"])
    finally:
        reader.kill()
