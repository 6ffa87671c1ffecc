"""The client processes of the soak: some live throughout, some come and go, and one is killed again and again."""

from __future__ import annotations

import contextlib
import json
import os
import random
import selectors
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, cast

from benchmarks.parts import Parts
from benchmarks.soak_client import Task
from mmcache.cli.child import Child
from mmcache.config import without_settings

VISIT_EVERY_S: Final = 12.0
VISITOR_PATIENCE_S: Final = 150.0
"""A visitor that has not ended so long after its start hangs: its calls, its close and its exit are all bounded."""
VICTIM_LIVES_S: Final = (3.0, 25.0)
START_SECONDS: Final = 120.0
REST_SECONDS: Final = 300.0
STEADY_ALLOCATOR: Final = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "131072"}
"""So that glibc returns what is freed: else its arenas alone differ by 100 MiB, under which a leak could hide."""
LASTING: Final = (
    ("sidecar-1", "sync", "sidecar"),
    ("embedded", "sync", "embedded"),
    ("asyncio", "asyncio", "sidecar"),
    ("reconnecting", "reconnecting", "sidecar"),
    ("sidecar-2", "sync", "sidecar"),
)
"""Name, kind and way to attach of those that live throughout."""


class Client(Child):
    """One client process, and what it told last."""

    def __init__(self, name: str, task: Task, folder: Path) -> None:
        command = [sys.executable, "-m", "benchmarks.soak_client", json.dumps(task._asdict())]
        paths = [str(Path(__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        environment = {**without_settings(os.environ), **STEADY_ALLOCATOR}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        super().__init__(name, command, directory=folder, environment=environment, pipes=True)
        self.task = task
        self.started = time.monotonic()
        self.answers = cast(IO[bytes], self._process.stdout)
        self.figures: dict[str, Any] = {"counts": {}, "largest": {}, "defects": [], "stats": {}}
        self.ready = False
        self.rested: dict[str, Any] | None = None
        self.ended = False
        self._commands = cast(IO[bytes], self._process.stdin)
        self._rest = b""
        os.set_blocking(self.answers.fileno(), False)

    def command(self, word: str) -> None:
        """Write it; one that has ended hears nothing."""
        with contextlib.suppress(OSError):
            self._commands.write(word.encode() + b"\n")
            self._commands.flush()

    def listen(self) -> bool:
        """Take in what it told meanwhile; False once its pipe has ended."""
        while True:
            try:
                told = os.read(self.answers.fileno(), 1 << 16)
            except BlockingIOError:
                return True
            if not told:
                return False
            *lines, self._rest = (self._rest + told).split(b"\n")
            for line in lines:
                heard = json.loads(line)
                self.figures = heard.get("figures", self.figures)
                self.rested = heard.get("rested", self.rested)
                self.ready = self.ready or "ready" in heard
                self.ended = self.ended or "ended" in heard

    def close(self) -> None:
        """End it, and give up its pipes."""
        self.kill()
        for pipe in (self.answers, self._commands):
            with contextlib.suppress(OSError):
                pipe.close()


class Fleet:
    """All client processes; a context manager that ends them. To be used from the main thread.

    Args:
        lasting: how many live throughout, of LASTING.
        visits: whether others come and go.
        told: hears of what should not be, and of what is done to clients.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        seed: int,
        epoch: float,
        pace_s: float,
        lasting: int,
        visits: bool,
        told: Callable[[str], None],
    ) -> None:
        self._parts = parts
        self._choose = random.Random(seed)
        self._seed = seed
        self._epoch = epoch
        self._pace_s = pace_s
        self._lasting = lasting
        self._visits = visits
        self._told = told
        self._selector = selectors.DefaultSelector()
        self._configs = {attach: str(parts.config_for(attach)) for attach in ("sidecar", "embedded")}
        self._started = 0
        self._counts: Counter[str] = Counter()
        self._largest: dict[str, float] = {}
        self._stats: Counter[str] = Counter()
        self._visitors: list[Client] = []
        self._next_visit = time.monotonic()
        self._victim: Client | None = None
        self._victim_dies_at = 0.0
        self.defects: list[str] = []
        self.events: Counter[str] = Counter()
        self.lasting: dict[str, Client] = {}

    def start(self) -> None:
        """Start those that live throughout, and wait until they are connected."""
        for name, kind, attach in LASTING[: self._lasting]:
            self.lasting[name] = self._start(name, kind, attach)
        deadline = time.monotonic() + START_SECONDS
        while not all(client.ready for client in self.lasting.values()):
            self.listen(0.1)
            if time.monotonic() > deadline or any(client.status is not None for client in self.lasting.values()):
                logs = "\n".join(client.log_tail() for client in self.lasting.values())
                raise SystemExit(f"the clients of the soak do not start:\n{logs}")

    def go(self) -> None:
        """Let all of them call."""
        for client in self.lasting.values():
            client.command("go")

    def tick(self, timeout: float) -> None:
        """Take in what they tell for up to `timeout` seconds; start, kill and replace those that come and go."""
        now = time.monotonic()
        if self._visits:
            if self._victim is None:
                self._victim = self._start("victim", "sync", self._choose.choice(list(self._configs)))
                self._victim_dies_at = now + 4.0 + self._choose.uniform(*VICTIM_LIVES_S)
            elif self._victim.ready and not self._victim.figures["counts"]:
                self._victim.command("go")
            if now >= self._victim_dies_at:
                self._kill_victim()
            if now >= self._next_visit:
                self._next_visit = now + self._choose.uniform(0.5, 1.5) * VISIT_EVERY_S
                self._visitors.append(self._start("visitor", "visitor", self._choose.choice(list(self._configs))))
        self.listen(timeout)
        for visitor in list(self._visitors):
            self._look_after(visitor)
        for name, client in self.lasting.items():
            if client.status is not None:
                self._defect(f"{name} {client.describe_end()}: {client.log_tail()}")
                self._forget(client)
                [attach] = [attach for known, _, attach in LASTING if known == name]
                self.lasting[name] = self._start(name, client.task.kind, attach)

    def rest(self) -> dict[str, dict[str, Any]]:
        """Have all stand still, with only those that live throughout alive, and say what each of them uses."""
        if self._victim is not None:
            self._kill_victim()
        while self._visitors:
            self.listen(0.1)
            for visitor in list(self._visitors):
                self._look_after(visitor)
        for client in self.lasting.values():
            client.rested = None
            client.command("rest")
        deadline = time.monotonic() + REST_SECONDS
        while any(client.rested is None and client.status is None for client in self.lasting.values()):
            self.listen(0.1)
            if time.monotonic() > deadline:
                waiting = [name for name, client in self.lasting.items() if client.rested is None]
                self._defect(f"{waiting} did not come to rest within {REST_SECONDS:g} s")
                break
        return {name: client.rested or {} for name, client in self.lasting.items()}

    def end(self) -> None:
        """Let those that live throughout close and end by themselves; what does not is a defect."""
        for client in self.lasting.values():
            client.command("end")
        deadline = time.monotonic() + VISITOR_PATIENCE_S
        while any(client.status is None for client in self.lasting.values()) and time.monotonic() < deadline:
            self.listen(0.1)
        for name, client in self.lasting.items():
            client.listen()
            if client.status != 0 or not client.ended:
                self._defect(f"{name}, told to end, {client.describe_end()}: {client.log_tail()}")

    def listen(self, timeout: float) -> None:
        """Take in what they tell for up to `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if not key.data.listen():
                    self._selector.unregister(key.fileobj)
            if time.monotonic() >= deadline:
                return
            if not self._selector.get_map():
                time.sleep(max(0.0, deadline - time.monotonic()))

    def figures(self) -> dict[str, Any]:
        """Of all clients together, those that have ended included."""
        counts, stats, largest = Counter(self._counts), Counter(self._stats), dict(self._largest)
        defects = list(self.defects)
        for client in self._alive():
            _add(client.figures, counts, stats, largest)
            defects += client.figures["defects"]
        defects += [f"{value:.0f} times {name}" for name, value in stats.items() if name.startswith("internal_error")]
        return {
            "counts": dict(sorted(counts.items())),
            "largest": dict(sorted(largest.items())),
            "stats": dict(sorted(stats.items())),
            "defects": defects,
            "clients": dict(sorted(self.events.items())),
        }

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._alive():
            client.close()

    def _alive(self) -> list[Client]:
        return [*self.lasting.values(), *self._visitors, *([self._victim] if self._victim is not None else [])]

    def _start(self, name: str, kind: str, attach: str) -> Client:
        self._started += 1
        config = self._configs.get(attach, self._configs["sidecar"])
        small = kind == "visitor"
        task = Task(
            config,
            kind,
            self._seed * 1000 + self._started,
            self._epoch,
            threads=1 if small else 2,
            pool_bytes=(16 if small else 64) << 20,
            pace_s=self._pace_s,
        )
        client = Client(f"{name}-{self._started}", task, self._parts.folder)
        self._selector.register(client.answers, selectors.EVENT_READ, client)
        self.events[f"{kind} started"] += 1
        return client

    def _kill_victim(self) -> None:
        victim, self._victim = self._victim, None
        if victim is not None:
            victim.listen()
            if victim.status is not None:
                self._defect(f"{victim.name} {victim.describe_end()}: {victim.log_tail()}")
            victim.kill()
            self.events["killed"] += 1
            self._told("a client killed")
            self._forget(victim)

    def _look_after(self, visitor: Client) -> None:
        late = time.monotonic() > visitor.started + VISITOR_PATIENCE_S
        if visitor.status is None and not late:
            return
        visitor.listen()
        if late and visitor.status is None:
            self._defect(f"{visitor.name} has not ended after {VISITOR_PATIENCE_S:g} s: {visitor.log_tail()}")
        elif visitor.status != 0 or not visitor.ended:
            self._defect(f"{visitor.name} {visitor.describe_end()}: {visitor.log_tail()}")
        self._visitors.remove(visitor)
        self._forget(visitor)

    def _forget(self, client: Client) -> None:
        """One that is gone: keep its figures."""
        _add(client.figures, self._counts, self._stats, self._largest)
        self.defects += client.figures["defects"]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.answers)
        client.close()

    def _defect(self, text: str) -> None:
        self.defects.append(text)
        self._told(f"DEFECT {text}")


def _add(figures: dict[str, Any], counts: Counter[str], stats: Counter[str], largest: dict[str, float]) -> None:
    counts.update(figures["counts"])
    stats.update({name: value for name, value in figures["stats"].items() if _is_count(name)})
    for name, value in figures["largest"].items():
        largest[name] = max(largest.get(name, 0.0), value)


def _is_count(name: str) -> bool:
    return not name.startswith(("pool.", "latency.", "store.", "controller.", "session."))
