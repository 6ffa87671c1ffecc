"""The reaper's child as the controller sees it: started, asked, killed and reaped."""

from __future__ import annotations

import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from mmcache.config import StoreSettings
from mmcache.controller.reaper.messages import (
    MAX_MESSAGE_BYTES,
    MOST_DESCRIBES,
    Attach,
    Attached,
    Describe,
    Described,
    Description,
    Failed,
    FromChild,
    List,
    Listed,
    Remove,
    Removed,
    Renew,
    Renewed,
    ToChild,
    decode_from_child,
    encode,
)
from mmcache.controller.reconciliation import RECORD
from mmcache.errors import MMCacheError, StoreUnavailable
from mmcache.store.base import Outcome

START_TIMEOUT_S: Final = 60.0
"""How long it may take to start and to attach: Mooncake's set-up alone takes up to 5 s on an idle machine."""
ANSWER_TIMEOUT_S: Final = 15.0
"""How long a batch may take, before it counts as hung."""
_END_PATIENCE_S: Final = 1.0


class ChildLost(MMCacheError):
    """The child ended, hung, or spoke nonsense; nobody knows what became of what it was asked to do."""


class Stopped(MMCacheError):
    """The controller is ending."""


class ReaperChild:
    """A process that removes objects. One thread's, which must outlive it: the kernel kills it when that thread ends.

    Args:
        settings: where the store is.
        stop: a descriptor that is readable once nothing is to be waited for any more.

    Raises:
        OSError: no process could be had.
    """

    def __init__(self, settings: StoreSettings, stop: int) -> None:
        self._settings = settings
        self._stop = stop
        self._asked = 0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                self._socket.setblocking(False)
                self._process = _start(theirs.fileno())
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(stop, select.POLLIN)

    @property
    def pid(self) -> int:
        """Its process id, until it is reaped."""
        return self._process.pid

    def attach(self) -> str:
        """Have it attach; returns how it did. Raises StoreUnavailable with the reason, ChildLost or Stopped."""
        self._tell(Attach(self._settings))
        answer = self._hear(START_TIMEOUT_S)
        if isinstance(answer, Failed):
            raise StoreUnavailable(answer.reason)
        if not isinstance(answer, Attached):
            raise ChildLost(f"answered Attach with {type(answer).__name__}")
        return answer.kind

    def remove(self, names: list[str]) -> list[Outcome]:
        """Have it remove objects; returns what became of each. Raises ChildLost or Stopped."""
        self._asked += 1
        self._tell(Remove(self._asked, names))
        answer = self._hear(ANSWER_TIMEOUT_S)
        if not isinstance(answer, Removed) or answer.number != self._asked or len(answer.outcomes) != len(names):
            raise ChildLost(f"answered Remove with {type(answer).__name__} of something else")
        return answer.outcomes

    def renew(self, names: list[str]) -> list[Outcome]:
        """Have it renew the leases of objects; returns which are there: OK, NOT_FOUND, or why that is not known.

        It must be attached. Raises ChildLost or Stopped.
        """
        self._asked += 1
        self._tell(Renew(self._asked, names))
        answer = self._hear(ANSWER_TIMEOUT_S)
        if not isinstance(answer, Renewed) or answer.number != self._asked or len(answer.outcomes) != len(names):
            raise ChildLost(f"answered Renew with {type(answer).__name__} of something else")
        return answer.outcomes

    def names(self, metrics: str, lineage: str) -> Iterator[bytes]:
        """Have it list the store's names of a lineage, as `reconciliation.RECORD` has them.

        Only when all was taken can it be asked something else. Raises StoreUnavailable with the reason: that was not
        all; ChildLost or Stopped.
        """
        self._asked += 1
        self._tell(List(self._asked, metrics, lineage))
        patience_s = START_TIMEOUT_S
        while True:
            answer = self._hear(patience_s)
            if isinstance(answer, Failed):
                raise StoreUnavailable(answer.reason)
            if not isinstance(answer, Listed) or answer.number != self._asked:
                raise ChildLost(f"answered List with {type(answer).__name__} of something else")
            if answer.last:
                return
            yield answer.records
            patience_s = ANSWER_TIMEOUT_S

    def describe(self, pieces: Iterable[bytes], lineage: str) -> Iterator[tuple[bytes, list[Description | None]]]:
        """What objects are; it must be attached.

        Args:
            pieces: of at most BATCH names each, as `reconciliation.RECORD` has them. Some are taken ahead.
            lineage: of the names.

        Gives all of them in order: records, and what they are. Only when all were taken can it be asked something else.
        Raises ChildLost or Stopped.
        """
        source = iter(pieces)
        asked: deque[bytes] = deque()
        while True:
            for records in itertools.islice(source, MOST_DESCRIBES - len(asked)):
                self._asked += 1
                self._tell(Describe(self._asked, lineage, records))
                asked.append(records)
            if not asked:
                return
            answer = self._hear(ANSWER_TIMEOUT_S)
            if isinstance(answer, Failed):
                raise ChildLost(f"cannot describe: {answer.reason}")
            if not isinstance(answer, Described) or answer.number != self._asked - len(asked) + 1:
                raise ChildLost(f"answered Describe with {type(answer).__name__} of something else")
            records = asked.popleft()
            nbytes = len(answer.entries) * RECORD.size
            if nbytes > len(records):
                raise ChildLost("described more than it was asked for")
            yield records[:nbytes], answer.entries
            if nbytes < len(records):
                asked.appendleft(records[nbytes:])

    def kill(self) -> None:
        """End it at once, stopped or not, and reap it. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _tell(self, message: ToChild) -> None:
        try:
            self._socket.send(encode(message))
        except OSError as error:
            raise ChildLost(f"cannot be spoken to: {error.strerror}") from error

    def _hear(self, patience_s: float) -> FromChild:
        deadline = time.monotonic() + patience_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready = {descriptor for descriptor, _ in self._poll.poll(left * 1000)}
                if self._stop in ready:
                    raise Stopped("the controller is ending")
                if ready:
                    packet = self._socket.recv(MAX_MESSAGE_BYTES)
                    if not packet:
                        raise ChildLost(f"ended with status {self._process.wait(_END_PATIENCE_S)}")
                    return decode_from_child(packet)
        except OSError as error:
            raise ChildLost(f"cannot be spoken to: {error.strerror}") from error
        except subprocess.TimeoutExpired as error:
            raise ChildLost("hung up, and goes on") from error
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ChildLost(f"spoke nonsense: {error}") from error
        raise ChildLost(f"has not answered for {patience_s:g} s")


def _start(descriptor: int) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "mmcache.controller.reaper.process"),
        *("--socket", str(descriptor), "--parent", str(os.getpid())),
    ]
    # It imports what we would, wherever that comes from, and nothing that happens to lie in the working directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    return subprocess.Popen(
        command,
        cwd="/",
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(descriptor,),
        start_new_session=True,
    )
