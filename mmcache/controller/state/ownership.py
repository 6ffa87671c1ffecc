"""Who owns a file: a lock beside it that ends with its process, and what the owner last wrote there.

The lock is flock's, on `NAME.lock`, a file that stays. It also holds how many transactions its owner has made durable:
a database that has fewer of them has lost some, which SQLite alone cannot see (it takes a damaged or missing `-wal`
for one that ends earlier). What it says is never ahead of the database, and after a power failure may be behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

import msgspec

from mmcache.controller.state.base import StateInUse, StateUnusable

_NOTE_BYTES: Final = 256
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the owner writes into the lock file."""

    pid: int
    host: str
    lineage: str = ""
    commits: int = 0


class Ownership:
    """A lock on a path, held until `release` or the end of the process. Made by `take`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path.with_name(path.name + ".lock")
        self._descriptor = descriptor
        self._files: dict[Path, tuple[int, int]] = {}
        self.found = _read(descriptor) or Note(0, "")
        """What the owner before this one wrote last."""

    @classmethod
    def take(cls, path: Path) -> Ownership:
        """Lock a path.

        Raises:
            StateInUse: another process has it.
            StateUnusable: it cannot be locked.
        """
        lock = path.with_name(path.name + ".lock")
        try:
            descriptor = os.open(lock, _FLAGS, 0o600)
        except OSError as error:
            raise StateUnusable(
                f"{lock} cannot be opened: {error.strerror}. It must be a file that this user may write, in a directory"
                " where this user may make others"
            ) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = _read(descriptor)
                process = "another process" if owner is None else f"process {owner.pid} on {owner.host}"
                raise StateInUse(
                    f"{path} is in use by {process}. Stop that one, or give this one a file of its own; the lock ends"
                    " with the process that holds it"
                ) from error
            except OSError as error:
                raise StateUnusable(f"{lock} cannot be locked: {error.strerror}. Use a local file system") from error
            ownership = cls(path, descriptor)
            ownership.watch(lock)  # which another may have removed since it was opened
            if ownership._files[lock] != _identity(os.fstat(descriptor)):
                raise StateInUse(f"{lock} is being replaced. Try again")
            ownership.note(ownership.found.lineage, ownership.found.commits)  # for others to read who owns it
        except BaseException:
            os.close(descriptor)
            raise
        return ownership

    def watch(self, path: Path) -> None:
        """From now, whether it holds is also whether this path is the same file. Raises StateUnusable without one."""
        try:
            self._files[path] = _identity(os.stat(path, follow_symlinks=False))
        except OSError as error:
            raise StateUnusable(f"{path} is gone: {error.strerror}") from error

    def holds(self) -> bool:
        """Whether the lock is held, and all files are in their places."""
        try:
            return self._descriptor >= 0 and all(
                _identity(os.stat(path, follow_symlinks=False)) == identity for path, identity in self._files.items()
            )
        except OSError:
            return False

    def note(self, lineage: str, commits: int) -> None:
        """Write how many transactions are durable. Where that fails, less damage can be seen later, no more."""
        note = msgspec.json.encode(Note(os.getpid(), socket.gethostname()[:64], lineage, commits))
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, note.ljust(_NOTE_BYTES - 1) + b"\n", 0)

    def release(self) -> None:
        """Give it up. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _read(descriptor: int) -> Note | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, _NOTE_BYTES, 0), type=Note)
    except (OSError, ValueError, msgspec.DecodeError):
        return None
