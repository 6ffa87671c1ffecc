"""How soon an invalidation is complete, at what rate, and what that costs everybody else.

A controller with a state file (each number is fsynced before it is told), sessions in client processes, and two
processes that read and publish other keys meanwhile. The bars are those of docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.crew import Wire, Worker, crew
from benchmarks.parts import Parts
from mmcache import EmbeddingKey, MMCache, Selector
from mmcache.client.invalidate import follow, invalidate
from mmcache.config import load
from mmcache.control.channel import ControlChannel
from mmcache.control.generations import GenerationTable
from mmcache.metrics import nearest_rank

PROCESSES: Final = 4
TTL_S: Final = 5.0
KEYS: Final = 64
BUCKET_S: Final = 0.25
SELECTORS: Final = 100_000
THREADS: Final = 32

_numbers = itertools.count()


def hold_sessions(wire: Wire, number: int, address: str, count: int) -> None:
    """A client process: sessions and nothing else."""
    with contextlib.ExitStack() as stack:
        channels = [ControlChannel(address, name=f"session-{number}-{each}") for each in range(count)]
        for channel in channels:
            stack.callback(channel.close)
            channel.start()
        wire.tell(ready=all(channel.wait_fresh(60.0) is not None for channel in channels))
        wire.hear()


def read_or_publish(wire: Wire, number: int, config: str) -> None:
    """Read keys that nobody invalidates (the first process), or publish; tells in each bucket of time how many."""
    tensor = torch.zeros(64, 1024)
    with MMCache.connect(config) as cache:
        keys = [EmbeddingKey("other", "1", f"kept-{each}") for each in range(KEYS)]
        cache.put_many([(key, tensor) for key in keys])
        wire.tell(ready=True)
        while (heard := wire.hear()).get("seconds"):
            buckets: list[int] = []
            began = time.monotonic()
            while (spent := time.monotonic() - began) < heard["seconds"]:
                while len(buckets) <= spent / BUCKET_S:
                    buckets.append(0)
                if number == 0:
                    buckets[-1] += sum(found is not None for found in cache.get_many(keys[:16]))
                else:
                    new = EmbeddingKey("other", "1", f"new-{os.getpid()}-{next(_numbers)}")
                    buckets[-1] += cache.put(new, tensor).readable
            wire.tell(buckets=buckets[:-1])


def cpu_s(pids: Iterable[int | None]) -> float:
    """Seconds that these processes have computed for."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def least_to_quiet(hits: list[int]) -> float:
    """Those in the worst bucket to those in the first two seconds."""
    return min(hits) / statistics.median(hits[: int(2.0 / BUCKET_S)])


class Bench:
    """One run against one cluster."""

    def __init__(self, parts: Parts, console: Console) -> None:
        self._parts = parts
        self._console = console
        self._address = load(parts.config).control.address
        self._channel = ControlChannel(self._address, name="operator")
        self._channel.start()
        self._channel.wait_fresh(30.0)
        self.figures: dict[str, Any] = {}

    def close(self) -> None:
        self._channel.close()

    def complete_s(self, selector: Selector | None = None) -> float:
        """Make one, and wait until it is complete."""
        selector = selector or Selector(model="gone", mm_hash=f"item-{next(_numbers)}")
        began = time.monotonic()
        made = invalidate(self._channel, selector, reason="", everything=False, deadline=began + 60.0)
        made = follow(self._channel, made, deadline=began + 60.0)
        if not made.complete:
            raise SystemExit(f"an invalidation is not complete after a minute: {made}")
        return time.monotonic() - began

    def at_rate(self, rate: float, seconds: float) -> dict[str, float]:
        """So many a second, each followed to its end; milliseconds, and how many a second were complete."""
        began = time.monotonic()
        with ThreadPoolExecutor(THREADS) as threads:
            futures = []
            for number in range(round(rate * seconds)):
                time.sleep(max(0.0, began + number / rate - time.monotonic()))
                futures.append(threads.submit(self.complete_s))
            taken = sorted(future.result() * 1e3 for future in futures)
        return {
            "asked_a_second": rate,
            "complete_a_second": len(taken) / (time.monotonic() - began),
            "p50_ms": statistics.median(taken),
            "p99_ms": nearest_rank(taken, 99),
        }

    def with_sessions(self, count: int, measure: Callable[[list[Worker]], None]) -> None:
        """Measure with so many sessions, in PROCESSES processes."""
        self._say(f"opening {count} sessions")
        with crew(PROCESSES, hold_sessions, self._address, count // PROCESSES) as workers:
            if not all(worker.hear()["ready"] for worker in workers):
                raise SystemExit("some sessions were not opened")
            measure(workers)
            for worker in workers:
                worker.tell()

    def rates(self, sessions: int, *rates: float, seconds: float) -> None:
        """Completion at each of these rates."""

        def measure(workers: list[Worker]) -> None:
            self.complete_s()
            clients = [worker.process.pid for worker in workers]
            who: dict[str, list[int | None]] = {"controller": [self._parts.controller.pid], "clients": clients}
            for rate in rates:
                self._say(f"{sessions} sessions, {rate:g} invalidations a second")
                before = {name: cpu_s(pids) for name, pids in who.items()}
                figures = self.at_rate(rate, seconds)
                cores = {f"{name}_cores": (cpu_s(pids) - before[name]) / seconds for name, pids in who.items()}
                self.figures[f"{sessions} sessions, {rate:g} a second"] = figures | cores

        self.with_sessions(sessions, measure)

    def one_stopped(self) -> None:
        """A client that is stopped is waited for as long as it could serve."""

        def measure(workers: list[Worker]) -> None:
            pid = workers[0].process.pid
            assert pid is not None
            self._say("a client is stopped")
            os.kill(pid, signal.SIGSTOP)
            try:
                self.figures["one stopped"] = {"complete_s": self.complete_s(), "ttl_s": TTL_S}
            finally:
                os.kill(pid, signal.SIGCONT)

        self.with_sessions(PROCESSES, measure)

    def others(self, seconds: float) -> None:
        """What reading and publishing other keys loses meanwhile, and while the controller restarts."""
        with crew(2, read_or_publish, str(self._parts.config)) as workers:
            for worker in workers:
                worker.hear()

            def begin(seconds: float) -> None:
                for worker in workers:
                    worker.tell(seconds=seconds)

            def buckets() -> list[list[int]]:
                return [worker.hear()["buckets"] for worker in workers]

            pairs = []
            self._say("reading and publishing other keys, with 5 invalidations a second and without")
            for _ in range(5):
                rates = []
                for busy in (False, True):
                    begin(seconds / 5)
                    if busy:
                        self.at_rate(5.0, seconds / 5)
                    rates.append([statistics.mean(counted) for counted in buckets()])
                pairs.append(rates)
            names = ("hits_to_quiet", "puts_to_quiet")
            self.figures["others"] = {
                name: statistics.median(busy[kind] / quiet[kind] for quiet, busy in pairs)
                for kind, name in enumerate(names)
            }
            self._say("another program starts meanwhile, and ends")
            begin(6.0)
            time.sleep(2.0)
            started = [sys.executable, "-m", "mmcache.cli", "controller", "--help"]
            subprocess.run(started, stdout=subprocess.DEVNULL, check=True)
            another = least_to_quiet(buckets()[0])
            self._say("restarting the controller")
            begin(6.0)
            time.sleep(2.0)
            self._parts.controller.kill()
            began = time.monotonic()
            self._parts.controller.start()
            self._channel.wait_fresh(30.0)
            serving_s = time.monotonic() - began
            self.figures["restart"] = {
                "serving_s": serving_s,
                "least_hits_to_quiet": least_to_quiet(buckets()[0]),
                "least_hits_to_quiet_when_another_program_starts": another,
            }
            for worker in workers:
                worker.tell(end=True)

    def generations(self) -> None:
        """Looking up a key's generation, with many selectors in six shapes."""
        self._say("looking generations up")
        table = GenerationTable(SELECTORS)
        shapes = ("model", "model version", "tenant", "lora", "model version mm_hash", "mm_hash")
        for number in range(SELECTORS):
            fields = {name: f"{name}-{number}" for name in shapes[number % len(shapes)].split()}
            table.apply(number + 1, Selector(**fields))
        keys = [EmbeddingKey("model-1", f"{each % 8}", f"item-{each}") for each in range(2000)]
        asked = [(key.scope, key.mm_digest) for key in keys]
        rounds = []
        for _ in range(10):
            began = time.perf_counter()
            for scope, digest in asked:
                table.generation(scope, digest)
            rounds.append((time.perf_counter() - began) / len(asked) * 1e6)
        self.figures["generation_us"] = statistics.median(rounds)

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """What was promised, and what is."""
    five, ten = (figures[f"500 sessions, {rate} a second"] for rate in (5, 10))
    hundred = figures["50 sessions, 100 a second"]
    restart, others = figures["restart"], figures["others"]
    rows = [
        ("500 sessions, 5 a second: complete at p99, ms", five["p99_ms"], "<", 100.0),
        ("500 sessions, 10 a second: complete a second", ten["complete_a_second"], ">", 9.5),
        ("50 sessions, 100 a second: complete a second", hundred["complete_a_second"], ">", 95.0),
        ("one client stopped: complete, s", figures["one stopped"]["complete_s"], "<", 1.1 * TTL_S + 0.2),
        ("hits of other keys, to those without", others["hits_to_quiet"], ">", 0.9),
        ("publications of other keys, to those without", others["puts_to_quiet"], ">", 0.9),
        ("generation of a key, µs", figures["generation_us"], "<", 2.0),
        ("controller restart: serving after, s", restart["serving_s"], "<", TTL_S / 2),
        ("controller restart: fewest hits, to those before", restart["least_hits_to_quiet"], ">", 0.9),
    ]
    return [
        {
            "bar": bar,
            "value": value,
            "bound": f"{sign} {bound:g}",
            "met": value < bound if sign == "<" else value > bound,
        }
        for bar, value, sign, bound in rows
    ]


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.invalidation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate (default: 20)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="mmcache-benchmark-") as folder, contextlib.ExitStack() as stack:
        controller = {"session_ttl": TTL_S, "state": f"{folder}/controller.db"}
        bench = Bench(stack.enter_context(Parts(controller=controller)), console)
        stack.callback(bench.close)
        bench.generations()
        bench.rates(500, 5, 10, seconds=given.seconds)
        bench.rates(50, 100, seconds=given.seconds / 2)
        bench.one_stopped()
        bench.others(given.seconds)
    figures = {**bench.figures, "bars": bars(bench.figures)}
    table = Table(title="Invalidation")
    for column in ("bar", "value", "bound", ""):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for row in figures["bars"]:
        table.add_row(row["bar"], f"{row['value']:.2f}", row["bound"], "met" if row["met"] else "NOT MET")
    Console().print(table)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
