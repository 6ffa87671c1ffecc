"""The main program of the demo's processes: `python -m mmcache.cli.demo.worker ROLE …`, commands in, answers out."""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final

from mmcache.cli.demo.protocol import (
    Answer,
    Encode,
    Failed,
    Finish,
    Finished,
    Read,
    Ready,
    decode_command,
    encode_line,
)
from mmcache.cli.demo.roles import Encoder, Prefill, Reference, Role

CONCURRENCY: Final = 4
"""Requests that a process has in hand at once; its parent sends no more."""


class Answers:
    """The pipe to the parent; one line at a time, from any thread."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> None:
        """Writes one line."""
        with self._lock:
            self._pipe.write(encode_line(answer))
            self._pipe.flush()


def serve(role: Role, commands: Iterator[bytes], answers: Answers) -> bool:
    """Answers commands until `Finish`; False if the pipe ended without it, since then nobody wants the answers."""

    def answer(command: Encode | Read) -> None:
        try:
            answers.send(role.answer(command))
        except Exception as error:  # noqa: BLE001  (reported to the parent, which fails the demo and names the request)
            answers.send(Failed(command.request, f"{type(error).__name__}: {error}"))

    pool = ThreadPoolExecutor(CONCURRENCY)
    answers.send(Ready())
    for line in commands:
        command = decode_command(line)
        if isinstance(command, Finish):
            pool.shutdown()
            answers.send(Finished(dict(role.close())))
            return True
        pool.submit(answer, command)
    return False


def _build(arguments: argparse.Namespace) -> Role:
    # Each role imports what it needs: a prefill process has no encoder, and the reference no cache.
    if arguments.role == "prefill":
        from mmcache import MMCache  # noqa: PLC0415

        return Prefill(MMCache.connect(arguments.client), timeout_s=arguments.timeout)

    from mmcache.cli.demo.tower import load_tower  # noqa: PLC0415

    tower = load_tower(arguments.weights)
    if arguments.role == "reference":
        return Reference(tower)

    from mmcache import MMCache  # noqa: PLC0415

    return Encoder(tower, MMCache.connect(arguments.client), timeout_s=arguments.timeout)


def main() -> None:
    """Runs one process of the demo."""
    parser = argparse.ArgumentParser(prog="mmcache.cli.demo.worker")
    parser.add_argument("role", choices=["encoder", "prefill", "reference"])
    parser.add_argument("--client", type=Path, help="the client.yaml of the cluster")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one request")
    arguments = parser.parse_args()

    # Libraries print to stdout as they like: the parent's pipe moves aside, and whatever is printed goes to the log.
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as pipe:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        if not serve(_build(arguments), iter(sys.stdin.buffer.readline, b""), Answers(pipe)):
            os._exit(1)  # the parent is gone, and threads may be deep in a computation: nothing is worth waiting for


if __name__ == "__main__":
    main()
