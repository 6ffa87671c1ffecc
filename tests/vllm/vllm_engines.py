"""vLLM engines for tests: over HTTP (`ServedEngine`), and in a process of its own that is told what to do."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

from benchmarks.vllm_media import Clip, Handed, Medium, Picture, Sound
from benchmarks.vllm_served import (
    ANSWER_SECONDS,
    ENVIRONMENT,
    START_SECONDS,
    Answer,
    EngineFailed,
    Options,
    ServedEngine,
    agent_among,
    end_all,
    sums,
)
from mmcache.cli.child import Child

__all__ = [
    "Answer",
    "Clip",
    "EngineFailed",
    "Handed",
    "LocalEngine",
    "Options",
    "Picture",
    "Request",
    "ServedEngine",
    "Sound",
]


class Request(msgspec.Struct, frozen=True):
    """One greedy request: text and media in their order; `uuids` are those of the media."""

    parts: list[str | Picture | Clip | Sound | Handed]
    max_tokens: int = 8
    uuids: list[str | None] = []
    cache_salt: str | None = None
    lora: str | None = None
    """Folder of an adapter."""
    ec_transfer_params: dict[str, Any] | None = None


class _Piped(Child):
    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


class LocalEngine:
    """The other end of vllm_local_engine.py; a context manager that ends it.

    Args:
        within: the beginning of its command line, for an engine in a namespace.

    Without multiprocessing: scheduler and worker share its process, which tensor parallelism alone gives others.
    """

    def __init__(
        self, options: Options, *, name: str = "local", folder: Path | None = None, within: Sequence[str] = ()
    ) -> None:
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="mmcache-vllm-")
        directory = folder or Path(self._temporary.name if self._temporary else "")
        here = Path(__file__).parent
        environment = {**options.all_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment["PYTHONPATH"] = f"{here}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"
        command = [*within, sys.executable, str(here / "vllm_local_engine.py"), msgspec.json.encode(options).decode()]
        self._child = _Piped(name, command, directory=directory, environment=environment, pipes=True)
        self.log = self._child.log
        self._unread = b""
        self._numbers = 0
        self._answers: dict[int, Answer] = {}
        self._said: collections.deque[Any] = collections.deque()
        self._processes: dict[int, psutil.Process] = {}

    def wait_ready(self, timeout: float = START_SECONDS) -> None:
        """Return when it has started. Raises EngineFailed if it does not."""
        self._hear(time.monotonic() + timeout)
        self.rpc("probe_install")

    def generate(self, *requests: Request, timeout: float = ANSWER_SECONDS) -> list[Answer]:
        """All of them at once."""
        numbers = [self.add(request) for request in requests]
        return [self.answer(number, timeout) for number in numbers]

    def chat(self, *parts: str | Medium, timeout: float = ANSWER_SECONDS, **fields: Any) -> Answer:
        """One request; `fields` are those of `Request`."""
        [answer] = self.generate(Request(list(parts), **fields), timeout=timeout)
        return answer

    def add(self, request: Request) -> int:
        """Begin a request; its number."""
        self._numbers += 1
        self._tell(do="add", number=self._numbers, request=msgspec.to_builtins(request))
        return self._numbers

    def answer(self, number: int, timeout: float = ANSWER_SECONDS) -> Answer:
        """Wait for what becomes of a request."""
        deadline = time.monotonic() + timeout
        while number not in self._answers:
            self._hear(deadline)
        return self._answers.pop(number)

    def is_answered(self, number: int) -> bool:
        """Whether a request has ended by now."""
        while self._is_readable(0.0):
            self._hear(time.monotonic() + 1.0)
        return number in self._answers

    def abort(self, number: int) -> None:
        """End a request without an answer."""
        self._ask(do="abort", number=number)

    def rpc(self, method: str, *arguments: str) -> list[Any]:
        """What a method of each worker returns."""
        return list(self._ask(do="rpc", method=method, arguments=arguments))

    def encoded(self) -> int:
        """How many items this engine has really encoded."""
        return int(self.rpc("probe_encoder")[0]["items"])

    def reset(self) -> None:
        """Empty vLLM's own caches: of embeddings, prefixes and processed pictures."""
        self._ask(do="reset")

    def metrics(self) -> dict[str, float]:
        """Its Prometheus metrics by name, summed over labels; buckets are left out."""
        return sums(self._ask(do="metrics"))

    @property
    def pid(self) -> int:
        """Of the scheduler's process."""
        return self._child.pid

    @property
    def processes(self) -> list[psutil.Process]:
        """Its own process and all those that it started."""
        try:
            own = psutil.Process(self._child.pid)
            for process in (own, *own.children(recursive=True)):
                self._processes[process.pid] = process
        except psutil.NoSuchProcess:
            pass
        return [process for process in self._processes.values() if process.is_running()]

    @property
    def agent(self) -> psutil.Process:
        """The process that has mmcache's client."""
        return agent_among(self.processes)

    @property
    def is_alive(self) -> bool:
        return self._child.status is None

    def end(self) -> None:
        """End it and all of its processes; idempotent."""
        end_all(self.processes)
        self._child.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> LocalEngine:
        try:
            self.wait_ready()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _ask(self, **what: Any) -> Any:
        self._tell(**what)
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._said:
            self._hear(deadline)
        return self._said.popleft()

    def _tell(self, **what: Any) -> None:
        stdin = self._child.stdin
        try:
            stdin.write(msgspec.json.encode(what) + b"\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _hear(self, deadline: float) -> None:
        """Take in what it says next."""
        while b"\n" not in self._unread:
            if not self._is_readable(max(0.0, deadline - time.monotonic())):
                raise EngineFailed(f"the engine says nothing\n{self._child.log_tail()}")
            read = os.read(self._child.stdout.fileno(), 1 << 20)
            if not read:
                raise self._failure()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        heard = msgspec.json.decode(line)
        if "died" in heard:
            raise EngineFailed(heard["died"])
        if "number" in heard:
            self._answers[heard["number"]] = msgspec.convert(heard["answer"], Answer)
        elif "said" in heard:
            self._said.append(heard["said"])

    def _is_readable(self, seconds: float) -> bool:
        if b"\n" in self._unread:
            return True
        return bool(select.select([self._child.stdout], [], [], seconds)[0])

    def _failure(self) -> EngineFailed:
        return EngineFailed(f"the engine {self._child.describe_end()}\n{self._child.log_tail()}")


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    """What was generated; an answer without tokens fails the test that asks."""
    errors = [answer.error for answer in answers if answer.error]
    assert not errors, errors
    return [answer.tokens for answer in answers]


@contextlib.contextmanager
def started(*engines: LocalEngine | ServedEngine) -> Iterator[None]:
    """All of them, which start side by side, for the length of a `with` block."""
    try:
        for engine in engines:
            engine.wait_ready()
        yield
    except BaseException:
        for engine in engines:
            print(f"--- {engine.log}\n{_end_of(engine.log)}", file=sys.stderr)  # pytest shows it with the failure
        raise
    finally:
        for engine in engines:
            engine.end()


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
