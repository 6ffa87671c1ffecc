"""What `benchmarks.control` loads: a controller process, or a baseline that does everything but decide.

    python -m benchmarks.control_server HITS

is the baseline: the controller's own loop around a core that answers from stock. So the same frames are received,
decoded, encoded and sent; of each 16 keys HITS are hits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import psutil

from benchmarks.control_load import BATCH, INFO, NBYTES
from mmcache.config import without_settings
from mmcache.control.messages import (
    Acquire,
    Acquired,
    Answer,
    ClientMessage,
    Commit,
    CommitStatus,
    Committed,
    Found,
    Granted,
    Hit,
    Lookup,
)
from mmcache.controller.core import ControllerCore, Effects
from mmcache.controller.durable import Past
from mmcache.controller.limits import ControllerLimits
from mmcache.controller.recorder import Recorder
from mmcache.controller.server import serve, volatile_store

CONTROLLER = ("mmcache.cli", "controller", "--bind", "tcp://127.0.0.1:0")
LIMITS = {"MMCACHE_CONTROLLER__SESSION_TTL": "3600s", "MMCACHE_CONTROLLER__MAX_ENTRIES": "10000000"}
"""No heartbeats while it is measured; and room for all that is published."""


class Cores(NamedTuple):
    """Which core is the server's and which the load's; the same one where there is only one."""

    server: int
    load: int


def cores() -> Cores:
    """The last two cores that this process may use, since the first has most interrupts."""
    usable = sorted(os.sched_getaffinity(0))
    return Cores(usable[-1], usable[-2] if len(usable) > 1 else usable[-1])


class Server:
    """A running server and what it has used."""

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self._process = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        """Seconds of processor time since its start, of all its threads."""
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)


@contextlib.contextmanager
def running(module_and_arguments: Sequence[str], core: int) -> Iterator[Server]:
    """A server as a child on one core, for the length of a `with` block; it prints its address when it is ready."""
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})  # for the child to inherit, with all threads that it will have
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", *module_and_arguments],
            env={**without_settings(os.environ), **LIMITS},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    finally:
        os.sched_setaffinity(0, ours)
    with child:
        try:
            line = child.stdout.readline() if child.stdout is not None else ""
            if "tcp://" not in line:
                raise SystemExit(f"{' '.join(module_and_arguments)} did not start")
            yield Server(line.split()[-1], child.pid)
        finally:
            child.terminate()


class AnswersFromStock(ControllerCore):
    """Sessions are real; what is said of keys and entries is not."""

    def __init__(self, hits: int) -> None:
        super().__init__(
            ControllerLimits(ttl_ms=3_600_000),
            term=1,
            past=Past("baseline"),
            random_session=itertools.count(1).__next__,
        )
        hit = Hit(0, 1 << 20, NBYTES, INFO)
        self._found: list[Hit | None] = [hit] * BATCH
        self._answers: list[Answer] = [hit] * hits
        self._answers += [Granted(0, (1 << 20) + number, 10_000) for number in range(BATCH - hits)]

    def handle(self, peer: bytes, message: ClientMessage, now: float) -> Effects:
        match message:
            case Acquire(term, session, request):
                return [(peer, Acquired(term, session, request, self._answers))]
            case Commit(term, session, request, groups):
                statuses = [CommitStatus.STORED] * len(groups[0].entries)
                return [(peer, Committed(term, session, request, statuses))]
            case Lookup(term, session, request):
                return [(peer, Found(term, session, request, self._found))]
        return super().handle(peer, message, now)


def baseline(hits: int) -> tuple[str, ...]:
    """The command of the baseline that answers each acquire with so many hits."""
    return ("benchmarks.control_server", str(hits))


if __name__ == "__main__":
    core = AnswersFromStock(int(sys.argv[1]))
    serve("tcp://127.0.0.1:0", core, Recorder(volatile_store()), ready=lambda address: print(address, flush=True))
