"""One client process of the soak: `python -m benchmarks.soak_client JSON`, with commands and answers a JSON line each.

Commands: `go`, `rest` (stand still, hold nothing, then say what this process uses), `end`. Answers: `{"figures": …}`
every few seconds and after each command, `{"rested": …}`, `{"ended": true}`.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any, Final, NamedTuple

import psutil
import torch

from benchmarks.soak_load import STALL_WATCH_S, AsyncAsSync, Figures, Load
from benchmarks.soak_resources import abandoned_connections, fd_names
from mmcache import MMCache

TELL_SECONDS: Final = 1.0
VISIT_SECONDS: Final = 4.0
"""How long a second cache of a process that keeps opening them is used."""
REST_SECONDS: Final = 120.0
"""A store call that hangs ends after 30 s at most, and what it used is given back only then; a client of the store that
may still move bytes is ended a minute later."""
MIB: Final = 1 << 20


class Task(NamedTuple):
    """What a process is to do; the fields are its JSON argument.

    `kind`: `sync`; `asyncio`; `reconnecting` (opens and closes a second cache again and again); `visitor` (connects,
    calls for a while, closes and ends).
    """

    config: str
    kind: str
    seed: int
    epoch: float
    threads: int = 2
    pool_bytes: int = 64 * MIB
    pace_s: float = 0.02
    seconds: float = 5.0


def connect(task: Task, pool_bytes: int) -> Any:
    client: dict[str, Any] = {"pool_bytes": pool_bytes, "name": f"soak-{task.kind}-{os.getpid()}"}
    return AsyncAsSync(task.config, **client) if task.kind == "asyncio" else MMCache.connect(task.config, **client)


class Client:
    """The process: its cache, the load on it, and what it tells."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._figures = Figures()
        self._telling = threading.Lock()
        self._cache = connect(task, task.pool_bytes)
        self._load = self._loaded(self._cache, task.seed, task.threads, task.pool_bytes)
        self._visiting = threading.Event()
        self._between_visits = threading.Lock()
        for work in (self._keep_telling, self._watch_stalls):
            threading.Thread(target=work, name="soak-own", daemon=True).start()
        if task.kind == "reconnecting":
            threading.Thread(target=self._reconnect, name="soak-reconnect", daemon=True).start()

    def _loaded(self, cache: Any, seed: int, threads: int, pool_bytes: int) -> Load:
        return Load(
            cache,
            self._figures,
            seed=seed,
            epoch=self._task.epoch,
            threads=threads,
            hold_bytes=pool_bytes // (3 * threads),
            pace_s=self._task.pace_s,
        )

    def obey(self) -> None:
        """Commands from stdin until `end`, or its end."""
        self.tell(ready=True)
        for line in sys.stdin:
            command = line.strip()
            if command == "go":
                self._visiting.set()
                self._load.go()
            elif command == "rest":
                self._rest()
            elif command == "end":
                break
        self._end()

    def visit(self) -> None:
        """Without commands: some calls, and the end."""
        self._load.go()
        time.sleep(self._task.seconds)
        self._end()

    def _end(self) -> None:
        self._load.end()
        started = time.monotonic()
        self._cache.close()
        self._figures.most("seconds.close", time.monotonic() - started)
        self.tell(figures=self._snapshot(), ended=True)

    def _rest(self) -> None:
        self._visiting.clear()
        self._load.pause()
        with self._between_visits:
            started = time.monotonic()
            waited_for: Counter[str] = Counter()
            while time.monotonic() < started + REST_SECONDS and (busy := self._busy_with()):
                waited_for.update(busy)
                time.sleep(0.2)
            time.sleep(1.0)
            self.tell(figures=self._snapshot(), rested={**self._resources(), "waited_for": dict(waited_for)})

    def _busy_with(self) -> list[str]:
        """What is still going on, in a word each."""
        stats = self._cache.stats()
        signs = {
            "attaching": stats["store.attached"] != 1,
            "saying hello": stats["session.fresh"] != 1,
            "holding": stats.get("pool.held_blocks") != 0,
            "calling": any(call.running for call in list(self._sync._parts.io._left)),
            "detaching": any(thread.name == "mmcache-detach" for thread in threading.enumerate()),
        }
        return [word for word, true in signs.items() if true]

    @property
    def _sync(self) -> MMCache:
        return self._cache.sync if isinstance(self._cache, AsyncAsSync) else self._cache

    def _resources(self) -> dict[str, Any]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that only what is kept counts
        process, stats = psutil.Process(), self._cache.stats()
        exchange = self._sync._channel._link.exchange
        pool = {name.removeprefix("pool."): value for name, value in stats.items() if name.startswith("pool.")}
        return {
            "rss": process.memory_info().rss,
            **memory_by_kind(),
            "fds": process.num_fds(),
            "threads": process.num_threads(),
            "thread_names": sorted(thread.name for thread in threading.enumerate()),
            "fd_names": fd_names(os.getpid()),
            "abandoned": abandoned_connections(os.getpid()),
            "alive": alive(),
            "pool": pool,
            "fresh": stats["session.fresh"],
            "attached": stats["store.attached"],
            "attachments": 1 + stats.get("attachment_lost", 0) + self._figures.counts["visits"],
            "client_claims": len(exchange._claims._claims),
            "client_requests": len(exchange._requests) + len(exchange._waits),
            "flights": len(self._sync._reader._flights) + len(self._sync._publisher._in_place),
        }

    def _snapshot(self) -> dict[str, Any]:
        return {**self._figures.snapshot(), "stats": self._cache.stats()}

    def _keep_telling(self) -> None:
        while True:
            time.sleep(TELL_SECONDS)
            self.tell(figures=self._snapshot())

    def tell(self, **what: Any) -> None:
        with self._telling:
            sys.stdout.write(json.dumps(what) + "\n")
            sys.stdout.flush()

    def _watch_stalls(self) -> None:
        """Mooncake holds the GIL while it attaches and detaches, and a machine may be busy: calls are late then."""
        while True:
            started = time.monotonic()
            time.sleep(STALL_WATCH_S)
            stalled = time.monotonic() - started - STALL_WATCH_S
            self._figures.most("seconds.stalled", stalled)
            self._figures.stalled_s += stalled

    def _reconnect(self) -> None:
        while True:
            self._visiting.wait()
            with self._between_visits:
                cache = connect(self._task, 8 * MIB)
                load = self._loaded(cache, self._figures.counts["visits"], 1, 8 * MIB)
                load.go()
                time.sleep(VISIT_SECONDS)
                load.end()
                started = time.monotonic()
                cache.close()
                self._figures.most("seconds.close", time.monotonic() - started)
                self._figures.count("visits")
                for name, value in cache.stats().items():
                    if name.startswith("internal_error"):
                        self._figures.defect("internal_error", f"{value:.0f} times {name} in a second cache")


def memory_by_kind() -> dict[str, int]:
    """Resident bytes of this process: of its own, and shared (the pool is)."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[field].split()[0]) << 10 for name, field in (("anon", "RssAnon"), ("shared", "RssShmem"))}


def alive() -> dict[str, int]:
    """How many objects of each of mmcache's own classes there are."""
    found = Counter(
        type(item).__qualname__ for item in gc.get_objects() if str(type(item).__module__).startswith("mmcache.")
    )
    return dict(sorted(found.items()))


def main() -> None:
    """Run it."""
    faulthandler.enable()  # a crash in Mooncake is to say which of our calls it was in
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    client = Client(Task(**json.loads(sys.argv[1])))
    if client._task.kind == "visitor":
        client.visit()
    else:
        client.obey()


if __name__ == "__main__":
    main()
