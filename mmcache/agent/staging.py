"""Memory that an engine's scheduler, its workers and its agent share: a file in /dev/shm that has no name for long.

    0       header: 8 words of 64 bits each, then a byte for each worker that has mapped it
    4096    results: of the first worker's saves: number, width and cost, 16 bytes for each
    69632   blocks; who may use them when is for the scheduler to say

Workers are made before the scheduler, so the first of them makes the file. The scheduler takes the name away once it
has opened it, so nothing is left of it however its users end. The agent inherits its descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import time
from typing import Final

from mmcache.errors import ConfigError, StoreUnavailable

FOLDER: Final = "/dev/shm"  # noqa: S108 - memory that processes of one user share, 0600 and O_NOFOLLOW
RESULTS: Final = 4096
"""How many results are kept: a later one takes the slot of the one so many numbers before it."""
MAX_WORKERS: Final = 1024
_FLAGS_AT: Final = 64
_EPOCH_AT: Final = 0
_FRESH_AT: Final = 8
_DONE_AT: Final = 16
_RESULTS_AT: Final = 4096
_word = struct.Struct("<q")
_result = struct.Struct("<qIf")
HEADER_BYTES: Final = _RESULTS_AT + RESULTS * _result.size


class Staging:
    """The memory as one process has mapped it. Made by `open_as_worker`, `open_as_scheduler` or `open_as_agent`."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        """Bytes for blocks."""
        self._mapping = mmap.mmap(descriptor, HEADER_BYTES + nbytes)
        self._view = memoryview(self._mapping)

    @classmethod
    def open_as_worker(cls, name: str, nbytes: int, worker: int) -> Staging:
        """Map it, made if need be, and say so in its header.

        Args:
            name: any text that all processes of one engine share, and no others.
            nbytes: for blocks; the same in all of them.
            worker: its rank, from 0.

        Raises:
            StoreUnavailable: it cannot be made or mapped.
            ConfigError: the first worker of another engine, which starts at the same time, has this name.
        """
        if not 0 <= worker < MAX_WORKERS:
            raise StoreUnavailable(f"worker {worker}: staging memory serves {MAX_WORKERS} workers")
        staging = cls._open(name, nbytes)
        if worker == 0:  # what is left of an engine that died so early is not locked
            try:
                fcntl.flock(staging._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                staging.close()
                raise ConfigError(
                    f"another engine on this machine, which is starting too, has the name {name[:64]!r}: give each "
                    "engine an engine_id of its own, or none"
                ) from error
        staging._view[_FLAGS_AT + worker] = 1
        return staging

    @classmethod
    def open_as_scheduler(cls, name: str, nbytes: int) -> Staging:
        """Map it, reserve its pages, and take its name away. Raises StoreUnavailable, also where there is no room."""
        staging = cls._open(name, nbytes)
        with contextlib.suppress(OSError):
            os.unlink(_path(name))
        try:
            os.posix_fallocate(staging._descriptor, 0, HEADER_BYTES + nbytes)
        except OSError as error:
            staging.close()
            raise StoreUnavailable(
                f"{FOLDER} has no room for {nbytes >> 20} MiB of staging memory: give it more (docker run --shm-size) "
                f"or lower staging_bytes ({error.strerror})"
            ) from error
        return staging

    @classmethod
    def open_as_agent(cls, descriptor: int, nbytes: int) -> Staging:
        """Map what the parent's descriptor, which becomes this object's, leads to."""
        return cls(descriptor, nbytes)

    @classmethod
    def _open(cls, name: str, nbytes: int) -> Staging:
        if nbytes <= 0 or nbytes % mmap.PAGESIZE:
            raise ConfigError(f"staging_bytes must be a positive multiple of {mmap.PAGESIZE}, not {nbytes}")
        try:
            descriptor = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StoreUnavailable(f"cannot open {_path(name)}: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid():
                raise StoreUnavailable(f"{_path(name)} belongs to another user")
            if status.st_size not in (0, HEADER_BYTES + nbytes):
                raise StoreUnavailable(f"{_path(name)} has {status.st_size} bytes, not {HEADER_BYTES + nbytes}")
            os.ftruncate(descriptor, HEADER_BYTES + nbytes)
            os.posix_fallocate(descriptor, 0, HEADER_BYTES)  # a page that is not there kills whoever writes to it
            return cls(descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise StoreUnavailable(f"cannot map {_path(name)}: {error.strerror}") from error
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def descriptor(self) -> int:
        """Of the file; for the agent to inherit."""
        return self._descriptor

    def workers_mapped(self, count: int) -> bool:
        """Whether the workers from 0 to `count` - 1 have mapped it."""
        return self._view[_FLAGS_AT : _FLAGS_AT + count].tobytes() == b"\x01" * count

    def block(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a block, writable. Raises ValueError for one that does not lie within."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"no block of {nbytes} bytes at {offset} in {self.nbytes}")
        start = HEADER_BYTES + offset
        return self._view[start : start + nbytes]

    @property
    def epoch(self) -> int:
        """The agent changes it when what it has read may not be what its key stands for any more."""
        return int(_word.unpack_from(self._mapping, _EPOCH_AT)[0])

    def set_epoch(self, epoch: int) -> None:
        """The agent's: a new epoch. Before anything read under the new names is `Ready`."""
        _word.pack_into(self._mapping, _EPOCH_AT, epoch)

    def set_fresh_until(self, until: float) -> None:
        """The agent's: until when (CLOCK_BOOTTIME seconds) what is staged may be used; 0: not now."""
        _word.pack_into(self._mapping, _FRESH_AT, int(until * 1e9))

    def is_fresh(self, epoch: int) -> bool:
        """Whether what was staged in this epoch may be used now."""
        if epoch != self.epoch:
            return False
        fresh_until = int(_word.unpack_from(self._mapping, _FRESH_AT)[0])
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) < fresh_until

    @property
    def done_step(self) -> int:
        """The last step with copies that the first worker has done."""
        return int(_word.unpack_from(self._mapping, _DONE_AT)[0])

    def set_done_step(self, step: int) -> None:
        """The first worker's: this step is done, and so are all before it. After its results."""
        _word.pack_into(self._mapping, _DONE_AT, step)

    def set_saved(self, number: int, width: int, cost_ms: float) -> None:
        """The first worker's: an embedding is in its block."""
        _result.pack_into(self._mapping, _slot(number), number, width, cost_ms)

    def saved(self, number: int) -> tuple[int, float] | None:
        """Width and cost in ms of an embedding, once its step is done; None if it was not saved."""
        found, width, cost_ms = _result.unpack_from(self._mapping, _slot(number))
        return (width, cost_ms) if found == number else None

    def close(self) -> None:
        """Let go of the descriptor; the mapping goes with its last block. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._view.release()
            with contextlib.suppress(BufferError):
                self._mapping.close()


def _slot(number: int) -> int:
    return _RESULTS_AT + number % RESULTS * _result.size


def _path(name: str) -> str:
    return f"{FOLDER}/mmcache-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"
