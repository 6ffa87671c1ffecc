"""The parent's side of the demo's processes: each has a name, two pipes, a log, and an end on every path."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple, cast

import msgspec

from mmcache.cli.child import Child
from mmcache.cli.demo.errors import DemoError
from mmcache.cli.demo.protocol import Answer, Command, Finished, decode_answer, encode_line
from mmcache.config import without_settings

STOP_S: Final = 10.0
"""A worker that has not ended this long after SIGTERM is killed."""
_CHECK_S: Final = 1.0
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",  # the demo downloads nothing
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Worker(Child):
    """One process, which takes commands on stdin and answers on stdout."""

    def __init__(self, name: str, command: Sequence[str], *, directory: Path, environment: Mapping[str, str]) -> None:
        super().__init__(name, command, directory=directory, environment=environment, pipes=True)
        self.commands = cast(IO[bytes], self._process.stdin)
        self.answers = cast(IO[bytes], self._process.stdout)

    def stop(self) -> None:
        """Wait until it has ended, and end it if that takes too long; idempotent."""
        self._wait()
        self.kill()
        with contextlib.suppress(OSError):  # a command that never left its buffer
            self.commands.close()

    def ended(self, doing: str) -> DemoError:
        """What to raise when it stopped answering."""
        self._wait()
        how = "closed its pipe" if self.status is None else self.describe_end()
        tail = f":\n{self.log_tail()}" if self.log.stat().st_size else ""  # killed ones wrote nothing
        return DemoError(f"{self.name} {how} {doing}{tail}")

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)


class _Said(NamedTuple):
    worker: Worker
    answer: Answer | None
    """None: its pipe has ended before it said `Finished`, or carried nonsense."""


class Workers:
    """All worker processes, and one queue of what they say. A context manager that ends them.

    Args:
        directory: for their logs.
        check: called all the while that an answer is waited for; raises when there is no more sense in it.
    """

    def __init__(self, directory: Path, check: Callable[[], None] = lambda: None) -> None:
        self._directory = directory
        self._check = check
        self._workers: dict[str, Worker] = {}
        self._readers: list[threading.Thread] = []
        self._said: queue.SimpleQueue[_Said] = queue.SimpleQueue()

    def start(self, name: str, arguments: Sequence[str]) -> Worker:
        """Runs `mmcache.cli.demo.worker` with these arguments."""
        command = [sys.executable, "-m", "mmcache.cli.demo.worker", *arguments]
        environment = {**without_settings(os.environ), **_ENVIRONMENT}
        worker = Worker(name, command, directory=self._directory, environment=environment)
        self._workers[name] = worker
        reader = threading.Thread(target=self._read, args=(worker,), name=f"read-{name}", daemon=True)
        self._readers.append(reader)
        reader.start()
        return worker

    def send(self, name: str, command: Command) -> None:
        """Writes one line; with so few requests in hand at once, the pipe has room for it.

        Raises:
            DemoError: the worker has ended.
        """
        worker = self._workers[name]
        try:
            worker.commands.write(encode_line(command))
            worker.commands.flush()
        except OSError as error:
            raise worker.ended("while requests were sent to it") from error

    def receive(self, *, deadline: float) -> tuple[str, Answer]:
        """The next line of any worker.

        Args:
            deadline: `time.monotonic()` seconds.

        Raises:
            DemoError: a worker ended or wrote nonsense, or nobody said anything until the deadline.
        """
        while True:
            self._check()
            left = deadline - time.monotonic()
            try:
                worker, answer = self._said.get(timeout=min(_CHECK_S, max(0.0, left)))
            except queue.Empty:
                if left > 0:
                    continue
                tails = "\n".join(f"--- {worker.name}\n{worker.log_tail()}" for worker in self._workers.values())
                raise DemoError(f"no process of the demo answers any more; their logs end so:\n{tails}") from None
            if answer is None:
                raise worker.ended("before its work was done")
            return worker.name, answer

    def _read(self, worker: Worker) -> None:
        with worker.answers, contextlib.suppress(msgspec.MsgspecError):
            for line in worker.answers:
                answer = decode_answer(line)
                self._said.put(_Said(worker, answer))
                if isinstance(answer, Finished):
                    return
        self._said.put(_Said(worker, None))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.terminate()  # all at once, then one after another
        for worker in self._workers.values():
            worker.stop()
        for reader in self._readers:
            reader.join()  # its pipe ended with its process
