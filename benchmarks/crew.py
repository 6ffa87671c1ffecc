"""Worker processes of a benchmark: spawned, told and asked in JSON over a pipe, and ended on every path."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

HEAR_SECONDS = 600.0


class Wire:
    """One end of the pipe between a worker and the program."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def tell(self, **what: Any) -> None:
        self._connection.send_bytes(json.dumps(what).encode())

    def hear(self, timeout: float = HEAR_SECONDS) -> dict[str, Any]:
        """What the other end told next. Raises SystemExit when it is gone, or silent for `timeout` seconds."""
        with contextlib.suppress(EOFError):
            if wait([self._connection], timeout):
                heard: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return heard
        raise SystemExit("a process of the benchmark has ended, or hangs")


class Worker(Wire):
    """The program's view of one worker."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        super().__init__(connection)
        self.process = process


Task = Callable[..., None]
"""A function of a module: `task(wire, *arguments)`, all of them plain values."""


@contextlib.contextmanager
def crew(count: int, task: Task, *arguments: Any) -> Iterator[list[Worker]]:
    """`count` workers that run `task(wire, number, *arguments)`, each in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    workers: list[Worker] = []
    try:
        for number in range(count):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_run, args=(theirs, task, number, arguments), daemon=True)
            process.start()
            theirs.close()
            workers.append(Worker(process, ours))
        yield workers
        for worker in workers:
            worker.process.join(30)
    finally:
        for worker in workers:
            worker.process.kill()


def _run(connection: Connection, task: Task, number: int, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's, which then ends us
    torch.set_num_threads(1)
    task(Wire(connection), number, *arguments)
